//! A prompt's tokens: by the tokenizer here, or by an engine's own, for a prompt that is not too
//! long. Where they are the engines' own for sure, a request may be sent with them instead of its
//! text.

use std::sync::Arc;

use bytes::Bytes;
use kvflash_core::error::Error;
use kvflash_core::hash::engine::MediaItem;
use kvflash_core::text::{self, Effort, Tokens};
use serde::Deserialize;
use serde_json::Value;

use super::api::Api;
use super::body::{Body, Raw};
use super::call::{Call, Prompt};
use super::body::{Envelope, ask_body};
use super::lesson::Lesson;
use super::render::{has_media, render};
use crate::compute::Busy;
use crate::frontend::app::App;
use crate::frontend::engine::Field;
use crate::frontend::engine::{Engine, Pool};
use crate::frontend::forms::{Form, Forms};
use crate::frontend::runtime::spec::ModelInput;
use crate::frontend::runtime::texts::ModelText;

/// A quick try on the serving thread is worth it up to here, bytes: what is known already takes some 0.1 ms.
const LONG_TEXT_BYTES: usize = 32 * 1024;

/// The same for chats, bytes: a longer one that is known but for a little takes some 0.5 ms, and one that is not is
/// found out by a hash over it.
const LONG_CHAT_BYTES: usize = 512 * 1024;

/// A prompt as its workers will have it.
#[derive(Debug, Default)]
pub(super) struct Known {
    /// `None` where they are not needed, or cannot be known.
    pub tokens: Option<Tokens>,
    /// What stands in it beside text, ascending by place.
    pub media: Arc<[MediaItem]>,
    /// The tokens are the engines' own for sure, and may be sent instead of the text.
    pub replaceable: Option<Replaceable>,
    /// What its answer teaches, where there are no tokens.
    pub lesson: Option<Lesson>,
}

