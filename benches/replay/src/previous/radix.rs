//! The index: one lock-free table of blocks, one lock per worker.
//!
//! Lock order: a worker's lock may be followed by the registry's (inside [`Slots`]), never the other
//! way round. No call holds two workers' locks.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use parking_lot::Mutex;

use super::holdings::{Holdings, Place, Placed, Put, Take};
use super::matches::{Match, Matches};
use super::nodes::{Mix, Nodes};
use super::slots::Slots;
use super::types::{
    Block, DumpBlock, HeldBlock, IndexStats, MAX_WORKERS, Options, Parent, Rejection,
    RemoveOutcome, StoreOutcome,
};
use super::walk::Chains;
use super::{BlockIndex, chain, dump};
use kvflash_core::ids::{InstanceId, Tier, Worker};

/// Events up to this many blocks are searched for repetitions pair by pair, longer ones by a set.
const PAIRWISE_BLOCKS: usize = 32;

struct Cell {
    slot: u16,
    /// `None` once the worker was removed: whoever still has the cell must look it up again.
    holdings: Mutex<Option<Holdings>>,
    /// Memberships, for readers without the lock.
    blocks: AtomicUsize,
}

// Counters and sizes are read for information only: every access is relaxed.
#[derive(Default)]
struct Counters {
    orphans: AtomicU64,
    self_references: AtomicU64,
    slots_exhausted: AtomicU64,
    refused: AtomicU64,
    unknown_removals: AtomicU64,
    duplicates: AtomicU64,
    moved: AtomicU64,
}

/// The block index: exact, concurrent, readers never wait.
///
/// # Cost
/// About 105 bytes for a block and 20 to 25 for each of its holders, measured on x86-64; what an index
/// occupies now is [`IndexStats::estimated_bytes`].
pub struct RadixIndex {
    nodes: Nodes,
    slots: Slots<Cell>,
    counters: Counters,
    /// Memberships, including those set aside for events that are being stored.
    reserved: AtomicUsize,
    options: Options,
}

impl Default for RadixIndex {
    fn default() -> Self {
        Self::new(Options::default())
    }
}

impl RadixIndex {
    /// An empty index.
    pub fn new(options: Options) -> Self {
        Self {
            nodes: Nodes::new(Mix::new(options.hash_seed), options.expected_blocks),
            slots: Slots::new(options.limits.max_workers.min(MAX_WORKERS)),
            counters: Counters::default(),
            reserved: AtomicUsize::new(0),
            options,
        }
    }

    /// Sets up to `wanted` memberships aside; returns how many there is room for.
    fn reserve(&self, wanted: usize) -> usize {
        let max = self.options.limits.max_blocks;
        if max == 0 {
            self.reserved.fetch_add(wanted, Relaxed);
            return wanted;
        }
        let mut granted = 0;
        let _ = self.reserved.fetch_update(Relaxed, Relaxed, |reserved| {
            granted = wanted.min(max.saturating_sub(reserved));
            Some(reserved + granted)
        });
        granted
    }

    fn reject(&self, cause: Rejection) -> StoreOutcome {
        let counter = match cause {
            Rejection::Orphan => &self.counters.orphans,
            Rejection::SelfReference => &self.counters.self_references,
            Rejection::SlotsExhausted => &self.counters.slots_exhausted,
        };
        counter.fetch_add(1, Relaxed);
        StoreOutcome::because_of(cause)
    }

    fn put_all(
        &self,
        cell: &Cell,
        holdings: &mut Holdings,
        tier: Tier,
        mut parent: Option<u64>,
        seed: u64,
        blocks: &[Block],
    ) -> StoreOutcome {
        let mut outcome = StoreOutcome::default();
        let mut room = self.reserve(blocks.len());
        let pin = self.nodes.pin();
        let place = Place { nodes: &self.nodes, pin: &pin, slot: cell.slot };
        for block in blocks {
            let chain = chain(parent, block.local_hash);
            let (name, local) = (block.engine_hash, block.local_hash);
            let placed = Placed { name, chain, parent, local, seed };
            match holdings.put(place, tier, self.options.count_mode, placed, &mut room) {
                Put::Added => outcome.added += 1,
                Put::Duplicate => outcome.duplicates += 1,
                Put::Moved => outcome.moved += 1,
                Put::Refused => outcome.refused += 1,
            }
            parent = Some(chain);
        }
        self.reserved.fetch_sub(room, Relaxed);
        cell.blocks.store(holdings.held().iter().sum(), Relaxed);
        for (counter, count) in [
            (&self.counters.duplicates, outcome.duplicates),
            (&self.counters.moved, outcome.moved),
            (&self.counters.refused, outcome.refused),
        ] {
            if count > 0 {
                counter.fetch_add(count.into(), Relaxed);
            }
        }
        outcome
    }

