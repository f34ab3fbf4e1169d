//! Tests of tool calls in texts.

use proptest::prelude::*;

use super::*;

/// What is found in a text that comes in these pieces; texts that follow each other are one.
fn find(format: ToolFormat, pieces: &[&str]) -> Vec<Found> {
    let mut calls = ToolCalls::new(format, vec!["f".to_owned(), "g".to_owned()]);
    let mut all: Vec<Found> = Vec::new();
    let mut add = |found: Vec<Found>| {
        for one in found {
            match (all.last_mut(), one) {
                (Some(Found::Text(text)), Found::Text(more)) => text.push_str(&more),
                (_, one) => all.push(one),
            }
        }
    };
    pieces.iter().for_each(|piece| add(calls.push(piece)));
    add(calls.finish());
    all
}

fn text(text: &str) -> Found {
    Found::Text(text.to_owned())
}

fn call(name: &str, arguments: &str) -> Found {
    Found::Call(Call { name: name.to_owned(), arguments: arguments.to_owned() })
}

#[test]
fn calls_are_found_in_every_format() {
    use ToolFormat::{Hermes, Llama3Json, Mistral};
    for (format, said, wanted) in [
        (
            Hermes,
            "I look.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1.50}}\n</tool_call>\n\
             <tool_call>{\"arguments\": {}, \"name\": \"other\"}</tool_call>\n",
            vec![text("I look.\n"), call("f", "{\"a\": 1.50}"), call("other", "{}")],
        ),
        // Tags and brackets within its texts, and no end.
        (
            Hermes,
            "\n<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"}\\\"</tool_call>\"}}",
            vec![call("f", "{\"a\": \"}\\\"</tool_call>\"}")],
        ),
        (
            Hermes,
            "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call> So.",
            vec![call("f", "{\"a\": 1}"), text(" So.")],
        ),
        (Hermes, "<tool_call>{\"name\": \"f\"}</tool_call>", vec![call("f", "{}")]),
        (
            Llama3Json,
            "\n{\"name\": \"f\", \"parameters\": {\"a\": [1]}}; {\"name\": \"g\", \"arguments\": {}}",
            vec![call("f", "{\"a\": [1]}"), call("g", "{}")],
        ),
        (
            Llama3Json,
            "So: <|python_tag|>{\"type\": \"function\", \"name\": \"x\", \"parameters\": null}",
            vec![text("So: "), call("x", "{}")],
        ),
        (
            Mistral,
            "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {}}, {\"name\": \"g\", \"arguments\": {\"b\": []}}]",
            vec![call("f", "{}"), call("g", "{\"b\": []}")],
        ),
        (
            Mistral,
            "One.[TOOL_CALLS]f[ARGS]{\"a\": 1}[TOOL_CALLS]my-tool.x{}[TOOL_CALLS]g[CALL_ID]a1B2c3D4e[ARGS]{}",
            vec![text("One."), call("f", "{\"a\": 1}"), call("my-tool.x", "{}"), call("g", "{}")],
        ),
    ] {
        assert_eq!(find(format, &[said]), wanted, "{said}");
    }
}

