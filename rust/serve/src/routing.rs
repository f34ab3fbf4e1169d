//! Options of routing that the frontend and the router share.

use kvflash_core::error::{Error, Result};
use kvflash_core::policy::Settings;
use kvflash_core::select::{Overlap, Policies, QueueOptions, SelectorConfig};
use prometheus_client::registry::Registry;

use super::Http;
use super::page::{Page, Pages};
use super::policy_metrics::write_policies;
use super::remote::{RemoteIndexer, RemoteIndexerOptions};

/// How a service chooses workers, and what it knows of their caches.
#[derive(Debug, Clone, Default)]
pub struct RoutingOptions {
    /// How requests are routed, for all models; a block size of 0 is learned.
    pub selector: SelectorConfig,
    /// Deciding policies and shadows, for all models.
    pub policies: Policies,
    /// Settings of these policies.
    pub settings: Settings,
    /// The queue for a worker with room to prefill; `None`: requests never wait.
    pub queue: Option<QueueOptions>,
    /// Use this indexer for overlaps, and follow no events.
    pub remote_indexer: Option<RemoteIndexerOptions>,
    /// Whether to serve the indexer's API, too: /query, /query_by_hash, /dump, /digest.
    pub serve_indexer: bool,
    /// Workers that must have been present at once before the first request is accepted.
    pub min_initial_workers: usize,
}

impl RoutingOptions {
    /// The name of the deciding policy.
    pub fn policy_name(&self) -> &str {
        self.policies.active.name()
    }

    /// Whether engines' events are used: not if predictions or another indexer replace them, nor if
    /// overlaps have no weight.
    pub fn uses_events(&self) -> bool {
        !self.predicts() && self.remote_indexer.is_none() && self.selector.router.weighs_overlap()
    }

    /// Whether routing's own predictions replace events.
    pub(crate) fn predicts(&self) -> bool {
        self.selector.overlap == Overlap::Predictions
    }

    /// Checks every field.
    ///
    /// # Errors
    /// As [`SelectorConfig::validate`]; `Config` for options that contradict each other.
    pub(crate) fn check(&self) -> Result<()> {
        if self.serve_indexer && self.remote_indexer.is_some() {
            return Err(Error::Config(
                "--serve-indexer and --use-remote-indexer exclude each other: with a remote indexer there is no \
                 local index to serve"
                    .to_owned(),
            ));
        }
        self.selector.validate()?;
        self.queue.as_ref().map_or(Ok(()), QueueOptions::check)
    }

    /// Registers the metrics of the policies, and of the remote indexer, if there is one.
    ///
    /// # Errors
    /// `Config` for an invalid address of the indexer.
    pub(crate) fn register(
        &self,
        http: &Http,
        registry: &mut Registry,
    ) -> Result<Option<RemoteIndexer>> {
        let (name, policies) = (self.policy_name().to_owned(), self.policies.clone());
        let settings = self.settings.clone();
        registry.register_collector(Box::new(Pages(move |page: &mut Page<'_>| {
            write_policies(page, &name, &policies, &settings)
        })));
        let remote = self.remote_indexer.as_ref();
        remote.map(|remote| RemoteIndexer::new(remote, http, registry)).transpose()
    }
}
