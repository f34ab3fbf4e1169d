//! The generation options of an OpenAI body, for a token worker, constraints of the answer included.

use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::api::Api;
use super::body::{Body, object, object_or_default};
use crate::Reject;

/// Tokens of a completion without a limit.
const COMPLETION_TOKENS: u64 = 16;
/// Maximum number of stop strings in a request, and of their length.
const MAX_STOPS: usize = 64;
const MAX_STOP_BYTES: usize = 4_096;
/// Maximum token ids that end an answer.
const MAX_STOP_TOKENS: usize = 1_024;

/// Keys that constrain the answer; the others only configure how.
const KINDS: [&str; 6] = ["json", "json_object", "regex", "choice", "grammar", "structural_tag"];

/// Fields that are read as a prompt, which has a limit of its own.
const OF_PROMPT: [&str; 2] = ["messages", "prompt"];

/// Fields with which a request wants more than these workers do, the values with which it does not,
/// and what they support.
const UNSUPPORTED: [(&str, &[&str], &str); 12] = [
    ("n", &["null", "1"], "only 1 answer per request"),
    ("best_of", &["null", "1"], "only 1 answer per request"),
    ("use_beam_search", &["null", "false"], "no beam search"),
    ("echo", &["null", "false"], "no echo of the prompt"),
    ("suffix", &["null", "\"\""], "no suffix"),
    ("logprobs", &["null", "false"], "no log probabilities"),
    ("top_logprobs", &["null", "false", "0"], "no log probabilities"),
    ("prompt_logprobs", &["null", "false"], "no log probabilities"),
    ("tool_choice", &["null", "\"auto\"", "\"none\""], "only auto or none"),
    ("bad_words", &["null", "[]"], "no lists of banned words"),
    ("allowed_token_ids", &["null", "[]"], "no lists of allowed tokens"),
    ("logits_processors", &["null", "[]"], "no logits processors"),
];

/// Further constraints of an answer by vLLM's names, with the key of each in the workers' format.
const GUIDED: [(&str, &str); 6] = [
    ("guided_json", "json"),
    ("guided_regex", "regex"),
    ("guided_choice", "choice"),
    ("guided_grammar", "grammar"),
    ("guided_whitespace_pattern", "whitespace_pattern"),
    ("guided_decoding_backend", "backend"),
];

/// The fields that generation needs. Others do not affect a token worker.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    stream: Option<bool>,
    #[serde(deserialize_with = "object_or_default")]
    stream_options: StreamOptions,
    max_tokens: Option<u64>,
    max_completion_tokens: Option<u64>,
    min_tokens: Option<u64>,
    stop: Option<Stop>,
    stop_token_ids: Option<Vec<u32>>,
    ignore_eos: Option<bool>,
    include_stop_str_in_output: Option<bool>,
    skip_special_tokens: Option<bool>,
    parallel_tool_calls: Option<bool>,
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
    #[serde(deserialize_with = "object_or_default")]
    nvext: Extension,
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
}

#[derive(Debug, Deserialize)]
struct ResponseFormat {
    #[serde(rename = "type")]
    kind: String,
    json_schema: Option<Value>,
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
    /// The answer calls one tool at most.
    pub has_one_call: bool,
    pub limits: Limits,
    pub sampling: Map<String, Value>,
}

/// Of these, the fields about the answer's format; the workers check the rest.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Form {
    stream: Option<bool>,
    #[serde(deserialize_with = "object_or_default")]
    stream_options: StreamOptions,
}

impl Generation {
    /// The options for workers that all take text: they read the others from the body.
    ///
    /// # Errors
    /// 400 naming the field, what is legal and what came.
    pub fn of_text(body: &Body) -> Result<Self, Reject> {
        // All of it is rewritten for them.
        body.check_values(|_| true)?;
        let Form { stream, stream_options } = body.read()?;
        let includes_usage = stream_options.include_usage.unwrap_or(false);
        Ok(Self { is_stream: stream.unwrap_or(false), includes_usage, ..Self::default() })
    }

