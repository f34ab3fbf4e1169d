//! Token ids of pieces of text, bounded in bytes.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use hashbrown::HashMap;
use parking_lot::RwLock;
use xxhash_rust::xxh3::xxh3_128_with_seed;

/// Locks are taken per shard: enough of them that cores seldom meet, few enough that each has a
/// useful share of the budget.
const SHARD_COUNT: usize = 32;

/// What a cached piece costs beside its ids: slot, map entry with its load factor, allocator.
const ENTRY_OVERHEAD_BYTES: usize = 112;

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

/// What the segment cache has done so far.
///
/// # Consistency
/// Summed shard by shard without stopping anyone: each figure is exact, their sum is not a moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Pieces found.
    pub hits_total: u64,
    /// Pieces not found, and then tokenized.
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
    /// The key of `piece` in `context`.
    pub(super) fn new(piece: &str, context: Context) -> Self {
        let hash = xxh3_128_with_seed(piece.as_bytes(), context as u64);
        Self { hash, length_bytes: piece.len() }
    }
}

#[derive(Debug)]
struct Slot {
    key: Key,
    ids: Box<[u32]>,
    /// Second chance: set by a hit, taken away by the hand as it passes.
    is_referenced: AtomicBool,
}

impl Slot {
    fn size_bytes(ids: &[u32]) -> usize {
        size_of_val(ids) + ENTRY_OVERHEAD_BYTES
    }
}

#[derive(Debug, Default)]
struct Shard {
    positions: HashMap<u128, usize>,
    slots: Vec<Slot>,
    hand: usize,
    held_bytes: usize,
}

impl Shard {
    /// Drop one piece: the first one under the hand that was not used since it last passed.
    fn evict(&mut self) {
        // Two turns at most: the first clears every mark.
        for _ in 0..=2 * self.slots.len() {
            if self.hand >= self.slots.len() {
                self.hand = 0;
            }
            if !self.slots[self.hand].is_referenced.swap(false, Ordering::Relaxed) {
                break;
            }
            self.hand += 1;
        }
        if self.hand >= self.slots.len() {
            self.hand = 0;
        }
        let gone = self.slots.swap_remove(self.hand);
        self.positions.remove(&gone.key.hash);
        self.held_bytes -= Slot::size_bytes(&gone.ids);
        if let Some(moved) = self.slots.get(self.hand) {
            self.positions.insert(moved.key.hash, self.hand);
        }
        // The newest piece has just taken this place: it is owed a whole turn.
        self.hand += 1;
    }
}

/// The cache: [`SHARD_COUNT`] independent CLOCK caches.
///
/// # Consistency
/// A piece's ids never change, so a reader sees either nothing or the truth.
#[derive(Debug)]
pub(super) struct PieceCache {
    shards: Box<[RwLock<Shard>]>,
    shard_capacity_bytes: usize,
    capacity_bytes: usize,
    // Relaxed everywhere: counters, read by nobody who decides anything.
    hits: AtomicU64,
    misses: AtomicU64,
    evictions: AtomicU64,
    oversized: AtomicU64,
}

impl PieceCache {
    /// An empty cache.
    pub(super) fn new(options: CacheOptions) -> Self {
        Self {
            shards: (0..SHARD_COUNT).map(|_| RwLock::default()).collect(),
            shard_capacity_bytes: options.capacity_bytes / SHARD_COUNT,
            capacity_bytes: options.capacity_bytes,
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            evictions: AtomicU64::new(0),
            oversized: AtomicU64::new(0),
        }
    }

    /// Whether the cache keeps nothing at all.
    pub(super) fn is_off(&self) -> bool {
        self.shard_capacity_bytes == 0
    }

    fn shard(&self, key: Key) -> &RwLock<Shard> {
        // The map inside uses the low bits.
        &self.shards[(key.hash >> 64) as usize % SHARD_COUNT]
    }

    /// Append the ids of `key` to `out` if they are known; says whether they were.
    pub(super) fn append(&self, key: Key, out: &mut Vec<u32>) -> bool {
        let shard = self.shard(key).read();
        let slot = shard.positions.get(&key.hash).map(|&position| &shard.slots[position]);
        let Some(slot) = slot.filter(|slot| slot.key == key) else {
            drop(shard);
            self.misses.fetch_add(1, Ordering::Relaxed);
            return false;
        };
        // Read before write: a popular piece's cache line stays shared between cores.
        if !slot.is_referenced.load(Ordering::Relaxed) {
            slot.is_referenced.store(true, Ordering::Relaxed);
        }
        out.extend_from_slice(&slot.ids);
        drop(shard);
        self.hits.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// Keep `ids` under `key`, dropping others as needed.
    pub(super) fn insert(&self, key: Key, ids: &[u32]) {
        let size_bytes = Slot::size_bytes(ids);
        if size_bytes > self.shard_capacity_bytes {
            self.oversized.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let slot = Slot { key, ids: ids.into(), is_referenced: AtomicBool::new(false) };
        let mut shard = self.shard(key).write();
        if shard.positions.contains_key(&key.hash) {
            // Another thread was quicker with the same piece.
            return;
        }
        let mut evicted = 0;
        while shard.held_bytes + size_bytes > self.shard_capacity_bytes {
            shard.evict();
            evicted += 1;
        }
        let position = shard.slots.len();
        shard.slots.push(slot);
        shard.positions.insert(key.hash, position);
        shard.held_bytes += size_bytes;
        drop(shard);
        self.evictions.fetch_add(evicted, Ordering::Relaxed);
    }

    /// Counters and sizes.
    pub(super) fn stats(&self) -> CacheStats {
        let mut stats = CacheStats {
            hits_total: self.hits.load(Ordering::Relaxed),
            misses_total: self.misses.load(Ordering::Relaxed),
            evictions_total: self.evictions.load(Ordering::Relaxed),
            oversized_total: self.oversized.load(Ordering::Relaxed),
            capacity_bytes: self.capacity_bytes as u64,
            ..CacheStats::default()
        };
        for shard in &self.shards {
            let shard = shard.read();
            stats.held_bytes += shard.held_bytes as u64;
            stats.held_pieces += shard.slots.len() as u64;
        }
        stats
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stays_under_its_limit_and_keeps_what_is_used() {
        let cache = PieceCache::new(CacheOptions { capacity_bytes: 64 * 1024 });
        let hot = Key::new("hot", Context::First);
        cache.insert(hot, &[7; 16]);
        let mut out = Vec::new();
        for n in 0..5_000u32 {
            cache.insert(Key::new(&n.to_string(), Context::First), &[n; 16]);
            out.clear();
            assert!(cache.append(hot, &mut out), "the piece in use went at {n}");
            assert_eq!(out, [7; 16]);
            assert!(cache.stats().held_bytes <= 64 * 1024);
        }
        let stats = cache.stats();
        assert!(stats.evictions_total > 4_000, "{stats:?}");
        assert_eq!(stats.held_pieces + stats.evictions_total, 5_001);
        cache.insert(Key::new("huge", Context::First), &[0; 10_000]);
        assert_eq!(cache.stats().oversized_total, 1);
    }

    #[test]
    fn contexts_do_not_meet() {
        let cache = PieceCache::new(CacheOptions::default());
        cache.insert(Key::new("a", Context::First), &[1]);
        assert!(!cache.append(Key::new("a", Context::Later), &mut Vec::new()));
        assert!(!cache.append(Key::new("a", Context::Wrapped), &mut Vec::new()));
    }
}
