//! The fields of a chat completion body that decide its tokens.

/// A chat request, borrowed from its body: texts are the JSON of their fields, read when the template needs
/// them. Fields not named here do not change the prompt.
#[derive(Debug, Clone, Copy, Default)]
pub struct ChatRequest<'a> {
    /// The conversation: a list of messages. Required.
    pub messages: Option<&'a str>,
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
