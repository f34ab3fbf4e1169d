//! Limits the log lines of one source.

use std::num::NonZeroU64;

/// Lines of one kind that pass at once.
const FIRST: u32 = 5;

/// After that, one line passes in this time.
const PAUSE_MS: u64 = 60_000;

/// Passes the first lines of one kind, then one per minute. A minute without any resets it.
#[derive(Debug, Default, Clone)]
pub struct LogLimit {
    passed: u32,
    held_back: u64,
    next_ms: u64,
}

impl LogLimit {
    /// Number of lines held back since the last one that passed, if any; `None`: hold this one back,
    /// too.
    pub fn pass(&mut self, now_ms: u64) -> Option<Option<NonZeroU64>> {
        let is_due = now_ms >= self.next_ms;
        if !is_due && self.passed >= FIRST {
            self.held_back += 1;
            return None;
        }
        let held_back = std::mem::take(&mut self.held_back);
        self.passed = if is_due && held_back == 0 { 1 } else { FIRST.min(self.passed + 1) };
        self.next_ms = now_ms + PAUSE_MS;
        Some(NonZeroU64::new(held_back))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_lines_pass_and_then_one_a_minute() {
        let mut limit = LogLimit::default();
        let passed = |limit: &mut LogLimit, at: u64| {
            limit.pass(at).map(|held_back| held_back.map_or(0, NonZeroU64::get))
        };
        assert!((0..5).all(|at| passed(&mut limit, at) == Some(0)));
        assert!((5..1_000).all(|at| passed(&mut limit, at).is_none()));
        assert_eq!(passed(&mut limit, PAUSE_MS + 4), Some(995));
        assert_eq!(passed(&mut limit, PAUSE_MS + 5), None);
        assert_eq!(passed(&mut limit, 2 * PAUSE_MS + 4), Some(1));
        // After a quiet minute five lines pass again.
        let later = 3 * PAUSE_MS + 4;
        assert!((0..5).all(|at| passed(&mut limit, later + at) == Some(0)));
        assert_eq!(passed(&mut limit, later + 5), None);
    }
}
