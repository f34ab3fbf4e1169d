//! The block index before the run trie, kept to measure what the trie is worth. Not maintained.
//!
//! Which worker holds which blocks: for a prompt, how many leading blocks does each worker hold.
//!
//! A *block* is known by its chain hash: the local hash of its tokens folded over the chain hash of
//! the block before it. Equal chain hash means equal prefix, whatever the engines call the block.
//! Identity (LoRA adapter, cache salt) is mixed into the local hashes by a seed, so prompts of
//! different identities never meet and the index needs no namespaces.
//!
//! The room, bottom up: `holders` (an immutable set of workers), `nodes` (chain hash -> who
//! holds it, lock-free), `holdings` with `ghosts` (what one worker calls its blocks),
//! `slots` (worker <-> dense number), `walk` (the query), `radix` (what ties them).
//!
//! What a worker *holds* is a set of blocks, and holes are legal: evicting the middle of a chain
//! leaves the rest held. What a prompt *scores* is the leading contiguous part only, so a block
//! behind a hole earns nothing until the hole is stored again.

use kvflash_core::hash::extend as chain;
use kvflash_core::ids::{InstanceId, Tier, Worker};

mod dump;
mod ghosts;
mod holders;
mod holdings;
mod matches;
mod nodes;
mod radix;
mod slots;
mod types;
mod walk;

pub use dump::restore;
pub use matches::{Match, Matches};
pub use radix::RadixIndex;
pub use types::{
    Block, CountMode, DEFAULT_SEED, DumpBlock, HeldBlock, IndexStats, Limits, MAX_WORKERS, Options,
    Parent, Rejection, RemoveOutcome, StoreOutcome,
};

/// What every block index answers. Implemented by [`RadixIndex`].
///
/// # Consistency
/// Calls that change one worker take effect one after the other; a query sees every change whose
/// call returned before the query began. A query that runs beside changes reads block by block: each
/// block it credits was held by that worker at some moment during the query. For a worker that
/// stores parents first and evicts children first the answer is a depth it really had.
pub trait BlockIndex: Send + Sync {
    /// Records that `worker` now holds `blocks`, a contiguous chain that follows `parent`.
    ///
    /// Each block is held in `tier` under the engine's name for it. The worker becomes known with
    /// its first accepted event. `seed` is the identity the local hashes were made with; it is kept
    /// for the children ([`BlockIndex::parent_seed`]) and changes no answer.
    ///
    /// An event is taken or rejected as a whole ([`StoreOutcome::rejected`]); within a taken event,
    /// blocks beyond [`Limits::max_blocks`] are refused one by one. A name that the worker already
    /// uses for other content moves: everything held under the old meaning is released first.
    ///
    /// # Cost
    /// O(blocks), each O(holders of that block) for copying its holder set.
    fn store(
        &self,
        worker: Worker,
        tier: Tier,
        parent: Option<Parent>,
        seed: u64,
        blocks: &[Block],
    ) -> StoreOutcome;

    /// Records that `worker` evicted the blocks it calls `engine_hashes` from `tier`.
    ///
    /// Names it does not hold there are counted and skipped; the rest of the list is processed.
    ///
    /// # Cost
    /// O(hashes), each O(holders of that block).
    fn remove(&self, worker: Worker, tier: Tier, engine_hashes: &[u64]) -> RemoveOutcome;

    /// Drops everything `worker` holds, in all tiers; it stays known. Returns the memberships dropped.
    ///
    /// # Cost
    /// O(blocks of that worker), whatever the size of the index.
    fn clear(&self, worker: Worker) -> usize;

    /// Drops everything `worker` holds and forgets it. False when it was not known.
    ///
    /// # Consistency
    /// From its return on, no query credits the worker until it stores again.
    ///
    /// # Cost
    /// O(blocks of that worker).
    fn remove_worker(&self, worker: Worker) -> bool;

    /// Removes the workers of all ranks of `instance_id`. Returns how many there were.
    fn remove_instance(&self, instance_id: InstanceId) -> usize;

    /// Finds, per worker, the leading blocks of the prompt `locals` that it holds, tier by tier.
    ///
    /// Replaces what `out` held. Workers without any match are left out; the order is unspecified.
    ///
    /// # Consistency
    /// See the trait. Never waits for a writer.
    ///
    /// # Cost
    /// One table probe per block up to the deepest match; nothing is allocated once `out` has grown
    /// to the workload. Lower tiers cost nothing while nobody holds blocks there.
    fn find_matches(&self, locals: &[u64], out: &mut Matches);

    /// Like [`BlockIndex::find_matches`], but stops as soon as one worker is left and reports the
    /// depth it had reached by then.
    ///
    /// Answers "who", not "how much": the last worker may hold more, and lower tiers are not walked
    /// (`host`, `disk` and `external` repeat `device`).
    fn find_matches_early_exit(&self, locals: &[u64], out: &mut Matches);

    /// Like [`BlockIndex::find_matches`], for a caller that has the chain hashes already.
    fn find_matches_by_sequence(&self, chains: &[u64], out: &mut Matches);

    /// The seed of a block that `worker` holds, or held until lately, under `engine_hash`.
    fn parent_seed(&self, worker: Worker, engine_hash: u64) -> Option<u64>;

    /// What `worker` holds in any tier under `engine_hash`: enough to store it in another tier.
    fn held_block(&self, worker: Worker, engine_hash: u64) -> Option<HeldBlock>;

    /// The known workers, ascending.
    fn workers(&self) -> Vec<Worker>;

    /// Memberships of `worker`: names held, counted per tier. 0 when it is not known.
    ///
    /// # Cost
    /// O(1) beside the look-up of the worker; does not wait for its events.
    fn blocks(&self, worker: Worker) -> usize;

    /// Everything `worker` holds, parents before children; equal states give equal dumps.
    ///
    /// [`restore`] puts a block into an index; the whole dump into an empty one gives an index that
    /// answers alike.
    ///
    /// # Consistency
    /// One moment of that worker: its events wait meanwhile.
    ///
    /// # Cost
    /// O(n log n) for the worker's n blocks, and as much memory.
    fn dump_worker(&self, worker: Worker) -> Vec<DumpBlock>;

    /// [`BlockIndex::dump_worker`] of all workers, ascending; each at a moment of its own.
    fn dump(&self) -> Vec<DumpBlock> {
        self.workers().into_iter().flat_map(|worker| self.dump_worker(worker)).collect()
    }

    /// Sizes and counters.
    ///
    /// # Consistency
    /// Exact when nothing is being written; each figure is of a moment of its own otherwise.
    ///
    /// # Cost
    /// O(workers); takes each worker's lock in turn.
    fn stats(&self) -> IndexStats;
}
