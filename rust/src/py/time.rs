//! The time for indexes with expiring blocks.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvflash_core::clock::{Clock, SystemClock};
use kvflash_core::error::{Error, Result};
use kvflash_core::index::RadixIndex;
use pyo3::prelude::*;

use super::error::{Raised, invalid};

/// The caller's clock, or the machine's, passed to the index when it advances.
pub(super) struct Time {
    system: SystemClock,
    given: Option<Py<PyAny>>,
    /// The index has dropped everything that expired by then.
    told_ms: AtomicU64,
}

impl Time {
    pub fn new(given: Option<Py<PyAny>>) -> Self {
        Self { system: SystemClock::default(), given, told_ms: AtomicU64::new(0) }
    }

    pub fn tell(&self, py: Python<'_>, index: &RadixIndex) -> Raised<()> {
        let now_ms = match &self.given {
            None => self.system.now_ms(),
            Some(clock) => {
                let seconds: f64 = clock.bind(py).call0()?.extract()?;
                if !(seconds.is_finite() && seconds >= 0.0) {
                    return Err(invalid(format!(
                        "clock must return finite seconds of at least 0, got {seconds}"
                    )));
                }
                (seconds * 1_000.0) as u64
            }
        };
        // Acquire and Release: a thread that sees the time also sees the old blocks removed. A
        // clock that goes back counts as standing still.
        if now_ms > self.told_ms.load(Ordering::Acquire) {
            py.detach(|| index.advance_to(now_ms));
            self.told_ms.fetch_max(now_ms, Ordering::Release);
        }
        Ok(())
    }
}

/// A lifetime in seconds, as milliseconds.
pub(super) fn ttl_ms(ttl_s: f64) -> Raised<u64> {
    if !(0.001..=1e12).contains(&ttl_s) {
        return Err(invalid(format!("ttl_s must be seconds in 0.001..=1e12, got {ttl_s}")));
    }
    Ok((ttl_s * 1_000.0) as u64)
}

pub(super) fn seconds(name: &str, value: f64) -> Result<Duration> {
    Duration::try_from_secs_f64(value).map_err(|_| {
        Error::Config(format!("{name} must be a number of seconds of at least 0, got {value}"))
    })
}
