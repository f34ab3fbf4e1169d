//! The tokens of a prompt for workers that take tokens: known, or the request is refused.

use kvflash_core::error::Error;
use kvflash_core::text::{self, Tokens};

use super::super::super::Reject;
use super::super::plan::Api;
use super::super::pool::Pool;
use super::super::request::{Envelope, Prompt};
use super::spec::ModelInput;

/// Text longer than this is tokenized off the reactor's turn: it may take milliseconds.
const LONG_TEXT_BYTES: usize = 64 * 1024;

/// The prompt's tokens as the model's own tokenizer makes them; `None` where no worker of the pool
/// needs them to be known here.
///
/// # Errors
/// 400 for a prompt that can't be made into tokens, and why.
pub(in super::super) fn tokens(
    pool: &Pool,
    api: Api,
    envelope: &Envelope<'_>,
    body_bytes: usize,
) -> Result<Option<Tokens>, Reject> {
    let members = pool.members();
    let taker = members
        .all()
        .filter_map(|engine| engine.member.as_ref())
        .find(|member| member.spec.card.model_input == ModelInput::Tokens);
    let Some(text) = taker.and_then(|member| member.text.as_ref()) else { return Ok(None) };
    let refused = |why: String| Reject::from(Error::invalid(why));
    let prompt = match api {
        Api::Chat => {
            if envelope.messages.is_none() {
                return Err(refused("messages: a list of messages is required".to_owned()));
            }
            None
        }
        Api::Completions => {
            let raw = envelope.prompt.ok_or_else(|| refused("prompt: is required".to_owned()))?;
            match Prompt::parse(raw)? {
                Prompt::Tokens(tokens) => return Ok(Some(tokens)),
                Prompt::Batch => {
                    let why = "prompt: the workers of this model take one prompt a request";
                    return Err(refused(why.to_owned()));
                }
                Prompt::Text(text) => Some(text),
            }
        }
    };
    let local = || match &prompt {
        Some(prompt) => text
            .model
            .completion_tokens(prompt, envelope.add_special_tokens.unwrap_or(true))
            .map(text::Prompt::Tokens),
        None => text.model.chat_tokens(&envelope.chat()),
    };
    let outcome =
        if body_bytes > LONG_TEXT_BYTES { tokio::task::block_in_place(local) } else { local() };
    match outcome? {
        text::Prompt::Tokens(tokens) if tokens.is_empty() => {
            Err(refused("the prompt is empty: it has no tokens".to_owned()))
        }
        text::Prompt::Tokens(tokens) => Ok(Some(tokens)),
        text::Prompt::Unsupported(why) => {
            Err(refused(format!("the prompt can't be made into tokens here: {why}")))
        }
    }
}