    /// The options for workers of which some take tokens.
    ///
    /// # Errors
    /// 400 naming the field, what is legal and what came.
    pub fn parse(api: Api, body: &Body) -> Result<Self, Reject> {
        body.check_values(|name| !OF_PROMPT.contains(&name))?;
        let fields: Fields = body.read()?;
        refuse(api, body)?;
        let nvext = &fields.nvext;
        let mut sampling = Map::new();
        let mut put = |name: &str, value: Option<Value>| {
            if let Some(value) = value {
                sampling.insert(name.to_owned(), value);
            }
        };
        let penalty = fields.repetition_penalty.or(nvext.repetition_penalty);
        for (name, value, low, high) in [
            ("temperature", fields.temperature, 0.0, 100.0),
            ("top_p", fields.top_p, 0.0, 1.0),
            ("min_p", fields.min_p, 0.0, 1.0),
            ("presence_penalty", fields.presence_penalty, -2.0, 2.0),
            ("frequency_penalty", fields.frequency_penalty, -2.0, 2.0),
            ("repetition_penalty", penalty, 0.0, 100.0),
        ] {
            if let Some(value) = value.filter(|value| !(low..=high).contains(value)) {
                let why = format!("{name}: must be in {low}..={high}, got {value}");
                return Err(Reject::bad_request(why));
            }
            put(name, value.map(Value::from));
        }
        put("top_k", fields.top_k.or(nvext.top_k).map(Value::from));
        put("seed", fields.seed.map(Value::from));
        put("logit_bias", fields.logit_bias.clone().map(Value::Object));
        put("guided_decoding", fields.guided_decoding(body)?);
        put("n", Some(json!(1)));
        Ok(Self {
            is_stream: fields.stream.unwrap_or(false),
            includes_usage: fields.stream_options.include_usage.unwrap_or(false),
            keeps_special_tokens: !fields.skip_special_tokens.unwrap_or(true),
            has_one_call: fields.parallel_tool_calls == Some(false),
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

/// Unsupported options of token workers are refused, because an answer that ignored them would be
/// wrong.
fn refuse(api: Api, body: &Body) -> Result<(), Reject> {
    for (field, off, what) in UNSUPPORTED {
        let json = body.text_of_one(field)?.filter(|json| !off.contains(json));
        let Some(json) = json else { continue };
        let items = json.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        let is_wanted = match field {
            _ if off.contains(&"[]") => items.is_none_or(|items| !items.trim_ascii().is_empty()),
            // Completions have no such field.
            "top_logprobs" => api == Api::Chat,
            _ => true,
        };
        if is_wanted {
            let came: String = json.chars().take(64).collect();
            return Err(Reject::bad_request(format!(
                "{field}: the workers of this model support {what}, got {came}"
            )));
        }
    }
    Ok(())
}

/// The names of the tools that a chat's answer may call; what is no tool has none.
///
/// # Errors
/// 400 for a field that is not JSON.
pub(crate) fn tool_names(body: &Body) -> Result<Vec<String>, Reject> {
    if body.value::<Value>("tool_choice")?.is_some_and(|choice| choice == "none") {
        return Ok(Vec::new());
    }
    let tools: Value = body.value("tools")?.unwrap_or_default();
    let name = |tool: &Value| tool.pointer("/function/name")?.as_str().map(str::to_owned);
    Ok(tools.as_array().into_iter().flatten().filter_map(name).collect())
}

impl Fields {
    /// The constraint of the answer, in the format of the engines' guided decoding; `None` without
    /// one.
    fn guided_decoding(&self, body: &Body) -> Result<Option<Value>, Reject> {
        let mut guide = Map::new();
        let mut said: Vec<&'static str> = Vec::new();
        let mut put = |field: &'static str, key: &str, value: Value| {
            if KINDS.contains(&key) {
                said.push(field);
            }
            guide.insert(key.to_owned(), value);
        };
        if let Some(format) = &self.response_format
            && let Some((key, value)) = format.guide()?
        {
            put("response_format", key, value);
        }
        for (key, value) in self.structured_outputs.iter().flatten() {
            if !value.is_null() && *value != Value::Bool(false) {
                put("structured_outputs", key, checked("structured_outputs", key, value)?);
            }
        }
        // As a body: only these of its fields are parsed.
        let nvext = Bytes::copy_from_slice(body.text_of("nvext").unwrap_or_default().as_bytes());
        let nvext = Body::parse(nvext).unwrap_or_else(|_| Body::opaque(Bytes::new()));
        for (field, key) in GUIDED {
            let own: Option<Value> = body.value(field)?;
            if let Some(value) = own.or(nvext.value(field)?) {
                put(field, key, checked(field, key, &value)?);
            }
        }
        match said[..] {
            [] => Ok(None),
            [_] => Ok(Some(Value::Object(guide))),
            [first, second, ..] => Err(Reject::bad_request(format!(
                "{first}: an answer can have only one constraint, and {second} gives another"
            ))),
        }
    }

    fn limits(self, api: Api) -> Result<Limits, Reject> {
        let nvext = &self.nvext;
        let named = self.max_completion_tokens.or(self.max_tokens);
        let max_tokens = match (api, named) {
            (_, Some(0)) => {
                let field = match self.max_completion_tokens {
                    Some(_) => "max_completion_tokens",
                    None => "max_tokens",
                };
                return Err(Reject::bad_request(format!("{field}: must be at least 1, got 0")));
            }
            (Api::Completions, None) => Some(COMPLETION_TOKENS),
            (_, named) => named,
        };
        let min_tokens = self.min_tokens.or(nvext.min_tokens).unwrap_or(0);
        if max_tokens.is_some_and(|most| min_tokens > most) {
            let most = max_tokens.unwrap_or(0);
            let why = format!("min_tokens: must be at most max_tokens ({most}), got {min_tokens}");
            return Err(Reject::bad_request(why));
        }
        let ignore_eos = self.ignore_eos.or(nvext.ignore_eos).unwrap_or(false);
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

impl ResponseFormat {
    fn guide(&self) -> Result<Option<(&'static str, Value)>, Reject> {
        match self.kind.as_str() {
            "text" => Ok(None),
            "json_object" => Ok(Some(("json_object", json!(true)))),
            "json_schema" => {
                let schema = self.json_schema.as_ref().and_then(|named| named.get("schema"));
                let schema = schema.ok_or_else(|| {
                    Reject::bad_request("response_format.json_schema.schema: is required")
                })?;
                Ok(Some(("json", schema.clone())))
            }
            other => Err(Reject::bad_request(format!(
                "response_format.type: must be text, json_object or json_schema, got {other:?}"
            ))),
        }
    }
}

/// The value in the format that is passed on.
fn checked(field: &'static str, key: &str, value: &Value) -> Result<Value, Reject> {
    let wrong = |legal: &str| {
        Err(Reject::bad_request(format!("{field}: {key} must be {legal}, got {value}")))
    };
    match (key, value) {
        // A schema may be given as a string.
        ("json", Value::String(text)) => match serde_json::from_str(text) {
            Ok(schema @ (Value::Object(_) | Value::Bool(_))) => Ok(schema),
            _ => wrong("a JSON schema"),
        },
        ("json", Value::Object(_) | Value::Bool(_)) => Ok(value.clone()),
        ("json", _) => wrong("a JSON schema"),
        ("choice", Value::Array(choices))
            if !choices.is_empty() && choices.iter().all(Value::is_string) =>
        {
            Ok(value.clone())
        }
        ("choice", _) => wrong("a list of strings that is not empty"),
        ("regex" | "grammar", Value::String(text)) if !text.is_empty() => Ok(value.clone()),
        ("regex" | "grammar", _) => wrong("a string that is not empty"),
        _ => Ok(value.clone()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
