//! The parts of a chat's message: reasoning, content and tool calls in the text of a worker of tokens.

use kvflash_core::error::{Error, Result};
use serde_json::{Value, json};

use super::reasoning::{Reasoning, ReasoningFormat, Split};
use super::spec::Card;
use super::tool_call::{Found, ToolCalls};
use super::tool_call::{Call, ToolFormat};
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
    let names = || ToolFormat::names().collect::<Vec<_>>();
    ToolFormat::named(name).ok_or_else(|| unknown(place, name, &names()))
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
#[derive(Debug, Default)]
pub(crate) struct Parsing {
    reasoning: Option<Reasoning>,
    tools: Option<ToolCalls>,
    /// Calls so far.
    calls: usize,
}

impl Parsing {
    /// Of an answer in these formats to a prompt that ends so; `tools` may be called.
    pub fn new(formats: &Formats, prompt_end: &str, tools: Vec<String>) -> Self {
        let reasoning = formats.reasoning.as_ref();
        // Without tools what looks like a call is none.
        let format = formats.tools.filter(|_| !tools.is_empty());
        Self {
            reasoning: reasoning.map(|format| Reasoning::new(format, prompt_end)),
            tools: format.map(|format| ToolCalls::new(format, tools)),
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
fn told(split: Split, parts: &mut Vec<Part>) -> String {
    if !split.reasoning.is_empty() {
        parts.push(Part::Reasoning(split.reasoning));
    }
    split.content
}

/// The name of a call, by which the client's next request tells its result.
fn make_id(format: ToolFormat) -> String {
    match format {
        // The templates of its models refuse any length but 9.
        ToolFormat::Mistral => format!("{:09x}", rand::random::<u64>() >> 28),
        _ => format!("call_{:024x}", rand::random::<u128>() >> 32),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn parts(formats: &Formats, tools: &[&str], pieces: &[&str]) -> (Message, Parsing) {
        let tools = tools.iter().map(|&tool| tool.to_owned()).collect();
        let (mut parsing, mut message) = (Parsing::new(formats, "", tools), Message::default());
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
    fn an_unknown_name_is_refused_with_those_that_are_known() {
        let refused =
            |reasoning, tools| Formats::of_flags(reasoning, tools).unwrap_err().to_string();
        let error = refused(Some("qwen"), None);
        assert!(error.contains("--reasoning-parser must be one of base, "), "{error}");
        assert!(error.contains(", got \"qwen\"; did you mean \"qwen3\"?"), "{error}");
        assert_eq!(
            refused(None, Some("pythonic")),
            "--tool-call-parser must be one of hermes, llama3_json, mistral, got \"pythonic\""
        );
    }
}
