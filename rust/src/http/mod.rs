//! Doors over HTTP: the indexer's API, the OpenAI-compatible frontend, the standalone router. tokio
//! lives here.

mod body;
mod busy;
pub mod frontend;
pub mod indexer;
mod metrics;
mod reject;
mod remote;
pub mod router;
mod serve;

pub use reject::Reject;
pub use remote::RemoteIndexerOptions;
pub use serve::{ServeLimits, Shutdown, serve};
