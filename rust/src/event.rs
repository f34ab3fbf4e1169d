//! What engines say about their blocks, as the domain means it. The codec makes these from bytes.

/// One message of an engine's publisher.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Batch {
    /// Wall-clock time at the engine, seconds since 1970.
    pub ts: f64,
    /// Data-parallel rank, where the engine names one; overrides the rank the publisher was registered with.
    pub dp_rank: Option<u32>,
    /// Events in the order the engine saw them.
    pub events: Vec<Event>,
    /// Events of a type or with content that this version has no use for: skipped, not fatal.
    pub skipped: u32,
    /// Events whose fields are not what they must be: dropped, the others of the batch are kept.
    pub malformed: u32,
}

/// A change of what a worker holds.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Blocks became reusable.
    Stored(Stored),
    /// Blocks were evicted.
    Removed(Removed),
    /// Everything was dropped (all tiers of the publishing worker).
    Cleared,
}

/// A contiguous chain of blocks that became reusable.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Stored {
    /// The engine's names of the blocks, in chain order. Byte-string hashes keep their last 8 bytes
    /// (big endian), as engines do themselves when they publish integers; signed ones keep their bits.
    pub block_hashes: Vec<u64>,
    /// The block before the first one; `None` when the chain starts the prompt.
    pub parent: Option<u64>,
    /// Tokens of all the blocks; shape `[blocks * block_size]`. Or empty: engines that offload name
    /// blocks of farther tiers by hash alone, without tokens and parent.
    pub token_ids: Vec<u32>,
    /// Tokens in a block; 0 where an event without tokens does not say.
    pub block_size: u32,
    /// Numeric LoRA id of engines that know no name.
    pub lora_id: Option<i64>,
    /// LoRA adapter's name.
    pub lora_name: Option<String>,
    /// Storage medium as the engine spells it; `None` means device.
    pub medium: Option<String>,
    /// Cache salt, where the engine has a field for it (SGLang).
    pub cache_salt: Option<String>,
    /// Per block, what else entered the engine's hash (vLLM): LoRA name, multimodal items, cache salt.
    /// Empty when the engine sent none; else shape `[blocks]`.
    pub extra_keys: Vec<Option<Vec<ExtraKey>>>,
    /// Cache group of hybrid models; `None` where the engine has one group.
    pub group_idx: Option<u32>,
    /// Kind of attention of the group; `None` and `full_attention` describe reuse of the whole prompt.
    pub spec_kind: Option<String>,
}

/// One entry of a block's extra keys.
#[derive(Debug, Clone, PartialEq)]
pub enum ExtraKey {
    /// A plain string: LoRA name, cache salt or multimodal identifier, told apart by position.
    Text(String),
    /// A multimodal identifier with the offset of its first token.
    Item {
        /// Content hash or uuid of the multimodal item.
        identifier: String,
        /// Token offset relative to the block; may be negative.
        offset: i64,
    },
    /// Anything else, kept only as a hash of its bytes: it keeps blocks apart and matches nothing.
    Opaque(u64),
}

/// Blocks that were evicted.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Removed {
    /// The engine's names of the blocks, in eviction order.
    pub block_hashes: Vec<u64>,
    /// Storage medium as the engine spells it; `None` means device.
    pub medium: Option<String>,
    /// Cache group of hybrid models.
    pub group_idx: Option<u32>,
}
