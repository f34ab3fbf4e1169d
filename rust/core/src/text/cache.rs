//! Token ids of pieces of text, bounded in bytes.

use crate::cache::{CacheStats, ClockCache, Key, Weighed};

/// Limits of the segment cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheOptions {
    /// Most bytes the cache may hold, bookkeeping included; 0 turns it off.
    pub capacity_bytes: usize,
}

impl Default for CacheOptions {
    /// 64 MiB: some 12 million tokens of distinct text.
    fn default() -> Self {
        Self { capacity_bytes: 64 << 20 }
    }
}

/// In which surroundings a piece was tokenized: the same text may have other ids elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub(super) enum Context {
    /// At the start of the text, or anywhere if the tokenizer does not care.
    First = 0,
    /// After something else, for tokenizers that treat the start of the text specially.
    Later = 1,
    /// The whole text with the special tokens around it.
    Wrapped = 2,
}

/// The ids of a piece.
type Ids = Box<[u32]>;

impl Weighed for Ids {
    fn heap_bytes(&self) -> usize {
        size_of_val(&**self)
    }
}

/// The cache.
///
/// # Consistency
/// A piece's ids never change, so a reader sees either nothing or the truth.
#[derive(Debug)]
pub(super) struct PieceCache {
    pieces: ClockCache<Ids>,
}

impl PieceCache {
    /// An empty cache of at most `capacity_bytes`, bookkeeping included; 0 disables it.
    pub(super) fn new(capacity_bytes: usize) -> Self {
        Self { pieces: ClockCache::new(capacity_bytes) }
    }

    /// Whether nothing is kept.
    pub(super) fn is_off(&self) -> bool {
        self.pieces.is_off()
    }

    /// The key of `piece` in `context`; ids of another generation are not found.
    pub(super) fn key(&self, piece: &str, context: Context, generation: u64) -> Key {
        self.pieces.key(piece.as_bytes(), context as u64 | generation << 8)
    }

    /// Append the ids of `key` to `out` if they are known; says whether they were.
    pub(super) fn append(&self, key: Key, out: &mut Vec<u32>) -> bool {
        self.pieces.find(key, |ids| out.extend_from_slice(ids)).is_some()
    }

    /// Keep `ids` under `key`, dropping others as needed.
    pub(super) fn keep(&self, key: Key, ids: &[u32]) {
        self.pieces.insert(key, ids.into());
    }

    /// Counters and sizes.
    pub(super) fn stats(&self) -> CacheStats {
        self.pieces.stats()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stays_under_its_limit_and_keeps_what_is_used() {
        let cache = PieceCache::new(64 * 1024);
        let hot = cache.key("hot", Context::First, 0);
        cache.keep(hot, &[7; 16]);
        let mut out = Vec::new();
        for n in 0..5_000u32 {
            cache.keep(cache.key(&n.to_string(), Context::First, 0), &[n; 16]);
            out.clear();
            assert!(cache.append(hot, &mut out), "the piece in use went at {n}");
            assert_eq!(out, [7; 16]);
            assert!(cache.stats().held_bytes <= 64 * 1024);
        }
        let stats = cache.stats();
        assert!(stats.evictions_total > 4_000, "{stats:?}");
        assert_eq!(stats.held_entries + stats.evictions_total, 5_001);
        let huge = cache.key("huge", Context::First, 0);
        cache.keep(huge, &[0; 10_000]);
        assert!(!cache.append(huge, &mut out), "it is too large");
    }

    #[test]
    fn contexts_do_not_meet() {
        let cache = PieceCache::new(1 << 20);
        cache.keep(cache.key("a", Context::First, 0), &[1]);
        assert!(!cache.append(cache.key("a", Context::Later, 0), &mut Vec::new()));
        assert!(!cache.append(cache.key("a", Context::Wrapped, 0), &mut Vec::new()));
    }

    #[test]
    fn no_key_is_that_of_another_cache() {
        let keys = [0; 2].map(|_| PieceCache::new(1 << 20).key("a", Context::First, 0));
        assert_ne!(keys[0], keys[1], "whoever knows the keys can find two pieces with one");
    }
}
