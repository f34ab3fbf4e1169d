//! Workers that take no new requests and keep all that they have: blocks, events, running requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::RwLock;

use crate::ids::InstanceId;

/// The workers of one model that are being drained. At most as many as there are workers.
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
    /// All of them, ascending.
    ///
    /// # Cost
    /// Nothing while there are none.
    pub fn all(&self) -> Arc<[InstanceId]> {
        // Relaxed: it only spares decisions the lock; the caller's next decision is behind it.
        match self.is_any.load(Ordering::Relaxed) {
            true => Arc::clone(&self.ids.read()),
            false => Arc::default(),
        }
    }

    /// Whether a worker is being drained.
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
    /// What asked for a worker that is being drained.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Wanted {
        /// The request is pinned to it.
        Pin = "pin",
        /// The session was there.
        Session = "session",
    }
}

/// A worker that a request should have gone to and that is being drained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Diverted {
    /// The worker.
    pub from: InstanceId,
    /// What asked for it.
    pub by: Wanted,
}
