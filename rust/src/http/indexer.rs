//! The standalone indexer's API.

mod answer;
mod app;
mod dump;
mod request;

pub use app::{IndexerApp, IndexerOptions};
