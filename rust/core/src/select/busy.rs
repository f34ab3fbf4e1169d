//! Who is too busy: what workers report, what routers have booked, and the thresholds.
//!
//! Signals of different sources are kept apart: a worker's own report is replaced by its next report
//! only, and each router's share of the load by that router only; shares are added up.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use hashbrown::HashMap;
use parking_lot::Mutex;

use super::config::{QueueThreshold, Thresholds};
use super::router::Gate;
use crate::error::Result;
use crate::ids::{InstanceId, Worker};
use crate::load::WorkerLoad;
use crate::policy::Terms;

/// Tokens of a batch of a worker that never told how many it takes at most.
pub const DEFAULT_BATCHED_TOKENS: u64 = 10_000_000;
/// Other routers whose shares are kept for one worker.
const MAX_ROUTERS: usize = 1_024;

/// What a worker's rank says of itself. `None` leaves what it said before.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Report {
    /// Blocks in use, shared ones once: what the engine knows best.
    pub kv_used_blocks: Option<u64>,
    /// Blocks of running requests.
    pub active_decode_blocks: Option<u64>,
    /// Prompt tokens still to be prefilled.
    pub active_prefill_tokens: Option<u64>,
    /// Blocks there are.
    pub kv_total_blocks: Option<u64>,
    /// Tokens it takes in one batch.
    pub max_num_batched_tokens: Option<u64>,
}

impl Report {
    fn update(&mut self, newer: &Self) {
        let put = |old: &mut Option<u64>, new: Option<u64>| *old = new.or(*old);
        put(&mut self.kv_used_blocks, newer.kv_used_blocks);
        put(&mut self.active_decode_blocks, newer.active_decode_blocks);
        put(&mut self.active_prefill_tokens, newer.active_prefill_tokens);
        put(&mut self.kv_total_blocks, newer.kv_total_blocks);
        put(&mut self.max_num_batched_tokens, newer.max_num_batched_tokens);
    }
}

/// What another router has booked on a worker's rank. `None` leaves what it said before.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Share {
    /// Blocks of its running requests.
    pub active_decode_blocks: Option<u64>,
    /// Prompt tokens of theirs that are still to be prefilled.
    pub active_prefill_tokens: Option<u64>,
}

#[derive(Debug, Default)]
pub(super) struct Rank {
    pub reported: Report,
    /// By router, with the time at which it told last.
    shares: BTreeMap<u64, (Share, u64)>,
    /// Blocks were above their threshold, and not all signals have been below it since.
    is_latched: bool,
}

impl Rank {
    fn is_busy(&mut self, thresholds: &Thresholds, own: &WorkerLoad) -> bool {
        let is_decoding = self.is_decoding_too_much(thresholds.active_decode_blocks, own.blocks);
        let tracked = self.tracked_prefill(own.prefill_tokens);
        let tokens = self.reported.active_prefill_tokens.unwrap_or(0).max(tracked);
        let batch = self.reported.max_num_batched_tokens.unwrap_or(DEFAULT_BATCHED_TOKENS);
        let of_batch = |factor: f64| (factor * batch as f64).floor() as u64;
        is_decoding
            || thresholds.active_prefill_tokens.is_some_and(|limit| tokens > limit)
            || thresholds.active_prefill_tokens_frac.is_some_and(|f| tokens > of_batch(f))
    }

    /// Prompt tokens still to be prefilled as all routers booked them, `own` here.
    pub fn tracked_prefill(&self, own: u64) -> u64 {
        let shares = self.shares.values().filter_map(|(share, _)| share.active_prefill_tokens);
        shares.fold(own, u64::saturating_add)
    }

    /// Two signals stand for the blocks: what the worker says is in use, and what its requests should
    /// occupy. The first one counts where there is one, but never less than what routers booked. Above the threshold it latches, and both must be
    /// below before that ends.
    fn is_decoding_too_much(&mut self, threshold: Option<f64>, own_blocks: u64) -> bool {
        let total = self.reported.kv_total_blocks.filter(|total| *total > 0);
        let (Some(threshold), Some(total)) = (threshold, total) else {
            self.is_latched = false;
            return false;
        };
        let is_above = |blocks: u64| blocks as f64 > threshold * total as f64;
        let shares = self.shares.values().filter_map(|(share, _)| share.active_decode_blocks);
        let shares = shares.fold(0, u64::saturating_add);
        let tracked = own_blocks.saturating_add(shares);
        let expected = self.reported.active_decode_blocks.unwrap_or(0).max(tracked);
        // Between two reports a burst shows in the bookings only.
        let used = self.reported.kv_used_blocks.map_or(expected, |used| used.max(tracked));
        if is_above(used) {
            self.is_latched = true;
        } else if !is_above(expected) {
            self.is_latched = false;
        }
        self.is_latched
    }
}

#[derive(Debug, Default)]
pub(super) struct State {
    thresholds: Thresholds,
    pub ranks: HashMap<Worker, Rank>,
}

/// The signals of one model's workers, and the thresholds that are held against them.
///
/// # Consistency
/// A decision sees every report, share and threshold whose call returned before it.
///
/// # Cost
/// Nothing while no threshold is set; else O(ranks) for a decision.
#[derive(Debug, Default)]
pub struct BusyTable {
    pub(super) state: Mutex<State>,
    is_any_set: AtomicBool,
}

