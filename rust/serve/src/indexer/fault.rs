//! Errors of serde in the words of every other refusal: the field, what is legal and what came.

/// A client's value is quoted up to this length, in bytes.
const MAX_QUOTED_BYTES: usize = 100;

/// A wrong type or value of the field at `path`; `None` for errors of another kind.
pub(super) fn worded(path: &str, error: &str) -> Option<String> {
    if error.contains("duplicate field `additional_salt`") {
        return Some("additional_salt and additionalsalt are one field: give one".to_owned());
    }
    let (head, rest) =
        error.split_once("invalid type: ").or_else(|| error.split_once("invalid value: "))?;
    // What came may contain anything, and what is legal is ours.
    let (got, legal) = rest.rsplit_once(", expected ")?;
    let legal = legal.rsplit_once(" at line ").map_or(legal, |(legal, _)| legal);
    // Errors of long lists name the element.
    let path = head.strip_suffix(": ").unwrap_or(path);
    let is_body = path == ".";
    let (field, object) = if is_body { ("the body", "a JSON object") } else { (path, "an object") };
    let integer = |low: u8, high: u64| format!("an integer in {low}..={high}");
    let legal = match legal {
        "u8" => integer(0, u8::MAX.into()),
        "u16" => integer(0, u16::MAX.into()),
        "u32" => integer(0, u32::MAX.into()),
        "u64" => integer(0, u64::MAX),
        "a nonzero u32" => integer(1, u32::MAX.into()),
        "f32" | "f64" => "a number".to_owned(),
        "a boolean" => "true or false".to_owned(),
        "a sequence" => "a list".to_owned(),
        "a map" => object.to_owned(),
        _ if legal.starts_with("struct ") => object.to_owned(),
        other => other.to_owned(),
    };
    Some(format!("{field} must be {legal}, got {}", came(got)))
}

/// What came, as serde names it, in the words of JSON.
fn came(got: &str) -> String {
    let quoted = got.strip_suffix('`').and_then(|got| got.split_once('`')).map(|(_, value)| value);
    match got {
        "unit value" => "null".to_owned(),
        "sequence" => "a list".to_owned(),
        "map" => "an object".to_owned(),
        "byte array" => "bytes".to_owned(),
        _ => short(got.strip_prefix("string ").or(quoted).unwrap_or(got)),
    }
}

fn short(text: &str) -> String {
    if text.len() <= MAX_QUOTED_BYTES {
        return text.to_owned();
    }
    let mut end = MAX_QUOTED_BYTES;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}... ({} bytes)", &text[..end], text.len())
}

/// A fault in a query string, as axum reports it.
pub(super) fn worded_parameter(error: &str) -> String {
    let named = |kind: &str| error.split_once(kind).and_then(|(_, rest)| rest.split_once('`'));
    if let Some((name, rest)) = named("unknown field `") {
        let known = rest.strip_prefix(", expected ").unwrap_or(rest);
        let known = known.strip_prefix("one of ").unwrap_or(known);
        let known = known.replace("` or `", ", ").replace('`', "");
        return format!("unknown parameter {}; known: {known}", short(name));
    }
    match named("duplicate field `") {
        Some((name, _)) => format!("parameter {name} is given twice"),
        None => error.to_owned(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde::de::DeserializeOwned;

    use super::super::form::Form;
    use super::super::request::{Query, Register, Unregister};
    use super::*;

    fn refusal<T: DeserializeOwned>(json: &str) -> String {
        Form::Json.parse::<T>(json.as_bytes()).map(|_| ()).unwrap_err().message
    }

    #[test]
    fn a_wrong_type_is_refused_with_the_field_and_what_is_legal() {
        let whole = "the body must be a JSON object, got null";
        assert_eq!(refusal::<Register>("null"), whole);
        assert_eq!(refusal::<Query>("[]"), "the body must be a JSON object, got a list");
        assert_eq!(refusal::<Query>(" "), "the body is empty: send a JSON object");
        let long = format!(r#"{{"instance_id": "{}"}}"#, "é".repeat(500));
        for (said, wanted) in [
            (
                refusal::<Register>(r#"{"instance_id": "1"}"#),
                r#"instance_id must be an integer in 0..=18446744073709551615, got "1""#,
            ),
            (
                refusal::<Unregister>(r#"{"instance_id": -1}"#),
                "instance_id must be an integer in 0..=18446744073709551615, got -1",
            ),
            (
                refusal::<Register>(r#"{"block_size": "16"}"#),
                r#"block_size must be an integer in 1..=4294967295, got "16""#,
            ),
            (
                refusal::<Register>(r#"{"block_size": 0}"#),
                "block_size must be an integer in 1..=4294967295, got 0",
            ),
            (
                refusal::<Unregister>(r#"{"dp_rank": 1.5}"#),
                "dp_rank must be an integer in 0..=4294967295, got 1.5",
            ),
            (refusal::<Query>(r#"{"model_name": true}"#), "model_name must be a string, got true"),
            (
                refusal::<Query>(r#"{"model_name": {}}"#),
                "model_name must be a string, got an object",
            ),
            (
                refusal::<Query>(r#"{"token_ids": [1, "2"]}"#),
                r#"token_ids[1] must be an integer in 0..=4294967295, got "2""#,
            ),
            (
                refusal::<Register>(r#"{"additional_salt": "a", "additionalsalt": "a"}"#),
                "additional_salt and additionalsalt are one field: give one",
            ),
            (
                refusal::<Register>(r#"{"instance_id": "x, expected u8"}"#),
                r#"got "x, expected u8""#,
            ),
        ] {
            assert!(said.starts_with("invalid request body: ") && said.ends_with(wanted), "{said}");
        }
        let said = refusal::<Register>(&long);
        assert!(said.ends_with("... (1002 bytes)") && said.len() < 300, "{said}");
    }

    #[test]
    fn parameters_are_refused_by_name() {
        for (said, wanted) in [
            (
                "Failed to deserialize query string: a: unknown field `a`, expected `b`",
                "unknown parameter a; known: b",
            ),
            ("unknown field `a`, expected `b` or `c`", "unknown parameter a; known: b, c"),
            (
                "unknown field `a`, expected one of `b`, `c`, `d`",
                "unknown parameter a; known: b, c, d",
            ),
            ("x: duplicate field `b`", "parameter b is given twice"),
            ("another fault", "another fault"),
        ] {
            assert_eq!(worded_parameter(said), wanted);
        }
    }
}
