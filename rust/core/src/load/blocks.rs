//! The one reverse map: block -> the workers that use it now.

use hashbrown::HashMap;
use hashbrown::hash_map::Entry as Place;

use super::holders::{Holders, WHOLE};

/// The block that came directly before this one in the requests that hold it.
///
/// When every request that holds a block holds the same one directly before it, the workers of
/// the block are a subset of the workers of that one. Eight bytes: hashes that happen to be one
/// of the two numbers below are never taken for a parent, which costs time and no truth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Parent(u64);

impl Parent {
    /// It is the first block of its requests.
    const FIRST: Self = Self(0);
    /// Requests disagree: nothing can be concluded.
    const MIXED: Self = Self(1);

    fn of(hash: u64) -> Self {
        if hash > Self::MIXED.0 { Self(hash) } else { Self::MIXED }
    }

    fn is_block(self) -> bool {
        self.0 > Self::MIXED.0
    }
}

#[derive(Debug)]
struct Block {
    parent: Parent,
    holders: Holders,
}

/// What a worker got back when a request let go of its blocks.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Released {
    /// Blocks that nobody on the worker uses any more.
    pub(super) blocks: u64,
    /// How much less than whole those counted, in units of `1 / WHOLE`.
    pub(super) discount: u64,
}

/// Blocks in use, and by whom.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    blocks: HashMap<u64, Block>,
}

impl Blocks {
    /// Reference every entry of `hashes` on `slot`; how many blocks were new to it.
    pub(super) fn acquire(&mut self, hashes: &[u64], slot: u16, slot_count: usize) -> u64 {
        let mut parent = Parent::FIRST;
        let mut added = 0;
        for &hash in hashes {
            added += u64::from(match self.blocks.entry(hash) {
                Place::Occupied(mut place) => {
                    let block = place.get_mut();
                    if block.parent != parent {
                        block.parent = Parent::MIXED;
                    }
                    block.holders.acquire(slot, slot_count)
                }
                Place::Vacant(place) => {
                    place.insert(Block { parent, holders: Holders::new(slot) });
                    true
                }
            });
            parent = Parent::of(hash);
        }
        added
    }

    /// Undo one [`acquire`](Self::acquire) of the same entries.
    pub(super) fn release(&mut self, hashes: &[u64], slot: u16) -> Released {
        let mut released = Released::default();
        for &hash in hashes {
            let Place::Occupied(mut place) = self.blocks.entry(hash) else { continue };
            if let Some((fraction, is_last)) = place.get_mut().holders.release(slot) {
                released.blocks += 1;
                released.discount += u64::from(WHOLE - fraction);
                if is_last {
                    place.remove();
                }
            }
        }
        // The last wave of a burst gives its memory back; steady traffic never gets here.
        if self.blocks.is_empty() && self.blocks.capacity() > 4096 {
            self.blocks = HashMap::new();
        }
        released
    }

    /// Make the entries with exactly one reference on `slot` count as `fraction`; by how much the
    /// worker's discount changes, in units of `1 / WHOLE`.
    pub(super) fn weigh(&mut self, hashes: &[u64], slot: u16, fraction: u16) -> i64 {
        let mut change = 0;
        for hash in hashes {
            let block = self.blocks.get_mut(hash);
            if let Some(before) = block.and_then(|block| block.holders.weigh(slot, fraction)) {
                change += i64::from(before) - i64::from(fraction);
            }
        }
        change
    }

    /// Add to `counts[slot]`, for every slot, how many entries of `hashes` it uses now.
    ///
    /// Along a chain of nested blocks a worker is credited once, where it drops out, and not once
    /// a block: a prompt that is active on every worker costs one pass over the workers.
    pub(super) fn count(&self, hashes: &[u64], counts: &mut [u32]) {
        // The holders of the block before, and how many blocks each of them is still owed.
        let mut run: Option<(&Holders, u32)> = None;
        let mut before = Parent::FIRST;
        for &hash in hashes {
            let block = self.blocks.get(&hash);
            run = match (block, run) {
                (Some(block), Some((holders, owed)))
                    if before.is_block() && block.parent == before =>
                {
                    let is_same = holders.len() == block.holders.len();
                    if is_same || holders.credit_without(&block.holders, owed, counts) {
                        Some((&block.holders, owed + 1))
                    } else {
                        holders.credit(owed, counts);
                        Some((&block.holders, 1))
                    }
                }
                (block, run) => {
                    if let Some((holders, owed)) = run {
                        holders.credit(owed, counts);
                    }
                    block.map(|block| (&block.holders, 1))
                }
            };
            before = Parent::of(hash);
        }
        if let Some((holders, owed)) = run {
            holders.credit(owed, counts);
        }
    }

    /// Distinct blocks in use on any worker.
    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }
}
