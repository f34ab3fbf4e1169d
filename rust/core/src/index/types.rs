//! The types of the index: inputs, results, counters.

use crate::ids::Tier;

/// Seed of local hashes without a LoRA adapter and a cache salt.
pub const DEFAULT_SEED: u64 = crate::hash::SEED;

/// Maximum workers of one index.
pub const MAX_WORKERS: usize = 65_535;

/// One block of a stored event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Block {
    /// The engine's name of the block; opaque.
    pub engine_hash: u64,
    /// Hash of the block's own tokens and identity.
    pub local_hash: u64,
}

/// Maximum ticks in [`Limits::ttl_ms`].
const TTL_TICKS: u64 = 128;

/// Distinguished copies of one block with [`CountMode::Copies`]. An engine that stores it more
/// often repeats itself and keeps no copies: a dump has an event for each.
pub const MAX_COPIES: u32 = 64;

named! {
    /// Meaning of a repeated store of a name.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub enum CountMode {
        /// No effect: the first remove ends the membership.
        #[default]
        Set = "set",
        /// Another physical copy: the block is held until it was removed as often as it was stored,
        /// or [`MAX_COPIES`] times.
        ///
        /// # Source
        /// vLLM may keep two physical blocks of one hash, and publishes the store and the removal of
        /// both.
        Copies = "copies",
    }
}

/// Limits of the index, and what happens at each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum memberships (worker, tier, name) in the index; 0 means no limit. Further stores are
    /// refused.
    pub max_blocks: usize,
    /// Maximum workers; at most [`MAX_WORKERS`].
    pub max_workers: usize,
    /// Maximum blocks (held and predicted separately) per worker; 0 means no limit. Above it the
    /// least recently stored ones are evicted, deepest first.
    pub capacity_blocks: usize,
    /// Bytes that the index may occupy; 0 means no limit, and the minimum is
    /// [`Limits::MAX_BYTES_LEAST`]. From 15/16 of it on, the least recently stored blocks of all
    /// workers are evicted, deepest first. Stores that find no room even then, because readers
    /// delay the freeing, are refused.
    pub max_bytes: usize,
    /// Maximum predicted blocks, counted per worker; 0 means no limit. Above it the least recently
    /// predicted ones of all workers are evicted, deepest first, down to
    /// [`Limits::predicted_target`].
    pub max_predicted: usize,
    /// Remaining blocks after that; at most `max_predicted`.
    pub predicted_target: usize,
    /// Lifetime of a prediction of a worker without a history, in milliseconds; 0 means until it is
    /// evicted.
    pub predicted_ttl_ms: u64,
    /// Lifetime of a held block in milliseconds, counted from when the worker last stored it or any
    /// block after it; 0 means until it is removed. It is removed at most 1/64 of this and 2 ms
    /// later.
    pub ttl_ms: u64,
}

impl Limits {
    /// The smallest budget in bytes: tables are allocated in pages, and some of each must fit.
    pub const MAX_BYTES_LEAST: usize = 512 * 1024;

    /// Milliseconds of one tick, the unit of ages of held blocks.
    fn tick_ms(&self) -> u64 {
        self.ttl_ms.div_ceil(TTL_TICKS).max(1)
    }

    /// The tick at `now_ms`.
    pub fn tick_at(&self, now_ms: u64) -> u64 {
        now_ms / self.tick_ms()
    }

    /// The tick in which a block stored at `now_ms` expires.
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

/// Options of an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Options {
    /// Meaning of a repeated store of a name.
    pub count_mode: CountMode,
    /// Limits of the index.
    pub limits: Limits,
    /// Keys the hash tables, so that clients can't aim prompts at one bucket. Does not change
    /// results.
    pub hash_seed: u64,
}

/// Why a stored event was rejected as a whole. Nothing of it was kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rejection {
    /// The worker does not hold the parent in any tier.
    Orphan,
    /// A block is its own parent, or appears twice in the event.
    SelfReference,
    /// The worker is new and [`Limits::max_workers`] are already known.
    SlotsExhausted,
}

/// Outcome of a stored event: `added + duplicates + moved + refused` blocks, or rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StoreOutcome {
    /// Blocks now held that were not held under this name in this tier.
    pub added: u32,
    /// Blocks already held under this name in this tier.
    pub duplicates: u32,
    /// Blocks with a name that stood for other content, which was released.
    pub moved: u32,
    /// Blocks refused because [`Limits::max_blocks`] is reached, or [`Limits::max_bytes`] leaves no
    /// room: the first one without room and all after it.
    pub refused: u32,
    /// Set if the event was rejected as a whole.
    pub rejected: Option<Rejection>,
}

/// Outcome of a removed event: one of the three for every name in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RemoveOutcome {
    /// Memberships that ended.
    pub removed: u32,
    /// Names with remaining copies ([`CountMode::Copies`] only).
    pub kept: u32,
    /// Names that the worker does not hold in that tier.
    pub unknown: u32,
}

/// Outcome of copying names to another tier: one of the four for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CopyOutcome {
    /// Names newly held in that tier.
    pub added: u32,
    /// Names already held there.
    pub duplicates: u32,
    /// Names refused because [`Limits::max_blocks`] or [`Limits::max_bytes`] leaves no room.
    pub refused: u32,
    /// Names that the worker holds in no tier.
    pub unknown: u32,
}

/// One name that a worker holds in one tier, with its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Membership {
    /// Chain hash of the block: equal for equal prompts up to its end.
    pub chain: u64,
    /// The engine's name of the block.
    pub engine_hash: u64,
    /// The tier that holds it.
    pub tier: Tier,
    /// Identity seed of its prompt.
    pub seed: u64,
    /// How often it must be removed; 1 without [`CountMode::Copies`].
    pub copies: u32,
}

/// One step of a dump. Applied in order to an empty index, a worker's steps recreate its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DumpEvent {
    /// A contiguous chain is held.
    Stored {
        /// The tier.
        tier: Tier,
        /// Name of the block before the first; `None` at a prompt's start.
        parent: Option<u64>,
        /// Identity seed.
        seed: u64,
        /// The blocks in order.
        blocks: Vec<Block>,
    },
    /// Blocks that were stored only as parents of others are removed again.
    Removed {
        /// The tier.
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
    /// Distinct blocks with any holder.
    pub unique_blocks: usize,
    /// Names held, counted per worker and tier.
    pub memberships: usize,
    /// Predicted blocks, counted per worker.
    pub predicted: usize,
    /// Rejected stored events: unknown parent.
    pub orphans_total: u64,
    /// Rejected stored events: a block is its own ancestor or repeated.
    pub self_references_total: u64,
    /// Rejected stored events: no number left for a new worker.
    pub slots_exhausted_total: u64,
    /// Refused blocks: the index is full.
    pub refused_blocks_total: u64,
    /// Names in removed events that the worker did not hold in that tier.
    pub unknown_removals_total: u64,
    /// Blocks stored again under the same name.
    pub duplicate_blocks_total: u64,
    /// Blocks with a name that changed its meaning.
    pub moved_blocks_total: u64,
    /// Blocks and predictions evicted by a limit.
    pub evicted_blocks_total: u64,
    /// Expired blocks and predictions, and predictions that exceeded a history.
    pub expired_blocks_total: u64,
    /// Bytes that the index occupies: the sum of its allocations.
    pub bytes: usize,
}