impl From<Tokens> for Known {
    fn from(tokens: Tokens) -> Self {
        Self { tokens: Some(tokens), ..Self::default() }
    }
}

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
    let text_bytes = check_length(app, call, pool).map_err(Untokenized::Refused)?;
    let is_long = call.body.bytes().len() > LONG_TEXT_BYTES;
    let bytes = call.body.bytes().len();
    let busy = |Busy| match is_strict {
        true => {
            app.refused("tokenizer");
            Untokenized::Refused(Error::Overloaded(
                "all cores are busy with tokenizing long prompts; try again".to_owned(),
            ))
        }
        false => Untokenized::Unknown("tokenizer_busy"),
    };
    let prompt = match (api, envelope.messages, envelope.prompt) {
        (Api::Chat, Some(_), _) => None,
        (Api::Chat, None, _) => return Err(refused("messages: a list of messages is required")),
        (_, _, None) => return Err(refused("prompt: is required")),
        (_, _, Some(_)) if envelope.truncate_prompt_tokens.is_some() => {
            return Err(match is_strict {
                true => {
                    refused("truncate_prompt_tokens: the workers of this model take whole prompts")
                }
                false => Untokenized::Unknown("not_text"),
            });
        }
        (_, _, Some(raw)) => {
            let parse = || Prompt::parse(raw.get());
            let parsed = match is_long {
                false => parse(),
                true => call.head.compute(app, bytes, parse).await.map_err(busy)?,
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
            call.head.compute(app, bytes, whole).await.map_err(busy)?
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
    let remote = app.parity.standings.of(&pool.name).remote;
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
    let call = app.upstream.post_json(&engine.spec, &url, body, 64 * 1024 * 1024);
    match tokio::time::timeout(app.options.tokenize_timeout, call).await {
        Err(_) => Err("tokenize_timeout"),
        Ok(Err(_)) => Err("tokenize_failed"),
        Ok(Ok((status, _))) if !status.is_success() => Err("tokenize_refused"),
        Ok(Ok((_, body))) => serde_json::from_slice::<Answer>(&body)
            .map(|answer| answer.tokens)
            .map_err(|_| "tokenize_failed"),
    }
}

/// Bodies up to this size are below every model's limit.
const SHORT_BYTES: usize = 32 * 1024;
/// Bytes of text per token of a model's limit: four times as many as English text has.
const BYTES_PER_TOKEN: u64 = 16;
/// The limit while no worker has reported its context length.
const UNKNOWN_BYTES: usize = 4 * 1024 * 1024;

/// The longest prompt for `pool` in bytes, and the reason.
fn length_limit(app: &App, pool: &Pool) -> (usize, String) {
    let given = app.options.max_prompt_bytes;
    if given > 0 {
        return (given, "--max-prompt-bytes".to_owned());
    }
    match pool.members().max_model_len() {
        None => (
            UNKNOWN_BYTES,
            "the default while no worker reports max_model_len; --max-prompt-bytes".to_owned(),
        ),
        Some(tokens) => {
            let bytes = tokens.saturating_mul(BYTES_PER_TOKEN).max(SHORT_BYTES as u64);
            let why = format!("max_model_len is {tokens}; --max-prompt-bytes");
            (usize::try_from(bytes).unwrap_or(usize::MAX), why)
        }
    }
}

/// The longest text to which this request's prompt may be rendered, in bytes.
///
/// # Errors
/// `InvalidArgument` for a prompt that is already too long, with its length and the limit.
///
/// # Cost
/// None: the weights were computed when the fields were located.
pub(super) fn check_length(app: &App, call: &Call, pool: &Pool) -> Result<usize, Error> {
    if call.body.bytes().len() <= SHORT_BYTES {
        return Ok(UNKNOWN_BYTES);
    }
    let (limit, why) = length_limit(app, pool);
    let (what, fields) = prompt_fields(call.api());
    let bytes = call.body.weight(fields);
    if bytes > limit {
        return Err(Error::invalid(format!(
            "{what} {bytes} bytes of text, which is more than {limit} bytes, the limit ({why}); a number \
             or token id counts 8"
        )));
    }
    Ok(limit)
}

/// The fields of a prompt, and their name in errors.
fn prompt_fields(api: Api) -> (&'static str, &'static [&'static str]) {
    match api {
        Api::Chat => (
            "messages: messages, tools and template arguments have",
            &["messages", "tools", "documents", "chat_template_kwargs", "tool_choice"],
        ),
        Api::Completions => ("prompt: it has", &["prompt"]),
        Api::Tokens => ("token_ids: they have", &["token_ids"]),
        Api::Generate => ("text: text and input_ids have", &["text", "input_ids"]),
        Api::Responses => {
            ("input: instructions, input and tools have", &["instructions", "input", "tools"])
        }
        Api::Messages => {
            ("messages: system, messages and tools have", &["system", "messages", "tools"])
        }
        Api::Unmatched => ("the body: it has", &[]),
    }
}

/// Fields that change what the engine does with its prompt's text, or that need the text. A request with one of them
/// goes as it came.
#[derive(Debug, Default, Deserialize)]
struct Bound<'a> {
    #[serde(borrow)]
    max_completion_tokens: Option<Raw<'a>>,
    max_tokens: Option<Raw<'a>>,
    suffix: Option<Raw<'a>>,
    prompt_embeds: Option<Raw<'a>>,
    truncation_side: Option<Raw<'a>>,
    return_token_offsets: Option<Raw<'a>>,
    input_ids: Option<Raw<'a>>,
    mm_processor_kwargs: Option<Raw<'a>>,
    media_io_kwargs: Option<Raw<'a>>,
}

/// A request to which the ids of its prompt mean the same as its text, at any engine that takes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Replaceable {
    /// Tokens that it asks for; 0 where it does not say.
    output_tokens: u64,
}

impl Replaceable {
    /// The field in which `engine` gets the `ids` of this request, if any.
    pub fn field(self, engine: &Engine, api: Api, ids: &[u32]) -> Option<Field> {
        // An engine holds a chat's text, but not its ids, to the room that is left beside the answer: where that is not
        // known to suffice, it is to say so itself.
        let needed = ids.len() as u64 + self.output_tokens.max(1);
        let fits = || engine.notes.lock().max_model_len.is_some_and(|room| needed <= room);
        let is_sent = !ids.is_empty() && (api == Api::Completions || fits());
        engine.ids.next(api).filter(|_| is_sent)
    }
}

/// Whether, and for what, the ids of a prompt mean the same as its text.
pub(super) fn replaceable(body: &Body, envelope: &Envelope<'_>) -> Option<Replaceable> {
    let bound: Bound<'_> = body.read().ok()?;
    let output = bound.max_completion_tokens.or(bound.max_tokens).filter(|raw| raw.get() != "null");
    let output_tokens = output.map_or(Some(0), |raw| raw.get().parse().ok())?;
    is_plain(&bound, envelope).then_some(Replaceable { output_tokens })
}

fn is_plain(bound: &Bound<'_>, envelope: &Envelope<'_>) -> bool {
    let is_off = |raw: &Option<Raw<'_>>| {
        raw.is_none_or(|raw| ["null", "false", "\"\""].contains(&raw.get()))
    };
    let is_plain_chat = envelope.messages.is_none()
        || (envelope.add_generation_prompt != Some(false)
            && envelope.continue_final_message != Some(true)
            && envelope.add_special_tokens.is_none()
            && envelope.tool_choice.is_none_or(|raw| raw.get() != "\"none\""));
    envelope.reuses_prefix()
        && is_plain_chat
        && [
            &envelope.truncate_prompt_tokens,
            &envelope.chat_template,
            &envelope.documents,
            &envelope.reasoning_effort,
            &bound.suffix,
            &bound.prompt_embeds,
            &bound.truncation_side,
            &bound.return_token_offsets,
            &bound.input_ids,
            &bound.mm_processor_kwargs,
            &bound.media_io_kwargs,
        ]
        .into_iter()
        .all(is_off)
}

/// Whether the engines of `pool` are known to make the same tokens of such a prompt as the tokenizer here.
pub(super) fn are_proven(app: &App, envelope: &Envelope<'_>, pool: &Pool) -> bool {
    let proven = app.parity.standings.of(&pool.name).proven;
    let least = if envelope.messages.is_some() { Form::Chat } else { Form::Text };
    if !proven.has(least) {
        return false;
    }
    let unproven = proven.others();
    let is_adapter = envelope.model.as_deref().is_some_and(|name| name != pool.name);
    Forms::of(envelope, is_adapter, unproven).is_empty()
}

/// The request with `ids` in `field`; everything else stands as it came.
pub(super) fn body_with(body: &Body, field: Field, ids: &[u32]) -> Bytes {
    // A token is up to six digits and a comma, mostly.
    let mut json = Vec::with_capacity(7 * ids.len() + 32);
    if field == Field::KvTransferParams {
        json.extend_from_slice(b"{\"prompt_token_ids\":");
    }
    serde_json::to_writer(&mut json, ids).expect("numbers are JSON, and memory takes them");
    match field {
        Field::Prompt => body.with_json("prompt", &json),
        Field::InputIds => body.with_json("input_ids", &json),
        Field::KvTransferParams => {
            json.push(b'}');
            body.with_json("kv_transfer_params", &json)
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
