//! Tests of bodies: what is read of them, and replaced.

use super::*;

fn body(text: &'static str) -> Body {
    Body::parse(Bytes::from_static(text.as_bytes())).unwrap()
}

#[test]
fn fields_are_replaced_and_the_others_stay_as_they_came() {
    let body = body(r#"{ "a": [1,  2], "b\"": 1e400, "c": null }"#);
    let changed = body.with(&[("a", None), ("c", Some(json!({"x": 1}))), ("d", Some(json!(2)))]);
    assert_eq!(changed, r#"{"b\"":1e400,"c":{"x":1},"d":2}"#);
    assert_eq!(body.with(&[("a", None), ("b\"", None), ("c", None)]), "{}");
    assert!(body.has("b\"") && !body.has("d"));
}

#[test]
fn a_field_that_comes_twice_is_read_by_nobody() {
    let body = body(r#"{"model": "a", "b": 1, "mod\u0065l": "c"}"#);
    let error = body.value::<String>("model").unwrap_err();
    assert_eq!(error.message, "model: is given twice; send it once");
    assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some("model")));
    assert!(body.text_of_one("model").is_err());
    assert_eq!(body.text_of_one("b").unwrap(), Some("1"));
    assert_eq!(body.value::<String>("d").unwrap(), None);
}

#[test]
fn of_a_field_that_comes_twice_the_one_that_engines_read_is_replaced() {
    let body = body(r#"{"a": 1, "b": 2, "\u0061": 3}"#);
    assert_eq!(body.with_json("a", b"4"), r#"{"a": 1, "b": 2, "\u0061": 4}"#);
    assert_eq!(body.text_of("a"), Some("3"));
}

#[test]
fn an_engine_is_asked_about_the_fields_as_they_came() {
    let body =
        body(r#"{"messages": [1,  "\ud800"], "tools": null, "x": 1, "add_special_tokens": false}"#);
    let envelope: Envelope<'_> = body.read().unwrap();
    let asked =
        ask_body(&envelope, "a\"b", None, &[("documents", None), ("max_tokens", Some("1"))]);
    let wanted =
        r#"{"model":"a\"b","messages":[1,  "\ud800"],"add_special_tokens":false,"max_tokens":1}"#;
    assert_eq!(std::str::from_utf8(&asked).unwrap(), wanted);
    let asked = ask_body(&Envelope::default(), "m", Some("a\n".to_owned()), &[]);
    assert_eq!(asked, br#"{"model":"m","prompt":"a\n"}"#);
}

#[test]
fn only_text_is_text_of_a_prompt() {
    let image =
        format!(r#"{{"type": "image_url", "image_url": {{"url": "{}"}}}}"#, "A".repeat(9_000));
    let text = |bytes: usize| format!(r#"{{"type": "text", "text": "{}"}}"#, "x".repeat(bytes));
    let message = |parts: &str| format!(r#"{{"role": "user", "content": [{parts}]}}"#);
    let parsed = |message: &str| {
        Body::parse(format!(r#"{{"messages": [{message}]}}"#).into()).unwrap().prompt_bytes()
    };
    let plain = message(&text(4_000));
    let mixed = message(&format!("{}, {image}", text(4_000)));
    for (found, with_image) in
        [(message_bytes(&plain), message_bytes(&mixed)), (parsed(&plain), parsed(&mixed))]
    {
        assert!((4_000..4_200).contains(&found), "{found}");
        assert!((found..4_500).contains(&with_image), "{with_image}");
    }
    let short = r#"{"role": "user", "content": "a"}"#;
    assert_eq!(message_bytes(short), short.len());
    assert_eq!(message_bytes(r#""no object""#), 11);
    assert_eq!(Body::opaque(Bytes::from_static(b"--x")).prompt_bytes(), 3);
}

#[test]
fn what_is_no_object_is_refused_with_its_place() {
    for (text, wanted) in [
        (r#"{"model": "m""#, "EOF"),
        ("[]", "must be a JSON object, got a list"),
        ("5", "expected an object"),
        (r#"{"model":"m"} x"#, "characters after"),
        (r#"{"messages": [1,}"#, "messages"),
    ] {
        let error = Body::parse(Bytes::from_static(text.as_bytes())).unwrap_err();
        assert_eq!(error.status.as_u16(), 400);
        assert!(error.message.contains(wanted), "{text}: {}", error.message);
    }
}

#[test]
fn errors_name_the_field() {
    for (body, wanted) in [
        (r#"{"model": 5}"#, "model: invalid type: integer `5`, expected a string"),
        (r#"{"model": "m", "cache_salt": []}"#, "cache_salt: invalid type: sequence"),
        (r#"{"model": "a", "model": "b"}"#, "model: is given twice; send it once"),
    ] {
        let body = Body::parse(body.into()).unwrap();
        let error = body.read::<Envelope<'_>>().unwrap_err();
        assert_eq!(error.status.as_u16(), 400);
        assert!(error.message.contains(wanted), "{body:?}: {}", error.message);
        assert_eq!(error.param.as_deref(), wanted.split_once(": ").map(|(field, _)| field));
        assert!(!error.message.contains("column"), "a field's place is no place in the body");
    }
}

#[test]
fn requests_that_bypass_the_cache_are_known() {
    let reuses = |more: &str| {
        let body = format!(r#"{{"model": "m"{more}}}"#);
        Body::parse(body.into()).unwrap().read::<Envelope<'_>>().unwrap().reuses_prefix()
    };
    for plain in ["", r#", "n": 1, "echo": false, "prompt_logprobs": null"#, r#", "best_of":1"#] {
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
