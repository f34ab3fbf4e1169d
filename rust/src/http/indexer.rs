//! The standalone indexer's API.

mod answer;
mod app;
mod dump;
mod form;
mod overlap;
mod request;

pub use app::{IndexerApp, IndexerOptions};
pub use overlap::query_tokens;
