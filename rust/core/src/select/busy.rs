//! Which workers are too busy: their reports, the bookings of routers, and the thresholds.
//!
//! Signals from different sources are separate: only a worker's next report replaces its report,
//! and only a router changes its share of the load; shares are added up.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use hashbrown::HashMap;
use parking_lot::Mutex;
use serde::Serialize;

use super::config::{QueueThreshold, Thresholds};
use crate::error::Result;
use crate::ids::{InstanceId, Worker};
use crate::load::WorkerLoad;

/// Batch size of a worker that never reported one, in tokens.
pub const DEFAULT_BATCHED_TOKENS: u64 = 10_000_000;
/// Maximum other routers with a share of one worker.
const MAX_ROUTERS: usize = 1_024;

/// A rank's own report. `None` keeps the last value.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Blocks in use, with shared ones counted once; the engine's own count.
    pub kv_used_blocks: Option<u64>,
    /// Blocks of running requests.
    pub active_decode_blocks: Option<u64>,
    /// Prompt tokens still to be prefilled.
    pub active_prefill_tokens: Option<u64>,
    /// Blocks in total.
    pub kv_total_blocks: Option<u64>,
    /// Tokens of one batch.
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

/// Another router's bookings on a worker's rank. `None` keeps the last value.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Share {
    /// Blocks of its running requests.
    pub active_decode_blocks: Option<u64>,
    /// Their prompt tokens that are still to be prefilled.
    pub active_prefill_tokens: Option<u64>,
}

#[derive(Debug, Default)]
struct Rank {
    reported: Report,
    /// By router, with the time of its last message.
    shares: BTreeMap<u64, (Share, u64)>,
    /// Blocks were above their threshold, and not all signals have been below it since.
    is_latched: bool,
}

impl Rank {
    fn is_prefilling_too_much(&self, thresholds: &Thresholds, own_tokens: u64) -> bool {
        let tracked = self.tracked_prefill(own_tokens);
        let tokens = self.reported.active_prefill_tokens.unwrap_or(0).max(tracked);
        let batch = self.reported.max_num_batched_tokens.unwrap_or(DEFAULT_BATCHED_TOKENS);
        let of_batch = |factor: f64| (factor * batch as f64).floor() as u64;
        thresholds.active_prefill_tokens.is_some_and(|limit| tokens > limit)
            || thresholds.active_prefill_tokens_frac.is_some_and(|f| tokens > of_batch(f))
    }

    /// Prompt tokens still to be prefilled, as booked by all routers; `own` are booked here.
    fn tracked_prefill(&self, own: u64) -> u64 {
        let shares = self.shares.values().filter_map(|(share, _)| share.active_prefill_tokens);
        shares.fold(own, u64::saturating_add)
    }

    /// Two signals measure the blocks: the worker's report of its usage, and the blocks that its
    /// requests should occupy. The report counts if there is one, but never less than what routers
    /// booked. Above the threshold the state latches until both are below it.
    fn is_decoding_too_much(&self, thresholds: &Thresholds, own_blocks: u64) -> bool {
        let total = self.reported.kv_total_blocks.filter(|total| *total > 0);
        let (Some(threshold), Some(total)) = (thresholds.active_decode_blocks, total) else {
            return false;
        };
        let is_above = |blocks: u64| blocks as f64 > threshold * total as f64;
        let shares = self.shares.values().filter_map(|(share, _)| share.active_decode_blocks);
        let shares = shares.fold(0, u64::saturating_add);
        let tracked = own_blocks.saturating_add(shares);
        let expected = self.reported.active_decode_blocks.unwrap_or(0).max(tracked);
        // Between two reports a burst is visible only in the bookings.
        let used = self.reported.kv_used_blocks.map_or(expected, |used| used.max(tracked));
        is_above(used) || self.is_latched && is_above(expected)
    }

    /// Keeps the state of its blocks after news. The bookings here are unknown: if the blocks are
    /// above the threshold only with them, they latch at the next decision.
    fn latch(&mut self, thresholds: &Thresholds) {
        self.is_latched = self.is_decoding_too_much(thresholds, 0);
    }
}

#[derive(Debug, Default)]
struct State {
    thresholds: Thresholds,
    ranks: HashMap<Worker, Rank>,
}

