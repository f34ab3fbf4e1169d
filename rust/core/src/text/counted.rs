//! A cache that counts: what was found, what was not, and what was too large to be kept.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::cache::{ClockCache, Weighed};

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
