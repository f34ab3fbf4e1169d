//! Tests of what a body says of its answer.

use super::*;
use crate::gateway::body::MAX_VALUES;

fn parse(api: Api, body: Value) -> Result<Generation, String> {
    Generation::parse(api, &Body::parse(body.to_string().into()).unwrap()).map_err(|reject| {
        assert_eq!(reject.status.as_u16(), 400);
        reject.message
    })
}

#[test]
fn limits_come_from_either_name_and_fit_the_context() {
    let mut both = parse(Api::Chat, json!({"max_tokens": 5, "max_completion_tokens": 9})).unwrap();
    assert_eq!(both.limits.max_tokens, Some(9));
    both.fit(6, Some(10)).unwrap();
    assert_eq!(both.limits.max_tokens, Some(4));
    let error = both.fit(10, Some(10)).unwrap_err().message;
    assert!(error.contains("10 tokens; the model's limit for prompt and answer is 10"), "{error}");
    let mut open = parse(Api::Chat, json!({})).unwrap();
    open.fit(6, None).unwrap();
    assert_eq!(open.limits.max_tokens, None);
    assert_eq!(parse(Api::Completions, json!({})).unwrap().limits.max_tokens, Some(16));
}

#[test]
fn options_of_millions_of_values_are_refused_before_they_are_read() {
    let numbers = "0,".repeat(MAX_VALUES);
    for field in ["guided_json", "logit_bias", "nvext", "prompt"] {
        let text = format!(r#"{{"prompt": "a", "{field}": [{numbers}0]}}"#);
        let body = Body::parse(text.replace(r#""prompt": "a", "prompt""#, r#""prompt""#).into());
        let body = body.unwrap();
        let wanted = format!("{field}: it has {} values, more than", MAX_VALUES + 2);
        let whole = Generation::of_text(&body).unwrap_err();
        assert!(whole.message.starts_with(&wanted), "{}", whole.message);
        match Generation::parse(Api::Completions, &body) {
            Err(reject) => assert!(reject.message.starts_with(&wanted), "{}", reject.message),
            // A prompt of token ids has a limit of its own.
            Ok(_) => assert_eq!(field, "prompt"),
        }
    }
}

#[test]
fn tools_have_names_unless_none_may_be_called() {
    let tool = |name: &str| json!({"type": "function", "function": {"name": name}});
    for (body, wanted) in [
        (json!({}), vec![]),
        (json!({"tools": [tool("f"), tool("g"), 1, {"name": "h"}]}), vec!["f", "g"]),
        (json!({"tools": [tool("f")], "tool_choice": "auto"}), vec!["f"]),
        (json!({"tools": [tool("f")], "tool_choice": "none"}), vec![]),
        (json!({"tools": "f"}), vec![]),
    ] {
        let names = tool_names(&Body::parse(body.to_string().into()).unwrap()).unwrap();
        assert_eq!(names, wanted, "{body}");
    }
}

#[test]
fn one_tool_is_called_if_calls_must_not_be_parallel() {
    for (value, wanted) in [(json!(false), true), (json!(true), false), (json!(null), false)] {
        let body = json!({"parallel_tool_calls": value});
        assert_eq!(parse(Api::Chat, body).unwrap().has_one_call, wanted, "{value}");
    }
    assert!(!parse(Api::Chat, json!({})).unwrap().has_one_call);
}

#[test]
fn every_setting_reaches_the_worker() {
    let body = json!({
        "stream": true, "stream_options": {"include_usage": true}, "stop": "a", "seed": -3,
        "stop_token_ids": [4], "min_tokens": 2, "temperature": 0.5, "top_k": -1,
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
        "nvext": {"ignore_eos": true, "top_k": 9},
    });
    let got = parse(Api::Chat, body).unwrap();
    assert!(got.is_stream && got.includes_usage && got.limits.ignore_eos);
    assert_eq!((&got.limits.stop[..], got.limits.min_tokens), (&["a".to_owned()][..], 2));
    assert_eq!(got.limits.stop_token_ids, [4]);
    let wanted = json!({
        "temperature": 0.5, "top_k": -1, "seed": -3, "n": 1,
        "guided_decoding": {"json": {"type": "object"}},
    });
    assert_eq!(Value::Object(got.sampling), wanted);
}

#[test]
fn refusals_name_the_field_and_what_came() {
    for (body, wanted) in [
        (json!({"n": 2}), "n: the workers of this model support only 1 answer per request, got 2"),
        (json!({"best_of": 3}), "best_of: "),
        (json!({"logprobs": true}), "logprobs: "),
        (json!({"logprobs": 0}), "logprobs: "),
        (json!({"echo": true}), "echo: "),
        (json!({"max_tokens": 0}), "max_tokens: must be at least 1, got 0"),
        (json!({"max_completion_tokens": 0}), "max_completion_tokens: must be at least 1, got 0"),
        (json!({"max_tokens": -1}), "max_tokens: invalid value"),
        (json!({"min_tokens": 4, "max_tokens": 3}), "at most max_tokens (3), got 4"),
        (json!({"stop": [""]}), "stop: a string must have 1..=4096 bytes, got 0"),
        (json!({"stop": 5}), "stop: must be a string or a list of strings"),
        (json!({"stop": vec!["x"; 65]}), "stop: at most 64 strings, got 65"),
        (json!({"temperature": -1}), "temperature: must be in 0..=100, got -1"),
        (json!({"response_format": {"type": "x"}}), "response_format.type"),
        (
            json!({"response_format": ["text"]}),
            "response_format: invalid type: sequence, expected an object",
        ),
        (json!({"response_format": {"type": 1}}), "response_format.type: invalid type"),
        (
            json!({"stream_options": [true]}),
            "stream_options: invalid type: sequence, expected an object",
        ),
        (json!({"nvext": []}), "nvext: invalid type: sequence, expected an object"),
        (json!({"parallel_tool_calls": 1}), "parallel_tool_calls: "),
        (json!({"tool_choice": "required"}), "tool_choice: "),
        (json!({"tool_choice": "any"}), "tool_choice: "),
        (json!({"tool_choice": true}), "tool_choice: "),
        (json!({"tool_choice": {"type": "function"}}), "tool_choice: "),
        (json!({"bad_words": ["x"]}), "bad_words: "),
        (json!({"allowed_token_ids": [1]}), "allowed_token_ids: "),
        (json!({"logits_processors": ["x"]}), "logits_processors: "),
    ] {
        let error = parse(Api::Completions, body.clone()).unwrap_err();
        assert!(error.contains(wanted), "{body}: {error}");
    }
    let error = parse(Api::Chat, json!({"top_logprobs": 1})).unwrap_err();
    assert!(error.contains("top_logprobs: "), "{error}");
    let fine = json!({"logprobs": false, "top_logprobs": 0, "n": 1, "echo": false, "stop": null,
                      "tool_choice": "auto", "bad_words": [], "allowed_token_ids": null});
    parse(Api::Chat, fine).unwrap();
    let spaced = Body::parse(r#"{"bad_words": [ ]}"#.into()).unwrap();
    Generation::parse(Api::Chat, &spaced).unwrap();
    let escaped = Body::parse(r#"{"tool_choice": "\u0072equired"}"#.into()).unwrap();
    assert!(Generation::parse(Api::Chat, &escaped).is_err());
}

fn guide(body: &Value) -> Result<Option<Value>, String> {
    let generation = Generation::parse(Api::Chat, &Body::parse(body.to_string().into()).unwrap());
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
        assert_eq!(guide(&body).unwrap(), Some(wanted), "{body}");
    }
    let nothing = json!({"guided_json": null, "structured_outputs": {},
                         "guided_decoding_backend": "b", "response_format": {"type": "text"}});
    assert_eq!(guide(&nothing).unwrap(), None);
}

#[test]
fn unknown_fields_of_nvext_are_not_read() {
    let body = r#"{"nvext": {"x": 1e400, "y": "\ud800", "top_k": 9}}"#;
    let body = Body::parse(body.into()).unwrap();
    assert_eq!(Generation::parse(Api::Chat, &body).unwrap().sampling["top_k"], 9);
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
        let error = guide(&body).unwrap_err();
        assert!(error.contains(wanted), "{body}: {error}");
    }
}
