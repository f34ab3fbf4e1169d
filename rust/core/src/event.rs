//! Events of engines about their blocks, in terms of the domain. The codec decodes them.

use crate::ids::Tier;

/// One message of an engine's publisher.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Batch {
    /// Wall-clock time at the engine, seconds since 1970.
    pub ts: f64,
    /// Data-parallel rank, if the engine names one; overrides the rank of the publisher's
    /// registration.
    pub dp_rank: Option<u32>,
    /// Events in the order the engine saw them.
    pub events: Vec<Event>,
    /// Events of a type or with content that this version does not need: skipped, not fatal.
    pub skipped: u32,
    /// Events with invalid fields: dropped, the others of the batch are kept.
    pub malformed: u32,
    /// The field of the first of these that is invalid, and what is legal.
    pub malformed_reason: Option<&'static str>,
}

/// A change of a worker's blocks.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Blocks became reusable.
    Stored(Stored),
    /// Blocks were evicted.
    Removed(Removed),
    /// Everything on the device was dropped; slower tiers keep their content.
    Cleared,
}

/// A contiguous chain of blocks that became reusable.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Stored {
    /// The engine's names of the blocks, in chain order. Byte-string hashes keep their last 8 bytes
    /// (big endian), as in engines that publish integers; signed ones keep their bits. Groups other
    /// than full attention omit blocks that they do not keep.
    pub block_hashes: Vec<u64>,
    /// The block before the first one; `None` when the chain starts the prompt.
    pub parent: Option<u64>,
    /// Tokens of all the blocks; shape `[blocks * block_size]`. May be empty: engines that offload
    /// name blocks of slower tiers by hash alone, without tokens and parent. Of slower tiers, and of
    /// groups other than full attention, any number, because their events omit blocks.
    pub token_ids: Vec<u32>,
    /// Tokens in a block; 0 if an event without tokens does not contain it.
    pub block_size: u32,
    /// Numeric LoRA id of engines without adapter names.
    pub lora_id: Option<i64>,
    /// LoRA adapter's name.
    pub lora_name: Option<String>,
    /// Storage medium as the engine spells it; `None` means device.
    pub medium: Option<String>,
    /// Cache salt, if the engine has a field for it (SGLang).
    pub cache_salt: Option<String>,
    /// Per block, further inputs of the engine's hash (vLLM): LoRA name, multimodal items, cache
    /// salt. Empty if the engine sent none; otherwise shape `[blocks]`, where the number of tokens
    /// is exact.
    pub extra_keys: Vec<Option<Vec<ExtraKey>>>,
    /// Cache group of hybrid models; `None` for a single group.
    pub group_idx: Option<u32>,
    /// Kind of attention of the group; `None` and `full_attention` describe reuse of the whole prompt.
    pub spec_kind: Option<String>,
    /// Tokens that a sliding-window group attends to.
    pub sliding_window: Option<u32>,
    /// `LOCAL` or `REMOTE`, as seen from the publisher.
    pub locality: Option<String>,
    /// The store of a slower tier that holds the blocks, if the engine names it.
    pub ownership: Option<String>,
}

impl Stored {
    /// Whether the group keeps whole prompts: the engine reuses as much of a prompt as the group
    /// holds.
    pub fn is_full_attention(&self) -> bool {
        matches!(
            self.spec_kind.as_deref(),
            None | Some("full_attention" | "mla_attention" | "sink_full_attention")
        )
    }

    /// Location of the blocks; `None` for an unknown medium.
    pub fn tier(&self) -> Option<Tier> {
        tier_of(self.medium.as_deref())
    }

    /// The shared store with the blocks, if they are in one.
    pub fn shared_store(&self) -> Option<&str> {
        shared_store(self.locality.as_deref(), self.ownership.as_deref())
    }
}

/// One entry of a block's extra keys.
#[derive(Debug, Clone, PartialEq)]
pub enum ExtraKey {
    /// A plain string: LoRA name, cache salt or multimodal identifier, distinguished by position.
    Text(String),
    /// A multimodal identifier with the offset of its first token.
    Item {
        /// Content hash or uuid of the multimodal item.
        identifier: String,
        /// Token offset relative to the block; may be negative.
        offset: i64,
    },
    /// Digest of a block's prompt embeddings.
    Digest(Vec<u8>),
    /// Anything else, kept only as a hash of its bytes: it separates blocks and matches nothing.
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
    /// `LOCAL` or `REMOTE`, as seen from the publisher.
    pub locality: Option<String>,
    /// The store of a slower tier that held the blocks, if the engine names it.
    pub ownership: Option<String>,
}

impl Removed {
    /// Former location of the blocks; `None` for an unknown medium.
    pub fn tier(&self) -> Option<Tier> {
        tier_of(self.medium.as_deref())
    }

    /// The shared store that held the blocks, if they were in one.
    pub fn shared_store(&self) -> Option<&str> {
        shared_store(self.locality.as_deref(), self.ownership.as_deref())
    }
}

fn tier_of(medium: Option<&str>) -> Option<Tier> {
    medium.map_or(Some(Tier::Device), Tier::from_medium)
}

fn shared_store<'a>(locality: Option<&str>, ownership: Option<&'a str>) -> Option<&'a str> {
    let is_remote = locality.is_some_and(|locality| locality.eq_ignore_ascii_case("remote"));
    if is_remote { ownership } else { None }
}
