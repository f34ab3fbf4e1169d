//! Doors over HTTP: the indexer's API and the OpenAI-compatible frontend. tokio lives here.

mod body;
pub mod frontend;
pub mod indexer;
mod metrics;
mod reject;
mod serve;

pub use reject::Reject;
pub use serve::{ServeLimits, Shutdown, serve};
