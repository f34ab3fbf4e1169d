//! The order of use, which determines the order of eviction.
//!
//! Each worker has two lanes, one for its held blocks in all tiers and one for its predictions. A
//! lane is a list of members, least recently used first. Storing or predicting blocks counts as a
//! use of their runs and thereby of all ancestors, which are evicted after their children. That
//! needs no walk to the root: a member whose turn comes while it has children leaves the list (it
//! is *parked*), and the last child to go passes its place on to it.

use std::cmp::Reverse;
use std::collections::binary_heap::PeekMut;

use super::holder::{Ends, Lane, MemberId, NO_MEMBER};
use super::run::Loc;
use super::seats::{NONE, Plane};
use super::writer::Writer;
use crate::index::arena::runs::{ROOT, RunId};

/// A member's position in its lane.
#[derive(Clone, Copy)]
pub(super) struct Turn {
    newer: MemberId,
    used: u64,
}

/// Blocks of one slot that may be evicted: the worker holds no children of them.
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

    /// The offset up to which `run` has children in the lane of `slot`; at most this, and 0 without
    /// children.
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

    /// Inserts a new member into its order of use.
    pub(super) fn link(&mut self, id: MemberId) {
        if self.keeps_order() {
            self.order.clock += 1;
            self.insert(id, Turn { newer: NO_MEMBER, used: self.order.clock });
        }
    }

    /// Removes a member; returns its position.
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

    /// Marks the worker's part of the member's run as used now.
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

    /// Marks the block before `place` as used now.
    pub(super) fn touch_before(&mut self, slot: u16, place: Loc) {
        if !self.keeps_order() || place.offset == 0 {
            return;
        }
        let id = self.siblings(slot).find_map(|slot| self.slot(slot).members.get(&place.run));
        if let Some(&id) = id {
            self.touch(id);
        }
    }

    /// After the removal of a member on a child of `run` at position `turn`: parked members take
    /// that position.
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

    /// The next blocks of a lane to evict: the deepest of the least recently used run without
    /// children.
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
        // Among several tiers with the same end, the last one is evicted.
        let end_of = |slot: &u16| spans(*slot).map_or(0, |spans| spans.end());
        let slot = self.siblings(slot).max_by_key(end_of)?;
        let end = end_of(&slot);
        // Blocks of another tier may depend on the block before them.
        let starts = self.siblings(slot).filter_map(spans);
        let start = starts.map(|spans| spans.start_of(spans.end() - 1)).max()?;
        let from = start.max(self.floor(slot, run));
        (from < end).then_some(Leaf { slot, run, from, end })
    }

    /// The lane with the least recently used oldest member.
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

    /// Last use of the oldest member of a lane; `None` for an empty lane.
    pub(super) fn used_first(&self, lane: Lane) -> Option<u64> {
        let oldest = self.ends(lane).map(|ends| ends.oldest).filter(|id| *id != NO_MEMBER)?;
        Some(self.members.get(oldest).used)
    }

    /// Removes lanes of departed workers, which must not accumulate.
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
