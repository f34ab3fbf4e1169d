//! Settings of the table, and the ways in which a request uses blocks.

/// Limits and units of an [`ActiveSequences`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoadConfig {
    /// Tokens in a block; 0 while unknown (overlaps then save no tokens).
    pub block_size: u32,
    /// A request idle for longer than this is considered leaked; at least 1.
    pub expiry_ms: u64,
    /// Maximum active requests; at least 1.
    pub max_requests: usize,
    /// Count prompt tokens until the request's first token; off if prefill happens elsewhere.
    pub track_prefill_tokens: bool,
    /// The workers' prefill speed, by which prompt tokens in progress count less over time.
    pub prefill_speed: PrefillSpeed,
    /// Report the estimated rest of prompt tokens without a first token, besides the tokens
    /// themselves.
    pub estimates_queue: bool,
}

/// How fast a worker prefills.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub enum PrefillSpeed {
    /// Unknown: prompt tokens count in full until the request's first token.
    #[default]
    Unknown,
    /// This many prompt tokens per second for every worker, finite and above 0.
    Told(f64),
    /// Learned from each worker's recent first tokens.
    Learned,
}

impl Default for LoadConfig {
    fn default() -> Self {
        Self {
            block_size: 0,
            expiry_ms: 300_000,
            max_requests: 65_536,
            track_prefill_tokens: true,
            prefill_speed: PrefillSpeed::default(),
            estimates_queue: false,
        }
    }
}

/// The blocks that a request occupies on its worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockUse<'a> {
    /// Blocks are not counted.
    Untracked,
    /// These sequence hashes, each of a block with all blocks before it; workers keep one copy for all
    /// requests that share a block.
    Shared(&'a [u64]),
    /// This many blocks that no other request shares.
    Private(u32),
}

impl BlockUse<'_> {
    /// Counted blocks, including duplicates.
    pub fn len(&self) -> u32 {
        match self {
            Self::Untracked => 0,
            Self::Shared(hashes) => hashes.len() as u32,
            Self::Private(count) => *count,
        }
    }

    /// Whether no block is counted.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
