//! Answers of workers that take and give text: OpenAI's own chunks, handed on or put together.

use serde_json::{Map, Value, json};

use super::plane::{Cause, PlaneError};
use super::wording::Usage;
use crate::gateway::api::Api;

/// Puts the chunks of a stream together to a whole answer.
#[derive(Debug, Default)]
pub(crate) struct Collected {
    /// What stands beside the choices: of the first chunk its id, created and model, else what came last.
    head: Map<String, Value>,
    choices: Vec<Value>,
    usage: Value,
    /// An item that was a whole answer already.
    whole: Option<Value>,
}

impl Collected {
    pub fn take(&mut self, api: Api, chunk: Value) {
        let Value::Object(chunk) = chunk else { return };
        let choices = chunk.get("choices").and_then(Value::as_array);
        let is_whole = chunk.get("object") == Some(&json!("chat.completion"))
            || choices.into_iter().flatten().any(|choice| choice.get("message").is_some());
        if is_whole {
            self.whole = Some(Value::Object(chunk));
            return;
        }
        for (key, value) in chunk {
            match (key.as_str(), value) {
                (_, Value::Null) | ("object", _) => {}
                ("choices", Value::Array(choices)) => {
                    for choice in choices {
                        self.add(api, choice);
                    }
                }
                ("usage", usage) => self.usage = usage,
                ("id" | "created" | "model", value) => {
                    self.head.entry(key).or_insert(value);
                }
                (_, value) => {
                    self.head.insert(key, value);
                }
            }
        }
    }

    fn add(&mut self, api: Api, choice: Value) {
        let Value::Object(choice) = choice else { return };
        let index = choice.get("index").cloned().unwrap_or_else(|| json!(0));
        let at = self.choices.iter().position(|known| known["index"] == index);
        let at = at.unwrap_or_else(|| {
            let empty = json!({ "role": "assistant", "content": "" });
            self.choices.push(match api {
                Api::Chat => json!({ "index": index, "message": empty, "finish_reason": null }),
                _ => json!({ "index": index, "text": "", "finish_reason": null }),
            });
            self.choices.len() - 1
        });
        let known = &mut self.choices[at];
        for (key, value) in choice {
            match key.as_str() {
                "delta" => continue_with(&mut known["message"], value, "message"),
                "text" => continue_with(&mut known["text"], value, "text"),
                // Reasons and ratings are said anew each time, not in pieces.
                _ if value.is_string() => known[&key] = value,
                _ => continue_with(&mut known[&key], value, &key),
            }
        }
    }

    /// The worker has ended without a word on why: that is the end of its text, with this usage.
    pub fn close(&mut self, usage: Option<Usage>) {
        if let Some(usage) = usage.filter(|_| self.usage.is_null()) {
            self.usage = usage.json();
        }
        for choice in self.choices.iter_mut().filter(|choice| choice["finish_reason"].is_null()) {
            choice["finish_reason"] = json!("stop");
        }
    }

