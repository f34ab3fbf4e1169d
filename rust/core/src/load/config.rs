//! Settings of the table, and how a request uses blocks.

/// Limits and units of an [`ActiveSequences`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoadConfig {
    /// Tokens in a block; 0 while unknown (overlaps then save no tokens).
    pub block_size: u32,
    /// A request idle for longer than this is taken for leaked.
    pub expiry_ms: u64,
    /// Most requests at once.
    pub max_requests: usize,
    /// Count prompt tokens still to be prefilled; off where prefill happens elsewhere.
    pub track_prefill_tokens: bool,
    /// How fast workers prefill: by that, prompt tokens that are worked on count less and less.
    pub prefill_speed: PrefillSpeed,
    /// Tell beside the prompt tokens without a first token what should be left of them by now.
    pub estimates_queue: bool,
}

/// How fast a worker prefills.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub enum PrefillSpeed {
    /// Nobody knows: prompt tokens count in full until the request's first token.
    #[default]
    Unknown,
    /// Every worker so many prompt tokens in a second, finite and above 0.
    Told(f64),
    /// What each worker's first tokens have shown of late.
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
    /// These sequence hashes; workers keep one copy for all requests that share a block.
    Shared(&'a [u64]),
    /// So many blocks that no other request shares.
    Private(u32),
}

impl BlockUse<'_> {
    /// Blocks counted, duplicates included.
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
