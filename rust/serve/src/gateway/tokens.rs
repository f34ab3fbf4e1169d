//! A prompt's tokens: by the tokenizer here, or by an engine's own.

use std::sync::Arc;

use kvflash_core::error::Error;
use kvflash_core::text::{self, Effort, Tokens};
use serde_json::Value;

use super::api::Api;
use super::body::Raw;
use super::bound;
use super::call::{Call, Envelope, Prompt};
use super::ids::{are_proven, replaceable};
use super::render::{Known, ask_body, has_media, render};
use super::turn::Identity;
use crate::compute::Busy;
use crate::frontend::app::App;
use crate::frontend::corpus::Forms;
use crate::frontend::pool::Pool;
use crate::frontend::runtime::member::ModelText;
use crate::frontend::runtime::spec::ModelInput;

/// A quick try on the serving thread is worth it up to here, bytes: what is known already takes some 0.1 ms.
const LONG_TEXT_BYTES: usize = 32 * 1024;

/// The same for chats, bytes: a longer one that is known but for a little takes some 0.5 ms, and one that is not is
/// found out by a hash over it.
const LONG_CHAT_BYTES: usize = 512 * 1024;

/// Why there are no tokens.
pub(super) enum Untokenized {
    /// The request is wrong; no engine would take it either.
    Refused(Error),
    /// The request may be fine, but its tokens are not known here.
    Unknown(&'static str),
}

fn refused(why: impl Into<String>) -> Untokenized {
    Untokenized::Refused(Error::invalid(why))
}

/// The prompt of a chat or completion, as the workers of `pool` will have it. Workers that take tokens get no prompt whose tokens
/// are not known.
pub(super) async fn tokens(
    app: &App,
    call: &Call,
    api: Api,
    envelope: &Envelope<'_>,
    pool: &Pool,
) -> Result<Known, Untokenized> {
    let own = text_of_takers(pool);
    let is_strict = own.is_some();
    if !is_strict && !pool.selector.needs_tokens() && !call.nvext.is_query() {
        return Ok(Known::default());
    }
    let text_bytes = bound::check(app, call, pool).map_err(Untokenized::Refused)?;
    let is_long = call.body.bytes().len() > LONG_TEXT_BYTES;
    let bytes = call.body.bytes().len();
    let busy = |Busy| match is_strict {
        true => Untokenized::Refused(Error::Overloaded(
            "all cores are busy with tokenizing long prompts; try again".to_owned(),
        )),
        false => Untokenized::Unknown("tokenizer_busy"),
    };
    let prompt = match (api, envelope.messages, envelope.prompt) {
        (Api::Chat, Some(_), _) => None,
        (Api::Chat, None, _) => return Err(refused("messages: a list of messages is required")),
        (_, _, None) => return Err(refused("prompt: is required")),
        (_, _, Some(raw)) => {
            let parse = || Prompt::parse(raw.get());
            let parsed = match is_long {
                false => parse(),
                true => {
                    let client = call.head.client(None, &Identity::default());
                    app.compute.run(client.as_name(), bytes, parse).await.map_err(busy)?
                }
            };
            match parsed.map_err(Untokenized::Refused)? {
                Prompt::Tokens(tokens) => return Ok(tokens.into()),
                Prompt::Batch if is_strict => {
                    let why = "prompt: the workers of this model accept one prompt per request";
                    return Err(refused(why));
                }
                Prompt::Batch => return Err(Untokenized::Unknown("batch")),
                Prompt::Text(text) => Some(text),
            }
        }
    };
    let text = own.or_else(|| app.text_of(pool));
    let model = text.as_ref().map(|text| &text.model);
    let model = model.filter(|_| is_strict || !is_remote(app, envelope, pool));
    let Some(model) = model else {
        return if prompt.is_none() && has_media(envelope) {
            render(app, envelope, pool).await.map_err(Untokenized::Unknown)
        } else {
            let tokens = remote_tokens(app, envelope, pool, prompt).await;
            let replaceable = replaceable(&call.body, envelope);
            let known = |tokens: Tokens| Known { replaceable, ..tokens.into() };
            tokens.map(known).map_err(Untokenized::Unknown)
        };
    };
    let local = |effort| match &prompt {
        Some(prompt) => {
            model.text_tokens(prompt, envelope.add_special_tokens.unwrap_or(true), effort)
        }
        None => model.chat_tokens_within(&envelope.chat(call.body.messages()), effort),
    };
    let quick = match prompt.is_none() && bytes <= LONG_CHAT_BYTES || !is_long {
        true => local(Effort { text_bytes, is_quick: true }),
        false => Ok(text::Prompt::Costly),
    };
    let found = match quick {
        Ok(text::Prompt::Costly) => {
            let whole = || local(Effort { text_bytes, is_quick: false });
            let client = call.head.client(None, &Identity::default());
            app.compute.run(client.as_name(), bytes, whole).await.map_err(busy)?
        }
        found => found,
    };
    match found {
        Ok(text::Prompt::Tokens(tokens)) if is_strict && tokens.is_empty() => {
            Err(refused("the prompt is empty: it has no tokens"))
        }
        Ok(text::Prompt::Tokens(tokens)) => {
            let sends_ids = app.options.send_token_ids && are_proven(app, envelope, pool);
            // The body's fields are read for it: only where ids may go.
            let replaceable = sends_ids.then(|| replaceable(&call.body, envelope)).flatten();
            Ok(Known { replaceable, ..tokens.into() })
        }
        Ok(text::Prompt::Unsupported(why)) if is_strict => {
            Err(refused(format!("the prompt cannot be tokenized by the frontend: {why}")))
        }
        Ok(text::Prompt::Unsupported(_)) if prompt.is_none() && has_media(envelope) => {
            render(app, envelope, pool).await.map_err(Untokenized::Unknown)
        }
        Ok(text::Prompt::TooLong) if is_strict => Err(refused(format!(
            "the prompt has more than {text_bytes} bytes of text (--max-prompt-bytes)"
        ))),
        Ok(text::Prompt::TooLong) => Err(Untokenized::Unknown("too_long")),
        Ok(text::Prompt::Costly) => Err(Untokenized::Unknown("refused")),
        Ok(text::Prompt::Unsupported(why)) => {
            tracing::debug!(why, "routed without tokens");
            Err(Untokenized::Unknown("not_text"))
        }
        Err(error) if is_strict => Err(Untokenized::Refused(error)),
        // The engine has the last word on what it takes: it may know more than this template.
        // A client's mistake is no fault of the set-up: only a template that is missing is warned of.
        Err(error) => {
            tracing::debug!(%error, "could not tokenize; routed without tokens");
            let is_missing = prompt.is_none() && model.template.is_none();
            Err(Untokenized::Unknown(if is_missing { "template" } else { "refused" }))
        }
    }
}

/// The tokenizer of workers that take tokens, where the pool has any.
fn text_of_takers(pool: &Pool) -> Option<Arc<ModelText>> {
    let members = pool.members();
    let mut takers = members.all().filter_map(|engine| engine.member.as_ref());
    let taker = takers.find(|member| member.spec.card.model_input == ModelInput::Tokens);
    taker.and_then(|member| member.text.clone())
}

/// Whether the engines of `pool` make other tokens of such a request than the tokenizer here.
fn is_remote(app: &App, envelope: &Envelope<'_>, pool: &Pool) -> bool {
    let remote = app.parity.standing(&pool.name).remote;
    let is_adapter = envelope.model.as_deref().is_some_and(|name| name != pool.name);
    !remote.is_empty() && !Forms::of(envelope, is_adapter, remote).is_empty()
}

/// Ask the least busy engine for its own tokens.
async fn remote_tokens(
    app: &App,
    envelope: &Envelope<'_>,
    pool: &Pool,
    prompt: Option<String>,
) -> Result<Tokens, &'static str> {
    #[derive(serde::Deserialize)]
    struct Answer {
        tokens: Vec<u32>,
    }
    // What /tokenize has no field for would make other tokens than the request does.
    let is_set = |raw: Option<Raw<'_>>| raw.is_some();
    if [envelope.documents, envelope.reasoning_effort, envelope.truncate_prompt_tokens]
        .into_iter()
        .any(is_set)
    {
        return Err("not_text");
    }
    let name = envelope.model.as_deref().unwrap_or(&pool.name);
    let engine = pool.least_busy(app.in_flight(), |one| one.serves(name)).ok_or("no_engine")?;
    let body = ask_body(envelope, name, prompt)?;
    let body = Value::Object(body).to_string().into_bytes();
    let url = format!("{}/tokenize", engine.base);
    let call = app.upstream.post_json(&engine, &url, body, 64 * 1024 * 1024);
    match tokio::time::timeout(app.options.tokenize_timeout, call).await {
        Err(_) => Err("tokenize_timeout"),
        Ok(Err(_)) => Err("tokenize_failed"),
        Ok(Ok((status, _))) if !status.is_success() => Err("tokenize_refused"),
        Ok(Ok((_, body))) => serde_json::from_slice::<Answer>(&body)
            .map(|answer| answer.tokens)
            .map_err(|_| "tokenize_failed"),
    }
}
