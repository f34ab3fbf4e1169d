//! Dumps: the order of a worker's blocks, and the way back into an index.

use std::collections::HashMap;

use super::types::{Block, DumpBlock, Parent, StoreOutcome};
use super::{BlockIndex, chain};

/// Most copies of one block that [`restore`] believes; a dump that claims more is cut to this.
const MAX_COPIES: u32 = 4096;

impl DumpBlock {
    /// The parent to store this block under: by chain hash, so that it need not be held.
    pub fn parent(&self) -> Option<Parent> {
        let by_name = self.parent_engine.map(Parent::Engine);
        self.parent_chain.map(Parent::Chain).or(by_name)
    }
}

/// Stores one block of a dump, as often as it has copies. Returns the outcome of the first time.
pub fn restore(index: &dyn BlockIndex, block: &DumpBlock) -> StoreOutcome {
    let one = [Block { engine_hash: block.engine_hash, local_hash: block.local_hash }];
    let first = index.store(block.worker, block.tier, block.parent(), block.seed, &one);
    if first.rejected.is_none() && first.refused == 0 {
        for _ in 1..block.copies.min(MAX_COPIES) {
            index.store(block.worker, block.tier, block.parent(), block.seed, &one);
        }
    }
    first
}

/// Fills in `parent_engine` and sorts parents before children.
///
/// Among blocks of one depth the order is that of chain hash, name and tier, so that equal holdings
/// give equal dumps. Depth counts from the nearest block whose parent the worker does not hold.
pub(super) fn arrange(mut blocks: Vec<DumpBlock>) -> Vec<DumpBlock> {
    let own = |b: &DumpBlock| chain(b.parent_chain, b.local_hash);
    let mut by_chain: HashMap<u64, (u64, Option<u64>)> = HashMap::with_capacity(blocks.len());
    for block in &blocks {
        let entry = by_chain.entry(own(block)).or_insert((block.engine_hash, block.parent_chain));
        entry.0 = entry.0.min(block.engine_hash);
    }
    let mut depths: HashMap<u64, usize> = HashMap::with_capacity(by_chain.len());
    let mut path = Vec::new();
    for &start in by_chain.keys() {
        let mut at = start;
        let mut depth = loop {
            if let Some(&depth) = depths.get(&at) {
                break depth + 1;
            }
            // Claim the block before going up: a forged dump can close a ring of chain hashes, and
            // the second visit must end the climb.
            depths.insert(at, 0);
            path.push(at);
            match by_chain[&at].1 {
                Some(parent) if by_chain.contains_key(&parent) => at = parent,
                _ => break 0,
            }
        };
        while let Some(at) = path.pop() {
            depths.insert(at, depth);
            depth += 1;
        }
    }
    for block in &mut blocks {
        block.parent_engine = block.parent_chain.and_then(|p| by_chain.get(&p)).map(|b| b.0);
    }
    blocks.sort_by_cached_key(|b| (depths[&own(b)], own(b), b.engine_hash, b.tier));
    blocks
}
