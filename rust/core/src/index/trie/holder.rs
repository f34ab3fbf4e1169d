//! The writer's records of each worker, of each of its planes, and of each (plane, run).

use std::hash::{BuildHasher, Hasher};

use hashbrown::HashMap;

use super::room::{map_growth, shrink_map};
use super::run::{ColumnId, Loc, NO_COLUMN};
use super::seats::{NONE, Plane};
use super::spans::Spans;
use crate::ids::Worker;
use crate::index::arena::cover::WHOLE;
use crate::index::arena::runs::RunId;

pub(super) type MemberId = u32;
pub(super) const NO_MEMBER: MemberId = u32::MAX;

/// One slot's part of one run.
#[derive(Debug)]
pub(super) struct Member {
    pub run: RunId,
    pub slot: u16,
    pub column: ColumnId,
    pub spans: Spans,
    /// Its length in the published cover; 0 means none.
    pub cut: u16,
    /// Whether it is listed as having blocks that the cover does not show.
    pub is_scattered: bool,
    /// Members of the same slot on children of this run; they are evicted first.
    pub kids: u32,
    /// Offset of the deepest of those children, or deeper; 0 without children.
    pub floor: u16,
    /// Neighbors in the order of use; unlinked while `is_parked`.
    pub older: MemberId,
    pub newer: MemberId,
    pub is_parked: bool,
    /// Time of its last use, in the index's own count.
    pub used: u64,
}

impl Member {
    /// Whether the cover shows its run as whole.
    pub fn is_whole(&self) -> bool {
        self.cut == WHOLE
    }
}

impl Default for Member {
    fn default() -> Self {
        Self {
            run: 0,
            slot: NONE,
            column: NO_COLUMN,
            spans: Spans::default(),
            cut: 0,
            is_scattered: false,
            kids: 0,
            floor: 0,
            older: NO_MEMBER,
            newer: NO_MEMBER,
            is_parked: false,
            used: 0,
        }
    }
}

/// A worker's number combined with a flag for its predictions.
pub(super) type Lane = u32;

/// The list of a lane.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ends {
    pub oldest: MemberId,
    pub newest: MemberId,
    /// Whether the lane is among those to evict from when memory is short.
    pub is_queued: bool,
}

impl Default for Ends {
    fn default() -> Self {
        Self { oldest: NO_MEMBER, newest: NO_MEMBER, is_queued: false }
    }
}

/// Additional names of a slot's blocks; those of one block form a list.
#[derive(Debug)]
pub(super) struct Extra {
    by_name: HashMap<u64, Further, Mix>,
    first: HashMap<Loc, u64, Mix>,
}

#[derive(Debug, Clone, Copy)]
struct Further {
    loc: Loc,
    before: Option<u64>,
    next: Option<u64>,
}

impl Extra {
    pub fn new(mix: Mix) -> Self {
        Self { by_name: HashMap::with_hasher(mix), first: HashMap::with_hasher(mix) }
    }

    pub fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    pub fn len(&self) -> usize {
        self.by_name.len()
    }

    pub fn find(&self, name: u64) -> Option<Loc> {
        self.by_name.get(&name).map(|further| further.loc)
    }

    pub fn iter(&self) -> impl Iterator<Item = (u64, Loc)> + '_ {
        self.by_name.iter().map(|(name, further)| (*name, further.loc))
    }

    /// An additional name of the block.
    pub fn at(&self, loc: Loc) -> Option<u64> {
        self.first.get(&loc).copied()
    }

    pub fn all_at(&self, loc: Loc) -> impl Iterator<Item = u64> + '_ {
        std::iter::successors(self.at(loc), |name| self.by_name.get(name)?.next)
    }

    /// Adds a new name.
    pub fn add(&mut self, name: u64, loc: Loc) {
        let next = self.first.insert(loc, name);
        if let Some(next) = next.and_then(|next| self.by_name.get_mut(&next)) {
            next.before = Some(name);
        }
        let old = self.by_name.insert(name, Further { loc, before: None, next });
        debug_assert!(old.is_none());
    }

    pub fn remove(&mut self, name: u64) {
        let Some(Further { loc, before, next }) = self.by_name.remove(&name) else { return };
        if let Some(next) = next.and_then(|next| self.by_name.get_mut(&next)) {
            next.before = before;
        }
        match (before, next) {
            (Some(before), _) => {
                if let Some(before) = self.by_name.get_mut(&before) {
                    before.next = next;
                }
            }
            (None, Some(next)) => _ = self.first.insert(loc, next),
            (None, None) => _ = self.first.remove(&loc),
        }
    }

    pub fn tidy(&mut self) {
        shrink_map(&mut self.by_name);
        shrink_map(&mut self.first);
    }

    pub fn bytes(&self) -> usize {
        self.by_name.allocation_size() + self.first.allocation_size()
    }

    /// Upper bound of the bytes for `more` names.
    pub fn growth(&self, more: usize) -> usize {
        map_growth(&self.by_name, more) + map_growth(&self.first, more)
    }
}

