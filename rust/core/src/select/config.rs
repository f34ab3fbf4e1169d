//! Settings of a selector.

use std::fmt;

use super::router::RouterConfig;
use crate::error::{Error, Result};

/// Default memory of the journal: some thousand decisions with 64 workers.
pub const DEFAULT_JOURNAL_BYTES: usize = 16 * 1024 * 1024;

/// Source of a selector's knowledge of caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Overlap {
    /// Events of the engines only.
    Events,
    /// Events, and for a short time predictions of a worker's blocks.
    #[default]
    EventsAndPredictions,
    /// Predictions only: engines publish nothing.
    Predictions,
}

/// Thresholds above which a worker is busy. Without any, no worker is ever busy.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Thresholds {
    /// Share of a worker's blocks in use, 0..=1; busy above it.
    pub active_decode_blocks: Option<f64>,
    /// Prompt tokens still to be prefilled; busy above it.
    pub active_prefill_tokens: Option<u64>,
    /// The same as a multiple of the worker's batch size; finite and at least 0.
    pub active_prefill_tokens_frac: Option<f64>,
}

impl Thresholds {
    /// Whether any is set.
    pub fn is_any(&self) -> bool {
        *self != Self::default()
    }

    /// Check every field.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] with the field, what is legal and what came.
    pub fn validate(&self) -> Result<()> {
        if let Some(share) = self.active_decode_blocks
            && !(0.0..=1.0).contains(&share)
        {
            return Err(Error::invalid(format!(
                "active_decode_blocks_threshold must be between 0.0 and 1.0, got {share}"
            )));
        }
        if let Some(factor) = self.active_prefill_tokens_frac
            && !(factor.is_finite() && factor >= 0.0)
        {
            return Err(Error::invalid(format!(
                "active_prefill_tokens_threshold_frac must be finite and at least 0, got {factor}"
            )));
        }
        Ok(())
    }
}

impl fmt::Display for Thresholds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            self.active_decode_blocks.map(|it| format!("active_decode_blocks_threshold={it}")),
            self.active_prefill_tokens.map(|it| format!("active_prefill_tokens_threshold={it}")),
            self.active_prefill_tokens_frac
                .map(|it| format!("active_prefill_tokens_threshold_frac={it}")),
        ];
        f.write_str(&parts.into_iter().flatten().collect::<Vec<_>>().join(", "))
    }
}

/// Threshold above which requests wait until a worker has room to prefill, instead of adding to the
/// load.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueueThreshold {
    /// Prompt tokens still to be prefilled, as a multiple of the worker's batch size: a request
    /// waits while every eligible worker has more. Finite and at least 0.
    pub batches: f64,
    /// Batch size of a worker that never reported one, in tokens.
    pub batched_tokens: u64,
}

impl QueueThreshold {
    /// Check every field.
    ///
    /// # Errors
    /// [`Error::Config`] with the field, what is legal and what came.
    pub fn validate(&self) -> Result<()> {
        if self.batches.is_finite() && self.batches >= 0.0 {
            return Ok(());
        }
        let got = self.batches;
        Err(Error::Config(format!(
            "router_queue_threshold must be finite and at least 0, got {got}"
        )))
    }
}

/// Settings of a [`Selector`](super::Selector).
#[derive(Debug, Clone, PartialEq)]
pub struct SelectorConfig {
    /// How requests are routed.
    pub router: RouterConfig,
    /// Source of the knowledge of caches. Limits of the index set the age and number of
    /// predictions.
    pub overlap: Overlap,
    /// Thresholds above which a worker is busy.
    pub thresholds: Thresholds,
    /// Threshold above which requests that can wait ([`Ask::waits`](super::Ask::waits)) must;
    /// `None`: never.
    pub queue: Option<QueueThreshold>,
    /// Memory for past decisions, bytes; 0 keeps none.
    pub journal_bytes: usize,
    /// Log each decision at level info instead of debug.
    pub logs_decisions: bool,
}

impl Default for SelectorConfig {
    fn default() -> Self {
        Self {
            router: RouterConfig::default(),
            overlap: Overlap::default(),
            thresholds: Thresholds::default(),
            queue: None,
            journal_bytes: DEFAULT_JOURNAL_BYTES,
            logs_decisions: false,
        }
    }
}

impl SelectorConfig {
    /// Check every field.
    ///
    /// # Errors
    /// `Config` or `InvalidArgument`, naming the first field that is out of range.
    pub fn validate(&self) -> Result<()> {
        self.router.validate()?;
        self.queue.as_ref().map_or(Ok(()), QueueThreshold::validate)?;
        self.thresholds.validate()
    }
}
