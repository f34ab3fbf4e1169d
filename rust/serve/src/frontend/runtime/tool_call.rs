//! Tool calls in a text that comes in pieces.

use super::tool_format::{Call, ToolFormat, bare_name, calls, is_of_name};

/// What may be a call and is not complete after so many bytes is text.
const MAX_CALL_BYTES: usize = 1 << 20;
/// Longest name in front of a call's arguments, with its marks.
const MAX_NAME_BYTES: usize = 256;

/// A part of the text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    Text(String),
    Call(Call),
}

/// Where in a call the text is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// In none.
    Text,
    /// Behind its tag.
    Opened,
    /// In a name in front of its arguments, which begins here.
    Name { start: usize },
    /// In its JSON, which begins here, within so many brackets.
    Json { start: usize, depth: usize, is_string: bool, is_escaped: bool },
    /// Behind it.
    Closing,
}

/// Finds the calls in one answer.
///
/// # Consistency
/// However the text is cut, the same comes out. Only tags of calls and the blanks around calls are left out;
/// a text without calls comes out unchanged. A call comes out whole: until its JSON is complete it may still
/// turn out to be text.
///
/// # Cost
/// O(bytes of the text), and at most [`MAX_CALL_BYTES`] of it in memory.
#[derive(Debug)]
pub(super) struct ToolCalls {
    format: ToolFormat,
    /// What may be called: without a tag, only a call of one of these is a call.
    tools: Vec<String>,
    state: State,
    /// Text not given out yet, from the begin of what may be a call.
    held: String,
    /// So much of it has been looked at.
    at: usize,
    /// Blanks at the begin of the answer or behind a call.
    blank: String,
    /// Nothing but blanks has come since then.
    is_blank: bool,
    has_calls: bool,
    found: Vec<Found>,
}

impl ToolCalls {
    pub fn new(format: ToolFormat, tools: Vec<String>) -> Self {
        Self {
            format,
            tools,
            state: State::Text,
            held: String::new(),
            at: 0,
            blank: String::new(),
            is_blank: true,
            has_calls: false,
            found: Vec::new(),
        }
    }

    pub fn format(&self) -> ToolFormat {
        self.format
    }

    /// Take a piece of the text; what is known of it now.
    pub fn push(&mut self, piece: &str) -> Vec<Found> {
        self.held.push_str(piece);
        while self.step() {}
        std::mem::take(&mut self.found)
    }

    /// The text is over: what was held back.
    pub fn finish(&mut self) -> Vec<Found> {
        let held = std::mem::take(&mut self.held);
        if held.trim_start().is_empty() {
            self.blank.push_str(&held);
        } else {
            self.text(held);
        }
        if !self.has_calls {
            self.release_blank();
        }
        std::mem::take(&mut self.found)
    }

    /// Go on by a state; false where more must come first.
    fn step(&mut self) -> bool {
        match self.state {
            State::Text => self.look_for_call(),
            State::Opened => self.look_for_json(),
            State::Name { start } => self.read_name(start),
            State::Json { .. } => self.read_json(),
            State::Closing => self.look_for_close(),
        }
    }

    fn look_for_call(&mut self) -> bool {
        if self.is_blank {
            let len = self.held.len() - self.held.trim_start().len();
            self.blank.extend(self.held.drain(..len));
            if self.blank.len() > MAX_CALL_BYTES {
                self.release_blank();
            } else if self.format == ToolFormat::Llama3Json && self.held.starts_with('{') {
                return self.begin_json(0);
            }
        }
        let tag = self.format.open();
        if let Some(start) = self.held.find(tag) {
            self.release(start);
            (self.state, self.at) = (State::Opened, tag.len());
            return true;
        }
        // The longest end with which a tag begins may become one.
        let from = self.held.len().saturating_sub(tag.len() - 1);
        let may_begin =
            |at: &usize| self.held.is_char_boundary(*at) && tag.starts_with(&self.held[*at..]);
        let start = (from..self.held.len()).find(may_begin).unwrap_or(self.held.len());
        self.release(start);
        false
    }

