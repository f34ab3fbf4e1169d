//! vLLM's own block hashes, called *names* here.
//!
//! A name is the last 8 bytes of `H((parent digest, token ids, extra keys))`, with the tuple
//! serialized as in Python. The first block's parent is `H(seed)`. A router that knows the scheme
//! can look up an engine's events by name, and needs no event to connect names with tokens.
//!
//! # Source
//! vLLM 0.32, `v1/core/kv_cache_utils.py` (`hash_block_tokens`, `generate_block_hash_extra_keys`)
//! and `utils/hashing.py`. Tags on the extra keys and the adapter's path are those of that version;
//! older versions give other names to blocks with extra keys.

mod cache;
mod cbor;
mod keys;
mod pickle;

use std::sync::Arc;

use sha2::{Digest as _, Sha256};
use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_128;

pub use cache::NameCache;
use keys::KeysOfBlocks;
pub(super) use keys::MediaOfBlock;
pub use keys::{Key, MediaItem, NameKeys};

named! {
    /// vLLM's `--prefix-caching-hash-algo`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum NameAlgorithm {
        /// SHA-256 of a pickle, vLLM's default.
        Sha256 = "sha256",
        /// SHA-256 of canonical CBOR.
        Sha256Cbor = "sha256_cbor",
        /// XXH3 with 128 bits of a pickle.
        Xxhash = "xxhash",
        /// XXH3 with 128 bits of canonical CBOR.
        XxhashCbor = "xxhash_cbor",
    }
}

impl NameAlgorithm {
    fn is_pickle(self) -> bool {
        matches!(self, Self::Sha256 | Self::Xxhash)
    }

    fn digest(self, bytes: &[u8]) -> NameDigest {
        match self {
            Self::Sha256 | Self::Sha256Cbor => {
                NameDigest { bytes: Sha256::digest(bytes).into(), len: 32 }
            }
            Self::Xxhash | Self::XxhashCbor => {
                let mut digest = NameDigest { bytes: [0; 32], len: 16 };
                digest.bytes[..16].copy_from_slice(&xxh3_128(bytes).to_be_bytes());
                digest
            }
        }
    }
}

/// The inputs of an engine's names besides the prompt and the block size.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct NameScheme {
    /// The engine's `--prefix-caching-hash-algo`.
    pub algorithm: NameAlgorithm,
    /// The engine's `PYTHONHASHSEED`, or [`DEFAULT_SEED`](Self::DEFAULT_SEED) if it is unset.
    ///
    /// Without `PYTHONHASHSEED` the xxhash algorithms use a random seed in each process.
    pub seed: Arc<str>,
}

impl NameScheme {
    /// The seed of an engine with SHA-256 and without `PYTHONHASHSEED`.
    pub const DEFAULT_SEED: &str = "vllm-none-hash";

    /// A scheme of that algorithm and seed.
    pub fn new(algorithm: NameAlgorithm, seed: &str) -> Self {
        Self { algorithm, seed: seed.into() }
    }
}

impl Default for NameScheme {
    /// The scheme of an engine with default settings.
    fn default() -> Self {
        Self::new(NameAlgorithm::Sha256, Self::DEFAULT_SEED)
    }
}

/// Digest of a block and everything before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NameDigest {
    bytes: [u8; 32],
    len: u8,
}

impl NameDigest {
    /// The engine's digest: 32 bytes of SHA-256, or 16 of XXH3.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len.into()]
    }

    /// The block's name in events: the last 8 bytes, big-endian.
    pub fn name(&self) -> u64 {
        let last = self.as_bytes().last_chunk().expect("a digest has at least 16 bytes");
        u64::from_be_bytes(*last)
    }
}

/// The chain of a prompt's names: the parent's digest, and a buffer reused for every block.
#[derive(Debug, Clone)]
pub struct Namer {
    algorithm: NameAlgorithm,
    /// Digest of the last block, or before the first one that of the seed.
    parent: NameDigest,
    buffer: Vec<u8>,
}

impl Namer {
    /// The chain before the first block of a prompt.
    pub fn new(scheme: &NameScheme) -> Self {
        let mut buffer = Vec::new();
        match scheme.algorithm.is_pickle() {
            true => pickle::text(&scheme.seed, &mut buffer),
            false => cbor::text(&scheme.seed, &mut buffer),
        }
        let parent = scheme.algorithm.digest(&buffer);
        Self { algorithm: scheme.algorithm, parent, buffer }
    }

    /// Name of the next block, which has `tokens` and, in the engine's order, `keys`.
    ///
    /// # Cost
    /// One digest; allocates nothing once the buffer has grown, unless a block has more than 8
    /// keys.
    pub fn next<'a>(&mut self, tokens: &[u32], keys: impl Iterator<Item = Key<'a>>) -> u64 {
        let keys: SmallVec<[Key<'a>; 8]> = keys.collect();
        let parent = self.parent.as_bytes();
        match self.algorithm.is_pickle() {
            true => pickle::block(parent, tokens, &keys, &mut self.buffer),
            false => cbor::block(parent, tokens, &keys, &mut self.buffer),
        }
        self.parent = self.algorithm.digest(&self.buffer);
        self.parent.name()
    }
}

/// Appends the names of the complete blocks of `unit` tokens; shape `[tokens / unit]`.
///
/// Returns false if a block's name can't be computed; the names before it were appended. That is
/// the case if the adapter's path is unknown, if a digest of embeddings is missing, and if a pickle
/// would contain one item's identifier twice: its bytes depend on whether the engine has the
/// identifier in one string object or in two. `unit` must not be 0.
pub fn names_into(
    scheme: &NameScheme,
    tokens: &[u32],
    unit: u32,
    keys: &NameKeys<'_>,
    out: &mut Vec<u64>,
) -> bool {
    debug_assert!(unit > 0, "callers check the block size");
    let Some(mut keys) = KeysOfBlocks::new(scheme.algorithm, unit, keys) else { return false };
    append(&mut Namer::new(scheme), tokens, &mut keys, out)
}

/// Appends the names of the complete blocks in `tokens`, continuing at `namer` and `keys`.
fn append(
    namer: &mut Namer,
    tokens: &[u32],
    keys: &mut KeysOfBlocks<'_>,
    out: &mut Vec<u64>,
) -> bool {
    tokens.chunks_exact(keys.unit()).all(|block| {
        let Some(keys) = keys.next() else { return false };
        out.push(namer.next(block, keys));
        true
    })
}

#[cfg(test)]
mod tests;
