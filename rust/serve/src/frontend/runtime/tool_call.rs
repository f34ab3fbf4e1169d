//! Tool calls in a text that comes in pieces, in the ways in which models write them.

use std::borrow::Cow;

use kvflash_core::named;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

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
        let rest = self.held[self.at..].trim_start();
        let len = self.held.len() - rest.len();
        self.at = len;
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

named! {
    /// How a model writes its calls.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum ToolFormat {
        /// `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
        Hermes = "hermes",
        /// `{"name": ..., "parameters": {...}}` as the whole answer, several with `;` between them, or behind
        /// `<|python_tag|>`.
        Llama3Json = "llama3_json",
        /// `[TOOL_CALLS]` and a list of objects, or a name and its arguments: `name[ARGS]{...}`.
        Mistral = "mistral",
    }
}

impl ToolFormat {
    /// Its tags; some tokenizers have them as special tokens, which texts are without otherwise.
    pub fn tags(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &["<tool_call>", "</tool_call>"],
            Self::Llama3Json => &["<|python_tag|>"],
            Self::Mistral => &["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
        }
    }

    /// What a call begins with.
    pub fn open(self) -> &'static str {
        self.tags()[0]
    }

    /// What may stand behind a call and belongs to it.
    pub fn close(self) -> Option<&'static str> {
        match self {
            Self::Hermes => Some("</tool_call>"),
            Self::Llama3Json => Some(";"),
            Self::Mistral => None,
        }
    }
}

/// A call as the model wrote it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Call {
    pub name: String,
    /// A JSON object, with the model's own blanks and digits.
    pub arguments: String,
}

impl Call {
    /// A call with its name in front of its arguments.
    pub fn of(name: &str, arguments: &str) -> Option<Self> {
        let arguments = object(Some(serde_json::from_str(arguments).ok()?))?;
        Some(Self { name: name.to_owned(), arguments })
    }
}

/// The calls that a JSON says: one, or a list of some.
fn calls(json: &str) -> Option<Vec<Call>> {
    if !json.starts_with('[') {
        return Some(vec![serde_json::from_str::<Said<'_>>(json).ok()?.call()?]);
    }
    let said: Vec<Said<'_>> = serde_json::from_str(json).ok()?;
    let calls: Option<Vec<Call>> = said.into_iter().map(Said::call).collect();
    calls.filter(|calls| !calls.is_empty())
}

/// Whether a name in front of arguments, or its marks, may have this byte.
fn is_of_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"_-.[]".contains(&byte)
}

/// The name in front of arguments, with the marks that Mistral's models put between them.
fn bare_name(text: &str) -> Option<&str> {
    let text = text.trim_start();
    let (name, marks) = text.split_at(text.find('[').unwrap_or(text.len()));
    let is_id =
        |marks: &str| marks.strip_prefix("[CALL_ID]").is_some_and(|id| !id.contains(['[', ']']));
    let marks = marks.strip_suffix("[ARGS]").unwrap_or(marks);
    (!name.is_empty() && (marks.is_empty() || is_id(marks))).then_some(name)
}

/// The object that says a call.
#[derive(Deserialize)]
struct Said<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    #[serde(borrow, default, alias = "parameters")]
    arguments: Option<&'a RawValue>,
}

impl Said<'_> {
    fn call(self) -> Option<Call> {
        let name = Some(self.name.into_owned()).filter(|name| !name.is_empty())?;
        Some(Call { name, arguments: object(self.arguments)? })
    }
}

/// An object as a text; some models write it as a text themselves.
fn object(said: Option<&RawValue>) -> Option<String> {
    let said = said.map_or("{}", RawValue::get);
    if said.starts_with('{') {
        return Some(said.to_owned());
    }
    let text: String = serde_json::from_str(said).ok()?;
    serde_json::from_str::<Map<String, Value>>(&text).is_ok().then_some(text)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
