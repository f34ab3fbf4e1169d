//! Text to tokens exactly as the engine does it: template, tokenizer, and the way back.
//!
//! Parity is everything here: a prompt rendered or cut one byte differently from the engine's makes
//! every cache match zero, silently. What cannot be reproduced exactly (images, a template of the
//! request's own) is [`Prompt::Unsupported`]: routed without tokens and counted, never guessed.
//!
//! - [`TextModel`]: a model's folder, loaded; chat or completion body in, token ids out
//! - [`Tokenizer`]: `fastokens`, checked against the `tokenizers` crate, or that crate itself, behind a cache of
//!   [pieces](CutMode)
//! - [`ChatTemplate`]: chat templates as `apply_chat_template` runs them, messages prepared as vLLM
//!   does
//! - [`Detokenizer`]: token ids to text as they arrive, complete characters only

mod config;
mod content;
mod cut;
mod detokenize;
mod encoder;
mod fast;
mod hard;
mod hub;
mod jinja;
mod known;
mod message;
mod model;
mod python;
mod request;
mod scan;
mod source;
mod template;
mod tokenizer;

pub use content::ContentFormat;
pub use cut::CutMode;
pub use detokenize::Detokenizer;
pub use encoder::EncoderReport;
pub use hub::model_folder;
pub use model::{Prompt, TextModel};
pub use request::{ChatRequest, Effort};
pub use scan::{Field, Scan};
pub use template::{ChatTemplate, Rendered, WallClock};
pub use tokenizer::{Tokenizer, Tokens};

pub use crate::cache::CacheStats;
