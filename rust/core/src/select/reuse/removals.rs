//! Recent removals: blocks that were held at the decision may be gone when the engine starts.

use std::collections::VecDeque;

use hashbrown::HashMap;
use parking_lot::Mutex;

use crate::ids::Worker;

/// Remembered removals per worker: 32 KiB.
///
/// A removal followed by more than this many others before its request was answered counts as a
/// contradiction.
pub(super) const REMOVALS: usize = 2_048;

/// The latest removals of every worker.
#[derive(Debug, Default)]
pub struct Removals {
    by_worker: Mutex<HashMap<Worker, Ring>>,
}

#[derive(Debug, Default)]
struct Ring {
    /// Local hash and time, oldest first.
    latest: VecDeque<(u64, u64)>,
    cleared_ms: Option<u64>,
}

impl Removals {
    /// Records that `worker` removed blocks with these local hashes from its device.
    ///
    /// # Cost
    /// O(blocks), under one lock.
    pub fn removed(&self, worker: Worker, local_hashes: &[u64], now_ms: u64) {
        let mut by_worker = self.by_worker.lock();
        let ring = by_worker.entry(worker).or_default();
        for &hash in local_hashes {
            if ring.latest.len() == REMOVALS {
                ring.latest.pop_front();
            }
            ring.latest.push_back((hash, now_ms));
        }
    }

    /// Records that `worker` cleared its device cache.
    pub fn cleared(&self, worker: Worker, now_ms: u64) {
        self.by_worker.lock().entry(worker).or_default().cleared_ms = Some(now_ms);
    }

    /// Whether `worker` removed a block with this local hash at `since_ms` or later.
    ///
    /// # Cost
    /// O([`REMOVALS`]).
    pub fn has_removed(&self, worker: Worker, local_hash: u64, since_ms: u64) -> bool {
        let by_worker = self.by_worker.lock();
        let Some(ring) = by_worker.get(&worker) else { return false };
        ring.cleared_ms.is_some_and(|at_ms| at_ms >= since_ms)
            || ring.latest.iter().any(|&(hash, at_ms)| hash == local_hash && at_ms >= since_ms)
    }

    /// Forgets workers that are not `wanted`.
    pub fn keep(&self, wanted: impl Fn(Worker) -> bool) {
        self.by_worker.lock().retain(|worker, _| wanted(*worker));
    }
}
