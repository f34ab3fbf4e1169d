//! The fields of a chat completion body that decide its tokens.

use std::ops::Range;

/// How much work a prompt may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Effort {
    /// Longest text, bytes; a chat's is the rendered one.
    pub text_bytes: usize,
    /// Only what is done within about a millisecond: few steps of the template, and little text that is
    /// in no cache.
    pub is_quick: bool,
}

impl Effort {
    /// Whatever it takes.
    pub const FULL: Self = Self { text_bytes: usize::MAX, is_quick: false };

    /// Text that may be tokenized anew, bytes.
    pub(super) fn new_bytes(self) -> usize {
        if self.is_quick { QUICK_BYTES } else { usize::MAX }
    }

    /// Whether `all` bytes of JSON may be rendered, `new` of which are not known and must be read.
    pub(super) fn allows(self, all: usize, new: usize) -> bool {
        !self.is_quick || all <= LONG_JSON_BYTES || new <= QUICK_JSON_BYTES
    }
}

/// Text that a quick try tokenizes anew, bytes: without spaces, where tokenizers are slowest, some
/// milliseconds.
const QUICK_BYTES: usize = 2_048;

/// A conversation of more JSON than this is tried quickly only if little of it is new, bytes.
const LONG_JSON_BYTES: usize = 32 * 1_024;

/// New JSON in such a conversation, bytes: more than what a quick try tokenizes would be rendered in vain.
const QUICK_JSON_BYTES: usize = 2 * QUICK_BYTES;

/// A chat request, borrowed from its body: texts are the JSON of their fields, read when the template needs
/// them. Fields not named here do not change the prompt.
#[derive(Debug, Clone, Copy, Default)]
pub struct ChatRequest<'a> {
    /// The conversation: a list of messages. Required.
    pub messages: Option<&'a str>,
    /// Where each message stands in that list, if somebody has [scanned](super::Scan) it.
    pub places: Option<&'a [Range<usize>]>,
    /// Tool definitions.
    pub tools: Option<&'a str>,
    /// `"none"`, `"auto"`, `"required"` or one named tool.
    pub tool_choice: Option<&'a str>,
    /// Documents for retrieval-augmented templates.
    pub documents: Option<&'a str>,
    /// Further variables for the template.
    pub chat_template_kwargs: Option<&'a str>,
    /// A template of the request's own: never rendered here.
    pub chat_template: Option<&'a str>,
    /// Variable of reasoning models' templates.
    pub reasoning_effort: Option<&'a str>,
    /// The engine cuts the prompt: its tokens are not known here.
    pub truncate_prompt_tokens: Option<&'a str>,
    /// Whether the prompt ends with the start of an answer; default true.
    pub add_generation_prompt: Option<bool>,
    /// Whether the last message is to be continued rather than answered; default false.
    pub continue_final_message: Option<bool>,
    /// Whether BOS and EOS are added around the rendered prompt; default false.
    pub add_special_tokens: Option<bool>,
}