/// One plane of a worker.
#[derive(Debug)]
pub(super) struct Slot {
    /// Index of the worker.
    pub worker: u32,
    pub plane: Plane,
    pub members: HashMap<RunId, MemberId, Mix>,
    /// Members by the name of their last block.
    pub tails: HashMap<u64, MemberId, Mix>,
    /// Names stored more than once, with their count.
    pub copies: HashMap<u64, u32, Mix>,
    pub extra: Extra,
    /// Parent runs without a member of their own, with the number of member runs below.
    pub waiting: HashMap<RunId, u32, Mix>,
    /// Names held (predictions: blocks).
    pub held: usize,
}

impl Slot {
    pub fn new(worker: u32, plane: Plane, mix: Mix) -> Self {
        Self {
            worker,
            plane,
            members: HashMap::with_hasher(mix),
            tails: HashMap::with_hasher(mix),
            copies: HashMap::with_hasher(mix),
            extra: Extra::new(mix),
            waiting: HashMap::with_hasher(mix),
            held: 0,
        }
    }

    /// Releases memory that few entries no longer need.
    pub fn tidy(&mut self) {
        shrink_map(&mut self.members);
        shrink_map(&mut self.tails);
        shrink_map(&mut self.copies);
        shrink_map(&mut self.waiting);
        self.extra.tidy();
    }

    pub fn bytes(&self) -> usize {
        self.members.allocation_size()
            + self.tails.allocation_size()
            + self.copies.allocation_size()
            + self.waiting.allocation_size()
            + self.extra.bytes()
    }
}

/// One worker.
#[derive(Debug)]
pub(super) struct WorkerState {
    pub worker: Worker,
    /// By [`Plane::number`]; [`NONE`] if it never held anything.
    pub slots: [u16; Plane::COUNT],
    /// All names, for workers that name blocks in no particular order.
    pub dense: Option<HashMap<u64, Loc, Mix>>,
    /// Whether it should get that table once there is room.
    pub wants_dense: bool,
    /// Its two lanes: held blocks and predictions.
    pub order: [Ends; 2],
    /// Its bytes at the last count.
    pub counted: usize,
    /// Blocks searched without success, minus those that events have paid for.
    pub search_debt: usize,
}

impl WorkerState {
    pub fn new(worker: Worker) -> Self {
        Self {
            worker,
            slots: [NONE; Plane::COUNT],
            dense: None,
            wants_dense: false,
            order: Default::default(),
            counted: 0,
            search_debt: 0,
        }
    }

    /// The slots of held blocks.
    pub fn fact_slots(&self) -> impl Iterator<Item = u16> + use<> {
        let slots = self.slots;
        slots.into_iter().take(4).filter(|slot| *slot != NONE)
    }

    /// Releases memory that few entries no longer need.
    pub fn tidy(&mut self) {
        if let Some(dense) = &mut self.dense {
            shrink_map(dense);
        }
    }

    pub fn bytes(&self) -> usize {
        self.dense.as_ref().map_or(0, HashMap::allocation_size)
    }
}

/// Hashes keys that are already hashes: one keyed multiplication spreads them over the table.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mix(u64);

impl Mix {
    pub fn new(seed: u64) -> Self {
        // The odd constant keeps seed 0 from mapping key 0 to 0.
        Self(seed ^ 0x9e37_79b9_7f4a_7c15)
    }
}

impl BuildHasher for Mix {
    type Hasher = Mix;
    fn build_hasher(&self) -> Mix {
        *self
    }
}

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(u64::from(byte)));
    }
    fn write_u32(&mut self, value: u32) {
        self.write_u64(u64::from(value));
    }
    fn write_u64(&mut self, value: u64) {
        let wide = u128::from(self.0 ^ value) * 0xd6e8_feb8_6659_fd93;
        self.0 = (wide as u64) ^ (wide >> 64) as u64;
    }
}
