//! Which worker holds which blocks: for a prompt, the number of leading blocks that each worker
//! holds.
//!
//! Content is a tree of local block hashes: a block *is* its local hash together with the path that
//! leads to it. An engine's block hash is only a name; a worker's name stands for one content at a
//! time, and engines need not agree on names. Identity (LoRA adapter, cache salt) is mixed into the
//! local hashes by a seed, so prompts of different identities never match and the index needs no
//! namespaces.
//!
//! A worker *holds* a set of blocks, which may have holes: evicting the middle of a chain leaves
//! the rest held. A prompt *scores* only the leading contiguous part, so a block after a hole does
//! not count until the hole is stored again.

use crate::ids::{InstanceId, Tier, Worker};

mod arena;
mod check;
pub mod groups;
mod matches;
pub mod snapshot;
mod trie;
mod types;

pub use matches::{Depth, Depths, ManyMatches, Match, Matches, frequencies};
pub use trie::RadixIndex;
pub use types::{
    Block, CopyOutcome, CountMode, DEFAULT_SEED, DumpEvent, IndexStats, Limits, MAX_COPIES,
    MAX_WORKERS, Membership, Options, Rejection, RemoveOutcome, StoreOutcome,
};

/// The interface of every block index: [`RadixIndex`], and its twin in tests.
///
/// # Consistency
/// Changes take effect one after the other; a query sees every change whose call returned before
/// the query began. A query concurrent with changes reads block by block: the worker held each
/// credited block at some moment during the query. For a worker that stores parents first and
/// evicts children first, the result is a depth that it really had.
pub trait BlockIndex: Send + Sync {
    /// Records that `worker` now holds `blocks`, a contiguous chain that follows `parent`.
    ///
    /// `parent` is the worker's name of the block before the first, held in any tier; `None` at a
    /// prompt's start. Each block is held in `tier` under the engine's name for it. The worker
    /// becomes known with its first accepted event. `seed` is the identity in the local hashes. It
    /// is part of the content (equal content has equal seeds; the first one is kept) and is kept
    /// for the children ([`BlockIndex::parent_seed`]).
    ///
    /// An event is accepted or rejected as a whole ([`StoreOutcome::rejected`]). An accepted event
    /// is truncated at the first block for which [`Limits::max_blocks`] leaves no room. If the
    /// worker already uses a name for other content, everything held under the old meaning is
    /// released first.
    ///
    /// # Cost
    /// O(blocks).
    fn store(
        &self,
        worker: Worker,
        tier: Tier,
        parent: Option<u64>,
        seed: u64,
        blocks: &[Block],
    ) -> StoreOutcome;

    /// Records that `worker` copied the blocks named `engine_hashes`, which it holds in some tier,
    /// to `tier` as well.
    ///
    /// # Cost
    /// O(hashes).
    fn copy(&self, worker: Worker, tier: Tier, engine_hashes: &[u64]) -> CopyOutcome;

    /// Records that `worker` evicted the blocks named `engine_hashes` from `tier`.
    ///
    /// Names that it does not hold there are counted and skipped; the rest of the list is
    /// processed. A block that leaves the device is no longer predicted there. Appends the local
    /// hashes of the blocks that left the device to `gone`.
    ///
    /// # Cost
    /// O(hashes).
    fn evict(
        &self,
        worker: Worker,
        tier: Tier,
        engine_hashes: &[u64],
        gone: Option<&mut Vec<u64>>,
    ) -> RemoveOutcome;

    /// As [`evict`](Self::evict), without reporting which blocks were removed.
    fn remove(&self, worker: Worker, tier: Tier, engine_hashes: &[u64]) -> RemoveOutcome {
        self.evict(worker, tier, engine_hashes, None)
    }

    /// Drops everything that `worker` holds or is predicted to hold, in all tiers; it stays known.
    /// Returns the number of dropped memberships.
    ///
    /// # Cost
    /// O(blocks of that worker), independent of the size of the index.
    fn clear(&self, worker: Worker) -> usize;

    /// Drops everything that `worker` holds in one tier, for the device including predictions. It
    /// stays known. Returns the number of dropped memberships.
    ///
    /// # Cost
    /// O(blocks of that worker).
    fn clear_tier(&self, worker: Worker, tier: Tier) -> usize;

    /// Drops everything of `worker` and forgets it. False if it was unknown.
    ///
    /// # Consistency
    /// After it returns, no query credits the worker until it stores again.
    ///
    /// # Cost
    /// O(blocks of that worker).
    fn remove_worker(&self, worker: Worker) -> bool;

    /// Removes the workers of all ranks of `instance_id`. Returns their number.
    fn remove_instance(&self, instance_id: InstanceId) -> usize;

    /// Predicts that `worker` will soon hold the whole prompt `locals`, because it was sent there.
    ///
    /// Predictions are separate: they never count as held, appear only in [`Match::predicted`], and
    /// end by age ([`Limits::predicted_ttl_ms`], counted from the last prediction of that block) or
    /// [history](Self::predict_within), by [`Limits::capacity_blocks`] or
    /// [`Limits::max_predicted`], or with their worker. Makes the worker known. Returns the number
    /// of blocks that were not predicted before; 0 also if no more workers can be added.
    ///
    /// # Cost
    /// O(blocks).
    fn predict(&self, worker: Worker, seed: u64, locals: &[u64]) -> usize;

