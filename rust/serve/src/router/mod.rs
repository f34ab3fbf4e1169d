//! The standalone router's API: the routing decision for gateways that forward requests themselves.
//!
//! A gateway registers its workers, asks with a prompt's tokens or hashes, and reports when the
//! prompt was prefilled and when the request ended. See docs/router.md.

mod answer;
mod app;
mod choose;
mod fleet;
mod method;
mod metrics;
mod replicas;
mod request;
mod routes;

pub use app::RouterOptions;
pub use routes::RouterApp;

#[cfg(test)]
mod tests;
