//! The latest batches by number, for clients that missed some.

use std::collections::VecDeque;
use std::sync::Arc;

/// A batch with its sequence number.
pub type Batch = (u64, Arc<Vec<u8>>);

/// Numbers batches from 0 and keeps the latest ones.
#[derive(Debug)]
pub struct Ring {
    batches: VecDeque<Batch>,
    bytes: usize,
    next_sequence: u64,
    batches_max: usize,
    bytes_max: usize,
}

impl Ring {
    /// A ring that keeps up to `batches_max` batches of `bytes_max` bytes in total, and at least
    /// the latest one.
    pub fn new(batches_max: usize, bytes_max: usize) -> Self {
        Self { batches: VecDeque::new(), bytes: 0, next_sequence: 0, batches_max, bytes_max }
    }

    /// Numbers a batch and keeps it. Publish it afterwards, so that a published number can always
    /// be requested.
    pub fn push(&mut self, payload: Vec<u8>) -> Batch {
        let batch = (self.next_sequence, Arc::new(payload));
        self.next_sequence += 1;
        self.bytes += batch.1.len();
        self.batches.push_back(batch.clone());
        while self.batches.len() > 1
            && (self.batches.len() > self.batches_max || self.bytes > self.bytes_max)
        {
            if let Some((_, oldest)) = self.batches.pop_front() {
                self.bytes -= oldest.len();
            }
        }
        batch
    }

    /// The kept batches from `start` on.
    pub fn since(&self, start: u64) -> Vec<Batch> {
        self.batches.iter().filter(|(sequence, _)| *sequence >= start).cloned().collect()
    }

    /// Number and bytes of the kept batches.
    pub fn size(&self) -> (usize, usize) {
        (self.batches.len(), self.bytes)
    }

    /// The number of the next batch, which equals the number of batches so far.
    pub fn next_sequence(&self) -> u64 {
        self.next_sequence
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(ring: &Ring, start: u64) -> Vec<u64> {
        ring.since(start).iter().map(|(sequence, _)| *sequence).collect()
    }

    #[test]
    fn the_latest_are_kept_within_both_limits() {
        let mut ring = Ring::new(3, 100);
        for size in [10, 20, 30, 40] {
            ring.push(vec![0; size]);
        }
        assert_eq!(kept(&ring, 0), [1, 2, 3], "three batches at most");
        assert_eq!(kept(&ring, 2), [2, 3]);
        assert_eq!(ring.push(vec![0; 60]).0, 4);
        assert_eq!(kept(&ring, 0), [3, 4], "100 bytes at most");
        ring.push(vec![0; 500]);
        assert_eq!(kept(&ring, 0), [5], "the latest is always kept");
        assert_eq!((kept(&ring, 6), ring.next_sequence()), (vec![], 6));
    }
}
