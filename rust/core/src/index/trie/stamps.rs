//! Expiry of held blocks that are not stored again.
//!
//! Storing a block renews it and all its ancestors that the worker holds, in all tiers, so parents
//! never expire before their children. Time is counted in ticks, 1/128 of a block's lifetime: an
//! age takes two bytes, and the walk to the root ends at the first run that was already renewed in
//! this tick.
//!
//! Each member is recorded once in a ring of lists, at or before the tick in which its last block
//! expires.

use super::holder::MemberId;
use super::paged::Slab;
use super::steps::Steps;

/// Lists of the ring: more than the ticks of a block's lifetime, and a divisor of 2^16.
const RING: usize = 256;

/// Entries of removed members that are tolerated before a cleanup.
const NOTES_KEPT: usize = 64;

/// Expiry times of all held blocks. Ticks are stored as their low 16 bits, which is unambiguous
/// near the current time.
pub(super) struct Stamps {
    by_member: Slab<Steps<u16, u16>>,
    /// Members with data.
    len: usize,
    /// By the low bits of the tick: members recorded under it.
    ring: Vec<Vec<MemberId>>,
    /// Members with a tick that has come, still to be examined.
    due: Vec<MemberId>,
    /// Entries in the ring and in `due`.
    notes: usize,
    /// Bytes of the ring's lists.
    list_bytes: usize,
    /// Bytes of steps beyond each member's last.
    step_bytes: usize,
    tick: u64,
}

/// Whether blocks that are valid until `at` still are in `tick`.
fn is_left(at: u16, tick: u64) -> bool {
    (at.wrapping_sub(tick as u16) as i16) > 0
}

impl Stamps {
    pub fn new() -> Self {
        Self {
            by_member: Slab::new(),
            len: 0,
            ring: Vec::new(),
            due: Vec::new(),
            notes: 0,
            list_bytes: 0,
            step_bytes: 0,
            tick: 0,
        }
    }

    pub fn bytes(&self) -> usize {
        self.by_member.bytes()
            + self.ring.capacity() * size_of::<Vec<MemberId>>()
            + self.due.capacity() * size_of::<MemberId>()
            + self.list_bytes
            + self.step_bytes
    }

    /// Upper bound of the bytes for `more` members that expire at `at`.
    pub fn growth(&self, more: usize, at: u64) -> usize {
        let pages = more.div_ceil(256) + 1;
        let list = self.ring.get(at as usize % RING).map_or((0, 0), |l| (l.len(), l.capacity()));
        let is_full = list.1 - list.0 < more;
        let list = if is_full { 2 * list.1.max(more) * size_of::<MemberId>() } else { 0 };
        let ring = if self.ring.is_empty() { RING * size_of::<Vec<MemberId>>() } else { 0 };
        pages * self.by_member.page_bytes() + list + ring
    }

    /// Changes a member's data and updates the counts.
    fn change(&mut self, id: MemberId, change: impl FnOnce(&mut Steps<u16, u16>)) {
        let steps = self.by_member.get_or_grow(id);
        let (bytes, was_kept) = (steps.heap_bytes(), steps.is_kept());
        change(steps);
        self.step_bytes = self.step_bytes + steps.heap_bytes() - bytes;
        self.len = self.len + usize::from(steps.is_kept()) - usize::from(was_kept);
    }

    fn is_kept(&self, id: MemberId) -> bool {
        id < self.by_member.end() && self.by_member.get(id).is_kept()
    }

    /// When the first block of a member's run expires.
    pub fn front(&self, id: MemberId) -> Option<u16> {
        if self.is_kept(id) { self.by_member.get(id).front() } else { None }
    }

    /// Makes a member's blocks up to `end` valid until `at`.
    pub fn renew(&mut self, id: MemberId, end: u16, at: u64) {
        let is_new = !self.is_kept(id);
        self.change(id, |steps| {
            steps.renew(end, at as u16);
            if is_new {
                steps.noted = at as u16;
            }
        });
        if is_new {
            self.note(id, at as u16);
            self.forget_notes();
        }
    }

    fn note(&mut self, id: MemberId, at: u16) {
        if self.ring.is_empty() {
            self.ring.resize_with(RING, Vec::new);
        }
        let list = &mut self.ring[usize::from(at) % RING];
        let room = list.capacity();
        list.push(id);
        self.list_bytes += (list.capacity() - room) * size_of::<MemberId>();
        self.notes += 1;
    }

