//! Which requests wait, and until when: no worker has room to prefill.

use std::cell::RefCell;

use super::ask::Ask;
use super::busy::{BusyGate, BusyTable};
use super::selector::{SCRATCH, Selector, is_allowed};
use crate::error::{Error, Result};
use crate::ids::Worker;
use crate::policy::Terms;
use crate::router::RoomWatch;

/// From when on requests wait until a worker has room to prefill, instead of adding to the load.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueueThreshold {
    /// Prompt tokens still to be prefilled, as a multiple of what the worker takes in one batch: a request
    /// waits while every worker that may take it has more. Finite and at least 0.
    pub batches: f64,
    /// Tokens of a batch of a worker that never told how many it takes at most.
    pub batched_tokens: u64,
}

impl QueueThreshold {
    /// Check every field.
    ///
    /// # Errors
    /// [`Error::Config`] with the field, what is legal and what came.
    pub fn validate(&self) -> Result<()> {
        if self.batches.is_finite() && self.batches >= 0.0 {
            return Ok(());
        }
        let got = self.batches;
        Err(Error::Config(format!(
            "router_queue_threshold must be finite and at least 0, got {got}"
        )))
    }
}

impl Selector {
    /// Have `watch` told when a worker may have room for those who had to wait; see
    /// [`Router::watch_room`].
    pub fn watch_room(&self, watch: RoomWatch) {
        self.router.watch_room(watch);
    }

    /// Leading blocks of the prompt that the best of the allowed workers holds, or soon will.
    pub fn most_held(&self, ask: &Ask<'_>) -> u32 {
        SCRATCH.with_borrow_mut(|scratch| {
            self.walk(ask, scratch);
            let known = scratch.overlaps.iter().chain(&scratch.predictions);
            let allowed = known.filter(|(worker, _)| is_allowed(ask, *worker));
            allowed.map(|(_, blocks)| *blocks).max().unwrap_or(0)
        })
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
    /// Whether every one of `loads`, a worker and the prompt tokens that are booked here, has more still to
    /// be prefilled than `threshold` times what it takes in one batch; what other routers have booked
    /// counts, too. Without any there is nothing to wait for.
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
