//! What workers say, item by item: those of tokens, and those of text, which send OpenAI's own chunks.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::plane::{Cause, PlaneError};
use crate::gateway::api::Api;

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
            // A worker may say any number.
            "total_tokens": self.prompt_tokens.saturating_add(self.completion_tokens),
            "prompt_tokens_details":
                self.cached_tokens.map(|tokens| json!({ "cached_tokens": tokens })),
        })
    }
}

/// One item. Fields that are not named here are not read.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Item {
    token_ids: Option<Vec<u32>>,
    finish_reason: Option<rmpv::Value>,
    pub text: Option<String>,
    pub stop_reason: Option<Value>,
    disaggregated_params: Option<rmpv::Value>,
    kv_transfer_params: Option<rmpv::Value>,
    completion_usage: Option<CompletionUsage>,
    error: Option<rmpv::Value>,
}

/// The worker's own counts.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct CompletionUsage {
    prompt_tokens: Option<u64>,
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PromptDetails {
    cached_tokens: Option<u64>,
}

impl Item {
    /// Read an item.
    ///
    /// # Errors
    /// `Protocol` for what is none; `Worker` where the item says that the worker failed.
    pub fn parse(payload: &[u8]) -> Result<Self, PlaneError> {
        let item: Self = rmp_serde::from_slice(payload).map_err(|error| {
            PlaneError::new(Cause::Protocol, format!("unreadable item: {error}"))
        })?;
        match item.failure() {
            Some(message) => Err(PlaneError::new(Cause::Worker("internal".to_owned()), message)),
            None => Ok(item),
        }
    }

    pub fn token_ids(&self) -> &[u32] {
        self.token_ids.as_deref().unwrap_or_default()
    }

    /// Says that the answer is over, and why, in OpenAI's words.
    pub fn finish(&self) -> Option<&str> {
        let word = self.finish_reason.as_ref()?.as_str()?;
        Some(if word == "eos" { "stop" } else { word })
    }

    /// `cancelled` and `error` are no ends of an answer but the lack of one.
    fn failure(&self) -> Option<String> {
        let said = || {
            let told = self.error.as_ref().map(words).or_else(|| self.text.clone());
            told.unwrap_or_else(|| "the worker gave no reason".to_owned())
        };
        match &self.finish_reason {
            Some(rmpv::Value::String(word)) => match word.as_str() {
                Some("cancelled") => Some(format!("cancelled by the worker: {}", said())),
                Some("error") => Some(said()),
                Some(word) => word.strip_prefix("error:").map(|rest| rest.trim().to_owned()),
                None => None,
            },
            Some(rmpv::Value::Map(fields)) => {
                let error = fields.iter().find(|(key, _)| key.as_str() == Some("error"));
                error.map(|(_, message)| words(message))
            }
            _ => self.error.as_ref().filter(|error| !error.is_nil()).map(words),
        }
    }

    /// Tokens of the prompt that the worker did not compute anew.
    pub fn cached_tokens(&self) -> Option<u64> {
        self.completion_usage.as_ref()?.prompt_tokens_details.as_ref()?.cached_tokens
    }

    /// Tokens of the prompt as the worker counts them.
    pub fn prompt_tokens(&self) -> Option<u64> {
        self.completion_usage.as_ref()?.prompt_tokens
    }

    /// What a prefill worker hands to the decode worker.
    pub fn into_transfer(self) -> Option<rmpv::Value> {
        self.disaggregated_params.filter(|value| !value.is_nil()).or_else(|| {
            let params = self.kv_transfer_params.filter(|value| !value.is_nil())?;
            Some(rmpv::Value::Map(vec![("kv_transfer_params".into(), params)]))
        })
    }
}

/// A text without its quotes, anything else as it is written.
fn words(value: &rmpv::Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

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
pub(crate) fn parse_chunk(payload: &[u8]) -> Result<Value, PlaneError> {
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
mod tests;
