//! What the writer keeps of each worker, of each of its planes, and of each (plane, run).

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher};

use hashbrown::HashMap;

use super::run::{ColumnId, Loc, NO_COLUMN};
use super::seats::{NONE, Plane};
use super::spans::Spans;
use crate::ids::Worker;
use crate::index::arena::runs::RunId;

pub(super) type MemberId = u32;
pub(super) const NO_MEMBER: MemberId = u32::MAX;

/// What one slot has of one run.
#[derive(Debug)]
pub(super) struct Member {
    pub run: RunId,
    pub slot: u16,
    pub column: ColumnId,
    pub spans: Spans,
    /// Whether the cover says so.
    pub is_whole: bool,
    /// Members of the same slot on runs that hang on this one: these go first.
    pub kids: u32,
    /// Neighbours in the slot's order of use.
    pub older: MemberId,
    pub newer: MemberId,
    /// When it was used last, in the index's own count.
    pub used: u32,
}

impl Default for Member {
    fn default() -> Self {
        Self {
            run: 0,
            slot: NONE,
            column: NO_COLUMN,
            spans: Spans::default(),
            is_whole: false,
            kids: 0,
            older: NO_MEMBER,
            newer: NO_MEMBER,
            used: 0,
        }
    }
}

/// Names beyond the first that a slot has for a block.
#[derive(Debug, Default)]
pub(super) struct Extra {
    by_name: BTreeMap<u64, Loc>,
    by_loc: BTreeMap<(Loc, u64), ()>,
}

impl Extra {
    pub fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    pub fn len(&self) -> usize {
        self.by_name.len()
    }

    pub fn find(&self, name: u64) -> Option<Loc> {
        self.by_name.get(&name).copied()
    }

    pub fn iter(&self) -> impl Iterator<Item = (u64, Loc)> + '_ {
        self.by_name.iter().map(|(name, loc)| (*name, *loc))
    }

    /// A further name of the block.
    pub fn at(&self, loc: Loc) -> Option<u64> {
        self.all_at(loc).next()
    }

    pub fn all_at(&self, loc: Loc) -> impl Iterator<Item = u64> + '_ {
        self.by_loc.range((loc, 0)..=(loc, u64::MAX)).map(|((_, name), ())| *name)
    }

    pub fn add(&mut self, name: u64, loc: Loc) {
        self.by_name.insert(name, loc);
        self.by_loc.insert((loc, name), ());
    }

    pub fn remove(&mut self, name: u64) {
        if let Some(loc) = self.by_name.remove(&name) {
            self.by_loc.remove(&(loc, name));
        }
    }

    /// An estimate: B-tree nodes are about two thirds full.
    pub fn bytes(&self) -> usize {
        self.by_name.len() * (16 + 24) * 3 / 2
    }
}

/// One plane of a worker.
#[derive(Debug)]
pub(super) struct Slot {
    /// Index of the worker.
    pub worker: u32,
    pub plane: Plane,
    pub members: HashMap<RunId, MemberId, Mix>,
    /// Name of each member's last block.
    pub tails: HashMap<u64, MemberId, Mix>,
    /// Names stored more than once, with how often.
    pub copies: HashMap<u64, u32, Mix>,
    pub extra: Extra,
    /// Runs that members' runs hang on without a member of their own, with how many do.
    pub waiting: HashMap<RunId, u32, Mix>,
    /// Names held (predictions: blocks).
    pub held: usize,
    /// Ends of the order of use.
    pub oldest: MemberId,
    pub newest: MemberId,
}

impl Slot {
    pub fn new(worker: u32, plane: Plane, mix: Mix) -> Self {
        Self {
            worker,
            plane,
            members: HashMap::with_hasher(mix),
            tails: HashMap::with_hasher(mix),
            copies: HashMap::with_hasher(mix),
            extra: Extra::default(),
            waiting: HashMap::with_hasher(mix),
            held: 0,
            oldest: NO_MEMBER,
            newest: NO_MEMBER,
        }
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
    /// By [`Plane::number`]; [`NONE`] where nothing was ever held.
    pub slots: [u16; Plane::COUNT],
    /// Blocks that others hang on, as this worker calls them; hints, some may be wrong.
    pub anchors: HashMap<u64, Loc, Mix>,
    /// Every name, for workers that name blocks in no order.
    pub dense: Option<HashMap<u64, Loc, Mix>>,
    /// Blocks searched for names in vain effort, less those that events have paid for.
    pub search_debt: usize,
}

impl WorkerState {
    pub fn new(worker: Worker, mix: Mix) -> Self {
        Self {
            worker,
            slots: [NONE; Plane::COUNT],
            anchors: HashMap::with_hasher(mix),
            dense: None,
            search_debt: 0,
        }
    }

    /// The slots of facts.
    pub fn fact_slots(&self) -> impl Iterator<Item = u16> + use<> {
        let slots = self.slots;
        slots.into_iter().take(4).filter(|slot| *slot != NONE)
    }

    pub fn bytes(&self) -> usize {
        self.anchors.allocation_size() + self.dense.as_ref().map_or(0, HashMap::allocation_size)
    }
}

/// Hashes keys that are hashes already: one keyed multiplication spreads them over the table.
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
