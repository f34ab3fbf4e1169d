//! A request with its prompt's token ids in it: what the frontend has tokenized, the engine need not.

use bytes::Bytes;
use serde::Deserialize;

use super::api::Api;
use super::body::{Body, Raw};
use super::call::Envelope;
use crate::frontend::app::App;
use crate::frontend::corpus::{Form, Forms};
use crate::frontend::engine::Engine;
use crate::frontend::ids::Field;
use crate::frontend::pool::Pool;

/// Fields that change what the engine does with its prompt's text, or that need the text. A request with one of them
/// goes as it came.
#[derive(Debug, Default, Deserialize)]
struct Bound<'a> {
    #[serde(borrow, default)]
    max_completion_tokens: Option<Raw<'a>>,
    #[serde(borrow, default)]
    max_tokens: Option<Raw<'a>>,
    #[serde(borrow, default)]
    suffix: Option<Raw<'a>>,
    #[serde(borrow, default)]
    prompt_embeds: Option<Raw<'a>>,
    #[serde(borrow, default)]
    truncation_side: Option<Raw<'a>>,
    #[serde(borrow, default)]
    return_token_offsets: Option<Raw<'a>>,
    #[serde(borrow, default)]
    input_ids: Option<Raw<'a>>,
    #[serde(borrow, default)]
    mm_processor_kwargs: Option<Raw<'a>>,
    #[serde(borrow, default)]
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
    let proven = app.parity.standing(&pool.name).proven;
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
mod tests {
    use super::*;

    fn body(text: &str) -> Body {
        Body::parse(Bytes::copy_from_slice(text.as_bytes())).unwrap()
    }

    #[test]
    fn ids_stand_beside_messages_and_instead_of_a_text() {
        let chat = body(r#"{"messages": [1,  2], "model":"m" }  "#);
        for (field, wanted) in [
            (
                Field::KvTransferParams,
                r#"{"messages": [1,  2], "model":"m" ,"kv_transfer_params":{"prompt_token_ids":[7,0,4294967295]}}  "#,
            ),
            (
                Field::InputIds,
                r#"{"messages": [1,  2], "model":"m" ,"input_ids":[7,0,4294967295]}  "#,
            ),
        ] {
            assert_eq!(body_with(&chat, field, &[7, 0, u32::MAX]), wanted);
        }
        let text = body(r#"{"prompt" : "a }", "model":"m"}"#);
        assert_eq!(body_with(&text, Field::Prompt, &[5]), r#"{"prompt" : [5], "model":"m"}"#);
        let null = body(r#"{"kv_transfer_params":null,"a":1}"#);
        let wanted = r#"{"kv_transfer_params":{"prompt_token_ids":[5]},"a":1}"#;
        assert_eq!(body_with(&null, Field::KvTransferParams, &[5]), wanted);
        assert_eq!(body_with(&body("{}"), Field::InputIds, &[]), r#"{"input_ids":[]}"#);
    }

    #[test]
    fn requests_that_mean_more_than_their_ids_go_as_they_came() {
        let can = |more: &str| {
            let body = body(&format!(r#"{{"model": "m", "messages": []{more}}}"#));
            replaceable(&body, &body.read().unwrap()).is_some()
        };
        for plain in [
            "",
            r#", "tools": [1], "tool_choice": "auto", "stream": true, "suffix": null"#,
            r#", "chat_template_kwargs": {}, "cache_salt": "s", "echo": false, "suffix": """#,
        ] {
            assert!(can(plain), "{plain}");
        }
        for other in [
            r#""echo": true"#,
            r#""prompt_logprobs": 0"#,
            r#""truncate_prompt_tokens": 7"#,
            r#""truncation_side": "left""#,
            r#""suffix": "x""#,
            r#""prompt_embeds": "x""#,
            r#""kv_transfer_params": {}"#,
            r#""input_ids": [1]"#,
            r#""tool_choice": "none""#,
            r#""documents": []"#,
            r#""chat_template": "x""#,
            r#""reasoning_effort": "low""#,
            r#""add_special_tokens": true"#,
            r#""add_generation_prompt": false"#,
            r#""continue_final_message": true"#,
            r#""use_beam_search": true"#,
            r#""return_token_offsets": true"#,
            r#""mm_processor_kwargs": {}"#,
        ] {
            assert!(!can(&format!(", {other}")), "{other}");
        }
        let text = r#"{"model": "m", "prompt": "x", "add_special_tokens": false}"#;
        assert!(replaceable(&body(text), &body(text).read().unwrap()).is_some());
        for (text, output_tokens) in [
            (r#"{"prompt": "x", "max_tokens": 7}"#, Some(7)),
            (r#"{"prompt": "x", "max_tokens": null}"#, Some(0)),
            (r#"{"prompt": "x", "max_tokens": 7, "max_completion_tokens": 9}"#, Some(9)),
            (r#"{"prompt": "x", "max_tokens": -7}"#, None),
        ] {
            let found = replaceable(&body(text), &body(text).read().unwrap());
            assert_eq!(found.map(|found| found.output_tokens), output_tokens, "{text}");
        }
    }
}
