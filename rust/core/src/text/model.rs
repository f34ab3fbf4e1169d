//! A model's folder, loaded: requests in, token ids out.

use std::path::Path;

use super::config::FolderConfig;
use super::request::{ChatRequest, Effort};
use super::template::{ChatTemplate, Rendered};
use super::tokenizer::{Tokenizer, Tokens};
use crate::cache::CacheStats;
use crate::error::{Error, Result};

/// Models (by `model_type`) whose chats vLLM writes with code of its own, whatever template lies in
/// their folder.
///
/// # Source
/// vLLM's harmony path for gpt-oss, and its encoders for DeepSeek V3.2 and V4.
const CODED_CHATS: [&str; 3] = ["gpt_oss", "deepseek_v32", "deepseek_v4"];

/// The part of the cache's memory for messages: one in so many bytes. Tokens take as much as their text and cost ten
/// times as much to make again.
const MESSAGES_SHARE: usize = 4;

/// A chat request's prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// Its token ids.
    Tokens(Tokens),
    /// A quick try did not come to its end.
    Costly,
    /// Its text has more bytes than were allowed.
    TooLong,
    /// Its tokens cannot be known here, and why: route without tokens and count it.
    Unsupported(String),
}

/// Tokenizer and chat template of one model.
#[derive(Debug)]
pub struct TextModel {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The chat template; base models have none.
    pub template: Option<ChatTemplate>,
    /// Why the template's chats are not the engine's, if so.
    pub chat_unsupported: Option<String>,
}

impl TextModel {
    /// Load a model's folder, with limits of what is kept of text seen before, tokens of its pieces
    /// and messages: `tokenizer.json`, and what is there of `tokenizer_config.json`,
    /// `special_tokens_map.json` and the chat template files.
    ///
    /// # Errors
    /// `Error::Config` naming the file that is missing or invalid.
    pub fn from_folder(folder: impl AsRef<Path>, cache_bytes: usize) -> Result<Self> {
        let folder = folder.as_ref();
        let config = FolderConfig::read(folder)?;
        let share = if config.templates.is_empty() { 0 } else { cache_bytes / MESSAGES_SHARE };
        let coded = config.model_type.as_deref().filter(|kind| CODED_CHATS.contains(kind));
        let chat_unsupported =
            coded.map(|kind| format!("{kind} chats are not rendered by a template"));
        Ok(Self {
            chat_unsupported,
            tokenizer: Tokenizer::load(folder, &config, cache_bytes - share)?,
            template: ChatTemplate::load(&config, share)?,
        })
    }

    /// What the caches have done so far: of tokens, and of messages.
    pub fn cache_stats(&self) -> (CacheStats, CacheStats) {
        let of_messages = self.template.as_ref().map(ChatTemplate::cache_stats);
        (self.tokenizer.cache_stats(), of_messages.unwrap_or_default())
    }

    /// The tokens of a chat request, rendered and tokenized as the engine does it.
    ///
    /// # Errors
    /// `Error::InvalidArgument` if the model has no chat template, or for requests the engine would
    /// refuse too.
    pub fn chat_tokens(&self, request: &ChatRequest<'_>) -> Result<Prompt> {
        self.chat_tokens_within(request, Effort::FULL)
    }

    /// As [`chat_tokens`](Self::chat_tokens), within `effort`.
    ///
    /// # Errors
    /// As [`chat_tokens`](Self::chat_tokens).
    pub fn chat_tokens_within(&self, request: &ChatRequest<'_>, effort: Effort) -> Result<Prompt> {
        if let Some(reason) = &self.chat_unsupported {
            return Ok(Prompt::Unsupported(reason.clone()));
        }
        let Some(template) = &self.template else {
            return Err(Error::invalid("the model has no chat template"));
        };
        if request.truncate_prompt_tokens.is_some() {
            return Ok(Prompt::Unsupported("the engine truncates the prompt".to_owned()));
        }
        match template.render_within(request, effort)? {
            Rendered::Text(text) => {
                self.text_tokens(&text, request.add_special_tokens.unwrap_or(false), effort)
            }
            Rendered::Costly => Ok(Prompt::Costly),
            Rendered::TooLong => Ok(Prompt::TooLong),
            Rendered::Unsupported(reason) => Ok(Prompt::Unsupported(reason)),
        }
    }

    /// The tokens of a text prompt; engines add special tokens unless the request says otherwise.
    ///
    /// # Errors
    /// `Error::InvalidArgument` if the tokenizer refuses the text.
    pub fn completion_tokens(&self, prompt: &str, add_special_tokens: bool) -> Result<Tokens> {
        self.tokenizer.encode(prompt, add_special_tokens)
    }

    /// As [`completion_tokens`](Self::completion_tokens), within `effort`.
    ///
    /// # Errors
    /// `Error::InvalidArgument` if the tokenizer refuses the text.
    pub fn text_tokens(&self, text: &str, adds_special: bool, effort: Effort) -> Result<Prompt> {
        if text.len() > effort.text_bytes {
            return Ok(Prompt::TooLong);
        }
        let found = self.tokenizer.encode_within(text, adds_special, effort.new_bytes())?;
        Ok(found.map_or(Prompt::Costly, Prompt::Tokens))
    }
}
