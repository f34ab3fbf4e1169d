//! Tests of what workers say.

use super::*;

fn parse(item: Value) -> Result<Item, PlaneError> {
    Item::parse(&rmp_serde::to_vec_named(&item).unwrap())
}

#[test]
fn an_item_is_read_whatever_else_it_has() {
    let item = parse(json!({
        "token_ids": [1, 2], "finish_reason": "eos", "later": [{}],
        "completion_usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}},
    }))
    .unwrap();
    assert_eq!((item.token_ids(), item.finish()), (&[1, 2][..], Some("stop")));
    assert_eq!((item.prompt_tokens(), item.cached_tokens()), (Some(9), Some(8)));
    let empty = parse(json!({"token_ids": null, "finish_reason": null, "error": null})).unwrap();
    assert!(empty.token_ids().is_empty() && empty.finish().is_none());
}

#[test]
fn usage_adds_up_whatever_a_worker_says() {
    let usage = Usage { prompt_tokens: u64::MAX, completion_tokens: 2, cached_tokens: None };
    assert_eq!(usage.json()["total_tokens"], u64::MAX);
}

#[test]
fn a_failure_within_an_item_never_vanishes() {
    for (item, wanted) in [
        (json!({"finish_reason": "error", "text": "out of memory"}), "out of memory"),
        (json!({"finish_reason": "error: no blocks"}), "no blocks"),
        (json!({"finish_reason": {"error": "bad"}}), "bad"),
        (json!({"token_ids": [], "error": "worse"}), "worse"),
        (json!({"finish_reason": "cancelled"}), "cancelled by the worker"),
    ] {
        let error = parse(item.clone()).unwrap_err();
        assert!(matches!(error.cause, Cause::Worker(_)), "{item}");
        assert!(error.message.contains(wanted), "{item}: {}", error.message);
    }
    assert_eq!(parse(json!("text")).unwrap_err().cause, Cause::Protocol);
    assert_eq!(parse(json!({"token_ids": [-1]})).unwrap_err().cause, Cause::Protocol);
}

#[test]
fn transfer_parameters_come_in_two_forms() {
    let plain = parse(json!({"kv_transfer_params": {"port": 1}})).unwrap();
    let wrapped = json!({"disaggregated_params": {"kv_transfer_params": {"port": 1}}});
    assert_eq!(plain.into_transfer(), parse(wrapped).unwrap().into_transfer());
    assert!(parse(json!({"token_ids": [1]})).unwrap().into_transfer().is_none());
}

