//! A map of recomputable values, bounded in bytes: [`SHARD_COUNT`] CLOCK caches.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use hashbrown::HashMap;
use parking_lot::RwLock;
use xxhash_rust::xxh3::xxh3_128_with_seed;

/// Locks are per shard: enough shards that cores seldom contend, few enough that each has a useful
/// share of the budget.
const SHARD_COUNT: usize = 32;

/// Memory of an entry besides its slot and its value's heap memory: map entry with its load factor,
/// allocator.
const ENTRY_OVERHEAD_BYTES: usize = 64;

/// A value with a known and constant size on the heap.
pub(crate) trait Weighed {
    /// Bytes on the heap.
    fn heap_bytes(&self) -> usize;
}

/// Token ids of a piece of text.
impl Weighed for Box<[u32]> {
    fn heap_bytes(&self) -> usize {
        size_of_val(&**self)
    }
}

/// An entry's identity: 128 bits of hash, and the length of what was hashed as a second check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Key {
    pub hash: u128,
    length_bytes: usize,
}

#[derive(Debug)]
struct Slot<V> {
    key: Key,
    value: V,
    /// Second chance: set by a hit, cleared by the hand as it passes.
    is_referenced: AtomicBool,
}

impl<V: Weighed> Slot<V> {
    fn size_bytes(value: &V) -> usize {
        size_of::<Self>() + value.heap_bytes() + ENTRY_OVERHEAD_BYTES
    }
}

#[derive(Debug)]
struct Shard<V> {
    positions: HashMap<u128, usize>,
    slots: Vec<Slot<V>>,
    hand: usize,
    held_bytes: usize,
}

impl<V> Default for Shard<V> {
    fn default() -> Self {
        Self { positions: HashMap::new(), slots: Vec::new(), hand: 0, held_bytes: 0 }
    }
}

impl<V: Weighed> Shard<V> {
    /// Evicts one entry: the first one under the hand without a use since it last passed.
    fn evict(&mut self) {
        // Two rounds at most: the first one clears every mark.
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
        self.held_bytes -= Slot::size_bytes(&gone.value);
        if let Some(moved) = self.slots.get(self.hand) {
            self.positions.insert(moved.key.hash, self.hand);
        }
        // The newest entry has just taken this place and is due a whole round.
        self.hand += 1;
    }
}

/// Counters and sizes of a cache.
///
/// # Consistency
/// Summed shard by shard without a common lock: each number is exact, but they are not of one
/// moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Pieces of text, messages, or blocks with names that were found.
    pub hits_total: u64,
    /// Those that were not found, and then computed.
    pub misses_total: u64,
    /// Evicted entries.
    pub evictions_total: u64,
    /// Current bytes, including bookkeeping.
    pub held_bytes: u64,
    /// Current entries.
    pub held_entries: u64,
    /// The limit.
    pub capacity_bytes: u64,
}

/// The cache. It evicts approximately the least recently used entries, as CLOCK does.
///
/// # Consistency
/// The value of a key never changes, so a reader sees either nothing or the correct value.
#[derive(Debug)]
pub(crate) struct ClockCache<V> {
    shards: Box<[RwLock<Shard<V>>]>,
    shard_capacity_bytes: usize,
    /// Random, so that clients can't construct two inputs with equal keys.
    seed: u64,
    // Relaxed: statistics.
    hits: AtomicU64,
    misses: AtomicU64,
    evictions: AtomicU64,
}

impl<V: Weighed> ClockCache<V> {
    /// An empty cache of at most `capacity_bytes`, including bookkeeping; 0 turns it off.
    pub(crate) fn new(capacity_bytes: usize) -> Self {
        Self {
            shards: (0..SHARD_COUNT).map(|_| RwLock::default()).collect(),
            shard_capacity_bytes: capacity_bytes / SHARD_COUNT,
            seed: RandomState::new().hash_one(0),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            evictions: AtomicU64::new(0),
        }
    }

    /// Whether the cache stores nothing at all.
    pub(crate) fn is_off(&self) -> bool {
        self.shard_capacity_bytes == 0
    }

