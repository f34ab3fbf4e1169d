//! The OpenAI-compatible frontend: tokens -> overlap -> decision -> upstream, streamed through.

mod admin;
mod app;
mod attempt;
mod busy;
mod disagg;
pub(super) mod engine;
mod fleet;
mod metrics;
mod nvext;
mod openai_prefill;
mod options;
mod plan;
mod probe;
mod proxy;
mod query;
mod relay;
mod replicas;
mod request;
mod runtime;
mod usage;

pub use app::FrontendApp;
pub use disagg::EnforceDisagg;
pub use engine::EngineSpec;
pub use options::FrontendOptions;