/// The signals of one model's workers, and their thresholds.
///
/// # Consistency
/// A decision sees every report, share and threshold whose call returned before it.
///
/// # Cost
/// Nothing without a threshold; otherwise O(ranks) per decision.
#[derive(Debug, Default)]
pub struct BusyTable {
    state: Mutex<State>,
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

    /// The current thresholds.
    pub fn thresholds(&self) -> Thresholds {
        self.state.lock().thresholds
    }

    /// Replaces the thresholds.
    ///
    /// # Errors
    /// As [`Thresholds::validate`]; nothing changes then.
    pub fn set_thresholds(&self, thresholds: Thresholds) -> Result<()> {
        thresholds.validate()?;
        let mut state = self.state.lock();
        state.thresholds = thresholds;
        state.ranks.values_mut().for_each(|rank| rank.latch(&thresholds));
        // Relaxed: it only saves decisions the lock; the caller's next decision comes after it.
        self.is_any_set.store(thresholds.is_any(), Ordering::Relaxed);
        Ok(())
    }

    /// Whether any threshold is set.
    pub fn is_any_set(&self) -> bool {
        self.is_any_set.load(Ordering::Relaxed)
    }

    /// Sets the declared ranks; others are forgotten.
    pub fn set_workers(&self, workers: &[Worker]) {
        let mut state = self.state.lock();
        let mut before = std::mem::take(&mut state.ranks);
        let kept =
            workers.iter().map(|worker| (*worker, before.remove(worker).unwrap_or_default()));
        state.ranks = kept.collect();
    }

    /// Stores a rank's report. False if the rank is not declared: then nothing is stored.
    pub fn report(&self, worker: Worker, report: &Report) -> bool {
        let mut state = self.state.lock();
        let State { thresholds, ranks } = &mut *state;
        let Some(rank) = ranks.get_mut(&worker) else { return false };
        rank.reported.update(report);
        rank.latch(thresholds);
        true
    }

    /// The last report of the worker's rank; `None` if it is not declared.
    pub fn reported(&self, worker: Worker) -> Option<Report> {
        self.state.lock().ranks.get(&worker).map(|rank| rank.reported)
    }

    /// Stores another router's bookings on a rank. False if the rank is not declared, or 1,024
    /// other routers already have a share: then nothing is stored.
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

    /// Forgets shares from before `oldest_ms`: those routers and their requests are gone.
    pub fn expire_shares(&self, oldest_ms: u64) {
        for rank in self.state.lock().ranks.values_mut() {
            rank.shares.retain(|_, (_, heard_ms)| *heard_ms >= oldest_ms);
        }
    }

    /// Busy instances, ascending: those with only busy declared ranks. `loads` are this router's
    /// bookings, in worker order. Changes nothing.
    pub fn busy(&self, loads: impl IntoIterator<Item = WorkerLoad>) -> Vec<InstanceId> {
        let mut busy = Vec::new();
        self.collect(loads.into_iter(), false, &mut busy);
        busy
    }

    /// Adds the busy instances to `busy`, as [`busy`](Self::busy). A decision `keeps` what it saw:
    /// blocks above the threshold count until all signals are below it.
    pub(super) fn collect(
        &self,
        loads: impl Iterator<Item = WorkerLoad>,
        keeps: bool,
        busy: &mut Vec<InstanceId>,
    ) {
        if !self.is_any_set() {
            return;
        }
        let mut state = self.state.lock();
        let State { thresholds, ranks } = &mut *state;
        let mut last = None;
        for load in loads {
            // A worker without any report is assumed to have room.
            let is_busy = ranks.get_mut(&load.worker).is_some_and(|rank| {
                let is_decoding = rank.is_decoding_too_much(thresholds, load.active.blocks);
                if keeps {
                    rank.is_latched = is_decoding;
                }
                is_decoding || rank.is_prefilling_too_much(thresholds, load.active.prefill_tokens)
            });
            let id = load.worker.instance_id;
            if last.replace(id) != Some(id) {
                busy.extend(is_busy.then_some(id));
            } else if !is_busy && busy.last() == Some(&id) {
                busy.pop();
            }
        }
    }

    /// Whether all of `loads` (a worker, and prompt tokens booked here) have more left to prefill
    /// than `threshold` times their batch size, including other routers' bookings. False for an
    /// empty list, which leaves nothing to wait for.
    pub(super) fn are_all_full(
        &self,
        threshold: QueueThreshold,
        loads: impl Iterator<Item = (Worker, u64)>,
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