    fn find(&self, chains: &mut Chains<'_>, early_exit: bool, out: &mut Matches) {
        let before = self.slots.seating();
        {
            let pin = self.nodes.pin();
            out.scratch.walk_device(&pin, chains, early_exit);
            if !early_exit && self.nodes.has_lower() {
                out.scratch.walk_lower(&pin, chains);
            }
        }
        let after = self.slots.seating();
        out.found.clear();
        for found in &out.scratch.found {
            let [device, host, disk, external] = found.reach;
            if external > 0
                && let Some(worker) = before.stable(&after, found.slot)
            {
                out.found.push(Match { worker, device, host, disk, external });
            }
        }
    }

    fn find_local(&self, locals: &[u64], early_exit: bool, out: &mut Matches) {
        let mut known = std::mem::take(&mut out.scratch.chains);
        known.clear();
        let mut chains = Chains::Local(locals, known);
        self.find(&mut chains, early_exit, out);
        if let Chains::Local(_, known) = chains {
            out.scratch.chains = known;
        }
    }

    /// Drops what a worker holds, under its lock.
    fn purge(&self, cell: &Cell, holdings: &mut Holdings) -> usize {
        let dropped = holdings.purge(&self.nodes, cell.slot);
        self.reserved.fetch_sub(dropped, Relaxed);
        cell.blocks.store(0, Relaxed);
        dropped
    }
}

/// Whether a block of the event is its own parent, or appears twice.
pub(super) fn is_self_referencing(parent: Option<Parent>, blocks: &[Block]) -> bool {
    let name = |block: &Block| block.engine_hash;
    if let Some(Parent::Engine(parent)) = parent
        && blocks.iter().any(|block| name(block) == parent)
    {
        return true;
    }
    if blocks.len() > PAIRWISE_BLOCKS {
        let mut seen = HashSet::with_capacity(blocks.len());
        return !blocks.iter().all(|block| seen.insert(name(block)));
    }
    (1..blocks.len()).any(|i| blocks[..i].iter().any(|b| name(b) == name(&blocks[i])))
}

impl BlockIndex for RadixIndex {
    fn store(
        &self,
        worker: Worker,
        tier: Tier,
        parent: Option<Parent>,
        seed: u64,
        blocks: &[Block],
    ) -> StoreOutcome {
        if blocks.is_empty() {
            return StoreOutcome::default();
        }
        if is_self_referencing(parent, blocks) {
            return self.reject(Rejection::SelfReference);
        }
        // Again only when the worker was removed between look-up and lock.
        loop {
            let cell = match self.slots.find(worker) {
                Some(cell) => cell,
                None if matches!(parent, Some(Parent::Engine(_))) => {
                    return self.reject(Rejection::Orphan);
                }
                None => {
                    let make = |slot| Cell {
                        slot,
                        holdings: Mutex::new(Some(Holdings::new(Mix::new(self.options.hash_seed)))),
                        blocks: AtomicUsize::new(0),
                    };
                    match self.slots.find_or_add(worker, make) {
                        Some(cell) => cell,
                        None => return self.reject(Rejection::SlotsExhausted),
                    }
                }
            };
            let mut guard = cell.holdings.lock();
            let Some(holdings) = guard.as_mut() else { continue };
            let parent = match parent {
                None => None,
                Some(Parent::Chain(chain)) => Some(chain),
                Some(Parent::Engine(name)) => match holdings.locate(name) {
                    Some((chain, _)) => Some(chain),
                    None => return self.reject(Rejection::Orphan),
                },
            };
            return self.put_all(&cell, holdings, tier, parent, seed, blocks);
        }
    }

