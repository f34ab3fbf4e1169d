//! The standalone indexer's API.

mod answer;
mod app;
mod dump;
mod metrics;
mod request;

pub use app::{IndexerApp, IndexerOptions};
