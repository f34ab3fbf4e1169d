//! A cache of names: a returning conversation only pays for its new blocks.

use super::{Key, KeysOfBlocks, NameDigest, NameKeys, NameScheme, Namer, append, names_into};
use crate::cache::{self, CacheStats, ClockCache, Weighed};
use crate::hash::little_endian;

/// Tokens of a chunk, which is found and evicted as a whole. Finding 64 blocks of 16 costs a
/// look-up instead of 64 digests; the blocks after the last chunk are computed each time.
const CHUNK_TOKENS: usize = 1_024;

/// Names of a chunk of blocks, and the digest from which the next one continues.
#[derive(Debug)]
struct Chunk {
    digest: NameDigest,
    names: Box<[u64]>,
}

impl Weighed for Chunk {
    fn heap_bytes(&self) -> usize {
        size_of_val(&*self.names)
    }
}

/// [`names_into`] with a cache of prefixes, bounded in bytes; shared by threads.
///
/// The key of a chunk is a hash over all inputs of its names, including all chunks before it. An
/// evicted chunk therefore costs only its own blocks and not those after it.
///
/// # Cost
/// For a known prompt: XXH3 over its tokens, and a look-up per 1,024 of them.
#[derive(Debug)]
pub struct NameCache {
    chunks: ClockCache<Chunk>,
}

impl Default for NameCache {
    /// 64 MiB: some 100,000 chunks of 1,024 tokens, at 16 per block.
    fn default() -> Self {
        Self::new(64 << 20)
    }
}

impl NameCache {
    /// An empty cache of at most `capacity_bytes`, including bookkeeping; 0 disables it.
    pub fn new(capacity_bytes: usize) -> Self {
        Self { chunks: ClockCache::new(capacity_bytes) }
    }

    /// Appends the names of the complete blocks of `unit` tokens, as [`names_into`] does.
    pub fn names(
        &self,
        scheme: &NameScheme,
        tokens: &[u32],
        unit: u32,
        keys: &NameKeys<'_>,
        out: &mut Vec<u64>,
    ) -> bool {
        let (held, found) = (out.len(), &mut 0);
        let is_complete = match KeysOfBlocks::new(scheme.algorithm, unit, keys) {
            Some(of_blocks) if !self.chunks.is_off() => {
                self.append(scheme, tokens, of_blocks, out, found)
            }
            _ => names_into(scheme, tokens, unit, keys, out),
        };
        self.chunks.count(*found, out.len() - held - *found);
        is_complete
    }

    fn append(
        &self,
        scheme: &NameScheme,
        tokens: &[u32],
        mut keys: KeysOfBlocks<'_>,
        out: &mut Vec<u64>,
        found: &mut usize,
    ) -> bool {
        let blocks = (CHUNK_TOKENS / keys.unit()).max(1);
        let chunks = tokens.chunks_exact(blocks * keys.unit());
        let (mut namer, rest) = (Namer::new(scheme), chunks.remainder());
        let mut bytes = Vec::new();
        let mut key = self.key_of_prompt(scheme, &keys, &mut bytes);
        out.reserve(tokens.len() / keys.unit());
        for tokens in chunks {
            if !self.extend_key(&mut key, tokens, &keys, blocks, &mut bytes) {
                return append(&mut namer, tokens, &mut keys, out);
            }
            let digest = self.chunks.read(key, |chunk| {
                out.extend_from_slice(&chunk.names);
                chunk.digest
            });
            if let Some(digest) = digest {
                namer.parent = digest;
                keys.skip(blocks);
                *found += blocks;
                continue;
            }
            let start = out.len();
            if !append(&mut namer, tokens, &mut keys, out) {
                return false;
            }
            let chunk = Chunk { digest: namer.parent, names: out[start..].into() };
            self.chunks.insert(key, chunk);
        }
        append(&mut namer, rest, &mut keys, out)
    }

    /// Hash of all inputs of a prompt's names besides its tokens.
    fn key_of_prompt(
        &self,
        scheme: &NameScheme,
        keys: &KeysOfBlocks<'_>,
        bytes: &mut Vec<u8>,
    ) -> cache::Key {
        bytes.clear();
        bytes.push(scheme.algorithm as u8);
        bytes.extend_from_slice(&keys.unit().to_le_bytes());
        put(scheme.seed.as_bytes(), bytes);
        keys.of_prompt().for_each(|key| put_key(&key, bytes));
        self.chunks.key(bytes, 0)
    }

    /// Derives the key of a chunk from the previous one; false if names can't be computed.
    fn extend_key(
        &self,
        key: &mut cache::Key,
        tokens: &[u32],
        keys: &KeysOfBlocks<'_>,
        blocks: usize,
        bytes: &mut Vec<u8>,
    ) -> bool {
        let of_tokens = self.chunks.key(&little_endian(tokens), 0);
        bytes.clear();
        bytes.extend_from_slice(&key.hash.to_le_bytes());
        bytes.extend_from_slice(&of_tokens.hash.to_le_bytes());
        if keys.depend_on_place() {
            let mut keys = keys.clone();
            for block in 0..blocks {
                let Some(keys) = keys.next() else { return false };
                // The first key contains those of the whole prompt: without others, prompts with
                // and without items share their chunks.
                // and without items share their chunks.
                for key in keys.filter(|key| matches!(key, Key::Media(..) | Key::Embeds(_))) {
                    bytes.extend_from_slice(&block.to_le_bytes());
                    put_key(&key, bytes);
                }
            }
        }
        *key = self.chunks.key(bytes, 0);
        true
    }

    /// Counters of blocks, and sizes; an entry is a chunk.
    pub fn stats(&self) -> CacheStats {
        self.chunks.stats()
    }
}

/// Bytes with a length prefix, so that different lists never coincide.
fn put(bytes: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(&bytes.len().to_le_bytes());
    out.extend_from_slice(bytes);
}

fn put_key(key: &Key<'_>, out: &mut Vec<u8>) {
    put(key.tag().as_bytes(), out);
    match *key {
        Key::Lora(name, path) => {
            put(name.as_bytes(), out);
            put(path.as_bytes(), out);
        }
        Key::Media(identifier, offset) => {
            put(identifier.as_bytes(), out);
            out.extend_from_slice(&offset.to_le_bytes());
        }
        Key::Salt(salt) => put(salt.as_bytes(), out),
        Key::Embeds(digest) => put(digest, out),
    }
}
