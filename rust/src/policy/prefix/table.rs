//! What was sent where: blocks by hash, bounded, the least recently used ones forgotten.

use hashbrown::HashMap;
use xxhash_rust::xxh3::xxh3_64;

use super::super::settings::PrefixSettings;
use crate::ids::Worker;
use crate::load::recency::Recency;

/// Blocks and who was sent them.
///
/// In `document` a block is forgotten after everything that follows it, because a prompt's first
/// block is used last, and each worker's share of a block is forgotten by itself. In
/// `aibrix-compat` a prompt's first block is forgotten first, and a block that one worker uses is
/// credited to all that ever had it.
#[derive(Debug)]
pub struct PrefixTable {
    is_compat: bool,
    max_blocks: usize,
    max_bytes: u64,
    ttl_ms: u64,
    interval_ms: u64,
    swept_ms: u64,
    by_key: HashMap<Key, u32>,
    entries: Vec<Entry>,
    free: Vec<u32>,
    recency: Recency,
    /// Holders of all entries, with the room that was allocated for them.
    holder_room: usize,
    evicted: u64,
    expired: u64,
}

/// Model and hash; in `aibrix-compat`, where models share blocks, 0 and hash.
type Key = (u64, u64);

#[derive(Debug)]
struct Entry {
    key: Key,
    used_ms: u64,
    /// No holder was last used before.
    oldest_ms: u64,
    /// Sorted by model and worker.
    holders: Vec<Holder>,
}

#[derive(Debug, Clone, Copy)]
struct Holder {
    model: u64,
    worker: Worker,
    used_ms: u64,
}

/// What the table holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TableStats {
    /// Blocks.
    pub blocks: u64,
    /// Bytes, estimated.
    pub bytes: u64,
    /// Blocks forgotten because there was no room.
    pub evicted: u64,
    /// Blocks forgotten because nobody used them for so long.
    pub expired: u64,
}

/// An entry, its place in the hash table (filled to 7/8 at most) and in the order of use.
const ENTRY_BYTES: usize = size_of::<Entry>() + (size_of::<(Key, u32)>() + 1) * 8 / 7 + 8;

impl PrefixTable {
    /// An empty table.
    pub fn new(settings: &PrefixSettings) -> Self {
        Self {
            is_compat: settings.is_compat,
            max_blocks: settings.max_blocks,
            max_bytes: if settings.max_bytes == 0 { u64::MAX } else { settings.max_bytes },
            ttl_ms: settings.eviction_duration_ms,
            interval_ms: settings.eviction_interval_ms,
            swept_ms: 0,
            by_key: HashMap::new(),
            entries: Vec::new(),
            free: Vec::new(),
            recency: Recency::default(),
            holder_room: 0,
            evicted: 0,
            expired: 0,
        }
    }

    /// What it holds now.
    pub fn stats(&self) -> TableStats {
        let (evicted, expired) = (self.evicted, self.expired);
        TableStats { blocks: self.by_key.len() as u64, bytes: self.bytes(), evicted, expired }
    }

    fn bytes(&self) -> u64 {
        (self.by_key.len() * ENTRY_BYTES + self.holder_room * size_of::<Holder>()) as u64
    }

