//! Options of the router.

use std::ops::Deref;

use kvflash_core::error::{Error, Result};
use kvflash_core::policy::Settings;
use kvflash_core::select::{Policies, QueueOptions, SelectorConfig};

use super::super::metrics::check_prefix;
use super::super::{Http, RemoteIndexerOptions, RouterSettings};

/// Options of a router; those in `own` are accessible as if they were here.
#[derive(Debug, Clone)]
pub struct RouterOptions {
    /// Settings that only a router has: limits and timeouts.
    pub own: RouterSettings,
    /// How requests are routed; a block size of 0 is learned.
    pub selector: SelectorConfig,
    /// Deciding policies and shadows, for all models.
    pub policies: Policies,
    /// Settings of these policies.
    pub settings: Settings,
    /// The queue for a worker with room to prefill, with the selector's threshold; `None`:
    /// reservations never wait.
    pub queue: Option<QueueOptions>,
    /// Follow the events of registered workers.
    pub use_kv_events: bool,
    /// Use this indexer for overlaps, and follow no events.
    pub remote_indexer: Option<RemoteIndexerOptions>,
    /// Whether to serve the indexer's API, too: /query, /query_by_hash, /dump, /digest.
    pub serve_indexer: bool,
    /// Registered workers required by GET /ready.
    pub min_initial_workers: usize,
    /// Limits of its connections and bodies.
    pub http: Http,
}

impl Default for RouterOptions {
    fn default() -> Self {
        Self {
            own: RouterSettings::default(),
            selector: SelectorConfig::default(),
            policies: Policies::default(),
            settings: Settings::default(),
            queue: None,
            use_kv_events: true,
            remote_indexer: None,
            serve_indexer: false,
            min_initial_workers: 0,
            http: Http::default(),
        }
    }
}

impl Deref for RouterOptions {
    type Target = RouterSettings;

    fn deref(&self) -> &RouterSettings {
        &self.own
    }
}

impl RouterOptions {
    /// The name of the deciding policy.
    pub fn policy_name(&self) -> &str {
        let built_in = self.selector.router.policy.name();
        self.policies.active.as_ref().map_or(built_in, |policy| policy.name())
    }

    /// Checks every field.
    ///
    /// # Errors
    /// As [`SelectorConfig::validate`]; `Config` for options that contradict each other.
    pub fn check(&self) -> Result<()> {
        if self.serve_indexer && self.remote_indexer.is_some() {
            return Err(Error::Config(
                "--serve-indexer and --use-remote-indexer exclude each other: with a remote indexer there is no \
                 local index to serve"
                    .to_owned(),
            ));
        }
        check_prefix(&self.metrics_prefix)?;
        self.queue.as_ref().map_or(Ok(()), QueueOptions::check)?;
        self.selector.validate()
    }

    /// Whether engines' events are followed: only if they are used.
    pub fn follows_events(&self) -> bool {
        let is_own = self.use_kv_events && self.remote_indexer.is_none();
        is_own && self.selector.router.weighs_overlap()
    }
}
