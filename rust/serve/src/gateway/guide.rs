//! Constraints of an answer: converts the fields of requests to the one format of workers.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::Reject;

/// Keys that constrain the answer; the others only configure how.
const KINDS: [&str; 6] = ["json", "json_object", "regex", "choice", "grammar", "structural_tag"];

#[derive(Debug, Deserialize)]
pub(crate) struct ResponseFormat {
    #[serde(rename = "type")]
    kind: String,
    json_schema: Option<Value>,
}

/// The constraining fields of a request, with their values.
#[derive(Debug)]
pub(crate) struct Guides<'a> {
    pub response_format: Option<&'a ResponseFormat>,
    pub structured_outputs: Option<&'a Map<String, Value>>,
    /// `guided_json` and similar fields.
    pub guided: [(&'static str, Option<&'a Value>); 6],
}

impl Guides<'_> {
    /// In the format of the engines' guided decoding; `None` without constraints.
    ///
    /// # Errors
    /// 400 naming the field, what is legal and what came.
    pub fn guided_decoding(&self) -> Result<Option<Value>, Reject> {
        let mut guide = Map::new();
        let mut said: Vec<&'static str> = Vec::new();
        let mut put = |field: &'static str, key: &str, value: Value| {
            if KINDS.contains(&key) {
                said.push(field);
            }
            guide.insert(key.to_owned(), value);
        };
        if let Some(format) = self.response_format
            && let Some((key, value)) = format.guide()?
        {
            put("response_format", key, value);
        }
        for (key, value) in self.structured_outputs.into_iter().flatten() {
            if !value.is_null() && *value != Value::Bool(false) {
                put("structured_outputs", key, checked("structured_outputs", key, value)?);
            }
        }
        for (field, value) in self.guided {
            if let Some(value) = value.filter(|value| !value.is_null()) {
                let key = match field {
                    "guided_decoding_backend" => "backend",
                    field => field.trim_start_matches("guided_"),
                };
                put(field, key, checked(field, key, value)?);
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
mod tests {
    use super::super::api::Api;
    use super::super::body::Body;
    use super::super::generation::Generation;
    use super::*;

    fn parse(body: &Value) -> Result<Option<Value>, String> {
        let generation =
            Generation::parse(Api::Chat, &Body::parse(body.to_string().into()).unwrap());
        let mut sampling = generation.map_err(|reject| reject.message)?.sampling;
        Ok(sampling.remove("guided_decoding"))
    }

    #[test]
    fn every_way_to_say_it_reaches_the_worker() {
        let schema = json!({"type": "object"});
        for (body, wanted) in [
            (json!({"guided_json": schema}), json!({"json": schema})),
            (json!({"guided_json": schema.to_string()}), json!({"json": schema})),
            (json!({"guided_regex": "a+"}), json!({"regex": "a+"})),
            (json!({"guided_choice": ["a", "b"]}), json!({"choice": ["a", "b"]})),
            (
                json!({"guided_grammar": "g", "guided_decoding_backend": "b"}),
                json!({"grammar": "g", "backend": "b"}),
            ),
            (
                json!({"structured_outputs": {"regex": "a", "json": null, "json_object": false,
                                              "disable_any_whitespace": true}}),
                json!({"regex": "a", "disable_any_whitespace": true}),
            ),
            (json!({"nvext": {"guided_choice": ["a"]}}), json!({"choice": ["a"]})),
            (json!({"guided_regex": "a", "nvext": {"guided_regex": "b"}}), json!({"regex": "a"})),
            (
                json!({"guided_json": {}, "guided_whitespace_pattern": " ",
                       "response_format": {"type": "text"}}),
                json!({"json": {}, "whitespace_pattern": " "}),
            ),
        ] {
            assert_eq!(parse(&body).unwrap(), Some(wanted), "{body}");
        }
        let nothing = json!({"guided_json": null, "structured_outputs": {},
                             "guided_decoding_backend": "b", "response_format": {"type": "text"}});
        assert_eq!(parse(&nothing).unwrap(), None);
    }

    #[test]
    fn what_can_not_be_held_is_refused() {
        for (body, wanted) in [
            (json!({"guided_choice": "a"}), "guided_choice: choice must be a list of strings"),
            (json!({"guided_choice": []}), "guided_choice: choice must be a list of strings"),
            (
                json!({"guided_regex": 5}),
                "guided_regex: regex must be a string that is not empty, got 5",
            ),
            (json!({"guided_json": "{"}), "guided_json: json must be a JSON schema"),
            (json!({"structured_outputs": {"choice": 1}}), "structured_outputs: choice must be"),
            (
                json!({"guided_regex": "a", "guided_choice": ["a"]}),
                "an answer can have only one constraint, and guided_",
            ),
            (
                json!({"guided_json": {}, "response_format": {"type": "json_object"}}),
                "response_format: an answer can have only one constraint, and guided_json gives another",
            ),
            (json!({"structured_outputs": {"json": {}, "regex": "a"}}), "one constraint"),
        ] {
            let error = parse(&body).unwrap_err();
            assert!(error.contains(wanted), "{body}: {error}");
        }
    }
}
