//! The fields of a request's body that routing reads, and what an engine is asked with them.

use std::borrow::Cow;
use std::ops::Range;

use kvflash_core::text::ChatRequest;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::api::Api;
use super::body::{Body, Raw};

/// The fields that routing reads. All others are left to the engine.
#[derive(Debug, Default, Deserialize)]
#[serde(expecting = "an object")]
pub(crate) struct Envelope<'a> {
    #[serde(borrow, default)]
    pub model: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    pub messages: Option<Raw<'a>>,
    #[serde(borrow, default)]
    pub prompt: Option<Raw<'a>>,
    #[serde(borrow, default)]
    pub stream: Option<Raw<'a>>,
    #[serde(borrow, default)]
    pub tools: Option<Raw<'a>>,
    #[serde(borrow, default)]
    pub documents: Option<Raw<'a>>,
    #[serde(borrow, default)]
    pub chat_template: Option<Raw<'a>>,
    #[serde(borrow, default)]
    pub chat_template_kwargs: Option<Raw<'a>>,
    #[serde(borrow, default)]
    pub cache_salt: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    pub tool_choice: Option<Raw<'a>>,
    #[serde(borrow, default)]
    pub reasoning_effort: Option<Raw<'a>>,
    #[serde(borrow, default)]
    pub truncate_prompt_tokens: Option<Raw<'a>>,
    #[serde(borrow, default)]
    pub user: Option<Raw<'a>>,
    #[serde(borrow, default)]
    pub priority: Option<Raw<'a>>,
    #[serde(default)]
    pub add_generation_prompt: Option<bool>,
    #[serde(default)]
    pub continue_final_message: Option<bool>,
    #[serde(default)]
    pub add_special_tokens: Option<bool>,
    #[serde(borrow, default)]
    pub prompt_logprobs: Option<Raw<'a>>,
    #[serde(borrow, default)]
    pub echo: Option<Raw<'a>>,
    #[serde(borrow, default)]
    pub n: Option<Raw<'a>>,
    #[serde(borrow, default)]
    pub best_of: Option<Raw<'a>>,
    #[serde(borrow, default)]
    pub use_beam_search: Option<Raw<'a>>,
    #[serde(borrow, default)]
    pub skip_reading_prefix_cache: Option<Raw<'a>>,
    #[serde(borrow, default)]
    pub kv_transfer_params: Option<Raw<'a>>,
    #[serde(borrow, default)]
    pub nvext: Option<Raw<'a>>,
}

impl<'a> Envelope<'a> {
    /// Whether the engine uses its prefix cache, and reports that for a single prompt: not if it
    /// must compute the logprobs of the prompt, skips its cache, generates several answers or
    /// receives the blocks from elsewhere.
    pub fn reuses_prefix(&self) -> bool {
        let is_off = |raw: Option<Raw<'_>>, off: &str| {
            raw.is_none_or(|raw| raw.get() == "null" || raw.get() == off)
        };
        let switches = [
            self.prompt_logprobs,
            self.echo,
            self.use_beam_search,
            self.skip_reading_prefix_cache,
            self.kv_transfer_params,
        ];
        switches.into_iter().all(|raw| is_off(raw, "false"))
            && [self.n, self.best_of].into_iter().all(|raw| is_off(raw, "1"))
    }

    /// The fields that determine a chat's tokens; `places` of its messages, if its body was scanned
    /// for them.
    pub fn chat(&self, places: Option<&'a [Range<usize>]>) -> ChatRequest<'a> {
        ChatRequest {
            messages: self.messages.map(Raw::get),
            places,
            tools: self.tools.map(Raw::get),
            tool_choice: self.tool_choice.map(Raw::get),
            documents: self.documents.map(Raw::get),
            chat_template_kwargs: self.chat_template_kwargs.map(Raw::get),
            chat_template: self.chat_template.map(Raw::get),
            reasoning_effort: self.reasoning_effort.map(Raw::get),
            truncate_prompt_tokens: self.truncate_prompt_tokens.map(Raw::get),
            add_generation_prompt: self.add_generation_prompt,
            continue_final_message: self.continue_final_message,
            add_special_tokens: self.add_special_tokens,
        }
    }
}

