//! The evidence about all workers of a model, and their credit for decisions.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hashbrown::HashMap;
use parking_lot::{Mutex, RwLock};

use super::trust::{ReuseChange, ReuseSample, ReuseTrust, ReuseView};
use crate::ids::Worker;

/// Credit of workers below 1.
pub type Credits = Arc<HashMap<Worker, f64>>;

/// Evidence by worker; at most as many entries as there are workers.
///
/// # Consistency
/// A decision uses the credit from when it began.
#[derive(Debug, Default)]
pub struct ReuseTable {
    by_worker: Mutex<BTreeMap<Worker, ReuseTrust>>,
    /// Whether any worker's credit is below 1.
    is_any_low: AtomicBool,
    low: RwLock<Credits>,
}

impl ReuseTable {
    /// Adds an answer of `worker`. Returns the change in its assessment, if any.
    pub fn take(&self, worker: Worker, sample: &ReuseSample) -> Option<ReuseChange> {
        let mut by_worker = self.by_worker.lock();
        let trust = by_worker.entry(worker).or_default();
        let before = trust.credit();
        let change = trust.take(sample);
        let after = trust.credit();
        if before != after {
            self.publish(worker, after);
        }
        change
    }

    /// The state of every worker that has answered.
    pub fn views(&self) -> BTreeMap<Worker, ReuseView> {
        self.by_worker.lock().iter().map(|(worker, trust)| (*worker, trust.view())).collect()
    }

    /// Credit below 1, by worker; `None` while all have 1.
    ///
    /// # Cost
    /// One atomic read while all have 1.
    pub fn credits(&self) -> Option<Credits> {
        // Relaxed: a slightly late reader decides as a moment before.
        self.is_any_low.load(Ordering::Relaxed).then(|| Arc::clone(&self.low.read()))
    }

    /// Forgets workers that are not `wanted`.
    pub fn keep(&self, wanted: impl Fn(Worker) -> bool) {
        let mut by_worker = self.by_worker.lock();
        let gone: Vec<Worker> = by_worker.keys().copied().filter(|one| !wanted(*one)).collect();
        for worker in gone {
            by_worker.remove(&worker);
            self.publish(worker, 1.0);
        }
    }

    /// Called under the lock of `by_worker`, so that a worker's latest credit is published last.
    fn publish(&self, worker: Worker, credit: f64) {
        let mut low = self.low.write();
        let has_changed = match credit < 1.0 {
            true => Arc::make_mut(&mut low).insert(worker, credit) != Some(credit),
            false => low.contains_key(&worker) && Arc::make_mut(&mut low).remove(&worker).is_some(),
        };
        if has_changed {
            self.is_any_low.store(!low.is_empty(), Ordering::Relaxed);
        }
    }
}
