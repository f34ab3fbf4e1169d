//! The outgoing queue of one publisher: events wait, become numbered batches, and are kept for
//! replay.
//!
//! Callers add events from any thread. One thread of the transport owns the sockets. It waits for
//! [`Outbox::descriptor`] and for requests, up to [`Outbox::wait`]; then it publishes the batches
//! from [`Outbox::take`] and answers with [`Outbox::replies`], until [`Outbox::is_over`].

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::error::{Error, Result};
use crate::pending::Pending;
use crate::replay::{Replays, Reply, Request};
use crate::ring::{Batch, Ring};
use crate::wire;

/// Batches queued for a slow subscriber; beyond that ZMQ drops them, and the subscriber sees a gap.
/// Also the maximum of batches closed by callers that wait for the thread.
pub const PUB_QUEUE_BATCHES: usize = 100_000;

/// Settings of an outbox.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Data-parallel rank in every batch.
    pub dp_rank: Option<u32>,
    /// How long the first event of a batch waits for more events.
    pub tick: Duration,
    /// A batch is closed at this size in bytes.
    pub batch_bytes_max: usize,
    /// Encoded events that may wait for the thread, in bytes; above it callers wait.
    pub pending_bytes_max: usize,
    /// Batches kept for replay.
    pub ring_batches: usize,
    /// Memory for these batches.
    pub ring_bytes: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            dp_rank: None,
            tick: Duration::from_millis(1),
            batch_bytes_max: 1 << 20,
            pending_bytes_max: 16 << 20,
            ring_batches: 10_000,
            ring_bytes: 64 << 20,
        }
    }
}

/// Counters and gauges of an outbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Accepted events.
    pub events: u64,
    /// Of these, events that are not published yet.
    pub pending_events: u64,
    /// Their bytes.
    pub pending_bytes: u64,
    /// Batches that were numbered.
    pub batches: u64,
    /// Batches kept for replay.
    pub ring_batches: u64,
    /// Their bytes.
    pub ring_bytes: u64,
    /// Replays that were started.
    pub replays: u64,
    /// Requests refused because of too many concurrent replays.
    pub replays_refused: u64,
}

#[derive(Debug)]
struct State {
    pending: Pending,
    /// Batches closed by callers, with their number of events.
    ready: VecDeque<(Batch, u64)>,
    ring: Ring,
    replays: Replays,
    counts: Counts,
    /// Accepted events, and published ones.
    taken: u64,
    sent: u64,
    /// Events of the last batch handed to the thread, which is being sent.
    leaving: u64,
    /// When the batch of the waiting events is closed.
    due: Option<Instant>,
    /// The thread was woken and has not yet found everything published.
    is_awake: bool,
    /// Whether the descriptor is readable.
    is_rung: bool,
    is_closing: bool,
}

/// The outgoing queue of one publisher.
#[derive(Debug)]
pub struct Outbox {
    settings: Settings,
    state: Mutex<State>,
    changed: Condvar,
    bell: UnixStream,
    heard: UnixStream,
    process: u32,
}

impl Outbox {
    /// An empty outbox of this process.
    ///
    /// # Errors
    /// `Io` if the process has reached its limit of descriptors.
    pub fn new(settings: Settings) -> Result<Self> {
        let (bell, heard) = UnixStream::pair()
            .map_err(|error| Error::Io(format!("can't have a pair of sockets: {error}")))?;
        let state = State {
            pending: Pending::new(settings.batch_bytes_max, settings.pending_bytes_max),
            ready: VecDeque::new(),
            ring: Ring::new(settings.ring_batches, settings.ring_bytes),
            replays: Replays::default(),
            counts: Counts::default(),
            taken: 0,
            sent: 0,
            leaving: 0,
            due: None,
            is_awake: false,
            is_rung: false,
            is_closing: false,
        };
        let (state, changed, process) = (Mutex::new(state), Condvar::new(), std::process::id());
        Ok(Self { settings, state, changed, bell, heard, process })
    }

