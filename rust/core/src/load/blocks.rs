//! The single reverse map: block -> the workers that use it now.

use hashbrown::HashMap;
use hashbrown::hash_map::Entry as Place;

use super::holders::{Holders, WHOLE};

/// The block directly before this one in the requests that hold it.
///
/// If every request that holds a block holds the same one directly before it, the workers of the
/// block are a subset of the workers of that one. Eight bytes: hashes equal to one of the two
/// numbers below are never taken for a parent, which costs time but not correctness.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Parent(u64);

impl Parent {
    /// It is the first block of its requests.
    const FIRST: Self = Self(0);
    /// Requests differ, so nothing can be concluded.
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

/// Result of releasing a request's blocks on a worker.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Released {
    /// Blocks without users on the worker.
    pub(super) blocks: u64,
    /// Their discount from whole blocks, in units of `1 / WHOLE`.
    pub(super) discount: u64,
}

/// Blocks in use, with their workers.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    blocks: HashMap<u64, Block>,
}

impl Blocks {
    /// References every entry of `hashes` on `slot`; returns the number of blocks that are new to
    /// it.
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
        // The end of a burst releases its memory; steady traffic never gets here.
        if self.blocks.is_empty() && self.blocks.capacity() > 4096 {
            self.blocks = HashMap::new();
        }
        released
    }

    /// Sets the weight of the entries with exactly one reference on `slot` to `fraction`; returns
    /// the change of the worker's discount, in units of `1 / WHOLE`.
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

    /// Adds the number of entries of `hashes` that each slot uses now to `counts[slot]`.
    ///
    /// Along a chain of nested blocks a worker is credited once, where it drops out, and not once
    /// per block: a prompt that is active on every worker costs one pass over the workers.
    pub(super) fn count(&self, hashes: &[u64], counts: &mut [u32]) {
        // The holders of the previous block, and the number of blocks that they are still to be
        // credited with.
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
