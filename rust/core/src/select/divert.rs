//! Requests diverted from a draining worker.

use super::ask::{Ask, Pin};
use super::draining::{Diverted, Wanted};
use super::selector::Selector;
use crate::ids::{InstanceId, Worker};

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
