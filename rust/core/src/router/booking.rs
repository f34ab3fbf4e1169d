//! A request's hold on its worker.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::policies::{Tail, Usage};
use super::route::Router;
use crate::error::Result;
use crate::ids::Worker;
use crate::load::RequestId;

/// A request that was given to a worker. Dropping it frees the load: at the end of the stream, on
/// an error, on a disconnect and when the task is cancelled alike.
///
/// The load may be gone before: when the worker was removed, or when the request was idle for so
/// long that it expired. Then nothing here does anything, and dropping it is harmless.
#[must_use = "dropping a booking frees its load at once"]
pub struct Booking {
    router: Arc<Router>,
    request: RequestId,
    worker: Worker,
    touched_ms: AtomicU64,
    /// What policies are told at its end; `None` where none is.
    tail: Option<Box<Tail>>,
}

impl Booking {
    pub(super) fn new(
        router: Arc<Router>,
        request: RequestId,
        worker: Worker,
        now_ms: u64,
        tail: Option<Box<Tail>>,
    ) -> Self {
        Self { router, request, worker, touched_ms: AtomicU64::new(now_ms), tail }
    }

    /// The worker to send the request to.
    pub fn worker(&self) -> Worker {
        self.worker
    }

    /// The request's number in this router.
    pub fn request(&self) -> RequestId {
        self.request
    }

    /// The first token has arrived: the prompt is prefilled. Saying it again is a
    /// [`touch`](Self::touch).
    pub fn first_token(&self) {
        self.router.first_token(self.request);
        if let Some(tail) = &self.tail {
            tail.first_token(self.router.now_ms());
        }
    }

    /// The engine says what the request used; the last word on each figure counts. Policies are told
    /// at its end.
    pub fn used(&self, usage: Usage) {
        if let Some(tail) = &self.tail {
            tail.used(usage);
        }
    }

    /// Something has arrived: the request is alive. Call it on every chunk; most calls read the
    /// clock and nothing else.
    ///
    /// # Consistency
    /// Activity is noted once in a sixteenth of `expiry_ms`, so that a request may expire by that
    /// much too early.
    pub fn touch(&self) {
        let now_ms = self.router.now_ms();
        // Relaxed: it only saves calls; two threads that both go through do no harm.
        let touched_ms = self.touched_ms.load(Ordering::Relaxed);
        if now_ms.saturating_sub(touched_ms) >= self.router.touch_interval_ms() {
            self.touched_ms.store(now_ms, Ordering::Relaxed);
            self.router.touch(self.request, now_ms);
        }
    }

    /// So many more blocks were generated; see [`crate::load::ActiveSequences::add_output_blocks`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::error::Error::InvalidArgument) for a fraction outside
    /// 0..=1.
    pub fn add_output_blocks(&self, count: u32, fraction: f64) -> Result<()> {
        self.router.add_output_blocks(self.request, count, fraction)
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        self.router.free(self.request);
        if let Some(tail) = &self.tail {
            self.router.finished(self.worker, tail);
        }
    }
}
