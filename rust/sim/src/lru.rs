//! Blocks in the order of their last use.

use std::collections::BTreeMap;

use hashbrown::HashMap;

/// A set of blocks that loses those that were used the longest ago.
///
/// # Cost
/// O(log blocks) for each block that is used.
#[derive(Debug)]
pub(crate) struct Lru {
    stamps: HashMap<u64, u64>,
    by_stamp: BTreeMap<u64, u64>,
    clock: u64,
    most: usize,
}

impl Lru {
    /// Of `most` blocks.
    pub fn new(most: usize) -> Self {
        Self { stamps: HashMap::new(), by_stamp: BTreeMap::new(), clock: 0, most }
    }

    /// Blocks that are there.
    pub fn len(&self) -> usize {
        self.stamps.len()
    }

    /// Whether one more pushes another one out.
    pub fn is_full(&self) -> bool {
        self.len() >= self.most
    }

    /// Leading blocks of a prompt that are there.
    pub fn matched(&self, prompt: &[u64]) -> usize {
        prompt.iter().take_while(|block| self.stamps.contains_key(*block)).count()
    }

    /// All blocks of a prompt are used; the last one is the first to go.
    pub fn add(&mut self, prompt: &[u64]) {
        for &block in prompt.iter().rev() {
            self.clock += 1;
            if let Some(old) = self.stamps.insert(block, self.clock) {
                self.by_stamp.remove(&old);
            }
            self.by_stamp.insert(self.clock, block);
        }
        while self.stamps.len() > self.most {
            let Some((_, block)) = self.by_stamp.pop_first() else { return };
            self.stamps.remove(&block);
        }
    }
}
