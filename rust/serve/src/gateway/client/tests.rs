//! Tests of what clients say of their requests.

use axum::http::Uri;

use super::*;
use crate::Caller;
use crate::gateway::body::Body;
use crate::gateway::call::Head;

fn read(headers: &[(&'static str, &str)], body: &str) -> Request {
    let headers =
        headers.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
    let (headers, uri, caller) = (headers.collect(), Uri::default(), Caller::default());
    let head = Head { headers, uri, address: None, caller };
    let body = Arc::new(Body::parse(body.to_owned().into()).unwrap());
    let envelope = body.read().unwrap();
    let call = Call::new(None, head, String::new(), &body, &envelope).unwrap();
    super::read(&call, &envelope, &Members::default(), true)
}

#[test]
fn text_of_prompts_in_all_forms() {
    for (body, wanted) in [
        (r#"{"prompt": "a\nb"}"#, b"a\nb".as_slice()),
        (r#"{"prompt": [1, 258]}"#, &[0, 0, 0, 1, 0, 0, 1, 2]),
        (r#"{"prompt": ["a", "b"]}"#, b""),
        (
            r#"{"messages": [{"role": "system", "content": "be "},
                {"role": "user", "content": [{"type": "text", "text": "kind"},
                    {"type": "image_url", "image_url": {"url": "u"}}]},
                {"role": "assistant", "content": null, "tool_calls": []},
                {"role": "tool", "content": 5}]}"#,
            b"be kind",
        ),
        (r#"{"messages": 5}"#, b""),
    ] {
        assert_eq!(&*read(&[], body).text, wanted, "{body}");
    }
}

#[test]
fn users_and_sessions_by_header_and_field() {
    let body = r#"{"prompt": "p", "user": "by-field"}"#;
    assert_eq!(read(&[], body).user.as_deref(), Some("by-field"));
    assert_eq!(read(&[("user", "by-header")], body).user.as_deref(), Some("by-header"));
    assert_eq!(read(&[], r#"{"prompt": "p", "user": 5}"#).user, None);
    assert_eq!(read(&[], r#"{"prompt": "p", "user": ""}"#).user, None);
    let key = |headers: &[(&'static str, &str)]| {
        read(headers, body).session_key.as_deref().map(str::to_owned)
    };
    assert_eq!(key(&[("x-session-key", "k")]).as_deref(), Some("k"));
    assert_eq!(key(&[("x-session-id", "mine")]).as_deref(), Some("mine"));
    // The worker it names is gone, so the session starts over.
    assert_eq!(key(&[("x-session-id", &session_id("10.0.0.1:8000", 0))]), None);
    let both = [("x-session-key", "b"), ("x-aibrix-session-key", "a")];
    assert_eq!(key(&both).as_deref(), Some("a"));
}

fn parse(json: &str) -> Result<Nvext, Reject> {
    Nvext::parse(Some(Raw::of(json)))
}

#[test]
fn pins_and_annotations() {
    assert_eq!(Nvext::parse(None).unwrap(), Nvext::default());
    assert_eq!(parse("null").unwrap(), Nvext::default());
    for annotation in ["query_instance_id:", "query_instance_id", "query_instance_id:7"] {
        let json = format!(r#"{{"annotations": ["x", "{annotation}"], "other": 1}}"#);
        assert!(parse(&json).unwrap().is_query(), "{annotation}");
    }
    assert!(!parse(r#"{"annotations": ["query_instance"]}"#).unwrap().is_query());
    let both = parse(r#"{"backend_instance_id": 1, "decode_worker_id": 2}"#).unwrap();
    assert_eq!((both.decode_pin(), both.prefill_worker_id), (Some(2), None));
    let json = r#"{"agent_hints": {"priority": 10, "strict_priority": 2, "osl": 5}}"#;
    let hints = parse(json).unwrap();
    assert_eq!((hints.priority(), hints.agent_hints.strict_priority), (Some(10.0), Some(2)));
    assert_eq!(hints.agent_hints.osl, Some(5));
    let older = parse(r#"{"agent_hints": {"latency_sensitivity": -1.5}}"#).unwrap();
    assert_eq!((older.priority(), older.agent_hints.strict_priority), (Some(-1.5), None));
    let error = parse(r#"{"agent_hints": {"priority": "high"}}"#).unwrap_err();
    assert!(error.message.contains("nvext.agent_hints.priority"), "{}", error.message);
    for list in ["[]", r#"[["query_instance_id"]]"#, r#"{"agent_hints": [1.0]}"#] {
        let error = parse(list).unwrap_err();
        assert!(error.message.contains("sequence, expected an object"), "{}", error.message);
    }
    let error = parse(r#"{"prefill_worker_id": "x"}"#).unwrap_err();
    assert!(error.message.contains("nvext.prefill_worker_id: invalid type"), "{}", error.message);
}

/// The strict priority and the urgency from `headers` and a body's fields.
fn urgency(headers: &[(&'static str, &str)], nvext: &str, field: &str) -> (u32, f64) {
    let urgency = read_where(true, headers, nvext, field).unwrap();
    assert_eq!(urgency.wish().strict_priority, urgency.turn().strict_priority);
    assert_eq!(urgency.wish().priority_jump, urgency.turn().score.max(0.0));
    (urgency.strict, urgency.earliness)
}

fn read_where(
    is_plain_heard: bool,
    headers: &[(&'static str, &str)],
    nvext: &str,
    field: &str,
) -> Result<Urgency, Reject> {
    let mut map = HeaderMap::new();
    for (name, value) in headers {
        map.insert(*name, value.parse().unwrap());
    }
    let nvext = Nvext::parse(Some(Raw::of(nvext))).unwrap();
    Urgency::read(&map, &nvext, Some(Raw::of(field)), is_plain_heard)
}

#[test]
fn one_answer_from_all_that_says_how_urgent_it_is() {
    let hints = r#"{"agent_hints": {"priority": 10, "strict_priority": 2}}"#;
    let (dynamo, own) = ((PRIORITY_HEADER.as_str(), "2.5"), (NICE_HEADER.as_str(), "-7"));
    assert_eq!(urgency(&[], "{}", "null"), (0, 0.0));
    assert_eq!(urgency(&[], "{}", "-3"), (0, 3.0));
    assert_eq!(urgency(&[], "{}", "4"), (0, -4.0));
    assert_eq!(urgency(&[], hints, "-3"), (2, 10.0));
    assert_eq!(urgency(&[dynamo], hints, "-3"), (2, 2.5));
    assert_eq!(urgency(&[dynamo, own], hints, "-3"), (2, 7.0));
    assert_eq!(urgency(&[(STRICT_PRIORITY_HEADER.as_str(), "5")], hints, "null"), (5, 10.0));
    let older = r#"{"agent_hints": {"latency_sensitivity": -1.5}}"#;
    assert_eq!(urgency(&[], older, "null"), (0, -1.5));
    assert_eq!(urgency(&[(PRIORITY_HEADER.as_str(), "inf")], hints, "null"), (2, 0.0));
    assert!(urgency(&[], "{}", "0").1.is_sign_positive());
    let wrong =
        read_where(true, &[(STRICT_PRIORITY_HEADER.as_str(), "-1")], "{}", "null").unwrap_err();
    assert_eq!(
        wrong.message,
        "header x-dynamo-request-strict-priority must be an integer in 0..=4294967295, got \"-1\""
    );
    // Without a queue the field belongs to the engine; ignore it.
    let unheard = read_where(false, &[own], "{}", r#""soon""#).unwrap();
    assert_eq!(unheard, Urgency::default());
}

#[test]
fn what_is_no_number_is_named() {
    for (headers, field, text) in [
        (vec![(STRICT_PRIORITY_HEADER.as_str(), "-1")], "null", STRICT_PRIORITY_HEADER.as_str()),
        (vec![(PRIORITY_HEADER.as_str(), "soon")], "null", "must be a number, got \"soon\""),
        (vec![(NICE_HEADER.as_str(), "1.5")], "null", "x-kvflash-priority: must be an integer in"),
        (vec![], "[1]", "priority: must be an integer in -2147483648..=2147483647, got [1]"),
    ] {
        let error = read_where(true, &headers, "{}", field).unwrap_err();
        assert!(error.message.contains(text), "{}", error.message);
    }
}
