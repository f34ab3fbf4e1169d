//! Events of an engine, one call each.

use super::{Chain, DENSE_CHUNK, SEARCH_CREDIT, Writer};
use crate::ids::{Tier, Worker};
use crate::index::arena::epoch::epochs;
use crate::index::arena::runs::ROOT;
use crate::index::trie::holder::{Extra, MemberId, Slot, WorkerState};
use crate::index::trie::names::FORGET_PER_NAME;
use crate::index::trie::room::shrink_map;
use crate::index::trie::run::Loc;
use crate::index::trie::seats::{NONE, Plane};
use crate::index::types::{Block, CopyOutcome, Rejection, RemoveOutcome, StoreOutcome};

impl Writer {
    fn reject(&mut self, cause: Rejection) -> StoreOutcome {
        let counter = match cause {
            Rejection::Orphan => &mut self.counters.orphans_total,
            Rejection::SelfReference => &mut self.counters.self_references_total,
            Rejection::SlotsExhausted => &mut self.counters.slots_exhausted_total,
        };
        *counter += 1;
        StoreOutcome { rejected: Some(cause), ..StoreOutcome::default() }
    }

    pub(in crate::index::trie) fn store(
        &mut self,
        worker: Worker,
        tier: Tier,
        parent: Option<u64>,
        seed: u64,
        blocks: &[Block],
    ) -> StoreOutcome {
        if blocks.is_empty() {
            return StoreOutcome::default();
        }
        if self.repetitions.is_self_referencing(parent, blocks) {
            return self.reject(Rejection::SelfReference);
        }
        let mut place = match parent {
            None => Loc { run: ROOT, offset: 0 },
            Some(name) => {
                let number = self.owners.numbers.get(&worker).copied();
                match number.and_then(|number| self.locate(number, name)) {
                    Some(Loc { run, offset }) => Loc { run, offset: offset + 1 },
                    None => return self.reject(Rejection::Orphan),
                }
            }
        };
        let Some(number) = self.worker_or_new(worker) else {
            return self.reject(Rejection::SlotsExhausted);
        };
        let Some(slot) = self.slot_or_new(number, Plane::Held(tier)) else {
            return self.reject(Rejection::SlotsExhausted);
        };
        let state = self.worker_mut(number);
        state.search_debt = state.search_debt.saturating_sub(blocks.len() * SEARCH_CREDIT);
        self.forget_left(FORGET_PER_NAME * blocks.len());
        // Making room for an event must not evict its parent.
        self.touch_before(slot, place);
        self.stamp(slot, place);
        let mut outcome = StoreOutcome::default();
        for piece in blocks.chunks(self.piece()) {
            place = self.place_piece(slot, place, seed, Chain::Named(piece), &mut outcome);
        }
        self.counters.duplicate_blocks_total += u64::from(outcome.duplicates);
        self.counters.moved_blocks_total += u64::from(outcome.moved);
        self.counters.refused_blocks_total += u64::from(outcome.refused);
        self.finish();
        self.keep_capacity(slot);
        self.settle(number);
        outcome
    }

    pub(in crate::index::trie) fn predict(
        &mut self,
        worker: Worker,
        seed: u64,
        locals: &[u64],
        history_blocks: Option<usize>,
    ) -> usize {
        if locals.is_empty() {
            return 0;
        }
        let Some(number) = self.worker_or_new(worker) else { return 0 };
        let Some(slot) = self.slot_or_new(number, Plane::Predicted) else { return 0 };
        if let Some(most) = history_blocks {
            if self.times.ages.history_most(number).is_none() {
                // Its ends are times, which can't be compared with stamps.
                self.clear_slot(slot);
            }
            self.times.ages.set_history(number, most);
        }
        self.times.ages.begin(number);
        let mut outcome = StoreOutcome::default();
        let mut place = Loc { run: ROOT, offset: 0 };
        for piece in locals.chunks(self.piece()) {
            place = self.place_piece(slot, place, seed, Chain::Plain(piece), &mut outcome);
        }
        self.finish();
        self.keep_capacity(slot);
        self.keep_history(slot);
        self.settle(number);
        self.keep_predicted();
        outcome.added as usize
    }

