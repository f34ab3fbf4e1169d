//! Enforces the limits of the index: blocks per worker, and bytes in total.
//!
//! Blocks are checked after an event, bytes also before it: a stored event is applied in pieces,
//! each only if it fits. An event may therefore be larger than everything else, and readers may
//! delay the freeing of evicted memory: anything that then finds no room is refused.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::holder::{Lane, Slot};
use super::paged::Slab;
use super::room::map_growth;
use super::run::Loc;
use super::seats::Plane;
use super::writer::Writer;
use crate::index::arena::runs::{MAX_RUN, Runs};
use crate::index::types::{CountMode, Limits};

/// Bytes of a new worker: its records, and a page of seats.
const WORKER_BYTES: usize = 12 * 1024;

/// Growth of the tables of child runs and of names per piece of an event, besides the entries of
/// its blocks, in bytes.
const TABLE_BYTES: usize = 16 * 1024;

/// How often the writer checks whether readers have moved on: a query takes microseconds, unless
/// its thread was descheduled.
const WAITS: usize = 200;

impl Writer {
    /// The bytes that the index may occupy.
    fn budget(&self) -> Option<usize> {
        let max = self.options.limits.max_bytes;
        (max > 0).then(|| max.max(Limits::MAX_BYTES_LEAST))
    }

    /// Target of eviction in bytes: it leaves room, so that the next event does not evict again.
    fn calm(budget: usize) -> usize {
        budget - budget / 16
    }

    /// Blocks to place before bytes are checked again.
    pub(super) fn piece(&self) -> usize {
        self.budget().map_or(usize::MAX, |budget| (budget / 16_384).clamp(16, 1_024))
    }

    /// Longest run to create. A run is only freed as a whole, and growing one leaves a copy of it
    /// to readers: neither may take a large part of the budget.
    pub(super) fn longest_run(&self) -> usize {
        self.budget().map_or(MAX_RUN, |budget| (budget / 1_024).clamp(64, MAX_RUN))
    }

    // ---- blocks

    /// Evicts the excess, after blocks were added to `slot`.
    pub(super) fn keep_capacity(&mut self, slot: u16) {
        let capacity = self.options.limits.capacity_blocks;
        if capacity == 0 {
            return;
        }
        let lane = self.lane_of(slot);
        loop {
            let held: usize = self.siblings(slot).map(|slot| self.slot(slot).held).sum();
            if held <= capacity || self.evict(lane, held - capacity) == 0 {
                break;
            }
        }
        self.finish();
    }

    /// Evicts the least recently predicted blocks of all workers when there are too many.
    ///
    /// # Cost
    /// O(1) within the limit; otherwise O(workers), plus the evicted blocks, which are a fixed
    /// share of all.
    pub(super) fn keep_predicted(&mut self) {
        let Limits { max_predicted, predicted_target, .. } = self.options.limits;
        if max_predicted == 0 || self.counters.predicted <= max_predicted {
            return;
        }
        let predicted = |number: u32| number * 2 + 1;
        let mut lanes: BinaryHeap<Reverse<(u64, Lane)>> = (0..self.owners.workers.len() as u32)
            .map(predicted)
            .filter_map(|lane| Some(Reverse((self.used_first(lane)?, lane))))
            .collect();
        while self.counters.predicted > predicted_target
            && let Some(Reverse((used, lane))) = lanes.pop()
        {
            // Children of the oldest member are evicted first; then this lane may no longer be the
            // oldest.
            if self.leaf(lane).is_none() {
                continue;
            }
            let now = self.used_first(lane).unwrap_or(used);
            if now > used {
                lanes.push(Reverse((now, lane)));
                continue;
            }
            self.evict(lane, self.counters.predicted - predicted_target);
            self.finish();
            self.recount(lane / 2);
            lanes.extend(self.used_first(lane).map(|used| Reverse((used, lane))));
        }
    }

    /// Evicts up to `most` of a lane's least recently used blocks, from the end of a chain and
    /// never below its children. Returns the number of blocks; 0 if there are none.
    fn evict(&mut self, lane: Lane, most: usize) -> usize {
        let Some(leaf) = self.leaf(lane) else { return 0 };
        let (slot, run, end) = (leaf.slot, leaf.run, leaf.end);
        let from = end - usize::from(end - leaf.from).min(most) as u16;
        let before = self.slot(slot).held;
        self.drop_names(slot, run, from, end);
        self.uncover(slot, run, from, end);
        let gone = before - self.slot(slot).held;
        debug_assert!(gone >= usize::from(end - from));
        self.counters.evicted_blocks_total += gone as u64;
        gone
    }

    /// Drops the names of blocks that are about to be evicted, except for their column.
    pub(super) fn drop_names(&mut self, slot: u16, run: u32, start: u16, end: u16) {
        let state = self.slot(slot);
        let number = state.worker;
        let is_dense = self.worker(number).dense.is_some();
        if state.copies.is_empty() && state.extra.is_empty() && !is_dense {
            return;
        }
        for offset in start..end {
            let loc = Loc { run, offset: offset.into() };
            let extra: Vec<u64> = self.slot(slot).extra.all_at(loc).collect();
            for name in &extra {
                self.slot_mut(slot).extra.remove(*name);
                self.forget(*name);
            }
            self.account(slot, extra.len(), false);
            let id = self.slot(slot).members[&run];
            let own = self.name_at(self.members.get(id), offset.into());
            for name in own.into_iter().chain(extra) {
                self.slot_mut(slot).copies.remove(&name);
                let elsewhere = self.worker(number).fact_slots().any(|other| {
                    other != slot
                        && (self.is_named(other, loc, name)
                            || self.slot(other).extra.find(name) == Some(loc))
                });
                if !elsewhere && let Some(dense) = &mut self.worker_mut(number).dense {
                    dense.remove(&name);
                }
            }
        }
    }

