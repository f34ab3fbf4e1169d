//! Notifications about evictions of engines.

use std::sync::Weak;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::RwLock;

use crate::ids::Worker;

/// Receives evictions from workers' device caches. Called without any lock of the index, once per
/// event; must not block.
pub trait CacheWatch: Send + Sync {
    /// The engine evicted blocks with these local hashes.
    fn evicted(&self, worker: Worker, local_hashes: &[u64]);

    /// The cache was cleared.
    fn cleared(&self, worker: Worker);
}

/// The watches of one index.
#[derive(Default)]
pub(super) struct CacheWatches {
    all: RwLock<Vec<Weak<dyn CacheWatch>>>,
    is_any: AtomicBool,
}

impl CacheWatches {
    /// Adds `watch`, for as long as it lives.
    pub fn add(&self, watch: Weak<dyn CacheWatch>) {
        let mut all = self.all.write();
        all.retain(|watch| watch.strong_count() > 0);
        all.push(watch);
        self.is_any.store(true, Ordering::Relaxed);
    }

    /// Whether there may be a watch.
    pub fn is_any(&self) -> bool {
        // Relaxed: an event concurrent with the addition of the first watch may miss it.
        self.is_any.load(Ordering::Relaxed)
    }

    /// Notifies all watches.
    pub fn tell(&self, tell: impl Fn(&dyn CacheWatch)) {
        if self.is_any() {
            self.all.read().iter().filter_map(Weak::upgrade).for_each(|watch| tell(&*watch));
        }
    }
}
