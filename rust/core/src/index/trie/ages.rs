//! Expiry of blocks: of predictions by age, or by their worker's history, and of held blocks that
//! are not stored again.
//!
//! A prediction begins at a prompt's start, so all preceding blocks are predicted with it, except
//! for those that the engine evicted since. Storing a block renews it and all its ancestors that
//! the worker holds, in all tiers. So parents never expire before their children. Each member is
//! queued once, at or before the end of its last block, by the low half of that end.
//!
//! Ends are times, in one queue for all workers: milliseconds of predictions; of held blocks ticks,
//! 1/128 of a block's lifetime, so that the walk to the root ends at the first run that was already
//! renewed in this tick. A worker with a *history* has its own queue, and its ends are stamps: they
//! count its predictions, and within one prompt a deeper run has a lower stamp. The lowest stamp is
//! dropped first: the oldest prediction, deepest first.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::holder::MemberId;
use super::paged::Slab;
use super::steps::{Step, Steps};

/// Queue entries of removed members that are tolerated before a cleanup.
const NOTES_KEPT: usize = 64;

/// Ends from here on are stamps; below they are times.
pub(super) const STAMPS: u64 = 1 << 63;

/// Bits of a stamp for the depth at which a run begins. Prompts are much shorter; deeper runs are
/// dropped together.
pub(super) const DEPTH_BITS: u32 = 24;

/// Members by the end of their last block, or earlier.
#[derive(Default)]
struct Queue {
    notes: BinaryHeap<Reverse<(u64, MemberId)>>,
    /// Number of members queued here.
    len: usize,
}

impl Queue {
    fn bytes(&self) -> usize {
        self.notes.capacity() * size_of::<(u64, MemberId)>()
    }

    /// Removed members stay queued until their time, so they must be limited.
    fn forget_notes(&mut self, ages: &Slab<Steps>) {
        if self.notes.len() <= 2 * self.len + NOTES_KEPT {
            return;
        }
        let mut notes = std::mem::take(&mut self.notes).into_vec();
        notes.retain(|Reverse((at, id))| is_noted(ages, *id, *at));
        notes.sort_unstable();
        notes.dedup();
        notes.shrink_to_fit();
        self.notes = notes.into();
    }
}

fn is_kept(ages: &Slab<Steps>, id: MemberId) -> bool {
    id < ages.end() && ages.get(id).is_kept()
}

/// Whether an entry is valid: the number may have been reassigned, or predicted again since.
fn is_noted(ages: &Slab<Steps>, id: MemberId, at: u64) -> bool {
    is_kept(ages, id) && ages.get(id).noted == at as u32
}

/// Predictions of one worker, in place of its cache.
pub(super) struct History {
    /// Maximum blocks.
    most: usize,
    /// Number of predictions so far.
    pub count: u64,
    queue: Queue,
}

/// The ages of all predictions, or of all held blocks.
#[derive(Default)]
pub(super) struct Ages {
    by_member: Slab<Steps>,
    timed: Queue,
    /// By the worker's number.
    histories: Vec<Option<Box<History>>>,
    /// Bytes of histories and of all queues.
    queue_bytes: usize,
    /// Bytes of steps beyond each member's last.
    step_bytes: usize,
    /// Number of leading blocks of the current prompt that were already predicted.
    pub depth: usize,
}

impl Ages {
    pub fn bytes(&self) -> usize {
        self.by_member.bytes() + self.table_bytes() + self.queue_bytes + self.step_bytes
    }

    /// Bytes of the table of histories.
    pub fn table_bytes(&self) -> usize {
        self.histories.capacity() * size_of::<usize>()
    }

    /// Upper bound of the bytes for `more` members of a worker.
    pub fn growth(&self, number: u32, more: usize) -> usize {
        let pages = more.div_ceil(256) + 1;
        let queue = self.history(number).map_or(&self.timed, |history| &history.queue);
        let is_full = queue.notes.capacity() - queue.notes.len() < more;
        pages * self.by_member.page_bytes()
            + if is_full { 2 * queue.bytes() + more * 32 } else { 0 }
    }

    pub fn history(&self, number: u32) -> Option<&History> {
        self.histories.get(number as usize)?.as_deref()
    }

    /// Maximum blocks of a worker's history; `None` without one.
    pub fn history_most(&self, number: u32) -> Option<usize> {
        self.history(number).map(|history| history.most)
    }

    /// Gives a worker without predictions a history of this length, or changes its length.
    pub fn set_history(&mut self, number: u32, most: usize) {
        let at = number as usize;
        if self.histories.len() <= at {
            self.histories.resize_with(at + 1, || None);
        }
        match &mut self.histories[at] {
            Some(history) => history.most = most,
            none => {
                *none = Some(Box::new(History { most, count: 0, queue: Queue::default() }));
                self.queue_bytes += size_of::<History>();
            }
        }
    }

    /// Removes a worker, after all of its predictions.
    pub fn forget_history(&mut self, number: u32) {
        let history = self.histories.get_mut(number as usize).and_then(Option::take);
        if let Some(History { queue, .. }) = history.as_deref() {
            self.queue_bytes -= size_of::<History>() + queue.bytes();
        }
    }

    /// Begins the prediction of a prompt at its first block.
    pub fn begin(&mut self, number: u32) {
        self.depth = 0;
        if let Some(Some(history)) = self.histories.get_mut(number as usize) {
            history.count += 1;
        }
    }

