//! Routing settings that the frontend, the router and the router's core share.

use kvflash_core::catalog::CatalogOptions;
use kvflash_core::error::{Error, Result};
use kvflash_core::load::LoadConfig;
use kvflash_core::policy::{AUTO, Counted};
use kvflash_core::select::{
    BusySettings, CacheSettings, CostSettings, DecisionSettings, IndexSettings, LoadSettings,
    ModeSettings, Overlap, QueueOptions, QueueThreshold, RemoteSettings, RouterConfig,
    SelectorConfig, Thresholds, TierWeights, without_effect,
};
use kvflash_core::settings::{Concern, Given};
use kvflash_serve::{RemoteIndexerOptions, RoutingOptions};
use pyo3::prelude::*;

use super::policies::chosen;
use super::policy_desk::PolicyDesk;

/// The routing settings, and the limits of the catalog. The selector's request limit is the
/// default; settings of replicas belong to Python.
///
/// # Errors
/// As [`Concern::take`]; `Config`, by the setting's name.
pub(super) fn routing(
    given: &mut Given,
    desk: Option<&Py<PolicyDesk>>,
) -> Result<(RoutingOptions, CatalogOptions)> {
    let (mut is_kv_meant, mut is_router_ttl_meant) = (false, false);
    given.take("is_kv_meant", &mut is_kv_meant)?;
    given.take("is_router_ttl_meant", &mut is_router_ttl_meant)?;
    let mode = ModeSettings::take(given)?;
    let cost = CostSettings::take(given)?;
    let load = LoadSettings::take(given)?;
    let caches = CacheSettings::take(given)?;
    let busy = BusySettings::take(given)?;
    let decisions = DecisionSettings::take(given)?;
    let index = IndexSettings::take(given)?;
    let remote = RemoteSettings::take(given)?;
    let (overlap, mut limits) = predictions(&caches, &index)?;
    let seed = decisions.seed.unwrap_or_else(rand::random);
    let counted = Counted {
        active_blocks: load.track_active_blocks,
        prefill_tokens: load.track_prefill_tokens,
        kv_reuse: load.assume_kv_reuse,
    };
    let default = if is_kv_meant { "kv" } else { cost.default_policy(&load) };
    let has_events = caches.use_kv_events && cost.weighs_overlap();
    let (policies, settings) =
        chosen(&mode, counted, desk.map(Py::get), default, has_events, seed)?;
    let deciding = policies.active.name();
    for warning in without_effect(deciding, &cost, &caches, &busy) {
        tracing::warn!("{warning}");
    }
    // An explicit time enables this; `kv` has its documented default.
    limits.has_histories = deciding == AUTO
        && !caches.use_kv_events
        && !is_router_ttl_meant
        && caches.router_ttl_s == CacheSettings::default().router_ttl_s;
    let router = RouterConfig {
        load: LoadConfig {
            block_size: cost.block_size.unwrap_or(0),
            track_prefill_tokens: load.track_prefill_tokens,
            prefill_speed: cost.prefill_tokens_per_s,
            expiry_ms: load.active_request_expiry_secs.as_millis() as u64,
            ..LoadConfig::default()
        },
        overlap_score_weight: cost.overlap_score_weight,
        scale: cost.scale(),
        tiers: TierWeights { host: cost.host_cache_hit_weight, disk: cost.disk_cache_hit_weight },
        temperature: cost.temperature,
        track_active_blocks: load.track_active_blocks,
        track_output_blocks: load.track_output_blocks,
        assume_kv_reuse: load.assume_kv_reuse,
        seed,
        ..RouterConfig::default()
    };
    let order = busy.router_queue_policy.parse()?;
    // Without a threshold no request waits for a worker with room to prefill.
    let queue = busy.router_queue_threshold.map(|batches| QueueOptions {
        threshold: QueueThreshold { batches, batched_tokens: busy.router_queue_batched_tokens },
        order,
        limit: busy.router_queue_limit,
        max_wait: busy.router_queue_timeout_s,
    });
    let selector = SelectorConfig {
        router,
        overlap,
        thresholds: Thresholds {
            active_decode_blocks: busy.active_decode_blocks_threshold,
            active_prefill_tokens: busy.active_prefill_tokens_threshold,
            active_prefill_tokens_frac: busy.active_prefill_tokens_threshold_frac,
        },
        queue: queue.as_ref().map(|queue| queue.threshold),
        journal_bytes: decisions.decision_journal_bytes,
        logs_decisions: decisions.log_decisions,
    };
    let deadline = remote.remote_indexer_deadline;
    let options = RoutingOptions {
        selector,
        policies,
        settings,
        queue,
        min_initial_workers: decisions.min_initial_workers,
        serve_indexer: remote.serve_indexer,
        remote_indexer: remote.remote_indexer.map(|url| RemoteIndexerOptions { url, deadline }),
    };
    Ok((options, limits))
}

/// Where overlaps come from, and the limits of the index and of routing's own predictions.
fn predictions(caches: &CacheSettings, index: &IndexSettings) -> Result<(Overlap, CatalogOptions)> {
    let (max_tree_size, target_ratio) =
        (caches.router_max_tree_size, caches.router_prune_target_ratio);
    if !(0.0..=1.0).contains(&target_ratio) {
        let text = format!("router_prune_target_ratio must be in 0..=1, got {target_ratio}");
        return Err(Error::Config(text));
    }
    if max_tree_size == 0 {
        return Err(Error::Config("router_max_tree_size must be at least 1, got 0".to_owned()));
    }
    let predicted = caches.predicted_ttl_s.unwrap_or_default().as_millis() as u64;
    // Zero means the shortest time, not forever.
    let routed = (caches.router_ttl_s.as_millis() as u64).max(1);
    let (overlap, predicted_ttl_ms) = match (caches.use_kv_events, predicted) {
        (false, _) => (Overlap::Predictions, routed),
        (true, 0) => (Overlap::Events, 0),
        (true, ttl_ms) => (Overlap::EventsAndPredictions, ttl_ms),
    };
    // Both settings are in 0..=max, so their product is, too.
    let target = (max_tree_size as f64 * target_ratio).floor() as usize;
    let limits = CatalogOptions {
        max_blocks: index.max_blocks,
        index_memory_bytes: index.index_memory_bytes,
        predicted_ttl_ms,
        max_predicted: if overlap == Overlap::Events { (0, 0) } else { (max_tree_size, target) },
        ..CatalogOptions::default()
    };
    Ok((overlap, limits))
}