/// Whether the engine uses its prefix cache for this request, and reports that for a single prompt,
/// according to its API's own fields.
pub(super) fn reuses_prefix(api: Api, body: &Body) -> bool {
    #[derive(Deserialize)]
    struct Outer<'a> {
        #[serde(borrow, default)]
        sampling_params: Option<Raw<'a>>,
        #[serde(borrow, default)]
        logprob_start_len: Option<Raw<'a>>,
    }
    #[derive(Deserialize)]
    struct Sampling<'a> {
        #[serde(borrow, default)]
        n: Option<&'a RawValue>,
        #[serde(borrow, default)]
        prompt_logprobs: Option<&'a RawValue>,
        #[serde(borrow, default)]
        skip_reading_prefix_cache: Option<&'a RawValue>,
    }
    if !matches!(api, Api::Tokens | Api::Generate) {
        return true;
    }
    let Ok(outer) = body.read::<Outer<'_>>() else { return false };
    let sampling = outer.sampling_params.map_or("{}", |raw| raw.get());
    let Ok(sampling) = serde_json::from_str::<Option<Sampling<'_>>>(sampling) else { return false };
    let is_off = |raw: Option<&RawValue>, off: &str| raw.is_none_or(|raw| raw.get() == off);
    // -1: only for the answer's tokens.
    outer.logprob_start_len.is_none_or(|start| ["-1", "null"].contains(&start.get()))
        && sampling.is_none_or(|sampling| {
            is_off(sampling.n, "1")
                && is_off(sampling.prompt_logprobs, "null")
                && (is_off(sampling.skip_reading_prefix_cache, "null")
                    || is_off(sampling.skip_reading_prefix_cache, "false"))
        })
}

/// What an engine is asked about a prompt, as JSON.
pub(crate) fn ask_body(
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_field() {
        for (body, wanted) in [
            (r#"{"model": 5}"#, "model: invalid type: integer `5`"),
            (r#"{"model": "m", "cache_salt": []}"#, "cache_salt: invalid type: sequence"),
            (r#"{"model": "a", "model": "b"}"#, "duplicate field `model`"),
        ] {
            let body = Body::parse(body.into()).unwrap();
            let error = body.read::<Envelope<'_>>().unwrap_err();
            assert_eq!(error.status.as_u16(), 400);
            assert!(error.message.contains(wanted), "{body:?}: {}", error.message);
        }
    }

    #[test]
    fn requests_that_bypass_the_cache_are_known() {
        let reuses = |more: &str| {
            let body = format!(r#"{{"model": "m"{more}}}"#);
            Body::parse(body.into()).unwrap().read::<Envelope<'_>>().unwrap().reuses_prefix()
        };
        for plain in ["", r#", "n": 1, "echo": false, "prompt_logprobs": null"#, r#", "best_of":1"#]
        {
            assert!(reuses(plain), "{plain}");
        }
        for other in [
            r#", "prompt_logprobs": 1"#,
            r#", "echo": true"#,
            r#", "n": 2"#,
            r#", "best_of": 3"#,
            r#", "use_beam_search": true"#,
            r#", "skip_reading_prefix_cache": true"#,
            r#", "kv_transfer_params": {}"#,
        ] {
            assert!(!reuses(other), "{other}");
        }
    }

    #[test]
    fn answers_that_are_no_evidence_are_known() {
        let reuses =
            |api, body: &str| reuses_prefix(api, &Body::parse(body.to_owned().into()).unwrap());
        for fine in [
            "{}",
            r#"{"sampling_params": null, "logprob_start_len": -1}"#,
            r#"{"sampling_params": {"n": 1, "prompt_logprobs": null, "skip_reading_prefix_cache": false}}"#,
        ] {
            assert!(reuses(Api::Tokens, fine) && reuses(Api::Generate, fine), "{fine}");
        }
        for other in [
            r#"{"sampling_params": {"n": 2}}"#,
            r#"{"sampling_params": [{}, {}]}"#,
            r#"{"sampling_params": {"prompt_logprobs": 1}}"#,
            r#"{"sampling_params": {"skip_reading_prefix_cache": true}}"#,
            r#"{"logprob_start_len": 0}"#,
        ] {
            assert!(!reuses(Api::Generate, other), "{other}");
            assert!(reuses(Api::Messages, other), "{other}: not its field");
        }
    }
}
