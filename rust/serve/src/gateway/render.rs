//! A chat as an engine's own renderer sees it: tokens, and which images, sounds or videos stand where.
//!
//! A tokenizer alone cannot tell two images apart. vLLM's `/v1/chat/completions/render` (with `--enable-scale-out`)
//! answers with the prompt's tokens and with the identity and place of each item.

use std::collections::BTreeMap;

use axum::http::StatusCode;
use kvflash_core::hash::engine::MediaItem;
use kvflash_core::text::Tokens;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::body::{Envelope, ask_body};
use super::tokens::Known;
use crate::frontend::app::App;
use crate::frontend::engine::Pool;

/// Longest answer: it may carry the images as tensors.
const MAX_ANSWER_BYTES: usize = 256 * 1024 * 1024;

/// A rendered prompt, as engines tell it and take it.
#[derive(Debug, Deserialize)]
pub(super) struct Answer {
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

impl Answer {
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
pub(super) async fn render(
    app: &App,
    envelope: &Envelope<'_>,
    pool: &Pool,
) -> Result<Known, &'static str> {
    let name = envelope.model.as_deref().unwrap_or(&pool.name);
    let mut body: Map<String, Value> = ask_body(envelope, name, None)?;
    for (field, raw) in [
        ("documents", envelope.documents),
        ("reasoning_effort", envelope.reasoning_effort),
        ("tool_choice", envelope.tool_choice),
        ("truncate_prompt_tokens", envelope.truncate_prompt_tokens),
    ] {
        if let Some(raw) = raw {
            body.insert(field.to_owned(), serde_json::from_str(raw.get()).map_err(|_| "not_text")?);
        }
    }
    body.insert("max_tokens".to_owned(), json!(1));
    let body = Value::Object(body).to_string().into_bytes();
    ask(app, pool, name, "/v1/chat/completions/render", body).await
}

/// Ask the least busy engine that serves the model `name` to render a request at `path`.
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
    let engine = pool.least_busy(app.in_flight(), |one| one.serves(name)).ok_or("no_engine")?;
    if engine.lacks.lock().contains(path) {
        return Err("not_text");
    }
    let url = format!("{}{path}", engine.base);
    let call = app.upstream.post_json(&engine.spec, &url, body, MAX_ANSWER_BYTES);
    match tokio::time::timeout(app.options.tokenize_timeout, call).await {
        Err(_) => Err("render_timeout"),
        Ok(Err(_)) => Err("render_failed"),
        Ok(Ok((status, _))) if is_absent(status) => {
            if engine.lacks.lock().insert(path) {
                tracing::info!(
                    worker = engine.id,
                    url = engine.base,
                    status = status.as_u16(),
                    path,
                    "the engine does not render such requests: they are balanced by load (of chats only those \
                     with images); to match them, start vLLM 0.32 or newer with --enable-scale-out"
                );
            }
            Err("not_text")
        }
        Ok(Ok((status, _))) if !status.is_success() => Err("render_refused"),
        Ok(Ok((_, body))) => {
            let answer = serde_json::from_slice::<Answer>(&body).ok();
            answer.and_then(Answer::known).ok_or("render_failed")
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
pub(crate) fn has_media(envelope: &Envelope<'_>) -> bool {
    #[derive(Deserialize)]
    struct Message {
        #[serde(default)]
        content: Value,
    }
    let messages = envelope.messages.map(|raw| serde_json::from_str::<Vec<Message>>(raw.get()));
    let Some(Ok(messages)) = messages else { return false };
    let is_media = |part: &Value| {
        let kind = part.get("type").and_then(Value::as_str);
        part.is_object() && !matches!(kind, Some("text" | "input_text" | "output_text" | "refusal"))
    };
    messages
        .iter()
        .any(|one| one.content.as_array().is_some_and(|parts| parts.iter().any(is_media)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn known(features: &Value) -> Option<Known> {
        let answer =
            json!({"token_ids": [1, 2, 3, 4, 5, 6], "features": features, "request_id": "r"});
        serde_json::from_value::<Answer>(answer).unwrap().known()
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