#[test]
fn a_stream_becomes_one_answer() {
    let chunk = |delta: Value, finish: Value| {
        json!({"id": "i", "created": 1, "model": "m", "object": "chat.completion.chunk",
               "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})
    };
    let call = |arguments: &str| json!({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": arguments}}]});
    let mut collected = Collected::default();
    for (delta, finish) in [
        (json!({"role": "assistant", "content": "a"}), Value::Null),
        (json!({"content": "b"}), Value::Null),
        (call("{"), Value::Null),
        (call("}"), json!("tool_calls")),
    ] {
        collected.take(Api::Chat, chunk(delta, finish));
    }
    collected.take(Api::Chat, json!({"choices": [], "usage": {"prompt_tokens": 4}}));
    let answer = collected.finish(Api::Chat).unwrap();
    let message = &answer["choices"][0]["message"];
    assert_eq!((&answer["object"], &answer["id"]), (&json!("chat.completion"), &json!("i")));
    assert_eq!(message["content"], "ab");
    assert_eq!(message["tool_calls"][0]["function"]["arguments"], "{}");
    assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls");
    assert_eq!(answer["usage"]["prompt_tokens"], 4);
}

#[test]
fn nothing_of_a_choice_is_lost() {
    let pieces = [
        json!({"role": "assistant", "content": "a", "audio": {"id": "au", "data": "QU"},
               "function_call": {"name": "f", "arguments": "{\"x\":"}}),
        json!({"content": "b", "refusal": "no", "function_call": {"arguments": "1"},
               "audio": {"data": "JD", "transcript": "hel", "expires_at": 7}}),
        json!({"function_call": {"name": "", "arguments": "}"}, "refusal": "pe",
               "audio": {"transcript": "lo"}}),
    ];
    let mut collected = Collected::default();
    for (at, delta) in pieces.into_iter().enumerate() {
        let logprobs = json!({"content": [{"token": at, "logprob": -0.5}], "refusal": null});
        let rating = json!({"hate": {"severity": "safe"}});
        let choice = json!({"index": 0, "delta": delta, "logprobs": logprobs,
                            "finish_reason": if at == 2 { "function_call" } else { "" },
                            "content_filter_results": rating, "token_ids": [at]});
        let chunk = json!({"id": format!("i{at}"), "object": "chat.completion.chunk",
                           "system_fingerprint": "fp", "service_tier": null,
                           "choices": [choice]});
        collected.take(Api::Chat, chunk);
    }
    let answer = collected.finish(Api::Chat).unwrap();
    assert_eq!((&answer["id"], &answer["system_fingerprint"]), (&json!("i0"), &json!("fp")));
    let choice = &answer["choices"][0];
    let message = &choice["message"];
    assert_eq!(message["function_call"], json!({"name": "f", "arguments": "{\"x\":1}"}));
    let audio = json!({"id": "au", "data": "QUJD", "transcript": "hello", "expires_at": 7});
    assert_eq!((&message["audio"], &message["refusal"]), (&audio, &json!("nope")));
    let tokens: Vec<_> =
        choice["logprobs"]["content"].as_array().unwrap().iter().map(|one| &one["token"]).collect();
    assert_eq!(tokens, [0, 1, 2]);
    assert_eq!(
        (&choice["token_ids"], &choice["finish_reason"]),
        (&json!([0, 1, 2]), &json!("function_call"))
    );
}

#[test]
fn completions_keep_their_log_probabilities() {
    let mut collected = Collected::default();
    for (text, offset) in [("x", 0), ("y", 1)] {
        let logprobs =
            json!({"tokens": [text], "text_offset": [offset], "top_logprobs": [{text: -0.5}]});
        let choice = json!({"index": 0, "text": text, "logprobs": logprobs});
        collected.take(Api::Completions, json!({"choices": [choice]}));
    }
    collected.close(None);
    let answer = collected.finish(Api::Completions).unwrap();
    let wanted = json!({"index": 0, "text": "xy", "finish_reason": "stop", "logprobs": {
        "tokens": ["x", "y"], "text_offset": [0, 1], "top_logprobs": [{"x": -0.5}, {"y": -0.5}]}});
    assert_eq!(answer["choices"][0], wanted);
}

#[test]
fn errors_among_the_chunks_keep_their_words_and_status() {
    let internal = || Cause::Worker("internal".to_owned());
    for (chunk, wanted) in [
        (json!({"error": {"message": "x", "code": 400}}), Some((Cause::Refused(400), "x"))),
        (json!({"error": {"message": "x", "code": "429"}}), Some((Cause::Refused(429), "x"))),
        (json!({"error": {"message": "x", "code": "bad_key"}}), Some((internal(), "x"))),
        (json!({"error": {"message": "x", "code": 500}}), Some((internal(), "x"))),
        (
            json!({"error": {"message": "x", "status": 503}}),
            Some((Cause::Worker("overloaded".to_owned()), "x")),
        ),
        (json!({"error": "x"}), Some((internal(), "x"))),
        (json!({"error": {"why": 1}}), Some((internal(), "{\"why\":1}"))),
        (json!({"object": "error", "message": "x", "code": 404}), Some((Cause::Refused(404), "x"))),
        (json!({"error": null, "choices": []}), None),
        (json!("error"), None),
    ] {
        let got = failure(&chunk).map(|error| (error.cause, error.message));
        let wanted = wanted.map(|(cause, message)| (cause, message.to_owned()));
        assert_eq!(got, wanted, "{chunk}");
    }
}

#[test]
fn completions_and_whole_answers() {
    let mut collected = Collected::default();
    for text in ["x", "y"] {
        collected.take(Api::Completions, json!({"choices": [{"index": 0, "text": text}]}));
    }
    let answer = collected.finish(Api::Completions).unwrap();
    assert_eq!(answer["choices"][0]["text"], "xy");
    let whole = json!({"object": "chat.completion", "choices": [{"message": {"content": "w"}}]});
    let mut collected = Collected::default();
    collected.take(Api::Chat, whole.clone());
    assert_eq!(collected.finish(Api::Chat), Some(whole));
    assert_eq!(Collected::default().finish(Api::Chat), None);
}
