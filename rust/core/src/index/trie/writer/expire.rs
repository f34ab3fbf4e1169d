//! Renewal and expiry of held and predicted blocks.

use std::sync::atomic::Ordering;

use super::Writer;
use crate::index::arena::runs::ROOT;
use crate::index::trie::ages::{DEPTH_BITS, STAMPS};
use crate::index::trie::holder::{Member, MemberId};
use crate::index::trie::run::Loc;
use crate::index::trie::seats::Plane;

impl Writer {
    /// Renews the predictions of a member's blocks, from `loc` up to `end`.
    pub(super) fn refresh(&mut self, id: MemberId, loc: Loc, end: u16) {
        let offset = loc.offset as usize;
        let start = self.times.ages.depth - offset;
        self.times.ages.depth += usize::from(end) - offset;
        let number = self.slot(self.members.get(id).slot).worker;
        let ttl = self.options.limits.predicted_ttl_ms;
        let at = match self.times.ages.history(number) {
            Some(history) => {
                let deepest = (1 << DEPTH_BITS) - 1;
                STAMPS | history.count << DEPTH_BITS | (deepest - start.min(deepest)) as u64
            }
            None if ttl > 0 => self.times.now_ms.saturating_add(ttl).min(STAMPS - 1),
            None => return,
        };
        self.times.ages.renew(number, id, end, at);
        self.note_due();
    }

    /// Drops a worker's oldest predictions, deepest first, that exceed its history.
    ///
    /// # Cost
    /// O(log runs) for each run with dropped blocks, or with renewed ones since.
    pub(super) fn keep_history(&mut self, slot: u16) {
        let number = self.slot(slot).worker;
        let Some(most) = self.times.ages.history_most(number) else { return };
        while let Some(excess) = self.slot(slot).held.checked_sub(most).filter(|more| *more > 0) {
            let (ages, members) = (&mut self.times.ages, &self.members);
            let oldest = ages.oldest(number, |id| members.get(id).slot == slot);
            debug_assert!(oldest.is_some(), "every prediction comes to its end");
            let Some((id, until)) = oldest else { break };
            let (run, end) = (members.get(id).run, members.get(id).spans.end());
            let from = until.max(end - excess.min(end.into()) as u16);
            self.counters.expired_blocks_total += self.unpredict(slot, run, from, end) as u64;
        }
        self.finish();
    }

    fn note_due(&self) {
        let (noted, due_ms) = (&self.shared.predictions_due_ms, self.times.ages.due_ms());
        // Relaxed: see its reader. Readers share this cache line, so it is written only on changes.
        if noted.load(Ordering::Relaxed) != due_ms {
            noted.store(due_ms, Ordering::Relaxed);
        }
    }

    /// Drops held and predicted blocks that have expired by `now_ms`, until at least `most` are
    /// dropped. Returns their number.
    pub fn advance_to(&mut self, now_ms: u64, most: usize) -> usize {
        self.times.now_ms = self.times.now_ms.max(now_ms);
        let mut expired = self.expire(most);
        while expired < most
            && let Some((id, until)) = self.times.ages.next_over(self.times.now_ms)
        {
            let member = self.members.get(id);
            let (slot, run, end) = (member.slot, member.run, member.spans.end());
            expired += self.unpredict(slot, run, until, end);
            self.recount(self.slot(slot).worker);
        }
        self.note_due();
        self.counters.expired_blocks_total += expired as u64;
        self.finish();
        expired
    }

    /// Renews the blocks before `place`, as far as the worker holds them.
    pub(super) fn stamp(&mut self, slot: u16, place: Loc) {
        let limits = &self.options.limits;
        if limits.ttl_ms == 0 {
            return;
        }
        let (number, at) = (self.slot(slot).worker, limits.end_tick(self.times.now_ms));
        let (mut run, mut end) = (place.run, place.offset);
        while run != ROOT {
            let mut is_fresh = false;
            for slot in self.siblings(slot) {
                let Some(&id) = self.slot(slot).members.get(&run) else { continue };
                is_fresh |= self.times.held.front(id) == Some(at);
                let end = (end as u16).min(self.members.get(id).spans.end());
                self.times.held.renew(number, id, end, at);
            }
            if is_fresh {
                // By an event that also renewed all ancestors.
                return;
            }
            (run, end) = self.shared.runs.peek(&self.tree.runs, run).place();
        }
    }

    /// Drops held blocks that have expired, until at least `most` are dropped. Returns their
    /// number.
    pub(super) fn expire(&mut self, most: usize) -> usize {
        if self.options.limits.ttl_ms == 0 {
            return 0;
        }
        let tick = self.options.limits.tick_at(self.times.now_ms);
        let mut gone = 0;
        while gone < most
            && let Some((id, until)) = self.times.held.next_over(tick)
        {
            let &Member { slot, run, .. } = self.members.get(id);
            debug_assert!(self.slot(slot).plane != Plane::Predicted);
            let before = self.slot(slot).held;
            // From the end on; the member is removed with its last block.
            while let Some(id) = self.slot(slot).members.get(&run) {
                let spans = &self.members.get(*id).spans;
                let end = spans.end();
                if end <= until {
                    break;
                }
                let start = spans.start_of(end - 1).max(until);
                self.drop_names(slot, run, start, end);
                self.uncover(slot, run, start, end);
            }
            gone += before - self.slot(slot).held;
            self.recount(self.slot(slot).worker);
        }
        gone
    }
}
