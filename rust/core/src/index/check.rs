//! Checks of a stored event that need no other state.

use super::types::Block;

/// Up to this size comparing all pairs is cheaper than filling a table.
const PAIRWISE_MAX: usize = 16;

/// Larger tables, for events of thousands of blocks, are not kept.
const PLACES_KEPT: usize = 4_096;

/// Finds repeated names; keeps its table between events, so that no event allocates.
#[derive(Debug, Default)]
pub(super) struct Repetitions {
    /// Name, and the round that inserted it; a power of two in length, or empty.
    table: Vec<(u64, u32)>,
    round: u32,
}

impl Repetitions {
    /// Whether a block of the event is its own parent: it is named as `parent`, or twice.
    ///
    /// # Cost
    /// O(blocks).
    pub fn is_self_referencing(&mut self, parent: Option<u64>, blocks: &[Block]) -> bool {
        if parent.is_some_and(|parent| occurs(parent, blocks)) {
            return true;
        }
        if blocks.len() <= PAIRWISE_MAX {
            return (1..blocks.len()).any(|at| occurs(blocks[at].engine_hash, &blocks[..at]));
        }
        let places = (blocks.len() * 2).next_power_of_two();
        if self.table.len() < places || self.round == u32::MAX {
            self.table = vec![(0, 0); places];
            self.round = 0;
        }
        self.round += 1;
        let mask = self.table.len() - 1;
        let is_repeated = blocks.iter().any(|block| !self.put(block.engine_hash, mask));
        if self.table.len() > PLACES_KEPT {
            *self = Self::default();
        }
        is_repeated
    }

    /// False if this round has already inserted the name.
    fn put(&mut self, name: u64, mask: usize) -> bool {
        // Names crafted to collide cost at most a probe as long as the event.
        let mut at = (name.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize & mask;
        loop {
            let place = &mut self.table[at];
            if place.1 != self.round {
                *place = (name, self.round);
                return true;
            }
            if place.0 == name {
                return false;
            }
            at = (at + 1) & mask;
        }
    }

    /// Bytes on the heap.
    pub fn bytes(&self) -> usize {
        self.table.capacity() * size_of::<(u64, u32)>()
    }
}

/// Compares all of `blocks` without an early exit, so that the loop is vectorized.
fn occurs(name: u64, blocks: &[Block]) -> bool {
    blocks.iter().fold(false, |found, block| found | (block.engine_hash == name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(names: impl IntoIterator<Item = u64>) -> Vec<Block> {
        names.into_iter().map(|engine_hash| Block { engine_hash, local_hash: 7 }).collect()
    }

    #[test]
    fn repetitions_are_found_wherever_they_are() {
        let mut seen = Repetitions::default();
        for len in [1, 2, 3, 15, 16, 17, 31, 32, 33, 34, 200] {
            let clean = blocks(0..len);
            assert!(!seen.is_self_referencing(None, &clean));
            assert!(!seen.is_self_referencing(Some(len), &clean));
            for at in 0..len {
                assert!(seen.is_self_referencing(Some(at), &clean), "{at} of {len} is the parent");
                for other in [0, len / 2, len - 1].into_iter().filter(|other| *other != at) {
                    let mut twice = clean.clone();
                    twice[at as usize].engine_hash = other;
                    assert!(
                        seen.is_self_referencing(None, &twice),
                        "{other} again at {at} of {len}"
                    );
                }
            }
        }
        assert!(!seen.is_self_referencing(Some(0), &[]));
    }
}
