//! GET and POST /busy_threshold, shared by all services that select workers.

use axum::http::{HeaderMap, StatusCode, header};
use kvflash_core::select::{BusyTable, Thresholds};
use serde_json::{Map, Value, json};

use super::Reject;

const DECODE: &str = "active_decode_blocks_threshold";
const PREFILL: &str = "active_prefill_tokens_threshold";
const PREFILL_FRAC: &str = "active_prefill_tokens_threshold_frac";

/// The answer to GET: the models with a threshold, by name.
pub(super) fn list<'a>(tables: impl IntoIterator<Item = (&'a str, &'a BusyTable)>) -> Value {
    let mut set: Vec<_> = tables.into_iter().filter(|(_, table)| table.is_any_set()).collect();
    set.sort_by_key(|(model, _)| *model);
    let mut entries: Vec<Value> =
        set.into_iter().map(|(model, table)| answer(model, &table.thresholds())).collect();
    // A model's tenants have equal entries, unless they joined at different times.
    entries.dedup();
    json!({ "thresholds": entries })
}

/// A model's thresholds. Only the share of a batch is absent while it is unset: Dynamo's first
/// versions do not have it, and name the others with null.
fn answer(model: &str, thresholds: &Thresholds) -> Value {
    let mut answer = json!({
        "model": model,
        DECODE: thresholds.active_decode_blocks,
        PREFILL: thresholds.active_prefill_tokens,
    });
    if let Some(share) = thresholds.active_prefill_tokens_frac {
        answer[PREFILL_FRAC] = share.into();
    }
    answer
}

/// The change requested by POST. The outer `None` keeps a threshold, the inner one removes it.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Change {
    /// The model of the thresholds.
    pub model: String,
    decode: Option<Option<f64>>,
    prefill: Option<Option<u64>>,
    prefill_frac: Option<Option<f64>>,
}

impl Change {
    /// Refuses content types other than JSON.
    ///
    /// # Errors
    /// 415.
    pub fn check_type(headers: &HeaderMap) -> Result<(), Reject> {
        let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        if kind.is_some_and(|kind| kind.to_ascii_lowercase().starts_with("application/json")) {
            return Ok(());
        }
        let kind = kind.map_or("none".to_owned(), |kind| format!("{kind:?}"));
        let message = format!("the content type must be application/json, got {kind}");
        Err(Reject::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message))
    }

    /// Parses a body.
    ///
    /// # Errors
    /// 400 for invalid JSON; 422 for anything but an object, and for a field that is unknown or of
    /// the wrong type.
    pub fn parse(body: &[u8]) -> Result<Self, Reject> {
        let fields: Value = serde_json::from_slice(body)
            .map_err(|error| Reject::bad_request(format!("the body is not JSON: {error}")))?;
        let Value::Object(fields) = fields else {
            let message = "the body must be an object with the field model";
            return Err(Reject::new(StatusCode::UNPROCESSABLE_ENTITY, message));
        };
        Self::read(&fields)
            .map_err(|message| Reject::new(StatusCode::UNPROCESSABLE_ENTITY, message))
    }

    fn read(fields: &Map<String, Value>) -> Result<Self, String> {
        let known = ["model", DECODE, PREFILL, PREFILL_FRAC];
        if let Some(name) = fields.keys().find(|name| !known.contains(&name.as_str())) {
            return Err(format!("unknown field {name:?}; known fields are {}", known.join(", ")));
        }
        let model = match fields.get("model") {
            Some(Value::String(model)) => model.clone(),
            other => {
                let got = other.map_or("nothing".to_owned(), Value::to_string);
                return Err(format!("model must be a string, got {got}"));
            }
        };
        Ok(Self {
            model,
            decode: field(fields, DECODE, "a number", Value::as_f64)?,
            prefill: field(fields, PREFILL, "a whole number of at least 0", Value::as_u64)?,
            prefill_frac: field(fields, PREFILL_FRAC, "a number", Value::as_f64)?,
        })
    }

    fn is_any(&self) -> bool {
        self.decode.is_some() || self.prefill.is_some() || self.prefill_frac.is_some()
    }

    /// Changes `tables`, those of the named model, and returns the thresholds; without a threshold
    /// only returns them.
    ///
    /// # Errors
    /// 400 for a threshold out of range; 404 for a change without a table. Nothing changes then.
    pub fn apply<'a>(
        &self,
        tables: impl IntoIterator<Item = &'a BusyTable>,
    ) -> Result<Value, Reject> {
        let Self { model, decode, prefill, prefill_frac } = self;
        let mut told = None;
        for table in tables {
            let now = table.thresholds();
            let thresholds = Thresholds {
                active_decode_blocks: decode.unwrap_or(now.active_decode_blocks),
                active_prefill_tokens: prefill.unwrap_or(now.active_prefill_tokens),
                active_prefill_tokens_frac: prefill_frac.unwrap_or(now.active_prefill_tokens_frac),
            };
            if self.is_any() {
                table.set_thresholds(thresholds)?;
                tracing::info!(model, %thresholds, "busy thresholds changed");
            }
            told.get_or_insert(thresholds);
        }
        match told {
            None if self.is_any() => Err(Reject::new(
                StatusCode::NOT_FOUND,
                format!(
                    "Model '{model}' not found. Thresholds can only be set for discovered models."
                ),
            )),
            told => Ok(answer(model, &told.unwrap_or_default())),
        }
    }
}