#[test]
fn what_turns_out_to_be_no_call_is_text() {
    use ToolFormat::{Hermes, Llama3Json, Mistral};
    for (format, said) in [
        (Hermes, "\n \n"),
        (Hermes, "a <tool_call> tag, and <tool_c"),
        (Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1"),
        (Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>"),
        (Hermes, "<tool_call>{\"name\": \"\", \"arguments\": {}}</tool_call>"),
        (Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": {]}</tool_call>"),
        (Hermes, "<tool_call>\n<function=f>\n</function>\n</tool_call>"),
        (Hermes, "{\"name\": \"f\", \"arguments\": {}}"),
        (Llama3Json, "{\"name\": \"unknown\", \"parameters\": {}}"),
        (Llama3Json, "See: {\"name\": \"f\", \"parameters\": {}}"),
        (Llama3Json, "<|python_tag|>print(1)"),
        (Mistral, "[TOOL_CALLS] []"),
        (Mistral, "[TOOL_CALLS]f[ARGS"),
        (Mistral, "[TOOL_CALLS]f g{}"),
        (Mistral, "[TOOL_CALLS][ARGS]{}"),
        (Mistral, "[TOOL_CALLS] \u{e4}{}"),
    ] {
        assert_eq!(find(format, &[said]), [text(said)], "{said}");
    }
    // Only what is malformed: the next one counts.
    let said = "<tool_call><tool_call>{\"name\": \"f\"}</tool_call>";
    assert_eq!(find(Hermes, &[said]), [text("<tool_call>"), call("f", "{}")]);
}

#[test]
fn a_call_without_an_end_is_text_at_the_limit() {
    let begin = "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"";
    let mut calls = ToolCalls::new(ToolFormat::Hermes, Vec::new());
    assert!(calls.push(begin).is_empty());
    let (mut sent, mut got) = (begin.len(), 0);
    let piece = "\u{20ac}".repeat(1_000);
    while got == 0 {
        let found = calls.push(&piece);
        sent += piece.len();
        got += found.iter().map(|one| matches!(one, Found::Text(text) if text.len() > 1)).count();
        assert!(calls.held.len() <= MAX_CALL_BYTES + piece.len());
    }
    assert!((MAX_CALL_BYTES..MAX_CALL_BYTES + 2 * piece.len()).contains(&sent));
    let next = format!("\n{begin}1\"}}}}</tool_call>");
    assert_eq!(calls.push(&next), [text("\n"), call("f", "{\"a\": \"1\"}")]);
    assert!(calls.finish().is_empty());
    for blanks in [MAX_CALL_BYTES + 9, 2 * MAX_CALL_BYTES] {
        let said = format!("<tool_call>{}{{}}", " ".repeat(blanks));
        assert_eq!(find(ToolFormat::Hermes, &[&said]), [text(&said)]);
        assert_eq!(find(ToolFormat::Hermes, &[&said[11..]]), [text(&said[11..])]);
    }
}

/// Texts of whole calls, of their pieces and of others.
fn texts() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        prop::sample::select(vec![
            "<tool_call>",
            "</tool_call>",
            "<|python_tag|>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "[CALL_ID]",
            "{",
            "}",
            "[",
            "]",
            "\"",
            "\\",
            ":",
            ",",
            ";",
            "\n",
            " ",
            "<",
            "f",
            "\u{1f600}",
            "{\"name\": \"f\", \"arguments\": {\"a\": \"}\\\"\u{e4}\"}}",
            "{\"name\": \"g\", \"parameters\": {}}",
            "[{\"name\": \"f\", \"arguments\": {}}]",
            "{\"name\": \"x\"}",
        ])
        .prop_map(str::to_owned),
        "[a-z\u{e4}< ]{0,5}",
    ];
    prop::collection::vec(part, 0..16).prop_map(|parts| parts.concat())
}

fn formats() -> impl Strategy<Value = ToolFormat> {
    prop::sample::select(ToolFormat::ALL.to_vec())
}

fn cut(text: &str, sizes: &[usize]) -> Vec<String> {
    let mut chars = text.chars().peekable();
    let mut sizes = sizes.iter().copied().cycle();
    std::iter::from_fn(|| {
        chars.peek()?;
        Some(chars.by_ref().take(sizes.next()?).collect())
    })
    .collect()
}

proptest! {
    #[test]
    fn any_cut_gives_the_same(
        format in formats(),
        said in texts(),
        sizes in prop::collection::vec(1_usize..9, 1..5),
    ) {
        let pieces = cut(&said, &sizes);
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        prop_assert_eq!(find(format, &pieces), find(format, &[&said]));
    }

    /// Only tags of calls, their JSON and blanks around them are no text.
    #[test]
    fn no_text_is_lost(format in formats(), said in texts()) {
        let found = find(format, &[&said]);
        let is_call = |one: &Found| matches!(one, Found::Call(_));
        if !found.iter().any(is_call) {
            let whole = if said.is_empty() { vec![] } else { vec![text(&said)] };
            prop_assert_eq!(found, whole);
            return Ok(());
        }
        let mut rest = said.as_str();
        for one in &found {
            if let Found::Text(text) = one {
                let at = rest.find(text.as_str());
                prop_assert!(at.is_some(), "{text:?} in {rest:?}");
                rest = &rest[at.unwrap() + text.len()..];
            }
        }
    }

    #[test]
    fn text_without_tags_passes_as_it_comes(format in formats(), said in "[a-zA-Z0-9 .,:()\n]{0,80}") {
        let mut calls = ToolCalls::new(format, vec!["f".to_owned()]);
        let text = |found: Vec<Found>| -> String {
            found.into_iter().filter_map(|one| match one {
                Found::Text(text) => Some(text),
                Found::Call(_) => None,
            }).collect()
        };
        let at_once = text(calls.push(&said));
        // Blanks before the first word may belong to a call.
        prop_assert!(said.trim().is_empty() || at_once == said);
        prop_assert_eq!(at_once + &text(calls.finish()), said);
    }
}
