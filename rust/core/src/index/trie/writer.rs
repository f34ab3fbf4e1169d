//! The writer: one at a time, behind the index's lock. This file has its state, workers and slots;
//! `writer/` has the rest.

mod events;
mod expire;
mod members;
mod place;
mod release;

use std::sync::Arc;

use super::holder::{Member, MemberId, Mix, NO_MEMBER, Slot, WorkerState};
use super::paged::Slab;
use super::room::shrink_map;
use super::seats::{NONE, Plane};
use super::shared::Shared;
use super::state::{Names, Order, Owners, Sizes, Times, Tree};
use crate::ids::{Tier, Worker};
use crate::index::arena::cover::Entries;
use crate::index::arena::edges;
use crate::index::arena::epoch::epochs;
use crate::index::arena::runs::{ROOT, RunId, Runs, RunsWriting};
use crate::index::check::Repetitions;
use crate::index::types::{Block, IndexStats, MAX_WORKERS, Options};

/// Items waiting for readers from which on the writer checks for readers.
const COLLECT_FROM: usize = 64;

/// Leftover names of removed runs dropped per event.
const FORGET_PER_EVENT: usize = 128;

/// Runs whose distinct blocks may stay uncounted.
const UNCOUNTED_MOST: usize = 4_096;

/// Names of a dense worker looked up at once.
const DENSE_CHUNK: usize = 16;

/// Search debt in blocks that each block of a worker's events pays off.
const SEARCH_CREDIT: usize = 128;

/// Marks a location where an event's blocks can't be added.
const NOWHERE: RunId = RunId::MAX;

/// All of the writer's state. Readers see what it publishes in [`Shared`].
pub(super) struct Writer {
    pub(super) shared: Arc<Shared>,
    pub(super) options: Options,
    pub(super) mix: Mix,
    pub(super) tree: Tree,
    pub(super) owners: Owners,
    pub(super) members: Slab<Member>,
    pub(super) names: Names,
    pub(super) times: Times,
    pub(super) order: Order,
    pub(super) sizes: Sizes,
    pub(super) counters: IndexStats,
    /// The member that blocks are being added to: it is kept, even if a moved name empties it.
    busy: MemberId,
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
        let sizes = Sizes { seats: shared.seats.bytes(), ..Sizes::default() };
        Self {
            shared,
            options,
            mix,
            tree: Tree::new(runs, edges, mix),
            owners: Owners::new(mix),
            members: Slab::default(),
            names: Names::new(options.hash_seed, mix),
            times: Times::default(),
            order: Order::default(),
            sizes,
            counters: IndexStats::default(),
            busy: NO_MEMBER,
            scratch: Entries::default(),
            repetitions: Repetitions::default(),
        }
    }

    // ---- workers and slots

    pub(super) fn worker(&self, number: u32) -> &WorkerState {
        self.owners.workers[number as usize].as_ref().expect("a number that is given is a worker's")
    }

    pub(super) fn worker_mut(&mut self, number: u32) -> &mut WorkerState {
        self.owners.workers[number as usize].as_mut().expect("a number that is given is a worker's")
    }

    pub(super) fn slot(&self, slot: u16) -> &Slot {
        self.owners.slots[usize::from(slot)].as_ref().expect("a slot that is given is a plane's")
    }

    pub(super) fn slot_mut(&mut self, slot: u16) -> &mut Slot {
        self.owners.slots[usize::from(slot)].as_mut().expect("a slot that is given is a plane's")
    }

    fn free_slot(&mut self) -> Option<u16> {
        if let Some(slot) = self.owners.free.pop() {
            return Some(slot);
        }
        if self.owners.slots.len() < usize::from(NONE) {
            self.owners.slots.push(None);
            return Some((self.owners.slots.len() - 1) as u16);
        }
        self.owners.retired.collect(epochs(), |slot| self.owners.free.push(slot));
        self.owners.free.pop()
    }

    fn worker_or_new(&mut self, worker: Worker) -> Option<u32> {
        if let Some(number) = self.owners.numbers.get(&worker) {
            return Some(*number);
        }
        if self.owners.numbers.len() >= self.options.limits.max_workers.min(MAX_WORKERS) {
            return None;
        }
        if !self.make_room_for_worker() {
            return None;
        }
        let home = self.free_slot()?;
        let mut state = WorkerState::new(worker);
        state.slots[Plane::Held(Tier::Device).number()] = home;
        let state = Some(Box::new(state));
        let number = match self.owners.workers.iter().position(Option::is_none) {
            Some(at) => {
                self.owners.workers[at] = state;
                at as u32
            }
            None => {
                self.owners.workers.push(state);
                (self.owners.workers.len() - 1) as u32
            }
        };
        self.owners.numbers.insert(worker, number);
        self.open(home, worker, home, number, Plane::Held(Tier::Device));
        Some(number)
    }

    fn open(&mut self, slot: u16, worker: Worker, home: u16, number: u32, plane: Plane) {
        self.owners.slots[usize::from(slot)] = Some(Box::new(Slot::new(number, plane, self.mix)));
        self.shared.seats.give(slot, worker, home, plane);
        self.sizes.seats = self.shared.seats.bytes();
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

    // -- removal

    /// Removes runs without holders and children, and then parents left without either; frees
    /// memory that readers have released.
    pub(super) fn finish(&mut self) {
        while let Some(mut run) = self.tree.idle.pop() {
            loop {
                let meta = self.tree.metas.get(run);
                if run == ROOT || meta.holders > 0 || meta.kids > 0 {
                    break;
                }
                let at = self.shared.runs.peek(&self.tree.runs, run);
                let (parent, offset) = at.place();
                let Some(first) = at.labels().first().copied() else { break };
                let found =
                    self.shared.edges.remove(&mut self.tree.edges, parent, offset, first, run);
                if !found {
                    // Listed twice, and already removed.
                    break;
                }
                debug_assert!(meta.wholes == 0);
                self.set_held(run, 0);
                self.forget_names(run);
                if self.tree.seeds.remove(&run).is_some() {
                    shrink_map(&mut self.tree.seeds);
                }
                self.shared.runs.remove(&mut self.tree.runs, run);
                self.tree.metas.get_mut(parent).kids -= 1;
                run = parent;
            }
        }
        self.forget_left(FORGET_PER_EVENT);
        if Runs::waiting(&self.tree.runs) >= COLLECT_FROM {
            self.collect();
        }
    }

    /// Bytes of lists that are kept between events.
    pub(super) fn list_bytes(&self) -> usize {
        self.owners.free.capacity() * size_of::<u16>()
            + self.owners.retired.bytes()
            + self.tree.idle.capacity() * size_of::<RunId>()
            + self.names.anchors.allocation_size()
            + self.names.left.capacity() * size_of::<Vec<u64>>()
            + self.names.left_bytes
            + self.names.doubtful.capacity() * size_of::<(u64, usize)>()
            + self.tree.uncounted.capacity() * size_of::<RunId>()
            + self.repetitions.bytes()
            + self.scratch.bytes()
    }

    pub(super) fn collect(&mut self) {
        self.shared.runs.collect(&mut self.tree.runs, epochs());
        self.shared.edges.collect(&mut self.tree.edges);
    }
}
