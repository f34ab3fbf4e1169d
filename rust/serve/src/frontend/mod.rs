//! The OpenAI-compatible frontend: its workers, operators' endpoints, routes. Requests go through
//! [`gateway`](crate::gateway).

mod admin;
pub(crate) mod app;
pub(crate) mod engine;
pub(crate) mod engine_spec;
pub(crate) mod fleet;
pub(crate) mod forms;
mod inspect;
pub(crate) mod metrics;
pub(crate) mod options;
pub(crate) mod parity;
mod probe;
pub(crate) mod proxy;
pub(crate) mod runtime;
mod scrape;
mod server_info;
mod service;
pub(crate) mod taught;
mod workers;

pub use engine_spec::EngineSpec;
pub use options::{EnforceDisagg, FrontendOptions};
pub use service::FrontendApp;

pub use crate::gateway::turn::FairnessOptions;
pub use crate::gateway::turn::Identity;

#[cfg(test)]
mod tests;
