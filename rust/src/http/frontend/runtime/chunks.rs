//! Answers of workers that take and give text: OpenAI's own chunks, handed on or put together.

use serde_json::{Map, Value, json};

use super::super::plan::Api;
use super::plane::{Cause, PlaneError};

/// Puts the chunks of a stream together to a whole answer.
#[derive(Debug, Default)]
pub(super) struct Collected {
    /// Of the first chunk: id, created, model.
    head: Map<String, Value>,
    choices: Vec<Value>,
    usage: Value,
    /// An item that was a whole answer already.
    whole: Option<Value>,
}

impl Collected {
    pub fn take(&mut self, api: Api, chunk: Value) {
        let Value::Object(chunk) = chunk else { return };
        let choices = chunk.get("choices").and_then(Value::as_array).cloned().unwrap_or_default();
        let is_whole = chunk.get("object") == Some(&json!("chat.completion"))
            || choices.iter().any(|choice| choice.get("message").is_some());
        if is_whole {
            self.whole = Some(Value::Object(chunk));
            return;
        }
        if let Some(usage) = chunk.get("usage").filter(|usage| !usage.is_null()) {
            self.usage = usage.clone();
        }
        if self.head.is_empty() {
            let named = ["id", "created", "model"];
            self.head =
                chunk.into_iter().filter(|(key, _)| named.contains(&key.as_str())).collect();
        }
        for choice in choices {
            self.add(api, &choice);
        }
    }

    fn add(&mut self, api: Api, choice: &Value) {
        let index = choice.get("index").cloned().unwrap_or_else(|| json!(0));
        let at = self.choices.iter().position(|known| known["index"] == index);
        let at = at.unwrap_or_else(|| {
            let empty = match api {
                Api::Chat => json!({ "role": "assistant", "content": "" }),
                Api::Completions => Value::Null,
            };
            self.choices.push(match api {
                Api::Chat => json!({ "index": index, "message": empty, "finish_reason": null }),
                Api::Completions => json!({ "index": index, "text": "", "finish_reason": null }),
            });
            self.choices.len() - 1
        });
        let known = &mut self.choices[at];
        match api {
            Api::Chat => {
                for (key, value) in
                    choice.get("delta").and_then(Value::as_object).into_iter().flatten()
                {
                    merge(&mut known["message"][key], value, key);
                }
            }
            Api::Completions => merge(&mut known["text"], &choice["text"], "text"),
        }
        for key in ["finish_reason", "stop_reason"] {
            if let Some(value) = choice.get(key).filter(|value| !value.is_null()) {
                known[key] = value.clone();
            }
        }
    }

    /// The whole answer; `None` when nothing of one came.
    pub fn finish(self, api: Api) -> Option<Value> {
        if self.whole.is_some() || self.choices.is_empty() {
            return self.whole;
        }
        let object = match api {
            Api::Chat => "chat.completion",
            Api::Completions => "text_completion",
        };
        let mut answer = self.head;
        answer.insert("object".to_owned(), json!(object));
        answer.insert("choices".to_owned(), Value::Array(self.choices));
        answer.insert("usage".to_owned(), self.usage);
        Some(Value::Object(answer))
    }
}

/// Read an item of a worker of text.
///
/// # Errors
/// `Protocol` for what is none.
pub(super) fn parse(payload: &[u8]) -> Result<Value, PlaneError> {
    rmp_serde::from_slice(payload).map_err(|error| {
        PlaneError::new(Cause::Protocol, format!("an item that can't be read: {error}"))
    })
}

/// The failure that a worker tells of in a chunk: OpenAI's `{"error": ...}`, or an error object by itself.
pub(super) fn failure(chunk: &Value) -> Option<PlaneError> {
    let is_bare = chunk.get("object").is_some_and(|object| object == "error");
    let error = if is_bare { Some(chunk) } else { chunk.get("error") };
    let error = error.filter(|error| !error.is_null())?;
    let said = error.get("message").and_then(Value::as_str).or_else(|| error.as_str());
    let message = said.map_or_else(|| error.to_string(), str::to_owned);
    let number = |value: &Value| value.as_u64().or_else(|| value.as_str()?.parse().ok());
    let mut named = ["code", "status"].iter().filter_map(|key| number(error.get(key)?));
    let cause = match named.find(|status| (400..600).contains(status)) {
        Some(status @ 400..500) => Cause::Refused(status as u16),
        Some(503) => Cause::Worker("overloaded".to_owned()),
        _ => Cause::Worker("internal".to_owned()),
    };
    Some(PlaneError::new(cause, message))
}