    /// Queues encoded events, which stay together; waits only while the queue is full.
    ///
    /// # Errors
    /// `Closed` after the shutdown, and in a fork, which has none of the process's threads.
    pub fn put(&self, events: Vec<Vec<u8>>) -> Result<()> {
        if events.is_empty() {
            return Ok(());
        }
        self.check_process()?;
        let mut state = self.state();
        while state.pending.is_full() && !state.is_closing {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.is_closing {
            return Err(Error::Closed("the publisher is shut down"));
        }
        state.taken += events.len() as u64;
        state.pending.put(events);
        let due = Instant::now() + self.settings.tick;
        state.due.get_or_insert(due);
        if state.pending.has_batch() {
            // It may have been woken for a smaller batch, and wait for the end of its tick.
            state.is_awake = false;
        }
        self.wake(&mut state);
        Ok(())
    }

    /// Closes the batch of the waiting events, or several if they exceed one; never waits. If the
    /// thread is too slow the oldest batches are dropped, which subscribers see as a gap.
    pub fn cut(&self) {
        let mut state = self.state();
        if state.pending.is_empty() {
            return;
        }
        while !state.pending.is_empty() {
            let events = state.pending.take_batch();
            let batch = self.number(&mut state, &events);
            state.ready.push_back((batch, events.len() as u64));
        }
        while state.ready.len() > PUB_QUEUE_BATCHES {
            state.sent += state.ready.pop_front().map_or(0, |(_, events)| events);
        }
        // It was woken for the events, and waits for the end of their tick.
        state.is_awake = false;
        self.wake(&mut state);
    }

    /// Waits until everything queued before is published. Returns the number of events that still
    /// wait.
    ///
    /// # Errors
    /// `Closed` in a fork.
    pub fn flush(&self, timeout: Duration) -> Result<u64> {
        self.check_process()?;
        let state = self.state();
        let wanted = state.taken;
        let (state, _) = self
            .changed
            .wait_timeout_while(state, timeout, |state| state.sent < wanted)
            .unwrap_or_else(PoisonError::into_inner);
        Ok(wanted.saturating_sub(state.sent))
    }

    /// Accepts no more events; the thread publishes queued ones, and then ends.
    ///
    /// # Errors
    /// `Closed` in a fork, where it has no effect.
    pub fn close(&self) -> Result<()> {
        self.check_process()?;
        let mut state = self.state();
        state.is_closing = true;
        state.is_awake = false;
        self.wake(&mut state);
        self.changed.notify_all();
        Ok(())
    }

    /// Readable when the thread has work; only the thread reads it.
    pub fn descriptor(&self) -> RawFd {
        self.heard.as_raw_fd()
    }

    /// How long the thread may wait for the descriptor; `None`: forever.
    pub fn wait(&self, now: Instant) -> Option<Duration> {
        let state = self.state();
        let has_more = state.leaving > 0 || state.is_closing || !state.ready.is_empty();
        if has_more || !state.replays.is_empty() {
            return Some(Duration::ZERO);
        }
        state.due.map(|due| due.saturating_duration_since(now))
    }

    /// The next batch to publish. The previous one then counts as published.
    pub fn take(&self, now: Instant) -> Option<Batch> {
        let mut state = self.state();
        state.sent += std::mem::take(&mut state.leaving);
        if std::mem::take(&mut state.is_rung) {
            // One byte is available, so this returns at once.
            let _ = (&self.heard).read(&mut [0]);
        }
        let batch = match state.ready.pop_front() {
            Some((batch, events)) => {
                state.leaving = events;
                Some(batch)
            }
            None => self.close_batch(&mut state, now),
        };
        if state.pending.is_empty() && state.ready.is_empty() {
            state.due = None;
            state.is_awake = false;
        }
        self.changed.notify_all();
        batch
    }

    fn close_batch(&self, state: &mut State, now: Instant) -> Option<Batch> {
        let is_due = state.due.is_some_and(|due| now >= due);
        if !(is_due || state.is_closing || state.pending.has_batch()) {
            return None;
        }
        let events = state.pending.take_batch();
        state.leaving = events.len() as u64;
        (!events.is_empty()).then(|| self.number(state, &events))
    }

    fn number(&self, state: &mut State, events: &[Vec<u8>]) -> Batch {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        // First into the ring: a number that was published can always be requested.
        state.ring.push(wire::batch(events, now.as_secs_f64(), self.settings.dp_rank))
    }

    /// Processes a request's frames; its replay begins with the next replies.
    pub fn ask(&self, frames: &[Vec<u8>]) -> Request {
        let mut state = self.state();
        let State { replays, ring, counts, .. } = &mut *state;
        let request = replays.accept(frames, ring);
        match request {
            Request::Started => counts.replays += 1,
            Request::Refused => counts.replays_refused += 1,
            Request::Malformed => {}
        }
        request
    }

    /// The replies to send to clients now.
    pub fn replies(&self) -> Vec<Reply> {
        self.state().replays.next_part()
    }

    /// Whether it is closed and everything is published.
    pub fn is_over(&self) -> bool {
        let state = self.state();
        state.is_closing && state.pending.is_empty() && state.ready.is_empty()
    }

    /// Releases all waiting calls after the thread has ended, for whatever reason.
    pub fn end(&self) {
        let mut state = self.state();
        state.is_closing = true;
        state.pending.clear();
        state.ready.clear();
        state.sent = state.taken;
        self.changed.notify_all();
    }

    /// Counters and gauges.
    pub fn counts(&self) -> Counts {
        let state = self.state();
        let (batches, bytes) = state.ring.size();
        Counts {
            events: state.taken,
            pending_events: state.taken - state.sent,
            pending_bytes: state.pending.bytes() as u64,
            batches: state.ring.next_sequence(),
            ring_batches: batches as u64,
            ring_bytes: bytes as u64,
            ..state.counts
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks that this process created it: a fork has none of its threads.
    ///
    /// # Errors
    /// `Closed` in a fork.
    pub fn check_process(&self) -> Result<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        Err(Error::Closed("the publisher belongs to the process that created it, not to a fork"))
    }

    /// Wakes the thread, once.
    fn wake(&self, state: &mut State) {
        if !std::mem::replace(&mut state.is_awake, true) && !state.is_rung {
            state.is_rung = true;
            // Both ends live as long as this object.
            let _ = (&self.bell).write_all(&[0]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outbox(tick_ms: u64) -> Outbox {
        let tick = Duration::from_millis(tick_ms);
        Outbox::new(Settings { tick, ..Settings::default() }).expect("a pair of sockets")
    }

    fn event(n: u8) -> Vec<u8> {
        vec![n]
    }

    #[test]
    fn events_of_a_tick_are_one_batch_and_count_once_published() {
        let outbox = outbox(5);
        let now = Instant::now();
        assert_eq!(outbox.wait(now), None);
        outbox.put(vec![event(1), event(2)]).expect("open");
        outbox.put(vec![event(3)]).expect("open");
        assert_eq!(outbox.take(now), None, "the tick is not over");
        assert!(outbox.wait(now) > Some(Duration::ZERO));
        let later = Instant::now() + Duration::from_millis(5);
        let (number, payload) = outbox.take(later).expect("a batch");
        assert_eq!((number, &payload[10..]), (0, &[0x93, 1, 2, 3, 0xc0][..]));
        assert_eq!(outbox.flush(Duration::ZERO), Ok(3), "handed over and not yet published");
        assert_eq!(outbox.wait(later), Some(Duration::ZERO));
        assert_eq!(outbox.take(later), None);
        assert_eq!(outbox.flush(Duration::ZERO), Ok(0));
        assert_eq!(outbox.wait(later), None);
        let counts = outbox.counts();
        assert_eq!((counts.events, counts.pending_events, counts.batches), (3, 0, 1));
    }

    #[test]
    fn the_thread_is_woken_once_for_what_it_will_find_anyway() {
        let outbox = outbox(0);
        outbox.heard.set_nonblocking(true).expect("a socket");
        for n in 0..3 {
            outbox.put(vec![event(n)]).expect("open");
        }
        assert!(outbox.take(Instant::now()).is_some());
        assert!((&outbox.heard).read(&mut [0]).is_err(), "one byte only");
        outbox.put(vec![event(4)]).expect("open");
        assert!((&outbox.heard).read(&mut [0]).is_ok(), "told again after it had found all");
    }

    #[test]
    fn a_full_batch_wakes_the_thread_before_the_end_of_the_tick() {
        let outbox = outbox(1_000);
        outbox.heard.set_nonblocking(true).expect("a socket");
        outbox.put(vec![event(1)]).expect("open");
        assert_eq!(outbox.take(Instant::now()), None, "the tick is not over");
        for n in 0..2 {
            outbox.put(vec![event(n); 1_023]).expect("open");
        }
        assert!((&outbox.heard).read(&mut [0]).is_ok(), "a batch is full");
        assert!((&outbox.heard).read(&mut [0]).is_err(), "one byte only");
    }

    #[test]
    fn a_batch_that_is_cut_is_numbered_at_once() {
        let outbox = outbox(1_000);
        outbox.put(vec![event(2), event(3)]).expect("open");
        assert!(outbox.take(Instant::now()).is_none());
        outbox.cut();
        outbox.cut();
        outbox.put(vec![event(1)]).expect("open");
        assert_eq!(outbox.counts().batches, 1);
        let (number, payload) = outbox.take(Instant::now()).expect("the batch");
        assert_eq!((number, &payload[10..13]), (0, &[0x92, 2, 3][..]));
        assert_eq!(outbox.take(Instant::now()), None, "the tick of the other event is not over");
        outbox.close().expect("this process");
        assert!(!outbox.is_over());
        assert_eq!(outbox.take(Instant::now()).map(|(number, _)| number), Some(1));
        assert!(outbox.is_over());
        assert!(matches!(outbox.put(vec![event(5)]), Err(Error::Closed(_))));
    }

    #[test]
    fn a_cut_leaves_no_event_behind() {
        let outbox = outbox(1_000);
        outbox.put(vec![event(1); 1_500]).expect("open");
        outbox.cut();
        assert_eq!(outbox.counts().batches, 2);
        let now = Instant::now();
        let numbers: Vec<_> = std::iter::from_fn(|| outbox.take(now)).map(|(n, _)| n).collect();
        assert_eq!(numbers, [0, 1]);
        assert_eq!(outbox.flush(Duration::ZERO), Ok(0));
    }

    #[test]
    fn a_full_queue_makes_callers_wait_until_there_is_room_or_the_end() {
        let settings = Settings { pending_bytes_max: 1, ..Settings::default() };
        let outbox = Outbox::new(settings).expect("a pair of sockets");
        outbox.put(vec![vec![0; 2]]).expect("open");
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| outbox.put(vec![vec![1; 2]]));
            let later = Instant::now() + Duration::from_secs(1);
            while outbox.counts().batches < 2 {
                outbox.take(later);
            }
            assert_eq!(waiting.join().expect("no panic"), Ok(()));
            outbox.put(vec![vec![2; 2]]).expect("there is room");
            let waiting = scope.spawn(|| outbox.put(vec![vec![3; 2]]));
            outbox.end();
            assert!(waiting.join().expect("no panic").is_err());
        });
        assert_eq!(outbox.counts().pending_events, 0);
    }

    #[test]
    fn replays_go_on_while_there_are_any() {
        let outbox = outbox(0);
        outbox.put(vec![event(1)]).expect("open");
        outbox.cut();
        let request = [b"a".to_vec(), Vec::new(), vec![0; 8]];
        assert_eq!(outbox.ask(&request), Request::Started);
        assert_eq!(outbox.wait(Instant::now()), Some(Duration::ZERO));
        assert_eq!(outbox.replies().len(), 2);
        assert!(outbox.replies().is_empty());
        assert_eq!(outbox.ask(&[]), Request::Malformed);
        assert_eq!(outbox.counts().replays, 1);
    }
}
