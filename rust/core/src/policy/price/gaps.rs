//! Gaps of sessions between two turns, in requests to the pool; see
//! [`Traffic::requests`](super::Traffic).

use hashbrown::HashMap;

/// Remembered prompt ends, in each of two generations.
const TAILS: usize = 32_768;
/// Size of the filter that quickly rules out blocks that end no prompt.
const FILTER_BITS: usize = 1 << 20;
/// Blocks examined from the end of a prompt, and from the deepest block that any worker holds.
const LOOK_BACK: usize = 128;
/// Gaps needed before their distribution is used.
const FEWEST: f64 = 10.0;
/// Minimum weight of the latest gap.
const LATEST: f64 = 0.05;
/// Lower bound of the spread of ln(gap).
const LEAST_SPREAD: f64 = 0.2;

/// Ends of prompts, and the distribution of the gaps until they are continued.
#[derive(Debug)]
pub(super) struct Gaps {
    /// The number of the last request with a prompt that ended with this block: the current and the
    /// previous generation.
    tails: [HashMap<u64, u64>; 2],
    filter: Box<[u64]>,
    /// Mean of ln(gap).
    mean: f64,
    variance: f64,
    /// Gaps that the distribution rests on.
    count: f64,
    /// Gaps seen in all.
    total: u64,
}

impl Default for Gaps {
    fn default() -> Self {
        Self {
            tails: Default::default(),
            filter: vec![0; FILTER_BITS / 64].into(),
            mean: 0.0,
            variance: 0.25,
            count: 0.0,
            total: 0,
        }
    }
}

impl Gaps {
    /// Records a routed prompt with these sequence hashes; workers are known to hold `held` of its
    /// blocks. A retry is no turn of a session, however far the failed attempt came.
    ///
    /// # Cost
    /// O(1): a session that continues far beyond the end of its last turn is not recognized.
    pub fn see(&mut self, sequence_hashes: &[u64], held: usize, is_retry: bool, now: u64) {
        let Some(last) = sequence_hashes.last() else { return };
        let len = sequence_hashes.len();
        let from_end = len.saturating_sub(LOOK_BACK)..len;
        let from_held = held.saturating_sub(LOOK_BACK)..held.min(from_end.start);
        let places = from_end.rev().chain(from_held.rev());
        let known = places.map(|at| sequence_hashes[at]).find_map(|hash| self.tail(hash));
        if let Some(before) = known.filter(|_| !is_retry) {
            self.add(now.saturating_sub(before));
        }
        self.remember(*last, now);
    }

    /// Forgets request `number` with this last block, which was not answered: the same
    /// prompt at another worker is no turn of a session.
    pub fn failed(&mut self, last: u64, number: u64) {
        for tails in &mut self.tails {
            if tails.get(&last) == Some(&number) {
                tails.remove(&last);
            }
        }
    }

    fn tail(&self, hash: u64) -> Option<u64> {
        let bit = hash as usize % FILTER_BITS;
        if self.filter[bit / 64] >> (bit % 64) & 1 == 0 {
            return None;
        }
        self.tails.iter().find_map(|tails| tails.get(&hash).copied())
    }

    fn remember(&mut self, hash: u64, now: u64) {
        if self.tails[0].len() >= TAILS && !self.tails[0].contains_key(&hash) {
            let [young, old] = &mut self.tails;
            std::mem::swap(young, old);
            young.clear();
            self.filter.fill(0);
            for hash in old.keys() {
                let bit = *hash as usize % FILTER_BITS;
                self.filter[bit / 64] |= 1 << (bit % 64);
            }
        }
        let bit = hash as usize % FILTER_BITS;
        self.filter[bit / 64] |= 1 << (bit % 64);
        self.tails[0].insert(hash, now);
    }

    fn add(&mut self, gap: u64) {
        let ln = (gap.max(1) as f64).ln();
        self.count += 1.0;
        self.total += 1;
        if self.count == 1.0 {
            self.mean = ln;
        }
        let off = ln - self.mean;
        self.mean += (1.0 / self.count).max(LATEST) * off;
        self.variance += (0.5 / self.count).max(LATEST) * (off * off - self.variance);
    }

    /// Share of sessions that return after about `age` requests, per unit of ln(age), from a logistic
    /// distribution; `None` until enough gaps were seen.
    pub fn density(&self, age: f64) -> Option<f64> {
        if self.count < FEWEST {
            return None;
        }
        let spread = self.variance.sqrt().max(LEAST_SPREAD);
        let z = (age.max(1.0).ln() - self.mean) / spread;
        let below = 1.0 / (1.0 + (-(1.7 * z).clamp(-30.0, 30.0)).exp());
        Some(1.7 / spread * below * (1.0 - below))
    }

    /// Mean and spread of ln(gap), and the number of gaps seen.
    pub fn ln_gap(&self) -> (f64, f64, u64) {
        (self.mean, self.variance.sqrt(), self.total)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gaps_of_sessions_are_learned_and_strangers_have_none() {
        let mut gaps = Gaps::default();
        let prompt = |session: u64, turns: u64| -> Vec<u64> {
            (0..10 * turns).map(|at| session << 32 | (at + 1)).collect()
        };
        for number in 1..4 {
            for session in 0..8 {
                let prompt = prompt(session, number);
                gaps.see(&prompt, 0, false, number * 10_000 + session);
            }
        }
        let (mean, spread, count) = gaps.ln_gap();
        assert_eq!(count, 16);
        assert!((mean - 10_000_f64.ln()).abs() < 1e-9 && spread < 0.5);
        let at = |age: f64| gaps.density(age).expect("enough were seen");
        assert!(at(10_000.0) > 10.0 * at(1_000.0) && at(10_000.0) > 10.0 * at(100_000.0));
    }

    #[test]
    fn a_long_turn_is_recognised_by_what_workers_hold() {
        let mut gaps = Gaps::default();
        let hashes: Vec<u64> = (1..2_000).collect();
        gaps.see(&hashes[..500], 0, false, 1_000);
        gaps.see(&hashes, 510, false, 3_000);
        assert_eq!(gaps.ln_gap().2, 1);
    }

    #[test]
    fn a_failed_request_at_another_worker_is_no_turn() {
        let mut gaps = Gaps::default();
        for number in [1_000, 1_003, 1_006] {
            gaps.failed(3, number - 3);
            gaps.see(&[1, 2, 3], 0, false, number);
        }
        assert_eq!(gaps.ln_gap().2, 0);
        // A session's next turn may end within the same block.
        gaps.see(&[1, 2, 3], 0, false, 9_000);
        let (mean, _, count) = gaps.ln_gap();
        assert_eq!((mean, count), (7_994_f64.ln(), 1));
    }

    #[test]
    fn memory_is_bounded() {
        let mut gaps = Gaps::default();
        for hash in 0..200_000_u64 {
            gaps.see(&[hash.wrapping_mul(0x9e37_79b9_7f4a_7c15)], 0, false, hash);
        }
        assert!(gaps.tails.iter().all(|tails| tails.len() <= TAILS));
    }
}
