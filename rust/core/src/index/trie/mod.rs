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
/// # Consistency
/// Changes take effect one after the other; a query sees every change whose call returned before
/// the query began. A query concurrent with changes reads block by block: the worker held each
/// credited block at some moment during the query. For a worker that stores parents first and
/// evicts children first, the result is a depth that it really had.
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

    fn find(&self, prompt: &[u64], only_who: bool, out: &mut Matches) {
        let pin = pin();
        let Matches { found, scratch } = out;
        self.shared.find(&pin, prompt, only_who, scratch, found);
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

    /// Like [`Self::find_matches`], for the device only: a third of the output, which is most
    /// of the time when hundreds of workers match.
    ///
    /// # Consistency
    /// As [`Self::find_matches`].
    pub fn find_depths(&self, locals: &[u64], out: &mut Depths) {
        let pin = pin();
        let Depths { found, scratch } = out;
        self.shared.find_depths(&pin, locals, scratch, found);
    }

    /// Records that `worker` now holds `blocks`, a contiguous chain that follows `parent`.
    ///
    /// `parent` is the worker's name of the block before the first, held in any tier; `None` at a
    /// prompt's start. Each block is held in `tier` under the engine's name for it. The worker
    /// becomes known with its first accepted event. `seed` is the identity in the local hashes. It
    /// is part of the content (equal content has equal seeds; the first one is kept) and is kept
    /// for the children ([`Self::parent_seed`]).
    ///
    /// An event is accepted or rejected as a whole ([`StoreOutcome::rejected`]). An accepted event
    /// is truncated at the first block for which [`Limits::max_blocks`](super::Limits::max_blocks) leaves no room. If the
    /// worker already uses a name for other content, everything held under the old meaning is
    /// released first.
    ///
    /// # Cost
    /// O(blocks).
    pub fn store(
        &self,
        worker: Worker,
        tier: Tier,
        parent: Option<u64>,
        seed: u64,
        blocks: &[Block],
    ) -> StoreOutcome {
        self.writer.lock().store(worker, tier, parent, seed, blocks)
    }

    /// Records that `worker` copied the blocks named `engine_hashes`, which it holds in some tier,
    /// to `tier` as well.
    ///
    /// # Cost
    /// O(hashes).
    pub fn copy(&self, worker: Worker, tier: Tier, engine_hashes: &[u64]) -> CopyOutcome {
        self.writer.lock().copy(worker, tier, engine_hashes)
    }

    /// Records that `worker` evicted the blocks named `engine_hashes` from `tier`.
    ///
    /// Names that it does not hold there are counted and skipped; the rest of the list is
    /// processed. A block that leaves the device is no longer predicted there. Appends the local
    /// hashes of the blocks that left the device to `gone`.
    ///
    /// # Cost
    /// O(hashes).
    pub fn evict(
        &self,
        worker: Worker,
        tier: Tier,
        engine_hashes: &[u64],
        gone: Option<&mut Vec<u64>>,
    ) -> RemoveOutcome {
        self.writer.lock().remove(worker, tier, engine_hashes, gone)
    }

    /// As [`evict`](Self::evict), without reporting which blocks were removed.
    pub fn remove(&self, worker: Worker, tier: Tier, engine_hashes: &[u64]) -> RemoveOutcome {
        self.evict(worker, tier, engine_hashes, None)
    }

    /// Drops everything that `worker` holds or is predicted to hold, in all tiers; it stays known.
    /// Returns the number of dropped memberships.
    ///
    /// # Cost
    /// O(blocks of that worker), independent of the size of the index.
    pub fn clear(&self, worker: Worker) -> usize {
        self.writer.lock().clear(worker)
    }

    /// Drops everything that `worker` holds in one tier, for the device including predictions. It
    /// stays known. Returns the number of dropped memberships.
    ///
    /// # Cost
    /// O(blocks of that worker).
    pub fn clear_tier(&self, worker: Worker, tier: Tier) -> usize {
        self.writer.lock().clear_tier(worker, tier)
    }

    /// Drops everything of `worker` and forgets it. False if it was unknown.
    ///
    /// # Consistency
    /// After it returns, no query credits the worker until it stores again.
    ///
    /// # Cost
    /// O(blocks of that worker).
    pub fn remove_worker(&self, worker: Worker) -> bool {
        self.writer.lock().remove_worker(worker)
    }

    /// Removes the workers of all ranks of `instance_id`. Returns their number.
    pub fn remove_instance(&self, instance_id: InstanceId) -> usize {
        let mut writer = self.writer.lock();
        let workers = writer.owners.numbers.keys().copied();
        let ranks: Vec<Worker> = workers.filter(|w| w.instance_id == instance_id).collect();
        ranks.iter().filter(|worker| writer.remove_worker(**worker)).count()
    }

    /// Predicts that `worker` will soon hold the whole prompt `locals`, because it was sent there.
    ///
    /// Predictions are separate: they never count as held, appear only in [`Match::predicted`](super::Match::predicted), and
    /// end by age ([`Limits::predicted_ttl_ms`](super::Limits::predicted_ttl_ms), counted from the last prediction of that block) or
    /// [history](Self::predict_within), by [`Limits::capacity_blocks`](super::Limits::capacity_blocks) or
    /// [`Limits::max_predicted`](super::Limits::max_predicted), or with their worker. Makes the worker known. Returns the number
    /// of blocks that were not predicted before; 0 also if no more workers can be added.
    ///
    /// # Cost
    /// O(blocks).
    pub fn predict(&self, worker: Worker, seed: u64, locals: &[u64]) -> usize {
        self.writer.lock().predict(worker, seed, locals, None)
    }

    /// As [`predict`](Self::predict), for a worker with a history in place of its cache: its
    /// predictions end not by age, but when they exceed `history_blocks`.
    ///
    /// The oldest predictions are then dropped, the deepest first within one prompt; a prompt
    /// longer than the limit keeps its beginning. The history begins with the first such call and
    /// lasts until the worker is removed; each call sets its length, `predict` does not change it.
    /// The first call drops predictions with an age. A history replaces only
    /// [`Limits::predicted_ttl_ms`](super::Limits::predicted_ttl_ms) and no other limit.
    ///
    /// # Cost
    /// O(blocks), and O(log runs) for each run that loses blocks.
    pub fn predict_within(
        &self,
        worker: Worker,
        seed: u64,
        locals: &[u64],
        history_blocks: usize,
    ) -> usize {
        self.writer.lock().predict(worker, seed, locals, Some(history_blocks))
    }

    /// Sets the time, in milliseconds of any monotonic clock, and drops predictions and blocks that
    /// have expired by then. Returns their number.
    ///
    /// A worker's block expires if for [`Limits::ttl_ms`](super::Limits::ttl_ms) the worker stored neither it nor any
    /// block after it; then all its names are dropped, in all tiers. Without that limit blocks
    /// never expire.
    ///
    /// # Consistency
    /// Other events may take effect between parts of a call that drops many.
    ///
    /// # Cost
    /// O(dropped blocks), and occasionally a visit of every run of each worker.
    pub fn advance_to(&self, now_ms: u64) -> usize {
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

    /// The time from which [`advance_to`](Self::advance_to) may drop a prediction, `u64::MAX`
    /// without any: before it all predictions are valid. Call `advance_to` before a later query.
    ///
    /// # Cost
    /// One load; never waits for a writer.
    pub fn predictions_due_ms(&self) -> u64 {
        // Relaxed: a thread that sees a prediction for long enough to expire also sees this.
        self.shared.predictions_due_ms.load(Ordering::Relaxed)
    }

    /// Finds, per worker, the leading blocks of the prompt `locals` that it holds, tier by tier.
    ///
    /// Replaces the content of `out`. Workers without any match are omitted; the order is
    /// unspecified.
    ///
    /// # Consistency
    /// See [`RadixIndex`]. Never waits for a writer.
    ///
    /// # Cost
    /// One table probe per branching point of the prompt, and a comparison of its blocks. Allocates
    /// nothing once `out` has grown to the workload. Lower tiers cost nothing while no worker holds
    /// blocks there.
    pub fn find_matches(&self, locals: &[u64], out: &mut Matches) {
        self.find(locals, false, out);
    }

    /// Like [`Self::find_matches`], but stops when only one worker is left and reports the
    /// depth reached by then.
    ///
    /// Tells which worker, not how much: the last worker may hold more, and lower tiers and
    /// predictions are not examined (`host`, `disk` and `external` repeat `device`, `predicted` is
    /// 0).
    pub fn find_matches_early_exit(&self, locals: &[u64], out: &mut Matches) {
        self.find(locals, true, out);
    }

    /// Like [`Self::find_matches`], for several prompts in one call.
    ///
    /// Replaces the content of `out` with a result for each prompt, in order.
    ///
    /// # Consistency
    /// As [`Self::find_matches`] for each prompt, not at one common moment. Memory that the
    /// writer released waits for a few dozen prompts at most, however many there are.
    ///
    /// # Cost
    /// That of the queries, with shared work done once per few dozen. Allocates nothing once `out`
    /// has grown to the workload.
    pub fn find_many(&self, prompts: &[&[u64]], out: &mut ManyMatches) {
        out.clear();
        for some in walk::parts(prompts) {
            let pin = pin();
            self.shared.find_some(&pin, some, out);
        }
    }

    /// The seed of a block that `worker` holds under `engine_hash`.
    pub fn parent_seed(&self, worker: Worker, engine_hash: u64) -> Option<u64> {
        let mut writer = self.writer.lock();
        let number = writer.owners.numbers.get(&worker).copied()?;
        let loc = writer.locate(number, engine_hash)?;
        Some(writer.seed_of(loc.run))
    }

    /// Whether `worker` holds every one of `engine_hashes` in `tier`. True for an empty list.
    ///
    /// # Cost
    /// O(hashes) under the writer's lock; stops at the first name that is not held.
    pub fn holds_all(&self, worker: Worker, tier: Tier, engine_hashes: &[u64]) -> bool {
        let mut writer = self.writer.lock();
        let number = writer.owners.numbers.get(&worker).copied();
        let slot = number.map_or(NONE, |number| writer.worker(number).slots[tier as usize]);
        engine_hashes.iter().all(|name| slot != NONE && writer.locate_in(slot, *name).is_some())
    }

    /// The names that `worker` uses for the leading blocks of the prompt `locals`, in any tier;
    /// `None` for a block that it does not hold. Ends where no worker ever held more of the prompt.
    ///
    /// # Cost
    /// O(blocks), under the writer's lock.
    pub fn names_along(&self, worker: Worker, locals: &[u64], out: &mut Vec<Option<u64>>) {
        out.clear();
        self.look(|writer| writer.names_along(worker, locals, out));
    }

    /// The known workers, ascending.
    pub fn workers(&self) -> Vec<Worker> {
        self.look(|writer| {
            let mut workers: Vec<Worker> = writer.owners.numbers.keys().copied().collect();
            workers.sort_unstable();
            workers
        })
    }

    /// Memberships of `worker`: names held, counted per tier. 0 for an unknown worker.
    ///
    /// # Cost
    /// O(1) besides the look-up of the worker.
    pub fn blocks(&self, worker: Worker) -> usize {
        self.look(|writer| {
            let number = writer.owners.numbers.get(&worker);
            let slots = number.map(|number| writer.worker(*number).fact_slots());
            slots.into_iter().flatten().map(|slot| writer.slot(slot).held).sum()
        })
    }

    /// Memberships of `worker` in one tier. 0 for an unknown worker.
    ///
    /// # Cost
    /// O(1) besides the look-up of the worker.
    pub fn blocks_in(&self, worker: Worker, tier: Tier) -> usize {
        self.look(|writer| {
            let number = writer.owners.numbers.get(&worker);
            let slot = number.map(|number| writer.worker(*number).slots[tier as usize]);
            slot.filter(|slot| *slot != NONE).map_or(0, |slot| writer.slot(slot).held)
        })
    }

    /// Everything that `worker` holds, ascending; equal states give equal lists.
    ///
    /// # Consistency
    /// One moment.
    ///
    /// # Cost
    /// That of [`dump_worker`](Self::dump_worker), and O(n log n) for the worker's n blocks.
    pub fn memberships(&self, worker: Worker) -> Vec<Membership> {
        events::memberships(&self.dump_worker(worker))
    }

    /// Events that recreate what `worker` holds now in an empty index. See [`DumpEvent`].
    ///
    /// # Consistency
    /// One moment.
    ///
    /// # Cost
    /// O(n) for the worker's n blocks and the length of their prompts, 32 bytes of memory per
    /// block. Events of all workers wait while the names are copied, some nanoseconds per block.
    pub fn dump_worker(&self, worker: Worker) -> Vec<DumpEvent> {
        // Outside of the lock: allocating memory, and building events. The pin preserves the copied
        // runs.
        let pin = pin();
        let room = self.look(|writer| writer.measure(worker));
        let mut copied = Copied::with_room(room);
        self.look(|writer| writer.copy_of(worker, &mut copied));
        copied.events(&self.shared, &pin)
    }

    /// Sizes and counters.
    ///
    /// # Consistency
    /// Exact without concurrent writes; otherwise each number is from its own moment.
    ///
    /// # Cost
    /// O(workers).
    pub fn stats(&self) -> IndexStats {
        self.look(Writer::stats)
    }

    /// [`IndexStats::evicted_blocks_total`] alone.
    ///
    /// # Cost
    /// O(1).
    pub fn evicted_blocks_total(&self) -> u64 {
        self.look(|writer| writer.counters.evicted_blocks_total)
    }
}
