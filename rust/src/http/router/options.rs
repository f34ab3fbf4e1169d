//! What an operator can set.

use std::time::Duration;

use crate::error::Result;
use crate::select::SelectorConfig;

/// Options of a router.
#[derive(Debug, Clone)]
pub struct RouterOptions {
    /// How requests are routed; its block size is learned where it is 0.
    pub selector: SelectorConfig,
    /// Follow the events of registered workers.
    pub use_kv_events: bool,
    /// Largest request body, bytes.
    pub max_body_bytes: usize,
    /// Time that a client may take to send its body.
    pub body_timeout: Duration,
    /// Workers that may be registered at once, each with all its ranks.
    pub max_workers: usize,
    /// Workers that must have registered before GET /ready says so.
    pub min_initial_workers: usize,
}

impl Default for RouterOptions {
    fn default() -> Self {
        Self {
            selector: SelectorConfig::default(),
            use_kv_events: true,
            max_body_bytes: 8 * 1024 * 1024,
            body_timeout: Duration::from_secs(60),
            max_workers: 4_096,
            min_initial_workers: 0,
        }
    }
}

impl RouterOptions {
    /// Check every field.
    ///
    /// # Errors
    /// As [`SelectorConfig::validate`].
    pub fn check(&self) -> Result<()> {
        self.selector.validate()
    }

    /// Whether engines' events are followed: nobody asks for what they tell otherwise.
    pub fn follows_events(&self) -> bool {
        self.use_kv_events && self.selector.router.overlap_score_weight > 0.0
    }
}
