//! Tests of the requests that may go with their token ids.

use super::*;

fn body(text: &str) -> Body {
    Body::parse(Bytes::copy_from_slice(text.as_bytes())).unwrap()
}

#[test]
fn ids_stand_beside_messages_and_instead_of_a_text() {
    let chat = body(r#"{"messages": [1,  2], "model":"m" }  "#);
    for (field, wanted) in [
        (
            Field::KvTransferParams,
            r#"{"messages": [1,  2], "model":"m" ,"kv_transfer_params":{"prompt_token_ids":[7,0,4294967295]}}  "#,
        ),
        (Field::InputIds, r#"{"messages": [1,  2], "model":"m" ,"input_ids":[7,0,4294967295]}  "#),
    ] {
        assert_eq!(body_with(&chat, field, &[7, 0, u32::MAX]), wanted);
    }
    let text = body(r#"{"prompt" : "a }", "model":"m"}"#);
    assert_eq!(body_with(&text, Field::Prompt, &[5]), r#"{"prompt" : [5], "model":"m"}"#);
    let null = body(r#"{"kv_transfer_params":null,"a":1}"#);
    let wanted = r#"{"kv_transfer_params":{"prompt_token_ids":[5]},"a":1}"#;
    assert_eq!(body_with(&null, Field::KvTransferParams, &[5]), wanted);
    assert_eq!(body_with(&body("{}"), Field::InputIds, &[]), r#"{"input_ids":[]}"#);
}

#[test]
fn requests_that_mean_more_than_their_ids_go_as_they_came() {
    let can = |more: &str| {
        let body = body(&format!(r#"{{"model": "m", "messages": []{more}}}"#));
        replaceable(&body, &body.read().unwrap()).is_some()
    };
    for plain in [
        "",
        r#", "tools": [1], "tool_choice": "auto", "stream": true, "suffix": null"#,
        r#", "chat_template_kwargs": {}, "cache_salt": "s", "echo": false, "suffix": """#,
    ] {
        assert!(can(plain), "{plain}");
    }
    for other in [
        r#""echo": true"#,
        r#""prompt_logprobs": 0"#,
        r#""truncate_prompt_tokens": 7"#,
        r#""truncation_side": "left""#,
        r#""suffix": "x""#,
        r#""prompt_embeds": "x""#,
        r#""kv_transfer_params": {}"#,
        r#""input_ids": [1]"#,
        r#""tool_choice": "none""#,
        r#""documents": []"#,
        r#""chat_template": "x""#,
        r#""reasoning_effort": "low""#,
        r#""add_special_tokens": true"#,
        r#""add_generation_prompt": false"#,
        r#""continue_final_message": true"#,
        r#""use_beam_search": true"#,
        r#""return_token_offsets": true"#,
        r#""mm_processor_kwargs": {}"#,
    ] {
        assert!(!can(&format!(", {other}")), "{other}");
    }
    let text = r#"{"model": "m", "prompt": "x", "add_special_tokens": false}"#;
    assert!(replaceable(&body(text), &body(text).read().unwrap()).is_some());
    for (text, output_tokens) in [
        (r#"{"prompt": "x", "max_tokens": 7}"#, Some(7)),
        (r#"{"prompt": "x", "max_tokens": null}"#, Some(0)),
        (r#"{"prompt": "x", "max_tokens": 7, "max_completion_tokens": 9}"#, Some(9)),
        (r#"{"prompt": "x", "max_tokens": -7}"#, None),
    ] {
        let found = replaceable(&body(text), &body(text).read().unwrap());
        assert_eq!(found.map(|found| found.output_tokens), output_tokens, "{text}");
    }
}

#[test]
fn ids_go_where_prompt_and_answer_are_known_to_fit() {
    let engine = Engine::default();
    engine.notes.lock().max_model_len = Some(100);
    engine.ids.lock().chats = Some(Field::InputIds);
    let field = |output_tokens| Replaceable { output_tokens }.field(&engine, Api::Chat, &[7, 7, 7]);
    assert_eq!([0, 97].map(field), [Some(Field::InputIds); 2]);
    assert_eq!([98, u64::MAX].map(field), [None; 2]);
}
