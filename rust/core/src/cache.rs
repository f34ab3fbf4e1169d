//! A map of values that can be made again, bounded in bytes: [`SHARD_COUNT`] CLOCK caches.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use hashbrown::HashMap;
use parking_lot::RwLock;

/// Locks are taken per shard: enough of them that cores seldom meet, few enough that each has a
/// useful share of the budget.
const SHARD_COUNT: usize = 32;

/// What an entry costs beside its slot and what its value has on the heap: map entry with its load
/// factor, allocator.
const ENTRY_OVERHEAD_BYTES: usize = 64;

/// A value whose size on the heap is known, and does not change.
pub(crate) trait Weighed {
    /// Bytes on the heap.
    fn heap_bytes(&self) -> usize;
}

#[derive(Debug)]
struct Slot<V> {
    key: u128,
    value: V,
    /// Second chance: set by a hit, taken away by the hand as it passes.
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
    /// Drop one entry: the first one under the hand that was not used since it last passed.
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
        self.positions.remove(&gone.key);
        self.held_bytes -= Slot::size_bytes(&gone.value);
        if let Some(moved) = self.slots.get(self.hand) {
            self.positions.insert(moved.key, self.hand);
        }
        // The newest entry has just taken this place: it is owed a whole turn.
        self.hand += 1;
    }
}

/// What a cache holds, and what it dropped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Held {
    /// Entries.
    pub(crate) entries: u64,
    /// Bytes, bookkeeping included.
    pub(crate) bytes: u64,
    /// Entries dropped so far to make room.
    pub(crate) evictions_total: u64,
}

/// The cache. What was used least recently goes first, as nearly as CLOCK knows it.
///
/// # Consistency
/// The value of a key never changes, so a reader sees either nothing or the truth.
#[derive(Debug)]
pub(crate) struct ClockCache<V> {
    shards: Box<[RwLock<Shard<V>>]>,
    shard_capacity_bytes: usize,
    // Relaxed: a counter, read by nobody who decides anything.
    evictions: AtomicU64,
}

impl<V: Weighed> ClockCache<V> {
    /// An empty cache that holds at most `capacity_bytes`, bookkeeping included.
    pub(crate) fn new(capacity_bytes: usize) -> Self {
        Self {
            shards: (0..SHARD_COUNT).map(|_| RwLock::default()).collect(),
            shard_capacity_bytes: capacity_bytes / SHARD_COUNT,
            evictions: AtomicU64::new(0),
        }
    }

    /// Whether the cache keeps nothing at all.
    pub(crate) fn is_off(&self) -> bool {
        self.shard_capacity_bytes == 0
    }

    fn shard(&self, key: u128) -> &RwLock<Shard<V>> {
        // The map inside uses the low bits.
        &self.shards[(key >> 64) as usize % SHARD_COUNT]
    }

    /// What `read` makes of the value of `key`; `None` if there is no such value, or by its word.
    pub(crate) fn read<R>(&self, key: u128, read: impl FnOnce(&V) -> Option<R>) -> Option<R> {
        let shard = self.shard(key).read();
        let slot = &shard.slots[*shard.positions.get(&key)?];
        let found = read(&slot.value)?;
        // Read before write: a popular entry's cache line stays shared between cores.
        if !slot.is_referenced.load(Ordering::Relaxed) {
            slot.is_referenced.store(true, Ordering::Relaxed);
        }
        Some(found)
    }

    /// Keeps `value` under `key`, dropping others as needed; false if it is too large to be kept.
    pub(crate) fn insert(&self, key: u128, value: V) -> bool {
        let size_bytes = Slot::size_bytes(&value);
        if size_bytes > self.shard_capacity_bytes {
            return false;
        }
        let slot = Slot { key, value, is_referenced: AtomicBool::new(false) };
        let mut shard = self.shard(key).write();
        if shard.positions.contains_key(&key) {
            // Another thread was quicker with the same value.
            return true;
        }
        let mut evicted = 0;
        while shard.held_bytes + size_bytes > self.shard_capacity_bytes {
            shard.evict();
            evicted += 1;
        }
        let position = shard.slots.len();
        shard.slots.push(slot);
        shard.positions.insert(key, position);
        shard.held_bytes += size_bytes;
        drop(shard);
        self.evictions.fetch_add(evicted, Ordering::Relaxed);
        true
    }

    /// Sizes, summed shard by shard without stopping anyone.
    pub(crate) fn held(&self) -> Held {
        let evictions_total = self.evictions.load(Ordering::Relaxed);
        let mut held = Held { evictions_total, ..Held::default() };
        for shard in &self.shards {
            let shard = shard.read();
            held.bytes += shard.held_bytes as u64;
            held.entries += shard.slots.len() as u64;
        }
        held
    }
}
