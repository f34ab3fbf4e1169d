//! Workers that must be present before the first request.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};

/// A gate for the start, not a health check: once open it stays open.
#[derive(Debug)]
pub struct StartGate {
    wanted: usize,
    what: &'static str,
    setting: &'static str,
    is_open: AtomicBool,
}

impl StartGate {
    /// Opens with `wanted` workers that must `what` ("be healthy"), as `setting` demands.
    pub fn new(wanted: usize, what: &'static str, setting: &'static str) -> Self {
        Self { wanted, what, setting, is_open: AtomicBool::new(wanted == 0) }
    }

    /// Whether it is open; opens it if enough workers are present.
    ///
    /// # Errors
    /// `NoWorker`, with the present and the wanted number of workers.
    pub fn check(&self, there: impl FnOnce() -> usize) -> Result<()> {
        // Relaxed: a late reader only counts the workers once more.
        if self.is_open.load(Ordering::Relaxed) {
            return Ok(());
        }
        let there = there();
        if there >= self.wanted {
            self.is_open.store(true, Ordering::Relaxed);
            return Ok(());
        }
        let Self { wanted, what, setting, .. } = self;
        Err(Error::NoWorker(format!(
            "starting: {there} of the {wanted} workers that must {what} first ({setting})"
        )))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn it_opens_once_and_stays_open() {
        let gate = StartGate::new(2, "be healthy", "--min-initial-workers");
        let message = gate.check(|| 1).unwrap_err().to_string();
        let wanted =
            "starting: 1 of the 2 workers that must be healthy first (--min-initial-workers)";
        assert!(message.contains(wanted), "{message}");
        gate.check(|| 2).unwrap();
        gate.check(|| 0).unwrap();
        StartGate::new(0, "be healthy", "").check(|| unreachable!("nobody is waited for")).unwrap();
    }
}
