//! Tests of the parts of messages.

use proptest::prelude::*;

use super::*;

fn parts(formats: &Formats, tools: &[&str], pieces: &[&str]) -> (Message, Parsing) {
    let tools = tools.iter().map(|&tool| tool.to_owned()).collect();
    collect(Parsing::new(formats, "", tools, usize::MAX), pieces)
}

fn collect(mut parsing: Parsing, pieces: &[&str]) -> (Message, Parsing) {
    let mut message = Message::default();
    let pushed: Vec<Part> =
        pieces.iter().flat_map(|piece| parsing.push((*piece).to_owned())).collect();
    pushed.into_iter().chain(parsing.finish()).for_each(|part| message.add(part));
    (message, parsing)
}

#[test]
fn calls_are_looked_for_behind_the_reasoning_only() {
    let formats = Formats::of_flags(Some("qwen3"), Some("hermes")).unwrap();
    let call = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
    let said = format!("<think>Shall I {call}?</think>\n\n{call}");
    let (message, parsing) = parts(&formats, &["f"], &[&said]);
    assert_eq!(message.reasoning, format!("Shall I {call}?"));
    assert_eq!((message.content.as_str(), message.calls.len()), ("", 1));
    assert_eq!(parsing.ending(Ending::plain("stop")).reason, "tool_calls");
    assert_eq!(parsing.ending(Ending::plain("length")).reason, "length");
    let (message, parsing) = parts(&formats, &[], &[&said]);
    assert_eq!((message.content, message.calls.len()), (format!("\n\n{call}"), 0));
    assert_eq!(parsing.ending(Ending::plain("stop")).reason, "stop");
}

#[test]
fn calls_are_numbered_and_named() {
    for (name, said, len) in [
        ("hermes", "<tool_call>{\"name\": \"f\"}</tool_call>", 29),
        ("mistral", "[TOOL_CALLS]f{}", 9),
    ] {
        let formats = Formats::of_flags(None, Some(name)).unwrap();
        let (message, _) = parts(&formats, &["f"], &[said, said]);
        let [first, second] = &message.calls[..] else { panic!("{message:?}") };
        assert_eq!((first.index, second.index), (0, 1));
        assert_eq!((first.id.len(), second.id.len()), (len, len));
        assert_ne!(first.id, second.id);
    }
}

#[test]
fn calls_beyond_the_most_are_left_out() {
    let formats = Formats::of_flags(None, Some("hermes")).unwrap();
    let call = |name: &str| format!("<tool_call>{{\"name\": \"{name}\"}}</tool_call>");
    let parsing = Parsing::new(&formats, "", vec!["f".to_owned()], 1);
    let (message, parsing) = collect(parsing, &[&call("f"), " and ", &call("g"), "."]);
    let [only] = &message.calls[..] else { panic!("{message:?}") };
    assert_eq!((&*only.call.name, &*message.content), ("f", " and ."));
    assert_eq!(parsing.ending(Ending::plain("stop")).reason, "tool_calls");
}

#[test]
fn an_unknown_name_is_refused_with_those_that_are_known() {
    let refused = |reasoning, tools| Formats::of_flags(reasoning, tools).unwrap_err().to_string();
    let error = refused(Some("qwen"), None);
    assert!(error.contains("--reasoning-parser must be one of base, "), "{error}");
    assert!(error.contains(", got \"qwen\"; did you mean \"qwen3\"?"), "{error}");
    assert_eq!(
        refused(None, Some("pythonic")),
        "--tool-call-parser must be one of hermes, llama3_json, mistral, got \"pythonic\""
    );
}

fn split(name: &str, prompt_end: &str, pieces: &[&str]) -> ParserResult {
    let mut reasoning = Reasoning::new(&ReasoningFormat::named(name).unwrap(), prompt_end);
    let mut all = ParserResult::default();
    pieces.iter().for_each(|piece| add(&mut all, &reasoning.push(piece)));
    add(&mut all, &reasoning.finish());
    all
}