/// Texts are continued, tool calls merged by their index; anything else counts as it came last.
fn merge(known: &mut Value, value: &Value, key: &str) {
    match (known, value) {
        (_, Value::Null) => {}
        (Value::String(text), Value::String(more)) if key != "role" => text.push_str(more),
        (Value::Array(calls), Value::Array(more)) if key == "tool_calls" => {
            for call in more {
                match calls.iter_mut().find(|known| known["index"] == call["index"]) {
                    Some(known) => {
                        merge(
                            &mut known["function"]["arguments"],
                            &call["function"]["arguments"],
                            "arguments",
                        );
                    }
                    None => calls.push(call.clone()),
                }
            }
        }
        (known, value) => *known = value.clone(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_becomes_one_answer() {
        let chunk = |delta: Value, finish: Value| {
            json!({"id": "i", "created": 1, "model": "m", "object": "chat.completion.chunk",
                   "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})
        };
        let call = |arguments: &str| json!({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": arguments}}]});
        let mut collected = Collected::default();
        for (delta, finish) in [
            (json!({"role": "assistant", "content": "a"}), Value::Null),
            (json!({"content": "b"}), Value::Null),
            (call("{"), Value::Null),
            (call("}"), json!("tool_calls")),
        ] {
            collected.take(Api::Chat, chunk(delta, finish));
        }
        collected.take(Api::Chat, json!({"choices": [], "usage": {"prompt_tokens": 4}}));
        let answer = collected.finish(Api::Chat).unwrap();
        let message = &answer["choices"][0]["message"];
        assert_eq!((&answer["object"], &answer["id"]), (&json!("chat.completion"), &json!("i")));
        assert_eq!(message["content"], "ab");
        assert_eq!(message["tool_calls"][0]["function"]["arguments"], "{}");
        assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls");
        assert_eq!(answer["usage"]["prompt_tokens"], 4);
    }

    #[test]
    fn errors_among_the_chunks_keep_their_words_and_status() {
        let internal = || Cause::Worker("internal".to_owned());
        for (chunk, wanted) in [
            (json!({"error": {"message": "x", "code": 400}}), Some((Cause::Refused(400), "x"))),
            (json!({"error": {"message": "x", "code": "429"}}), Some((Cause::Refused(429), "x"))),
            (json!({"error": {"message": "x", "code": "bad_key"}}), Some((internal(), "x"))),
            (json!({"error": {"message": "x", "code": 500}}), Some((internal(), "x"))),
            (
                json!({"error": {"message": "x", "status": 503}}),
                Some((Cause::Worker("overloaded".to_owned()), "x")),
            ),
            (json!({"error": "x"}), Some((internal(), "x"))),
            (json!({"error": {"why": 1}}), Some((internal(), "{\"why\":1}"))),
            (
                json!({"object": "error", "message": "x", "code": 404}),
                Some((Cause::Refused(404), "x")),
            ),
            (json!({"error": null, "choices": []}), None),
            (json!("error"), None),
        ] {
            let got = failure(&chunk).map(|error| (error.cause, error.message));
            let wanted = wanted.map(|(cause, message)| (cause, message.to_owned()));
            assert_eq!(got, wanted, "{chunk}");
        }
    }

    #[test]
    fn completions_and_whole_answers() {
        let mut collected = Collected::default();
        for text in ["x", "y"] {
            collected.take(Api::Completions, json!({"choices": [{"index": 0, "text": text}]}));
        }
        let answer = collected.finish(Api::Completions).unwrap();
        assert_eq!(answer["choices"][0]["text"], "xy");
        let whole =
            json!({"object": "chat.completion", "choices": [{"message": {"content": "w"}}]});
        let mut collected = Collected::default();
        collected.take(Api::Chat, whole.clone());
        assert_eq!(collected.finish(Api::Chat), Some(whole));
        assert_eq!(Collected::default().finish(Api::Chat), None);
    }
}
