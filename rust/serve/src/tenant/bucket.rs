//! A token bucket.

/// Milliseconds of a minute.
const MINUTE_MS: f64 = 60_000.0;

/// An allowance per minute, which accumulates for at most a minute. It may become negative if a
/// request uses more than is left; the next ones then wait.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Bucket {
    /// `None` for no limit.
    per_minute: Option<u64>,
    level: f64,
    filled_ms: u64,
}

impl Bucket {
    /// Sets the limit, which may have changed.
    pub fn limit_to(&mut self, per_minute: Option<u64>, now_ms: u64) {
        let before = std::mem::replace(&mut self.per_minute, per_minute);
        let Some(limit) = per_minute else { return };
        match before {
            // A new limit does not restore used units.
            Some(_) => self.level = self.level.min(limit as f64),
            None => (self.level, self.filled_ms) = (limit as f64, now_ms),
        }
    }

    /// Adds the allowance since the last call.
    pub fn fill(&mut self, now_ms: u64) {
        let Some(limit) = self.per_minute else { return };
        let passed = now_ms.saturating_sub(self.filled_ms) as f64;
        self.filled_ms = self.filled_ms.max(now_ms);
        self.level = (self.level + passed * limit as f64 / MINUTE_MS).min(limit as f64);
    }

    pub fn limit(&self) -> Option<u64> {
        self.per_minute
    }

    /// The remaining whole units.
    pub fn remaining(&self) -> u64 {
        self.level.max(0.0) as u64
    }

    /// Whether it is full.
    pub fn is_full(&self) -> bool {
        self.per_minute.is_none_or(|limit| self.level >= limit as f64)
    }

    /// Milliseconds until `wanted` units are available, or until it is full; 0 if they are
    /// available now.
    pub fn wait_ms(&self, wanted: f64) -> u64 {
        let Some(limit) = self.per_minute else { return 0 };
        let missing = wanted.min(limit as f64) - self.level;
        if missing <= 0.0 { 0 } else { (missing * MINUTE_MS / limit as f64).ceil() as u64 }
    }

    /// Milliseconds until it is full.
    pub fn reset_ms(&self) -> u64 {
        self.wait_ms(f64::INFINITY)
    }

    /// Uses `amount`, or returns it if negative.
    pub fn take(&mut self, amount: f64) {
        if let Some(limit) = self.per_minute {
            self.level = (self.level - amount).min(limit as f64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bucket(per_minute: u64) -> Bucket {
        let mut bucket = Bucket::default();
        bucket.limit_to(Some(per_minute), 1_000);
        bucket
    }

    #[test]
    fn a_minute_fills_it_and_more_does_not() {
        let mut bucket = bucket(60);
        bucket.take(60.0);
        assert_eq!(
            (bucket.remaining(), bucket.wait_ms(1.0), bucket.reset_ms()),
            (0, 1_000, 60_000)
        );
        bucket.fill(2_500);
        assert_eq!((bucket.remaining(), bucket.wait_ms(1.0), bucket.wait_ms(2.0)), (1, 0, 500));
        bucket.fill(3_600_000);
        assert_eq!((bucket.remaining(), bucket.is_full()), (60, true));
        // A clock that steps back changes nothing.
        bucket.take(1.0);
        bucket.fill(10);
        assert_eq!(bucket.remaining(), 59);
    }

    #[test]
    fn a_debt_is_waited_for() {
        let mut bucket = bucket(60);
        bucket.take(90.0);
        assert_eq!((bucket.remaining(), bucket.wait_ms(1.0)), (0, 31_000));
        bucket.take(-200.0);
        assert_eq!(bucket.remaining(), 60, "no more is given back than fits");
    }

    #[test]
    fn another_limit_does_not_bring_back_what_was_used() {
        let mut bucket = bucket(60);
        bucket.take(50.0);
        bucket.limit_to(Some(600), 1_000);
        assert_eq!(bucket.remaining(), 10);
        bucket.limit_to(Some(5), 1_000);
        assert_eq!(bucket.remaining(), 5);
        bucket.limit_to(None, 1_000);
        bucket.take(1e9);
        assert_eq!((bucket.wait_ms(1e9), bucket.is_full()), (0, true));
    }
}