impl BusyTable {
    /// A table without workers.
    ///
    /// # Errors
    /// As [`Thresholds::validate`].
    pub fn new(thresholds: Thresholds) -> Result<Self> {
        let table = Self::default();
        table.set_thresholds(thresholds)?;
        Ok(table)
    }

    /// The thresholds in force.
    pub fn thresholds(&self) -> Thresholds {
        self.state.lock().thresholds
    }

    /// Put others in force.
    ///
    /// # Errors
    /// As [`Thresholds::validate`]; nothing changes then.
    pub fn set_thresholds(&self, thresholds: Thresholds) -> Result<()> {
        thresholds.validate()?;
        let mut state = self.state.lock();
        state.thresholds = thresholds;
        // Relaxed: it only spares decisions the lock; the caller's next decision is behind it.
        self.is_any_set.store(thresholds.is_any(), Ordering::Relaxed);
        Ok(())
    }

    /// Whether any threshold is set.
    pub fn is_any_set(&self) -> bool {
        self.is_any_set.load(Ordering::Relaxed)
    }

    /// Make `workers` the declared ranks; what is known of others is forgotten.
    pub fn set_workers(&self, workers: &[Worker]) {
        let mut state = self.state.lock();
        let mut before = std::mem::take(&mut state.ranks);
        let kept =
            workers.iter().map(|worker| (*worker, before.remove(worker).unwrap_or_default()));
        state.ranks = kept.collect();
    }

    /// A worker's rank reports. False when it is not declared: nothing is kept then.
    pub fn report(&self, worker: Worker, report: &Report) -> bool {
        let mut state = self.state.lock();
        state.ranks.get_mut(&worker).map(|rank| rank.reported.update(report)).is_some()
    }

    /// What the worker's rank last said of itself; `None` when it is not declared.
    pub fn reported(&self, worker: Worker) -> Option<Report> {
        self.state.lock().ranks.get(&worker).map(|rank| rank.reported)
    }

    /// Another router tells now what it has booked on a rank. False when the rank is not declared, or
    /// 1,024 other routers have told already: nothing is kept then.
    pub fn share(&self, router_id: u64, worker: Worker, share: Share, now_ms: u64) -> bool {
        let mut state = self.state.lock();
        let Some(rank) = state.ranks.get_mut(&worker) else { return false };
        if rank.shares.len() >= MAX_ROUTERS && !rank.shares.contains_key(&router_id) {
            return false;
        }
        let (kept, heard_ms) = rank.shares.entry(router_id).or_default();
        *heard_ms = now_ms;
        kept.active_decode_blocks = share.active_decode_blocks.or(kept.active_decode_blocks);
        kept.active_prefill_tokens = share.active_prefill_tokens.or(kept.active_prefill_tokens);
        true
    }

    /// Forget what other routers told before `oldest_ms`: they are gone, and their requests with them.
    pub fn expire_shares(&self, oldest_ms: u64) {
        for rank in self.state.lock().ranks.values_mut() {
            rank.shares.retain(|_, (_, heard_ms)| *heard_ms >= oldest_ms);
        }
    }

    /// Instances that are busy, ascending: those all of whose declared ranks are. `loads` is what this
    /// router has booked, in worker order.
    pub fn busy(&self, loads: impl IntoIterator<Item = WorkerLoad>) -> Vec<InstanceId> {
        let mut busy = Vec::new();
        self.collect(&mut loads.into_iter(), &mut busy);
        busy
    }

    fn collect(&self, loads: &mut dyn Iterator<Item = WorkerLoad>, busy: &mut Vec<InstanceId>) {
        if !self.is_any_set() {
            return;
        }
        let mut state = self.state.lock();
        let State { thresholds, ranks } = &mut *state;
        let mut current = None::<(InstanceId, bool)>;
        let mut close = |done: Option<(InstanceId, bool)>| {
            busy.extend(done.filter(|(_, is_busy)| *is_busy).map(|(instance_id, _)| instance_id));
        };
        for load in loads {
            // One that has told nothing has room, as far as anybody knows.
            let rank = ranks.get_mut(&load.worker);
            let is_busy = rank.is_some_and(|rank| rank.is_busy(thresholds, &load));
            let instance_id = load.worker.instance_id;
            current = match current {
                Some((open, are_all)) if open == instance_id => Some((open, are_all && is_busy)),
                done => {
                    close(done);
                    Some((instance_id, is_busy))
                }
            };
        }
        close(current);
    }
}

/// The table as the router asks it, during one decision.
pub(super) struct BusyGate<'a> {
    pub table: &'a BusyTable,
    /// Terms of those that were passed over.
    pub passed_over: &'a RefCell<Vec<Terms>>,
    /// From when on requests that can wait do so.
    pub queue: Option<QueueThreshold>,
}

impl Gate for BusyGate<'_> {
    fn shut(&self, loads: &mut dyn Iterator<Item = WorkerLoad>, shut: &mut Vec<InstanceId>) {
        self.table.collect(loads, shut);
    }

    fn must_wait(&self, candidates: &mut dyn Iterator<Item = (Worker, u64)>) -> bool {
        self.queue.is_some_and(|threshold| self.table.are_all_full(threshold, candidates))
    }

    fn passed_over(&self, terms: Terms) {
        self.passed_over.borrow_mut().push(terms);
    }
}
