//! Workers of the runtime: found by discovery, reached over the request plane, tokens in and out.
//!
//! - `frames`, `plane`, `tcp`, `web`: bytes to a worker and back; one [`plane::Items`] a request
//! - `spec`, `member`, `registry`, `liveness`: who a worker is, what the frontend keeps of it, how it comes
//!   and goes, whether it lives
//! - `prompt`, `body`, `call`: from an OpenAI body to the worker's request
//! - `stop`, `writing`, `wording`, `answer`: from the worker's tokens to an OpenAI answer
//! - `chunks`: answers of workers that take and give text

pub(super) mod answer;
pub(super) mod body;
pub(super) mod call;
mod chunks;
mod frames;
mod guide;
pub(super) mod item;
pub(super) mod liveness;
pub(super) mod member;
pub(super) mod plane;
pub(super) mod prompt;
pub(super) mod registry;
pub(super) mod spec;
mod stop;
mod tcp;
mod web;
mod wording;
mod writing;

#[cfg(test)]
mod tests;
