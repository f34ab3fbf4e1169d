//! GET and POST /busy_threshold: one manner for every service that selects workers.

use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::Reject;
use crate::select::{BusyTable, Thresholds};

const DECODE: &str = "active_decode_blocks_threshold";
const PREFILL: &str = "active_prefill_tokens_threshold";
const PREFILL_FRAC: &str = "active_prefill_tokens_threshold_frac";

/// A model's name and its table; several of one name are changed together.
pub(super) type Tables<'a> = [(&'a str, &'a BusyTable)];

/// What POST asks for. The outer `None` keeps a threshold, the inner one unsets it.
#[derive(Debug, Default, PartialEq)]
struct Change {
    model: String,
    decode: Option<Option<f64>>,
    prefill: Option<Option<u64>>,
    prefill_frac: Option<Option<f64>>,
}

impl Change {
    fn is_any(&self) -> bool {
        self.decode.is_some() || self.prefill.is_some() || self.prefill_frac.is_some()
    }

    fn apply(&self, to: Thresholds) -> Thresholds {
        Thresholds {
            active_decode_blocks: self.decode.unwrap_or(to.active_decode_blocks),
            active_prefill_tokens: self.prefill.unwrap_or(to.active_prefill_tokens),
            active_prefill_tokens_frac: self.prefill_frac.unwrap_or(to.active_prefill_tokens_frac),
        }
    }
}

/// GET: the thresholds of every model.
pub(super) fn list(tables: &Tables<'_>) -> Response {
    let mut entries: Vec<Value> = Vec::new();
    for (model, table) in tables {
        if entries.last().is_none_or(|entry| entry["model"] != *model) {
            entries.push(entry(model, table.thresholds()));
        }
    }
    reply(&json!({ "thresholds": entries }))
}

/// POST: change a model's thresholds, or with none named tell them. Absent keeps, null unsets.
///
/// # Errors
/// 400 for what is no JSON object or out of range, 404 for a model that nobody serves, 415 for another
/// content type, 422 for a field of the wrong type.
pub(super) fn change(
    headers: &HeaderMap,
    body: &[u8],
    tables: &Tables<'_>,
) -> Result<Response, Reject> {
    let kind = headers.get(header::CONTENT_TYPE).map(|value| value.as_bytes());
    if !kind.is_some_and(|kind| kind.to_ascii_lowercase().starts_with(b"application/json")) {
        return Err(Reject::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "content-type must be application/json",
        ));
    }
    let change = parse(body)?;
    let mut found = tables.iter().filter(|(model, _)| *model == change.model).peekable();
    if found.peek().is_none() {
        if !change.is_any() {
            return Ok(reply(&entry(&change.model, Thresholds::default())));
        }
        return Err(Reject::new(
            StatusCode::NOT_FOUND,
            format!(
                "Model '{}' not found. Thresholds can only be set for discovered models.",
                change.model
            ),
        ));
    }
    let mut now = Thresholds::default();
    for (_, table) in found {
        now = table.thresholds();
        if change.is_any() {
            now = change.apply(now);
            table.set_thresholds(now)?;
        }
    }
    Ok(reply(&entry(&change.model, now)))
}

fn parse(body: &[u8]) -> Result<Change, Reject> {
    let fields: Map<String, Value> = serde_json::from_slice(body)
        .map_err(|error| Reject::bad_request(format!("invalid request body: {error}")))?;
    let mut change = Change::default();
    let wrong = |field: &str, wanted: &str, value: &Value| {
        let message = format!("{field} must be {wanted}, got {value}");
        Reject::new(StatusCode::UNPROCESSABLE_ENTITY, message)
    };
    let number = |field: &str, value: &Value| match value {
        Value::Null => Ok(Some(None)),
        value => match value.as_f64() {
            Some(number) => Ok(Some(Some(number))),
            None => Err(wrong(field, "a number or null", value)),
        },
    };
    for (field, value) in &fields {
        match (field.as_str(), value) {
            ("model", Value::String(model)) => change.model.clone_from(model),
            ("model", _) => return Err(wrong(field, "a string", value)),
            (DECODE, _) => change.decode = number(field, value)?,
            (PREFILL_FRAC, _) => change.prefill_frac = number(field, value)?,
            (PREFILL, Value::Null) => change.prefill = Some(None),
            (PREFILL, _) => match value.as_u64() {
                Some(tokens) => change.prefill = Some(Some(tokens)),
                None => return Err(wrong(field, "a whole number of tokens or null", value)),
            },
            _ => {
                return Err(Reject::bad_request(format!(
                    "unknown field {field:?}; known are model, {DECODE}, {PREFILL}, {PREFILL_FRAC}"
                )));
            }
        }
    }
    if !fields.contains_key("model") {
        let message = "missing field `model`";
        return Err(Reject::new(StatusCode::UNPROCESSABLE_ENTITY, message));
    }
    Ok(change)
}

fn entry(model: &str, thresholds: Thresholds) -> Value {
    json!({
        "model": model,
        DECODE: thresholds.active_decode_blocks,
        PREFILL: thresholds.active_prefill_tokens,
        PREFILL_FRAC: thresholds.active_prefill_tokens_frac,
    })
}

fn reply(body: &Value) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    fn post(body: &str, tables: &Tables<'_>) -> Result<Response, u16> {
        let json = HeaderValue::from_static("application/json");
        let headers = HeaderMap::from_iter([(header::CONTENT_TYPE, json)]);
        change(&headers, body.as_bytes(), tables).map_err(|reject| reject.status.as_u16())
    }

    #[test]
    fn absent_keeps_and_null_unsets() {
        let table = BusyTable::default();
        let tables = [("m", &table)];
        post(&format!(r#"{{"model": "m", "{DECODE}": 0.5, "{PREFILL}": 9}}"#), &tables).unwrap();
        post(&format!(r#"{{"model": "m", "{DECODE}": null}}"#), &tables).unwrap();
        let wanted = Thresholds { active_prefill_tokens: Some(9), ..Thresholds::default() };
        assert_eq!(table.thresholds(), wanted);
        post(r#"{"model": "m"}"#, &tables).unwrap();
        assert_eq!(table.thresholds(), wanted);
    }

    #[test]
    fn what_is_wrong_has_its_status_and_changes_nothing() {
        let table = BusyTable::default();
        let tables = [("m", &table)];
        for (body, status) in [
            (format!(r#"{{"model": "m", "{DECODE}": 1.5}}"#), 400),
            (format!(r#"{{"model": "m", "{PREFILL}": -1}}"#), 422),
            (format!(r#"{{"model": "m", "{PREFILL}": "many"}}"#), 422),
            (format!(r#"{{"model": "m", "{PREFILL_FRAC}": -0.5}}"#), 400),
            (format!(r#"{{"model": "other", "{DECODE}": 0.5}}"#), 404),
            (format!(r#"{{"{DECODE}": 0.5}}"#), 422),
            (r#"{"model": "m", "threshold": 1}"#.to_owned(), 400),
            ("[]".to_owned(), 400),
            ("no json".to_owned(), 400),
        ] {
            assert_eq!(post(&body, &tables).unwrap_err(), status, "{body}");
        }
        assert_eq!(table.thresholds(), Thresholds::default());
        assert!(post(r#"{"model": "other"}"#, &tables).is_ok());
        let reject = change(&HeaderMap::new(), b"{}", &tables).unwrap_err();
        assert_eq!(reject.status.as_u16(), 415);
    }
}
