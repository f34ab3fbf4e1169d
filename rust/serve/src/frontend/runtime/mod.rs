//! Workers of the runtime: found by discovery, reached over the request plane, tokens in and out.
//!
//! - `frames`, `plane`, `tcp`, `web`: bytes to a worker and back; one [`plane::Items`] a request
//! - `spec`, `member`, `registry`: who a worker is, what the frontend keeps of it, how it comes and
//!   goes, whether it lives
//! - `stop`, `writing`, `wording`: from the worker's tokens to an OpenAI answer
//! - `reasoning`, `tool_call`, `message`: from the text to a message of reasoning, content and calls
//! - `texts`: the tokenizers that workers share, and those that the operator names, by model
//! - `chunks`: answers of workers that take and give text

pub(crate) mod item;
pub(crate) mod member;
pub(crate) mod message;
pub(crate) mod plane;
pub(super) mod registry;
pub(crate) mod spec;
mod tcp;
pub(crate) mod texts;
mod tool_call;
pub(crate) mod writing;

#[cfg(test)]
mod tests;
