//! The queue of requests that wait until a worker has room to prefill them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::config::QueueThreshold;
use super::selector::Selector;
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::fair::{Line, LineOrder, Place, Wish};

/// Options of the queue while no worker has room to prefill.
#[derive(Debug, Clone)]
pub struct QueueOptions {
    /// The threshold above which requests wait.
    pub threshold: QueueThreshold,
    /// The order of the queue.
    pub order: LineOrder,
    /// Maximum queued requests per model; at least 1.
    pub limit: usize,
    /// Longest wait of a request; longer than 0.
    pub max_wait: Duration,
}

impl QueueOptions {
    /// Check every field.
    ///
    /// # Errors
    /// `Config`, naming the first field that is out of range.
    pub fn check(&self) -> Result<()> {
        if self.limit == 0 {
            return Err(Error::Config("router_queue_limit must be at least 1, got 0".into()));
        }
        if self.max_wait.is_zero() {
            return Err(Error::Config("router_queue_timeout must be longer than 0".into()));
        }
        self.threshold.validate()
    }
}

/// Outcomes of queued requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// Queued requests.
    pub pending: usize,
    /// Tokens of their prompts.
    pub pending_isl_tokens: u64,
    /// Requests that got a worker.
    pub placed_total: u64,
    /// Requests refused because the queue was full.
    pub refused_total: u64,
    /// Requests refused because they waited for too long.
    pub expired_total: u64,
    /// Requests that failed while they waited, for example because no worker was left.
    pub failed_total: u64,
    /// Requests that left by themselves.
    pub left_total: u64,
}

impl QueueStats {
    /// Requests by outcome.
    pub fn outcomes(&self) -> [(&'static str, u64); 5] {
        [
            ("placed", self.placed_total),
            ("refused", self.refused_total),
            ("expired", self.expired_total),
            ("failed", self.failed_total),
            ("left", self.left_total),
        ]
    }
}

/// Notifies a queued request that it should try again.
///
/// Called under the queue's lock: it must not call the queue, and must not block.
pub type Told = Arc<dyn Fn() + Send + Sync>;

/// The queue of one model's requests. The caller notifies requests and enforces their timeout, so
/// tokio tasks and Python callers share one queue.
///
/// # Consistency
/// One request tries at a time, the first one first, so that each sees the booking of the one
/// before. Freed room makes the first one try: no request waits beside a worker with room, except
/// behind earlier requests. A request that is limited to some workers does not block others.
pub struct Queue {
    clock: Arc<dyn Clock>,
    order: LineOrder,
    max_wait: Duration,
    /// Length of the queue, readable without the lock.
    pending: AtomicUsize,
    state: Mutex<State>,
}

struct State {
    line: Line<Told>,
    /// The request that is trying.
    trying: Option<Place>,
    /// There may be new room since that try began.
    has_news: bool,
    stats: QueueStats,
}

/// The outcome of entering a [`Queue`].
pub enum Entered<T, W = Waiting> {
    /// It need not wait.
    Booked(T),
    /// It is queued.
    Waits(W),
}

impl Queue {
    /// A queue for the requests of `selector`, which reports when there may be room.
    pub fn serving(
        options: &QueueOptions,
        selector: &Selector,
        clock: &Arc<dyn Clock>,
    ) -> Arc<Self> {
        let queue = Arc::new(Self::new(options, Arc::clone(clock)));
        let called = Arc::clone(&queue);
        selector.router.watch_room(Box::new(move || called.call()));
        queue
    }

    /// A queue that only its own requests and its owner notify.
    pub fn new(options: &QueueOptions, clock: Arc<dyn Clock>) -> Self {
        let state = State {
            line: Line::new(options.limit),
            trying: None,
            has_news: false,
            stats: QueueStats::default(),
        };
        Self {
            clock,
            order: options.order,
            max_wait: options.max_wait,
            pending: AtomicUsize::new(0),
            state: Mutex::new(state),
        }
    }

    /// How long a request may wait.
    pub fn max_wait(&self) -> Duration {
        self.max_wait
    }

