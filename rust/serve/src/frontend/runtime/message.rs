//! The parts of a chat's message: reasoning (by the crate `reasoning-parser`), content and tool calls in the text of a
//! worker of tokens.

use std::sync::LazyLock;

use kvflash_core::error::{Error, Result};
use reasoning_parser::{ParserFactory, ParserResult, ReasoningParser};
use serde_json::{Value, json};

use super::spec::Card;
use super::tool_call::{Call, Found, ToolCalls, ToolFormat};
use super::writing::Ending;
use crate::spelling::nearest;

/// How a model marks its reasoning and its calls; without a format they are content.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Formats {
    pub reasoning: Option<ReasoningFormat>,
    pub tools: Option<ToolFormat>,
}

impl Formats {
    /// Those that `--reasoning-parser` and `--tool-call-parser` name.
    ///
    /// # Errors
    /// `Config` naming the flag, the known names and what came.
    pub fn of_flags(reasoning: Option<&str>, tools: Option<&str>) -> Result<Self> {
        Ok(Self {
            reasoning: reasoning
                .map(|name| of_reasoning("--reasoning-parser", name))
                .transpose()?,
            tools: tools.map(|name| of_tools("--tool-call-parser", name)).transpose()?,
        })
    }

    /// Whether the text must have all special tokens.
    pub fn needs_special_tokens(&self) -> bool {
        self.reasoning.as_ref().is_some_and(ReasoningFormat::needs_special_tokens)
    }

    /// Those that a card names, and for the rest `self`; and what is wrong with the card's.
    pub fn of_card(&self, card: &Card) -> (Self, Option<Error>) {
        let (mut formats, mut wrong) = (self.clone(), None);
        if let Some(name) = &card.reasoning_parser {
            match of_reasoning("its card's reasoning_parser", name) {
                Ok(format) => formats.reasoning = Some(format),
                Err(error) => wrong = Some(error),
            }
        }
        if let Some(name) = &card.tool_call_parser {
            match of_tools("its card's tool_call_parser", name) {
                Ok(format) => formats.tools = Some(format),
                Err(error) => wrong = Some(error),
            }
        }
        (formats, wrong)
    }
}

fn of_reasoning(place: &str, name: &str) -> Result<ReasoningFormat> {
    ReasoningFormat::named(name).ok_or_else(|| {
        let names = ReasoningFormat::names();
        unknown(place, name, &names.iter().map(String::as_str).collect::<Vec<_>>())
    })
}

fn of_tools(place: &str, name: &str) -> Result<ToolFormat> {
    let names = || ToolFormat::ALL.map(ToolFormat::name);
    ToolFormat::from_name(name).ok_or_else(|| unknown(place, name, &names()))
}

fn unknown(place: &str, name: &str, known: &[&str]) -> Error {
    let hint = nearest(name, known.iter().copied());
    let hint = hint.map(|meant| format!("; did you mean {meant:?}?")).unwrap_or_default();
    Error::Config(format!("{place} must be one of {}, got {name:?}{hint}", known.join(", ")))
}

/// A part of a message, or some more of one.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Reasoning(String),
    Content(String),
    Call(NamedCall),
}

/// A call as clients get it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NamedCall {
    /// Its place among the message's calls.
    pub index: usize,
    pub id: String,
    pub call: Call,
}

impl NamedCall {
    pub fn json(&self) -> Value {
        let function = json!({ "name": self.call.name, "arguments": self.call.arguments });
        json!({ "id": self.id, "type": "function", "function": function })
    }
}

/// A whole message.
#[derive(Debug, Default)]
pub(crate) struct Message {
    pub reasoning: String,
    pub content: String,
    pub calls: Vec<NamedCall>,
}

impl Message {
    pub fn add(&mut self, part: Part) {
        match part {
            Part::Reasoning(text) => self.reasoning.push_str(&text),
            Part::Content(text) => self.content.push_str(&text),
            Part::Call(call) => self.calls.push(call),
        }
    }
}

