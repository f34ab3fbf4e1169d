//! What engines evict, on its way from the index to the policies.

use std::sync::Arc;

use crate::catalog::CacheWatch;
use crate::ids::Worker;
use crate::router::Router;

/// Tells a router.
#[derive(Debug)]
pub(super) struct Evictions(pub(super) Arc<Router>);

impl CacheWatch for Evictions {
    fn evicted(&self, worker: Worker, local_hashes: &[u64]) {
        self.0.evicted(worker, local_hashes);
    }

    fn cleared(&self, worker: Worker) {
        self.0.cleared(worker);
    }
}
