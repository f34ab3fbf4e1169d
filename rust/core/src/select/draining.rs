//! Draining workers: they take no new requests and keep everything else: blocks, events, running
//! requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::RwLock;

use crate::ids::InstanceId;

/// The draining workers of one model; at most as many as there are workers.
///
/// # Consistency
/// A decision sees every change whose call returned before it.
#[derive(Debug, Default)]
pub struct DrainTable {
    /// Ascending.
    ids: RwLock<Arc<[InstanceId]>>,
    is_any: AtomicBool,
}

impl DrainTable {
    /// All draining workers, ascending.
    ///
    /// # Cost
    /// Nothing if there are none.
    pub fn all(&self) -> Arc<[InstanceId]> {
        // Relaxed: it only saves decisions the lock; the caller's next decision comes after it.
        match self.is_any.load(Ordering::Relaxed) {
            true => Arc::clone(&self.ids.read()),
            false => Arc::default(),
        }
    }

    /// Whether a worker is draining.
    pub fn has(&self, id: InstanceId) -> bool {
        self.all().binary_search(&id).is_ok()
    }

    pub(super) fn set(&self, mut ids: Vec<InstanceId>) {
        ids.sort_unstable();
        let mut known = self.ids.write();
        self.is_any.store(!ids.is_empty(), Ordering::Relaxed);
        *known = ids.into();
    }
}

named! {
    /// Why a request wanted a draining worker.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Wanted {
        /// The request is pinned to it.
        Pin = "pin",
        /// The session was on it.
        Session = "session",
    }
}

/// A draining worker that a request should have used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Diverted {
    /// The worker.
    pub from: InstanceId,
    /// Why the request wanted it.
    pub by: Wanted,
}
