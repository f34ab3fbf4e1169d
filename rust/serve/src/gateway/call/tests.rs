//! Tests of requests: their prompts, use of the cache, uploads.

use super::*;

fn prompt(json: &str) -> Result<Prompt, Error> {
    Prompt::parse(json)
}

#[test]
fn prompts_in_all_forms() {
    assert_eq!(prompt(r#""a\nb""#).unwrap(), Prompt::Text("a\nb".into()));
    assert_eq!(prompt("[1, 2]").unwrap(), Prompt::Tokens(vec![1, 2]));
    assert_eq!(prompt(r#"["only"]"#).unwrap(), Prompt::Text("only".into()));
    assert_eq!(prompt("[[7,8]]").unwrap(), Prompt::Tokens(vec![7, 8]));
    assert_eq!(prompt(r#"["a","b"]"#).unwrap(), Prompt::Batch);
    let error = prompt("[1, 4294967296]").unwrap_err().to_string();
    assert!(error.contains("[1]") && error.contains("4294967296"), "{error}");
    assert!(prompt("[1, -2]").unwrap_err().to_string().contains("-2"));
    assert!(prompt("{}").is_err());
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
    headers.insert(CONTENT_TYPE, kind.parse().unwrap());
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
    headers.insert(CONTENT_TYPE, "multipart/form-data; boundary=b".parse().unwrap());
    let name = model_of_upload(&headers, &body).unwrap().unwrap();
    assert_eq!(upload_with_model(&body, name, "turbo"), UPLOAD.replace("whisper", "turbo"));
    let none = "--b\r\ncontent-disposition: form-data; name=\"file\"\r\n\r\nmodel\r\n--b--";
    assert_eq!(named("multipart/form-data; boundary=b", none).unwrap(), None);
    assert_eq!(named("multipart/form-data; boundary=b", "--b").unwrap(), None);
}

#[test]
fn the_model_is_not_looked_for_behind_a_thousand_parts() {
    let model = "--b\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\nm\r\n--b--";
    let found = |parts: usize| {
        let body = format!("{}{model}", "--b\r\n\r\n\r\n".repeat(parts));
        named("multipart/form-data; boundary=b", &body).unwrap()
    };
    assert_eq!(found(MAX_PARTS - 1).as_deref(), Some("m"));
    assert_eq!(found(MAX_PARTS), None);
}

#[test]
fn what_has_no_parts_is_refused() {
    for kind in ["application/json", "multipart/form-data", "multipart/form-data; boundary="] {
        assert!(named(kind, UPLOAD).unwrap_err().contains("content-type: must be"), "{kind}");
    }
}
