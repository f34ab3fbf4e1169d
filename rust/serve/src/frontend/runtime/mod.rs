//! Workers of the runtime: found by discovery, reached over the request plane, tokens in and out.
//!
//! - `plane`, `tcp`: bytes to a worker and back; one [`plane::Items`] a request
//! - `spec`, `registry`: who a worker is, how it comes and goes, whether it lives
//! - `item`: what it says
//! - `writing`: from the worker's tokens to an OpenAI answer
//! - `message`, `tool_call`: from the text to a message of reasoning, content and calls
//! - `texts`: the tokenizers that workers share, and those that the operator names, by model

pub(crate) mod item;
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
