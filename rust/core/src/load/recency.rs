//! LRU order: moving an item to the end costs the same at any size.

use hashbrown::HashMap;

const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Link {
    before: u32,
    after: u32,
}

/// A doubly linked list over the places of a slab; the caller knows which places are linked.
#[derive(Debug)]
pub(crate) struct Recency {
    links: Vec<Link>,
    first: u32,
    last: u32,
}

impl Default for Recency {
    fn default() -> Self {
        Self { links: Vec::new(), first: NONE, last: NONE }
    }
}

impl Recency {
    /// The place that has been idle longest.
    pub(crate) fn first(&self) -> Option<u32> {
        (self.first != NONE).then_some(self.first)
    }

    /// Link `place`, which is not linked, as the most recent one.
    pub(crate) fn push(&mut self, place: u32) {
        let index = place as usize;
        if index >= self.links.len() {
            self.links.resize(index + 1, Link { before: NONE, after: NONE });
        }
        self.links[index] = Link { before: self.last, after: NONE };
        match self.last {
            NONE => self.first = place,
            last => self.links[last as usize].after = place,
        }
        self.last = place;
    }

    /// Unlink `place`, which is linked.
    pub(crate) fn remove(&mut self, place: u32) {
        let Link { before, after } = self.links[place as usize];
        match before {
            NONE => self.first = after,
            before => self.links[before as usize].after = after,
        }
        match after {
            NONE => self.last = before,
            after => self.links[after as usize].before = before,
        }
    }
}

/// A bounded LRU map: above its size the least recently used value is evicted.
#[derive(Debug)]
pub(crate) struct Recent<V> {
    max: usize,
    by_key: HashMap<u64, u32>,
    /// Unused places are in `free`.
    entries: Vec<(u64, V)>,
    free: Vec<u32>,
    recency: Recency,
    evicted: u64,
}

impl<V> Recent<V> {
    /// An empty map for `max` values.
    pub(crate) fn new(max: usize) -> Self {
        Self {
            max,
            by_key: HashMap::new(),
            entries: Vec::new(),
            free: Vec::new(),
            recency: Recency::default(),
            evicted: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.by_key.len()
    }

    /// Number of evicted values.
    pub(crate) fn evicted(&self) -> u64 {
        self.evicted
    }

    /// The value of `key`; does not count as a use.
    pub(crate) fn get(&self, key: u64) -> Option<&V> {
        self.by_key.get(&key).map(|&place| &self.entries[place as usize].1)
    }

    pub(crate) fn get_mut(&mut self, key: u64) -> Option<&mut V> {
        self.by_key.get(&key).map(|&place| &mut self.entries[place as usize].1)
    }

    /// Uses the value of `key`, created if missing.
    pub(crate) fn touch(&mut self, key: u64, make: impl FnOnce() -> V) -> &mut V {
        if let Some(&place) = self.by_key.get(&key) {
            self.recency.remove(place);
            self.recency.push(place);
            return &mut self.entries[place as usize].1;
        }
        if self.by_key.len() >= self.max
            && let Some(place) = self.recency.first()
        {
            self.drop_at(place);
            self.evicted += 1;
        }
        let place = self.free.pop().unwrap_or(self.entries.len() as u32);
        match self.entries.get_mut(place as usize) {
            Some(entry) => *entry = (key, make()),
            None => self.entries.push((key, make())),
        }
        self.by_key.insert(key, place);
        self.recency.push(place);
        &mut self.entries[place as usize].1
    }

    /// Drops values while `is_old`, least recently used first; returns their number.
    pub(crate) fn drop_while(&mut self, is_old: impl Fn(&V) -> bool) -> usize {
        let before = self.len();
        while let Some(place) = self.recency.first() {
            if !is_old(&self.entries[place as usize].1) {
                break;
            }
            self.drop_at(place);
        }
        before - self.len()
    }

    /// Drops all values selected by `is_gone`. Costs O(all).
    pub(crate) fn drop_where(&mut self, is_gone: impl Fn(&V) -> bool) {
        let held = self.by_key.values().copied();
        let gone: Vec<u32> = held.filter(|&at| is_gone(&self.entries[at as usize].1)).collect();
        gone.into_iter().for_each(|place| self.drop_at(place));
    }

    fn drop_at(&mut self, place: u32) {
        self.recency.remove(place);
        self.by_key.remove(&self.entries[place as usize].0);
        self.free.push(place);
    }
}