    /// The result of `book`, or a place in the queue if that returns `MustWait` or others are
    /// already waiting. From then on `told` is called when to [`try_again`](Waiting::try_again),
    /// the first time at once.
    ///
    /// `cached_tokens` returns how much of a prompt of `isl_tokens` the best worker holds.
    ///
    /// # Errors
    /// Other errors of `book`; `Overloaded` if the queue is full.
    pub fn enter<T>(
        self: &Arc<Self>,
        wish: &Wish,
        isl_tokens: u64,
        cached_tokens: impl FnOnce() -> u64,
        told: Told,
        book: impl FnOnce() -> Result<T>,
    ) -> Result<Entered<T>> {
        // Relaxed: the order of simultaneous requests does not matter.
        if self.pending.load(Ordering::Relaxed) == 0 {
            match book() {
                Err(Error::MustWait(_)) => {}
                outcome => return outcome.map(Entered::Booked),
            }
        }
        let cached = if self.order == LineOrder::Wspt { cached_tokens() } else { 0 };
        let waiting = self.line_up(wish, isl_tokens, cached, told)?;
        // Room may have been freed since the attempt, or there is room for this request but not for
        // others.
        self.call();
        Ok(Entered::Waits(waiting))
    }

    fn line_up(
        self: &Arc<Self>,
        wish: &Wish,
        isl_tokens: u64,
        cached_tokens: u64,
        told: Told,
    ) -> Result<Waiting> {
        let arrival_s = self.clock.now_ms() as f64 / 1_000.0;
        let standing = self.order.standing(wish, arrival_s, isl_tokens, cached_tokens);
        let mut state = self.state.lock();
        let place = state.line.push(standing, isl_tokens, told);
        let place = place.inspect_err(|_| state.stats.refused_total += 1)?;
        self.pending.store(state.line.len(), Ordering::Relaxed);
        Ok(Waiting { queue: Arc::clone(self), place, end: |stats| &mut stats.left_total })
    }

    /// Reports that there may be room.
    pub fn call(&self) {
        // Relaxed: a request that enters the queue also calls this.
        if self.pending.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut state = self.state.lock();
        if state.trying.is_some() {
            state.has_news = true;
        } else {
            state.first_tries();
        }
    }

    /// There was no room for the request at `place`; for no request at all if `is_for_all`.
    fn tried(&self, place: Place, is_for_all: bool) {
        let mut state = self.state.lock();
        if state.trying != Some(place) {
            return;
        }
        if !is_for_all {
            let next = state.line.after(place).map(|(next, told)| {
                told();
                next
            });
            state.trying = next;
            if next.is_some() {
                // Events since then count in the next round: otherwise restricted requests in front
                // could starve those behind them.
                return;
            }
        }
        state.trying = None;
        if state.has_news {
            state.first_tries();
        }
    }

    /// Current queue, and outcomes so far.
    pub fn stats(&self) -> QueueStats {
        let state = self.state.lock();
        let (pending, pending_isl_tokens) = (state.line.len(), state.line.isl_tokens());
        QueueStats { pending, pending_isl_tokens, ..state.stats }
    }
}

impl State {
    fn first_tries(&mut self) {
        self.has_news = false;
        self.trying = self.line.first().map(|(place, told)| {
            told();
            place
        });
    }
}

/// A place in the queue, given up when dropped.
#[must_use = "dropping it leaves the line"]
pub struct Waiting {
    queue: Arc<Queue>,
    place: Place,
    /// The count of its end.
    end: fn(&mut QueueStats) -> &mut u64,
}

impl Waiting {
    /// Tries again after a notification: the result of `book`, or `None` without room, and it keeps
    /// waiting. After any other result it no longer waits.
    ///
    /// `is_open` says whether every worker may take the request: if it found no room, there is none
    /// for others either.
    ///
    /// # Errors
    /// Any error of `book` except `MustWait`.
    pub fn try_again<T>(
        &mut self,
        is_open: impl FnOnce() -> bool,
        book: impl FnOnce() -> Result<T>,
    ) -> Result<Option<T>> {
        match book() {
            Err(Error::MustWait(_)) => {
                self.queue.tried(self.place, is_open());
                Ok(None)
            }
            outcome => {
                self.end = match outcome {
                    Ok(_) => |stats| &mut stats.placed_total,
                    Err(_) => |stats| &mut stats.failed_total,
                };
                outcome.map(Some)
            }
        }
    }

    /// Leaves after its timeout; returns the error.
    pub fn expire(mut self) -> Error {
        self.end = |stats| &mut stats.expired_total;
        Error::AllBusy(format!(
            "no worker had room to prefill within {} s (router_queue_timeout)",
            self.queue.max_wait.as_secs_f64()
        ))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut state = self.queue.state.lock();
        let _told = state.line.remove(self.place);
        self.queue.pending.store(state.line.len(), Ordering::Relaxed);
        *(self.end)(&mut state.stats) += 1;
        if state.trying == Some(self.place) {
            // There may be room for more than one.
            state.first_tries();
        }
    }
}
