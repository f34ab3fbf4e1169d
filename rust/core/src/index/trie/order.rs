//! The order of use: what goes first when something must go.
//!
//! Each worker has two lanes, one of its facts in all tiers and one of its predictions. A lane is a list
//! of members, least recently used first. Storing or predicting blocks uses the runs they lie in, and by
//! that all runs above: what others hang on goes after them. That needs no walk to the root. A member
//! that comes to its turn while others hang on it leaves the list (it is *parked*), and the last of those
//! that goes leaves it its own place.

use std::cmp::Reverse;
use std::collections::binary_heap::PeekMut;

use super::holder::{Ends, Lane, MemberId, NO_MEMBER};
use super::run::Loc;
use super::seats::{NONE, Plane};
use super::writer::Writer;
use crate::index::arena::runs::{ROOT, RunId};

/// Where in its lane a member was.
#[derive(Clone, Copy)]
pub(super) struct Turn {
    newer: MemberId,
    used: u64,
}

/// Blocks of one slot that may go: nothing of the worker hangs on them.
pub(super) struct Leaf {
    pub slot: u16,
    pub run: RunId,
    pub from: u16,
    pub end: u16,
}

impl Writer {
    pub(super) fn keeps_order(&self) -> bool {
        let limits = &self.options.limits;
        limits.capacity_blocks > 0 || limits.max_bytes > 0 || limits.max_predicted > 0
    }

    pub(super) fn lane_of(&self, slot: u16) -> Lane {
        let state = self.slot(slot);
        state.worker * 2 + u32::from(state.plane == Plane::Predicted)
    }

    pub(super) fn ends(&self, lane: Lane) -> Option<&Ends> {
        Some(&self.owners.workers.get(lane as usize / 2)?.as_ref()?.order[lane as usize % 2])
    }

    fn ends_mut(&mut self, lane: Lane) -> &mut Ends {
        &mut self.worker_mut(lane / 2).order[lane as usize % 2]
    }

    /// The slots of the lane that `slot` belongs to.
    pub(super) fn siblings(&self, slot: u16) -> impl Iterator<Item = u16> + use<> {
        let state = self.slot(slot);
        let mut slots = self.worker(state.worker).slots;
        match state.plane {
            Plane::Held(_) => slots[Plane::Predicted.number()] = NONE,
            Plane::Predicted => slots[..Plane::Predicted.number()].fill(NONE),
        }
        slots.into_iter().filter(|slot| *slot != NONE)
    }

    /// Up to which block of `run` something of the worker hangs on it, in the lane of `slot`; at most this,
    /// and 0 when nothing does.
    pub(super) fn floor(&self, slot: u16, run: RunId) -> u16 {
        let of_slot = |slot: u16| {
            let state = self.slot(slot);
            match state.members.get(&run).map(|id| self.members.get(*id)) {
                Some(member) => member.floor,
                None if state.waiting.contains_key(&run) => u16::MAX,
                None => 0,
            }
        };
        self.siblings(slot).map(of_slot).max().unwrap_or(0)
    }

    /// Puts a new member in its order of use.
    pub(super) fn link(&mut self, id: MemberId) {
        if self.keeps_order() {
            self.order.clock += 1;
            self.insert(id, Turn { newer: NO_MEMBER, used: self.order.clock });
        }
    }

    /// Takes a member out, and tells where it was.
    pub(super) fn unlink(&mut self, id: MemberId) -> Turn {
        if !self.keeps_order() {
            return Turn { newer: NO_MEMBER, used: 0 };
        }
        let member = self.members.get_mut(id);
        let (slot, used) = (member.slot, member.used);
        if member.is_parked {
            member.is_parked = false;
            let lane = self.lane_of(slot);
            return Turn { newer: self.ends_mut(lane).oldest, used };
        }
        let (older, newer) = (member.older, member.newer);
        let lane = self.lane_of(slot);
        match older {
            NO_MEMBER => self.ends_mut(lane).oldest = newer,
            older => self.members.get_mut(older).newer = newer,
        }
        match newer {
            NO_MEMBER => self.ends_mut(lane).newest = older,
            newer => self.members.get_mut(newer).older = older,
        }
        Turn { newer, used }
    }

    fn insert(&mut self, id: MemberId, turn: Turn) {
        let lane = self.lane_of(self.members.get(id).slot);
        let older = match turn.newer {
            NO_MEMBER => std::mem::replace(&mut self.ends_mut(lane).newest, id),
            newer => std::mem::replace(&mut self.members.get_mut(newer).older, id),
        };
        match older {
            NO_MEMBER => self.ends_mut(lane).oldest = id,
            older => self.members.get_mut(older).newer = id,
        }
        let member = self.members.get_mut(id);
        (member.older, member.newer) = (older, turn.newer);
        member.used = turn.used;
        if self.options.limits.max_bytes > 0 && !self.ends_mut(lane).is_queued {
            self.ends_mut(lane).is_queued = true;
            self.order.lanes.push(Reverse((turn.used, lane)));
            self.forget_lanes();
        }
    }

