//! Routing settings that the frontend, the router and the router's core share.

use kvflash_core::catalog::CatalogOptions;
use kvflash_core::error::Error;
use kvflash_core::policy::{AUTO, Counted};
use kvflash_core::select::{
    BusySettings, CacheSettings, CostSettings, DecisionSettings, IndexSettings, LoadSettings,
    ModeSettings, Overlap, QueueOptions, QueueThreshold, RemoteSettings, RouterConfig,
    SelectorConfig, Thresholds, TierWeights,
};
use kvflash_core::settings::{Concern, Given};
use kvflash_serve::{RemoteIndexerOptions, RoutingOptions};
use pyo3::prelude::*;

use super::error::{OrRaise, raise};
use super::policies::Chosen;
use super::policy_desk::PolicyDesk;

/// The result of the routing settings.
pub(super) struct Routing {
    /// Its selector's request limit is the default.
    pub options: RoutingOptions,
    /// Limits of the catalog.
    pub limits: CatalogOptions,
}

impl Routing {
    /// Take the routing settings; those of replicas belong to Python.
    ///
    /// # Errors
    /// As [`Concern::take`]; `Config`, by the setting's name.
    pub fn take(
        py: Python<'_>,
        given: &mut Given,
        desk: Option<&Py<PolicyDesk>>,
    ) -> PyResult<Self> {
        let (mut is_kv_meant, mut is_router_ttl_meant) = (false, false);
        given.take("is_kv_meant", &mut is_kv_meant).or_raise(py)?;
        given.take("is_router_ttl_meant", &mut is_router_ttl_meant).or_raise(py)?;
        let mode = ModeSettings::take(given).or_raise(py)?;
        let cost = CostSettings::take(given).or_raise(py)?;
        let load = LoadSettings::take(given).or_raise(py)?;
        let caches = CacheSettings::take(given).or_raise(py)?;
        let busy = BusySettings::take(given).or_raise(py)?;
        let decisions = DecisionSettings::take(given).or_raise(py)?;
        let index = IndexSettings::take(given).or_raise(py)?;
        let remote = RemoteSettings::take(given).or_raise(py)?;
        let foresight = Foresight::of(py, &caches)?;
        let seed = decisions.seed.unwrap_or_else(rand::random);
        let chosen = Chosen::new(
            mode.policy.as_deref(),
            mode.policy_profile.as_deref(),
            &mode.shadow_policies,
            Counted {
                active_blocks: load.track_active_blocks,
                prefill_tokens: load.track_prefill_tokens,
                kv_reuse: load.assume_kv_reuse,
            },
            desk.map(Py::get),
            mode.session_affinity_ttl_s,
            if is_kv_meant { "kv" } else { cost.default_policy(&load) },
            caches.use_kv_events && cost.weighs_overlap(),
            seed,
        );
        let Chosen { built_in, policies, settings } = chosen.or_raise(py)?;
        let is_auto = policies.active.as_ref().is_some_and(|active| active.name() == AUTO);
        let router = RouterConfig {
            block_size: cost.block_size.unwrap_or(0),
            policy: built_in,
            overlap_score_weight: cost.overlap_score_weight,
            scale: cost.scale(),
            prefill_speed: cost.prefill_tokens_per_s,
            tiers: TierWeights {
                host: cost.host_cache_hit_weight,
                disk: cost.disk_cache_hit_weight,
            },
            temperature: cost.temperature,
            track_active_blocks: load.track_active_blocks,
            track_output_blocks: load.track_output_blocks,
            assume_kv_reuse: load.assume_kv_reuse,
            track_prefill_tokens: load.track_prefill_tokens,
            expiry_ms: load.active_request_expiry_secs.as_millis() as u64,
            seed,
            ..RouterConfig::default()
        };
        let queue = queue(py, &busy)?;
        let selector = SelectorConfig {
            router,
            overlap: foresight.overlap,
            thresholds: Thresholds {
                active_decode_blocks: busy.active_decode_blocks_threshold,
                active_prefill_tokens: busy.active_prefill_tokens_threshold,
                active_prefill_tokens_frac: busy.active_prefill_tokens_threshold_frac,
            },
            queue: queue.as_ref().map(|queue| queue.threshold),
            journal_bytes: decisions.decision_journal_bytes,
            logs_decisions: decisions.log_decisions,
        };
        let options = RoutingOptions {
            selector,
            policies,
            settings,
            queue,
            min_initial_workers: decisions.min_initial_workers,
            serve_indexer: remote.serve_indexer,
            remote_indexer: remote
                .remote_indexer
                .map(|url| RemoteIndexerOptions { url, deadline: remote.remote_indexer_deadline }),
        };
        Ok(Self {
            options,
            limits: CatalogOptions {
                // An explicit time enables this; `kv` has its documented default.
                has_histories: is_auto
                    && !caches.use_kv_events
                    && !is_router_ttl_meant
                    && caches.router_ttl_s == CacheSettings::default().router_ttl_s,
                ..foresight.limit(&index)
            },
        })
    }
}

/// The queue for a worker with room to prefill; `None` without a threshold.
fn queue(py: Python<'_>, busy: &BusySettings) -> PyResult<Option<QueueOptions>> {
    let order = busy.router_queue_policy.parse().or_raise(py)?;
    Ok(busy.router_queue_threshold.map(|batches| QueueOptions {
        threshold: QueueThreshold { batches, batched_tokens: busy.router_queue_batched_tokens },
        order,
        limit: busy.router_queue_limit,
        max_wait: busy.router_queue_timeout_s,
    }))
}

/// Predictions from routing itself, and how long they are valid.
struct Foresight {
    overlap: Overlap,
    ttl_ms: u64,
    max_predicted: (usize, usize),
}

impl Foresight {
    fn of(py: Python<'_>, caches: &CacheSettings) -> PyResult<Self> {
        let fault = |text: String| Err(raise(py, &Error::Config(text)));
        let (max_tree_size, target_ratio) =
            (caches.router_max_tree_size, caches.router_prune_target_ratio);
        if !(0.0..=1.0).contains(&target_ratio) {
            return fault(format!(
                "router_prune_target_ratio must be in 0..=1, got {target_ratio}"
            ));
        }
        if max_tree_size == 0 {
            return fault("router_max_tree_size must be at least 1, got 0".to_owned());
        }
        let predicted = caches.predicted_ttl_s.unwrap_or_default().as_millis() as u64;
        // Zero means the shortest time, not forever.
        let routed = (caches.router_ttl_s.as_millis() as u64).max(1);
        let (overlap, ttl_ms) = match (caches.use_kv_events, predicted) {
            (false, _) => (Overlap::Predictions, routed),
            (true, 0) => (Overlap::Events, 0),
            (true, ttl_ms) => (Overlap::EventsAndPredictions, ttl_ms),
        };
        // Both settings are in 0..=max, so their product is, too.
        let target = (max_tree_size as f64 * target_ratio).floor() as usize;
        Ok(Self { overlap, ttl_ms, max_predicted: (max_tree_size, target) })
    }

    fn limit(&self, index: &IndexSettings) -> CatalogOptions {
        let is_on = self.overlap != Overlap::Events;
        CatalogOptions {
            max_blocks: index.max_blocks,
            index_memory_bytes: index.index_memory_bytes,
            predicted_ttl_ms: self.ttl_ms,
            max_predicted: if is_on { self.max_predicted } else { (0, 0) },
            ..CatalogOptions::default()
        }
    }
}