fn of(reasoning: &str, content: &str) -> ParserResult {
    ParserResult::new(content.to_owned(), reasoning.to_owned())
}

#[test]
fn reasoning_is_told_from_content() {
    let open = "<|im_start|>assistant\n<think>\n";
    let closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n";
    for (name, prompt_end, text, wanted) in [
        ("qwen3", "", "<think>a < b</think>\nc", of("a < b", "\nc")),
        ("qwen3", "", "a <b> </think> <thinking>", of("", "a <b> </think> <thinking>")),
        ("qwen3", "", "<think>a", of("a", "")),
        ("qwen3", "", "<<think>a<</think>b", of("<a<", "b")),
        ("qwen3", open, "a</think>b", of("a", "b")),
        ("qwen3", closed, "a", of("", "a")),
        ("qwen3", "<think> is a tag", "a", of("", "a")),
        ("deepseek_r1", "", "a</think>b", of("a", "b")),
        ("deepseek_r1", "", "<think>a</think>b", of("a", "b")),
        ("deepseek_r1", open, "a</think>b", of("a", "b")),
        ("qwen3_thinking", closed, "a", of("", "a")),
        ("kimi", "", "\u{25c1}think\u{25b7}a\u{25c1}/think\u{25b7}b", of("a", "b")),
        ("minimax_m3", "", "<mm:think>a</mm:think>b", of("a", "b")),
        ("passthrough", "", "<think>a</think>b", of("", "<think>a</think>b")),
    ] {
        assert_eq!(split(name, prompt_end, &[text]), wanted, "{name} {text}");
    }
}

#[test]
fn names_are_those_of_the_crate() {
    let names = ReasoningFormat::names();
    assert!(names.len() > 15 && names.is_sorted(), "{names:?}");
    assert!(ReasoningFormat::named("qwen").is_none());
    let special: Vec<_> = names
        .iter()
        .filter(|name| ReasoningFormat::named(name).unwrap().needs_special_tokens())
        .collect();
    assert_eq!(special, ["gemma4", "hy_v4", "inkling", "kimi_k3"]);
}

#[test]
fn what_begins_as_a_tag_is_held_for_some_bytes_only() {
    let mut reasoning = Reasoning::new(&ReasoningFormat::named("qwen3").unwrap(), "");
    assert_eq!(reasoning.push("<think>a </thi"), of("a ", ""));
    assert_eq!(reasoning.push("s"), of("", ""));
    assert_eq!(reasoning.push(" b"), of("</this b", ""));
    let long = format!("<{}", "x".repeat(MAX_TAG_BYTES - 1));
    assert_eq!(reasoning.push(&long), of("", ""));
    assert_eq!(reasoning.push("y"), of(&format!("{long}y"), ""));
}

/// Texts of tags, their pieces and others.
fn texts() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        prop::sample::select(vec![
            "<think>",
            "</think>",
            "<",
            ">",
            "</",
            "think",
            "\n",
            " ",
            "\u{25c1}think\u{25b7}",
            "\u{25c1}/think\u{25b7}",
            "<mm:think>",
            "</mm:think>",
            "<|START_THINKING|>",
            "<|END_THINKING|>",
            "<tool_call>",
            "\u{1f600}",
        ])
        .prop_map(str::to_owned),
        "[a-z\u{e4} ]{0,5}",
    ];
    prop::collection::vec(part, 0..12).prop_map(|parts| parts.concat())
}

proptest! {
    #[test]
    fn any_cut_gives_the_same(
        name in prop::sample::select(ReasoningFormat::names()),
        text in texts(),
        size in 1_usize..9,
    ) {
        let chars: Vec<char> = text.chars().collect();
        let pieces: Vec<String> = chars.chunks(size).map(|c| c.iter().collect()).collect();
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        prop_assert_eq!(split(&name, "", &pieces), split(&name, "", &[&text]), "{}", name);
    }
}
