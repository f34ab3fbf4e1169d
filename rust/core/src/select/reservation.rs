//! A request's hold on its worker, and its line in the journal.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::ask::Ask;
use super::journal::Journal;
use super::outbox::{BookingName, Outbox};
use super::record::Outcome;
use super::router::{Router, Tail, Usage};
use crate::clock::Clock;
use crate::error::Result;
use crate::ids::Worker;
use crate::load::RequestId;

/// A request that was given to a worker. Dropping it frees the load: at the end of the stream, on
/// an error, on a disconnect and when the task is cancelled alike; and it ends its line in the journal.
///
/// The load may be gone before: when the worker was removed, or when the request was idle for so
/// long that it expired. Then nothing here does anything, and dropping it is harmless.
#[must_use = "dropping a reservation frees its load at once"]
pub struct Reservation {
    router: Arc<Router>,
    request: RequestId,
    worker: Worker,
    touched_ms: AtomicU64,
    /// What policies are told at its end; `None` where none is.
    tail: Option<Box<Tail>>,
    pub(super) line: Option<Line>,
    pub(super) told: Option<(Arc<Outbox>, BookingName)>,
    pub(super) growth: Option<Growth>,
}

/// Most blocks of an answer that count.
const MAX_OUTPUT_BLOCKS: u64 = 1 << 20;

/// What an answer adds to its worker's blocks.
#[derive(Debug)]
pub(super) struct Growth {
    block_size: u64,
    expected_tokens: Option<u64>,
    /// Blocks that were told.
    blocks: AtomicU64,
}

impl Growth {
    /// Of an answer to `ask`; `None` while the block size is unknown.
    pub fn new(ask: &Ask<'_>) -> Option<Self> {
        let block_size = u64::from(ask.prompt.block_size);
        let expected_tokens = ask.expected_output_tokens;
        (block_size > 0).then_some(Self { block_size, expected_tokens, blocks: AtomicU64::new(0) })
    }

    /// New blocks now that there are `tokens`, and how much of the answer is still expected, 0 to 1.
    fn grow(&self, tokens: u64) -> (u32, f64) {
        let blocks = (tokens / self.block_size).min(MAX_OUTPUT_BLOCKS);
        // Relaxed: chunks of one answer come one after the other; it only counts.
        let before = self.blocks.fetch_max(blocks, Ordering::Relaxed);
        let expected = self.expected_tokens.map(|expected| expected.max(1) as f64);
        let left = expected.map_or(1.0, |expected| (1.0 - tokens as f64 / expected).max(0.0));
        (blocks.saturating_sub(before) as u32, left)
    }
}

/// Where the decision is written down.
pub(super) struct Line {
    pub journal: Arc<Journal>,
    pub clock: Arc<dyn Clock>,
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

    /// The first token has arrived: the prompt is prefilled. Saying it again is a
    /// [`touch`](Self::touch).
    pub fn first_token(&self) {
        self.router.first_token(self.request);
        if let Some(tail) = &self.tail {
            tail.first_token(self.router.now_ms());
        }
        if let Some((outbox, name)) = &self.told {
            outbox.prefilled(*name);
        }
        if let Some(line) = &self.line
            // Relaxed: it only saves calls, and says at the end whether there was one.
            && !line.has_first_token.swap(true, Ordering::Relaxed)
        {
            let now_ms = line.clock.now_ms();
            line.journal.update(line.number, |record| {
                record.first_token_ms = Some(now_ms.saturating_sub(record.decided_at_ms));
            });
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

    /// So many tokens were generated up to now; counts their blocks where generated blocks count.
    pub fn generated(&self, tokens: u64) {
        let Some(growth) = &self.growth else { return };
        let (blocks, left) = growth.grow(tokens);
        if blocks > 0 {
            // A fraction in 0..=1 is legal.
            let _counted = self.add_output_blocks(blocks, left);
        }
    }

    /// The engine says what the request used; the last word on each figure counts. Policies are told
    /// at its end.
    pub fn used(&self, usage: Usage) {
        if let Some(tail) = &self.tail {
            tail.used(usage);
        }
    }

    /// The engine says how many tokens of the prompt it reused.
    pub fn cached(&self, tokens: u64) {
        if let Some(line) = &self.line {
            line.journal.update(line.number, |record| record.cached_tokens = Some(tokens));
        }
    }

    /// Say what became of it; the first one to say is believed. Its load is freed when it is dropped.
    pub fn ended(&self, outcome: Outcome) {
        if let Some(line) = &self.line {
            let now_ms = line.clock.now_ms();
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