    pub(in crate::index::trie) fn copy(
        &mut self,
        worker: Worker,
        tier: Tier,
        names: &[u64],
    ) -> CopyOutcome {
        let mut outcome = CopyOutcome::default();
        for name in names {
            let number = self.owners.numbers.get(&worker).copied();
            let found = number.and_then(|n| self.locate(n, *name).map(|loc| (n, loc)));
            let Some((number, loc)) = found else {
                outcome.unknown += 1;
                continue;
            };
            let Some(slot) = self.slot_or_new(number, Plane::Held(tier)) else {
                outcome.refused += 1;
                continue;
            };
            let behind = Loc { offset: loc.offset + 1, ..loc };
            if !self.make_room(slot, 1) || !self.is_open(slot, behind) {
                outcome.refused += 1;
                self.counters.refused_blocks_total += 1;
                continue;
            }
            let local_hash = self.label(loc);
            let mut stored = StoreOutcome::default();
            let block = Block { engine_hash: *name, local_hash };
            let refused = 1 - self.cover_named(slot, loc, &[block], &mut stored) as u32;
            outcome.added += stored.added;
            outcome.duplicates += stored.duplicates;
            outcome.refused += refused;
            self.counters.duplicate_blocks_total += u64::from(stored.duplicates);
            self.counters.refused_blocks_total += u64::from(refused);
            self.finish();
            self.keep_capacity(slot);
            self.settle(number);
        }
        outcome
    }

    pub(in crate::index::trie) fn remove(
        &mut self,
        worker: Worker,
        tier: Tier,
        names: &[u64],
        mut gone: Option<&mut Vec<u64>>,
    ) -> RemoveOutcome {
        let mut outcome = RemoveOutcome::default();
        let slot = self.owners.numbers.get(&worker).map(|n| self.worker(*n).slots[tier as usize]);
        let Some(slot) = slot.filter(|slot| *slot != NONE) else {
            outcome.unknown = names.len() as u32;
            self.counters.unknown_removals_total += u64::from(outcome.unknown);
            return outcome;
        };
        let number = self.slot(slot).worker;
        let state = self.worker_mut(number);
        state.search_debt = state.search_debt.saturating_sub(names.len() * SEARCH_CREDIT);
        let mut hint = None;
        let mut at = 0;
        while at < names.len() {
            if self.is_plain_dense(slot) {
                let chunk = &names[at..names.len().min(at + DENSE_CHUNK)];
                let removed = self.let_go_dense(slot, chunk, gone.as_deref_mut());
                outcome.removed += removed;
                outcome.unknown += chunk.len() as u32 - removed;
                at += chunk.len();
                continue;
            }
            let name = names[at];
            at += 1;
            let expected = hint.take().filter(|loc| self.is_named(slot, *loc, name));
            let Some(loc) = expected.or_else(|| self.locate_in(slot, name)) else {
                outcome.unknown += 1;
                continue;
            };
            let state = self.slot(slot);
            let is_plain = state.copies.is_empty()
                && state.extra.is_empty()
                && self.worker(number).dense.is_none();
            if !is_plain {
                match self.let_go(slot, loc, name) {
                    true => outcome.removed += 1,
                    false => outcome.kept += 1,
                }
                if !self.covers(slot, loc) {
                    let at = loc.offset as u16;
                    self.evicted(slot, loc.run, at, at + 1, gone.as_deref_mut());
                }
                hint = self.before(loc);
                continue;
            }
            // Engines usually evict along the chain, from its end: handle all consecutive ones at
            // once.
            let member = self.members.get(self.slot(slot).members[&loc.run]);
            let column = &self.tree.metas.get(loc.run).column(member.column).names;
            let (mut low, mut high) = (loc.offset as usize, loc.offset as usize + 1);
            let start = usize::from(member.spans.start_of(loc.offset as u16));
            while low > start && names.get(at) == Some(&column[low - 1]) {
                low -= 1;
                at += 1;
            }
            if high - low == 1 {
                let end = usize::from(member.spans.end_of(loc.offset as u16));
                while high < end && names.get(at) == Some(&column[high]) {
                    high += 1;
                    at += 1;
                }
            }
            outcome.removed += (high - low) as u32;
            self.uncover(slot, loc.run, low as u16, high as u16);
            self.evicted(slot, loc.run, low as u16, high as u16, gone.as_deref_mut());
            hint = self.before(Loc { run: loc.run, offset: low as u32 });
        }
        self.counters.unknown_removals_total += u64::from(outcome.unknown);
        self.finish();
        self.recount(number);
        self.settle(number);
        outcome
    }