    /// Set `percents[i]`, for each of `workers` that is allowed, to how much of `hashes` it holds
    /// without a gap from the first on, in whole percent rounded down; `None` for nothing.
    ///
    /// # Cost
    /// O(hashes + workers) where all that hold a block hold those before it; in the worst case
    /// their product.
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
        let all = workers.enumerate().filter(|&(at, _)| allowed[at]);
        // Who holds everything so far, in the order of the holders.
        let mut alive: Vec<(Worker, usize)> = all.map(|(at, worker)| (worker, at)).collect();
        if !alive.is_sorted() {
            alive.sort_unstable();
        }
        let percent = |depth: usize| (depth > 0).then(|| (depth * 100 / hashes.len()) as u32);
        let (mut depth, mut known) = (0, None);
        while depth < hashes.len() && !alive.is_empty() {
            let Some(&place) = self.by_key.get(&self.key(model, hashes[depth])) else { break };
            let entry = &mut self.entries[place as usize];
            if !self.is_compat && entry.oldest_ms + self.ttl_ms < now_ms {
                self.holder_room -= entry.holders.capacity();
                entry.prune(now_ms, self.ttl_ms);
                self.holder_room += entry.holders.capacity();
            }
            // Whoever holds a block holds those before it: as many holders are the same holders.
            if !self.is_compat && known == Some(entry.holders.len()) {
                depth += 1;
                continue;
            }
            known = Some(entry.holders.len());
            let start = entry.holders.partition_point(|holder| holder.model < model);
            let mut holders = entry.holders[start..].iter().take_while(|h| h.model == model);
            let mut next = holders.next();
            let so_far = percent(depth);
            alive.retain(|&(worker, at)| {
                while next.is_some_and(|holder| holder.worker < worker) {
                    next = holders.next();
                }
                let is_held = next.is_some_and(|holder| holder.worker == worker);
                if !is_held {
                    percents[at] = so_far;
                }
                is_held
            });
            depth += usize::from(!alive.is_empty());
        }
        let so_far = percent(depth);
        alive.into_iter().for_each(|(_, at)| percents[at] = so_far);
    }

    /// `worker` was sent the blocks of `hashes`. Of a prompt with more blocks than there is room
    /// for, the first ones are kept.
    pub fn record(&mut self, model: &str, hashes: &[u64], worker: Worker, now_ms: u64) {
        self.expire(now_ms);
        let model = xxh3_64(model.as_bytes());
        if self.is_compat {
            hashes.iter().for_each(|&hash| self.put(model, hash, worker, now_ms));
            return self.shrink();
        }
        let hashes = &hashes[..hashes.len().min(self.max_blocks)];
        let place_of = |&hash: &u64| self.by_key.get(&(model, hash)).copied();
        let places: Vec<Option<u32>> = hashes.iter().map(place_of).collect();
        let missing = places.iter().filter(|place| place.is_none()).count();
        // Those that are there are not to be forgotten for the sake of those that follow them.
        for &place in places.iter().flatten() {
            self.recency.remove(place);
            self.recency.push(place);
        }
        while self.by_key.len() + missing > self.max_blocks && self.evict() {}
        // Last ones first: then the first one is the most recently used.
        for (&hash, place) in hashes.iter().zip(places).rev() {
            self.use_entry(place, model, hash, worker, now_ms);
        }
        self.shrink();
    }

    /// `worker` was sent one block. The block is the most recently used one.
    pub fn put(&mut self, model: u64, hash: u64, worker: Worker, now_ms: u64) {
        if self.max_blocks == 0 {
            return;
        }
        let place = self.by_key.get(&self.key(model, hash)).copied();
        if place.is_none() && self.by_key.len() >= self.max_blocks {
            self.evict();
        }
        self.use_entry(place, model, hash, worker, now_ms);
    }

    /// `worker` was sent the block at `place`, or one that is not there yet.
    fn use_entry(
        &mut self,
        place: Option<u32>,
        model: u64,
        hash: u64,
        worker: Worker,
        now_ms: u64,
    ) {
        let place = match place {
            Some(place) => {
                self.recency.remove(place);
                place
            }
            None => self.add(self.key(model, hash), now_ms),
        };
        self.recency.push(place);
        let entry = &mut self.entries[place as usize];
        self.holder_room -= entry.holders.capacity();
        if !self.is_compat && entry.oldest_ms + self.ttl_ms < now_ms {
            entry.prune(now_ms, self.ttl_ms);
        }
        entry.used_ms = now_ms;
        match entry.holders.binary_search_by_key(&(model, worker), |h| (h.model, h.worker)) {
            Ok(at) => entry.holders[at].used_ms = now_ms,
            Err(at) => {
                // Most blocks have one holder.
                entry.holders.reserve_exact(usize::from(entry.holders.is_empty()));
                entry.holders.insert(at, Holder { model, worker, used_ms: now_ms });
            }
        }
        self.holder_room += entry.holders.capacity();
    }

    /// Whether anybody was sent the block.
    pub fn has(&self, model: u64, hash: u64) -> bool {
        self.by_key.contains_key(&self.key(model, hash))
    }

    /// Forget that `worker` was ever sent anything.
    ///
    /// # Cost
    /// O(blocks).
    pub fn forget(&mut self, worker: Worker) {
        let places: Vec<u32> = self.by_key.values().copied().collect();
        for place in places {
            let entry = &mut self.entries[place as usize];
            entry.holders.retain(|holder| holder.worker != worker);
            if entry.holders.is_empty() {
                self.recency.remove(place);
                self.drop_entry(place);
            }
        }
    }

    /// Forget what was not used for longer than the time to live, strictly.
    ///
    /// # Cost
    /// O(blocks forgotten).
    pub fn expire(&mut self, now_ms: u64) {
        if self.is_compat {
            if now_ms < self.swept_ms.saturating_add(self.interval_ms) {
                return;
            }
            self.swept_ms = now_ms;
        }
        while let Some(place) = self.recency.first() {
            if now_ms.saturating_sub(self.entries[place as usize].used_ms) <= self.ttl_ms {
                break;
            }
            self.recency.remove(place);
            self.drop_entry(place);
            self.expired += 1;
        }
    }

    fn key(&self, model: u64, hash: u64) -> Key {
        if self.is_compat { (0, hash) } else { (model, hash) }
    }

    fn shrink(&mut self) {
        while self.bytes() > self.max_bytes && self.evict() {}
    }

    fn evict(&mut self) -> bool {
        let Some(place) = self.recency.first() else { return false };
        self.recency.remove(place);
        self.drop_entry(place);
        self.evicted += 1;
        true
    }

    fn add(&mut self, key: Key, now_ms: u64) -> u32 {
        let holders = Vec::new();
        let entry = Entry { key, used_ms: now_ms, oldest_ms: now_ms, holders };
        let place = match self.free.pop() {
            Some(place) => {
                self.entries[place as usize] = entry;
                place
            }
            None => {
                self.entries.push(entry);
                self.entries.len() as u32 - 1
            }
        };
        self.by_key.insert(key, place);
        place
    }

    /// Drop an entry that is not in the order of use any more.
    fn drop_entry(&mut self, place: u32) {
        let entry = &mut self.entries[place as usize];
        self.by_key.remove(&entry.key);
        self.holder_room -= entry.holders.capacity();
        entry.holders = Vec::new();
        self.free.push(place);
    }
}

impl Entry {
    /// Forget holders that did not use it for longer than `ttl_ms`.
    fn prune(&mut self, now_ms: u64, ttl_ms: u64) {
        self.holders.retain(|holder| now_ms.saturating_sub(holder.used_ms) <= ttl_ms);
        let oldest_ms = self.holders.iter().map(|holder| holder.used_ms).min();
        self.oldest_ms = oldest_ms.unwrap_or(now_ms);
    }
}
