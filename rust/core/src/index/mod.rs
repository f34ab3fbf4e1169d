//! Which worker holds which blocks: for a prompt, how many leading blocks does each worker hold.
//!
//! Content is a tree of local block hashes: a block *is* its local hash together with the path that
//! leads to it. What an engine calls a block is only a name; a worker's name stands for one content at
//! a time, and engines need not agree. Identity (LoRA adapter, cache salt) is mixed into the local
//! hashes by a seed, so prompts of different identities never meet and the index needs no namespaces.
//!
//! What a worker *holds* is a set of blocks, and holes are legal: evicting the middle of a chain
//! leaves the rest held. What a prompt *scores* is the leading contiguous part only, so a block
//! behind a hole earns nothing until the hole is stored again.

use crate::ids::{InstanceId, Tier, Worker};

mod arena;
mod check;
pub mod groups;
mod matches;
pub mod snapshot;
mod trie;
mod types;

pub use matches::{Depth, Depths, ManyMatches, Match, Matches};
pub use trie::RadixIndex;
pub use types::{
    Block, CopyOutcome, CountMode, DEFAULT_SEED, DumpEvent, IndexStats, Limits, MAX_COPIES,
    MAX_WORKERS, Membership, Options, Rejection, RemoveOutcome, StoreOutcome,
};

/// What every block index answers: [`RadixIndex`], and in tests its twin.
///
/// # Consistency
/// Changes take effect one after the other; a query sees every change whose call returned before the
/// query began. A query that runs beside changes reads block by block: each block it credits was held
/// by that worker at some moment during the query. For a worker that stores parents first and evicts
/// children first the answer is a depth it really had.
pub trait BlockIndex: Send + Sync {
    /// Records that `worker` now holds `blocks`, a contiguous chain that follows `parent`.
    ///
    /// `parent` is the worker's name of the block before the first, held in any tier; `None` at a
    /// prompt's start. Each block is held in `tier` under the engine's name for it. The worker becomes
    /// known with its first accepted event. `seed` is the identity the local hashes were made with; it
    /// belongs to the content (equal content has equal seeds, the first one told stays) and is kept for
    /// the children ([`BlockIndex::parent_seed`]).
    ///
    /// An event is taken or rejected as a whole ([`StoreOutcome::rejected`]); a taken event is cut at
    /// the first block for which [`Limits::max_blocks`] leaves no room. A name that the worker already
    /// uses for other content moves: everything held under the old meaning is released first.
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

    /// Records that `worker` copied the blocks it calls `engine_hashes`, which it holds in some tier,
    /// to `tier` as well.
    ///
    /// # Cost
    /// O(hashes).
    fn copy(&self, worker: Worker, tier: Tier, engine_hashes: &[u64]) -> CopyOutcome;

    /// Records that `worker` evicted the blocks it calls `engine_hashes` from `tier`.
    ///
    /// Names it does not hold there are counted and skipped; the rest of the list is processed. A block that
    /// leaves the device is no longer predicted there either. Appends to `gone` the local hashes of the
    /// blocks that left the device.
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

    /// As [`evict`](Self::evict), for callers that do not ask which blocks went.
    fn remove(&self, worker: Worker, tier: Tier, engine_hashes: &[u64]) -> RemoveOutcome {
        self.evict(worker, tier, engine_hashes, None)
    }

    /// Drops everything `worker` holds, in all tiers, and what is predicted of it; it stays known.
    /// Returns the memberships dropped.
    ///
    /// # Cost
    /// O(blocks of that worker), whatever the size of the index.
    fn clear(&self, worker: Worker) -> usize;

    /// Drops what `worker` holds in one tier; with the device go its predictions too. It stays known.
    /// Returns the memberships dropped.
    ///
    /// # Cost
    /// O(blocks of that worker).
    fn clear_tier(&self, worker: Worker, tier: Tier) -> usize;

    /// Drops everything of `worker` and forgets it. False when it was not known.
    ///
    /// # Consistency
    /// From its return on, no query credits the worker until it stores again.
    ///
    /// # Cost
    /// O(blocks of that worker).
    fn remove_worker(&self, worker: Worker) -> bool;

    /// Removes the workers of all ranks of `instance_id`. Returns how many there were.
    fn remove_instance(&self, instance_id: InstanceId) -> usize;

    /// Predicts that `worker` will soon hold the prompt `locals`, all of it, because it was sent there.
    ///
    /// Predictions are a plane of their own: they never count as fact, appear in [`Match::predicted`]
    /// only, and end by age ([`Limits::predicted_ttl_ms`], counted from the last prediction of that
    /// block) or [history](Self::predict_within), by [`Limits::capacity_blocks`] or [`Limits::max_predicted`], or with their worker. Makes the worker known. Returns the
    /// blocks that were not predicted before; 0 also when no more workers can be known.
    ///
    /// # Cost
    /// O(blocks).
    fn predict(&self, worker: Worker, seed: u64, locals: &[u64]) -> usize;

