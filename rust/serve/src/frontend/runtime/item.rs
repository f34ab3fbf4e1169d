//! What a token worker says: one item of its answer.

use rmpv::Value;
use serde::Deserialize;

use super::plane::{Cause, PlaneError};

/// One item. Fields that are not named here are not read.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Item {
    token_ids: Option<Vec<u32>>,
    finish_reason: Option<Value>,
    pub text: Option<String>,
    pub stop_reason: Option<serde_json::Value>,
    disaggregated_params: Option<Value>,
    kv_transfer_params: Option<Value>,
    completion_usage: Option<CompletionUsage>,
    error: Option<Value>,
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

/// Why an answer is over, as the worker says.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    Stop,
    Length,
    Other(String),
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

    /// Says that the answer is over, and why.
    pub fn finish(&self) -> Option<Finish> {
        let word = self.finish_reason.as_ref()?.as_str()?;
        Some(match word {
            "stop" | "eos" => Finish::Stop,
            "length" => Finish::Length,
            other => Finish::Other(other.to_owned()),
        })
    }

    /// `cancelled` and `error` are no ends of an answer but the lack of one.
    fn failure(&self) -> Option<String> {
        let said = || {
            let told = self.error.as_ref().map(words).or_else(|| self.text.clone());
            told.unwrap_or_else(|| "the worker gave no reason".to_owned())
        };
        match &self.finish_reason {
            Some(Value::String(word)) => match word.as_str() {
                Some("cancelled") => Some(format!("cancelled by the worker: {}", said())),
                Some("error") => Some(said()),
                Some(word) => word.strip_prefix("error:").map(|rest| rest.trim().to_owned()),
                None => None,
            },
            Some(Value::Map(fields)) => {
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
    pub fn into_transfer(self) -> Option<Value> {
        self.disaggregated_params.filter(|value| !value.is_nil()).or_else(|| {
            let params = self.kv_transfer_params.filter(|value| !value.is_nil())?;
            Some(Value::Map(vec![("kv_transfer_params".into(), params)]))
        })
    }
}

/// A text without its quotes, anything else as it is written.
fn words(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(item: serde_json::Value) -> Result<Item, PlaneError> {
        Item::parse(&rmp_serde::to_vec_named(&item).unwrap())
    }

    #[test]
    fn an_item_is_read_whatever_else_it_has() {
        let item = parse(json!({
            "token_ids": [1, 2], "finish_reason": "eos", "later": [{}],
            "completion_usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}},
        }))
        .unwrap();
        assert_eq!((item.token_ids(), item.finish()), (&[1, 2][..], Some(Finish::Stop)));
        assert_eq!((item.prompt_tokens(), item.cached_tokens()), (Some(9), Some(8)));
        let empty =
            parse(json!({"token_ids": null, "finish_reason": null, "error": null})).unwrap();
        assert!(empty.token_ids().is_empty() && empty.finish().is_none());
    }

    #[test]
    fn a_failure_within_an_item_never_vanishes() {
        for (item, wanted) in [
            (json!({"finish_reason": "error", "text": "out of memory"}), "out of memory"),
            (json!({"finish_reason": "error: no blocks"}), "no blocks"),
            (json!({"finish_reason": {"error": "bad"}}), "bad"),
            (json!({"token_ids": [], "error": "worse"}), "worse"),
            (json!({"finish_reason": "cancelled"}), "cancelled by the worker"),
        ] {
            let error = parse(item.clone()).unwrap_err();
            assert!(matches!(error.cause, Cause::Worker(_)), "{item}");
            assert!(error.message.contains(wanted), "{item}: {}", error.message);
        }
        assert_eq!(parse(json!("text")).unwrap_err().cause, Cause::Protocol);
        assert_eq!(parse(json!({"token_ids": [-1]})).unwrap_err().cause, Cause::Protocol);
    }

    #[test]
    fn transfer_parameters_come_in_two_forms() {
        let plain = parse(json!({"kv_transfer_params": {"port": 1}})).unwrap();
        let wrapped = json!({"disaggregated_params": {"kv_transfer_params": {"port": 1}}});
        assert_eq!(plain.into_transfer(), parse(wrapped).unwrap().into_transfer());
        assert!(parse(json!({"token_ids": [1]})).unwrap().into_transfer().is_none());
    }
}