    fn remove(&self, worker: Worker, tier: Tier, engine_hashes: &[u64]) -> RemoveOutcome {
        let mut outcome = RemoveOutcome::default();
        let cell = self.slots.find(worker);
        let mut guard = cell.as_ref().map(|cell| (cell, cell.holdings.lock()));
        if let Some((cell, holdings)) = &mut guard
            && let Some(holdings) = holdings.as_mut()
        {
            let pin = self.nodes.pin();
            let place = Place { nodes: &self.nodes, pin: &pin, slot: cell.slot };
            for &name in engine_hashes {
                match holdings.take(place, tier, name, self.options.limits.min_ghosts) {
                    Take::Removed => outcome.removed += 1,
                    Take::Kept => outcome.kept += 1,
                    Take::Unknown => outcome.unknown += 1,
                }
            }
            self.reserved.fetch_sub(outcome.removed as usize, Relaxed);
            cell.blocks.store(holdings.held().iter().sum(), Relaxed);
        } else {
            outcome.unknown = engine_hashes.len() as u32;
        }
        if outcome.unknown > 0 {
            self.counters.unknown_removals.fetch_add(outcome.unknown.into(), Relaxed);
        }
        outcome
    }

    fn clear(&self, worker: Worker) -> usize {
        let Some(cell) = self.slots.find(worker) else { return 0 };
        let mut guard = cell.holdings.lock();
        guard.as_mut().map_or(0, |holdings| self.purge(&cell, holdings))
    }

    fn remove_worker(&self, worker: Worker) -> bool {
        let Some(cell) = self.slots.remove(worker) else { return false };
        let holdings = cell.holdings.lock().take();
        if let Some(mut holdings) = holdings {
            self.purge(&cell, &mut holdings);
            self.slots.recycle(cell.slot);
        }
        true
    }

    fn remove_instance(&self, instance_id: InstanceId) -> usize {
        let ranks = self.slots.ranks(instance_id);
        ranks.into_iter().filter(|worker| self.remove_worker(*worker)).count()
    }

    fn find_matches(&self, locals: &[u64], out: &mut Matches) {
        self.find_local(locals, false, out);
    }

    fn find_matches_early_exit(&self, locals: &[u64], out: &mut Matches) {
        self.find_local(locals, true, out);
    }

    fn find_matches_by_sequence(&self, chains: &[u64], out: &mut Matches) {
        self.find(&mut Chains::Given(chains), false, out);
    }

    fn parent_seed(&self, worker: Worker, engine_hash: u64) -> Option<u64> {
        let cell = self.slots.find(worker)?;
        let guard = cell.holdings.lock();
        guard.as_ref()?.locate(engine_hash).map(|(_, seed)| seed)
    }

    fn held_block(&self, worker: Worker, engine_hash: u64) -> Option<HeldBlock> {
        let cell = self.slots.find(worker)?;
        let guard = cell.holdings.lock();
        let (chain, seed) = guard.as_ref()?.find_held(engine_hash)?;
        let (parent_chain, local_hash) = Nodes::content(&self.nodes.pin(), chain)?;
        Some(HeldBlock { block: Block { engine_hash, local_hash }, parent_chain, seed })
    }

    fn workers(&self) -> Vec<Worker> {
        self.slots.workers()
    }

    fn blocks(&self, worker: Worker) -> usize {
        self.slots.find(worker).map_or(0, |cell| cell.blocks.load(Relaxed))
    }

    fn dump_worker(&self, worker: Worker) -> Vec<DumpBlock> {
        let Some(cell) = self.slots.find(worker) else { return Vec::new() };
        let blocks = match cell.holdings.lock().as_ref() {
            Some(holdings) => holdings.dump(&self.nodes.pin(), worker),
            None => Vec::new(),
        };
        dump::arrange(blocks)
    }

    fn stats(&self) -> IndexStats {
        let cells: Vec<Arc<Cell>> = self.slots.cells();
        let mut stats = IndexStats {
            workers: cells.len(),
            unique_blocks: self.nodes.len(),
            orphans_total: self.counters.orphans.load(Relaxed),
            self_references_total: self.counters.self_references.load(Relaxed),
            slots_exhausted_total: self.counters.slots_exhausted.load(Relaxed),
            refused_blocks_total: self.counters.refused.load(Relaxed),
            unknown_removals_total: self.counters.unknown_removals.load(Relaxed),
            duplicate_blocks_total: self.counters.duplicates.load(Relaxed),
            moved_blocks_total: self.counters.moved.load(Relaxed),
            estimated_bytes: self.nodes.estimated_bytes(),
            ..IndexStats::default()
        };
        for cell in cells {
            if let Some(holdings) = cell.holdings.lock().as_ref() {
                let held = holdings.held();
                stats.memberships += held.iter().sum::<usize>();
                stats.holders += held.iter().filter(|blocks| **blocks > 0).count();
                stats.estimated_bytes += size_of::<Cell>() + holdings.heap_bytes();
            }
        }
        stats
    }
}
