//! The writer's state, by concern.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use hashbrown::{HashMap, HashSet};

use super::ages::Ages;
use super::filter::NameFilter;
use super::holder::{Lane, Mix, Slot, WorkerState};
use super::paged::Slab;
use super::run::{Loc, RunMeta};
use crate::ids::Worker;
use crate::index::arena::edges;
use crate::index::arena::epoch::Retired;
use crate::index::arena::runs::{RunId, RunsWriting};

/// Runs and their parents.
pub(super) struct Tree {
    pub runs: RunsWriting,
    pub edges: edges::Writing,
    pub metas: Slab<RunMeta>,
    /// Seeds of runs with an identity.
    pub seeds: HashMap<RunId, u64, Mix>,
    /// Runs with device blocks that the cover does not show, and the slots that hold blocks after
    /// holes.
    pub scattered: HashMap<RunId, Vec<u16>, Mix>,
    /// Runs that may have lost their last holder.
    pub idle: Vec<RunId>,
    /// Runs with distinct blocks that are not counted yet.
    pub uncounted: Vec<RunId>,
}

impl Tree {
    pub fn new(runs: RunsWriting, edges: edges::Writing, mix: Mix) -> Self {
        Self {
            runs,
            edges,
            metas: Slab::default(),
            seeds: HashMap::with_hasher(mix),
            scattered: HashMap::with_hasher(mix),
            idle: Vec::new(),
            uncounted: Vec::new(),
        }
    }
}

/// Workers, and a slot for each plane of each.
pub(super) struct Owners {
    pub slots: Vec<Option<Box<Slot>>>,
    pub free: Vec<u16>,
    pub retired: Retired<u16>,
    pub workers: Vec<Option<Box<WorkerState>>>,
    pub numbers: HashMap<Worker, u32, Mix>,
}

impl Owners {
    pub fn new(mix: Mix) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            retired: Retired::new(),
            workers: Vec::new(),
            numbers: HashMap::with_hasher(mix),
        }
    }
}

/// Engines' names, as far as all workers share them.
pub(super) struct Names {
    pub filter: NameFilter,
    /// Names that may be at two locations of the tree, for two workers or by a false positive of
    /// the filter. Only when a worker stores one of these is it searched.
    pub suspects: HashSet<u64, Mix>,
    /// Number of suspects at which outdated ones are removed.
    pub suspects_most: usize,
    /// Parents of other blocks, by one of their names: hints, which may be wrong.
    pub anchors: HashMap<u64, Loc, Mix>,
    /// Names of removed runs, still to be dropped, and the bytes of these lists.
    pub left: VecDeque<Vec<u64>>,
    pub left_bytes: usize,
    pub doubtful: Vec<(u64, usize)>,
}

impl Names {
    pub fn new(hash_seed: u64, mix: Mix) -> Self {
        Self {
            filter: NameFilter::new(hash_seed),
            suspects: HashSet::with_hasher(mix),
            suspects_most: 0,
            anchors: HashMap::with_hasher(mix),
            left: VecDeque::new(),
            left_bytes: 0,
            doubtful: Vec::new(),
        }
    }
}

/// Incrementally updated byte counts.
#[derive(Default)]
pub(super) struct Sizes {
    /// Of columns of names.
    pub columns: usize,
    /// Of stretches beyond each member's first.
    pub spans: usize,
    /// Of the lists of scattered runs.
    pub scattered: usize,
    /// Of the seats.
    pub seats: usize,
    /// Of workers' own records, as counted last.
    pub workers: usize,
}

/// The current time, and the ages of predictions.
#[derive(Default)]
pub(super) struct Times {
    pub now_ms: u64,
    pub ages: Ages,
    /// The ages of held blocks, in ticks.
    pub held: Ages,
}

/// State of all lanes.
#[derive(Default)]
pub(super) struct Order {
    pub clock: u64,
    /// Lanes by the last use of their oldest member, or earlier: corrected when they reach the top.
    pub lanes: BinaryHeap<Reverse<(u64, Lane)>>,
}

impl Order {
    pub fn bytes(&self) -> usize {
        self.lanes.capacity() * size_of::<(u64, Lane)>()
    }
}