/// Takes a text apart as it comes.
#[derive(Default)]
pub(crate) struct Parsing {
    reasoning: Option<Reasoning>,
    tools: Option<ToolCalls>,
    /// Most calls that the message may have; the model may not know of it, and makes more.
    calls_max: usize,
    /// Calls so far.
    calls: usize,
}

impl Parsing {
    /// Of an answer in these formats to a prompt that ends so; `tools` may be called, so often.
    pub fn new(formats: &Formats, prompt_end: &str, tools: Vec<String>, calls_max: usize) -> Self {
        let reasoning = formats.reasoning.as_ref();
        // Without tools what looks like a call is none.
        let format = formats.tools.filter(|_| !tools.is_empty());
        Self {
            reasoning: reasoning.map(|format| Reasoning::new(format, prompt_end)),
            tools: format.map(|format| ToolCalls::new(format, tools)),
            calls_max,
            calls: 0,
        }
    }

    /// It changes nothing.
    pub fn is_idle(&self) -> bool {
        self.reasoning.is_none() && self.tools.is_none()
    }

    /// Tags that must be in the text even where they are special tokens.
    pub fn tags(&self) -> &'static [&'static str] {
        self.tools.as_ref().map_or(&[], |calls| calls.format().tags())
    }

    /// Take a piece of the text; the parts that are known now.
    pub fn push(&mut self, text: String) -> Vec<Part> {
        let mut parts = Vec::new();
        let content = match &mut self.reasoning {
            None => text,
            Some(reasoning) => told(reasoning.push(&text), &mut parts),
        };
        self.content(content, &mut parts);
        parts
    }

    /// The text is over: what was held back.
    pub fn finish(&mut self) -> Vec<Part> {
        let mut parts = Vec::new();
        if let Some(reasoning) = &mut self.reasoning {
            let content = told(reasoning.finish(), &mut parts);
            self.content(content, &mut parts);
        }
        if let Some(calls) = &mut self.tools {
            let (format, found) = (calls.format(), calls.finish());
            self.found(format, found, &mut parts);
        }
        parts
    }

    /// The end of a message with these parts.
    pub fn ending(&self, mut ending: Ending) -> Ending {
        if self.calls > 0 && ending.reason == "stop" {
            "tool_calls".clone_into(&mut ending.reason);
        }
        ending
    }

    fn content(&mut self, content: String, parts: &mut Vec<Part>) {
        if content.is_empty() {
            return;
        }
        match &mut self.tools {
            None => parts.push(Part::Content(content)),
            Some(calls) => {
                let (format, found) = (calls.format(), calls.push(&content));
                self.found(format, found, parts);
            }
        }
    }

    fn found(&mut self, format: ToolFormat, found: Vec<Found>, parts: &mut Vec<Part>) {
        for one in found {
            parts.push(match one {
                Found::Text(text) => Part::Content(text),
                Found::Call(_) if self.calls == self.calls_max => continue,
                Found::Call(call) => {
                    let index = self.calls;
                    self.calls += 1;
                    Part::Call(NamedCall { index, id: make_id(format), call })
                }
            });
        }
    }
}

/// The content of what was told apart; its reasoning is a part of its own.
fn told(parsed: ParserResult, parts: &mut Vec<Part>) -> String {
    if !parsed.reasoning_text.is_empty() {
        parts.push(Part::Reasoning(parsed.reasoning_text));
    }
    parsed.normal_text
}

/// The name of a call, by which the client's next request tells its result.
fn make_id(format: ToolFormat) -> String {
    match format {
        // The templates of its models refuse any length but 9.
        ToolFormat::Mistral => format!("{:09x}", rand::random::<u64>() >> 28),
        _ => format!("call_{:024x}", rand::random::<u128>() >> 32),
    }
}

/// Longest tag, bytes; what is longer is text.
const MAX_TAG_BYTES: usize = 64;

static FACTORY: LazyLock<ParserFactory> = LazyLock::new(ParserFactory::new);

/// How a model marks its reasoning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReasoningFormat(String);

impl ReasoningFormat {
    /// All names, in alphabetical order.
    pub fn names() -> Vec<String> {
        FACTORY.list_parsers()
    }

