//! The ways in which models write tool calls.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

/// How a model writes its calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ToolFormat {
    /// `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
    Hermes,
    /// `{"name": ..., "parameters": {...}}` as the whole answer, several with `;` between them, or behind
    /// `<|python_tag|>`.
    Llama3Json,
    /// `[TOOL_CALLS]` and a list of objects, or a name and its arguments: `name[ARGS]{...}`.
    Mistral,
}

impl ToolFormat {
    const ALL: [(&'static str, Self); 3] =
        [("hermes", Self::Hermes), ("llama3_json", Self::Llama3Json), ("mistral", Self::Mistral)];

    pub fn names() -> impl Iterator<Item = &'static str> {
        Self::ALL.into_iter().map(|(name, _)| name)
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|(known, _)| *known == name).map(|(_, format)| format)
    }

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
pub(super) fn calls(json: &str) -> Option<Vec<Call>> {
    if !json.starts_with('[') {
        return Some(vec![serde_json::from_str::<Said<'_>>(json).ok()?.call()?]);
    }
    let said: Vec<Said<'_>> = serde_json::from_str(json).ok()?;
    let calls: Option<Vec<Call>> = said.into_iter().map(Said::call).collect();
    calls.filter(|calls| !calls.is_empty())
}

/// Whether a name in front of arguments, or its marks, may have this byte.
pub(super) fn is_of_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"_-.[]".contains(&byte)
}

/// The name in front of arguments, with the marks that Mistral's models put between them.
pub(super) fn bare_name(text: &str) -> Option<&str> {
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
