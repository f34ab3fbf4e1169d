//! Blocks by hash, with the workers they were sent to; bounded, least recently used dropped first.

use xxhash_rust::xxh3::xxh3_64;

use super::super::settings::PrefixSettings;
use super::holders::{Holders, Slots};
use crate::ids::Worker;
use crate::load::recency::Recent;

/// Blocks and the workers that they were sent to.
///
/// In `document` a block is dropped after all of its successors, because a prompt's first block is
/// marked as used last, and a block's entry for each worker expires separately. In `aibrix-compat`
/// a prompt's first block is dropped first, and a use by one worker extends a block for all workers
/// that ever had it.
#[derive(Debug)]
pub struct PrefixTable {
    settings: PrefixSettings,
    swept_ms: u64,
    entries: Recent<Key, Entry>,
    slots: Slots,
    /// Memory allocated for the holders of all entries.
    holder_bytes: usize,
    /// Memory of the last look-up, reused by the next.
    walk: Walk,
    expired: u64,
}

/// Model and hash; in `aibrix-compat`, where models share blocks, 0 and hash.
type Key = (u64, u64);

#[derive(Debug)]
struct Entry {
    used_ms: u64,
    holders: Holders,
}

/// A look-up. Adjacent blocks with the same holders form one step.
#[derive(Debug, Default)]
struct Walk {
    /// By slot: the number of steps of its worker, counted from the first block.
    steps: Vec<u32>,
    /// By number of steps: the number of blocks.
    depths: Vec<usize>,
}

/// Contents of the table.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TableStats {
    /// Blocks.
    pub blocks: u64,
    /// Bytes, estimated.
    pub bytes: u64,
    /// Blocks dropped for lack of room.
    pub evicted: u64,
    /// Blocks dropped after their time to live.
    pub expired: u64,
}

/// Memory of an entry, its place in the hash table (filled to 7/8 at most) and in the LRU order.
const ENTRY_BYTES: usize = size_of::<(Key, Entry)>() + (size_of::<(Key, u32)>() + 1) * 8 / 7 + 8;

impl PrefixTable {
    /// An empty table.
    pub fn new(settings: &PrefixSettings) -> Self {
        Self {
            settings: settings.clone(),
            swept_ms: 0,
            entries: Recent::new(settings.max_blocks),
            slots: Slots::default(),
            holder_bytes: 0,
            walk: Walk::default(),
            expired: 0,
        }
    }

    /// Current sizes and counters.
    pub fn stats(&self) -> TableStats {
        TableStats {
            blocks: self.entries.len() as u64,
            bytes: self.bytes(),
            evicted: self.entries.evicted(),
            expired: self.expired,
        }
    }

    fn bytes(&self) -> u64 {
        let walk = self.walk.steps.capacity() * size_of::<u32>();
        (self.entries.len() * ENTRY_BYTES + self.holder_bytes + self.slots.bytes() + walk) as u64
    }

    /// Sets `percents[i]`, for each eligible one of `workers`, to the contiguous share of `hashes`
    /// that it holds from the first on, in whole percent rounded down; `None` for nothing.
    ///
    /// # Cost
    /// O(workers + holders of blocks where the holders change), plus one or more look-ups for each
    /// of these blocks; in `aibrix-compat` for each block, with its holders.
    pub fn matches(
        &mut self,
        model: &str,
        hashes: &[u64],
        workers: impl Iterator<Item = Worker>,
        allowed: &[bool],
        now_ms: u64,
        percents: &mut [Option<u32>],
    ) {
        self.expire(now_ms);
        let model = xxh3_64(model.as_bytes());
        self.walk(model, hashes, now_ms);
        let Walk { steps, depths } = &self.walk;
        let percents_of: Vec<_> =
            depths.iter().map(|&depth| Some((depth * 100 / hashes.len()) as u32)).collect();
        let slots = self.slots.ask(model, workers).iter();
        for ((&(_, slot), &is_allowed), percent) in slots.zip(allowed).zip(percents) {
            let taken = steps.get(slot as usize).copied().unwrap_or(0);
            if taken > 0 && is_allowed {
                *percent = percents_of[taken as usize - 1];
            }
        }
    }

    /// Fills `self.walk`.
    fn walk(&mut self, model: u64, hashes: &[u64], now_ms: u64) {
        let Walk { mut steps, mut depths } = std::mem::take(&mut self.walk);
        steps.clear();
        steps.resize(self.slots.len(), 0);
        depths.clear();
        let mut depth = 0;
        let mut holders = self.look(model, hashes, depth, now_ms);
        while let Some((place, _)) = holders {
            let taken = depths.len() as u32;
            let mut is_anybody_left = false;
            for &slot in self.entries[place].holders.slots() {
                let step = &mut steps[slot as usize];
                let is_alive = *step == taken;
                *step += u32::from(is_alive);
                is_anybody_left |= is_alive;
            }
            if !is_anybody_left {
                break;
            }
            depth = self.step_end(model, hashes, depth, holders, now_ms);
            depths.push(depth);
            holders = self.look(model, hashes, depth, now_ms);
        }
        self.walk = Walk { steps, depths };
    }

    /// The first block after `depth` with other holders than the block there, which has `holders`.
    ///
    /// # Cost
    /// O(log(blocks)) look-ups; one if it is the next block.
    fn step_end(
        &mut self,
        model: u64,
        hashes: &[u64],
        depth: usize,
        holders: Option<(u32, usize)>,
        now_ms: u64,
    ) -> usize {
        if self.settings.is_compat {
            return depth + 1;
        }
        // Every holder of a block holds all blocks before it, so equal counts mean equal holders.
        let mut is_same = |at| {
            let found = self.look(model, hashes, at, now_ms);
            found.map(|(_, count)| count) == holders.map(|(_, count)| count)
        };
        let (mut last, mut end, mut stride) = (depth, hashes.len(), 1);
        while last + stride < end {
            if is_same(last + stride) {
                last += stride;
                stride *= 2;
            } else {
                end = last + stride;
            }
        }
        while end - last > 1 {
            let middle = last.midpoint(end);
            if is_same(middle) { last = middle } else { end = middle }
        }
        end
    }

