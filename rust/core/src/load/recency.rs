//! LRU order: moving an item to the end costs the same at any size.

use std::hash::Hash;
use std::ops::{Index, IndexMut};

use hashbrown::HashMap;
use slab::Slab;

const NONE: u32 = u32::MAX;

#[derive(Debug)]
struct Entry<K, V> {
    key: K,
    value: V,
    before: u32,
    after: u32,
}

/// A map in the order of use, whose values keep their place: above its size the least recently used
/// one is evicted.
#[derive(Debug)]
pub(crate) struct Recent<K, V> {
    max: usize,
    by_key: HashMap<K, u32>,
    entries: Slab<Entry<K, V>>,
    first: u32,
    last: u32,
    evicted: u64,
}

impl<K: Copy + Eq + Hash, V> Recent<K, V> {
    /// An empty map for `max` values.
    pub(crate) fn new(max: usize) -> Self {
        let (by_key, entries) = (HashMap::new(), Slab::new());
        Self { max, by_key, entries, first: NONE, last: NONE, evicted: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.by_key.len()
    }

    /// Number of evicted values.
    pub(crate) fn evicted(&self) -> u64 {
        self.evicted
    }

    /// The place of `key`; does not count as a use.
    pub(crate) fn place(&self, key: K) -> Option<u32> {
        self.by_key.get(&key).copied()
    }

    /// The value of `key`; does not count as a use.
    pub(crate) fn get(&self, key: K) -> Option<&V> {
        self.place(key).map(|place| &self[place])
    }

    pub(crate) fn get_mut(&mut self, key: K) -> Option<&mut V> {
        self.place(key).map(|place| &mut self[place])
    }

    /// The key of a place.
    pub(crate) fn key(&self, place: u32) -> K {
        self.entries[place as usize].key
    }

    /// The place that was not used for longest.
    pub(crate) fn first(&self) -> Option<u32> {
        (self.first != NONE).then_some(self.first)
    }

    /// Uses the value of `key`, created if missing.
    pub(crate) fn touch(&mut self, key: K, make: impl FnOnce() -> V) -> &mut V {
        let place = match self.place(key) {
            Some(place) => {
                self.renew(place);
                place
            }
            None => self.insert(key, make()),
        };
        &mut self[place]
    }

    /// Adds the value of a new key as the most recently used one.
    pub(crate) fn insert(&mut self, key: K, value: V) -> u32 {
        if self.len() >= self.max {
            self.evict();
        }
        let place = self.entries.insert(Entry { key, value, before: NONE, after: NONE }) as u32;
        self.by_key.insert(key, place);
        self.link(place);
        place
    }

    /// Marks the value at `place` as the most recently used one.
    pub(crate) fn renew(&mut self, place: u32) {
        self.unlink(place);
        self.link(place);
    }

    /// Drops the least recently used value, if there is one.
    pub(crate) fn evict(&mut self) -> Option<V> {
        let value = self.remove(self.first()?);
        self.evicted += 1;
        Some(value)
    }

    pub(crate) fn remove(&mut self, place: u32) -> V {
        self.unlink(place);
        let entry = self.entries.remove(place as usize);
        self.by_key.remove(&entry.key);
        entry.value
    }

    /// Drops values while `is_old`, least recently used first; returns their number.
    pub(crate) fn drop_while(&mut self, is_old: impl Fn(&V) -> bool) -> usize {
        let before = self.len();
        while let Some(place) = self.first().filter(|&place| is_old(&self[place])) {
            self.remove(place);
        }
        before - self.len()
    }

    /// The places of all values that are `wanted`, in no particular order.
    pub(crate) fn places(&self, wanted: impl Fn(&V) -> bool) -> Vec<u32> {
        let found = self.entries.iter().filter(|(_, entry)| wanted(&entry.value));
        found.map(|(place, _)| place as u32).collect()
    }

    fn link(&mut self, place: u32) {
        let before = std::mem::replace(&mut self.last, place);
        let entry = &mut self.entries[place as usize];
        (entry.before, entry.after) = (before, NONE);
        *self.after(before) = place;
    }

    fn unlink(&mut self, place: u32) {
        let Entry { before, after, .. } = self.entries[place as usize];
        *self.after(before) = after;
        match after {
            NONE => self.last = before,
            after => self.entries[after as usize].before = before,
        }
    }

    /// What follows after a place; at first for [`NONE`].
    fn after(&mut self, place: u32) -> &mut u32 {
        match place {
            NONE => &mut self.first,
            place => &mut self.entries[place as usize].after,
        }
    }
}

impl<K, V> Index<u32> for Recent<K, V> {
    type Output = V;

    fn index(&self, place: u32) -> &V {
        &self.entries[place as usize].value
    }
}

impl<K, V> IndexMut<u32> for Recent<K, V> {
    fn index_mut(&mut self, place: u32) -> &mut V {
        &mut self.entries[place as usize].value
    }
}
