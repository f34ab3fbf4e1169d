//! This router's bookings, for its replicas.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hashbrown::HashMap;
use parking_lot::{Condvar, Mutex};

use crate::ids::Worker;
use crate::load::RequestId;

/// Identifies a request among all selectors of the process: the selector's number, and the
/// request's number there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BookingName(pub(super) u64, pub(super) RequestId);

impl std::fmt::Display for BookingName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.0, self.1.0)
    }
}

/// An event of a request of this router.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tiding {
    /// It was booked.
    Added {
        /// The request.
        name: BookingName,
        /// The worker that it was booked at.
        worker: Worker,
        /// Sequence hashes of its blocks; `None` if blocks are not tracked.
        hashes: Option<Box<[u64]>>,
        /// Tokens of its prompt.
        isl_tokens: u64,
        /// Leading blocks of it that the worker was credited with.
        overlap_blocks: u32,
    },
    /// Its prompt is prefilled.
    Prefilled(BookingName),
    /// It has ended.
    Freed(BookingName),
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Tiding>,
    /// Reported requests that have not ended, and whether they are prefilled.
    open: HashMap<BookingName, bool>,
    limit: usize,
    dropped: u64,
}

/// Bookings in the order in which they were made, until they are taken. Costs nothing while it is
/// off.
///
/// At the limit a new booking is counted and not reported; the end of a reported one always is. The
/// queue therefore holds at most three times the limit and the active requests.
#[derive(Debug, Default)]
pub struct Outbox {
    is_on: AtomicBool,
    state: Mutex<State>,
    arrived: Condvar,
}

impl Outbox {
    /// Records events from now on; `limit` bookings may wait.
    pub fn turn_on(&self, limit: usize) {
        self.state.lock().limit = limit;
        self.is_on.store(true, Ordering::Relaxed);
    }

    /// Whether it is on.
    pub fn is_on(&self) -> bool {
        // Relaxed: bookings made while it is turned on may or may not be reported.
        self.is_on.load(Ordering::Relaxed)
    }

    /// Waits at most `timeout` for an event, and takes at most `limit` events.
    pub fn take(&self, timeout: Duration, limit: usize) -> Vec<Tiding> {
        let mut state = self.state.lock();
        if state.queue.is_empty() {
            self.arrived.wait_for(&mut state, timeout);
        }
        let count = limit.min(state.queue.len());
        state.queue.drain(..count).collect()
    }

    /// Waiting events, and bookings that were not reported because too many waited.
    pub fn counts(&self) -> (usize, u64) {
        let state = self.state.lock();
        (state.queue.len(), state.dropped)
    }

    pub(super) fn added(&self, tiding: Tiding) {
        let Tiding::Added { name, .. } = &tiding else { return };
        let mut state = self.state.lock();
        if state.queue.len() >= state.limit {
            state.dropped += 1;
            return;
        }
        state.open.insert(*name, false);
        state.queue.push_back(tiding);
        self.arrived.notify_one();
    }

    pub(super) fn prefilled(&self, name: BookingName) {
        let mut state = self.state.lock();
        if let Some(is_prefilled @ false) = state.open.get_mut(&name) {
            *is_prefilled = true;
            state.queue.push_back(Tiding::Prefilled(name));
            self.arrived.notify_one();
        }
    }

    pub(super) fn freed(&self, name: BookingName) {
        let mut state = self.state.lock();
        if state.open.remove(&name).is_some() {
            state.queue.push_back(Tiding::Freed(name));
            self.arrived.notify_one();
        }
    }
}