    /// What the worker has of the member's run was used now.
    pub(super) fn touch(&mut self, id: MemberId) {
        if !self.keeps_order() {
            return;
        }
        self.order.clock += 1;
        let turn = Turn { newer: NO_MEMBER, used: self.order.clock };
        let (slot, run) = (self.members.get(id).slot, self.members.get(id).run);
        for slot in self.siblings(slot) {
            if let Some(&id) = self.slot(slot).members.get(&run) {
                self.unlink(id);
                self.insert(id, turn);
            }
        }
    }

    /// The block before `place` was used now.
    pub(super) fn touch_before(&mut self, slot: u16, place: Loc) {
        if !self.keeps_order() || place.offset == 0 {
            return;
        }
        let id = self.siblings(slot).find_map(|slot| self.slot(slot).members.get(&place.run));
        if let Some(&id) = id {
            self.touch(id);
        }
    }

    /// After a member on a run that hangs on `run` went, whose place was `turn`: members that waited for
    /// it take its place.
    pub(super) fn unpark(&mut self, slot: u16, run: RunId, turn: Turn) {
        if run == ROOT || !self.keeps_order() || self.floor(slot, run) > 0 {
            return;
        }
        for slot in self.siblings(slot) {
            let id = self.slot(slot).members.get(&run).copied();
            if let Some(id) = id.filter(|id| self.members.get(*id).is_parked) {
                self.members.get_mut(id).is_parked = false;
                self.insert(id, turn);
            }
        }
    }

    /// The blocks of a lane to go next: the deepest of the run that was used least recently among those
    /// that nothing hangs on.
    pub(super) fn leaf(&mut self, lane: Lane) -> Option<Leaf> {
        loop {
            let id = self.ends(lane).map(|ends| ends.oldest).filter(|id| *id != NO_MEMBER)?;
            let leaf = self.leaf_of(self.members.get(id).slot, self.members.get(id).run);
            if leaf.is_some() {
                return leaf;
            }
            self.unlink(id);
            self.members.get_mut(id).is_parked = true;
        }
    }

    fn leaf_of(&self, slot: u16, run: RunId) -> Option<Leaf> {
        let spans = |slot: u16| {
            let id = self.slot(slot).members.get(&run)?;
            Some(&self.members.get(*id).spans)
        };
        // Of several tiers that end alike the last one gives way.
        let end_of = |slot: &u16| spans(*slot).map_or(0, |spans| spans.end());
        let slot = self.siblings(slot).max_by_key(end_of)?;
        let end = end_of(&slot);
        // What another tier has behind its start may hang on the block before that.
        let starts = self.siblings(slot).filter_map(spans);
        let start = starts.map(|spans| spans.start_of(spans.end() - 1)).max()?;
        let from = start.max(self.floor(slot, run));
        (from < end).then_some(Leaf { slot, run, from, end })
    }

    /// The lane whose oldest member was used least recently of all.
    pub(super) fn oldest_lane(&mut self) -> Option<Lane> {
        loop {
            let Reverse((used, lane)) = *self.order.lanes.peek()?;
            let oldest = self.ends(lane).map(|ends| ends.oldest).filter(|id| *id != NO_MEMBER);
            match oldest.map(|id| self.members.get(id).used) {
                Some(now) if now == used => return Some(lane),
                Some(now) => {
                    if let Some(mut top) = self.order.lanes.peek_mut() {
                        *top = Reverse((now, lane));
                    }
                }
                None => {
                    if let Some(top) = self.order.lanes.peek_mut() {
                        PeekMut::pop(top);
                    }
                    if self.ends(lane).is_some() {
                        self.ends_mut(lane).is_queued = false;
                    }
                }
            }
        }
    }

    /// When the oldest member of a lane was used; `None` for an empty one.
    pub(super) fn used_first(&self, lane: Lane) -> Option<u64> {
        let oldest = self.ends(lane).map(|ends| ends.oldest).filter(|id| *id != NO_MEMBER)?;
        Some(self.members.get(oldest).used)
    }

    /// Lanes of workers that went must not pile up.
    fn forget_lanes(&mut self) {
        if self.order.lanes.len() <= 4 * self.owners.numbers.len() + 64 {
            return;
        }
        let mut lanes = std::mem::take(&mut self.order.lanes).into_vec();
        lanes.sort_unstable_by_key(|Reverse((used, lane))| (*lane, *used));
        lanes.dedup_by_key(|Reverse((_, lane))| *lane);
        lanes.retain(|Reverse((_, lane))| self.ends(*lane).is_some_and(|ends| ends.is_queued));
        lanes.shrink_to_fit();
        self.order.lanes = lanes.into();
    }
}