    /// The whole answer; `None` when nothing of one came.
    pub fn finish(self, api: Api) -> Option<Value> {
        if self.whole.is_some() || self.choices.is_empty() {
            return self.whole;
        }
        let object = match api {
            Api::Chat => "chat.completion",
            _ => "text_completion",
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
pub(crate) fn parse(payload: &[u8]) -> Result<Value, PlaneError> {
    rmp_serde::from_slice(payload)
        .map_err(|error| PlaneError::new(Cause::Protocol, format!("unreadable item: {error}")))
}

/// The failure that a worker tells of in a chunk: OpenAI's `{"error": ...}`, or an error object by itself.
pub(crate) fn failure(chunk: &Value) -> Option<PlaneError> {
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

/// Strings that name something: they come whole, and may come again.
const NAMES: [&str; 5] = ["role", "id", "type", "name", "format"];

/// Add a piece to what is known: texts and lists go on, objects key by key, tool calls by their index. Of
/// names, numbers and whatever else the last one counts.
fn continue_with(known: &mut Value, piece: Value, key: &str) {
    match (known, piece) {
        (_, Value::Null) => {}
        (Value::String(known), Value::String(more)) if NAMES.contains(&key) => {
            if !more.is_empty() {
                *known = more;
            }
        }
        (Value::String(known), Value::String(more)) => known.push_str(&more),
        (Value::Object(known), Value::Object(more)) => {
            for (key, piece) in more {
                continue_with(known.entry(&*key).or_insert(Value::Null), piece, &key);
            }
        }
        (Value::Array(calls), Value::Array(more)) if key == "tool_calls" => {
            for call in more {
                let same = |known: &&mut Value| {
                    !call["index"].is_null() && known["index"] == call["index"]
                };
                match calls.iter_mut().find(same) {
                    Some(known) => continue_with(known, call, "tool_call"),
                    None => calls.push(call),
                }
            }
        }
        (Value::Array(known), Value::Array(more)) => known.extend(more),
        (known, piece) => *known = piece,
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
    fn nothing_of_a_choice_is_lost() {
        let pieces = [
            json!({"role": "assistant", "content": "a", "audio": {"id": "au", "data": "QU"},
                   "function_call": {"name": "f", "arguments": "{\"x\":"}}),
            json!({"content": "b", "refusal": "no", "function_call": {"arguments": "1"},
                   "audio": {"data": "JD", "transcript": "hel", "expires_at": 7}}),
            json!({"function_call": {"name": "", "arguments": "}"}, "refusal": "pe",
                   "audio": {"transcript": "lo"}}),
        ];
        let mut collected = Collected::default();
        for (at, delta) in pieces.into_iter().enumerate() {
            let logprobs = json!({"content": [{"token": at, "logprob": -0.5}], "refusal": null});
            let rating = json!({"hate": {"severity": "safe"}});
            let choice = json!({"index": 0, "delta": delta, "logprobs": logprobs,
                                "finish_reason": if at == 2 { "function_call" } else { "" },
                                "content_filter_results": rating, "token_ids": [at]});
            let chunk = json!({"id": format!("i{at}"), "object": "chat.completion.chunk",
                               "system_fingerprint": "fp", "service_tier": null,
                               "choices": [choice]});
            collected.take(Api::Chat, chunk);
        }
        let answer = collected.finish(Api::Chat).unwrap();
        assert_eq!((&answer["id"], &answer["system_fingerprint"]), (&json!("i0"), &json!("fp")));
        let choice = &answer["choices"][0];
        let message = &choice["message"];
        assert_eq!(message["function_call"], json!({"name": "f", "arguments": "{\"x\":1}"}));
        let audio = json!({"id": "au", "data": "QUJD", "transcript": "hello", "expires_at": 7});
        assert_eq!((&message["audio"], &message["refusal"]), (&audio, &json!("nope")));
        let tokens: Vec<_> = choice["logprobs"]["content"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| &one["token"])
            .collect();
        assert_eq!(tokens, [0, 1, 2]);
        assert_eq!(
            (&choice["token_ids"], &choice["finish_reason"]),
            (&json!([0, 1, 2]), &json!("function_call"))
        );
    }

    #[test]
    fn completions_keep_their_log_probabilities() {
        let mut collected = Collected::default();
        for (text, offset) in [("x", 0), ("y", 1)] {
            let logprobs =
                json!({"tokens": [text], "text_offset": [offset], "top_logprobs": [{text: -0.5}]});
            let choice = json!({"index": 0, "text": text, "logprobs": logprobs});
            collected.take(Api::Completions, json!({"choices": [choice]}));
        }
        collected.close(None);
        let answer = collected.finish(Api::Completions).unwrap();
        let wanted = json!({"index": 0, "text": "xy", "finish_reason": "stop", "logprobs": {
            "tokens": ["x", "y"], "text_offset": [0, 1], "top_logprobs": [{"x": -0.5}, {"y": -0.5}]}});
        assert_eq!(answer["choices"][0], wanted);
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