    /// As [`predict`](Self::predict), for a worker whose history stands for its cache: predictions of it no
    /// longer end by age, but when they are more than `history_blocks`.
    ///
    /// Then the blocks go that were predicted longest ago, of one prompt the deepest first; a prompt that is
    /// longer itself keeps its beginning. The worker has a history from the first such call on until it is
    /// removed; each call sets its length, and `predict` leaves it as it is. What was predicted before
    /// for a time is forgotten with the first call. [`Limits::predicted_ttl_ms`] is the only limit that a
    /// history replaces.
    ///
    /// # Cost
    /// O(blocks), and O(log runs) for each run that blocks go from.
    fn predict_within(
        &self,
        worker: Worker,
        seed: u64,
        locals: &[u64],
        history_blocks: usize,
    ) -> usize;

    /// Tells the index what time it is, in milliseconds of any clock that does not go back, and lets go
    /// of predictions and blocks that are too old by then. Returns how many went.
    ///
    /// A block of a worker is too old when for [`Limits::ttl_ms`] the worker stored neither it nor
    /// anything behind it; then all its names go, in all tiers. Without that limit, blocks never are.
    ///
    /// # Consistency
    /// Events of others may take effect between parts of a call that lets go of many.
    ///
    /// # Cost
    /// O(what goes), and for each worker a look at every run now and then.
    fn advance_to(&self, now_ms: u64) -> usize;

    /// The time from which [`advance_to`](Self::advance_to) may find a prediction to let go of, `u64::MAX`
    /// without any: before it every prediction stands. Call `advance_to` before a query that comes later.
    ///
    /// # Cost
    /// One load; never waits for a writer.
    fn predictions_due_ms(&self) -> u64;

    /// Finds, per worker, the leading blocks of the prompt `locals` that it holds, tier by tier.
    ///
    /// Replaces what `out` held. Workers without any match are left out; the order is unspecified.
    ///
    /// # Consistency
    /// See the trait. Never waits for a writer.
    ///
    /// # Cost
    /// One table probe per branching point of the prompt, and a comparison of its blocks; nothing is
    /// allocated once `out` has grown to the workload. Lower tiers cost nothing while nobody holds
    /// blocks there.
    fn find_matches(&self, locals: &[u64], out: &mut Matches);

    /// Like [`BlockIndex::find_matches`], but stops as soon as one worker is left and reports the
    /// depth it had reached by then.
    ///
    /// Answers "who", not "how much": the last worker may hold more, and lower tiers and predictions are
    /// not looked at (`host`, `disk` and `external` repeat `device`, `predicted` is 0).
    fn find_matches_early_exit(&self, locals: &[u64], out: &mut Matches);

    /// Like [`BlockIndex::find_matches`], for several prompts in one call.
    ///
    /// Replaces what `out` held with an answer for each prompt, in their order.
    ///
    /// # Consistency
    /// As [`BlockIndex::find_matches`] for each prompt; prompts are not answered at one moment. However
    /// many they are, what the writer let go waits for a few dozen of them at most.
    ///
    /// # Cost
    /// That of the queries; what they all need is done once for a few dozen. Nothing is allocated once
    /// `out` has grown to the workload.
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

    /// Whether `worker` holds every one of `engine_hashes` in `tier`. True for none.
    ///
    /// # Cost
    /// O(hashes) under the writer's lock; it ends with the first one that is not held.
    fn holds_all(&self, worker: Worker, tier: Tier, engine_hashes: &[u64]) -> bool;

    /// What `worker` calls the leading blocks of the prompt `locals`, in any tier; `None` for a block that it
    /// does not hold. Ends where nobody ever held more of the prompt.
    ///
    /// # Cost
    /// O(blocks), under the writer's lock.
    fn names_along(&self, worker: Worker, locals: &[u64], out: &mut Vec<Option<u64>>);

    /// The known workers, ascending.
    fn workers(&self) -> Vec<Worker>;

    /// Memberships of `worker`: names held, counted per tier. 0 when it is not known.
    ///
    /// # Cost
    /// O(1) beside the look-up of the worker.
    fn blocks(&self, worker: Worker) -> usize;

    /// Memberships of `worker` in one tier. 0 when it is not known.
    ///
    /// # Cost
    /// O(1) beside the look-up of the worker.
    fn blocks_in(&self, worker: Worker, tier: Tier) -> usize;

    /// Everything `worker` holds, ascending; equal states give equal lists.
    ///
    /// # Consistency
    /// One moment: events wait meanwhile.
    ///
    /// # Cost
    /// O(n log n) for the worker's n blocks and the length of their prompts, and as much memory.
    fn memberships(&self, worker: Worker) -> Vec<Membership>;

    /// Events that make an empty index hold what `worker` holds now. See [`DumpEvent`].
    ///
    /// # Consistency
    /// One moment.
    ///
    /// # Cost
    /// O(n) for the worker's n blocks and the length of their prompts, 32 bytes of memory a block. Events
    /// of all workers wait while the names are copied, some nanoseconds a block.
    fn dump_worker(&self, worker: Worker) -> Vec<DumpEvent>;

    /// Sizes and counters.
    ///
    /// # Consistency
    /// Exact when nothing is being written; each figure is of a moment of its own otherwise.
    ///
    /// # Cost
    /// O(workers).
    fn stats(&self) -> IndexStats;

    /// [`IndexStats::evicted_blocks_total`] alone.
    ///
    /// # Cost
    /// O(1) where it is not that of [`stats`](Self::stats).
    fn evicted_blocks_total(&self) -> u64 {
        self.stats().evicted_blocks_total
    }
}