    /// As [`predict`](Self::predict), for a worker with a history in place of its cache: its
    /// predictions end not by age, but when they exceed `history_blocks`.
    ///
    /// The oldest predictions are then dropped, the deepest first within one prompt; a prompt
    /// longer than the limit keeps its beginning. The history begins with the first such call and
    /// lasts until the worker is removed; each call sets its length, `predict` does not change it.
    /// The first call drops predictions with an age. A history replaces only
    /// [`Limits::predicted_ttl_ms`] and no other limit.
    ///
    /// # Cost
    /// O(blocks), and O(log runs) for each run that loses blocks.
    fn predict_within(
        &self,
        worker: Worker,
        seed: u64,
        locals: &[u64],
        history_blocks: usize,
    ) -> usize;

    /// Sets the time, in milliseconds of any monotonic clock, and drops predictions and blocks that
    /// have expired by then. Returns their number.
    ///
    /// A worker's block expires if for [`Limits::ttl_ms`] the worker stored neither it nor any
    /// block after it; then all its names are dropped, in all tiers. Without that limit blocks
    /// never expire.
    ///
    /// # Consistency
    /// Other events may take effect between parts of a call that drops many.
    ///
    /// # Cost
    /// O(dropped blocks), and occasionally a visit of every run of each worker.
    fn advance_to(&self, now_ms: u64) -> usize;

    /// The time from which [`advance_to`](Self::advance_to) may drop a prediction, `u64::MAX`
    /// without any: before it all predictions are valid. Call `advance_to` before a later query.
    ///
    /// # Cost
    /// One load; never waits for a writer.
    fn predictions_due_ms(&self) -> u64;

    /// Finds, per worker, the leading blocks of the prompt `locals` that it holds, tier by tier.
    ///
    /// Replaces the content of `out`. Workers without any match are omitted; the order is
    /// unspecified.
    ///
    /// # Consistency
    /// See the trait. Never waits for a writer.
    ///
    /// # Cost
    /// One table probe per branching point of the prompt, and a comparison of its blocks. Allocates
    /// nothing once `out` has grown to the workload. Lower tiers cost nothing while no worker holds
    /// blocks there.
    fn find_matches(&self, locals: &[u64], out: &mut Matches);

    /// Like [`BlockIndex::find_matches`], but stops when only one worker is left and reports the
    /// depth reached by then.
    ///
    /// Tells which worker, not how much: the last worker may hold more, and lower tiers and
    /// predictions are not examined (`host`, `disk` and `external` repeat `device`, `predicted` is
    /// 0).
    fn find_matches_early_exit(&self, locals: &[u64], out: &mut Matches);

    /// Like [`BlockIndex::find_matches`], for several prompts in one call.
    ///
    /// Replaces the content of `out` with a result for each prompt, in order.
    ///
    /// # Consistency
    /// As [`BlockIndex::find_matches`] for each prompt, not at one common moment. Memory that the
    /// writer released waits for a few dozen prompts at most, however many there are.
    ///
    /// # Cost
    /// That of the queries, with shared work done once per few dozen. Allocates nothing once `out`
    /// has grown to the workload.
    fn find_many(&self, prompts: &[&[u64]], out: &mut ManyMatches) {
        let mut one = Matches::new();
        out.clear();
        for prompt in prompts {
            self.find_matches(prompt, &mut one);
            out.push(one.as_slice());
        }
    }

    /// The seed of a block that `worker` holds under `engine_hash`.
    fn parent_seed(&self, worker: Worker, engine_hash: u64) -> Option<u64>;

    /// Whether `worker` holds every one of `engine_hashes` in `tier`. True for an empty list.
    ///
    /// # Cost
    /// O(hashes) under the writer's lock; stops at the first name that is not held.
    fn holds_all(&self, worker: Worker, tier: Tier, engine_hashes: &[u64]) -> bool;

    /// The names that `worker` uses for the leading blocks of the prompt `locals`, in any tier;
    /// `None` for a block that it does not hold. Ends where no worker ever held more of the prompt.
    ///
    /// # Cost
    /// O(blocks), under the writer's lock.
    fn names_along(&self, worker: Worker, locals: &[u64], out: &mut Vec<Option<u64>>);

    /// The known workers, ascending.
    fn workers(&self) -> Vec<Worker>;

    /// Memberships of `worker`: names held, counted per tier. 0 for an unknown worker.
    ///
    /// # Cost
    /// O(1) besides the look-up of the worker.
    fn blocks(&self, worker: Worker) -> usize;

    /// Memberships of `worker` in one tier. 0 for an unknown worker.
    ///
    /// # Cost
    /// O(1) besides the look-up of the worker.
    fn blocks_in(&self, worker: Worker, tier: Tier) -> usize;

    /// Everything that `worker` holds, ascending; equal states give equal lists.
    ///
    /// # Consistency
    /// One moment.
    ///
    /// # Cost
    /// That of [`dump_worker`](Self::dump_worker), and O(n log n) for the worker's n blocks.
    fn memberships(&self, worker: Worker) -> Vec<Membership>;

    /// Events that recreate what `worker` holds now in an empty index. See [`DumpEvent`].
    ///
    /// # Consistency
    /// One moment.
    ///
    /// # Cost
    /// O(n) for the worker's n blocks and the length of their prompts, 32 bytes of memory per
    /// block. Events of all workers wait while the names are copied, some nanoseconds per block.
    fn dump_worker(&self, worker: Worker) -> Vec<DumpEvent>;

    /// Sizes and counters.
    ///
    /// # Consistency
    /// Exact without concurrent writes; otherwise each number is from its own moment.
    ///
    /// # Cost
    /// O(workers).
    fn stats(&self) -> IndexStats;

    /// [`IndexStats::evicted_blocks_total`] alone.
    ///
    /// # Cost
    /// O(1), or that of [`stats`](Self::stats).
    fn evicted_blocks_total(&self) -> u64 {
        self.stats().evicted_blocks_total
    }
}
