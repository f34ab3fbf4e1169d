//! Settings of selection that the frontend's and the router's class share.

use pyo3::prelude::*;

use super::error::{OrRaise, raise};
use super::indexer::seconds;
use crate::catalog::CatalogOptions;
use crate::error::Error;
use crate::select::{Overlap, QueueOptions, QueueThreshold};

/// How requests wait for a worker with room to prefill; `None` without a threshold.
pub(super) fn queue_options(
    py: Python<'_>,
    threshold: Option<f64>,
    policy: &str,
    limit: usize,
    timeout_s: f64,
    batched_tokens: u64,
) -> PyResult<Option<QueueOptions>> {
    let order = policy.parse().or_raise(py)?;
    let max_wait = seconds(py, "router_queue_timeout", timeout_s)?;
    Ok(threshold.map(|batches| QueueOptions {
        threshold: QueueThreshold { batches, batched_tokens },
        order,
        limit,
        max_wait,
    }))
}

/// What routing itself tells of caches, and how long that stands.
pub(super) struct Foresight {
    pub overlap: Overlap,
    ttl_ms: u64,
    max_predicted: (usize, usize),
}

impl Foresight {
    pub fn new(
        py: Python<'_>,
        use_kv_events: bool,
        predicted_ttl_s: f64,
        router_ttl_s: f64,
        max_tree_size: usize,
        prune_target_ratio: f64,
    ) -> PyResult<Self> {
        let fault = |text: String| Err(raise(py, &Error::Config(text)));
        if !(0.0..=1.0).contains(&prune_target_ratio) {
            return fault(format!(
                "router_prune_target_ratio must be in 0..=1, got {prune_target_ratio}"
            ));
        }
        if max_tree_size == 0 {
            return fault("router_max_tree_size must be at least 1, got 0".to_owned());
        }
        let ms = |field, value| seconds(py, field, value).map(|time| time.as_millis() as u64);
        let predicted =
            if predicted_ttl_s == 0.0 { 0 } else { ms("predicted_ttl_secs", predicted_ttl_s)? };
        // No time at all is as short as it goes, not for ever.
        let routed =
            if router_ttl_s == 0.0 { 1 } else { ms("router_ttl_secs", router_ttl_s)?.max(1) };
        // Both settings are in 0..=max, so that the product is, too.
        let target = (max_tree_size as f64 * prune_target_ratio).floor() as usize;
        let limited = (max_tree_size, target);
        Ok(match (use_kv_events, predicted) {
            (false, _) => {
                Self { overlap: Overlap::Predictions, ttl_ms: routed, max_predicted: limited }
            }
            (true, 0) => Self { overlap: Overlap::Events, ttl_ms: 0, max_predicted: limited },
            (true, ttl_ms) => {
                Self { overlap: Overlap::EventsAndPredictions, ttl_ms, max_predicted: limited }
            }
        })
    }

    pub fn limit(&self, max_blocks: usize, index_memory_bytes: usize) -> CatalogOptions {
        let is_on = self.overlap != Overlap::Events;
        CatalogOptions {
            max_blocks,
            index_memory_bytes,
            predicted_ttl_ms: self.ttl_ms,
            max_predicted: if is_on { self.max_predicted } else { (0, 0) },
            ..CatalogOptions::default()
        }
    }
}
