//! The generation options of an OpenAI body, for a token worker.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::api::Api;
use super::body::{Body, object};
use super::guide::{Guides, ResponseFormat};
use crate::Reject;

/// Tokens of a completion without a limit.
const COMPLETION_TOKENS: u64 = 16;
/// Maximum number of stop strings in a request, and of their length.
const MAX_STOPS: usize = 64;
const MAX_STOP_BYTES: usize = 4_096;
/// Maximum token ids that end an answer.
const MAX_STOP_TOKENS: usize = 1_024;

/// The fields that generation needs. Others do not affect a token worker.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    stream: Option<bool>,
    #[serde(deserialize_with = "object")]
    stream_options: Option<StreamOptions>,
    max_tokens: Option<u64>,
    max_completion_tokens: Option<u64>,
    min_tokens: Option<u64>,
    stop: Option<Stop>,
    stop_token_ids: Option<Vec<u32>>,
    ignore_eos: Option<bool>,
    include_stop_str_in_output: Option<bool>,
    skip_special_tokens: Option<bool>,
    n: Option<u64>,
    best_of: Option<u64>,
    use_beam_search: Option<bool>,
    echo: Option<bool>,
    suffix: Option<String>,
    logprobs: Option<Value>,
    top_logprobs: Option<Value>,
    prompt_logprobs: Option<Value>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    min_p: Option<f64>,
    top_k: Option<i64>,
    presence_penalty: Option<f64>,
    frequency_penalty: Option<f64>,
    repetition_penalty: Option<f64>,
    seed: Option<i64>,
    logit_bias: Option<Map<String, Value>>,
    #[serde(deserialize_with = "object")]
    response_format: Option<ResponseFormat>,
    structured_outputs: Option<Map<String, Value>>,
    guided_json: Option<Value>,
    guided_regex: Option<Value>,
    guided_choice: Option<Value>,
    guided_grammar: Option<Value>,
    guided_whitespace_pattern: Option<Value>,
    guided_decoding_backend: Option<Value>,
    tool_choice: Option<Value>,
    bad_words: Option<Value>,
    allowed_token_ids: Option<Value>,
    logits_processors: Option<Value>,
    #[serde(deserialize_with = "object")]
    nvext: Option<Extension>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct StreamOptions {
    include_usage: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "must be a string or a list of strings")]
enum Stop {
    One(String),
    Many(Vec<String>),
}

/// Settings that some clients put into `nvext`; those outside of it take precedence.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Extension {
    ignore_eos: Option<bool>,
    min_tokens: Option<u64>,
    top_k: Option<i64>,
    repetition_penalty: Option<f64>,
    guided_json: Option<Value>,
    guided_regex: Option<Value>,
    guided_choice: Option<Value>,
    guided_grammar: Option<Value>,
    guided_whitespace_pattern: Option<Value>,
    guided_decoding_backend: Option<Value>,
}

/// When an answer ends.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Limits {
    pub max_tokens: Option<u64>,
    pub min_tokens: u64,
    pub stop: Vec<String>,
    pub stop_token_ids: Vec<u32>,
    pub ignore_eos: bool,
    pub is_stop_included: bool,
}

/// What to generate, and in which format.
#[derive(Debug, Clone, Default)]
pub(crate) struct Generation {
    pub is_stream: bool,
    pub includes_usage: bool,
    pub keeps_special_tokens: bool,
    pub limits: Limits,
    pub sampling: Map<String, Value>,
}

/// Of these, the fields about the answer's format; the workers check the rest.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Form {
    stream: Option<bool>,
    #[serde(deserialize_with = "object")]
    stream_options: Option<StreamOptions>,
}

impl Generation {
    /// The options for workers that all take text: they read the others from the body.
    ///
    /// # Errors
    /// 400 naming the field, what is legal and what came.
    pub fn of_text(body: &Body) -> Result<Self, Reject> {
        let Form { stream, stream_options } = body.read()?;
        let includes_usage = stream_options.is_some_and(|it| it.include_usage.unwrap_or(false));
        Ok(Self { is_stream: stream.unwrap_or(false), includes_usage, ..Self::default() })
    }

    /// The options for workers of which some take tokens, with the longest `context` in tokens.
    ///
    /// # Errors
    /// The same; 400 for a prompt that leaves no room in the model's context.
    pub fn of_tokens(
        api: Api,
        body: &Body,
        prompt_tokens: u64,
        context: Option<u64>,
    ) -> Result<Self, Reject> {
        let mut read = Self::parse(api, body)?;
        read.fit(prompt_tokens, context)?;
        Ok(read)
    }

