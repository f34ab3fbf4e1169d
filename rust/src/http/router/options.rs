//! What an operator can set.

use std::time::Duration;

use super::super::RemoteIndexerOptions;
use crate::error::{Error, Result};
use crate::select::SelectorConfig;

/// Options of a router.
#[derive(Debug, Clone)]
pub struct RouterOptions {
    /// How requests are routed; its block size is learned where it is 0.
    pub selector: SelectorConfig,
    /// Follow the events of registered workers.
    pub use_kv_events: bool,
    /// Ask this indexer what workers hold, and follow no events.
    pub remote_indexer: Option<RemoteIndexerOptions>,
    /// Answer the indexer's questions, too: /query, /query_by_hash, /dump, /digest.
    pub serve_indexer: bool,
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
            remote_indexer: None,
            serve_indexer: false,
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
    /// As [`SelectorConfig::validate`]; `Config` for options that contradict each other.
    pub fn check(&self) -> Result<()> {
        if self.serve_indexer && self.remote_indexer.is_some() {
            return Err(Error::Config(
                "--serve-indexer with --use-remote-indexer: there is no index here to serve"
                    .to_owned(),
            ));
        }
        self.selector.validate()
    }

    /// Whether engines' events are followed: nobody asks for what they tell otherwise.
    pub fn follows_events(&self) -> bool {
        let is_own = self.use_kv_events && self.remote_indexer.is_none();
        is_own && self.selector.router.overlap_score_weight > 0.0
    }
}
