//! The index: a tree of runs that readers walk without waiting, and one writer behind a lock.
//!
//! A *run* is a stretch of a chain without branches: its labels (local hashes) are in one array,
//! and branches are attached to it as children, at any offset. Runs are never split or merged, so a
//! block never moves. One word says which slots hold how much of a run
//! ([`cover`](super::arena::cover)).
//!
//! The room: `walk` (the query), `scratch` (its working memory), `shared` (state of readers and
//! writer), `writer` (events), `state` (its data), `names` (from an engine's name to a block),
//! `filter` (names in use), `limits` (eviction), `order` (of use), `ages` (of blocks),
//! `steps` (expiry data of a member), `report` (bytes), `room` (in
//! tables), `dump` and `events` (export of a worker's content), `seats` (worker <-> slot),
//! `holder`, `run`, `spans`, `paged`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};

use super::BlockIndex;
use super::arena::edges::Edges;
use super::arena::epoch::pin;
use super::arena::runs::Runs;
use super::matches::{Depths, ManyMatches, Matches};
use super::types::{
    Block, CopyOutcome, DumpEvent, IndexStats, Membership, Options, RemoveOutcome, StoreOutcome,
};
use crate::ids::{InstanceId, Tier, Worker};

mod ages;
mod audit;
mod dump;
mod events;
mod filter;
mod holder;
mod limits;
mod names;
mod order;
mod paged;
mod report;
mod room;
mod run;
pub(super) mod scratch;
mod seats;
mod shared;
mod spans;
mod state;
mod steps;
mod walk;
mod writer;

use events::Copied;
use seats::NONE;
use shared::Shared;
use writer::Writer;

/// Expired blocks after which the lock is handed over.
const EXPIRED_AT_ONCE: usize = 4_096;

/// The block index: exact, concurrent, readers never wait.
///
/// # Cost
/// A block takes 16 bytes and its entry in the filter of names, once for all workers with the same
/// name for it; each (worker, run) takes a record. The benches' RESULTS have measurements;
/// [`IndexStats::bytes`] is the current size.
pub struct RadixIndex {
    shared: Arc<Shared>,
    writer: Mutex<Writer>,
}

impl Default for RadixIndex {
    fn default() -> Self {
        Self::new(Options::default())
    }
}

impl RadixIndex {
    /// An empty index.
    pub fn new(options: Options) -> Self {
        let (runs, runs_writing) = Runs::new();
        let (edges, edges_writing) = Edges::new(options.hash_seed);
        let (seats, predictions_due_ms) = (seats::Seats::new(), AtomicU64::new(u64::MAX));
        let shared = Arc::new(Shared { runs, edges, seats, predictions_due_ms });
        let writer = Writer::new(Arc::clone(&shared), runs_writing, edges_writing, options);
        Self { shared, writer: Mutex::new(writer) }
    }

    /// Reads the writer's state. Waiting writers go next, so that constant reading never delays
    /// events.
    fn look<R>(&self, at: impl FnOnce(&mut Writer) -> R) -> R {
        let mut writer = self.writer.lock();
        let seen = at(&mut writer);
        MutexGuard::unlock_fair(writer);
        seen
    }

    /// Checks all redundant data for consistency.
    ///
    /// # Cost
    /// O(blocks), under the writer's lock: for tests.
    ///
    /// # Panics
    /// If the index is inconsistent.
    pub fn audit(&self) {
        self.look(|writer| writer.audit());
    }

    /// Like [`BlockIndex::find_matches`], for the device only: a third of the output, which is most
    /// of the time when hundreds of workers match.
    ///
    /// # Consistency
    /// As [`BlockIndex::find_matches`].
    pub fn find_depths(&self, locals: &[u64], out: &mut Depths) {
        let pin = pin();
        let Depths { found, scratch } = out;
        self.shared.find_depths(&pin, locals, scratch, found);
    }

    fn find(&self, prompt: &[u64], only_who: bool, out: &mut Matches) {
        let pin = pin();
        let Matches { found, scratch } = out;
        self.shared.find(&pin, prompt, only_who, scratch, found);
    }
}

impl BlockIndex for RadixIndex {
    fn store(
        &self,
        worker: Worker,
        tier: Tier,
        parent: Option<u64>,
        seed: u64,
        blocks: &[Block],
    ) -> StoreOutcome {
        self.writer.lock().store(worker, tier, parent, seed, blocks)
    }

    fn copy(&self, worker: Worker, tier: Tier, engine_hashes: &[u64]) -> CopyOutcome {
        self.writer.lock().copy(worker, tier, engine_hashes)
    }

    fn evict(
        &self,
        worker: Worker,
        tier: Tier,
        engine_hashes: &[u64],
        gone: Option<&mut Vec<u64>>,
    ) -> RemoveOutcome {
        self.writer.lock().remove(worker, tier, engine_hashes, gone)
    }

