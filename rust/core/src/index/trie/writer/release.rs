//! Removes blocks, and updates readers and counts.

use super::{DENSE_CHUNK, UNCOUNTED_MOST, Writer};
use crate::ids::Tier;
use crate::index::arena::cover::{Entries, WHOLE};
use crate::index::arena::runs::{RunId, prefetch};
use crate::index::trie::holder::{MemberId, NO_MEMBER, WorkerState};
use crate::index::trie::room::shrink_map;
use crate::index::trie::run::Loc;
use crate::index::trie::seats::{NONE, Plane};
use crate::index::trie::spans::Spans;

impl Writer {
    /// Releases one copy of a name; false if other copies are left.
    pub(super) fn let_go(&mut self, slot: u16, loc: Loc, name: u64) -> bool {
        let state = self.slot_mut(slot);
        if !state.copies.is_empty()
            && let Some(copies) = state.copies.get_mut(&name)
        {
            *copies -= 1;
            if *copies <= 1 {
                state.copies.remove(&name);
            }
            return false;
        }
        if state.extra.find(name).is_some() {
            state.extra.remove(name);
            self.forget(name);
            self.account(slot, 1, false);
        } else if let Some(other) = state.extra.at(loc) {
            // The block stays, under its other name.
            state.extra.remove(other);
            let id = state.members[&loc.run];
            self.rename(id, loc.offset as usize, other);
            self.forget(other);
            self.account(slot, 1, false);
        } else {
            self.uncover(slot, loc.run, loc.offset as u16, loc.offset as u16 + 1);
        }
        let number = self.slot(slot).worker;
        if self.worker(number).dense.is_some() {
            let is_left = self.worker(number).fact_slots().any(|slot| {
                self.is_named(slot, loc, name) || self.slot(slot).extra.find(name).is_some()
            });
            if !is_left && let Some(dense) = &mut self.worker_mut(number).dense {
                dense.remove(&name);
            }
        }
        true
    }

    /// Whether a worker's table of names describes the slot completely: one tier, and one copy and
    /// one name per block.
    pub(super) fn is_plain_dense(&self, slot: u16) -> bool {
        let state = self.slot(slot);
        let WorkerState { slots, dense, .. } = self.worker(state.worker);
        dense.is_some()
            && state.copies.is_empty()
            && state.extra.is_empty()
            && slot == slots[0]
            && slots[1..4].iter().all(|other| *other == NONE)
    }

    /// Releases names of a slot for which [`Writer::is_plain_dense`] is true. Returns how many were
    /// held.
    pub(super) fn let_go_dense(
        &mut self,
        slot: u16,
        names: &[u64],
        mut gone: Option<&mut Vec<u64>>,
    ) -> u32 {
        let state = self.slot(slot);
        let number = state.worker;
        let Some(dense) = &self.worker(number).dense else { return 0 };
        // The names are unordered, so each look-up is a cache miss: all look-ups run side by side,
        // then the work.
        let mut found = [None; DENSE_CHUNK];
        for (found, name) in found.iter_mut().zip(names) {
            *found = dense.get(name).copied();
        }
        let mut ids = [NO_MEMBER; DENSE_CHUNK];
        for (id, loc) in ids.iter_mut().zip(&found) {
            *id = loc.and_then(|loc| state.members.get(&loc.run).copied()).unwrap_or(NO_MEMBER);
        }
        for id in ids.iter().filter(|id| **id != NO_MEMBER) {
            prefetch(self.members.get(*id));
        }
        let mut removed = 0;
        for name in names {
            // Again, because a name may be repeated.
            let dense = self.worker_mut(number).dense.as_mut();
            let Some(Loc { run, offset }) = dense.and_then(|dense| dense.remove(name)) else {
                continue;
            };
            self.uncover(slot, run, offset as u16, offset as u16 + 1);
            self.evicted(slot, run, offset as u16, offset as u16 + 1, gone.as_deref_mut());
            removed += 1;
        }
        removed
    }

