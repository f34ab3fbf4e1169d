//! A request that was given to a worker, as Python holds it.

use kvflash_core::router::Usage;
use kvflash_core::select::{Outcome, Reservation, Selection};
use parking_lot::Mutex;
use pyo3::prelude::*;

/// A request that was given to a worker; its load is freed with it at the latest.
#[pyclass(frozen, module = "kvflash._core")]
pub(super) struct RouterBooking {
    held: Mutex<Option<Reservation>>,
    #[pyo3(get)]
    worker_id: u64,
    #[pyo3(get)]
    dp_rank: u32,
    #[pyo3(get)]
    overlap_blocks: u32,
}

#[pymethods]
impl RouterBooking {
    fn first_token(&self) {
        if let Some(held) = &*self.held.lock() {
            held.first_token();
        }
    }

    fn touch(&self) {
        if let Some(held) = &*self.held.lock() {
            held.touch();
        }
    }

    fn generated(&self, tokens: u64) {
        if let Some(held) = &*self.held.lock() {
            held.generated(tokens);
        }
    }

    fn cached(&self, tokens: u64) {
        if let Some(held) = &*self.held.lock() {
            held.cached(tokens);
        }
    }

    #[pyo3(signature = (*, input_tokens=None, cached_tokens=None, output_tokens=None))]
    fn used(
        &self,
        input_tokens: Option<u64>,
        cached_tokens: Option<u64>,
        output_tokens: Option<u64>,
    ) {
        if let Some(held) = &*self.held.lock() {
            held.used(Usage { input_tokens, cached_tokens, output_tokens });
        }
    }

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
    pub fn new((held, selection): (Reservation, Selection)) -> Self {
        Self {
            held: Mutex::new(Some(held)),
            worker_id: selection.worker.instance_id,
            dp_rank: selection.worker.dp_rank,
            overlap_blocks: selection.overlap_blocks,
        }
    }
}