    /// Drops everything that a worker holds; returns the number of memberships.
    pub(in crate::index::trie) fn clear(&mut self, worker: Worker) -> usize {
        let Some(&number) = self.owners.numbers.get(&worker) else { return 0 };
        let slots = self.worker(number).slots;
        let dropped = slots.into_iter().map(|slot| self.clear_slot(slot)).sum();
        let WorkerState { slots, order, counted, .. } = *self.worker(number);
        let fresh = WorkerState { slots, order, counted, ..WorkerState::new(worker) };
        *self.worker_mut(number) = fresh;
        self.finish();
        self.recount(number);
        self.settle(number);
        dropped
    }

    /// Drops everything that a worker holds in one tier, for the device including its predictions;
    /// returns the number of memberships there.
    pub(in crate::index::trie) fn clear_tier(&mut self, worker: Worker, tier: Tier) -> usize {
        let Some(&number) = self.owners.numbers.get(&worker) else { return 0 };
        let slots = self.worker(number).slots;
        let holds = |plane: Plane| {
            let slot = slots[plane.number()];
            slot != NONE && self.slot(slot).held > 0
        };
        let mut others = Tier::ALL.into_iter().filter(|other| *other != tier).map(Plane::Held);
        if !others.any(holds) && (tier == Tier::Device || !holds(Plane::Predicted)) {
            return self.clear(worker);
        }
        let dropped = self.clear_slot(slots[tier as usize]);
        if tier == Tier::Device {
            self.clear_slot(slots[Plane::Predicted.number()]);
        }
        if self.worker(number).dense.is_some() {
            // The table contains names of all tiers.
            self.densify(number);
        }
        self.finish();
        self.recount(number);
        self.settle(number);
        dropped
    }

    /// Drops everything of a slot, if it exists; returns the number of memberships.
    fn clear_slot(&mut self, slot: u16) -> usize {
        if slot == NONE {
            return 0;
        }
        let mix = self.mix;
        let state = self.slot_mut(slot);
        let (number, plane) = (state.worker, state.plane);
        let dropped = if plane == Plane::Predicted { 0 } else { state.held };
        let extra = std::mem::replace(&mut state.extra, Extra::new(mix));
        state.held -= extra.len();
        self.counters.memberships -= extra.len();
        // The filter counts them separately from the columns' names, which go with the columns.
        extra.iter().for_each(|(name, _)| self.forget(name));
        let state = self.slot_mut(slot);
        state.copies.clear();
        let members: Vec<MemberId> = state.members.values().copied().collect();
        for id in members {
            // The names of the last blocks are removed with the slot's others below.
            let spans = std::mem::take(&mut self.members.get_mut(id).spans);
            self.sizes.spans -= spans.heap_bytes();
            self.account(slot, spans.len(), false);
            self.publish(id);
            self.drop_member(id);
        }
        let state = self.slot_mut(slot);
        debug_assert!(state.held == 0 && state.members.is_empty());
        **self.owners.slots[usize::from(slot)].as_mut().expect("looked at above") =
            Slot::new(number, plane, mix);
        dropped
    }

    pub(in crate::index::trie) fn remove_worker(&mut self, worker: Worker) -> bool {
        self.clear(worker);
        let Some(number) = self.owners.numbers.remove(&worker) else { return false };
        let state =
            self.owners.workers[number as usize].take().expect("a known worker has a state");
        self.times.ages.forget_history(number);
        shrink_map(&mut self.owners.numbers);
        self.sizes.workers -= state.counted;
        for slot in state.slots.into_iter().filter(|slot| *slot != NONE) {
            self.owners.slots[usize::from(slot)] = None;
            self.shared.seats.take_back(slot);
            self.owners.retired.push(slot);
        }
        self.owners.retired.collect(epochs(), |slot| self.owners.free.push(slot));
        true
    }
}
