//! What engines report of themselves, for policies that go by it.

use std::sync::Arc;

use hashbrown::HashMap;
use parking_lot::RwLock;

use crate::ids::Worker;
use crate::policy::EngineMetrics;

type ByWorker = Arc<HashMap<Worker, EngineMetrics>>;

/// The latest report of each engine; as many as there are workers.
///
/// # Consistency
/// A decision reads the reports that were in when it began.
#[derive(Debug, Default)]
pub struct EngineTable {
    by_worker: RwLock<ByWorker>,
}

impl EngineTable {
    /// An engine says this of itself; what it leaves out stays as it was.
    pub fn update(&self, worker: Worker, metrics: EngineMetrics) {
        let earlier = self.all().get(&worker).copied().unwrap_or_default();
        self.report(worker, metrics.or(earlier));
    }

    /// An engine says this of itself; it replaces what it said before.
    ///
    /// # Cost
    /// O(workers): reports are seconds apart, readers are not to wait.
    pub fn report(&self, worker: Worker, metrics: EngineMetrics) {
        let mut held = self.by_worker.write();
        Arc::make_mut(&mut held).insert(worker, metrics);
    }

    /// All reports, as they are now.
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