    /// Removes the member's blocks from `end` on.
    pub fn cut(&mut self, id: MemberId, end: u16) {
        if self.is_kept(id) {
            self.change(id, |steps| steps.cut(end));
            self.forget_notes();
        }
    }

    /// Removes the member.
    pub fn forget(&mut self, id: MemberId) {
        self.cut(id, 0);
    }

    /// Removed members stay recorded until their time, so they must be limited.
    fn forget_notes(&mut self) {
        if self.notes <= 2 * self.len + NOTES_KEPT {
            return;
        }
        let mut ring = std::mem::take(&mut self.ring);
        let mut due = std::mem::take(&mut self.due);
        let retain = |list: &mut Vec<MemberId>, is_in: &dyn Fn(u16) -> bool| {
            list.retain(|id| self.is_kept(*id) && is_in(self.by_member.get(*id).noted));
            list.sort_unstable();
            list.dedup();
            list.shrink_to_fit();
            (list.len(), list.capacity() * size_of::<MemberId>())
        };
        let (mut notes, mut bytes) = (0, 0);
        for (at, list) in ring.iter_mut().enumerate() {
            let (len, room) = retain(list, &|noted| usize::from(noted) % RING == at);
            (notes, bytes) = (notes + len, bytes + room);
        }
        notes += retain(&mut due, &|noted| !is_left(noted, self.tick)).0;
        (self.ring, self.due, self.notes, self.list_bytes) = (ring, due, notes, bytes);
    }

    /// Advances to `tick`: members recorded up to it become due.
    pub fn go_on(&mut self, tick: u64) {
        if tick <= self.tick {
            return;
        }
        let ticks = tick - self.tick;
        for at in (1..=ticks.min(RING as u64)).map(|step| self.tick + step) {
            let Some(list) = self.ring.get_mut(at as usize % RING) else { break };
            let list = std::mem::take(list);
            self.list_bytes -= list.capacity() * size_of::<MemberId>();
            if self.due.is_empty() {
                self.due = list;
            } else {
                self.due.extend(list);
            }
        }
        self.tick = tick;
        if ticks > RING as u64 {
            // Everything expired so long ago that 16 bits are ambiguous.
            for at in 0..self.due.len() {
                let id = self.due[at];
                if self.is_kept(id) {
                    self.change(id, |steps| {
                        steps.level(tick as u16);
                        steps.noted = tick as u16;
                    });
                }
            }
        }
    }

    /// A member with expired blocks, and its number of remaining ones.
    pub fn next_over(&mut self) -> Option<(MemberId, u16)> {
        loop {
            let Some(id) = self.due.pop() else {
                self.due = Vec::new();
                return None;
            };
            self.notes -= 1;
            // An entry may belong to the number's last owner, which left another one.
            if !self.is_kept(id) || is_left(self.by_member.get(id).noted, self.tick) {
                continue;
            }
            let steps = self.by_member.get_mut(id);
            let (end, tick) = (steps.end(), self.tick);
            let left = steps.iter().find(|step| is_left(step.at, tick));
            let Some(step) = left else { return Some((id, 0)) };
            steps.noted = step.at;
            self.note(id, step.at);
            if step.end < end {
                return Some((id, step.end));
            }
        }
    }

    /// Checks one member against its blocks.
    pub fn audit(&self, id: MemberId, end: u16) {
        let steps = self.by_member.get(id);
        assert_eq!(steps.end(), end, "the last step ends with the blocks");
        let all: Vec<_> = steps.iter().collect();
        let later = |a: u16, b: u16| (b.wrapping_sub(a) as i16) > 0;
        assert!(all.windows(2).all(|w| w[0].end > w[1].end && later(w[0].at, w[1].at)));
        assert!(!later(all[0].at, steps.noted), "noted no later than it runs out");
        let list = &self.ring[usize::from(steps.noted) % RING];
        assert!(list.contains(&id) || self.due.contains(&id), "every block comes to its end");
    }

    /// Checks all data against the number of members with held blocks.
    pub fn audit_all(&self, members: usize) {
        assert_eq!(self.len, members);
        assert_eq!(self.step_bytes, self.by_member.all().map(Steps::heap_bytes).sum::<usize>());
        let lists = self.ring.iter().map(|list| (list.len(), list.capacity()));
        let (notes, room) = lists.fold((0, 0), |all, one| (all.0 + one.0, all.1 + one.1));
        assert_eq!(self.list_bytes, room * size_of::<MemberId>());
        assert_eq!(self.notes, notes + self.due.len());
        assert!(self.notes <= 2 * self.len + NOTES_KEPT + 1);
    }
}