    // ---- bytes

    /// Makes room for `blocks` more in a slot. False if that is impossible: the rest is in use, or
    /// readers delay its freeing.
    pub(super) fn make_room(&mut self, slot: u16, blocks: usize) -> bool {
        let Some(budget) = self.budget() else { return true };
        let need = self.need(slot, blocks);
        self.fit(need, budget)
    }

    /// Makes room for the records of another worker.
    pub(super) fn make_room_for_worker(&mut self) -> bool {
        let Some(budget) = self.budget() else { return true };
        let lists = (self.owners.workers.capacity() + self.owners.slots.capacity())
            * size_of::<usize>()
            + 2 * self.times.ages.table_bytes();
        let need = WORKER_BYTES + lists + map_growth(&self.owners.numbers, 1);
        self.fit(need, budget)
    }

    fn fit(&mut self, need: usize, budget: usize) -> bool {
        // Eviction itself needs a little memory, which is reserved.
        let most = (budget - budget / 64).saturating_sub(need);
        self.shrink_to(most.min(Self::calm(budget)));
        self.wait_for(most)
    }

    /// Waits briefly until readers release evicted memory and at most `most` bytes are in use.
    fn wait_for(&mut self, most: usize) -> bool {
        for _ in 0..WAITS {
            if self.bytes_now() <= most || self.bytes_live() > most {
                break;
            }
            std::thread::yield_now();
            self.collect();
        }
        self.bytes_now() <= most
    }

    /// Updates a worker's counts after an event, and evicts the excess.
    pub(super) fn settle(&mut self, number: u32) {
        let Some(budget) = self.budget() else { return };
        self.recount(number);
        self.shrink_to(Self::calm(budget));
        self.wait_for(budget);
        if self.worker(number).wants_dense {
            self.densify_within(number, budget);
        }
    }

    /// Builds a worker's table of names, which may evict others.
    fn densify_within(&mut self, number: u32, budget: usize) {
        self.worker_mut(number).wants_dense = false;
        loop {
            // Eviction may remove blocks that the table would contain, so it proceeds in small
            // steps.
            let most = Self::calm(budget).saturating_sub(self.dense_bytes(number));
            if self.bytes_now() <= most {
                self.densify(number);
                self.recount(number);
                return;
            }
            let live = self.bytes_live();
            if live <= most {
                // Readers delay the freeing of evicted memory: the next search tries again.
                return;
            }
            self.shrink_to(most.max(live - live / 16));
            if self.bytes_live() >= live {
                return;
            }
        }
    }

    /// Upper bound of the bytes for `blocks` more in a slot.
    fn need(&self, slot: u16, blocks: usize) -> usize {
        let state = self.slot(slot);
        let worker = self.worker(state.worker);
        let counts = self.options.count_mode == CountMode::Copies;
        // Labels and names, a longer copy of each array, the tables of names and of child runs.
        let arrays = blocks * 32 + self.longest_run() * size_of::<u64>() * 3;
        let dense = worker.dense.as_ref().map_or(0, |dense| map_growth(dense, blocks));
        let maps = map_growth(&state.members, blocks)
            + map_growth(&state.tails, blocks)
            + map_growth(&state.waiting, blocks)
            + if counts { map_growth(&state.copies, blocks) } else { 0 }
            + map_growth(&self.names.anchors, blocks)
            + map_growth(&self.tree.seeds, 1)
            + map_growth(&self.tree.scattered, blocks)
            + state.extra.growth(blocks)
            + self.age_growth(state, blocks);
        let pages = Slab::growth(&self.members, blocks) + Runs::growth(&self.tree.runs, blocks);
        let metas = if Runs::growth(&self.tree.runs, blocks) > 0 {
            self.tree.metas.page_bytes()
        } else {
            0
        };
        arrays + dense + maps + pages + metas + TABLE_BYTES
    }

    /// Bytes to track the expiry of members with this many blocks.
    fn age_growth(&self, slot: &Slot, blocks: usize) -> usize {
        match slot.plane {
            Plane::Predicted => self.times.ages.growth(slot.worker, blocks),
            Plane::Held(_) if self.options.limits.ttl_ms == 0 => 0,
            Plane::Held(_) => self.times.held.growth(slot.worker, blocks),
        }
    }

    /// Evicts the least recently used blocks of all workers until at most `most` bytes are in use.
    fn shrink_to(&mut self, most: usize) {
        if self.bytes_now() <= most {
            return;
        }
        self.collect();
        if self.bytes_now() <= most {
            return;
        }
        // A little more than requested, so that not every event has to evict.
        let most = most - most / 64;
        while self.bytes_live() > most {
            let Some(lane) = self.oldest_lane() else { break };
            self.evict(lane, usize::MAX);
            self.finish();
            self.recount(lane / 2);
        }
        self.collect();
    }

    /// Bytes in use, excluding memory that only waits for readers.
    fn bytes_live(&self) -> usize {
        let waiting = Runs::waiting_bytes(&self.tree.runs)
            + self.shared.edges.waiting_bytes(&self.tree.edges);
        self.bytes_now() - waiting
    }

    /// Whether the worker still holds the block before `place`, where an event continues.
    pub(super) fn is_open(&self, slot: u16, place: Loc) -> bool {
        let Some(offset) = place.offset.checked_sub(1) else { return true };
        self.siblings(slot).any(|slot| {
            let id = self.slot(slot).members.get(&place.run);
            id.is_some_and(|id| self.members.get(*id).spans.contains(offset as u16))
        })
    }
}
