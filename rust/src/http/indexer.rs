//! The standalone indexer's API.

mod answer;
mod app;
mod dump;
mod recover;
mod request;
mod startup;

pub use app::{IndexerApp, IndexerOptions};
