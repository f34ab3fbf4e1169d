//! Predictions that run out.
//!
//! A prediction begins at a prompt's start, so all blocks in front are predicted with it, but for those that
//! the engine evicted since. Each member is noted in the queue once, at or before the time its last block runs out, by the low half of that time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::Ordering;

use super::holder::MemberId;
use super::paged::Slab;
use super::steps::{Step, Steps};
use super::writer::Writer;

/// Notes of members that went which are kept before anyone looks for them.
const NOTES_KEPT: usize = 64;

type Age = Steps<u64, u32>;

/// All predictions' ages.
pub(super) struct Ages {
    by_member: Slab<Age>,
    /// Members of which anything is kept.
    len: usize,
    queue: BinaryHeap<Reverse<(u64, MemberId)>>,
    /// Bytes of steps beyond each member's last.
    step_bytes: usize,
}

impl Ages {
    pub fn new() -> Self {
        Self { by_member: Slab::new(), len: 0, queue: BinaryHeap::new(), step_bytes: 0 }
    }

    pub fn bytes(&self) -> usize {
        self.by_member.bytes()
            + self.queue.capacity() * size_of::<(u64, MemberId)>()
            + self.step_bytes
    }

    /// Bytes that `more` members may cost at once.
    pub fn growth(&self, more: usize) -> usize {
        let pages = more.div_ceil(256) + 1;
        let queue = self.queue.capacity() * size_of::<(u64, MemberId)>();
        let is_full = self.queue.capacity() - self.queue.len() < more;
        pages * self.by_member.page_bytes() + if is_full { 2 * queue + more * 32 } else { 0 }
    }

    /// Changes what is kept of a member, keeping count.
    fn change(&mut self, id: MemberId, change: impl FnOnce(&mut Age)) {
        let age = self.by_member.get_or_grow(id);
        let (bytes, was_kept) = (age.heap_bytes(), age.is_kept());
        change(age);
        self.step_bytes = self.step_bytes + age.heap_bytes() - bytes;
        self.len = self.len + usize::from(age.is_kept()) - usize::from(was_kept);
    }

    fn is_kept(&self, id: MemberId) -> bool {
        id < self.by_member.end() && self.by_member.get(id).is_kept()
    }

    /// Predicts a member's blocks up to `end`, until `at_ms`.
    fn renew(&mut self, id: MemberId, end: u16, at_ms: u64) {
        let is_new = !self.is_kept(id);
        self.change(id, |age| {
            age.renew(end, at_ms);
            if is_new {
                age.noted = at_ms as u32;
            }
        });
        if is_new {
            self.queue.push(Reverse((at_ms, id)));
            self.forget_notes();
        }
    }

    /// The member has no blocks from `end` on any more.
    pub fn cut(&mut self, id: MemberId, end: u16) {
        if self.is_kept(id) {
            self.change(id, |age| age.cut(end));
            self.forget_notes();
        }
    }

    /// The member goes.
    pub fn forget(&mut self, id: MemberId) {
        self.cut(id, 0);
    }

    /// Members that went stay noted until their time: they must not pile up.
    fn forget_notes(&mut self) {
        if self.queue.len() <= 2 * self.len + NOTES_KEPT {
            return;
        }
        let mut notes = std::mem::take(&mut self.queue).into_vec();
        notes.retain(|Reverse((at_ms, id))| {
            self.is_kept(*id) && self.by_member.get(*id).noted == *at_ms as u32
        });
        notes.sort_unstable();
        notes.dedup();
        notes.shrink_to_fit();
        self.queue = notes.into();
    }

    /// Before it no block runs out.
    fn due_ms(&self) -> u64 {
        self.queue.peek().map_or(u64::MAX, |Reverse((at_ms, _))| *at_ms)
    }

    /// A member some of whose blocks ran out by `now_ms`, with how many are left.
    fn next_over(&mut self, now_ms: u64) -> Option<(MemberId, u16)> {
        loop {
            let Reverse((at_ms, id)) = *self.queue.peek()?;
            if at_ms > now_ms {
                return None;
            }
            self.queue.pop();
            // A note may be of the number's last owner, or older than the last prediction.
            if !self.is_kept(id) || self.by_member.get(id).noted != at_ms as u32 {
                continue;
            }
            let age = self.by_member.get_mut(id);
            let left = age.iter().find(|step| step.at > now_ms);
            let Some(step) = left else { return Some((id, 0)) };
            age.noted = step.at as u32;
            let is_over = step.end < age.end();
            self.queue.push(Reverse((step.at, id)));
            if is_over {
                return Some((id, step.end));
            }
        }
    }

    /// Checks one member against its blocks.
    pub fn audit(&self, id: MemberId, end: u16) {
        let age = self.by_member.get(id);
        assert_eq!(age.end(), end, "the last step ends with the blocks");
        let steps: Vec<Step<u64>> = age.iter().collect();
        assert!(steps.windows(2).all(|w| w[0].end > w[1].end && w[0].at < w[1].at));
        let is_noted = |note: &Reverse<(u64, MemberId)>| {
            note.0.1 == id && note.0.0 as u32 == age.noted && note.0.0 <= steps[0].at
        };
        assert!(self.queue.iter().any(is_noted), "every prediction comes to its end");
    }

    /// Checks the whole against the number of predicted members.
    pub fn audit_all(&self, members: usize) {
        assert_eq!(self.len, members);
        assert_eq!(self.step_bytes, self.by_member.all().map(Steps::heap_bytes).sum::<usize>());
        assert!(self.queue.len() <= 2 * self.len + NOTES_KEPT + 1);
    }
}

impl Writer {
    /// Predictions of a member's blocks up to `end` count from now.
    pub(super) fn refresh(&mut self, id: MemberId, end: u16) {
        let ttl = self.options.limits.predicted_ttl_ms;
        if ttl > 0 {
            self.ages.renew(id, end, self.now_ms.saturating_add(ttl));
            self.note_due();
        }
    }

    fn note_due(&self) {
        let (noted, due_ms) = (&self.shared.predictions_due_ms, self.ages.due_ms());
        // Relaxed: see where it is read. Readers share its cache line, so it is written on a change only.
        if noted.load(Ordering::Relaxed) != due_ms {
            noted.store(due_ms, Ordering::Relaxed);
        }
    }

    /// Lets go of facts and predictions that are too old at `now_ms`, until `most` or more went. Returns how
    /// many.
    pub fn advance_to(&mut self, now_ms: u64, most: usize) -> usize {
        self.now_ms = self.now_ms.max(now_ms);
        let mut expired = self.expire(most);
        while expired < most
            && let Some((id, until)) = self.ages.next_over(self.now_ms)
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
}
