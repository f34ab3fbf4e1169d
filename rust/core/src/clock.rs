//! Time for the pure rooms: milliseconds since an origin, never read from the system implicitly.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// A source of monotonic time.
pub trait Clock: Send + Sync {
    /// Milliseconds since the clock's origin; never goes back.
    fn now_ms(&self) -> u64;
}

/// The machine's monotonic clock.
#[derive(Debug)]
pub struct SystemClock {
    origin: Instant,
}

impl Default for SystemClock {
    fn default() -> Self {
        Self { origin: Instant::now() }
    }
}

impl Clock for SystemClock {
    fn now_ms(&self) -> u64 {
        self.origin.elapsed().as_millis() as u64
    }
}

/// A clock that moves only on request, for tests and simulations.
#[derive(Debug, Default)]
pub struct ManualClock {
    now_ms: AtomicU64,
}

impl ManualClock {
    /// Advances the clock by `by_ms` milliseconds.
    pub fn advance(&self, by_ms: u64) {
        // SeqCst: other threads read a test's clock, and its cost does not matter.
        self.now_ms.fetch_add(by_ms, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now_ms(&self) -> u64 {
        self.now_ms.load(Ordering::SeqCst)
    }
}
