//! Errors for requests without a worker.

use super::ask::Ask;
use super::selector::Selector;
use crate::error::Error;

impl Selector {
    /// Adds details that the router does not know.
    pub(super) fn explain(&self, ask: &Ask<'_>, error: Error) -> Error {
        match (error, ask.pin) {
            (Error::NoWorker(_), Some(pin))
                if !self.workers.lock().iter().any(|worker| pin.fits(*worker)) =>
            {
                Error::NoWorker(format!("the pinned worker {pin} is not registered"))
            }
            (Error::AllBusy(text), pin) => {
                let who = pin.map_or(text, |pin| format!("the pinned worker {pin} is busy"));
                let thresholds = self.busy.thresholds();
                Error::AllBusy(format!(
                    "Service temporarily unavailable: {who}. Thresholds in force: {thresholds}; try \
                     again later, or raise or unset them (POST /busy_threshold)"
                ))
            }
            (error, _) => error,
        }
    }
}