    /// Parses a body.
    ///
    /// # Errors
    /// 400 naming the field, what is legal and what came.
    pub fn parse(api: Api, body: &Body) -> Result<Self, Reject> {
        let fields: Fields = body.read()?;
        fields.refuse(api)?;
        let nvext = fields.nvext.as_ref();
        let mut sampling = Map::new();
        let mut put = |name: &str, value: Option<Value>| {
            if let Some(value) = value {
                sampling.insert(name.to_owned(), value);
            }
        };
        put("temperature", range("temperature", fields.temperature, 0.0, 100.0)?);
        put("top_p", range("top_p", fields.top_p, 0.0, 1.0)?);
        put("min_p", range("min_p", fields.min_p, 0.0, 1.0)?);
        put("presence_penalty", range("presence_penalty", fields.presence_penalty, -2.0, 2.0)?);
        put("frequency_penalty", range("frequency_penalty", fields.frequency_penalty, -2.0, 2.0)?);
        let penalty = fields.repetition_penalty.or_else(|| nvext?.repetition_penalty);
        put("repetition_penalty", range("repetition_penalty", penalty, 0.0, 100.0)?);
        put("top_k", fields.top_k.or_else(|| nvext?.top_k).map(Value::from));
        put("seed", fields.seed.map(Value::from));
        put("logit_bias", fields.logit_bias.clone().map(Value::Object));
        put("guided_decoding", fields.guides().guided_decoding()?);
        put("n", Some(json!(1)));
        let stream_options = fields.stream_options.as_ref();
        Ok(Self {
            is_stream: fields.stream.unwrap_or(false),
            includes_usage: stream_options.is_some_and(|o| o.include_usage.unwrap_or(false)),
            keeps_special_tokens: !fields.skip_special_tokens.unwrap_or(true),
            limits: fields.limits(api)?,
            sampling,
        })
    }

    /// Limits the answer to the room in the model's context.
    ///
    /// # Errors
    /// 400 for a prompt that leaves no room.
    pub fn fit(&mut self, prompt_tokens: u64, context_length: Option<u64>) -> Result<(), Reject> {
        let Some(context) = context_length else { return Ok(()) };
        if prompt_tokens >= context {
            return Err(Reject::bad_request(format!(
                "the prompt has {prompt_tokens} tokens; the model's limit for prompt and answer is {context}"
            )));
        }
        let room = context - prompt_tokens;
        let limits = &mut self.limits;
        limits.max_tokens = Some(limits.max_tokens.map_or(room, |tokens| tokens.min(room)));
        limits.min_tokens = limits.min_tokens.min(room);
        Ok(())
    }
}

/// The names of the tools that a chat's answer may call; what is no tool has none.
///
/// # Errors
/// 400 for a field that is not JSON.
pub(crate) fn tool_names(body: &Body) -> Result<Vec<String>, Reject> {
    #[derive(Deserialize)]
    struct Fields {
        #[serde(default)]
        tools: Value,
        #[serde(default)]
        tool_choice: Value,
    }
    let Fields { tools, tool_choice } = body.read()?;
    if tool_choice == "none" {
        return Ok(Vec::new());
    }
    let name = |tool: &Value| tool.pointer("/function/name")?.as_str().map(str::to_owned);
    Ok(tools.as_array().into_iter().flatten().filter_map(name).collect())
}