    /// Removes blocks of a run from the slot, which holds all of them.
    pub(in crate::index::trie) fn uncover(&mut self, slot: u16, run: RunId, start: u16, end: u16) {
        let id = self.slot(slot).members[&run];
        let old_lead = self.members.get(id).spans.lead();
        self.reshape(id, |spans| {
            let before = if cfg!(debug_assertions) { spans.len() } else { 0 };
            spans.remove(start, end);
            debug_assert_eq!(spans.len() + usize::from(end - start), before);
        });
        self.account(slot, usize::from(end - start), false);
        let spans = &self.members.get(id).spans;
        let (is_empty, new_end, new_lead) = (spans.is_empty(), spans.end(), spans.lead());
        let member = self.members.get(id);
        let meta = self.tree.metas.get_mut(run);
        if old_lead == new_lead
            && member.is_scattered
            && meta.holders == 1
            && !meta.is_uncounted
            && !is_empty
            && end < new_end
        {
            // Blocks after a hole, which readers do not see.
            meta.held -= u32::from(end - start);
            self.counters.unique_blocks -= usize::from(end - start);
            return;
        }
        self.publish(id);
        if is_empty && id != self.busy {
            self.drop_member(id);
        }
    }

    /// Whether the slot holds a block.
    pub(super) fn covers(&self, slot: u16, loc: Loc) -> bool {
        let id = self.slot(slot).members.get(&loc.run);
        id.is_some_and(|id| self.members.get(*id).spans.contains(loc.offset as u16))
    }

    /// The engine evicted these blocks of a run, and the slot no longer holds them: ends their
    /// predictions. Appends their labels to `gone`, if requested.
    pub(super) fn evicted(
        &mut self,
        slot: u16,
        run: RunId,
        start: u16,
        end: u16,
        gone: Option<&mut Vec<u64>>,
    ) {
        let state = self.slot(slot);
        if state.plane != Plane::Held(Tier::Device) {
            return;
        }
        if let Some(gone) = gone {
            let labels = self.shared.runs.peek(&self.tree.runs, run).labels();
            gone.extend_from_slice(&labels[usize::from(start)..usize::from(end)]);
        }
        let predicted = self.worker(state.worker).slots[Plane::Predicted.number()];
        if predicted != NONE && self.slot(predicted).members.contains_key(&run) {
            self.unpredict(predicted, run, start, end);
        }
    }

    /// Ends the predictions of blocks of a run in which the slot has a member. Returns their
    /// number.
    pub(in crate::index::trie) fn unpredict(
        &mut self,
        slot: u16,
        run: RunId,
        start: u16,
        end: u16,
    ) -> usize {
        let id = self.slot(slot).members[&run];
        let before = self.members.get(id).spans.len();
        self.reshape(id, |spans| spans.remove(start, end));
        let spans = &self.members.get(id).spans;
        let (gone, is_empty) = (before - spans.len(), spans.is_empty());
        if gone > 0 {
            self.account(slot, gone, false);
            self.publish(id);
            if is_empty {
                self.drop_member(id);
            }
        }
        gone
    }

    /// Adds blocks to a member; their names are already set.
    pub(super) fn grow(&mut self, slot: u16, id: MemberId, start: u16, end: u16) {
        self.reshape(id, |spans| spans.add(start, end));
        self.account(slot, usize::from(end - start), true);
        self.publish(id);
    }

    /// Changes the blocks of a member and its derived data: the bytes of its list, and the name of
    /// its last block.
    pub(super) fn reshape(&mut self, id: MemberId, change: impl FnOnce(&mut Spans)) {
        let member = self.members.get_mut(id);
        let (slot, old_end) = (member.slot, member.spans.end());
        let heap = member.spans.heap_bytes();
        change(&mut member.spans);
        self.sizes.spans = self.sizes.spans + member.spans.heap_bytes() - heap;
        let new_end = member.spans.end();
        if new_end == old_end {
            return;
        }
        if new_end < old_end {
            let number = self.slot(slot).worker;
            self.times.held.cut(number, id, new_end);
            self.times.ages.cut(number, id, new_end);
        }
        let member = self.members.get(id);
        let tail = |end: u16| self.name_at(member, usize::from(end.checked_sub(1)?));
        let (old_tail, new_tail) = (tail(old_end), tail(new_end));
        let tails = &mut self.slot_mut(slot).tails;
        if let Some(tail) = old_tail {
            tails.remove(&tail);
        }
        if let Some(tail) = new_tail {
            tails.insert(tail, id);
        }
    }

    /// Counts blocks that a slot gained or lost.
    pub(in crate::index::trie) fn account(&mut self, slot: u16, blocks: usize, is_gain: bool) {
        let state = self.owners.slots[usize::from(slot)].as_mut().expect("a slot that is given");
        let total = match state.plane {
            Plane::Held(_) => &mut self.counters.memberships,
            Plane::Predicted => &mut self.counters.predicted,
        };
        if is_gain {
            state.held += blocks;
            *total += blocks;
        } else {
            state.held -= blocks;
            *total -= blocks;
        }
    }