    fn clear(&self, worker: Worker) -> usize {
        self.writer.lock().clear(worker)
    }

    fn clear_tier(&self, worker: Worker, tier: Tier) -> usize {
        self.writer.lock().clear_tier(worker, tier)
    }

    fn remove_worker(&self, worker: Worker) -> bool {
        self.writer.lock().remove_worker(worker)
    }

    fn remove_instance(&self, instance_id: InstanceId) -> usize {
        let mut writer = self.writer.lock();
        let workers = writer.owners.numbers.keys().copied();
        let ranks: Vec<Worker> = workers.filter(|w| w.instance_id == instance_id).collect();
        ranks.iter().filter(|worker| writer.remove_worker(**worker)).count()
    }

    fn predict(&self, worker: Worker, seed: u64, locals: &[u64]) -> usize {
        self.writer.lock().predict(worker, seed, locals, None)
    }

    fn predict_within(
        &self,
        worker: Worker,
        seed: u64,
        locals: &[u64],
        history_blocks: usize,
    ) -> usize {
        self.writer.lock().predict(worker, seed, locals, Some(history_blocks))
    }

    fn advance_to(&self, now_ms: u64) -> usize {
        // Events may run in between; this many blocks take as long as a few events.
        let mut gone = 0;
        loop {
            let some = self.look(|writer| writer.advance_to(now_ms, EXPIRED_AT_ONCE));
            gone += some;
            if some < EXPIRED_AT_ONCE {
                return gone;
            }
        }
    }

    fn predictions_due_ms(&self) -> u64 {
        // Relaxed: a thread that sees a prediction for long enough to expire also sees this.
        self.shared.predictions_due_ms.load(Ordering::Relaxed)
    }

    fn find_matches(&self, locals: &[u64], out: &mut Matches) {
        self.find(locals, false, out);
    }

    fn find_matches_early_exit(&self, locals: &[u64], out: &mut Matches) {
        self.find(locals, true, out);
    }

    fn find_many(&self, prompts: &[&[u64]], out: &mut ManyMatches) {
        out.clear();
        for some in walk::parts(prompts) {
            let pin = pin();
            self.shared.find_some(&pin, some, out);
        }
    }

    fn parent_seed(&self, worker: Worker, engine_hash: u64) -> Option<u64> {
        let mut writer = self.writer.lock();
        let number = writer.owners.numbers.get(&worker).copied()?;
        let loc = writer.locate(number, engine_hash)?;
        Some(writer.seed_of(loc.run))
    }

    fn holds_all(&self, worker: Worker, tier: Tier, engine_hashes: &[u64]) -> bool {
        let mut writer = self.writer.lock();
        let number = writer.owners.numbers.get(&worker).copied();
        let slot = number.map_or(NONE, |number| writer.worker(number).slots[tier as usize]);
        engine_hashes.iter().all(|name| slot != NONE && writer.locate_in(slot, *name).is_some())
    }

    fn names_along(&self, worker: Worker, locals: &[u64], out: &mut Vec<Option<u64>>) {
        out.clear();
        self.look(|writer| writer.names_along(worker, locals, out));
    }

    fn workers(&self) -> Vec<Worker> {
        self.look(|writer| {
            let mut workers: Vec<Worker> = writer.owners.numbers.keys().copied().collect();
            workers.sort_unstable();
            workers
        })
    }

    fn blocks(&self, worker: Worker) -> usize {
        self.look(|writer| {
            let number = writer.owners.numbers.get(&worker);
            let slots = number.map(|number| writer.worker(*number).fact_slots());
            slots.into_iter().flatten().map(|slot| writer.slot(slot).held).sum()
        })
    }

    fn blocks_in(&self, worker: Worker, tier: Tier) -> usize {
        self.look(|writer| {
            let number = writer.owners.numbers.get(&worker);
            let slot = number.map(|number| writer.worker(*number).slots[tier as usize]);
            slot.filter(|slot| *slot != NONE).map_or(0, |slot| writer.slot(slot).held)
        })
    }

    fn memberships(&self, worker: Worker) -> Vec<Membership> {
        events::memberships(&self.dump_worker(worker))
    }

    fn dump_worker(&self, worker: Worker) -> Vec<DumpEvent> {
        // Outside of the lock: allocating memory, and building events. The pin preserves the copied
        // runs.
        let pin = pin();
        let room = self.look(|writer| writer.measure(worker));
        let mut copied = Copied::with_room(room);
        self.look(|writer| writer.copy_of(worker, &mut copied));
        copied.events(&self.shared, &pin)
    }

    fn stats(&self) -> IndexStats {
        self.look(Writer::stats)
    }

    fn evicted_blocks_total(&self) -> u64 {
        self.look(|writer| writer.counters.evicted_blocks_total)
    }
}
