//! The words of the index: what goes in, what comes out, what is counted.

use kvflash_core::ids::{Tier, Worker};

/// Seed of local hashes that carry neither a LoRA adapter nor a cache salt.
pub const DEFAULT_SEED: u64 = kvflash_core::hash::SEED;

/// The most workers one index can number.
pub const MAX_WORKERS: usize = 65_535;

/// One block of a stored event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Block {
    /// The engine's name of the block; opaque.
    pub engine_hash: u64,
    /// Hash of the block's own tokens and identity.
    pub local_hash: u64,
}

/// The block before the first one of a stored event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Parent {
    /// By the engine's name; the worker must hold it, or have held it until lately.
    Engine(u64),
    /// By chain hash, known from a dump; it need not be held by anyone.
    Chain(u64),
}

/// What a second store of the same name means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum CountMode {
    /// Nothing: the first remove ends the membership.
    #[default]
    Set,
    /// One more physical copy: the block is held until removed as often as it was stored.
    ///
    /// # Source
    /// vLLM may keep two physical blocks of one hash, and publishes the store and the removal of both.
    Copies,
}

/// What the index may grow to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most memberships (worker, tier, name) in the index; 0 means no limit.
    pub max_blocks: usize,
    /// Most workers; at most [`MAX_WORKERS`].
    pub max_workers: usize,
    /// Evicted names each worker may still name as parents. The cap is this or an eighth of the
    /// names the worker holds, whichever is more; the oldest go first.
    pub min_ghosts: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { max_blocks: 0, max_workers: MAX_WORKERS, min_ghosts: 1024 }
    }
}

/// How an index is built.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Options {
    /// What a second store of the same name means.
    pub count_mode: CountMode,
    /// What the index may grow to.
    pub limits: Limits,
    /// Distinct blocks for which room is made at once (9 to 18 bytes each); it grows beyond. Growing moves
    /// every entry to a larger table, which costs events up to half of their speed meanwhile.
    pub expected_blocks: usize,
    /// Keys the hash tables, so that nobody outside can aim prompts at one bucket. Changes no answer.
    pub hash_seed: u64,
}

/// Why a stored event was rejected as a whole. Nothing of it was kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rejection {
    /// The worker neither holds the parent nor held it lately.
    Orphan,
    /// A block is its own parent, or appears twice in the event.
    SelfReference,
    /// The worker is new and [`Limits::max_workers`] are known already.
    SlotsExhausted,
}

/// What became of a stored event: `added + duplicates + moved + refused` blocks, or rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StoreOutcome {
    /// Blocks now held that were not held under this name in this tier.
    pub added: u32,
    /// Blocks held already under this name in this tier.
    pub duplicates: u32,
    /// Blocks whose name stood for other content, which was released.
    pub moved: u32,
    /// Blocks refused because [`Limits::max_blocks`] is reached.
    pub refused: u32,
    /// Set when the event was rejected as a whole.
    pub rejected: Option<Rejection>,
}

impl StoreOutcome {
    pub(super) fn because_of(cause: Rejection) -> Self {
        Self { rejected: Some(cause), ..Self::default() }
    }
}

/// What became of a removed event: one of the three for every name in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RemoveOutcome {
    /// Memberships that ended.
    pub removed: u32,
    /// Names of which another copy is left ([`CountMode::Copies`] only).
    pub kept: u32,
    /// Names the worker does not hold in that tier.
    pub unknown: u32,
}

/// A block that a worker holds, and where it hangs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HeldBlock {
    /// The engine's name and the local hash.
    pub block: Block,
    /// Chain hash of the parent; `None` at a prompt's start.
    pub parent_chain: Option<u64>,
    /// Identity seed of the local hash.
    pub seed: u64,
}

/// One membership, as a dump carries it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DumpBlock {
    /// Who holds the block.
    pub worker: Worker,
    /// Where.
    pub tier: Tier,
    /// A name of the parent; `None` at a prompt's start and where the worker does not hold the parent.
    pub parent_engine: Option<u64>,
    /// Chain hash of the parent; `None` only at a prompt's start.
    pub parent_chain: Option<u64>,
    /// The engine's name of the block.
    pub engine_hash: u64,
    /// Hash of the block's own tokens and identity.
    pub local_hash: u64,
    /// Identity seed of the local hash.
    pub seed: u64,
    /// How often it must be removed; 1 unless [`CountMode::Copies`].
    pub copies: u32,
}

/// Sizes and counters of an index; counters only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IndexStats {
    /// Known workers.
    pub workers: usize,
    /// Pairs of worker and tier that hold at least one block.
    pub holders: usize,
    /// Distinct blocks held by anyone.
    pub unique_blocks: usize,
    /// Names held, counted per worker and tier.
    pub memberships: usize,
    /// Stored events rejected: parent unknown.
    pub orphans_total: u64,
    /// Stored events rejected: a block is its own ancestor or repeated.
    pub self_references_total: u64,
    /// Stored events rejected: no number left for a new worker.
    pub slots_exhausted_total: u64,
    /// Blocks refused: the index is full.
    pub refused_blocks_total: u64,
    /// Names in removed events that the worker did not hold in that tier.
    pub unknown_removals_total: u64,
    /// Blocks stored again under the same name.
    pub duplicate_blocks_total: u64,
    /// Blocks whose name changed its meaning.
    pub moved_blocks_total: u64,
    /// Bytes the index occupies, added up from its tables' capacities; an estimate.
    pub estimated_bytes: usize,
}
