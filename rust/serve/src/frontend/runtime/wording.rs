//! OpenAI's JSON for an answer: whole, or as the events of a stream.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::message::{Message, NamedCall, Part};
use super::writing::Ending;
use crate::gateway::api::Api;

/// The end of every stream.
pub(crate) const DONE: &str = "data: [DONE]\n\n";

/// Token counts of an answer.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Usage {
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    pub cached_tokens: Option<u64>,
}

impl Usage {
    pub fn json(self) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details":
                self.cached_tokens.map(|tokens| json!({ "cached_tokens": tokens })),
        })
    }
}

/// The words around an answer's text: a chat's, or for every other API a completion's.
#[derive(Debug)]
pub(crate) struct Wording {
    api: Api,
    id: String,
    model: String,
    created_s: u64,
    /// What every event of the stream begins with, up to its choices.
    prefix: String,
}

impl Wording {
    pub fn new(api: Api, request_id: &str, model: &str) -> Self {
        let (kind, object) = match api {
            Api::Chat => ("chatcmpl", "chat.completion.chunk"),
            _ => ("cmpl", "text_completion"),
        };
        let id = format!("{kind}-{request_id}");
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let created_s = since.map_or(0, |time| time.as_secs());
        let head =
            json!({ "id": id, "object": object, "created": created_s, "model": model }).to_string();
        let prefix = format!("data: {},\"choices\":", head.trim_end_matches('}'));
        Self { api, id, model: model.to_owned(), created_s, prefix }
    }

    /// The event that opens a chat's stream; completions have none.
    pub fn opening(&self, out: &mut String) {
        if self.api == Api::Chat {
            let delta = json!({ "role": "assistant", "content": "" });
            self.event(out, &json!([{ "index": 0, "delta": delta, "finish_reason": null }]));
        }
    }

    /// The event of a piece of text.
    pub fn piece(&self, text: &str, out: &mut String) {
        let text = Value::from(text);
        out.push_str(&self.prefix);
        // Written by hand: this is what is written for every token of every answer.
        let (before, after) = match self.api {
            Api::Chat => {
                ("[{\"index\":0,\"delta\":{\"content\":", "},\"finish_reason\":null}]}\n\n")
            }
            _ => ("[{\"index\":0,\"text\":", ",\"finish_reason\":null}]}\n\n"),
        };
        out.push_str(before);
        out.push_str(&text.to_string());
        out.push_str(after);
    }

    /// The event of a part of a chat's message.
    pub fn part(&self, part: &Part, out: &mut String) {
        let delta = match part {
            Part::Content(text) => return self.piece(text, out),
            Part::Reasoning(text) => json!({ "reasoning_content": text }),
            Part::Call(call) => {
                let mut told = call.json();
                told["index"] = call.index.into();
                json!({ "tool_calls": [told] })
            }
        };
        self.event(out, &json!([{ "index": 0, "delta": delta, "finish_reason": null }]));
    }

    /// A piece of text as a chunk of its own.
    pub fn chunk(&self, text: &str) -> Value {
        let choice = match self.api {
            Api::Chat => json!({ "index": 0, "delta": { "content": text } }),
            _ => json!({ "index": 0, "text": text }),
        };
        json!({
            "id": self.id, "created": self.created_s, "model": self.model, "choices": [choice]
        })
    }

    /// The events that end a stream.
    pub fn closing(&self, ending: &Ending, usage: Option<Usage>, out: &mut String) {
        let (reason, stop_reason) = (&ending.reason, &ending.stop_reason);
        let choice = match self.api {
            Api::Chat => json!({
                "index": 0, "delta": {}, "finish_reason": reason, "stop_reason": stop_reason
            }),
            _ => json!({
                "index": 0, "text": "", "finish_reason": reason, "stop_reason": stop_reason
            }),
        };
        self.event(out, &json!([choice]));
        if let Some(usage) = usage {
            out.push_str(&self.prefix);
            out.push_str(&format!("[],\"usage\":{}}}\n\n", usage.json()));
        }
        out.push_str(DONE);
    }

    fn event(&self, out: &mut String, choices: &Value) {
        out.push_str(&self.prefix);
        out.push_str(&choices.to_string());
        out.push_str("}\n\n");
    }

