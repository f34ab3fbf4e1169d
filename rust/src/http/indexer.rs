//! The standalone indexer's API.

mod answer;
mod app;
mod request;

pub use app::{IndexerApp, IndexerOptions};
