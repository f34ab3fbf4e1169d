//! Settings of a selector.

use super::busy::Thresholds;
use super::room::QueueThreshold;
use crate::error::Result;
use crate::router::RouterConfig;

/// Default memory of the journal: some thousand decisions among 64 workers.
pub const DEFAULT_JOURNAL_BYTES: usize = 16 * 1024 * 1024;

/// Where a selector's knowledge of caches comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Overlap {
    /// Events of the engines only.
    Events,
    /// Events, and for a short time predictions of what a worker will hold.
    #[default]
    EventsAndPredictions,
    /// Predictions only: engines publish nothing.
    Predictions,
}

/// Settings of a [`Selector`](super::Selector).
#[derive(Debug, Clone, PartialEq)]
pub struct SelectorConfig {
    /// How requests are routed.
    pub router: RouterConfig,
    /// Where knowledge of caches comes from. How long a prediction stands, and how many there may be, is
    /// a limit of the index.
    pub overlap: Overlap,
    /// From when on a worker is busy.
    pub thresholds: Thresholds,
    /// From when on requests that can wait ([`Ask::waits`](super::Ask::waits)) must; `None` = never.
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