    /// The key of `bytes`; other values of `kind` give other keys.
    ///
    /// # Cost
    /// A hash over the bytes.
    pub(crate) fn key(&self, bytes: &[u8], kind: u64) -> Key {
        let hash = xxh3_128_with_seed(bytes, self.seed ^ kind);
        Key { hash, length_bytes: bytes.len() }
    }

    fn shard(&self, key: Key) -> &RwLock<Shard<V>> {
        // The map inside uses the low bits.
        &self.shards[(key.hash >> 64) as usize % SHARD_COUNT]
    }

    /// The result of `read` for the value of `key`, if there is one.
    pub(crate) fn read<R>(&self, key: Key, read: impl FnOnce(&V) -> R) -> Option<R> {
        let shard = self.shard(key).read();
        let slot = &shard.slots[*shard.positions.get(&key.hash)?];
        if slot.key != key {
            return None;
        }
        // Read before write: a popular entry's cache line stays shared between cores.
        if !slot.is_referenced.load(Ordering::Relaxed) {
            slot.is_referenced.store(true, Ordering::Relaxed);
        }
        Some(read(&slot.value))
    }

    /// As [`read`](Self::read), and counts the look-up.
    pub(crate) fn find<R>(&self, key: Key, read: impl FnOnce(&V) -> R) -> Option<R> {
        let found = self.read(key, read);
        let counter = if found.is_some() { &self.hits } else { &self.misses };
        counter.fetch_add(1, Ordering::Relaxed);
        found
    }

    /// Counts what look-ups found, in the caller's unit.
    pub(crate) fn count(&self, hits: usize, misses: usize) {
        self.hits.fetch_add(hits as u64, Ordering::Relaxed);
        self.misses.fetch_add(misses as u64, Ordering::Relaxed);
    }

    /// Stores `value` under `key`, evicting others as needed, unless it is too large.
    pub(crate) fn insert(&self, key: Key, value: V) {
        let size_bytes = Slot::size_bytes(&value);
        if size_bytes > self.shard_capacity_bytes {
            return;
        }
        let slot = Slot { key, value, is_referenced: AtomicBool::new(false) };
        let mut shard = self.shard(key).write();
        if shard.positions.contains_key(&key.hash) {
            // Another thread has already stored the same value.
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
    pub(crate) fn stats(&self) -> CacheStats {
        let mut stats = CacheStats {
            hits_total: self.hits.load(Ordering::Relaxed),
            misses_total: self.misses.load(Ordering::Relaxed),
            evictions_total: self.evictions.load(Ordering::Relaxed),
            capacity_bytes: (self.shard_capacity_bytes * SHARD_COUNT) as u64,
            ..CacheStats::default()
        };
        for shard in &self.shards {
            let shard = shard.read();
            stats.held_bytes += shard.held_bytes as u64;
            stats.held_entries += shard.slots.len() as u64;
        }
        stats
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Ids = Box<[u32]>;

    #[test]
    fn it_stays_under_its_limit_and_keeps_what_is_used() {
        let cache: ClockCache<Ids> = ClockCache::new(64 * 1024);
        let hot = cache.key(b"hot", 0);
        cache.insert(hot, [7; 16].into());
        for n in 0..5_000_u32 {
            cache.insert(cache.key(&n.to_le_bytes(), 0), [n; 16].into());
            let found = cache.find(hot, Ids::clone);
            assert_eq!(found.as_deref(), Some(&[7; 16][..]), "the entry in use went at {n}");
            assert!(cache.stats().held_bytes <= 64 * 1024);
        }
        let stats = cache.stats();
        assert!(stats.evictions_total > 4_000, "{stats:?}");
        assert_eq!(stats.held_entries + stats.evictions_total, 5_001);
        let huge = cache.key(b"huge", 0);
        cache.insert(huge, [0; 10_000].into());
        assert!(cache.find(huge, Ids::clone).is_none(), "it is too large");
    }

    #[test]
    fn kinds_and_caches_stay_apart() {
        let [cache, other] = [0; 2].map(|_| ClockCache::<Ids>::new(1 << 20));
        cache.insert(cache.key(b"a", 0), [1].into());
        assert!(cache.find(cache.key(b"a", 1), Ids::clone).is_none());
        let keys = [&cache, &other].map(|cache| cache.key(b"a", 0));
        assert_ne!(keys[0], keys[1], "whoever knows the keys can find two entries with one");
    }
}
