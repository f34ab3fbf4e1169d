//! Draining workers: they take no new requests and keep everything else: blocks, events, running
//! requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::RwLock;

use super::ask::{Ask, Pin};
use super::selector::Selector;
use crate::ids::{InstanceId, Worker};

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

impl Selector {
    /// Gives no new requests to the workers `ids`, and to all others again.
    pub fn set_draining(&self, ids: Vec<InstanceId>) {
        self.draining.set(ids);
        // Waiting requests may now use a worker that is back, or fail because none is left.
        self.router.made_room();
    }

    /// The draining worker that `ask` would have used; `unpinned` is the pin that was ignored for
    /// that reason.
    pub(super) fn diverted(&self, ask: &Ask<'_>, unpinned: Option<Pin>) -> Option<Diverted> {
        if let Some(pin) = unpinned {
            return Some(Diverted { from: pin.instance_id, by: Wanted::Pin });
        }
        let is_draining =
            |worker: &Worker| ask.known.draining.binary_search(&worker.instance_id).is_ok();
        if ask.known.draining.is_empty() {
            return None;
        }
        let place = ask.session.worker.or_else(|| self.router.session_place(ask));
        let from = place.filter(is_draining)?.instance_id;
        Some(Diverted { from, by: Wanted::Session })
    }
}
