//! A model's folder, loaded: requests in, token ids out.

use std::path::Path;

use super::cache::CacheOptions;
use super::config::FolderConfig;
use super::request::ChatRequest;
use super::template::{ChatTemplate, Rendered, TemplateOptions};
use super::tokenizer::{Tokenizer, Tokens};
use crate::error::{Error, Result};

/// How to load a model's text side.
#[derive(Debug, Clone, Default)]
pub struct TextOptions {
    /// Limits of the segment cache.
    pub cache: CacheOptions,
    /// How the engine renders chats.
    pub template: TemplateOptions,
}

/// A chat request's prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// Its token ids.
    Tokens(Tokens),
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
}

impl TextModel {
    /// Load a model's folder: `tokenizer.json`, and what is there of `tokenizer_config.json`,
    /// `special_tokens_map.json` and the chat template files.
    ///
    /// # Errors
    /// `Error::Config` naming the file that is missing or invalid.
    pub fn from_folder(folder: impl AsRef<Path>, options: TextOptions) -> Result<Self> {
        let folder = folder.as_ref();
        let config = FolderConfig::read(folder)?;
        Ok(Self {
            tokenizer: Tokenizer::load(folder, &config, options.cache)?,
            template: ChatTemplate::load(&config, options.template)?,
        })
    }

    /// The tokens of a chat request, rendered and tokenized as the engine does it.
    ///
    /// # Errors
    /// `Error::InvalidArgument` if the model has no chat template, or for requests the engine would
    /// refuse too.
    pub fn chat_tokens(&self, request: &ChatRequest<'_>) -> Result<Prompt> {
        let Some(template) = &self.template else {
            return Err(Error::invalid("the model has no chat template"));
        };
        if request.truncate_prompt_tokens.is_some() {
            return Ok(Prompt::Unsupported("the engine truncates the prompt".to_owned()));
        }
        match template.render(request)? {
            Rendered::Text(text) => {
                let adds = request.add_special_tokens.unwrap_or(false);
                self.tokenizer.encode(&text, adds).map(Prompt::Tokens)
            }
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
}
