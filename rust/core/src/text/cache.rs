//! Token ids of pieces of text, bounded in bytes, in a cache that counts what it finds.

use std::sync::atomic::{AtomicU64, Ordering};

use xxhash_rust::xxh3::xxh3_128_with_seed;

use crate::cache::{ClockCache, Weighed};

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

/// A piece's identity: 128 bits of hash, and its length as a second check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Key {
    hash: u128,
    length_bytes: usize,
}

impl Key {
    /// The key of `piece` in `context`; ids of another generation are not found.
    pub(super) fn new(piece: &str, context: Context, generation: u64) -> Self {
        let hash = xxh3_128_with_seed(piece.as_bytes(), context as u64 | generation << 8);
        Self { hash, length_bytes: piece.len() }
    }
}

#[derive(Debug)]
struct Piece {
    /// Of the text, not of the ids.
    length_bytes: usize,
    ids: Box<[u32]>,
}

impl Weighed for Piece {
    fn heap_bytes(&self) -> usize {
        size_of_val(&*self.ids)
    }
}

/// The cache.
///
/// # Consistency
/// A piece's ids never change, so a reader sees either nothing or the truth.
#[derive(Debug)]
pub(super) struct PieceCache {
    pieces: CountedCache<Piece>,
}

impl PieceCache {
    /// An empty cache.
    pub(super) fn new(options: CacheOptions) -> Self {
        Self { pieces: CountedCache::new(options.capacity_bytes) }
    }

    /// Whether the cache keeps nothing at all.
    pub(super) fn is_off(&self) -> bool {
        self.pieces.is_off()
    }

    /// Append the ids of `key` to `out` if they are known; says whether they were.
    pub(super) fn append(&self, key: Key, out: &mut Vec<u32>) -> bool {
        let found = self.pieces.read(key.hash, |piece| {
            (piece.length_bytes == key.length_bytes).then(|| out.extend_from_slice(&piece.ids))
        });
        found.is_some()
    }

    /// Keep `ids` under `key`, dropping others as needed.
    pub(super) fn insert(&self, key: Key, ids: &[u32]) {
        let piece = Piece { length_bytes: key.length_bytes, ids: ids.into() };
        self.pieces.insert(key.hash, piece);
    }

    /// Counters and sizes.
    pub(super) fn stats(&self) -> CacheStats {
        self.pieces.stats()
    }
}

/// What a cache of text has done so far.
///
/// # Consistency
/// Summed shard by shard without stopping anyone: each figure is exact, their sum is not a moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Pieces found.
    pub hits_total: u64,
    /// Pieces not found, and then made.
    pub misses_total: u64,
    /// Pieces dropped to make room.
    pub evictions_total: u64,
    /// Pieces too large to be kept at all.
    pub oversized_total: u64,
    /// Bytes held now, bookkeeping included.
    pub held_bytes: u64,
    /// Pieces held now.
    pub held_pieces: u64,
    /// The limit.
    pub capacity_bytes: u64,
}

/// The cache.
///
/// # Consistency
/// A key's value never changes, so a reader sees either nothing or the truth.
#[derive(Debug)]
pub(super) struct CountedCache<V> {
    values: ClockCache<V>,
    capacity_bytes: usize,
    // Relaxed everywhere: counters, read by nobody who decides anything.
    hits: AtomicU64,
    misses: AtomicU64,
    oversized: AtomicU64,
}

impl<V: Weighed> CountedCache<V> {
    /// An empty cache that holds at most `capacity_bytes`, bookkeeping included; 0 turns it off.
    pub(super) fn new(capacity_bytes: usize) -> Self {
        Self {
            values: ClockCache::new(capacity_bytes),
            capacity_bytes,
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            oversized: AtomicU64::new(0),
        }
    }

    /// Whether the cache keeps nothing at all.
    pub(super) fn is_off(&self) -> bool {
        self.values.is_off()
    }

    /// What `read` makes of the value of `key`; `None`, and a miss, if there is no such value, or by its word.
    pub(super) fn read<R>(&self, key: u128, read: impl FnOnce(&V) -> Option<R>) -> Option<R> {
        let found = self.values.read(key, read);
        let counter = if found.is_some() { &self.hits } else { &self.misses };
        counter.fetch_add(1, Ordering::Relaxed);
        found
    }

    /// Keep `value` under `key`, dropping others as needed.
    pub(super) fn insert(&self, key: u128, value: V) {
        if !self.values.insert(key, value) {
            self.oversized.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counters and sizes.
    pub(super) fn stats(&self) -> CacheStats {
        let held = self.values.held();
        CacheStats {
            hits_total: self.hits.load(Ordering::Relaxed),
            misses_total: self.misses.load(Ordering::Relaxed),
            evictions_total: held.evictions_total,
            oversized_total: self.oversized.load(Ordering::Relaxed),
            held_bytes: held.bytes,
            held_pieces: held.entries,
            capacity_bytes: self.capacity_bytes as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stays_under_its_limit_and_keeps_what_is_used() {
        let cache = PieceCache::new(CacheOptions { capacity_bytes: 64 * 1024 });
        let hot = Key::new("hot", Context::First, 0);
        cache.insert(hot, &[7; 16]);
        let mut out = Vec::new();
        for n in 0..5_000u32 {
            cache.insert(Key::new(&n.to_string(), Context::First, 0), &[n; 16]);
            out.clear();
            assert!(cache.append(hot, &mut out), "the piece in use went at {n}");
            assert_eq!(out, [7; 16]);
            assert!(cache.stats().held_bytes <= 64 * 1024);
        }
        let stats = cache.stats();
        assert!(stats.evictions_total > 4_000, "{stats:?}");
        assert_eq!(stats.held_pieces + stats.evictions_total, 5_001);
        cache.insert(Key::new("huge", Context::First, 0), &[0; 10_000]);
        assert_eq!(cache.stats().oversized_total, 1);
    }

    #[test]
    fn contexts_do_not_meet() {
        let cache = PieceCache::new(CacheOptions::default());
        cache.insert(Key::new("a", Context::First, 0), &[1]);
        assert!(!cache.append(Key::new("a", Context::Later, 0), &mut Vec::new()));
        assert!(!cache.append(Key::new("a", Context::Wrapped, 0), &mut Vec::new()));
    }
}
