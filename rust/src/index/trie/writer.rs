//! The writer: one at a time, behind the index's lock.

use std::sync::Arc;

use hashbrown::{HashMap, HashSet};

use super::Shared;
use super::ages::Ages;
use super::filter::NameFilter;
use super::holder::{Extra, Member, MemberId, Mix, NO_MEMBER, Slot, WorkerState};
use super::order::Order;
use super::paged::Slab;
use super::report::shrink_map;
use super::run::{Loc, NO_COLUMN, RunMeta};
use super::seats::{NONE, Plane};
use crate::ids::{Tier, Worker};
use crate::index::arena::cover::{Entries, WHOLE};
use crate::index::arena::edges;
use crate::index::arena::epoch::{Retired, epochs, pin};
use crate::index::arena::runs::{ROOT, RunId, Runs, RunsWriting, prefetch};
use crate::index::check::Repetitions;
use crate::index::types::{
    Block, CopyOutcome, CountMode, DEFAULT_SEED, IndexStats, MAX_WORKERS, Options, Rejection,
    RemoveOutcome, StoreOutcome,
};

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
    /// Of runs whose prompts carry an identity.
    pub(super) seeds: HashMap<RunId, u64, Mix>,
    pub(super) counters: IndexStats,
    /// Runs of which the cover does not tell all that is held on the device, with the slots that have
    /// blocks behind holes.
    pub(super) scattered: HashMap<RunId, Vec<u16>, Mix>,
    pub(super) now_ms: u64,
    pub(super) ages: Ages,
    pub(super) order: Order,
    /// Bytes of columns of names.
    pub(super) column_bytes: usize,
    /// Blocks that others hang on, by a name of theirs: hints, some may be wrong.
    pub(super) anchors: HashMap<u64, Loc, Mix>,
    /// Names that runs left behind, still to be forgotten, and the bytes of these lists.
    pub(super) left: Vec<Vec<u64>>,
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
            seeds: HashMap::with_hasher(mix),
            counters: IndexStats::default(),
            scattered: HashMap::with_hasher(mix),
            now_ms: 0,
            ages: Ages::new(),
            order: Order::default(),
            column_bytes: 0,
            anchors: HashMap::with_hasher(mix),
            left: Vec::new(),
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

    // ---- events

    fn reject(&mut self, cause: Rejection) -> StoreOutcome {
        let counter = match cause {
            Rejection::Orphan => &mut self.counters.orphans_total,
            Rejection::SelfReference => &mut self.counters.self_references_total,
            Rejection::SlotsExhausted => &mut self.counters.slots_exhausted_total,
        };
        *counter += 1;
        StoreOutcome::because_of(cause)
    }

    pub fn store(
        &mut self,
        worker: Worker,
        tier: Tier,
        parent: Option<u64>,
        seed: u64,
        blocks: &[Block],
    ) -> StoreOutcome {
        if blocks.is_empty() {
            return StoreOutcome::default();
        }
        if self.repetitions.is_self_referencing(parent, blocks) {
            return self.reject(Rejection::SelfReference);
        }
        let mut place = match parent {
            None => Loc { run: ROOT, offset: 0 },
            Some(name) => {
                let number = self.numbers.get(&worker).copied();
                match number.and_then(|number| self.locate(number, name)) {
                    Some(Loc { run, offset }) => Loc { run, offset: offset + 1 },
                    None => return self.reject(Rejection::Orphan),
                }
            }
        };
        let Some(number) = self.worker_or_new(worker) else {
            return self.reject(Rejection::SlotsExhausted);
        };
        let Some(slot) = self.slot_or_new(number, Plane::Held(tier)) else {
            return self.reject(Rejection::SlotsExhausted);
        };
        let state = self.worker_mut(number);
        state.search_debt = state.search_debt.saturating_sub(blocks.len() * SEARCH_CREDIT);
        // What an event follows must not be what makes room for it.
        self.touch_before(slot, place);
        let mut outcome = StoreOutcome::default();
        for piece in blocks.chunks(self.piece()) {
            place = self.place_piece(slot, place, seed, Chain::Named(piece), &mut outcome);
        }
        self.counters.duplicate_blocks_total += u64::from(outcome.duplicates);
        self.counters.moved_blocks_total += u64::from(outcome.moved);
        self.counters.refused_blocks_total += u64::from(outcome.refused);
        self.finish();
        self.keep_capacity(slot);
        self.settle(number);
        outcome
    }

    pub fn predict(&mut self, worker: Worker, seed: u64, locals: &[u64]) -> usize {
        if locals.is_empty() {
            return 0;
        }
        let Some(number) = self.worker_or_new(worker) else { return 0 };
        let Some(slot) = self.slot_or_new(number, Plane::Predicted) else { return 0 };
        let mut outcome = StoreOutcome::default();
        let mut place = Loc { run: ROOT, offset: 0 };
        for piece in locals.chunks(self.piece()) {
            place = self.place_piece(slot, place, seed, Chain::Plain(piece), &mut outcome);
        }
        self.finish();
        self.keep_capacity(slot);
        self.settle(number);
        outcome.added as usize
    }

    pub fn copy(&mut self, worker: Worker, tier: Tier, names: &[u64]) -> CopyOutcome {
        let mut outcome = CopyOutcome::default();
        for name in names {
            let number = self.numbers.get(&worker).copied();
            let found = number.and_then(|n| self.locate(n, *name).map(|loc| (n, loc)));
            let Some((number, loc)) = found else {
                outcome.unknown += 1;
                continue;
            };
            let Some(slot) = self.slot_or_new(number, Plane::Held(tier)) else {
                outcome.refused += 1;
                continue;
            };
            let behind = Loc { offset: loc.offset + 1, ..loc };
            if !self.make_room(slot, 1) || !self.is_open(slot, behind) {
                outcome.refused += 1;
                self.counters.refused_blocks_total += 1;
                continue;
            }
            let local_hash = self.label(loc);
            let mut stored = StoreOutcome::default();
            let block = Block { engine_hash: *name, local_hash };
            self.cover_named(slot, loc, &[block], &mut stored);
            outcome.added += stored.added;
            outcome.duplicates += stored.duplicates;
            outcome.refused += stored.refused;
            self.counters.duplicate_blocks_total += u64::from(stored.duplicates);
            self.counters.refused_blocks_total += u64::from(stored.refused);
            self.finish();
            self.keep_capacity(slot);
            self.settle(number);
        }
        outcome
    }

    pub fn remove(&mut self, worker: Worker, tier: Tier, names: &[u64]) -> RemoveOutcome {
        let mut outcome = RemoveOutcome::default();
        let slot = self.numbers.get(&worker).map(|n| self.worker(*n).slots[tier as usize]);
        let Some(slot) = slot.filter(|slot| *slot != NONE) else {
            outcome.unknown = names.len() as u32;
            self.counters.unknown_removals_total += u64::from(outcome.unknown);
            return outcome;
        };
        let number = self.slot(slot).worker;
        let state = self.worker_mut(number);
        state.search_debt = state.search_debt.saturating_sub(names.len() * SEARCH_CREDIT);
        let mut hint = None;
        let mut at = 0;
        while at < names.len() {
            if self.is_plain_dense(slot) {
                let chunk = &names[at..names.len().min(at + DENSE_CHUNK)];
                let removed = self.let_go_dense(slot, chunk);
                outcome.removed += removed;
                outcome.unknown += chunk.len() as u32 - removed;
                at += chunk.len();
                continue;
            }
            let name = names[at];
            at += 1;
            let expected = hint.take().filter(|loc| self.is_named(slot, *loc, name));
            let Some(loc) = expected.or_else(|| self.locate_in(slot, name)) else {
                outcome.unknown += 1;
                continue;
            };
            let state = self.slot(slot);
            let is_plain = state.copies.is_empty()
                && state.extra.is_empty()
                && self.worker(number).dense.is_none();
            if !is_plain {
                match self.let_go(slot, loc, name) {
                    true => outcome.removed += 1,
                    false => outcome.kept += 1,
                }
                hint = self.before(loc);
                continue;
            }
            // Engines evict along the chain, from its end as a rule: take all that follow in one.
            let member = self.members.get(self.slot(slot).members[&loc.run]);
            let column = &self.metas.get(loc.run).column(member.column).names;
            let (mut low, mut high) = (loc.offset as usize, loc.offset as usize + 1);
            let start = usize::from(member.spans.start_of(loc.offset as u16));
            while low > start && names.get(at) == Some(&column[low - 1]) {
                low -= 1;
                at += 1;
            }
            if high - low == 1 {
                let end = usize::from(member.spans.end_of(loc.offset as u16));
                while high < end && names.get(at) == Some(&column[high]) {
                    high += 1;
                    at += 1;
                }
            }
            outcome.removed += (high - low) as u32;
            self.uncover(slot, loc.run, low as u16, high as u16);
            hint = self.before(Loc { run: loc.run, offset: low as u32 });
        }
        self.counters.unknown_removals_total += u64::from(outcome.unknown);
        self.finish();
        self.recount(number);
        self.settle(number);
        outcome
    }

    /// Drops everything of a worker; returns its memberships.
    pub fn clear(&mut self, worker: Worker) -> usize {
        let Some(&number) = self.numbers.get(&worker) else { return 0 };
        let mix = self.mix;
        let mut dropped = 0;
        for (plane, slot) in self.worker(number).slots.into_iter().enumerate() {
            if slot == NONE {
                continue;
            }
            let state = self.slot_mut(slot);
            if Plane::of(plane) != Plane::Predicted {
                dropped += state.held;
            }
            let extra = std::mem::replace(&mut state.extra, Extra::new(mix)).len();
            state.held -= extra;
            self.counters.memberships -= extra;
            let state = self.slot_mut(slot);
            state.copies.clear();
            let members: Vec<MemberId> = state.members.values().copied().collect();
            for id in members {
                // The names of the last blocks go with the slot's others below.
                let spans = std::mem::take(&mut self.members.get_mut(id).spans);
                self.span_bytes -= spans.heap_bytes();
                self.account(slot, spans.len(), false);
                self.publish(id);
                self.drop_member(id);
            }
            let state = self.slot_mut(slot);
            debug_assert!(state.held == 0 && state.members.is_empty());
            let plane = state.plane;
            **self.slots[usize::from(slot)].as_mut().expect("looked at above") =
                Slot::new(number, plane, self.mix);
        }
        let WorkerState { slots, order, counted, .. } = *self.worker(number);
        let fresh = WorkerState { slots, order, counted, ..WorkerState::new(worker) };
        *self.worker_mut(number) = fresh;
        self.finish();
        self.recount(number);
        self.settle(number);
        dropped
    }

    pub fn remove_worker(&mut self, worker: Worker) -> bool {
        self.clear(worker);
        let Some(number) = self.numbers.remove(&worker) else { return false };
        let state = self.workers[number as usize].take().expect("a known worker has a state");
        shrink_map(&mut self.numbers);
        self.worker_bytes -= state.counted;
        for slot in state.slots.into_iter().filter(|slot| *slot != NONE) {
            self.slots[usize::from(slot)] = None;
            self.shared.seats.take_back(slot);
            self.retired_slots.push(slot);
        }
        self.retired_slots.collect(epochs(), |slot| self.free_slots.push(slot));
        true
    }

    // ---- placing chains

    /// Places a part of an event at `place`, or nothing when that is [`NOWHERE`]. Returns where the next
    /// part goes on.
    fn place_piece(
        &mut self,
        slot: u16,
        place: Loc,
        seed: u64,
        chain: Chain<'_>,
        outcome: &mut StoreOutcome,
    ) -> Loc {
        let nowhere = Loc { run: NOWHERE, offset: 0 };
        let may_go_on = place.run != NOWHERE && outcome.refused == 0;
        if !may_go_on || !self.make_room(slot, chain.len()) || !self.is_open(slot, place) {
            outcome.refused += chain.len() as u32;
            return nowhere;
        }
        let place = self.place(slot, place, seed, chain, outcome);
        if self.options.limits.max_bytes > 0 {
            self.recount(self.slot(slot).worker);
        }
        place
    }

    /// Walks down from `place` along what is there, and adds what is not. Returns the place behind the
    /// last block.
    fn place(
        &mut self,
        slot: u16,
        place: Loc,
        seed: u64,
        chain: Chain<'_>,
        outcome: &mut StoreOutcome,
    ) -> Loc {
        let Loc { mut run, offset } = place;
        let mut offset = offset as usize;
        let mut at = 0;
        while at < chain.len() {
            let rest = chain.part(at, chain.len());
            if run != ROOT {
                let same = rest.common(&self.shared.runs.peek(&self.runs, run).labels()[offset..]);
                if same > 0 {
                    let loc = Loc { run, offset: offset as u32 };
                    let taken = self.cover(slot, loc, rest.part(0, same), outcome);
                    if taken < same {
                        outcome.refused += (rest.len() - taken) as u32;
                        break;
                    }
                    at += same;
                    offset += same;
                    continue;
                }
            }
            if let Some(child) = self.child(run, offset as u32, rest.label(0)) {
                self.hang(slot, run, offset as u32);
                (run, offset) = (child, 0);
                continue;
            }
            // From here on nobody has it.
            let room = self.room_for(slot, rest);
            if room == 0 {
                outcome.refused += rest.len() as u32;
                break;
            }
            let can_append = self.can_append(slot, run, offset);
            let longest = self.longest_run();
            let most = if can_append { longest - offset } else { longest };
            let more = rest.part(0, rest.len().min(room).min(most));
            if can_append {
                self.shared.runs.append(&mut self.runs, run, more.labels());
            } else {
                self.hang(slot, run, offset as u32);
                run = self.add_child(run, offset as u32, seed, more);
                offset = 0;
            }
            let loc = Loc { run, offset: offset as u32 };
            let taken = self.cover(slot, loc, more, outcome);
            debug_assert_eq!(taken, more.len(), "room was made sure of");
            at += more.len();
            offset += more.len();
        }
        Loc { run, offset: offset as u32 }
    }

    /// How many of the chain's blocks may be added. A name that stands for something else frees its own
    /// room, so where it is tight each block is looked at.
    fn room_for(&mut self, slot: u16, chain: Chain<'_>) -> usize {
        let max = self.options.limits.max_blocks;
        let Chain::Named(blocks) = chain else { return chain.len() };
        if max == 0 {
            return blocks.len();
        }
        let mut room = max.saturating_sub(self.counters.memberships);
        if room >= blocks.len() {
            return blocks.len();
        }
        let number = self.slot(slot).worker;
        let mut taken = 0;
        for block in blocks {
            room += self.tiers_of(number, block.engine_hash);
            if room == 0 {
                break;
            }
            room -= 1;
            taken += 1;
        }
        taken
    }

    fn tiers_of(&mut self, number: u32, name: u64) -> usize {
        let slots = self.worker(number).fact_slots();
        slots.filter(|slot| self.locate_in(*slot, name).is_some()).count()
    }

    fn can_append(&self, slot: u16, run: RunId, offset: usize) -> bool {
        if run == ROOT || offset >= self.longest_run() {
            return false;
        }
        let len = self.shared.runs.peek(&self.runs, run).labels().len();
        if offset != len {
            return false;
        }
        // Whoever covers the run whole would cover what is added, too.
        let member = self.slot(slot).members.get(&run).map(|id| self.members.get(*id));
        let own = u32::from(member.is_some_and(Member::is_whole));
        self.metas.get(run).wholes == own
    }

    fn child(&self, run: RunId, offset: u32, first: u64) -> Option<RunId> {
        let pin = pin();
        self.shared.child(&pin, run, offset, first)
    }

    fn add_child(&mut self, parent: RunId, offset: u32, seed: u64, chain: Chain<'_>) -> RunId {
        let place = (parent, offset);
        let run = self.shared.runs.add(&mut self.runs, place, chain.labels());
        let first = chain.label(0);
        self.shared.edges.insert(&mut self.edges, parent, offset, first, run);
        *self.metas.get_or_grow(run) = RunMeta::default();
        self.metas.get_or_grow(parent).kids += 1;
        if seed != DEFAULT_SEED {
            self.seeds.insert(run, seed);
        }
        // Nobody covers it yet.
        self.idle.push(run);
        run
    }

    /// Notes that something of this worker hangs behind block `offset - 1` of a run: its next prompts that
    /// branch off there name that block as their parent.
    fn hang(&mut self, slot: u16, run: RunId, offset: u32) {
        let Some(offset) = offset.checked_sub(1).filter(|_| run != ROOT) else { return };
        let Some(id) = self.slot(slot).members.get(&run) else { return };
        let loc = Loc { run, offset };
        let Some(name) = self.name_at(self.members.get(*id), offset as usize) else { return };
        let most = 64 + 2 * self.members.len();
        if self.anchors.len() >= most {
            self.anchors = HashMap::with_hasher(self.mix);
        }
        self.anchors.insert(name, loc);
    }

    /// Covers blocks that are in the tree. Returns how many there was room for.
    fn cover(
        &mut self,
        slot: u16,
        loc: Loc,
        chain: Chain<'_>,
        outcome: &mut StoreOutcome,
    ) -> usize {
        match chain {
            Chain::Named(blocks) => {
                let refused = outcome.refused;
                let taken = self.cover_named(slot, loc, blocks, outcome);
                // The caller counts what it could not place.
                outcome.refused = refused;
                taken
            }
            Chain::Plain(locals) => {
                let end = loc.offset as usize + locals.len();
                outcome.added += self.cover_predicted(slot, loc, end as u16) as u32;
                locals.len()
            }
        }
    }

    fn cover_predicted(&mut self, slot: u16, loc: Loc, end: u16) -> usize {
        let id = self.member_or_new(slot, loc.run);
        let member = self.members.get_mut(id);
        let before = member.spans.len();
        let heap = member.spans.heap_bytes();
        member.spans.add(loc.offset as u16, end);
        self.span_bytes = self.span_bytes + member.spans.heap_bytes() - heap;
        let added = member.spans.len() - before;
        if added > 0 {
            self.account(slot, added, true);
            self.publish(id);
        }
        self.touch(id);
        self.refresh(id, end);
        added
    }

    /// Covers `blocks`, whose labels are those at `loc`, under their names.
    fn cover_named(
        &mut self,
        slot: u16,
        loc: Loc,
        blocks: &[Block],
        outcome: &mut StoreOutcome,
    ) -> usize {
        let id = self.member_or_new(slot, loc.run);
        self.busy = id;
        let (start, end) = (loc.offset as usize, loc.offset as usize + blocks.len());
        let max = self.options.limits.max_blocks;
        let has_room = max == 0 || self.counters.memberships + blocks.len() <= max;
        let number = self.slot(slot).worker;
        let is_new = !self.members.get(id).spans.meets(start as u16, end as u16);
        let is_dense = self.worker(number).dense.is_some();
        let taken = if is_new && has_room && !is_dense {
            let mut doubtful = std::mem::take(&mut self.doubtful);
            doubtful.clear();
            self.assign(id, start, blocks, &mut doubtful);
            let mut moved = 0;
            for (name, offset) in &doubtful {
                let loc = Loc { run: loc.run, offset: *offset as u32 };
                moved += u32::from(self.release_elsewhere(number, *name, loc));
            }
            self.doubtful = doubtful;
            outcome.moved += moved;
            outcome.added += blocks.len() as u32 - moved;
            self.grow(slot, id, start as u16, end as u16);
            // The searches for doubtful names may have been what made it dense.
            if let Some(dense) = &mut self.worker_mut(number).dense {
                let at = |offset| Loc { run: loc.run, offset };
                dense.extend(blocks.iter().zip(loc.offset..).map(|(b, o)| (b.engine_hash, at(o))));
            }
            blocks.len()
        } else {
            let mut taken = 0;
            for (at, block) in blocks.iter().enumerate() {
                if !self.cover_one(slot, id, start + at, *block, outcome) {
                    outcome.refused += (blocks.len() - at) as u32;
                    break;
                }
                taken += 1;
            }
            taken
        };
        self.busy = NO_MEMBER;
        if self.members.get(id).spans.is_empty() {
            self.drop_member(id);
        } else {
            self.touch(id);
        }
        taken
    }

    /// Covers one block, whatever the slot has there. False when there is no room for it.
    fn cover_one(
        &mut self,
        slot: u16,
        id: MemberId,
        offset: usize,
        block: Block,
        outcome: &mut StoreOutcome,
    ) -> bool {
        let name = block.engine_hash;
        let run = self.members.get(id).run;
        let loc = Loc { run, offset: offset as u32 };
        let number = self.slot(slot).worker;
        let has_block = self.members.get(id).spans.contains(offset as u16);
        let is_held = (has_block && self.name_at(self.members.get(id), offset) == Some(name))
            || self.slot(slot).extra.find(name) == Some(loc);
        if is_held {
            outcome.duplicates += 1;
            if self.options.count_mode == CountMode::Copies {
                let copies = self.slot_mut(slot).copies.entry(name).or_insert(1);
                *copies = copies.saturating_add(1);
            }
            return true;
        }
        let is_moved = self.release_elsewhere(number, name, loc);
        let max = self.options.limits.max_blocks;
        if max > 0 && self.counters.memberships >= max {
            return false;
        }
        if is_moved {
            outcome.moved += 1;
        } else {
            outcome.added += 1;
        }
        if has_block {
            self.note_extra(name);
            let state = self.slot_mut(slot);
            state.extra.add(name, loc);
            self.account(slot, 1, true);
        } else {
            let mut doubtful = Vec::new();
            self.assign(id, offset, &[block], &mut doubtful);
            self.grow(slot, id, offset as u16, offset as u16 + 1);
        }
        if let Some(dense) = &mut self.worker_mut(number).dense {
            dense.insert(name, loc);
        }
        true
    }

    /// Lets go of `name` in all tiers if the worker holds it anywhere but at `own`. Says whether it did.
    fn release_elsewhere(&mut self, number: u32, name: u64, own: Loc) -> bool {
        if self.locate(number, name).is_none_or(|loc| loc == own) {
            return false;
        }
        for slot in self.worker(number).fact_slots() {
            if let Some(loc) = self.locate_in(slot, name) {
                self.slot_mut(slot).copies.remove(&name);
                self.let_go(slot, loc, name);
            }
        }
        true
    }

    // ---- letting go

    /// Lets go of one copy of a name; false when others are left.
    fn let_go(&mut self, slot: u16, loc: Loc, name: u64) -> bool {
        let state = self.slot_mut(slot);
        if !state.copies.is_empty()
            && let Some(copies) = state.copies.get_mut(&name)
        {
            *copies -= 1;
            if *copies <= 1 {
                state.copies.remove(&name);
            }
            return false;
        }
        if state.extra.find(name).is_some() {
            state.extra.remove(name);
            self.forget_extra(name);
            self.account(slot, 1, false);
        } else if let Some(other) = state.extra.at(loc) {
            // The block stays, under its other name.
            state.extra.remove(other);
            let id = state.members[&loc.run];
            self.rename(id, loc.offset as usize, other);
            self.forget_extra(other);
            self.account(slot, 1, false);
        } else {
            self.uncover(slot, loc.run, loc.offset as u16, loc.offset as u16 + 1);
        }
        let number = self.slot(slot).worker;
        if self.worker(number).dense.is_some() {
            let is_left = self.worker(number).fact_slots().any(|slot| {
                self.is_named(slot, loc, name) || self.slot(slot).extra.find(name).is_some()
            });
            if !is_left && let Some(dense) = &mut self.worker_mut(number).dense {
                dense.remove(&name);
            }
        }
        true
    }

    /// Whether a worker's table of names tells all there is to know of the slot: one tier, one copy and one
    /// name for each block.
    fn is_plain_dense(&self, slot: u16) -> bool {
        let state = self.slot(slot);
        let WorkerState { slots, dense, .. } = self.worker(state.worker);
        dense.is_some()
            && state.copies.is_empty()
            && state.extra.is_empty()
            && slot == slots[0]
            && slots[1..4].iter().all(|other| *other == NONE)
    }

    /// Lets go of names of which [`Writer::is_plain_dense`] is true. Returns how many were held.
    fn let_go_dense(&mut self, slot: u16, names: &[u64]) -> u32 {
        let state = self.slot(slot);
        let number = state.worker;
        let Some(dense) = &self.worker(number).dense else { return 0 };
        // Names come in no order: each is a walk to memory. First all walks side by side, then the work.
        let mut found = [None; DENSE_CHUNK];
        for (found, name) in found.iter_mut().zip(names) {
            *found = dense.get(name).copied();
        }
        let mut ids = [NO_MEMBER; DENSE_CHUNK];
        for (id, loc) in ids.iter_mut().zip(&found) {
            *id = loc.and_then(|loc| state.members.get(&loc.run).copied()).unwrap_or(NO_MEMBER);
        }
        for id in ids.iter().filter(|id| **id != NO_MEMBER) {
            prefetch(self.members.get(*id));
        }
        let mut removed = 0;
        for name in names {
            // Again: a name may come twice.
            let dense = self.worker_mut(number).dense.as_mut();
            let Some(Loc { run, offset }) = dense.and_then(|dense| dense.remove(name)) else {
                continue;
            };
            self.uncover(slot, run, offset as u16, offset as u16 + 1);
            removed += 1;
        }
        removed
    }

    /// Takes blocks of a run, all of which the slot has, from it.
    pub(super) fn uncover(&mut self, slot: u16, run: RunId, start: u16, end: u16) {
        let id = self.slot(slot).members[&run];
        let member = self.members.get_mut(id);
        let (old_end, old_lead) = (member.spans.end(), member.spans.lead());
        let before = if cfg!(debug_assertions) { member.spans.len() } else { 0 };
        let heap = member.spans.heap_bytes();
        member.spans.remove(start, end);
        self.span_bytes = self.span_bytes + member.spans.heap_bytes() - heap;
        debug_assert_eq!(member.spans.len() + usize::from(end - start), before);
        let is_empty = member.spans.is_empty();
        let (new_end, new_lead) = (member.spans.end(), member.spans.lead());
        self.account(slot, usize::from(end - start), false);
        if new_end != old_end {
            let member = self.members.get(id);
            let old_tail = self.name_at(member, usize::from(old_end) - 1);
            let new_tail =
                if is_empty { None } else { self.name_at(member, usize::from(new_end) - 1) };
            let tails = &mut self.slot_mut(slot).tails;
            if let Some(tail) = old_tail {
                tails.remove(&tail);
            }
            if let Some(tail) = new_tail {
                tails.insert(tail, id);
            }
        }
        let member = self.members.get(id);
        let meta = self.metas.get_mut(run);
        if old_lead == new_lead
            && member.is_scattered
            && meta.holders == 1
            && !is_empty
            && end < new_end
        {
            // A hole behind holes: readers see nothing of it.
            meta.held -= u32::from(end - start);
            self.counters.unique_blocks -= usize::from(end - start);
            return;
        }
        self.publish(id);
        if is_empty && id != self.busy {
            self.drop_member(id);
        }
    }

    /// Adds blocks, whose names are set, to a member.
    fn grow(&mut self, slot: u16, id: MemberId, start: u16, end: u16) {
        let member = self.members.get(id);
        let old_end = usize::from(member.spans.end());
        let old_tail =
            if member.spans.is_empty() { None } else { self.name_at(member, old_end - 1) };
        let member = self.members.get_mut(id);
        let heap = member.spans.heap_bytes();
        member.spans.add(start, end);
        self.span_bytes = self.span_bytes + member.spans.heap_bytes() - heap;
        let new_end = usize::from(member.spans.end());
        self.account(slot, usize::from(end - start), true);
        if new_end != old_end {
            let new_tail = self.name_at(self.members.get(id), new_end - 1);
            let tails = &mut self.slot_mut(slot).tails;
            if let Some(tail) = old_tail {
                tails.remove(&tail);
            }
            if let Some(tail) = new_tail {
                tails.insert(tail, id);
            }
        }
        self.publish(id);
    }

    /// Counts blocks that a slot gained or lost.
    pub(super) fn account(&mut self, slot: u16, blocks: usize, is_gain: bool) {
        let state = self.slots[usize::from(slot)].as_mut().expect("a slot that is given");
        let total = match state.plane {
            Plane::Held(_) => &mut self.counters.memberships,
            Plane::Predicted => &mut self.counters.predicted,
        };
        if is_gain {
            state.held += blocks;
            *total += blocks;
        } else {
            state.held -= blocks;
            *total -= blocks;
        }
    }

    /// Shows readers what a member covers of its run now.
    fn publish(&mut self, id: MemberId) {
        let member = self.members.get_mut(id);
        let (run, slot) = (member.run, member.slot);
        let plane = self.slots[usize::from(slot)].as_ref().expect("a member's slot").plane;
        let len = self.shared.runs.peek(&self.runs, run).labels().len() as u16;
        let meta = self.metas.get_mut(run);
        let lead = member.spans.lead();
        let is_device = plane == Plane::Held(Tier::Device);
        let cut = if is_device && lead == len { WHOLE } else { lead };
        let old = std::mem::replace(&mut member.cut, if plane.is_prefix() { cut } else { 0 });
        meta.wholes += u32::from(is_device && cut == WHOLE);
        meta.wholes -= u32::from(is_device && old == WHOLE);
        let is_scattered = is_device && usize::from(lead) != member.spans.len();
        if is_scattered != member.is_scattered {
            member.is_scattered = is_scattered;
            let list = self.scattered.entry(run).or_default();
            let room = list.capacity();
            if is_scattered {
                list.push(slot);
            } else {
                list.retain(|other| *other != slot);
                list.shrink_to(list.len() * 2);
            }
            let (is_empty, new_room) = (list.is_empty(), list.capacity());
            self.scattered_bytes = self.scattered_bytes + new_room * 2 - room * 2;
            if is_empty {
                self.scattered.remove(&run);
                shrink_map(&mut self.scattered);
            }
        }
        if !plane.is_prefix() || cut != old {
            let spans = &member.spans;
            self.shared.runs.cover(&mut self.runs, run, &mut self.scratch, |entries| {
                if plane.is_prefix() {
                    entries.set_prefix(slot, cut);
                } else {
                    entries.set_stretches(slot, spans.iter());
                }
            });
        }
        if plane == Plane::Predicted {
            return;
        }
        let meta = self.metas.get_mut(run);
        if meta.holders == 1 {
            let held = self.members.get(id).spans.len();
            self.set_held(run, held);
        } else if !meta.is_uncounted {
            meta.is_uncounted = true;
            self.uncounted.push(run);
            if self.uncounted.len() > UNCOUNTED_MOST {
                self.count_held();
            }
        }
    }

    fn set_held(&mut self, run: RunId, held: usize) {
        let meta = self.metas.get_mut(run);
        self.counters.unique_blocks += held;
        self.counters.unique_blocks -= meta.held as usize;
        meta.held = held as u32;
    }

    /// Brings the count of distinct blocks up to date: where several share a run, that is put off.
    pub(super) fn count_held(&mut self) {
        for run in std::mem::take(&mut self.uncounted) {
            // A run that is gone was counted then.
            if std::mem::take(&mut self.metas.get_mut(run).is_uncounted) {
                let len = self.shared.runs.peek(&self.runs, run).labels().len() as u16;
                let held = self.held_of(run, len);
                self.set_held(run, held);
            }
        }
    }

    /// How many blocks of a run of `len` anybody holds, predictions aside.
    fn held_of(&mut self, run: RunId, len: u16) -> usize {
        self.shared.runs.peek(&self.runs, run).cover().decode(&mut self.scratch);
        let is_fact = |slot: u16| self.slot(slot).plane != Plane::Predicted;
        let Entries { prefixes, stretches } = &self.scratch;
        let has_predictions = self.counters.predicted > 0;
        let cuts = prefixes.iter().filter(|p| !has_predictions || is_fact(p.slot)).map(|p| p.cut);
        let lead = cuts.max().unwrap_or(0).min(len);
        let scattered = self.scattered.get(&run);
        if stretches.is_empty() && scattered.is_none() {
            return lead.into();
        }
        let mut spans: Vec<(u16, u16)> = stretches.iter().map(|s| (s.start, s.end)).collect();
        for slot in scattered.into_iter().flatten() {
            let id = self.slot(*slot).members[&run];
            spans.extend(self.members.get(id).spans.iter());
        }
        spans.sort_unstable();
        let (mut held, mut end) = (lead, lead);
        for (from, to) in spans {
            if to > end {
                held += to - from.max(end);
                end = to;
            }
        }
        held.into()
    }

    // ---- members

    fn member_or_new(&mut self, slot: u16, run: RunId) -> MemberId {
        if let Some(id) = self.slot(slot).members.get(&run) {
            return *id;
        }
        let kids = self.slot_mut(slot).waiting.remove(&run).unwrap_or(0);
        // Where those hang was not noted.
        let floor = if kids > 0 { u16::MAX } else { 0 };
        let id = self.members.add(Member { run, slot, kids, floor, ..Member::default() });
        let (parent, attach) = self.shared.runs.peek(&self.runs, run).place();
        let state = self.slots[usize::from(slot)].as_mut().expect("a slot that is given");
        state.members.insert(run, id);
        if parent != ROOT {
            match state.members.get(&parent) {
                Some(parent) => {
                    let parent = self.members.get_mut(*parent);
                    parent.kids += 1;
                    parent.floor = parent.floor.max(attach as u16);
                }
                None => *state.waiting.entry(parent).or_insert(0) += 1,
            }
        }
        self.metas.get_mut(run).holders += 1;
        self.link(id);
        id
    }

    /// Takes out a member that has no blocks any more; readers do not see it already.
    fn drop_member(&mut self, id: MemberId) {
        let turn = self.unlink(id);
        let Member { run, slot, column, cut, is_scattered, kids, spans, .. } =
            self.members.take(id);
        debug_assert!(spans.is_empty() && cut == 0 && !is_scattered, "it covers nothing");
        self.ages.forget(id);
        let (parent, _) = self.shared.runs.peek(&self.runs, run).place();
        let state = self.slots[usize::from(slot)].as_mut().expect("a member's slot");
        state.members.remove(&run);
        if kids > 0 {
            state.waiting.insert(run, kids);
        }
        if parent != ROOT {
            match state.members.get(&parent) {
                Some(parent) => {
                    let parent = self.members.get_mut(*parent);
                    parent.kids -= 1;
                    parent.floor = if parent.kids > 0 { parent.floor } else { 0 };
                }
                None => {
                    if let Some(count) = state.waiting.get_mut(&parent) {
                        *count -= 1;
                        if *count == 0 {
                            state.waiting.remove(&parent);
                        }
                    }
                }
            }
        }
        self.unpark(slot, parent, turn);
        let meta = self.metas.get_mut(run);
        meta.holders -= 1;
        if meta.holders == 0 {
            self.idle.push(run);
        }
        if column != NO_COLUMN {
            self.leave_column(run, column);
        }
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
