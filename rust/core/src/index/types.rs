//! The words of the index: what goes in, what comes out, what is counted.

use crate::ids::Tier;

/// Seed of local hashes that carry neither a LoRA adapter nor a cache salt.
pub const DEFAULT_SEED: u64 = crate::hash::SEED;

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

/// Most ticks in [`Limits::ttl_ms`].
const TTL_TICKS: u64 = 128;

/// Copies of one block that [`CountMode::Copies`] tells apart. Who stores it more often than that says it
/// again and keeps no copies: a dump has an event for each.
pub const MAX_COPIES: u32 = 64;

/// What a second store of the same name means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum CountMode {
    /// Nothing: the first remove ends the membership.
    #[default]
    Set,
    /// One more physical copy: the block is held until removed as often as it was stored, or
    /// [`MAX_COPIES`] times.
    ///
    /// # Source
    /// vLLM may keep two physical blocks of one hash, and publishes the store and the removal of both.
    Copies,
}

/// What the index may grow to, and what happens there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most memberships (worker, tier, name) in the index; 0 means no limit. Stores beyond it are refused.
    pub max_blocks: usize,
    /// Most workers; at most [`MAX_WORKERS`].
    pub max_workers: usize,
    /// Most blocks (facts and predictions each) that one worker keeps; 0 means no limit. Beyond it its
    /// least recently stored ones go, deepest first.
    pub capacity_blocks: usize,
    /// Bytes the index may occupy; 0 means no limit, and less than [`Limits::MAX_BYTES_LEAST`] means that.
    /// From 15/16 of it on, the least recently stored blocks of all workers go, deepest first. What finds
    /// no room even so, because readers hold back what went, is refused.
    pub max_bytes: usize,
    /// Most predicted blocks, counted per worker; 0 means no limit. Beyond it the least recently
    /// predicted ones of all workers go, deepest first, until [`Limits::predicted_target`] are left.
    pub max_predicted: usize,
    /// What is left then; at most `max_predicted`.
    pub predicted_target: usize,
    /// How long a prediction of a worker without a history stands, in milliseconds; 0 means until it is
    /// pushed out.
    pub predicted_ttl_ms: u64,
    /// How long a block that a worker holds stands, in milliseconds, from when the worker stored it last, or
    /// anything behind it; 0 means until it is removed. It goes at most a 64th of this and 2 ms later.
    pub ttl_ms: u64,
}

impl Limits {
    /// The smallest budget in bytes: tables come in pages, and some of each must fit.
    pub const MAX_BYTES_LEAST: usize = 512 * 1024;

    /// Milliseconds of one tick, in which ages of facts are counted.
    fn tick_ms(&self) -> u64 {
        self.ttl_ms.div_ceil(TTL_TICKS).max(1)
    }

    /// The tick that has begun at `now_ms`.
    pub fn tick_at(&self, now_ms: u64) -> u64 {
        now_ms / self.tick_ms()
    }

    /// The tick with which a block runs out that is stored at `now_ms`.
    pub fn end_tick(&self, now_ms: u64) -> u64 {
        let tick_ms = self.tick_ms();
        now_ms.div_ceil(tick_ms).saturating_add(self.ttl_ms.div_ceil(tick_ms))
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_blocks: 0,
            max_workers: MAX_WORKERS,
            capacity_blocks: 0,
            max_bytes: 0,
            max_predicted: 0,
            predicted_target: 0,
            predicted_ttl_ms: 0,
            ttl_ms: 0,
        }
    }
}

/// How an index is built.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Options {
    /// What a second store of the same name means.
    pub count_mode: CountMode,
    /// What the index may grow to.
    pub limits: Limits,
    /// Keys the hash tables, so that nobody outside can aim prompts at one bucket. Changes no answer.
    pub hash_seed: u64,
}

/// Why a stored event was rejected as a whole. Nothing of it was kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rejection {
    /// The worker does not hold the parent in any tier.
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
    /// Blocks refused because [`Limits::max_blocks`] is reached, or [`Limits::max_bytes`] leaves no room:
    /// the first one that found none and all behind it.
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

/// What became of the names that a worker copied to another tier: one of the four for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CopyOutcome {
    /// Names now held in that tier that were not.
    pub added: u32,
    /// Names held there already.
    pub duplicates: u32,
    /// Names refused because [`Limits::max_blocks`] or [`Limits::max_bytes`] leaves no room.
    pub refused: u32,
    /// Names the worker holds in no tier.
    pub unknown: u32,
}

/// One name that a worker holds in one tier, with the content it stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Membership {
    /// Chain hash of the block: equal means equal prompt up to its end.
    pub chain: u64,
    /// The engine's name of the block.
    pub engine_hash: u64,
    /// Where it is held.
    pub tier: Tier,
    /// Identity seed of its prompt.
    pub seed: u64,
    /// How often it must be removed; 1 unless [`CountMode::Copies`].
    pub copies: u32,
}

/// One step of a dump. Played in order into an empty index, a worker's steps make it hold the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DumpEvent {
    /// A contiguous chain is held.
    Stored {
        /// Where.
        tier: Tier,
        /// Name of the block before the first; `None` at a prompt's start.
        parent: Option<u64>,
        /// Identity seed.
        seed: u64,
        /// The blocks in order.
        blocks: Vec<Block>,
    },
    /// Blocks that were only stored so that others find their place are let go again.
    Removed {
        /// Where.
        tier: Tier,
        /// Names.
        names: Vec<u64>,
    },
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
    /// Predicted blocks, counted per worker.
    pub predicted: usize,
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
    /// Blocks and predictions pushed out by a limit.
    pub evicted_blocks_total: u64,
    /// Blocks and predictions that ran out of time, and predictions that ran out of a history.
    pub expired_blocks_total: u64,
    /// Bytes the index occupies, added up from what it asked of the allocator.
    pub bytes: usize,
}
