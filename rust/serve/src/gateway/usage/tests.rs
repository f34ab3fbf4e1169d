//! Tests of the token counts in answers.

use super::*;

const ANSWER: &str = r#"{"usage":{"prompt_tokens":302,"total_tokens":326,"completion_tokens":24,"prompt_tokens_details":{"cached_tokens":288}}}"#;

#[test]
fn found_however_the_answer_is_cut() {
    for size in 1..=ANSWER.len() {
        let mut scanner = UsageScanner::of(Row::of_fields(true));
        for chunk in ANSWER.as_bytes().chunks(size) {
            scanner.feed(chunk);
        }
        assert_eq!(
            (scanner.prompt_tokens, scanner.cached_tokens, scanner.completion_tokens),
            (Some(302), Some(288), Some(24)),
            "chunks of {size}"
        );
    }
}

#[test]
fn tokens_are_events_until_the_engine_says_more() {
    let mut scanner = UsageScanner::of(Row::of_fields(true));
    scanner.feed(b"data: {\"a\": \"data: {\\\"\"}\n\ndata: {\"b\": 1}\n\ndata: [DONE]\n\n");
    assert_eq!(scanner.usage().output_tokens, Some(2));
    scanner.feed(b"data: {\"usage\": {\"completion_tokens\": 7}}\n\n");
    assert_eq!(scanner.usage().output_tokens, Some(7));
}

#[test]
fn the_space_before_an_event_s_data_is_optional() {
    let mut scanner = UsageScanner::of(Row::of_fields(true));
    scanner.feed(b"data:{\"a\": \"data:{\\\"\"}\n\ndata: {\"b\": 1}\n\ndata:[DONE]\n\n");
    assert_eq!(scanner.usage().output_tokens, Some(2));
}

