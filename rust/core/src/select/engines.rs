//! Metrics that engines report of themselves, for policies that use them.

use std::sync::Arc;

use hashbrown::HashMap;
use parking_lot::RwLock;

use crate::ids::Worker;
use crate::policy::EngineMetrics;

type ByWorker = Arc<HashMap<Worker, EngineMetrics>>;

/// The latest report of each engine; at most as many as there are workers.
///
/// # Consistency
/// A decision reads the reports from before it began.
#[derive(Debug, Default)]
pub struct EngineTable {
    by_worker: RwLock<ByWorker>,
}

impl EngineTable {
    /// Merges an engine's report into its last one; missing values stay.
    pub fn update(&self, worker: Worker, metrics: EngineMetrics) {
        let mut held = self.by_worker.write();
        // One lock for both steps: two reports at once must not lose each other's values.
        let known = Arc::make_mut(&mut held).entry(worker).or_default();
        *known = metrics.or(*known);
    }

    /// Replaces an engine's report.
    ///
    /// # Cost
    /// O(workers): reports are seconds apart, and readers must not wait.
    pub fn report(&self, worker: Worker, metrics: EngineMetrics) {
        let mut held = self.by_worker.write();
        Arc::make_mut(&mut held).insert(worker, metrics);
    }

    /// All current reports.
    pub fn all(&self) -> ByWorker {
        Arc::clone(&self.by_worker.read())
    }

    pub(super) fn keep(&self, wanted: impl Fn(Worker) -> bool) {
        let mut held = self.by_worker.write();
        if held.keys().any(|&worker| !wanted(worker)) {
            Arc::make_mut(&mut held).retain(|&worker, _| wanted(worker));
        }
    }
}
