//! Forms of prompts, with an example or two of each, and which of them are tokenized here.

use bytes::Bytes;
use kvflash_core::named;
use serde_json::Value;

use crate::gateway::api::Api;
use crate::gateway::body::{Body, Envelope};

/// The examples: a list of requests, each with its form.
const CORPUS: &str = include_str!("corpus.json");

named! {
    /// A trait of prompts that local templates or tokenizers may treat differently than an engine's. A
    /// prompt may have several.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
    pub enum Form {
        /// A text prompt, without a template.
        Text = "text",
        /// A chat of any kind.
        Chat = "chat",
        /// A chat that contains answers.
        Turns = "turns",
        /// A chat with tools, or tool calls.
        Tools = "tools",
        /// A chat with reasoning content.
        Reasoning = "reasoning",
        /// A chat with characters beyond ASCII.
        Unicode = "unicode",
        /// A chat with variables for its template.
        TemplateKwargs = "template_kwargs",
        /// A chat with an adapter.
        Adapter = "adapter",
        /// A Messages request.
        Messages = "messages",
        /// A Responses request.
        Responses = "responses",
    }
}

impl Form {
    /// The API of this form, if it has its own.
    pub fn api(self) -> Option<Api> {
        match self {
            Self::Messages => Some(Api::Messages),
            Self::Responses => Some(Api::Responses),
            _ => None,
        }
    }
}

/// A set of forms.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Forms(u16);

impl Forms {
    pub const NONE: Self = Self(0);
    pub const ALL: Self = Self(u16::MAX);

    pub fn with(self, form: Form) -> Self {
        Self(self.0 | 1 << form as u8)
    }

    pub fn has(self, form: Form) -> bool {
        self.0 & 1 << form as u8 != 0
    }

    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    pub fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The complement.
    pub fn others(self) -> Self {
        Self(!self.0)
    }

    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The forms, among those `asked` for, of a request; `is_adapter` if its model is an adapter.
    ///
    /// # Cost
    /// A pass over the messages for each of turns, tools, reasoning and unicode in `asked`.
    pub fn of(envelope: &Envelope<'_>, is_adapter: bool, asked: Self) -> Self {
        let Some(messages) = envelope.messages.map(|raw| raw.get().as_bytes()) else {
            return Self::NONE.with(Form::Text).and(asked);
        };
        let holds = |word: &str| memchr::memmem::find(messages, word.as_bytes()).is_some();
        let has = |form| match form {
            // A separate API, which the envelope does not show.
            Form::Text | Form::Messages | Form::Responses => false,
            Form::Chat => true,
            Form::Turns => holds("\"assistant\""),
            Form::Tools => {
                let is_given = |raw: &str| raw != "null";
                envelope.tools.is_some_and(|raw| is_given(raw.get()))
                    || holds("\"tool_calls\"")
                    || holds("\"tool\"")
            }
            Form::Reasoning => holds("\"reasoning") || holds("think>"),
            Form::Unicode => !messages.is_ascii() || holds("\\u"),
            Form::TemplateKwargs => {
                envelope.chat_template_kwargs.is_some_and(|raw| raw.get() != "null")
            }
            Form::Adapter => is_adapter,
        };
        let found = Form::ALL.into_iter().filter(|form| asked.has(*form) && has(*form));
        found.fold(Self::NONE, Self::with)
    }
}

/// Which prompts of a model may be tokenized locally.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Standing {
    /// Forms with equal tokens in all versions of its engines.
    pub proven: Forms,
    /// Forms with different tokens in some version.
    pub remote: Forms,
}

/// All examples, grouped by form.
pub(crate) fn examples() -> Vec<(Form, Body)> {
    let entries: Vec<Value> = serde_json::from_str(CORPUS).expect("a test reads it");
    let read = |mut entry: Value| {
        let form = entry["form"].as_str().and_then(Form::from_name).expect("a test reads it");
        if let Some(fields) = entry.as_object_mut() {
            fields.remove("form");
        }
        (form, Body::parse(Bytes::from(entry.to_string())).expect("a test reads it"))
    };
    entries.into_iter().map(read).collect()
}

/// The text prompts: words, code, numbers, other scripts and white space, for which tokenizers of
/// different models differ.
pub(crate) fn texts() -> impl Iterator<Item = String> {
    let of = |(_, body): (Form, Body)| {
        let envelope: Envelope<'_> = body.read().ok()?;
        serde_json::from_str(envelope.prompt?.get()).ok()
    };
    examples().into_iter().filter_map(of)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::gateway::as_chat::chat_of;

    #[test]
    fn every_form_has_an_example_that_is_of_it() {
        let examples = examples();
        for form in Form::ALL {
            let of_form: Vec<_> = examples.iter().filter(|(other, _)| *other == form).collect();
            assert!(!of_form.is_empty(), "{form:?}");
            for (_, body) in of_form {
                if let Some(api) = form.api() {
                    assert!(chat_of(api, body).is_some(), "{form:?}");
                    continue;
                }
                let envelope: Envelope<'_> = body.read().unwrap();
                let found = Forms::of(&envelope, form == Form::Adapter, Forms::ALL);
                assert!(found.has(form), "{form:?}: {found:?}");
                assert_eq!(found.has(Form::Text), form == Form::Text);
            }
        }
    }

    #[test]
    fn only_what_is_asked_for_is_looked_at() {
        let body = br#"{"messages": [{"role": "assistant", "content": "\u00e9"}], "tools": null}"#;
        let body = Body::parse(Bytes::from_static(body)).unwrap();
        let envelope: Envelope<'_> = body.read().unwrap();
        let wanted = Forms::NONE.with(Form::Chat).with(Form::Turns).with(Form::Unicode);
        assert_eq!(Forms::of(&envelope, false, Forms::ALL), wanted);
        let asked = Forms::NONE.with(Form::Turns).with(Form::Tools);
        assert_eq!(Forms::of(&envelope, true, asked), Forms::NONE.with(Form::Turns));
    }
}