#[test]
fn text_and_nulls_are_not_counts() {
    let mut scanner = UsageScanner::of(Row::of_fields(true));
    scanner.feed(br#"{"content":"\"cached_tokens\": 7,","prompt_tokens_details":null}"#);
    scanner.feed(br#"{"prompt_tokens":12,"prompt_tokens_details":{"cached_tokens": null}}"#);
    assert_eq!((scanner.prompt_tokens, scanner.cached_tokens), (Some(12), None));
}

#[test]
fn generate_has_told_its_usage_once_it_has_finished() {
    let event = |reason: &str| {
        let meta =
            format!(r#"{{"id":"a","finish_reason":{reason},"prompt_tokens":9,"cached_tokens":8}}"#);
        format!("data: {{\"text\":\"data: [DONE]\",\"meta_info\":{meta}}}\n\n")
    };
    let begun = event("null");
    for end in [event(r#"{"type":"stop"}"#), event(r#" "abort""#), "data: [DONE]\n\n".to_owned()] {
        for size in 1..=begun.len() {
            let mut scanner = UsageScanner::of(Row::of("/generate").unwrap());
            let mut is_told = |text: &str| {
                text.as_bytes().chunks(size).for_each(|chunk| scanner.feed(chunk));
                scanner.is_told()
            };
            assert!(!is_told(&begun), "chunks of {size}");
            assert!(is_told(&end), "chunks of {size}");
            assert_eq!(scanner.cached_tokens, Some(8));
        }
    }
}

#[test]
fn only_the_end_is_missing_after_the_last_event() {
    for (path, event, last) in [
        ("/v1/chat/completions", "data: {\"content\":\"\\ndata: [DONE]\"}\n\n", "data: [DONE]\n\n"),
        ("/v1/completions", "data: {\"text\":\"a\",\"usage\":null}\n\n", "data: [DONE]\n\n"),
        (
            "/v1/messages",
            "event: content_block_delta\ndata: {\"text\":\"\\\"message_stop\\\"\"}\n\n",
            "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
        ),
    ] {
        for size in 1..=last.len() {
            let mut scanner = UsageScanner::of(Row::of(path).unwrap());
            let mut is_told = |text: &str| {
                text.as_bytes().chunks(size).for_each(|chunk| scanner.feed(chunk));
                scanner.is_told()
            };
            assert!(!is_told(event), "{path}, chunks of {size}");
            assert!(is_told(last), "{path}, chunks of {size}");
        }
    }
}

#[test]
fn an_engine_s_error_is_no_text_about_one() {
    let has_error = |stream: &str| {
        let mut scanner = UsageScanner::of(Row::of_fields(true));
        scanner.feed(stream.as_bytes());
        scanner.has_error
    };
    for error in [
        "data: {\"a\": 1}\n\ndata: {\"error\": {\"code\": 500}}\n\n",
        "data:{\"error\":{}}\n\n",
        "event: error\ndata: {\"type\": \"error\", \"error\": {}}\n\n",
        "event: error\r\ndata: {\"type\":\"error\"}\r\n\r\n",
    ] {
        assert!(has_error(error), "{error}");
    }
    for text in [
        "data: {\"content\": \"data: {\\\"error\\\"\"}\n\n",
        "data: {\"type\": \"response.completed\", \"response\": {\"error\": null}}\n\n",
        "data: {\"errors\": 0}\n\n",
    ] {
        assert!(!has_error(text), "{text}");
    }
}

#[test]
fn the_output_of_a_response_begins_after_its_opening_events() {
    let opening = "event: response.created\ndata: {\"response\":{\"instructions\":\"\\nevent: response.x\\n\"}}\n\n\
                   event: response.in_progress\r\ndata: {}\r\n\r\n";
    let added = "event: response.output_item.added\ndata: {}\n\n";
    for (stream, wanted) in [
        (opening.to_owned(), (true, false)),
        (format!("{opening}event: response.in_pro"), (true, false)),
        (format!("{opening}{added}"), (true, true)),
        (added.to_owned(), (true, true)),
        ("event: response.failed\ndata: {}\n\n".to_owned(), (true, true)),
        ("data: {\"type\":\"response.created\"}\n\n".to_owned(), (false, false)),
    ] {
        assert_eq!(events_of_response(stream.as_bytes()), wanted, "{stream}");
    }
}

#[test]
fn names_that_a_response_repeats_from_its_request_are_not_counts() {
    let forged =
        r#"{"input_tokens":1,"output_tokens":0,"input_tokens_details":{"cached_tokens":1}}"#;
    let repeated = format!(
        r#""metadata":{forged},"text":{{"usage":{forged},"a":"\\\""}},"tools":[{{"usage":{forged}}}]"#
    );
    let usage =
        r#"{"input_tokens":302,"output_tokens":24,"input_tokens_details":{"cached_tokens":288}}"#;
    let whole = |usage: &str| format!(r#"{{{repeated},"usage" : {usage},{repeated}}}"#);
    let event = |kind: &str, usage: &str| {
        let response = whole(usage);
        format!("event: {kind}\ndata: {{\"type\":\"{kind}\",\"response\":{response}}}\n\n")
    };
    let created = event("response.created", "null");
    let stream = format!("{created}{}data: [DONE]\n\n", event("response.completed", usage));
    for (answer, wanted) in [
        (whole("null"), None),
        (created, None),
        (whole(usage), Some((302, 288, 24))),
        (stream, Some((302, 288, 24))),
    ] {
        for size in 1..answer.len() {
            let mut scanner = UsageScanner::of(Row::of("/v1/responses").unwrap());
            answer.as_bytes().chunks(size).for_each(|chunk| scanner.feed(chunk));
            let counts = [scanner.prompt_tokens, scanner.cached_tokens, scanner.completion_tokens];
            let wanted = wanted.map_or([None; 3], |(a, b, c)| [a, b, c].map(Some));
            assert_eq!(
                (counts, scanner.is_told()),
                (wanted, wanted[0].is_some()),
                "chunks of {size}: {answer}"
            );
        }
    }
}
