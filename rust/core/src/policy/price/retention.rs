//! How long a worker keeps blocks: the age, since their last use, of blocks that it evicts now.

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
    /// When blocks of the sample were last routed, in milliseconds, by local hash.
    used_ms: HashMap<u64, u64>,
    /// The sample contains blocks with this many leading zeros in their hash.
    zeros: u32,
    /// Mean age at eviction, in milliseconds, and its weight.
    age_ms: f64,
    weight: f64,
    /// When it last evicted a block.
    evicted_ms: u64,
    is_full: bool,
}

impl Retention {
    fn is_sampled(zeros: u32, hash: u64) -> bool {
        hash.leading_zeros() >= zeros
    }

    /// Records that a prompt of these blocks was routed to the worker.
    pub fn used(&mut self, local_hashes: &[u64], now_ms: u64) {
        for hash in local_hashes {
            if Self::is_sampled(self.zeros, *hash) {
                self.used_ms.insert(*hash, now_ms);
                if self.used_ms.len() > SAMPLE {
                    self.shrink(now_ms);
                }
            }
        }
    }

    /// Makes room in the sample: drops what must have gone unreported, and then half if needed.
    fn shrink(&mut self, now_ms: u64) {
        if let Some(age_ms) = self.age_ms(now_ms) {
            let kept = |used_ms: u64| now_ms.saturating_sub(used_ms) as f64 <= LOST_AGES * age_ms;
            self.used_ms.retain(|_, used_ms| kept(*used_ms));
        }
        if self.used_ms.len() > THINNED {
            self.zeros += 1;
            let zeros = self.zeros;
            self.used_ms.retain(|hash, _| Self::is_sampled(zeros, *hash));
        }
    }

    /// Records that the worker evicted these blocks.
    pub fn evicted(&mut self, local_hashes: &[u64], now_ms: u64) {
        self.is_full = true;
        self.evicted_ms = now_ms;
        for hash in local_hashes {
            if !Self::is_sampled(self.zeros, *hash) {
                continue;
            }
            let share = 1.0 / (MEMORY * self.used_ms.len().max(4) as f64);
            let Some(used_ms) = self.used_ms.remove(hash) else { continue };
            let age_ms = now_ms.saturating_sub(used_ms) as f64;
            let kept = (-share).exp();
            self.weight = self.weight * kept + 1.0;
            self.age_ms += (age_ms - self.age_ms) / self.weight;
        }
    }

    /// Whether it has evicted anything since it was empty.
    pub fn is_full(&self) -> bool {
        self.is_full
    }

    /// Mean age of blocks that it would evict now, in milliseconds; `None` before the first
    /// eviction. While it evicts nothing, the next candidate ages.
    pub fn age_ms(&self, now_ms: u64) -> Option<f64> {
        let since_ms = now_ms.saturating_sub(self.evicted_ms) as f64;
        (self.weight > 0.0).then_some(self.age_ms + since_ms)
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
            assert!(!retention.is_full() && retention.age_ms(0).is_none());
            // First in, first out, one block per millisecond.
            for at in 0..4 * blocks {
                retention.used(&[hash(at)], at);
                if at >= blocks {
                    retention.evicted(&[hash(at - blocks)], at);
                }
            }
            let now_ms = 4 * blocks - 1;
            let age_ms = retention.age_ms(now_ms).expect("blocks went");
            assert!((age_ms / blocks as f64 - 1.0).abs() < 0.01, "{blocks}: {age_ms}");
            assert_eq!(retention.age_ms(now_ms + 5), Some(age_ms + 5.0));
            assert!(retention.is_full() && retention.used_ms.len() <= SAMPLE);
        }
    }

    #[test]
    fn blocks_that_never_go_do_not_crowd_out_the_others() {
        let (blocks, mut retention) = (10_000_u64, Retention::default());
        // First in, first out; every tenth block is never reported as removed.
        // Blocks come every millisecond at first, and every third one in the end.
        let slow = 100 * blocks;
        let at_ms = |at: u64| at + 2 * at.saturating_sub(slow);
        let last = slow + 3 * blocks;
        for at in 0..=last {
            retention.used(&[hash(at)], at_ms(at));
            if at >= blocks && at % 10 != 0 {
                retention.evicted(&[hash(at - blocks)], at_ms(at));
            }
        }
        let age_ms = retention.age_ms(at_ms(last)).expect("blocks went");
        assert!((age_ms / (3 * blocks) as f64 - 1.0).abs() < 0.1, "{age_ms}");
        let live = retention.used_ms.values().filter(|ms| **ms >= at_ms(last - blocks)).count();
        assert!(live > SAMPLE / 8, "{live}");
    }
}
