//! Prompts that are too long are refused before anything is made of them.

use kvflash_core::error::{Error, Result};
use kvflash_core::text::weigh;

use super::call::{Api, Call};
use super::envelope::Envelope;
use crate::frontend::app::App;
use crate::frontend::pool::Pool;

/// No model's limit is below what a body of so many bytes can have.
const SHORT_BYTES: usize = 32 * 1024;
/// Bytes of text for each token of a model's limit: four times what English text has.
const BYTES_PER_TOKEN: u64 = 16;
/// The limit while no worker tells how many tokens it takes.
const UNKNOWN_BYTES: usize = 4 * 1024 * 1024;

/// The longest prompt for `pool`, bytes, and why.
fn limit(app: &App, pool: &Pool) -> (usize, String) {
    let given = app.options.max_prompt_bytes;
    if given > 0 {
        return (given, "--max-prompt-bytes".to_owned());
    }
    let members = pool.members();
    let tokens = members.all().filter_map(|engine| engine.notes.lock().max_model_len).min();
    match tokens {
        None => {
            (UNKNOWN_BYTES, "while no worker tells max_model_len; --max-prompt-bytes".to_owned())
        }
        Some(tokens) => {
            let bytes = tokens.saturating_mul(BYTES_PER_TOKEN).max(SHORT_BYTES as u64);
            let why = format!("max_model_len is {tokens}; --max-prompt-bytes");
            (usize::try_from(bytes).unwrap_or(usize::MAX), why)
        }
    }
}

/// The longest text that this request's prompt may be rendered to, bytes.
///
/// # Errors
/// `InvalidArgument` for a prompt that is too long already, with its length and the limit.
///
/// # Cost
/// None for a body of up to 32 KiB; else one pass over the fields that make the prompt.
pub(super) fn check(app: &App, call: &Call, envelope: &Envelope<'_>, pool: &Pool) -> Result<usize> {
    if call.body.bytes().len() <= SHORT_BYTES {
        return Ok(UNKNOWN_BYTES);
    }
    let (limit, why) = limit(app, pool);
    let (what, bytes) = match call.api {
        Api::Chat => {
            let fields = [
                envelope.messages,
                envelope.tools,
                envelope.documents,
                envelope.chat_template_kwargs,
                envelope.tool_choice,
            ];
            let mut bytes = 0;
            for field in fields.into_iter().flatten() {
                bytes += weigh(field.get(), limit.saturating_sub(bytes));
            }
            ("messages: messages, tools and template arguments have", bytes)
        }
        Api::Completions => {
            let prompt = envelope.prompt.map_or("", |raw| raw.get());
            ("prompt: it has", weigh(prompt, limit))
        }
    };
    if bytes > limit {
        return Err(Error::invalid(format!(
            "{what} more than {limit} bytes of text, the limit ({why}); a number or token id \
             counts 8"
        )));
    }
    Ok(limit)
}