    pub fn named(name: &str) -> Option<Self> {
        FACTORY.registry().has_parser(name).then(|| Self(name.to_owned()))
    }

    /// Whether its tags are special tokens, which texts are without otherwise.
    pub fn needs_special_tokens(&self) -> bool {
        self.parser().requires_special_tokens()
    }

    fn parser(&self) -> Box<dyn ReasoningParser> {
        FACTORY.registry().create_parser(&self.0).expect("its name was looked up")
    }

    /// A parser that knows how the prompt ends: a template may have opened or closed the reasoning there.
    fn parser_behind(&self, prompt_end: &str) -> Box<dyn ReasoningParser> {
        let fresh = self.parser();
        let prompt_end = prompt_end.trim_end();
        let Some(at) = prompt_end.rfind(opens) else { return fresh };
        let mut primed = self.parser();
        let parsed = primed.parse_reasoning_streaming_incremental(&prompt_end[at..]);
        let is_tag = parsed.is_ok_and(|parsed| parsed.is_empty())
            && primed.is_in_reasoning() != fresh.is_in_reasoning();
        if is_tag { primed } else { fresh }
    }
}

fn add(to: &mut ParserResult, more: &ParserResult) {
    to.reasoning_text.push_str(&more.reasoning_text);
    to.normal_text.push_str(&more.normal_text);
}

/// Tells the reasoning of one answer from the rest.
///
/// # Consistency
/// However the text is cut, the same comes out: the crate's parsers miss tags that are cut, so they get each
/// tag whole and by itself. Only tags are left out.
struct Reasoning {
    parser: Box<dyn ReasoningParser>,
    /// The begin of what may be a tag, at most [`MAX_TAG_BYTES`] and a character.
    held: String,
}

impl Reasoning {
    /// For an answer to a prompt that ends so.
    pub fn new(format: &ReasoningFormat, prompt_end: &str) -> Self {
        Self { parser: format.parser_behind(prompt_end), held: String::new() }
    }

    /// Take a piece of the text.
    pub fn push(&mut self, piece: &str) -> ParserResult {
        let mut all = ParserResult::default();
        self.held.push_str(piece);
        let held = std::mem::take(&mut self.held);
        let mut rest = held.as_str();
        while let Some(len) = unit(rest) {
            self.feed(&rest[..len], &mut all);
            rest = &rest[len..];
        }
        rest.clone_into(&mut self.held);
        all
    }

    /// The text is over: what was held back.
    pub fn finish(&mut self) -> ParserResult {
        let mut all = ParserResult::default();
        let held = std::mem::take(&mut self.held);
        self.feed(&held, &mut all);
        add(&mut all, &self.parser.flush().unwrap_or_default());
        all
    }

    fn feed(&mut self, text: &str, all: &mut ParserResult) {
        if let Ok(parsed) = self.parser.parse_reasoning_streaming_incremental(text) {
            return add(all, &parsed);
        }
        // It holds back too much and has not taken this piece: both go out as what they seem to be.
        add(all, &self.parser.flush().unwrap_or_default());
        let is_reasoning = self.parser.is_in_reasoning();
        let part = if is_reasoning { &mut all.reasoning_text } else { &mut all.normal_text };
        part.push_str(text);
    }
}

/// Whether a tag of any model begins so.
fn opens(c: char) -> bool {
    matches!(c, '<' | '\u{25c1}')
}

fn closes(c: char) -> bool {
    matches!(c, '>' | '\u{25b7}')
}

/// Bytes of the first part of a text: up to a tag, or a tag. `None` while more must come to know its end.
fn unit(text: &str) -> Option<usize> {
    let first = text.chars().next()?;
    if !opens(first) {
        return Some(text.find(opens).unwrap_or(text.len()));
    }
    text.char_indices().skip(1).find_map(|(at, c)| {
        let is_over = opens(c) || c.is_whitespace() || at >= MAX_TAG_BYTES;
        if closes(c) && at < MAX_TAG_BYTES {
            Some(at + c.len_utf8())
        } else {
            is_over.then_some(at)
        }
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
