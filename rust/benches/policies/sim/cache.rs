//! An engine's paged cache, as `python/kvflash/mocker/block_manager.py` has it.

use std::collections::BTreeMap;

use hashbrown::HashMap;

/// Who uses a full block, and when it was last let go.
#[derive(Clone, Copy)]
enum Full {
    Active(u32),
    Inactive(u64),
}

/// Full blocks by their id, and blocks that are still being filled.
pub struct Cache {
    capacity: u64,
    partial: u64,
    active: u64,
    full: HashMap<u64, Full>,
    by_age: BTreeMap<u64, u64>,
    age: u64,
    evicted: Vec<u64>,
}

impl Cache {
    pub fn new(capacity: u64) -> Self {
        let (full, by_age, evicted) = Default::default();
        Self { capacity, partial: 0, active: 0, full, by_age, age: 0, evicted }
    }

    /// Blocks that requests hold.
    pub fn used(&self) -> u64 {
        self.active + self.partial
    }

    /// Share of the blocks that requests hold.
    pub fn usage(&self) -> f64 {
        self.used() as f64 / self.capacity as f64
    }

    /// Leading blocks that are cached.
    pub fn prefix(&self, ids: impl Iterator<Item = u64>) -> u64 {
        ids.take_while(|id| self.full.contains_key(id)).count() as u64
    }

    /// By how many blocks `take` of the same would raise `used`.
    pub fn growth(&self, ids: impl Iterator<Item = u64>, partial: u64) -> u64 {
        partial
            + ids.filter(|id| !matches!(self.full.get(id), Some(Full::Active(_)))).count() as u64
    }

    /// Use cached blocks and reserve `partial` more: all of it, or nothing and false.
    pub fn take(&mut self, ids: impl Iterator<Item = u64> + Clone, partial: u64) -> bool {
        if self.used() + self.growth(ids.clone(), partial) > self.capacity {
            return false;
        }
        for id in ids {
            self.add_ref(id);
        }
        self.partial += partial;
        while self.used() + self.by_age.len() as u64 > self.capacity {
            let (_, id) = self.by_age.pop_first().expect("what is not used can be evicted");
            self.full.remove(&id);
            self.evicted.push(id);
        }
        true
    }

    fn add_ref(&mut self, id: u64) {
        match self.full.entry(id).or_insert(Full::Active(0)) {
            Full::Active(refs) => {
                self.active += u64::from(*refs == 0);
                *refs += 1;
            }
            inactive => {
                if let Full::Inactive(age) = *inactive {
                    self.by_age.remove(&age);
                }
                *inactive = Full::Active(1);
                self.active += 1;
            }
        }
    }

    /// A partial block is full now. False when there was one of that id before.
    pub fn promote(&mut self, id: u64) -> bool {
        self.partial -= 1;
        let is_new = !self.full.contains_key(&id);
        self.add_ref(id);
        is_new
    }

    /// Let go of full blocks, the last one first, and of partial ones.
    pub fn release(&mut self, ids: impl DoubleEndedIterator<Item = u64>, partial: u64) {
        self.partial -= partial;
        for id in ids.rev() {
            let Some(Full::Active(refs)) = self.full.get_mut(&id) else {
                unreachable!("only what is used is let go")
            };
            *refs -= 1;
            if *refs == 0 {
                self.age += 1;
                self.full.insert(id, Full::Inactive(self.age));
                self.by_age.insert(self.age, id);
                self.active -= 1;
            }
        }
    }

    /// What was evicted since the last call, in order.
    pub fn drain_evicted(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.evicted)
    }
}
