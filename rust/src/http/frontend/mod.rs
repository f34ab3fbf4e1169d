//! The OpenAI-compatible frontend: tokens -> overlap -> decision -> upstream, streamed through.

mod admin;
mod app;
mod busy;
pub(super) mod engine;
mod fleet;
mod metrics;
mod options;
mod plan;
mod probe;
mod proxy;
mod relay;
mod request;
mod usage;

pub use app::FrontendApp;
pub use engine::EngineSpec;
pub use options::FrontendOptions;
