//! A prompt's tokens: by the tokenizer here, or by an engine's own.

use std::sync::Arc;

use kvflash_core::error::Error;
use kvflash_core::hash::engine::MediaItem;
use kvflash_core::text::{self, Tokens};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::app::App;
use super::engine::Engine;
use super::plan::Api;
use super::pool::Pool;
use super::render::{has_media, render};
use super::request::{Envelope, Prompt};

/// Text longer than this is tokenized off the reactor's turn: it may take milliseconds.
const LONG_TEXT_BYTES: usize = 64 * 1024;

/// A prompt as its workers will have it.
#[derive(Debug)]
pub(super) struct Known {
    pub tokens: Tokens,
    /// What stands in it beside text, ascending by place.
    pub media: Arc<[MediaItem]>,
}

impl From<Tokens> for Known {
    fn from(tokens: Tokens) -> Self {
        Self { tokens, media: Arc::default() }
    }
}

/// Why there are no tokens.
pub(super) enum Untokenized {
    /// The request is wrong; no engine would take it either.
    Refused(Error),
    /// The request may be fine, but its tokens are not known here.
    Unknown(&'static str),
}

/// The prompt, as the workers of `pool` will have it.
pub(super) async fn tokens(
    app: &App,
    api: Api,
    envelope: &Envelope<'_>,
    pool: &Pool,
    body_bytes: usize,
) -> Result<Known, Untokenized> {
    let prompt = match api {
        Api::Chat => {
            if envelope.messages.is_none() {
                let why = "messages: a list of messages is required";
                return Err(Untokenized::Refused(Error::invalid(why)));
            }
            None
        }
        Api::Completions => {
            let Some(raw) = envelope.prompt else {
                return Err(Untokenized::Refused(Error::invalid("prompt: is required")));
            };
            match Prompt::parse(raw).map_err(Untokenized::Refused)? {
                Prompt::Tokens(tokens) => return Ok(tokens.into()),
                Prompt::Batch => return Err(Untokenized::Unknown("batch")),
                Prompt::Text(text) => Some(text),
            }
        }
    };
    match &app.text {
        Some(text) => {
            let local = || match &prompt {
                Some(prompt) => text
                    .completion_tokens(prompt, envelope.add_special_tokens.unwrap_or(true))
                    .map(text::Prompt::Tokens),
                None => text.chat_tokens(&envelope.chat()),
            };
            let outcome = if body_bytes > LONG_TEXT_BYTES {
                tokio::task::block_in_place(local)
            } else {
                local()
            };
            match outcome {
                Ok(text::Prompt::Tokens(tokens)) => Ok(tokens.into()),
                Ok(text::Prompt::Unsupported(_)) if prompt.is_none() && has_media(envelope) => {
                    render(app, envelope, pool).await.map_err(Untokenized::Unknown)
                }
                Ok(text::Prompt::Unsupported(why)) => {
                    tracing::debug!(why, "routed without tokens");
                    Err(Untokenized::Unknown("not_text"))
                }
                // The engine has the last word on what it takes: it may know more than this template.
                Err(error) => {
                    tracing::warn!(%error, "could not tokenize; routed without tokens");
                    Err(Untokenized::Unknown("template"))
                }
            }
        }
        None if prompt.is_none() && has_media(envelope) => {
            render(app, envelope, pool).await.map_err(Untokenized::Unknown)
        }
        None => remote_tokens(app, envelope, pool, prompt)
            .await
            .map(Known::from)
            .map_err(Untokenized::Unknown),
    }
}

/// Ask an engine, in turn, for its own tokens.
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
    let is_set = |raw: Option<&RawValue>| raw.is_some_and(|raw| raw.get() != "null");
    if [envelope.documents, envelope.reasoning_effort, envelope.truncate_prompt_tokens]
        .into_iter()
        .any(is_set)
    {
        return Err("not_text");
    }
    let name = envelope.model.as_deref().unwrap_or(&pool.name);
    let engine = some_engine(app, pool, name)?;
    let body = ask_body(envelope, name, prompt)?;
    let body = Value::Object(body).to_string().into_bytes();
    let url = format!("{}/tokenize", engine.base);
    let call = app.upstream.post_json(&url, body, 64 * 1024 * 1024);
    match tokio::time::timeout(app.options.tokenize_timeout, call).await {
        Err(_) => Err("tokenize_timeout"),
        Ok(Err(_)) => Err("tokenize_failed"),
        Ok(Ok((status, _))) if !status.is_success() => Err("tokenize_refused"),
        Ok(Ok((_, body))) => serde_json::from_slice::<Answer>(&body)
            .map(|answer| answer.tokens)
            .map_err(|_| "tokenize_failed"),
    }
}

/// A healthy engine that serves `name`, another one for each request.
pub(super) fn some_engine(app: &App, pool: &Pool, name: &str) -> Result<Arc<Engine>, &'static str> {
    let members = pool.members();
    let healthy: Vec<_> = members
        .all()
        .filter(|one| one.member.is_none() && one.is_healthy() && one.serves(name))
        .collect();
    let engine = healthy.get(app.in_flight() % healthy.len().max(1)).ok_or("no_engine")?;
    Ok(Arc::clone(engine))
}

/// What an engine is asked about a prompt, as JSON.
pub(super) fn ask_body(
    envelope: &Envelope<'_>,
    name: &str,
    prompt: Option<String>,
) -> Result<Map<String, Value>, &'static str> {
    let mut body = Map::new();
    let mut put = |name: &str, value| body.insert(name.to_owned(), value);
    put("model", json!(name));
    if let Some(prompt) = prompt {
        put("prompt", json!(prompt));
    }
    for (name, raw) in [
        ("messages", envelope.messages),
        ("tools", envelope.tools),
        ("chat_template", envelope.chat_template),
        ("chat_template_kwargs", envelope.chat_template_kwargs),
    ] {
        if let Some(raw) = raw {
            put(name, serde_json::from_str(raw.get()).map_err(|_| "not_text")?);
        }
    }
    for (name, flag) in [
        ("add_generation_prompt", envelope.add_generation_prompt),
        ("continue_final_message", envelope.continue_final_message),
        ("add_special_tokens", envelope.add_special_tokens),
    ] {
        if let Some(flag) = flag {
            put(name, json!(flag));
        }
    }
    Ok(body)
}
