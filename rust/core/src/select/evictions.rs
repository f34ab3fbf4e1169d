//! Passes engines' evictions from the index to the policies, and to the comparison with answers.

use std::sync::Arc;

use super::reuse::Removals;
use super::router::Router;
use crate::catalog::CacheWatch;
use crate::clock::Clock;
use crate::ids::Worker;

/// Notifies a router, and records the time.
pub(super) struct Evictions {
    pub router: Arc<Router>,
    pub removals: Arc<Removals>,
    pub clock: Arc<dyn Clock>,
}

impl CacheWatch for Evictions {
    fn evicted(&self, worker: Worker, local_hashes: &[u64]) {
        self.removals.removed(worker, local_hashes, self.clock.now_ms());
        self.router.evicted(worker, local_hashes);
    }

    fn cleared(&self, worker: Worker) {
        self.removals.cleared(worker, self.clock.now_ms());
        self.router.cleared(worker);
    }
}