    /// The whole answer.
    pub fn whole(&self, message: &Message, ending: &Ending, usage: Usage) -> Value {
        let (reason, stop_reason) = (&ending.reason, &ending.stop_reason);
        let (object, choice) = match self.api {
            Api::Chat => (
                "chat.completion",
                json!({
                    "index": 0,
                    "message": told(message),
                    "logprobs": null,
                    "finish_reason": reason,
                    "stop_reason": stop_reason,
                }),
            ),
            _ => (
                "text_completion",
                json!({
                    "index": 0,
                    "text": message.content,
                    "logprobs": null,
                    "finish_reason": reason,
                    "stop_reason": stop_reason,
                }),
            ),
        };
        json!({
            "id": self.id,
            "object": object,
            "created": self.created_s,
            "model": self.model,
            "choices": [choice],
            "usage": usage.json(),
        })
    }
}

/// A chat's message. Without content beside calls or reasoning that is null.
fn told(message: &Message) -> Value {
    let Message { reasoning, content, calls } = message;
    let is_silent = content.is_empty() && !(calls.is_empty() && reasoning.is_empty());
    let content = if is_silent { Value::Null } else { json!(content) };
    let mut told = json!({ "role": "assistant", "content": content });
    if !reasoning.is_empty() {
        told["reasoning_content"] = json!(reasoning);
    }
    if !calls.is_empty() {
        told["tool_calls"] = calls.iter().map(NamedCall::json).collect();
    }
    told
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::tool_call::Call;
    use super::*;

    fn call() -> NamedCall {
        let call = Call { name: "f".into(), arguments: "{\"a\": \"\"}".into() };
        NamedCall { index: 1, id: "call_1".into(), call }
    }

    #[test]
    fn reasoning_and_calls_have_fields_of_their_own() {
        let wording = Wording::new(Api::Chat, "r", "m");
        let delta = |part: Part| -> Value {
            let mut out = String::new();
            wording.part(&part, &mut out);
            let event: Value =
                serde_json::from_str(out.trim().strip_prefix("data: ").unwrap()).unwrap();
            event["choices"][0]["delta"].clone()
        };
        let function = json!({"name": "f", "arguments": "{\"a\": \"\"}"});
        assert_eq!(delta(Part::Reasoning("a\n".into())), json!({"reasoning_content": "a\n"}));
        assert_eq!(delta(Part::Content("a\n".into())), json!({"content": "a\n"}));
        assert_eq!(
            delta(Part::Call(call())),
            json!({"tool_calls": [
                {"id": "call_1", "type": "function", "function": function, "index": 1}
            ]})
        );
        let whole = |message: Message| {
            let ending = Ending::plain("stop");
            wording.whole(&message, &ending, Usage::default())["choices"][0]["message"].clone()
        };
        let mut message = Message::default();
        assert_eq!(whole(message), json!({"role": "assistant", "content": ""}));
        message = Message { calls: vec![call()], ..Message::default() };
        assert_eq!(
            whole(message),
            json!({"role": "assistant", "content": null, "tool_calls": [
                {"id": "call_1", "type": "function", "function": function}
            ]})
        );
        message = Message { reasoning: "r".into(), content: "c".into(), calls: vec![] };
        assert_eq!(
            whole(message),
            json!({"role": "assistant", "content": "c", "reasoning_content": "r"})
        );
    }

    #[test]
    fn every_event_is_json_of_its_own() {
        for api in [Api::Chat, Api::Completions] {
            let wording = Wording::new(api, "r", "a \"model\"}");
            let ending = Ending { reason: "stop".into(), stop_reason: Some(json!("x")) };
            let usage = Usage { prompt_tokens: 3, completion_tokens: 2, cached_tokens: Some(1) };
            let mut out = String::new();
            wording.opening(&mut out);
            wording.piece("a\n\"b\"\u{2028}\u{1f600}", &mut out);
            wording.closing(&ending, Some(usage), &mut out);
            let events: Vec<&str> = out.split_terminator("\n\n").collect();
            let (done, events) = events.split_last().unwrap();
            assert_eq!(*done, "data: [DONE]");
            let events: Vec<Value> = events
                .iter()
                .map(|event| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap())
                .collect();
            assert!(events.iter().all(|event| event["model"] == "a \"model\"}"));
            let pointer =
                if api == Api::Chat { "/choices/0/delta/content" } else { "/choices/0/text" };
            let text: String =
                events.iter().filter_map(|event| event.pointer(pointer)?.as_str()).collect();
            assert_eq!(text, "a\n\"b\"\u{2028}\u{1f600}");
            let last = events.last().unwrap();
            assert_eq!(last["choices"], json!([]));
            assert_eq!(last["usage"]["total_tokens"], 5);
            assert_eq!(last["usage"]["prompt_tokens_details"]["cached_tokens"], 1);
            assert_eq!(events[events.len() - 2]["choices"][0]["finish_reason"], "stop");
        }
    }
}
