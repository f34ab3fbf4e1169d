//! The fields of a chat completion body that decide its tokens.

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::error::{Error, Result};

/// A chat request, borrowed from its body: fields are kept as raw JSON until the template needs
/// them. Fields not named here do not change the prompt.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
pub struct ChatRequest<'a> {
    /// The conversation: a list of messages. Required.
    #[serde(borrow)]
    pub messages: Option<&'a RawValue>,
    /// Tool definitions.
    #[serde(borrow)]
    pub tools: Option<&'a RawValue>,
    /// `"none"`, `"auto"`, `"required"` or one named tool.
    #[serde(borrow)]
    pub tool_choice: Option<&'a RawValue>,
    /// Documents for retrieval-augmented templates.
    #[serde(borrow)]
    pub documents: Option<&'a RawValue>,
    /// Further variables for the template.
    #[serde(borrow)]
    pub chat_template_kwargs: Option<&'a RawValue>,
    /// A template of the request's own: never rendered here.
    #[serde(borrow)]
    pub chat_template: Option<&'a RawValue>,
    /// Variable of reasoning models' templates.
    #[serde(borrow)]
    pub reasoning_effort: Option<&'a RawValue>,
    /// The engine cuts the prompt: its tokens are not known here.
    #[serde(borrow)]
    pub truncate_prompt_tokens: Option<&'a RawValue>,
    /// Whether the prompt ends with the start of an answer; default true.
    pub add_generation_prompt: Option<bool>,
    /// Whether the last message is to be continued rather than answered; default false.
    pub continue_final_message: Option<bool>,
    /// Whether BOS and EOS are added around the rendered prompt; default false.
    pub add_special_tokens: Option<bool>,
}

impl<'a> ChatRequest<'a> {
    /// Find the fields in a JSON body.
    ///
    /// # Errors
    /// `Error::InvalidArgument` if the body is not a JSON object or a flag is not a boolean.
    pub fn parse(body: &'a [u8]) -> Result<Self> {
        // A list would be taken for the fields in order.
        if body.trim_ascii_start().first() != Some(&b'{') {
            return Err(Error::invalid("chat request: the body must be a JSON object"));
        }
        serde_json::from_slice(body)
            .map_err(|error| Error::invalid(format!("chat request: {error}")))
    }
}
