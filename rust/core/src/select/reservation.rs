//! A request's booking at its worker, and its record in the journal.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::ask::Ask;
use super::outbox::{BookingName, Outbox};
use super::record::Journal;
use super::record::Outcome;
use super::router::{Router, Tail, Usage};
use crate::ids::Worker;
use crate::load::RequestId;

/// A booked request. Dropping it frees the load: at the end of the stream, on an error, on a
/// disconnect and when the task is cancelled alike; it also closes the record in the journal.
///
/// The load may be gone earlier: if the worker was removed, or if the request was idle for so long
/// that it expired. Then all calls have no effect, and dropping it is harmless.
#[must_use = "dropping a reservation frees its load at once"]
pub struct Reservation {
    router: Arc<Router>,
    request: RequestId,
    worker: Worker,
    touched_ms: AtomicU64,
    /// Data for policies at its end; `None` if no policy needs it.
    tail: Option<Box<Tail>>,
    pub(super) line: Option<Line>,
    pub(super) told: Option<(Arc<Outbox>, BookingName)>,
    pub(super) growth: Option<Growth>,
}

/// Maximum counted blocks of an answer.
const MAX_OUTPUT_BLOCKS: u64 = 1 << 20;

/// Blocks that an answer adds at its worker.
#[derive(Debug)]
pub(super) struct Growth {
    block_size: u64,
    expected_tokens: Option<u64>,
    /// Blocks reported so far.
    blocks: AtomicU64,
}

impl Growth {
    /// For an answer to `ask`; `None` while the block size is unknown.
    pub fn new(ask: &Ask<'_>) -> Option<Self> {
        let block_size = u64::from(ask.prompt.block_size);
        let expected_tokens = ask.expected_output_tokens;
        (block_size > 0).then_some(Self { block_size, expected_tokens, blocks: AtomicU64::new(0) })
    }

    /// Additional blocks at `tokens`, and the share of the answer that is still expected, 0 to 1.
    fn grow(&self, tokens: u64) -> (u32, f64) {
        let blocks = (tokens / self.block_size).min(MAX_OUTPUT_BLOCKS);
        // Relaxed: only a counter; the chunks of one answer arrive one after the other.
        let before = self.blocks.fetch_max(blocks, Ordering::Relaxed);
        let expected = self.expected_tokens.map(|expected| expected.max(1) as f64);
        let left = expected.map_or(1.0, |expected| (1.0 - tokens as f64 / expected).max(0.0));
        (blocks.saturating_sub(before) as u32, left)
    }
}

/// The journal record of the decision.
pub(super) struct Line {
    pub journal: Arc<Journal>,
    pub number: u64,
    pub has_first_token: AtomicBool,
}

impl Reservation {
    pub(super) fn new(
        router: Arc<Router>,
        request: RequestId,
        worker: Worker,
        now_ms: u64,
        tail: Option<Box<Tail>>,
    ) -> Self {
        let (touched_ms, line, told, growth) = (AtomicU64::new(now_ms), None, None, None);
        Self { router, request, worker, touched_ms, tail, line, told, growth }
    }

    /// The worker to send the request to.
    pub fn worker(&self) -> Worker {
        self.worker
    }

    /// The request's number in the router.
    pub fn request(&self) -> RequestId {
        self.request
    }

    /// Marks the prompt as prefilled, when the first token has arrived. Further calls are a
    /// [`touch`](Self::touch).
    pub fn first_token(&self) {
        // No effect if its worker left or it expired: its load is freed.
        self.router.mark_prefill_completed(self.request);
        if let Some(tail) = &self.tail {
            tail.first_token(self.router.now_ms());
        }
        if let Some((outbox, name)) = &self.told {
            outbox.prefilled(*name);
        }
        if let Some(line) = &self.line
            // Relaxed: it only saves calls, and shows at the end whether there was one.
            && !line.has_first_token.swap(true, Ordering::Relaxed)
        {
            let now_ms = self.router.now_ms();
            line.journal.update(line.number, |record| {
                record.first_token_ms = Some(now_ms.saturating_sub(record.decided_at_ms));
            });
        }
    }

    /// Records activity: the request is alive. Call it on every chunk; most calls only read the
    /// clock.
    ///
    /// # Consistency
    /// Activity is recorded at most once per sixteenth of `expiry_ms`, so a request may expire
    /// early by that much.
    pub fn touch(&self) {
        let now_ms = self.router.now_ms();
        // Relaxed: it only saves calls; a duplicate does no harm.
        let touched_ms = self.touched_ms.load(Ordering::Relaxed);
        if now_ms.saturating_sub(touched_ms) >= self.router.touch_interval_ms() {
            self.touched_ms.store(now_ms, Ordering::Relaxed);
            self.router.touch(self.request, now_ms);
        }
    }

    /// How often [`touch`](Self::touch) records activity: call it as often while nothing arrives.
    pub fn touch_interval(&self) -> Duration {
        Duration::from_millis(self.router.touch_interval_ms().max(1))
    }

    /// Adds generated blocks; see [`crate::load::ActiveSequences::add_output_blocks`].
    pub fn add_output_blocks(&self, count: u32, fraction: f64) {
        self.router.add_output_blocks(self.request, count, fraction);
    }

    /// Sets the number of tokens generated so far; counts their blocks if that is enabled.
    pub fn generated(&self, tokens: u64) {
        let Some(growth) = &self.growth else { return };
        let (blocks, left) = growth.grow(tokens);
        if blocks > 0 {
            self.add_output_blocks(blocks, left);
        }
    }

    /// Records the engine's usage counts; the last value of each counts. Policies receive them at
    /// the end.
    pub fn used(&self, usage: Usage) {
        if let Some(tail) = &self.tail {
            tail.used(usage);
        }
    }

    /// Records the engine's count of reused prompt tokens.
    pub fn cached(&self, tokens: u64) {
        if let Some(line) = &self.line {
            line.journal.update(line.number, |record| record.cached_tokens = Some(tokens));
        }
    }

    /// Sets the outcome; only the first call counts. The load is freed when it is dropped.
    pub fn ended(&self, outcome: Outcome) {
        if let Some(line) = &self.line {
            let now_ms = self.router.now_ms();
            line.journal.update(line.number, |record| {
                if record.outcome == Outcome::Running {
                    record.outcome = outcome;
                    record.ended_ms = Some(now_ms.saturating_sub(record.decided_at_ms));
                }
            });
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let has_begun =
            self.line.as_ref().is_some_and(|line| line.has_first_token.load(Ordering::Relaxed));
        self.ended(if has_begun { Outcome::Freed } else { Outcome::Failed });
        if let Some((outbox, name)) = &self.told {
            outbox.freed(*name);
        }
        self.router.free(self.request);
        if let Some(tail) = &self.tail {
            self.router.finished(self.worker, tail);
        }
    }
}
