//! Prefixes that the requests in flight want.
//!
//! Every prompt is marked at the same few depths, so that two prompts with a common prefix share
//! the marks within it.

use hashbrown::HashMap;
use smallvec::SmallVec;

/// Maximum marks of a prompt: the last one is at 2^20 blocks.
pub(super) const MAX_MARKS: usize = 40;

/// Depth of mark `at`: 1, 2, 3, 4, 6, 8, 12, 16, 24, ... blocks.
pub(super) fn blocks_of(at: usize) -> u64 {
    match at {
        0 => 1,
        at if at % 2 == 1 => 1 << at.div_ceil(2),
        at => 3 << (at / 2 - 1),
    }
}

/// The piece that contains block number `blocks` (from 0): the number of marks at or before it.
#[inline(always)]
pub(super) fn piece_of(blocks: u32) -> usize {
    // From the mark at two blocks on, the exponent and the first mantissa bit count the marks.
    // Branchless, because what workers hold is unpredictable.
    const BEFORE: u64 = 2 * 1_023;
    let digits = f64::from(blocks).to_bits() >> 51;
    digits.saturating_sub(BEFORE).max(u64::from(blocks.min(1))) as usize
}

/// Sequence hashes of a prompt at the depths of the marks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Marks(SmallVec<[u64; 16]>);

impl Marks {
    /// The marks of a prompt with these sequence hashes.
    pub fn of(sequence_hashes: &[u64]) -> Self {
        let depth = |at: usize| (blocks_of(at) - 1) as usize;
        let marks = (0..MAX_MARKS).map_while(|at| sequence_hashes.get(depth(at)).copied());
        Self(marks.collect())
    }
}

/// The number of requests in flight that want each marked prefix.
#[derive(Debug, Default)]
pub(super) struct Wanted {
    by_prefix: HashMap<u64, u32>,
}

impl Wanted {
    /// The number of prefixes that requests in flight want.
    pub fn len(&self) -> usize {
        self.by_prefix.len()
    }

    pub fn add(&mut self, marks: &Marks) {
        for mark in &marks.0 {
            *self.by_prefix.entry(*mark).or_default() += 1;
        }
    }

    pub fn remove(&mut self, marks: &Marks) {
        for mark in &marks.0 {
            if let Some(count) = self.by_prefix.get_mut(mark) {
                *count -= 1;
                if *count == 0 {
                    self.by_prefix.remove(mark);
                }
            }
        }
    }

    /// Weight of a token in each piece of a prompt: 1 if no other request wants it; if R requests
    /// in flight want it and k workers hold it, 1 / (1 + R / (k + 1)). `overlaps`: leading blocks
    /// by worker. Empty if all tokens count in full.
    pub fn weights(
        &self,
        marks: &Marks,
        overlaps: impl Iterator<Item = u32>,
    ) -> SmallVec<[f64; MAX_MARKS]> {
        let wants = marks.0.iter().map_while(|mark| self.by_prefix.get(mark).copied());
        let wants: SmallVec<[u32; MAX_MARKS]> = wants.collect();
        if wants.is_empty() {
            return SmallVec::new();
        }
        // Four counters in turn, because most workers fall into the same piece and each increment
        // would wait for the one before.
        let mut turns = [[0_u32; MAX_MARKS + 2]; 4];
        for (at, blocks) in overlaps.enumerate() {
            turns[at % 4][piece_of(blocks).min(wants.len())] += 1;
        }
        let mut holders = [0; MAX_MARKS + 2];
        for (at, count) in holders.iter_mut().enumerate() {
            *count = turns.iter().map(|turn| turn[at]).sum();
        }
        // From "holds exactly this much" to "holds at least this much".
        for piece in (0..wants.len()).rev() {
            holders[piece] += holders[piece + 1];
        }
        let weight = |(piece, wants): (usize, &u32)| {
            let holders = f64::from(holders[piece + 1]);
            1.0 / (1.0 + f64::from(*wants) / (holders + 1.0))
        };
        wants.iter().enumerate().map(weight).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_and_pieces_are_two_views_of_the_same_depths() {
        let depths: Vec<u64> = (0..9).map(blocks_of).collect();
        assert_eq!(depths, [1, 2, 3, 4, 6, 8, 12, 16, 24]);
        for blocks in 0..5_000 {
            let passed =
                (0..MAX_MARKS).take_while(|at| blocks_of(*at) <= u64::from(blocks)).count();
            assert_eq!(piece_of(blocks), passed, "{blocks}");
        }
        assert_eq!(Marks::of(&[7; 5]).0.len(), 4);
    }

    #[test]
    fn a_wanted_prefix_counts_less_until_workers_hold_it() {
        let (hot, other): (Vec<u64>, Vec<u64>) = ((0..64).collect(), (100..164).collect());
        let mut wanted = Wanted::default();
        let marks = Marks::of(&hot);
        assert!(wanted.weights(&marks, [].into_iter()).is_empty());
        (0..3).for_each(|_| wanted.add(&marks));
        let nobody = wanted.weights(&marks, [0, 0].into_iter());
        assert!(nobody.iter().all(|weight| *weight == 0.25), "{nobody:?}");
        let one = wanted.weights(&marks, [0, 64].into_iter());
        assert!(one.iter().all(|weight| *weight == 0.4), "{one:?}");
        assert!(wanted.weights(&Marks::of(&other), [0].into_iter()).is_empty());
        (0..3).for_each(|_| wanted.remove(&marks));
        assert!(wanted.by_prefix.is_empty());
    }
}
