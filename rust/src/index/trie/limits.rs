//! What keeps the index within its limits: the order of use, eviction leaf first, predictions that age.

use super::holder::{Member, MemberId, NO_MEMBER};
use super::seats::Plane;
use super::writer::Writer;

/// Blocks that leave one member at a time when bytes run short.
const BITE: usize = 1_024;

impl Writer {
    fn keeps_order(&self) -> bool {
        let limits = &self.options.limits;
        limits.capacity_blocks > 0 || limits.max_bytes > 0
    }

    /// Puts a new member in its slot's order of use.
    pub(super) fn link(&mut self, id: MemberId) {
        if !self.keeps_order() {
            return;
        }
        self.clock = self.clock.wrapping_add(1);
        let used = self.clock;
        let slot = self.members.get(id).slot;
        let state = self.slot_mut(slot);
        let newest = std::mem::replace(&mut state.newest, id);
        if newest == NO_MEMBER {
            state.oldest = id;
        } else {
            self.members.get_mut(newest).newer = id;
        }
        let member = self.members.get_mut(id);
        (member.older, member.newer, member.used) = (newest, NO_MEMBER, used);
    }

    /// Takes a member out of its slot's order of use.
    pub(super) fn unlink(&mut self, id: MemberId) {
        if !self.keeps_order() {
            return;
        }
        let Member { slot, older, newer, .. } = *self.members.get(id);
        match older {
            NO_MEMBER => self.slot_mut(slot).oldest = newer,
            older => self.members.get_mut(older).newer = newer,
        }
        match newer {
            NO_MEMBER => self.slot_mut(slot).newest = older,
            newer => self.members.get_mut(newer).older = older,
        }
    }

    /// A member was used now.
    pub(super) fn touch(&mut self, id: MemberId) {
        if self.keeps_order() {
            self.unlink(id);
            self.link(id);
        }
    }

    /// Lets go of what is too much, after something was added to `slot`.
    pub(super) fn keep_limits(&mut self, slot: u16) {
        let limits = self.options.limits;
        if limits.capacity_blocks > 0 {
            self.keep_capacity(slot, limits.capacity_blocks);
        }
        if limits.max_bytes > 0 {
            self.keep_bytes(limits.max_bytes);
        }
    }

    fn keep_capacity(&mut self, slot: u16, capacity: usize) {
        let plane = self.slot(slot).plane;
        if plane == Plane::Predicted {
            self.shrink_slot(slot, capacity);
            return;
        }
        // Facts of all tiers count together; the tier that was just added to gives way.
        let worker = self.worker(self.slot(slot).worker);
        let held: usize = worker.fact_slots().map(|slot| self.slot(slot).held).sum();
        let most = self.slot(slot).held.saturating_sub(held.saturating_sub(capacity));
        self.shrink_slot(slot, most);
    }

    fn shrink_slot(&mut self, slot: u16, most: usize) {
        while self.slot(slot).held > most {
            let excess = self.slot(slot).held - most;
            if self.evict(slot, excess) == 0 {
                return;
            }
        }
        self.finish();
    }

    fn keep_bytes(&mut self, max: usize) {
        // Before the limit, so that what is added next has room.
        let most = max - max / 16;
        // Counting costs a look at each worker: not for every event.
        self.until_bytes = self.until_bytes.saturating_sub(1);
        if self.until_bytes > 0 && self.shared_bytes() <= most {
            return;
        }
        self.until_bytes = 256;
        let mut bytes = self.bytes();
        while bytes > most {
            let oldest = self
                .slots
                .iter()
                .flatten()
                .filter(|slot| slot.oldest != NO_MEMBER)
                .map(|slot| self.members.get(slot.oldest))
                .min_by_key(|member| member.used.wrapping_sub(self.clock))
                .map(|member| member.slot);
            let Some(slot) = oldest else { break };
            let mut evicted = 0;
            while evicted < BITE {
                match self.evict(slot, BITE - evicted) {
                    0 => break,
                    blocks => evicted += blocks,
                }
            }
            self.finish();
            self.collect();
            let left = self.bytes();
            if evicted == 0 && left >= bytes {
                // What is left belongs to readers of this moment.
                break;
            }
            bytes = left;
        }
    }

