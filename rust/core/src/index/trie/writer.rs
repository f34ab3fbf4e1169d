//! The writer: one at a time, behind the index's lock. Its state, workers and slots; `writer/` has the rest.

mod events;
mod members;
mod place;
mod release;

use std::collections::VecDeque;
use std::sync::Arc;

use hashbrown::{HashMap, HashSet};

use super::Shared;
use super::ages::Ages;
use super::filter::NameFilter;
use super::holder::{Member, MemberId, Mix, NO_MEMBER, Slot, WorkerState};
use super::order::Order;
use super::paged::Slab;
use super::report::shrink_map;
use super::run::{Loc, RunMeta};
use super::seats::{NONE, Plane};
use super::stamps::Stamps;
use crate::ids::{Tier, Worker};
use crate::index::arena::cover::Entries;
use crate::index::arena::edges;
use crate::index::arena::epoch::{Retired, epochs};
use crate::index::arena::runs::{ROOT, RunId, Runs, RunsWriting};
use crate::index::check::Repetitions;
use crate::index::types::{Block, IndexStats, MAX_WORKERS, Options};

/// Things that may wait for readers before the writer asks whether they still must.
const COLLECT_FROM: usize = 64;

/// Names left behind by runs that each event forgets some of.
const FORGET_PER_EVENT: usize = 128;

/// Runs whose distinct blocks may be left uncounted.
const UNCOUNTED_MOST: usize = 4_096;

/// Names of a dense worker that are looked up at once.
const DENSE_CHUNK: usize = 16;

/// A worker's search debt is paid off at this many blocks for each block of its events.
const SEARCH_CREDIT: usize = 128;

/// The run of a place that an event's blocks can't be added at.
const NOWHERE: RunId = RunId::MAX;

/// Everything the writer knows. Readers see what it publishes in [`Shared`].
pub(super) struct Writer {
    pub(super) shared: Arc<Shared>,
    pub(super) options: Options,
    pub(super) mix: Mix,
    pub(super) runs: RunsWriting,
    pub(super) edges: edges::Writing,
    pub(super) metas: Slab<RunMeta>,
    pub(super) members: Slab<Member>,
    pub(super) slots: Vec<Option<Box<Slot>>>,
    free_slots: Vec<u16>,
    retired_slots: Retired<u16>,
    pub(super) workers: Vec<Option<Box<WorkerState>>>,
    pub(super) numbers: HashMap<Worker, u32, Mix>,
    pub(super) filter: NameFilter,
    /// Names that may stand at two places of the tree, for two workers or by mistake of the filter: for
    /// these, and only these, a worker is searched when it stores them.
    pub(super) suspects: HashSet<u64, Mix>,
    /// So many of them are looked through for those that are none any more.
    pub(super) suspects_most: usize,
    /// Of runs whose prompts carry an identity.
    pub(super) seeds: HashMap<RunId, u64, Mix>,
    pub(super) counters: IndexStats,
    /// Runs of which the cover does not tell all that is held on the device, with the slots that have
    /// blocks behind holes.
    pub(super) scattered: HashMap<RunId, Vec<u16>, Mix>,
    pub(super) now_ms: u64,
    pub(super) ages: Ages,
    pub(super) stamps: Stamps,
    pub(super) order: Order,
    /// Bytes of columns of names.
    pub(super) column_bytes: usize,
    /// Blocks that others hang on, by a name of theirs: hints, some may be wrong.
    pub(super) anchors: HashMap<u64, Loc, Mix>,
    /// Names that runs left behind, still to be forgotten, and the bytes of these lists.
    pub(super) left: VecDeque<Vec<u64>>,
    pub(super) left_bytes: usize,
    /// Bytes of stretches beyond each member's first.
    pub(super) span_bytes: usize,
    /// Bytes of the lists in `scattered`.
    pub(super) scattered_bytes: usize,
    /// Bytes of the seats.
    pub(super) seat_bytes: usize,
    /// Bytes of workers' own records, as counted last.
    pub(super) worker_bytes: usize,
    /// Runs that may have lost their last holder.
    idle: Vec<RunId>,
    /// Runs whose distinct blocks are not counted yet.
    pub(super) uncounted: Vec<RunId>,
    /// The member that blocks are just being added to: it stays, even if a name that moves empties it.
    busy: MemberId,
    doubtful: Vec<(u64, usize)>,
    scratch: Entries,
    pub(super) repetitions: Repetitions,
}