impl Fields {
    /// The fields that constrain the answer; those outside of `nvext` take precedence here, too.
    fn guides<'a>(&'a self) -> Guides<'a> {
        let nvext = self.nvext.as_ref();
        let either = |own: &'a Option<Value>, nested: fn(&'a Extension) -> &'a Option<Value>| {
            own.as_ref().or_else(|| nested(nvext?).as_ref())
        };
        Guides {
            response_format: self.response_format.as_ref(),
            structured_outputs: self.structured_outputs.as_ref(),
            guided: [
                ("guided_json", either(&self.guided_json, |it| &it.guided_json)),
                ("guided_regex", either(&self.guided_regex, |it| &it.guided_regex)),
                ("guided_choice", either(&self.guided_choice, |it| &it.guided_choice)),
                ("guided_grammar", either(&self.guided_grammar, |it| &it.guided_grammar)),
                (
                    "guided_whitespace_pattern",
                    either(&self.guided_whitespace_pattern, |it| &it.guided_whitespace_pattern),
                ),
                (
                    "guided_decoding_backend",
                    either(&self.guided_decoding_backend, |it| &it.guided_decoding_backend),
                ),
            ],
        }
    }

    /// Unsupported options of token workers are refused, because an answer that ignored them would
    /// be wrong.
    fn refuse(&self, api: Api) -> Result<(), Reject> {
        let is_wanted = |value: &Option<Value>| {
            value.as_ref().is_some_and(|value| *value != Value::Bool(false) && !value.is_null())
        };
        let has_any = |value: &Option<Value>| match value {
            None | Some(Value::Null) => false,
            Some(Value::Array(items)) => !items.is_empty(),
            Some(_) => true,
        };
        let must_call = |value: &Value| value == "required" || value.is_object();
        let refusals = [
            ("n", self.n.is_some_and(|n| n != 1), "only 1 answer per request"),
            ("best_of", self.best_of.is_some_and(|n| n != 1), "only 1 answer per request"),
            ("use_beam_search", self.use_beam_search == Some(true), "no beam search"),
            ("echo", self.echo == Some(true), "no echo of the prompt"),
            ("suffix", self.suffix.as_ref().is_some_and(|s| !s.is_empty()), "no suffix"),
            ("logprobs", is_wanted(&self.logprobs), "no log probabilities"),
            (
                "top_logprobs",
                // These values equal the default.
                api == Api::Chat
                    && self.top_logprobs != Some(json!(0))
                    && is_wanted(&self.top_logprobs),
                "no log probabilities",
            ),
            ("prompt_logprobs", is_wanted(&self.prompt_logprobs), "no log probabilities"),
            ("tool_choice", self.tool_choice.as_ref().is_some_and(must_call), "only auto or none"),
            ("bad_words", has_any(&self.bad_words), "no lists of banned words"),
            ("allowed_token_ids", has_any(&self.allowed_token_ids), "no lists of allowed tokens"),
            ("logits_processors", has_any(&self.logits_processors), "no logits processors"),
        ];
        match refusals.into_iter().find(|(_, is_refused, _)| *is_refused) {
            Some((field, _, what)) => {
                let came = match field {
                    "n" => format!(", got {}", self.n.unwrap_or(0)),
                    "best_of" => format!(", got {}", self.best_of.unwrap_or(0)),
                    _ => String::new(),
                };
                Err(Reject::bad_request(format!(
                    "{field}: the workers of this model support {what}{came}"
                )))
            }
            None => Ok(()),
        }
    }

    fn limits(self, api: Api) -> Result<Limits, Reject> {
        let nvext = self.nvext.as_ref();
        let named = self.max_completion_tokens.or(self.max_tokens);
        let max_tokens = match (api, named) {
            (_, Some(0)) => {
                return Err(Reject::bad_request("max_tokens: must be at least 1, got 0"));
            }
            (Api::Completions, None) => Some(COMPLETION_TOKENS),
            (_, named) => named,
        };
        let min_tokens = self.min_tokens.or_else(|| nvext?.min_tokens).unwrap_or(0);
        if max_tokens.is_some_and(|most| min_tokens > most) {
            let most = max_tokens.unwrap_or(0);
            let why = format!("min_tokens: must be at most max_tokens ({most}), got {min_tokens}");
            return Err(Reject::bad_request(why));
        }
        let ignore_eos = self.ignore_eos.or_else(|| nvext?.ignore_eos).unwrap_or(false);
        let stop = match self.stop {
            None => Vec::new(),
            Some(Stop::One(stop)) => vec![stop],
            Some(Stop::Many(stops)) => stops,
        };
        if stop.len() > MAX_STOPS {
            let why = format!("stop: at most {MAX_STOPS} strings, got {}", stop.len());
            return Err(Reject::bad_request(why));
        }
        if let Some(bad) = stop.iter().find(|stop| !(1..=MAX_STOP_BYTES).contains(&stop.len())) {
            let why =
                format!("stop: a string must have 1..={MAX_STOP_BYTES} bytes, got {}", bad.len());
            return Err(Reject::bad_request(why));
        }
        let stop_token_ids = self.stop_token_ids.unwrap_or_default();
        if stop_token_ids.len() > MAX_STOP_TOKENS {
            let why =
                format!("stop_token_ids: at most {MAX_STOP_TOKENS}, got {}", stop_token_ids.len());
            return Err(Reject::bad_request(why));
        }
        Ok(Limits {
            max_tokens,
            min_tokens,
            stop,
            stop_token_ids,
            ignore_eos,
            is_stop_included: self.include_stop_str_in_output.unwrap_or(false),
        })
    }
}

