//! Options of routing that the frontend and the router share.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use kvflash_core::clock::Clock;
use kvflash_core::error::{Error, Result};
use kvflash_core::policy::{Sample, Settings};
use kvflash_core::select::{Overlap, Policies, QueueOptions, SelectorConfig};
use prometheus_client::registry::Registry;

use super::Http;
use super::page::{Labels, Page, Pages, and, label};
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
        clock: &Arc<dyn Clock>,
        registry: &mut Registry,
    ) -> Result<Option<RemoteIndexer>> {
        let (name, policies) = (self.policy_name().to_owned(), self.policies.clone());
        let (settings, clock) = (self.settings.clone(), Arc::clone(clock));
        registry.register_collector(Box::new(Pages(move |page: &mut Page<'_>| {
            write_policies(page, &name, &policies, &settings, clock.now_ms())
        })));
        let remote = self.remote_indexer.as_ref();
        remote.map(|remote| RemoteIndexer::new(remote, http, registry)).transpose()
    }
}

/// Writes the name of the deciding policy, and what it and the shadows report at each scrape.
fn write_policies(
    page: &mut Page<'_>,
    name: &str,
    policies: &Policies,
    settings: &Settings,
    now_ms: u64,
) -> fmt::Result {
    let help = "Constant 1; the labels give the policy that chooses workers and the source of its defaults";
    let info = and(&label("policy", name), "profile", settings.profile.name());
    page.gauges("policy_info", help, [(info, 1)])?;
    let origins = settings.origins.iter().map(|origin| {
        let source = origin.read_from.as_deref().unwrap_or("default");
        let labels = and(&label("name", origin.name), "source", source);
        (and(&labels, "value", &origin.value), 1)
    });
    let help = "Constant 1; the labels give a variable of the policies, its value and its source";
    page.gauges("policy_setting_info", help, origins)?;
    // A policy that appears twice in a strategy has one family of metrics.
    let mut by_name = BTreeMap::<String, (&str, BTreeMap<Labels, f64>)>::new();
    policies.samples(now_ms, &mut |sample: Sample<'_>| {
        let labels = match sample.label {
            ("", _) => Labels::new(),
            (key, value) => vec![(key.to_owned().into(), value.to_owned())],
        };
        let (_, family) =
            by_name.entry(sample.name.to_owned()).or_insert_with(|| (sample.help, BTreeMap::new()));
        *family.entry(labels).or_default() += sample.value;
    });
    for (name, (help, family)) in by_name {
        match name.strip_suffix("_total") {
            Some(name) => page.counters(name, help, family)?,
            None => page.gauges(&name, help, family)?,
        }
    }
    Ok(())
}
