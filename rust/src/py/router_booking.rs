//! A booked request, as a Python object.

use kvflash_core::select::{Outcome, Reservation, Selection, Usage};
use parking_lot::Mutex;
use pyo3::prelude::*;

/// A booked request.
///
/// Its load is freed by :meth:`free`, or with the object. All calls are cheap, and have no effect
/// after the load is gone: freed, expired, or with its worker.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct RouterBooking {
    held: Mutex<Option<Reservation>>,
    /// The engine instance.
    #[pyo3(get)]
    worker_id: u64,
    /// Its data-parallel rank.
    #[pyo3(get)]
    dp_rank: u32,
    /// Leading blocks of the prompt that the worker holds.
    #[pyo3(get)]
    overlap_blocks: u32,
}

#[pymethods]
impl RouterBooking {
    /// The first token has arrived: the prompt is prefilled. Further calls count as activity.
    fn first_token(&self) {
        self.tell(Reservation::first_token);
    }

    /// Record activity: the request is alive.
    fn touch(&self) {
        self.tell(Reservation::touch);
    }

    /// Set the number of tokens generated so far; counts their blocks if that is enabled.
    fn generated(&self, tokens: u64) {
        self.tell(|held| held.generated(tokens));
    }

    /// Set the engine's count of reused prompt tokens, for :meth:`RouterCore.why`.
    fn cached(&self, tokens: u64) {
        self.tell(|held| held.cached(tokens));
    }

    /// Set the engine's usage counts, for policies; the last value of each counts.
    #[pyo3(signature = (*, input_tokens=None, cached_tokens=None, output_tokens=None))]
    fn used(
        &self,
        input_tokens: Option<u64>,
        cached_tokens: Option<u64>,
        output_tokens: Option<u64>,
    ) {
        let usage = Usage { input_tokens, cached_tokens, output_tokens }.plausible();
        self.tell(|held| held.used(usage));
    }

    /// Free the load; ``is_complete``: the answer reached its end.
    #[pyo3(signature = (*, is_complete=false))]
    fn free(&self, is_complete: bool) {
        if let Some(held) = self.held.lock().take()
            && is_complete
        {
            held.ended(Outcome::Complete);
        }
    }
}

impl RouterBooking {
    fn tell(&self, what: impl FnOnce(&Reservation)) {
        if let Some(held) = &*self.held.lock() {
            what(held);
        }
    }

    pub fn new((held, selection): (Reservation, Selection)) -> Self {
        Self {
            held: Mutex::new(Some(held)),
            worker_id: selection.worker.instance_id,
            dp_rank: selection.worker.dp_rank,
            overlap_blocks: selection.overlap_blocks,
        }
    }
}
