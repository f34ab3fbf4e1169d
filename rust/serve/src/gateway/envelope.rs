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
    #[serde(borrow)]
    pub model: Option<Cow<'a, str>>,
    pub messages: Option<Raw<'a>>,
    pub prompt: Option<Raw<'a>>,
    pub stream: Option<Raw<'a>>,
    pub tools: Option<Raw<'a>>,
    pub documents: Option<Raw<'a>>,
    pub chat_template: Option<Raw<'a>>,
    pub chat_template_kwargs: Option<Raw<'a>>,
    pub cache_salt: Option<Cow<'a, str>>,
    pub tool_choice: Option<Raw<'a>>,
    pub reasoning_effort: Option<Raw<'a>>,
    pub truncate_prompt_tokens: Option<Raw<'a>>,
    pub user: Option<Raw<'a>>,
    pub priority: Option<Raw<'a>>,
    pub add_generation_prompt: Option<bool>,
    pub continue_final_message: Option<bool>,
    pub add_special_tokens: Option<bool>,
    pub prompt_logprobs: Option<Raw<'a>>,
    pub echo: Option<Raw<'a>>,
    pub logprobs: Option<Raw<'a>>,
    pub n: Option<Raw<'a>>,
    pub best_of: Option<Raw<'a>>,
    pub use_beam_search: Option<Raw<'a>>,
    pub skip_reading_prefix_cache: Option<Raw<'a>>,
    pub kv_transfer_params: Option<Raw<'a>>,
    pub nvext: Option<Raw<'a>>,
}

impl<'a> Envelope<'a> {
    /// Whether the engine looks the prompt up in its prefix cache: not if it must compute the
    /// logprobs of the prompt, or skips its cache.
    pub fn reads_cache(&self) -> bool {
        let is_off = |field: Option<Raw<'_>>| is_off(field.map(Raw::get), "false");
        let echoes_logprobs = !is_off(self.echo) && !is_off(self.logprobs);
        !echoes_logprobs && is_off(self.prompt_logprobs) && is_off(self.skip_reading_prefix_cache)
    }

    /// Whether the engine uses its prefix cache, and reports that for a single prompt: not if it
    /// does not read its cache, generates several answers or receives the blocks from elsewhere.
    pub fn reuses_prefix(&self) -> bool {
        let are_off = |fields: &[Option<Raw<'_>>], off: &str| {
            fields.iter().all(|field| is_off(field.map(Raw::get), off))
        };
        self.reads_cache()
            && are_off(&[self.echo, self.use_beam_search, self.kv_transfer_params], "false")
            && are_off(&[self.n, self.best_of], "1")
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

/// Whether a field's JSON is missing, null, or its value `off`.
fn is_off(json: Option<&str>, off: &str) -> bool {
    json.is_none_or(|json| json == "null" || json == off)
}

/// What the engine does with its prefix cache for a request, according to its API's own fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CacheUse {
    /// It looks the prompt up.
    pub reads: bool,
    /// It reports the outcome for a single prompt.
    pub reports: bool,
}

/// See [`CacheUse`]; a body that can't be read counts as one that does neither.
pub(super) fn cache_use(api: Api, body: &Body) -> CacheUse {
    #[derive(Deserialize)]
    struct Outer<'a> {
        #[serde(borrow)]
        sampling_params: Option<Raw<'a>>,
        logprob_start_len: Option<Raw<'a>>,
    }
    #[derive(Deserialize)]
    struct Sampling<'a> {
        #[serde(borrow)]
        n: Option<&'a RawValue>,
        prompt_logprobs: Option<&'a RawValue>,
        skip_reading_prefix_cache: Option<&'a RawValue>,
    }
    if !matches!(api, Api::Tokens | Api::Generate) {
        return CacheUse { reads: true, reports: true };
    }
    let neither = CacheUse { reads: false, reports: false };
    let Ok(outer) = body.read::<Outer<'_>>() else { return neither };
    let sampling = outer.sampling_params.map_or("{}", |raw| raw.get());
    let Ok(sampling) = serde_json::from_str::<Option<Sampling<'_>>>(sampling) else {
        return neither;
    };
    // -1: only for the answer's tokens.
    let is_answer_only = is_off(outer.logprob_start_len.map(Raw::get), "-1");
    let (n, logprobs, skips) = sampling.map_or((None, None, None), |sampling| {
        let [n, logprobs, skips] =
            [sampling.n, sampling.prompt_logprobs, sampling.skip_reading_prefix_cache];
        (n.map(RawValue::get), logprobs.map(RawValue::get), skips.map(RawValue::get))
    });
    let reads = is_answer_only && is_off(logprobs, "null") && is_off(skips, "false");
    CacheUse { reads, reports: reads && is_off(n, "1") }
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
            (r#"{"model": 5}"#, "model: invalid type: integer `5`, expected a string"),
            (r#"{"model": "m", "cache_salt": []}"#, "cache_salt: invalid type: sequence"),
            (r#"{"model": "a", "model": "b"}"#, "duplicate field `model`"),
        ] {
            let body = Body::parse(body.into()).unwrap();
            let error = body.read::<Envelope<'_>>().unwrap_err();
            assert_eq!(error.status.as_u16(), 400);
            assert!(error.message.contains(wanted), "{body:?}: {}", error.message);
            assert!(!error.message.contains("column"), "a field's place is no place in the body");
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
    fn prompts_that_the_engine_does_not_look_up_are_known() {
        let reads = |more: &str| {
            let body = format!(r#"{{"model": "m"{more}}}"#);
            Body::parse(body.into()).unwrap().read::<Envelope<'_>>().unwrap().reads_cache()
        };
        for read in [
            "",
            r#", "echo": true"#,
            r#", "echo": true, "logprobs": null"#,
            r#", "logprobs": 1, "n": 2, "prompt_logprobs": null"#,
            r#", "skip_reading_prefix_cache": false, "kv_transfer_params": {}"#,
        ] {
            assert!(reads(read), "{read}");
        }
        for not_read in [
            r#", "prompt_logprobs": 0"#,
            r#", "echo": true, "logprobs": 0"#,
            r#", "skip_reading_prefix_cache": true"#,
        ] {
            assert!(!reads(not_read), "{not_read}");
        }
        let own =
            |body: &str| cache_use(Api::Generate, &Body::parse(body.to_owned().into()).unwrap());
        let several = own(r#"{"sampling_params": {"n": 2}}"#);
        assert_eq!(several, CacheUse { reads: true, reports: false });
        let computed = own(r#"{"sampling_params": {"prompt_logprobs": 0}}"#);
        assert_eq!(computed, CacheUse { reads: false, reports: false });
    }

    #[test]
    fn answers_that_are_no_evidence_are_known() {
        let reuses =
            |api, body: &str| cache_use(api, &Body::parse(body.to_owned().into()).unwrap()).reports;
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
