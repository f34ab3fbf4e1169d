//! Where requests wait until a worker has room to prefill them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::config::QueueThreshold;
use super::selector::Selector;
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::fair::{Line, LineOrder, Place, Wish};

/// How requests wait while every worker has as much to prefill as it may.
#[derive(Debug, Clone)]
pub struct QueueOptions {
    /// From when on they do.
    pub threshold: QueueThreshold,
    /// Who is first when there is room.
    pub order: LineOrder,
    /// Requests of one model that may wait; at least 1.
    pub limit: usize,
    /// Time for which one waits; longer than 0.
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

/// What became of requests that had to wait.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// Requests that wait.
    pub pending: usize,
    /// Tokens of their prompts.
    pub pending_isl_tokens: u64,
    /// Got a worker.
    pub placed_total: u64,
    /// Refused because too many waited.
    pub refused_total: u64,
    /// Refused because they had waited for too long.
    pub expired_total: u64,
    /// Refused for what came up while they waited: no worker any more, say.
    pub failed_total: u64,
    /// Left by themselves.
    pub left_total: u64,
}

impl QueueStats {
    /// How many ended how.
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

/// Tells one that waits that it is its turn to try.
///
/// Called under the queue's lock: it does not come back to the queue, and it waits for nobody.
pub type Told = Arc<dyn Fn() + Send + Sync>;

/// Where the requests of one model wait. How they are told, and what holds their time, is the caller's:
/// tokio's tasks and Python's wait in the same line.
///
/// # Consistency
/// One of them tries at a time, the first one first, so that what one has booked is seen by the next.
/// Whoever makes room has the first one try: no request waits beside a worker with room but for those
/// before it. One that may only go to some workers holds up nobody.
pub struct Queue {
    clock: Arc<dyn Clock>,
    order: LineOrder,
    max_wait: Duration,
    /// As many as in the line, for those who only want to know whether anybody waits.
    pending: AtomicUsize,
    state: Mutex<State>,
}

struct State {
    line: Line<Told>,
    /// Whose try it is.
    trying: Option<Place>,
    /// There may be room since that try began.
    has_news: bool,
    stats: QueueStats,
}

/// What became of a request that came to a [`Queue`].
pub enum Entered<T, W = Waiting> {
    /// It need not wait.
    Booked(T),
    /// It stands in the line.
    Waits(W),
}

impl Queue {
    /// For the requests of `selector`, which tells when there may be room.
    pub fn serving(
        options: &QueueOptions,
        selector: &Selector,
        clock: &Arc<dyn Clock>,
    ) -> Arc<Self> {
        let queue = Arc::new(Self::new(options, Arc::clone(clock)));
        let called = Arc::clone(&queue);
        selector.watch_room(Box::new(move || called.call()));
        queue
    }

    /// That nobody calls but those who wait, and who has it.
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

    /// What `book` books, or a place in the line where it says `MustWait` or others wait already. From
    /// then on `told` says when to [`try_again`](Waiting::try_again), for the first time at once.
    ///
    /// `cached_tokens` says how much of a prompt of `isl_tokens` the best worker holds.
    ///
    /// # Errors
    /// What else `book` says; `Overloaded` when too many wait.
    pub fn enter<T>(
        self: &Arc<Self>,
        wish: &Wish,
        isl_tokens: u64,
        cached_tokens: impl FnOnce() -> u64,
        told: Told,
        book: impl FnOnce() -> Result<T>,
    ) -> Result<Entered<T>> {
        // Relaxed: who comes at the same moment as another one may go first or last.
        if self.pending.load(Ordering::Relaxed) == 0 {
            match book() {
                Err(Error::MustWait(_)) => {}
                outcome => return outcome.map(Entered::Booked),
            }
        }
        let cached = if self.order == LineOrder::Wspt { cached_tokens() } else { 0 };
        let waiting = self.line_up(wish, isl_tokens, cached, told)?;
        // There may be room since it was asked for, or for this one though not for others.
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
        Ok(Waiting { queue: Arc::clone(self), place, end: End::Left })
    }

    /// There may be room.
    pub fn call(&self) {
        // Relaxed: whoever lines up calls, too.
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

    /// There was no room for the one at `place`; nor for anybody where `is_for_all`.
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
                // What happened meanwhile is for the next round: else choosy ones in front could keep
                // this one from ever coming to those behind them.
                return;
            }
        }
        state.trying = None;
        if state.has_news {
            state.first_tries();
        }
    }

    /// Who waits now, and what became of the others.
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

#[derive(Debug, Clone, Copy)]
enum End {
    Left,
    Placed,
    Expired,
    Failed,
}

/// A place in the line; given up when it is dropped.
#[must_use = "dropping it leaves the line"]
pub struct Waiting {
    queue: Arc<Queue>,
    place: Place,
    end: End,
}

impl Waiting {
    /// It was told that there may be room: what `book` books now, or `None` while there is none: it goes
    /// on waiting. After anything else it does so no more.
    ///
    /// `is_open` says whether every worker may take the request: then nobody has room where it found none.
    ///
    /// # Errors
    /// What `book` says but `MustWait`.
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
                self.end = if outcome.is_ok() { End::Placed } else { End::Failed };
                outcome.map(Some)
            }
        }
    }

    /// Its time is over: leave, and what to say.
    pub fn expire(mut self) -> Error {
        self.end = End::Expired;
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
        let stats = &mut state.stats;
        match self.end {
            End::Left => stats.left_total += 1,
            End::Placed => stats.placed_total += 1,
            End::Expired => stats.expired_total += 1,
            End::Failed => stats.failed_total += 1,
        }
        if state.trying == Some(self.place) {
            // There may be room for more than one.
            state.first_tries();
        }
    }
}