    /// The entry of the block at `depth`, and the number of its holders; `None` without holders.
    fn look(
        &mut self,
        model: u64,
        hashes: &[u64],
        depth: usize,
        now_ms: u64,
    ) -> Option<(u32, usize)> {
        let place = self.entries.place(self.key(model, *hashes.get(depth)?))?;
        let holders = &mut self.entries[place].holders;
        if !self.settings.is_compat {
            self.holder_bytes -= holders.bytes();
            holders.prune(&mut self.slots, now_ms, self.settings.eviction_duration_ms);
            self.holder_bytes += holders.bytes();
        }
        let count = holders.slots().len();
        (count > 0).then_some((place, count))
    }

    /// Records that the blocks of `hashes` were sent to `worker`. If there is not enough room, the
    /// first ones are kept.
    pub fn record(&mut self, model: &str, hashes: &[u64], worker: Worker, now_ms: u64) {
        self.expire(now_ms);
        let model = xxh3_64(model.as_bytes());
        if self.settings.is_compat {
            hashes.iter().for_each(|&hash| self.put(model, hash, worker, now_ms));
            return self.shrink();
        }
        let hashes = &hashes[..hashes.len().min(self.settings.max_blocks)];
        if hashes.is_empty() {
            return;
        }
        let place_of = |&hash: &u64| self.entries.place((model, hash));
        let places: Vec<Option<u32>> = hashes.iter().map(place_of).collect();
        let missing = places.iter().filter(|place| place.is_none()).count();
        if self.entries.len() + missing > self.settings.max_blocks {
            // Existing blocks must not be evicted to make room for their successors.
            for &place in places.iter().flatten() {
                self.entries.renew(place);
            }
            while self.entries.len() + missing > self.settings.max_blocks && self.evict() {}
        }
        let slot = self.slots.of((model, worker));
        // In reverse, so that the first block is the most recently used.
        for (&hash, place) in hashes.iter().zip(places).rev() {
            self.use_entry(place, (model, hash), slot, now_ms);
        }
        self.shrink();
    }

    /// Records that one block was sent to `worker`, and marks it as most recently used.
    pub fn put(&mut self, model: u64, hash: u64, worker: Worker, now_ms: u64) {
        if self.settings.max_blocks == 0 {
            return;
        }
        let place = self.entries.place(self.key(model, hash));
        if place.is_none() && self.entries.len() >= self.settings.max_blocks {
            self.evict();
        }
        let slot = self.slots.of((model, worker));
        self.use_entry(place, self.key(model, hash), slot, now_ms);
    }

    /// Records a use by the worker of `slot`, of the block at `place` or a new one.
    fn use_entry(&mut self, place: Option<u32>, key: Key, slot: u32, now_ms: u64) {
        let new = || Entry { used_ms: now_ms, holders: Holders::default() };
        let place = place.unwrap_or_else(|| self.entries.insert(key, new()));
        self.entries.renew(place);
        let entry = &mut self.entries[place];
        self.holder_bytes -= entry.holders.bytes();
        entry.used_ms = now_ms;
        entry.holders.put(&mut self.slots, slot, now_ms);
        if !self.settings.is_compat {
            entry.holders.prune(&mut self.slots, now_ms, self.settings.eviction_duration_ms);
        }
        self.holder_bytes += entry.holders.bytes();
    }

    /// Whether the block was sent to any worker.
    #[cfg(test)]
    pub fn has(&self, model: u64, hash: u64) -> bool {
        self.entries.place(self.key(model, hash)).is_some()
    }

    /// Drops all entries of `worker`.
    ///
    /// # Cost
    /// O(blocks).
    pub fn forget(&mut self, worker: Worker) {
        for place in self.entries.places(|_| true) {
            let holders = &mut self.entries[place].holders;
            holders.forget(&mut self.slots, worker);
            if holders.slots().is_empty() {
                self.drop_entry(place);
            }
        }
    }

    /// Drops blocks that were last used more than the time to live ago.
    ///
    /// # Cost
    /// O(dropped blocks).
    pub fn expire(&mut self, now_ms: u64) {
        if self.settings.is_compat {
            if now_ms < self.swept_ms.saturating_add(self.settings.eviction_interval_ms) {
                return;
            }
            self.swept_ms = now_ms;
        }
        while let Some(place) = self.entries.first() {
            if now_ms.saturating_sub(self.entries[place].used_ms)
                <= self.settings.eviction_duration_ms
            {
                break;
            }
            self.drop_entry(place);
            self.expired += 1;
        }
    }

    fn key(&self, model: u64, hash: u64) -> Key {
        if self.settings.is_compat { (0, hash) } else { (model, hash) }
    }

    fn shrink(&mut self) {
        let max_bytes = self.settings.max_bytes;
        while max_bytes > 0 && self.bytes() > max_bytes && self.evict() {}
    }

    fn evict(&mut self) -> bool {
        let gone = self.entries.evict();
        gone.map(|entry| self.has_dropped(entry)).is_some()
    }

    fn drop_entry(&mut self, place: u32) {
        let entry = self.entries.remove(place);
        self.has_dropped(entry);
    }

    fn has_dropped(&mut self, mut entry: Entry) {
        self.holder_bytes -= entry.holders.bytes();
        entry.holders.clear(&mut self.slots);
    }
}
