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
    let own = |body: &str| cache_use(Api::Generate, &Body::parse(body.to_owned().into()).unwrap());
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

fn named(kind: &str, body: &str) -> Result<Option<String>, String> {
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, kind.parse().unwrap());
    let found = model_of_upload(&headers, body.as_bytes());
    found.map(|name| name.map(str::to_owned)).map_err(|reject| reject.message)
}

const UPLOAD: &str = "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"model\"\r\n\
    Content-Type: audio/wav\r\n\r\n\u{0}RIFF--\r\n--b\r\n\
    content-disposition: form-data; name=\"model\"\r\n\r\nwhisper\r\n--b--\r\n";

#[test]
fn the_model_is_found_whatever_stands_before_it() {
    for kind in
        ["multipart/form-data; boundary=b", "Multipart/Form-Data; charset=x; boundary=\"b\""]
    {
        assert_eq!(named(kind, UPLOAD).unwrap().as_deref(), Some("whisper"));
    }
    let body = Bytes::from_static(UPLOAD.as_bytes());
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, "multipart/form-data; boundary=b".parse().unwrap());
    let name = model_of_upload(&headers, &body).unwrap().unwrap();
    assert_eq!(upload_with_model(&body, name, "turbo"), UPLOAD.replace("whisper", "turbo"));
    let none = "--b\r\ncontent-disposition: form-data; name=\"file\"\r\n\r\nmodel\r\n--b--";
    assert_eq!(named("multipart/form-data; boundary=b", none).unwrap(), None);
    assert_eq!(named("multipart/form-data; boundary=b", "--b").unwrap(), None);
}

#[test]
fn what_has_no_parts_is_refused() {
    for kind in ["application/json", "multipart/form-data", "multipart/form-data; boundary="] {
        assert!(named(kind, UPLOAD).unwrap_err().contains("content-type: must be"), "{kind}");
    }
}
