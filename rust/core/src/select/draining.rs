//! Workers that take no new requests and keep all that they have: blocks, events, running requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::RwLock;

use super::ask::{Ask, Pin};
use super::selector::Selector;
use crate::ids::{InstanceId, Worker};

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

    fn set(&self, mut ids: Vec<InstanceId>) {
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

impl Selector {
    /// Give no new requests to the workers `ids`, and to all others again.
    pub fn set_draining(&self, ids: Vec<InstanceId>) {
        self.draining.set(ids);
        // Those that wait may go to one that is back, or learn that nobody is left.
        self.router.made_room();
    }

    /// Whom `ask` would have gone to, had it not been drained; `unpinned` is the pin that was left out for that.
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