/// A chain to place: with names, or only predicted.
#[derive(Clone, Copy)]
pub(super) enum Chain<'a> {
    Named(&'a [Block]),
    Plain(&'a [u64]),
}

impl<'a> Chain<'a> {
    fn len(self) -> usize {
        match self {
            Self::Named(blocks) => blocks.len(),
            Self::Plain(locals) => locals.len(),
        }
    }

    fn label(self, at: usize) -> u64 {
        match self {
            Self::Named(blocks) => blocks[at].local_hash,
            Self::Plain(locals) => locals[at],
        }
    }

    fn part(self, from: usize, to: usize) -> Self {
        match self {
            Self::Named(blocks) => Self::Named(&blocks[from..to]),
            Self::Plain(locals) => Self::Plain(&locals[from..to]),
        }
    }

    fn labels(self) -> impl ExactSizeIterator<Item = u64> + 'a {
        (0..self.len()).map(move |at| self.label(at))
    }

    fn common(self, labels: &[u64]) -> usize {
        match self {
            Self::Plain(locals) => super::walk::common(labels, locals),
            Self::Named(blocks) => {
                labels.iter().zip(blocks).take_while(|(label, b)| **label == b.local_hash).count()
            }
        }
    }
}

impl Writer {
    pub fn new(
        shared: Arc<Shared>,
        runs: RunsWriting,
        edges: edges::Writing,
        options: Options,
    ) -> Self {
        let mix = Mix::new(options.hash_seed);
        let seat_bytes = shared.seats.bytes();
        Self {
            shared,
            options,
            mix,
            runs,
            edges,
            metas: Slab::new(),
            members: Slab::new(),
            slots: Vec::new(),
            free_slots: Vec::new(),
            retired_slots: Retired::new(),
            workers: Vec::new(),
            numbers: HashMap::with_hasher(mix),
            filter: NameFilter::new(options.hash_seed),
            suspects: HashSet::with_hasher(mix),
            suspects_most: 0,
            seeds: HashMap::with_hasher(mix),
            counters: IndexStats::default(),
            scattered: HashMap::with_hasher(mix),
            now_ms: 0,
            ages: Ages::new(),
            stamps: Stamps::new(),
            order: Order::default(),
            column_bytes: 0,
            anchors: HashMap::with_hasher(mix),
            left: VecDeque::new(),
            left_bytes: 0,
            span_bytes: 0,
            scattered_bytes: 0,
            seat_bytes,
            worker_bytes: 0,
            idle: Vec::new(),
            uncounted: Vec::new(),
            busy: NO_MEMBER,
            doubtful: Vec::new(),
            scratch: Entries::default(),
            repetitions: Repetitions::default(),
        }
    }

    /// Behind the highest number of a run that has ever been.
    pub(super) fn runs_end(&self) -> RunId {
        self.metas.end()
    }

    // ---- workers and slots

    pub(super) fn worker(&self, number: u32) -> &WorkerState {
        self.workers[number as usize].as_ref().expect("a number that is given is a worker's")
    }

    pub(super) fn worker_mut(&mut self, number: u32) -> &mut WorkerState {
        self.workers[number as usize].as_mut().expect("a number that is given is a worker's")
    }

    pub(super) fn slot(&self, slot: u16) -> &Slot {
        self.slots[usize::from(slot)].as_ref().expect("a slot that is given is a plane's")
    }

    pub(super) fn slot_mut(&mut self, slot: u16) -> &mut Slot {
        self.slots[usize::from(slot)].as_mut().expect("a slot that is given is a plane's")
    }