    /// Runs `work` on the queue of a worker's members, or on that of times.
    fn noting<R>(
        &mut self,
        number: Option<u32>,
        work: impl FnOnce(&mut Slab<Steps>, &mut Queue) -> R,
    ) -> R {
        let history = number.and_then(|number| self.histories.get_mut(number as usize)?.as_mut());
        let queue = history.map_or(&mut self.timed, |history| &mut history.queue);
        let before = queue.bytes();
        let done = work(&mut self.by_member, queue);
        self.queue_bytes = self.queue_bytes + queue.bytes() - before;
        done
    }

    /// Changes a member's data and updates the byte count.
    fn change(&mut self, id: MemberId, change: impl FnOnce(&mut Steps)) {
        let age = self.by_member.get_or_grow(id);
        let bytes = age.heap_bytes();
        change(age);
        self.step_bytes = self.step_bytes + age.heap_bytes() - bytes;
    }

    /// When the first block of a member's run expires.
    pub fn front(&self, id: MemberId) -> Option<u64> {
        is_kept(&self.by_member, id).then(|| self.by_member.get(id).front())?
    }

    /// Makes the blocks of a worker's member up to `end` valid until `at`.
    pub fn renew(&mut self, number: u32, id: MemberId, end: u16, at: u64) {
        let is_new = !is_kept(&self.by_member, id);
        self.change(id, |age| {
            age.renew(end, at);
            if is_new {
                age.noted = at as u32;
            }
        });
        if is_new {
            self.noting(Some(number), |ages, queue| {
                queue.len += 1;
                queue.notes.push(Reverse((at, id)));
                queue.forget_notes(ages);
            });
        }
    }

    /// Removes the blocks of a worker's member from `end` on; 0 removes the member.
    pub fn cut(&mut self, number: u32, id: MemberId, end: u16) {
        if !is_kept(&self.by_member, id) {
            return;
        }
        self.change(id, |age| age.cut(end));
        self.noting(Some(number), |ages, queue| {
            queue.len -= usize::from(!is_kept(ages, id));
            queue.forget_notes(ages);
        });
    }

    /// No block expires by age before this time.
    pub fn due_ms(&self) -> u64 {
        self.timed.notes.peek().map_or(u64::MAX, |Reverse((at, _))| *at)
    }

    /// A member with blocks that expired by `now`, and its number of remaining blocks.
    pub fn next_over(&mut self, now: u64) -> Option<(MemberId, u16)> {
        self.noting(None, |ages, queue| {
            loop {
                let Reverse((at, id)) = *queue.notes.peek()?;
                if at > now {
                    return None;
                }
                queue.notes.pop();
                if !is_noted(ages, id, at) || ages.get(id).front() >= Some(STAMPS) {
                    continue;
                }
                let age = ages.get_mut(id);
                let left = age.iter().find(|step| step.at > now);
                let Some(step) = left else { return Some((id, 0)) };
                age.noted = step.at as u32;
                let is_over = step.end < age.end();
                queue.notes.push(Reverse((step.at, id)));
                if is_over {
                    return Some((id, step.end));
                }
            }
        })
    }

    /// The member with the lowest stamp in a worker's history, and the number of its blocks with
    /// higher ones. `is_own` selects the worker's members.
    pub fn oldest(
        &mut self,
        number: u32,
        is_own: impl Fn(MemberId) -> bool,
    ) -> Option<(MemberId, u16)> {
        self.noting(Some(number), |ages, queue| {
            loop {
                let Reverse((at, id)) = *queue.notes.peek()?;
                if !is_noted(ages, id, at) || !is_own(id) {
                    queue.notes.pop();
                    continue;
                }
                let steps = ages.get(id);
                let (last, later) = (steps.iter().next()?, steps.iter().nth(1));
                if last.at == at {
                    return Some((id, later.map_or(0, |step| step.end)));
                }
                queue.notes.pop();
                queue.notes.push(Reverse((last.at, id)));
                ages.get_mut(id).noted = last.at as u32;
            }
        })
    }

    /// Checks one member against its blocks.
    pub fn audit(&self, number: u32, id: MemberId, end: u16) {
        let age = self.by_member.get(id);
        assert_eq!(age.end(), end, "the last step ends with the blocks");
        let steps: Vec<Step> = age.iter().collect();
        assert!(steps.windows(2).all(|w| w[0].end > w[1].end && w[0].at < w[1].at));
        let history = self.history(number);
        assert!(steps.iter().all(|step| (step.at >= STAMPS) == history.is_some()));
        let is_noted = |note: &Reverse<(u64, MemberId)>| {
            note.0.1 == id && note.0.0 as u32 == age.noted && note.0.0 <= steps[0].at
        };
        let queue = history.map_or(&self.timed, |history| &history.queue);
        assert!(queue.notes.iter().any(is_noted), "every block comes to its end");
    }

    /// Checks all data against the number of members with an age, and of each history.
    pub fn audit_all(&self, timed: usize, of_history: impl Fn(u32) -> (usize, usize)) {
        assert_eq!(self.timed.len, timed);
        assert_eq!(self.step_bytes, self.by_member.all().map(Steps::heap_bytes).sum::<usize>());
        let histories = (0..).zip(&self.histories).filter_map(|(n, h)| Some((n, h.as_deref()?)));
        let mut bytes = self.timed.bytes();
        for (number, History { most, queue, .. }) in histories.clone() {
            let (members, blocks) = of_history(number);
            assert_eq!(queue.len, members);
            assert!(blocks <= *most, "{blocks} of {most}");
            bytes += size_of::<History>() + queue.bytes();
        }
        assert_eq!(self.queue_bytes, bytes);
        for queue in histories.map(|(_, history)| &history.queue).chain([&self.timed]) {
            assert!(queue.notes.len() <= 2 * queue.len + NOTES_KEPT + 1);
        }
    }
}