fn range(
    field: &'static str,
    value: Option<f64>,
    low: f64,
    high: f64,
) -> Result<Option<Value>, Reject> {
    match value {
        Some(value) if !(low..=high).contains(&value) => {
            Err(Reject::bad_request(format!("{field}: must be in {low}..={high}, got {value}")))
        }
        value => Ok(value.map(Value::from)),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn parse(api: Api, body: Value) -> Result<Generation, String> {
        Generation::parse(api, &Body::parse(body.to_string().into()).unwrap()).map_err(|reject| {
            assert_eq!(reject.status.as_u16(), 400);
            reject.message
        })
    }

    #[test]
    fn limits_come_from_either_name_and_fit_the_context() {
        let mut both =
            parse(Api::Chat, json!({"max_tokens": 5, "max_completion_tokens": 9})).unwrap();
        assert_eq!(both.limits.max_tokens, Some(9));
        both.fit(6, Some(10)).unwrap();
        assert_eq!(both.limits.max_tokens, Some(4));
        let error = both.fit(10, Some(10)).unwrap_err().message;
        assert!(
            error.contains("10 tokens; the model's limit for prompt and answer is 10"),
            "{error}"
        );
        let mut open = parse(Api::Chat, json!({})).unwrap();
        open.fit(6, None).unwrap();
        assert_eq!(open.limits.max_tokens, None);
        assert_eq!(parse(Api::Completions, json!({})).unwrap().limits.max_tokens, Some(16));
    }

    #[test]
    fn tools_have_names_unless_none_may_be_called() {
        let tool = |name: &str| json!({"type": "function", "function": {"name": name}});
        for (body, wanted) in [
            (json!({}), vec![]),
            (json!({"tools": [tool("f"), tool("g"), 1, {"name": "h"}]}), vec!["f", "g"]),
            (json!({"tools": [tool("f")], "tool_choice": "auto"}), vec!["f"]),
            (json!({"tools": [tool("f")], "tool_choice": "none"}), vec![]),
            (json!({"tools": "f"}), vec![]),
        ] {
            let names = tool_names(&Body::parse(body.to_string().into()).unwrap()).unwrap();
            assert_eq!(names, wanted, "{body}");
        }
    }

    #[test]
    fn every_setting_reaches_the_worker() {
        let body = json!({
            "stream": true, "stream_options": {"include_usage": true}, "stop": "a", "seed": -3,
            "stop_token_ids": [4], "min_tokens": 2, "temperature": 0.5, "top_k": -1,
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
            "nvext": {"ignore_eos": true, "top_k": 9},
        });
        let got = parse(Api::Chat, body).unwrap();
        assert!(got.is_stream && got.includes_usage && got.limits.ignore_eos);
        assert_eq!((&got.limits.stop[..], got.limits.min_tokens), (&["a".to_owned()][..], 2));
        assert_eq!(got.limits.stop_token_ids, [4]);
        let wanted = json!({
            "temperature": 0.5, "top_k": -1, "seed": -3, "n": 1,
            "guided_decoding": {"json": {"type": "object"}},
        });
        assert_eq!(Value::Object(got.sampling), wanted);
    }

    #[test]
    fn refusals_name_the_field_and_what_came() {
        for (body, wanted) in [
            (
                json!({"n": 2}),
                "n: the workers of this model support only 1 answer per request, got 2",
            ),
            (json!({"best_of": 3}), "best_of: "),
            (json!({"logprobs": true}), "logprobs: "),
            (json!({"logprobs": 0}), "logprobs: "),
            (json!({"echo": true}), "echo: "),
            (json!({"max_tokens": 0}), "max_tokens: must be at least 1, got 0"),
            (json!({"max_tokens": -1}), "max_tokens: invalid value"),
            (json!({"min_tokens": 4, "max_tokens": 3}), "at most max_tokens (3), got 4"),
            (json!({"stop": [""]}), "stop: a string must have 1..=4096 bytes, got 0"),
            (json!({"stop": 5}), "stop: must be a string or a list of strings"),
            (json!({"stop": vec!["x"; 65]}), "stop: at most 64 strings, got 65"),
            (json!({"temperature": -1}), "temperature: must be in 0..=100, got -1"),
            (json!({"response_format": {"type": "x"}}), "response_format.type"),
            (
                json!({"response_format": ["text"]}),
                "response_format: invalid type: sequence, expected an object",
            ),
            (json!({"response_format": {"type": 1}}), "response_format.type: invalid type"),
            (
                json!({"stream_options": [true]}),
                "stream_options: invalid type: sequence, expected an object",
            ),
            (json!({"nvext": []}), "nvext: invalid type: sequence, expected an object"),
            (json!({"tool_choice": "required"}), "tool_choice: "),
            (json!({"tool_choice": {"type": "function"}}), "tool_choice: "),
            (json!({"bad_words": ["x"]}), "bad_words: "),
            (json!({"allowed_token_ids": [1]}), "allowed_token_ids: "),
            (json!({"logits_processors": ["x"]}), "logits_processors: "),
        ] {
            let error = parse(Api::Completions, body.clone()).unwrap_err();
            assert!(error.contains(wanted), "{body}: {error}");
        }
        let error = parse(Api::Chat, json!({"top_logprobs": 1})).unwrap_err();
        assert!(error.contains("top_logprobs: "), "{error}");
        let fine = json!({"logprobs": false, "top_logprobs": 0, "n": 1, "echo": false, "stop": null,
                          "tool_choice": "auto", "bad_words": [], "allowed_token_ids": null});
        parse(Api::Chat, fine).unwrap();
    }
}