    fn look_for_json(&mut self) -> bool {
        let rest = &self.held[self.at..];
        let start = self.at + rest.len() - rest.trim_start().len();
        if start >= MAX_CALL_BYTES {
            return self.give_up(MAX_CALL_BYTES);
        }
        self.at = start;
        let is_mistral = self.format == ToolFormat::Mistral;
        match self.held.as_bytes().get(start) {
            None => false,
            Some(b'{') => self.begin_json(start),
            Some(b'[') if is_mistral => self.begin_json(start),
            Some(byte) if is_mistral && is_of_name(*byte) => {
                self.state = State::Name { start };
                true
            }
            Some(_) => self.give_up(start),
        }
    }

    fn read_name(&mut self, start: usize) -> bool {
        while let Some(byte) = self.held.as_bytes().get(self.at) {
            if *byte == b'{' && bare_name(&self.held[start..self.at]).is_some() {
                return self.begin_json(self.at);
            }
            if !is_of_name(*byte) || self.at - start >= MAX_NAME_BYTES {
                return self.give_up(self.at);
            }
            self.at += 1;
        }
        false
    }

    fn begin_json(&mut self, start: usize) -> bool {
        self.at = start;
        self.state = State::Json { start, depth: 0, is_string: false, is_escaped: false };
        true
    }

    fn read_json(&mut self) -> bool {
        let State::Json { start, mut depth, mut is_string, mut is_escaped } = self.state else {
            return false;
        };
        while let Some(byte) = self.held.as_bytes().get(self.at) {
            if self.at >= MAX_CALL_BYTES {
                return self.give_up(MAX_CALL_BYTES);
            }
            self.at += 1;
            match byte {
                _ if is_escaped => is_escaped = false,
                b'\\' if is_string => is_escaped = true,
                b'"' => is_string = !is_string,
                _ if is_string => {}
                b'{' | b'[' => depth += 1,
                b'}' | b']' => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                return self.end_json(start);
            }
        }
        self.state = State::Json { start, depth, is_string, is_escaped };
        false
    }

    /// The brackets are closed: calls, or a text that looked like some.
    fn end_json(&mut self, start: usize) -> bool {
        let Some(calls) = self.calls(start) else { return self.give_up(self.at) };
        self.found.extend(calls.into_iter().map(Found::Call));
        self.held.drain(..self.at);
        self.at = 0;
        self.blank.clear();
        (self.has_calls, self.is_blank, self.state) = (true, true, State::Closing);
        true
    }

    fn calls(&self, start: usize) -> Option<Vec<Call>> {
        let (before, json) = (&self.held[..start], &self.held[start..self.at]);
        let Some(before) = before.strip_prefix(self.format.open()) else {
            let calls = calls(json)?;
            return calls.iter().all(|call| self.tools.contains(&call.name)).then_some(calls);
        };
        match bare_name(before) {
            Some(name) => Some(vec![Call::of(name, json)?]),
            None => calls(json),
        }
    }

    fn look_for_close(&mut self) -> bool {
        let rest = self.held.trim_start();
        let len = self.held.len() - rest.len();
        if let Some(close) = self.format.close()
            && len < MAX_CALL_BYTES
        {
            if rest.starts_with(close) {
                self.held.drain(..len + close.len());
            } else if close.starts_with(rest) {
                return false;
            }
        }
        self.state = State::Text;
        true
    }

    /// It is no call: so much of the text goes out, and the rest is looked at from there.
    fn give_up(&mut self, len: usize) -> bool {
        self.release(len);
        (self.state, self.at) = (State::Text, 0);
        true
    }

    /// Give out the text up to `len`, or to the character there.
    fn release(&mut self, len: usize) {
        let len = (0..=len).rev().find(|at| self.held.is_char_boundary(*at)).unwrap_or(0);
        let text: String = self.held.drain(..len).collect();
        self.text(text);
    }

    fn text(&mut self, text: String) {
        if text.is_empty() {
            return;
        }
        self.release_blank();
        self.found.push(Found::Text(text));
    }

    fn release_blank(&mut self) {
        self.is_blank = false;
        if !self.blank.is_empty() {
            self.found.push(Found::Text(std::mem::take(&mut self.blank)));
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
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
                vec![
                    text("One."),
                    call("f", "{\"a\": 1}"),
                    call("my-tool.x", "{}"),
                    call("g", "{}"),
                ],
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
            got +=
                found.iter().map(|one| matches!(one, Found::Text(text) if text.len() > 1)).count();
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
        let all: Vec<_> = ToolFormat::names().filter_map(ToolFormat::named).collect();
        prop::sample::select(all)
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
}
