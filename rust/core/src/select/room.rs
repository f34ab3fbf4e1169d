//! Which requests wait, and until when: no worker has room to prefill.

use std::cell::RefCell;

use super::ask::Ask;
use super::busy::{BusyGate, BusyTable};
use super::config::QueueThreshold;
use super::router::RoomWatch;
use super::selector::{SCRATCH, Selector};
use crate::ids::Worker;
use crate::policy::Terms;

impl Selector {
    /// Registers `watch`, called when a worker may have room for waiting requests; see
    /// [`Router::watch_room`].
    pub fn watch_room(&self, watch: RoomWatch) {
        self.router.watch_room(watch);
    }

    /// The most leading tokens of the prompt that any allowed worker holds, or soon will.
    pub fn most_held_tokens(&self, ask: &Ask<'_>) -> u64 {
        let blocks = SCRATCH.with_borrow_mut(|scratch| {
            self.walk(ask, scratch);
            let known = scratch.overlaps.iter().chain(&scratch.predictions);
            let allowed = known.filter(|(worker, _)| ask.allows(*worker));
            allowed.map(|(_, blocks)| *blocks).max().unwrap_or(0)
        });
        u64::from(blocks) * u64::from(ask.prompt.block_size)
    }

    pub(super) fn gate<'a>(
        &'a self,
        ask: &Ask<'_>,
        passed_over: &'a RefCell<Vec<Terms>>,
    ) -> BusyGate<'a> {
        BusyGate { table: &self.busy, passed_over, queue: self.queue.filter(|_| ask.waits) }
    }
}

impl BusyTable {
    /// Whether all of `loads` (a worker, and prompt tokens booked here) have more left to prefill
    /// than `threshold` times their batch size, including other routers' bookings. False for an
    /// empty list, which leaves nothing to wait for.
    pub(super) fn are_all_full(
        &self,
        threshold: QueueThreshold,
        loads: &mut dyn Iterator<Item = (Worker, u64)>,
    ) -> bool {
        let state = self.state.lock();
        for (worker, own) in loads {
            let rank = state.ranks.get(&worker);
            let tokens = rank.map_or(own, |rank| rank.tracked_prefill(own));
            let told = rank.and_then(|rank| rank.reported.max_num_batched_tokens);
            let batch = told.unwrap_or(threshold.batched_tokens);
            if tokens as f64 <= threshold.batches * batch as f64 {
                return false;
            }
        }
        true
    }
}