    /// Publishes a member's current cover of its run.
    pub(super) fn publish(&mut self, id: MemberId) {
        let member = self.members.get_mut(id);
        let (run, slot) = (member.run, member.slot);
        let plane = self.owners.slots[usize::from(slot)].as_ref().expect("a member's slot").plane;
        let len = self.shared.runs.peek(&self.tree.runs, run).labels().len() as u16;
        let meta = self.tree.metas.get_mut(run);
        let lead = member.spans.lead();
        let is_device = plane == Plane::Held(Tier::Device);
        let cut = if is_device && lead == len { WHOLE } else { lead };
        let old = std::mem::replace(&mut member.cut, if plane.is_prefix() { cut } else { 0 });
        meta.wholes += u32::from(is_device && cut == WHOLE);
        meta.wholes -= u32::from(is_device && old == WHOLE);
        let is_scattered = is_device && usize::from(lead) != member.spans.len();
        if is_scattered != member.is_scattered {
            member.is_scattered = is_scattered;
            let list = self.tree.scattered.entry(run).or_default();
            let room = list.capacity();
            if is_scattered {
                list.push(slot);
            } else {
                list.retain(|other| *other != slot);
                list.shrink_to(list.len() * 2);
            }
            let (is_empty, new_room) = (list.is_empty(), list.capacity());
            self.sizes.scattered = self.sizes.scattered + new_room * 2 - room * 2;
            if is_empty {
                self.tree.scattered.remove(&run);
                shrink_map(&mut self.tree.scattered);
            }
        }
        if !plane.is_prefix() || cut != old {
            let spans = &member.spans;
            self.shared.runs.cover(&mut self.tree.runs, run, &mut self.scratch, |entries| {
                if plane.is_prefix() {
                    entries.set_prefix(slot, cut);
                } else {
                    entries.set_stretches(slot, spans.iter());
                }
            });
        }
        if plane == Plane::Predicted {
            return;
        }
        let meta = self.tree.metas.get_mut(run);
        if meta.holders == 1 {
            let held = self.members.get(id).spans.len();
            self.set_held(run, held);
        } else if !meta.is_uncounted {
            meta.is_uncounted = true;
            self.tree.uncounted.push(run);
            if self.tree.uncounted.len() > UNCOUNTED_MOST {
                self.count_held();
            }
        }
    }

    pub(super) fn set_held(&mut self, run: RunId, held: usize) {
        let meta = self.tree.metas.get_mut(run);
        self.counters.unique_blocks += held;
        self.counters.unique_blocks -= meta.held as usize;
        meta.held = held as u32;
    }

    /// Updates the count of distinct blocks, which is deferred for runs with several holders.
    pub(in crate::index::trie) fn count_held(&mut self) {
        for run in std::mem::take(&mut self.tree.uncounted) {
            // A removed run was already counted.
            if std::mem::take(&mut self.tree.metas.get_mut(run).is_uncounted) {
                let len = self.shared.runs.peek(&self.tree.runs, run).labels().len() as u16;
                let held = self.held_of(run, len);
                self.set_held(run, held);
            }
        }
    }

    /// Number of blocks with a holder in a run of `len` blocks, without predictions.
    fn held_of(&mut self, run: RunId, len: u16) -> usize {
        self.shared.runs.peek(&self.tree.runs, run).cover().decode(&mut self.scratch);
        let is_fact = |slot: u16| self.slot(slot).plane != Plane::Predicted;
        let Entries { prefixes, stretches } = &self.scratch;
        let has_predictions = self.counters.predicted > 0;
        let cuts = prefixes.iter().filter(|p| !has_predictions || is_fact(p.slot)).map(|p| p.cut);
        let lead = cuts.max().unwrap_or(0).min(len);
        let scattered = self.tree.scattered.get(&run);
        if stretches.is_empty() && scattered.is_none() {
            return lead.into();
        }
        let mut spans: Vec<(u16, u16)> = stretches.iter().map(|s| (s.start, s.end)).collect();
        for slot in scattered.into_iter().flatten() {
            let id = self.slot(*slot).members[&run];
            spans.extend(self.members.get(id).spans.iter());
        }
        spans.sort_unstable();
        let (mut held, mut end) = (lead, lead);
        for (from, to) in spans {
            if to > end {
                held += to - from.max(end);
                end = to;
            }
        }
        held.into()
    }
}