    fn free_slot(&mut self) -> Option<u16> {
        if let Some(slot) = self.free_slots.pop() {
            return Some(slot);
        }
        if self.slots.len() < usize::from(NONE) {
            self.slots.push(None);
            return Some((self.slots.len() - 1) as u16);
        }
        self.retired_slots.collect(epochs(), |slot| self.free_slots.push(slot));
        self.free_slots.pop()
    }

    fn worker_or_new(&mut self, worker: Worker) -> Option<u32> {
        if let Some(number) = self.numbers.get(&worker) {
            return Some(*number);
        }
        if self.numbers.len() >= self.options.limits.max_workers.min(MAX_WORKERS) {
            return None;
        }
        if !self.make_room_for_worker() {
            return None;
        }
        let home = self.free_slot()?;
        let mut state = WorkerState::new(worker);
        state.slots[Plane::Held(Tier::Device).number()] = home;
        let state = Some(Box::new(state));
        let number = match self.workers.iter().position(Option::is_none) {
            Some(at) => {
                self.workers[at] = state;
                at as u32
            }
            None => {
                self.workers.push(state);
                (self.workers.len() - 1) as u32
            }
        };
        self.numbers.insert(worker, number);
        self.open(home, worker, home, number, Plane::Held(Tier::Device));
        Some(number)
    }

    fn open(&mut self, slot: u16, worker: Worker, home: u16, number: u32, plane: Plane) {
        self.slots[usize::from(slot)] = Some(Box::new(Slot::new(number, plane, self.mix)));
        self.shared.seats.give(slot, worker, home, plane);
        self.seat_bytes = self.shared.seats.bytes();
    }

    fn slot_or_new(&mut self, number: u32, plane: Plane) -> Option<u16> {
        let slot = self.worker(number).slots[plane.number()];
        if slot != NONE {
            return Some(slot);
        }
        let slot = self.free_slot()?;
        let state = self.worker_mut(number);
        state.slots[plane.number()] = slot;
        let (worker, home) = (state.worker, state.slots[0]);
        self.open(slot, worker, home, number, plane);
        Some(slot)
    }

    // ---- ends

    /// Takes out runs that nobody has and nothing hangs on, and what hung on them alone; frees what
    /// readers have left.
    pub(super) fn finish(&mut self) {
        while let Some(mut run) = self.idle.pop() {
            loop {
                let meta = self.metas.get(run);
                if run == ROOT || meta.holders > 0 || meta.kids > 0 {
                    break;
                }
                let at = self.shared.runs.peek(&self.runs, run);
                let (parent, offset) = at.place();
                let Some(first) = at.labels().first().copied() else { break };
                let found = self.shared.edges.remove(&mut self.edges, parent, offset, first, run);
                if !found {
                    // Listed twice, and gone already.
                    break;
                }
                debug_assert!(meta.wholes == 0);
                self.set_held(run, 0);
                self.forget_names(run);
                if self.seeds.remove(&run).is_some() {
                    shrink_map(&mut self.seeds);
                }
                self.shared.runs.remove(&mut self.runs, run);
                self.metas.get_mut(parent).kids -= 1;
                run = parent;
            }
        }
        self.forget_left(FORGET_PER_EVENT);
        if Runs::waiting(&self.runs) >= COLLECT_FROM {
            self.collect();
        }
    }

    /// Bytes of lists that are kept between events.
    pub(super) fn list_bytes(&self) -> usize {
        self.free_slots.capacity() * size_of::<u16>()
            + self.retired_slots.bytes()
            + self.idle.capacity() * size_of::<RunId>()
            + self.anchors.allocation_size()
            + self.left.capacity() * size_of::<Vec<u64>>()
            + self.left_bytes
            + self.doubtful.capacity() * size_of::<(u64, usize)>()
            + self.uncounted.capacity() * size_of::<RunId>()
            + self.repetitions.bytes()
            + self.scratch.bytes()
    }

    pub(super) fn collect(&mut self) {
        self.shared.runs.collect(&mut self.runs, epochs());
        self.shared.edges.collect(&mut self.edges);
    }
}
