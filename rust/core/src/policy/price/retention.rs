//! How long a worker keeps blocks: the age, since their last use, of blocks that it evicts now.
//!
//! Ages are in requests to the pool; see [`Traffic::requests`](super::Traffic).

use hashbrown::HashMap;

/// Blocks per worker with a recorded last use; a sample if it holds more.
const SAMPLE: usize = 256;
/// Share of older evictions that is forgotten when that share of the sample is evicted.
const MEMORY: f64 = 0.3;
/// Age at which a block of the sample counts as gone, as a multiple of the mean age at eviction:
/// not every block is reported as removed, or was ever stored.
const LOST_AGES: f64 = 8.0;
/// Blocks of a full sample without lost ones above which it is halved.
const THINNED: usize = SAMPLE * 3 / 4;

/// Evictions of one worker.
#[derive(Debug, Default)]
pub(super) struct Retention {
    /// The request that last used a block of the sample, by local hash.
    used: HashMap<u64, u64>,
    /// The sample contains blocks with this many leading zeros in their hash.
    zeros: u32,
    /// Mean age at eviction, and its weight.
    age: f64,
    weight: f64,
    /// The request at which it last evicted a block.
    evicted: u64,
    is_full: bool,
}

impl Retention {
    fn is_sampled(zeros: u32, hash: u64) -> bool {
        hash.leading_zeros() >= zeros
    }

    /// Records that a prompt of these blocks was routed to the worker.
    pub fn used(&mut self, local_hashes: &[u64], now: u64) {
        for hash in local_hashes {
            if Self::is_sampled(self.zeros, *hash) {
                self.used.insert(*hash, now);
                if self.used.len() > SAMPLE {
                    self.shrink(now);
                }
            }
        }
    }

    /// Makes room in the sample: drops what must have gone unreported, and then half if needed.
    fn shrink(&mut self, now: u64) {
        if let Some(age) = self.age(now) {
            let kept = |used: u64| now.saturating_sub(used) as f64 <= LOST_AGES * age;
            self.used.retain(|_, used| kept(*used));
        }
        if self.used.len() > THINNED {
            self.zeros += 1;
            let zeros = self.zeros;
            self.used.retain(|hash, _| Self::is_sampled(zeros, *hash));
        }
    }

    /// Records that the worker evicted these blocks.
    pub fn evicted(&mut self, local_hashes: &[u64], now: u64) {
        self.is_full = true;
        self.evicted = now;
        for hash in local_hashes {
            if !Self::is_sampled(self.zeros, *hash) {
                continue;
            }
            let share = 1.0 / (MEMORY * self.used.len().max(4) as f64);
            let Some(used) = self.used.remove(hash) else { continue };
            let age = now.saturating_sub(used) as f64;
            let kept = (-share).exp();
            self.weight = self.weight * kept + 1.0;
            self.age += (age - self.age) / self.weight;
        }
    }

    /// Whether it has evicted anything since it was empty.
    pub fn is_full(&self) -> bool {
        self.is_full
    }

    /// Mean age of blocks that it would evict now; `None` before the first eviction. While it evicts
    /// nothing, the next candidate ages.
    pub fn age(&self, now: u64) -> Option<f64> {
        let since = now.saturating_sub(self.evicted) as f64;
        (self.weight > 0.0).then_some(self.age + since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(at: u64) -> u64 {
        (at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    #[test]
    fn the_age_of_what_goes_is_learned_from_a_sample_of_any_cache() {
        for blocks in [100_u64, 100_000] {
            let mut retention = Retention::default();
            assert!(!retention.is_full() && retention.age(0).is_none());
            // First in, first out, one block per request.
            for at in 0..4 * blocks {
                retention.used(&[hash(at)], at);
                if at >= blocks {
                    retention.evicted(&[hash(at - blocks)], at);
                }
            }
            let now = 4 * blocks - 1;
            let age = retention.age(now).expect("blocks went");
            assert!((age / blocks as f64 - 1.0).abs() < 0.01, "{blocks}: {age}");
            assert_eq!(retention.age(now + 5), Some(age + 5.0));
            assert!(retention.is_full() && retention.used.len() <= SAMPLE);
        }
    }

    #[test]
    fn blocks_that_never_go_do_not_crowd_out_the_others() {
        let (blocks, mut retention) = (10_000_u64, Retention::default());
        // First in, first out; every tenth block is never reported as removed.
        // A block comes with every request at first, and every third one in the end.
        let slow = 100 * blocks;
        let at_request = |at: u64| at + 2 * at.saturating_sub(slow);
        let last = slow + 3 * blocks;
        for at in 0..=last {
            retention.used(&[hash(at)], at_request(at));
            if at >= blocks && at % 10 != 0 {
                retention.evicted(&[hash(at - blocks)], at_request(at));
            }
        }
        let age = retention.age(at_request(last)).expect("blocks went");
        assert!((age / (3 * blocks) as f64 - 1.0).abs() < 0.1, "{age}");
        let live = retention.used.values().filter(|at| **at >= at_request(last - blocks)).count();
        assert!(live > SAMPLE / 8, "{live}");
    }
}