    /// Lets the least recently used blocks of a slot go, up to `most`, from the end of a chain and never
    /// below what hangs on it. Returns how many went; 0 when there is none.
    fn evict(&mut self, slot: u16, most: usize) -> usize {
        // A member that others hang on was used at least as lately as those: it moves behind them.
        let mut turns = self.slot(slot).members.len();
        let id = loop {
            let id = self.slot(slot).oldest;
            if id == NO_MEMBER || turns == 0 {
                return 0;
            }
            if self.members.get(id).kids == 0 {
                break id;
            }
            self.touch(id);
            turns -= 1;
        };
        let member = self.members.get(id);
        let run = member.run;
        let end = member.spans.end();
        let start = member.spans.start_of(end - 1);
        let from = start.max(end - (usize::from(end - start).min(most)) as u16);
        let blocks = usize::from(end - from);
        let before = self.slot(slot).held;
        self.drop_names(slot, run, from, end);
        self.uncover(slot, run, from, end);
        if let Some(fresh) = self.fresh.get_mut(&id) {
            fresh.retain(|(end, _)| *end <= from);
        }
        let gone = before - self.slot(slot).held;
        debug_assert!(gone >= blocks);
        self.counters.evicted_blocks_total += gone as u64;
        gone
    }

    /// Forgets what is known of names of blocks that are about to go, beside their column.
    fn drop_names(&mut self, slot: u16, run: u32, start: u16, end: u16) {
        let state = self.slot(slot);
        let number = state.worker;
        let is_dense = self.worker(number).dense.is_some();
        if state.copies.is_empty() && state.extra.is_empty() && !is_dense {
            return;
        }
        for offset in start..end {
            let loc = super::run::Loc { run, offset: offset.into() };
            let extra: Vec<u64> = self.slot(slot).extra.all_at(loc).collect();
            for name in &extra {
                self.slot_mut(slot).extra.remove(*name);
                self.forget_extra(*name);
            }
            self.account(slot, extra.len(), false);
            let id = self.slot(slot).members[&run];
            let own = self.name_at(self.members.get(id), offset.into());
            for name in own.into_iter().chain(extra) {
                self.slot_mut(slot).copies.remove(&name);
                let elsewhere = self
                    .worker(number)
                    .fact_slots()
                    .any(|other| other != slot && self.is_named(other, loc, name));
                if !elsewhere && let Some(dense) = &mut self.worker_mut(number).dense {
                    dense.remove(&name);
                }
            }
        }
    }

    // ---- age

    /// Predictions of a member's blocks up to `end` count from now.
    pub(super) fn refresh(&mut self, id: MemberId, end: u16) {
        let ttl = self.options.limits.predicted_ttl_ms;
        if ttl == 0 {
            return;
        }
        let expires = self.now_ms.saturating_add(ttl);
        let Member { run, slot, .. } = *self.members.get(id);
        let fresh = self.fresh.entry(id).or_default();
        let is_same = fresh.first().is_some_and(|(_, at)| *at == expires);
        fresh.retain(|(until, _)| *until > end);
        fresh.insert(0, (end, expires));
        if !is_same {
            self.expiries.push_back((expires, slot, run));
        }
    }

    /// Lets go of predictions that are too old at `now_ms`.
    pub fn advance_to(&mut self, now_ms: u64) -> usize {
        self.now_ms = self.now_ms.max(now_ms);
        let mut expired = 0;
        while let Some((at, slot, run)) = self.expiries.front().copied() {
            if at > self.now_ms {
                break;
            }
            self.expiries.pop_front();
            let Some(state) = self.slots[usize::from(slot)].as_ref() else { continue };
            let Some(&id) = state.members.get(&run).filter(|_| state.plane == Plane::Predicted)
            else {
                continue;
            };
            let now_ms = self.now_ms;
            let Some(fresh) = self.fresh.get_mut(&id) else { continue };
            while fresh.last().is_some_and(|(_, at)| *at <= now_ms) {
                fresh.pop();
            }
            let until = fresh.last().map_or(0, |(end, _)| *end);
            let end = self.members.get(id).spans.end();
            if until < end {
                expired += usize::from(end - until);
                self.uncover(slot, run, until, end);
            }
        }
        self.counters.expired_blocks_total += expired as u64;
        self.finish();
        expired
    }
}
