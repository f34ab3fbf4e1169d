//! A prompt's tokens: by the tokenizer here, or as an engine tells them, for a prompt that is not too
//! long.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use axum::http::StatusCode;
use kvflash_core::error::Error;
use kvflash_core::hash::engine::MediaItem;
use kvflash_core::text::{self, Effort, Tokens};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::api::Api;
use super::body::{EMBEDS, Envelope, Raw, ask_body};
use super::call::{Call, Prompt};
use super::ids::{Replaceable, are_proven, replaceable};
use super::lesson::Lesson;
use crate::compute::Busy;
use crate::frontend::app::App;
use crate::frontend::engine::Pool;
use crate::frontend::forms::Forms;
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
    // Workers that take tokens have no use for a prompt of which these are not known.
    let unless = |why: &str, cause| match is_strict {
        true => refused(why),
        false => Untokenized::Unknown(cause),
    };
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
        (_, _, _) if call.body.text_of(EMBEDS).is_some_and(|json| json != "null") => {
            let why = "prompt_embeds: the workers of this model take no embeddings";
            return Err(unless(why, "not_text"));
        }
        (_, _, None) => return Err(refused("prompt: is required")),
        (_, _, Some(_)) if envelope.truncate_prompt_tokens.is_some() => {
            let why = "truncate_prompt_tokens: the workers of this model take whole prompts";
            return Err(unless(why, "not_text"));
        }
        (_, _, Some(raw)) => {
            let parse = || Prompt::parse(raw.get());
            let parsed = match is_long {
                false => parse(),
                true => call.head.compute(app, bytes, parse).await.map_err(busy)?,
            };
            match parsed.map_err(Untokenized::Refused)? {
                Prompt::Tokens(tokens) => return Ok(tokens.into()),
                Prompt::Batch => {
                    let why = "prompt: the workers of this model accept one prompt per request";
                    return Err(unless(why, "batch"));
                }
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
            let known = remote_tokens(app, envelope, pool, prompt).await;
            let known = known.map_err(Untokenized::Unknown)?;
            Ok(Known { replaceable: replaceable(&call.body, envelope), ..known })
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
        Ok(text::Prompt::Unsupported(_))
            if !is_strict && prompt.is_none() && has_media(envelope) =>
        {
            render(app, envelope, pool).await.map_err(Untokenized::Unknown)
        }
        Ok(text::Prompt::Unsupported(why)) => {
            tracing::debug!(why, "not tokenized");
            let why = format!("the prompt cannot be tokenized by the frontend: {why}");
            Err(unless(&why, "not_text"))
        }
        Ok(text::Prompt::TooLong) => {
            let why =
                format!("the prompt has more than {text_bytes} bytes of text (--max-prompt-bytes)");
            Err(unless(&why, "too_long"))
        }
        Ok(text::Prompt::Costly) => Err(Untokenized::Unknown("refused")),
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
) -> Result<Known, &'static str> {
    // What /tokenize has no field for would make other tokens than the request does.
    let is_set = |raw: Option<Raw<'_>>| raw.is_some();
    if [envelope.documents, envelope.reasoning_effort, envelope.truncate_prompt_tokens]
        .into_iter()
        .any(is_set)
    {
        return Err("not_text");
    }
    let name = envelope.model.as_deref().unwrap_or(&pool.name);
    ask(app, pool, name, TOKENIZE, ask_body(envelope, name, prompt, &[])).await
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
/// `InvalidArgument` for a prompt that is already too long, with its length and the limit; or for a
/// conversation with too many values, whose images weigh nothing.
///
/// # Cost
/// None: the weights were computed when the fields were located.
pub(super) fn check_length(app: &App, call: &Call, pool: &Pool) -> Result<usize, Error> {
    if call.body.bytes().len() <= SHORT_BYTES {
        return Ok(UNKNOWN_BYTES);
    }
    let (limit, why) = length_limit(app, pool);
    let (what, fields) = prompt_fields(call.api());
    let checked = match call.api() {
        Api::Chat => call.body.check_values(|name| fields.contains(&name)),
        // Other fields than the prompt's are read, too, to make a chat of it.
        Api::Responses | Api::Messages => call.body.check_values(|_| true),
        Api::Tokens => call.body.check_values(|name| name == "features"),
        Api::Completions | Api::Generate | Api::Unmatched => Ok(()),
    };
    checked.map_err(|reject| Error::invalid(reject.message))?;
    let bytes = call.body.weight(fields);
    if bytes > limit {
        return Err(Error::invalid(format!(
            "{what} {bytes} bytes of text, which is more than {limit} bytes, the limit ({why}); a number or token id \
             counts as 8 bytes"
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

/// Where every engine tells the tokens of text.
const TOKENIZE: &str = "/tokenize";

/// Longest answer, and longest one of a renderer: it may carry the images as tensors.
const MAX_ANSWER_BYTES: usize = 64 * 1024 * 1024;
const MAX_RENDERED_BYTES: usize = 256 * 1024 * 1024;

/// The tokens of a prompt, as `/tokenize` tells them.
#[derive(Debug, Deserialize)]
struct Told {
    tokens: Tokens,
}

/// A rendered prompt, as engines tell it and take it.
#[derive(Debug, Deserialize)]
pub(super) struct Rendered {
    token_ids: Tokens,
    features: Option<Features>,
}

#[derive(Debug, Deserialize)]
struct Features {
    /// Identities of the items, by kind.
    mm_hashes: BTreeMap<String, Vec<String>>,
    /// Their places, in the same order.
    mm_placeholders: BTreeMap<String, Vec<Place>>,
}

#[derive(Debug, Deserialize)]
struct Place {
    offset: u32,
    length: u32,
}

impl Rendered {
    /// `None` where items and places do not agree.
    pub fn known(self) -> Option<Known> {
        let mut media = Vec::new();
        if let Some(Features { mm_hashes, mut mm_placeholders }) = self.features {
            for (kind, hashes) in mm_hashes {
                let places = mm_placeholders.remove(&kind)?;
                if places.len() != hashes.len() {
                    return None;
                }
                media.extend(hashes.into_iter().zip(places).map(|(identifier, place)| {
                    let Place { offset, length } = place;
                    MediaItem { identifier, offset, length }
                }));
            }
        }
        media.sort_by_key(|item| item.offset);
        let len = self.token_ids.len() as u64;
        let is_inside = |item: &MediaItem| {
            item.length > 0 && u64::from(item.offset) + u64::from(item.length) <= len
        };
        media
            .iter()
            .all(is_inside)
            .then_some(Known { media: media.into(), ..self.token_ids.into() })
    }
}

/// Ask the least busy engine to render the chat.
///
/// # Errors
/// The cause that is counted where it can't be known.
async fn render(app: &App, envelope: &Envelope<'_>, pool: &Pool) -> Result<Known, &'static str> {
    let name = envelope.model.as_deref().unwrap_or(&pool.name);
    let more = [
        ("documents", envelope.documents.map(Raw::get)),
        ("reasoning_effort", envelope.reasoning_effort.map(Raw::get)),
        ("tool_choice", envelope.tool_choice.map(Raw::get)),
        ("truncate_prompt_tokens", envelope.truncate_prompt_tokens.map(Raw::get)),
        ("max_tokens", Some("1")),
    ];
    let body = ask_body(envelope, name, None, &more);
    ask(app, pool, name, "/v1/chat/completions/render", body).await
}

/// Ask the least busy engine that serves the model `name` for the tokens of a request at `path`.
///
/// # Errors
/// The cause that is counted where it can't be known.
pub(super) async fn ask(
    app: &App,
    pool: &Pool,
    name: &str,
    path: &'static str,
    body: Vec<u8>,
) -> Result<Known, &'static str> {
    let (most_bytes, [timeout, failed, refused]) = match path {
        TOKENIZE => (MAX_ANSWER_BYTES, ["tokenize_timeout", "tokenize_failed", "tokenize_refused"]),
        _ => (MAX_RENDERED_BYTES, ["render_timeout", "render_failed", "render_refused"]),
    };
    let engine = pool.least_busy(app.in_flight(), |one| one.serves(name)).ok_or("no_engine")?;
    if engine.lacks.lock().contains(path) {
        return Err("not_text");
    }
    let limit = app.options.tokenize_timeout;
    match app.upstream.post_json(&engine.spec, path, body, most_bytes, limit).await {
        Err(error) if error.cause == "timeout" => Err(timeout),
        Err(_) => Err(failed),
        Ok((status, _)) if path != TOKENIZE && is_absent(status) => {
            if engine.lacks.lock().insert(path) {
                tracing::info!(
                    worker = engine.id,
                    url = engine.base,
                    status = status.as_u16(),
                    path,
                    "the engine does not render such requests, so they are balanced by load (for chats, only those \
                     with images); to match them, start vLLM 0.32 or newer with --enable-scale-out"
                );
            }
            Err("not_text")
        }
        Ok((status, _)) if !status.is_success() => Err(refused),
        Ok((_, body)) => {
            let known = match path {
                TOKENIZE => serde_json::from_slice(&body).ok().map(|told: Told| told.tokens.into()),
                _ => serde_json::from_slice(&body).ok().and_then(Rendered::known),
            };
            known.ok_or(failed)
        }
    }
}

/// Whether the engine has no such door, or has it locked.
fn is_absent(status: StatusCode) -> bool {
    [
        StatusCode::NOT_FOUND,
        StatusCode::FORBIDDEN,
        StatusCode::METHOD_NOT_ALLOWED,
        StatusCode::NOT_IMPLEMENTED,
    ]
    .contains(&status)
}

/// Whether a message has parts that are no text.
///
/// # Cost
/// A pass over the messages; images are not copied.
fn has_media(envelope: &Envelope<'_>) -> bool {
    #[derive(Deserialize)]
    struct Message<'a> {
        #[serde(borrow)]
        content: Option<&'a RawValue>,
    }
    #[derive(Deserialize)]
    struct Part<'a> {
        #[serde(borrow, rename = "type")]
        kind: Option<Cow<'a, str>>,
    }
    let messages = envelope.messages.map(|raw| serde_json::from_str::<Vec<Message<'_>>>(raw.get()));
    let Some(Ok(messages)) = messages else { return false };
    let is_media = |part: &&RawValue| {
        let kind = serde_json::from_str::<Part<'_>>(part.get()).ok().and_then(|part| part.kind);
        let kind = kind.as_deref();
        part.get().starts_with('{')
            && !matches!(kind, Some("text" | "input_text" | "output_text" | "refusal"))
    };
    messages.iter().filter_map(|message| message.content).any(|content| {
        let parts = serde_json::from_str::<Vec<&RawValue>>(content.get());
        parts.is_ok_and(|parts| parts.iter().any(is_media))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use axum::http::{HeaderMap, Uri};
    use kvflash_core::clock::ManualClock;
    use serde_json::{Value, json};

    use super::*;
    use crate::Caller;
    use crate::frontend::FrontendOptions;
    use crate::frontend::engine::EngineNotes;
    use crate::gateway::api::Row;
    use crate::gateway::body::{Body, MAX_VALUES};
    use crate::gateway::call::Head;

    fn known(features: &Value) -> Option<Known> {
        let answer =
            json!({"token_ids": [1, 2, 3, 4, 5, 6], "features": features, "request_id": "r"});
        serde_json::from_value::<Rendered>(answer).unwrap().known()
    }

    #[test]
    fn parts_that_are_no_text_are_found_in_any_message() {
        for (content, is_media) in [
            (json!("image_url"), false),
            (json!([{"type": "text", "text": "a"}, {"type": "refusal"}, "b"]), false),
            (json!([{"type": "text", "text": "a"}, {"image_url": {"url": "u"}}]), true),
            (json!([{"type": "input_audio", "input_audio": {}}]), true),
        ] {
            let messages = json!([{"role": "user"}, {"role": "user", "content": content}]);
            let messages = messages.to_string();
            let envelope = Envelope { messages: Some(Raw::of(&messages)), ..Envelope::default() };
            assert_eq!(has_media(&envelope), is_media, "{messages}");
        }
    }

    #[test]
    fn a_conversation_of_millions_of_values_is_refused_whatever_they_weigh() {
        let (catalog, clock) = (Arc::default(), Arc::new(ManualClock::default()));
        let app = App::new(FrontendOptions::default(), catalog, clock).unwrap();
        let engine = app.fleet.add("http://127.0.0.1:9".parse().unwrap()).unwrap();
        let models = vec![("m".to_owned(), None)];
        app.fleet.learned(&engine, EngineNotes { models, ..EngineNotes::default() }).unwrap();
        let pool = &app.fleet.pools()[0];
        let numbers = "0,".repeat(MAX_VALUES);
        // Engines put no text of a picture into the prompt.
        let part = format!(r#"{{"type": "text", "text": "a", "image": [{numbers}0]}}"#);
        let turn = format!(r#"[{{"role": "user", "content": [{part}]}}]"#);
        for (path, field) in [
            ("/v1/chat/completions", "messages"),
            ("/v1/messages", "messages"),
            ("/v1/messages", "chat_template_kwargs"),
            ("/v1/responses", "input"),
            ("/v1/responses", "tool_choice"),
            ("/inference/v1/generate", "features"),
        ] {
            let row = Row::of(path).unwrap();
            let body = Body::parse(format!(r#"{{"model": "m", "{field}": {turn}}}"#).into());
            let body = Arc::new(body.unwrap());
            let (uri, headers) = (Uri::from_static(row.path), HeaderMap::new());
            let head = Head { uri, headers, address: None, caller: Caller::default() };
            let envelope = body.read().unwrap();
            let call = Call::new(Some(row), head, "r".into(), &body, &envelope).unwrap();
            if prompt_fields(call.api()).1.contains(&field) {
                assert!(body.weight(&[field]) < 1_000, "{path}");
            }
            let error = check_length(&app, &call, pool).unwrap_err().to_string();
            assert!(error.contains(&format!("{field}: it has ")), "{path}: {error}");
        }
    }

    #[test]
    fn items_of_all_kinds_come_in_the_order_of_their_places() {
        let known = known(&json!({
            "mm_hashes": {"audio": ["s"], "image": ["a", "b"]},
            "mm_placeholders": {
                "image": [{"offset": 0, "length": 1}, {"offset": 4, "length": 2}],
                "audio": [{"offset": 2, "length": 1}],
            },
            "kwargs_data": {"image": [null, null], "audio": [null]},
        }));
        let Known { tokens, media, .. } = known.unwrap();
        assert_eq!(tokens.unwrap().len(), 6);
        let places: Vec<_> = media.iter().map(|item| (&*item.identifier, item.offset)).collect();
        assert_eq!(places, [("a", 0), ("s", 2), ("b", 4)]);
    }

    #[test]
    fn items_without_a_place_in_the_prompt_make_the_answer_worthless() {
        for features in [
            json!({"mm_hashes": {"image": ["a"]}, "mm_placeholders": {}}),
            json!({"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": []}}),
            json!({"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": 5, "length": 2}]}}),
        ] {
            assert!(known(&features).is_none(), "{features}");
        }
        assert!(known(&Value::Null).unwrap().media.is_empty());
    }
}