fn field<T>(
    fields: &Map<String, Value>,
    name: &str,
    wanted: &str,
    read: impl Fn(&Value) -> Option<T>,
) -> Result<Option<Option<T>>, String> {
    match fields.get(name) {
        None => Ok(None),
        Some(Value::Null) => Ok(Some(None)),
        Some(value) => match read(value) {
            Some(read) => Ok(Some(Some(read))),
            None => Err(format!("{name} must be {wanted} or null, got {value}")),
        },
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn post(body: &str, table: Option<&BusyTable>) -> Result<Value, u16> {
        let applied = Change::parse(body.as_bytes()).and_then(|change| change.apply(table));
        applied.map_err(|reject| reject.status.as_u16())
    }

    #[test]
    fn absent_keeps_and_null_unsets() {
        let table = BusyTable::default();
        post(&format!(r#"{{"model": "m", "{DECODE}": 0.5, "{PREFILL}": 9}}"#), Some(&table))
            .unwrap();
        post(&format!(r#"{{"model": "m", "{DECODE}": null}}"#), Some(&table)).unwrap();
        let wanted = Thresholds { active_prefill_tokens: Some(9), ..Thresholds::default() };
        assert_eq!(table.thresholds(), wanted);
        assert_eq!(post(r#"{"model": "m"}"#, Some(&table)).unwrap(), answer("m", &wanted));
        assert_eq!(table.thresholds(), wanted);
    }

    #[test]
    fn answers_have_what_is_set_and_lists_the_models_that_have_any() {
        let [one, other] = [BusyTable::default(), BusyTable::default()];
        let listed = || list([("m", &one), ("n", &other), ("m", &one)])["thresholds"].clone();
        assert_eq!(listed(), json!([]));
        let share = json!({ "model": "m", DECODE: null, PREFILL: null, PREFILL_FRAC: 0.5 });
        let body = format!(r#"{{"model": "m", "{PREFILL_FRAC}": 0.5}}"#);
        assert_eq!(post(&body, Some(&one)).unwrap(), share);
        assert_eq!(listed(), json!([share]));
        post(&body, Some(&other)).unwrap();
        assert_eq!(listed().as_array().map(Vec::len), Some(2), "each model once");
        post(&format!(r#"{{"model": "n", "{PREFILL_FRAC}": null}}"#), Some(&other)).unwrap();
        let body = format!(r#"{{"model": "m", "{PREFILL_FRAC}": null, "{DECODE}": 0.85}}"#);
        let decode = json!({ "model": "m", DECODE: 0.85, PREFILL: null });
        assert_eq!(post(&body, Some(&one)).unwrap(), decode);
        assert_eq!(listed(), json!([decode]));
        let unset = json!({ "model": "m", DECODE: null, PREFILL: null });
        assert_eq!(post(r#"{"model": "m"}"#, None).unwrap(), unset);
    }

    #[test]
    fn what_is_wrong_has_its_status_and_changes_nothing() {
        let table = BusyTable::default();
        for (body, status) in [
            (format!(r#"{{"model": "m", "{DECODE}": 1.5}}"#), 400),
            (format!(r#"{{"model": "m", "{PREFILL}": -1}}"#), 422),
            (format!(r#"{{"model": "m", "{PREFILL}": "many"}}"#), 422),
            (format!(r#"{{"model": "m", "{PREFILL_FRAC}": -0.5}}"#), 400),
            (format!(r#"{{"{DECODE}": 0.5}}"#), 422),
            (r#"{"model": "m", "threshold": 1}"#.to_owned(), 422),
            ("[]".to_owned(), 422),
            ("no json".to_owned(), 400),
        ] {
            assert_eq!(post(&body, Some(&table)).unwrap_err(), status, "{body}");
        }
        assert_eq!(table.thresholds(), Thresholds::default());
        assert_eq!(post(&format!(r#"{{"model": "m", "{DECODE}": 0.5}}"#), None), Err(404));
        assert_eq!(post(r#"{"model": "m"}"#, None), Ok(answer("m", &Thresholds::default())));
    }

    #[test]
    fn only_json_is_read() {
        let of = |kind: &'static str| {
            HeaderMap::from_iter([(
                header::CONTENT_TYPE,
                axum::http::HeaderValue::from_static(kind),
            )])
        };
        assert!(Change::check_type(&of("Application/JSON; charset=utf-8")).is_ok());
        for headers in [HeaderMap::new(), of("text/plain")] {
            assert_eq!(Change::check_type(&headers).unwrap_err().status.as_u16(), 415);
        }
    }
}
