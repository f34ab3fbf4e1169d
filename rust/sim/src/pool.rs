//! An engine's blocks, as vLLM's block pool manages them: references, names, and a queue of free blocks that
//! keep what they hold until they are needed.

use hashbrown::HashMap;
use smallvec::SmallVec;

/// What a full block holds: its cache group, and an id that stands for its tokens behind equal tokens.
pub type Key = (u8, u64);

/// The block that stands for "not needed": outside a window.
pub const NULL: u32 = 0;

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Block {
    refs: u32,
    /// Neighbours in the free queue.
    before: u32,
    after: u32,
    key: Option<Key>,
}

/// Blocks by number; 0 is [`NULL`].
///
/// # Source
/// vLLM 0.32, `v1/core/block_pool.py`: a block that is let go waits at the end of the free queue, or at its front
/// where it holds nothing; a new one is taken from the front, and what it held is lost then.
pub struct Pool {
    blocks: Vec<Block>,
    /// Blocks that hold the same, the oldest first.
    cached: HashMap<Key, SmallVec<[u32; 1]>>,
    first: u32,
    last: u32,
    free: usize,
    removed: Vec<Key>,
}

impl Pool {
    /// `count` blocks, the null block among them.
    pub fn new(count: u32) -> Self {
        let empty = Block { refs: 0, before: NONE, after: NONE, key: None };
        let mut pool = Self {
            blocks: vec![empty; count as usize],
            cached: HashMap::new(),
            first: NONE,
            last: NONE,
            free: 0,
            removed: Vec::new(),
        };
        (1..count).for_each(|number| pool.append(number));
        pool
    }

    /// Blocks that nobody uses.
    pub fn free(&self) -> usize {
        self.free
    }

    /// Share of the blocks that requests use, 0 to 1.
    pub fn usage(&self) -> f64 {
        1.0 - self.free as f64 / (self.blocks.len() - 1) as f64
    }

    /// The block that holds this.
    pub fn find(&self, key: Key) -> Option<u32> {
        self.cached.get(&key).map(|copies| copies[0])
    }

    /// How many of these blocks are in the free queue; the null block is not.
    pub fn free_among(&self, blocks: &[u32]) -> usize {
        let is_free = |&&block: &&u32| block != NULL && self.blocks[block as usize].refs == 0;
        blocks.iter().filter(is_free).count()
    }

    /// Use these blocks, too.
    pub fn touch(&mut self, blocks: &[u32]) {
        for &block in blocks.iter().filter(|&&block| block != NULL) {
            if self.blocks[block as usize].refs == 0 {
                self.unlink(block);
            }
            self.blocks[block as usize].refs += 1;
        }
    }

    /// Take a free block; what it held is lost.
    ///
    /// # Panics
    /// Where none is free.
    pub fn take(&mut self) -> u32 {
        let number = self.first;
        assert!(number != NONE, "the caller looks at free() first");
        self.unlink(number);
        let block = &mut self.blocks[number as usize];
        block.refs = 1;
        if let Some(key) = block.key.take() {
            self.forget(key, number);
            self.removed.push(key);
        }
        number
    }

    /// A block is full.
    pub fn name(&mut self, block: u32, key: Key) {
        self.blocks[block as usize].key = Some(key);
        self.cached.entry(key).or_default().push(block);
    }

    /// Let go of blocks, in this order; those that hold nothing are the next to be taken.
    pub fn release(&mut self, blocks: impl Iterator<Item = u32>) {
        for number in blocks.filter(|&number| number != NULL) {
            let block = &mut self.blocks[number as usize];
            block.refs -= 1;
            match (block.refs, block.key) {
                (0, None) => self.prepend(number),
                (0, Some(_)) => self.append(number),
                _ => (),
            }
        }
    }

    /// Forget what all blocks hold. Nobody uses any.
    pub fn clear(&mut self) {
        self.blocks.iter_mut().for_each(|block| block.key = None);
        self.cached.clear();
        self.removed.clear();
    }

    /// What was lost since the last call, in order.
    pub fn drain_removed(&mut self) -> Vec<Key> {
        std::mem::take(&mut self.removed)
    }

    fn forget(&mut self, key: Key, number: u32) {
        let Some(copies) = self.cached.get_mut(&key) else { return };
        copies.retain(|copy| *copy != number);
        if copies.is_empty() {
            self.cached.remove(&key);
        }
    }

    fn append(&mut self, number: u32) {
        let before = self.last;
        let block = &mut self.blocks[number as usize];
        (block.before, block.after) = (before, NONE);
        match before {
            NONE => self.first = number,
            before => self.blocks[before as usize].after = number,
        }
        self.last = number;
        self.free += 1;
    }

    fn prepend(&mut self, number: u32) {
        let after = self.first;
        let block = &mut self.blocks[number as usize];
        (block.before, block.after) = (NONE, after);
        match after {
            NONE => self.last = number,
            after => self.blocks[after as usize].before = number,
        }
        self.first = number;
        self.free += 1;
    }

    fn unlink(&mut self, number: u32) {
        let Block { before, after, .. } = self.blocks[number as usize];
        match before {
            NONE => self.first = after,
            before => self.blocks[before as usize].after = after,
        }
        match after {
            NONE => self.last = before,
            after => self.blocks[after as usize].before = before,
        }
        self.free -= 1;
    }
}
