//! The OpenAI-compatible frontend: tokens -> overlap -> decision -> upstream, streamed through.

mod admin;
mod app;
mod attempt;
mod busy;
mod client;
mod disagg;
pub(super) mod engine;
mod engine_metrics;
mod event_stream;
mod evidence;
mod fairness;
pub(super) mod fleet;
mod forward;
mod inspect;
mod metrics;
mod nvext;
mod openai_prefill;
mod options;
mod plan;
mod pool;
mod probe;
mod proxy;
mod query;
mod relay;
mod render;
mod replicas;
mod reply;
mod request;
mod runtime;
mod scrape;
mod served;
mod tokens;
mod urgency;
mod usage;

pub use app::FrontendApp;
pub use disagg::EnforceDisagg;
pub use engine::EngineSpec;
pub use fairness::FairnessOptions;
pub use options::FrontendOptions;

#[cfg(test)]
mod tests;
