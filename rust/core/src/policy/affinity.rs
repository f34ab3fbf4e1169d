//! Session affinity: keeps a session on its worker, whichever policy chose that worker.
//!
//! Only sessions with a key are tracked. A session's place is the worker that took its last
//! request, until that worker can't take one, or the session has been idle for too long.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::contract::{Sample, Session};
use super::cost::Candidate;
use super::decision::{Choice, Reason};
use crate::error::{Error, Result};
use crate::ids::Worker;
use crate::load::recency::Recent;

/// Tracked sessions; above the limit the least recently used one is dropped.
pub const MAX_SESSIONS: usize = 100_000;

/// Shortest and longest time for which a session is remembered, seconds.
const TTL_RANGE_SECS: (u64, u64) = (1, 31_536_000);

/// The places of sessions. Routers may share it: each has its own [`Seat`].
#[derive(Debug)]
pub struct Affinity {
    ttl_ms: u64,
    seats: AtomicU64,
    state: Mutex<State>,
}

/// A router's own part of the table, because worker ids differ between routers.
#[derive(Debug)]
pub struct Seat {
    pub(crate) table: Arc<Affinity>,
    number: u64,
}

#[derive(Debug, Clone, Copy)]
struct Place {
    worker: Worker,
    used_ms: u64,
}

#[derive(Debug)]
struct State {
    places: Recent<u64, Place>,
    kept: u64,
    moved: u64,
    begun: u64,
    expired: u64,
}

impl Affinity {
    /// A table that keeps a session for `ttl_secs` after its last request.
    ///
    /// # Errors
    /// [`Error::Config`] for a time out of range, with the flag, the range and what came.
    pub fn new(ttl_secs: u64) -> Result<Self> {
        Self::with_room(ttl_secs, MAX_SESSIONS)
    }

    pub(crate) fn with_room(ttl_secs: u64, max: usize) -> Result<Self> {
        let (low, high) = TTL_RANGE_SECS;
        if !(low..=high).contains(&ttl_secs) {
            return Err(Error::Config(format!(
                "--router-session-affinity-ttl-secs must be in {low}..={high}, got {ttl_secs}"
            )));
        }
        let state = State { places: Recent::new(max), kept: 0, moved: 0, begun: 0, expired: 0 };
        Ok(Self { ttl_ms: ttl_secs * 1_000, seats: AtomicU64::new(0), state: Mutex::new(state) })
    }

    /// A unique seat.
    pub fn seat(self: &Arc<Self>) -> Seat {
        // Relaxed: the numbers only have to be unique.
        let number = self.seats.fetch_add(1, Ordering::Relaxed);
        Seat { table: Arc::clone(self), number }
    }

    /// Drops expired sessions. Costs nothing if there are none.
    pub fn expire(&self, now_ms: u64) {
        let mut state = self.state.lock();
        let gone = state.places.drop_while(|&place| self.is_old(place, now_ms));
        state.expired += gone as u64;
    }

    /// Reports every counter.
    pub fn samples(&self, visit: &mut dyn FnMut(Sample<'_>)) {
        let state = self.state.lock();
        let help = "Sessions with a remembered worker";
        visit(Sample::plain("session_affinity_sessions", help, state.places.len() as f64));
        let requests = [("kept", state.kept), ("moved", state.moved), ("begun", state.begun)];
        for (outcome, count) in requests {
            let (name, label) = ("session_affinity_requests_total", ("outcome", outcome));
            let help =
                "Requests of sessions: kept at their worker, moved to another, or the first ones";
            visit(Sample { name, help, label, value: count as f64 });
        }
        let forgotten = [("expired", state.expired), ("evicted", state.places.evicted())];
        for (cause, count) in forgotten {
            let (name, label) = ("session_affinity_forgotten_total", ("cause", cause));
            let help = "Sessions forgotten, by cause";
            visit(Sample { name, help, label, value: count as f64 });
        }
    }

    fn is_old(&self, place: Place, now_ms: u64) -> bool {
        now_ms.saturating_sub(place.used_ms) >= self.ttl_ms
    }
}

impl Seat {
    /// The candidate that took the last request of `session`; `None` if it is not among
    /// `candidates`, or the session has expired. Changes nothing.
    pub fn kept(
        &self,
        session: Session<'_>,
        candidates: &[Candidate],
        now_ms: u64,
    ) -> Option<Choice> {
        let worker = self.place(session, now_ms)?;
        let index = candidates.iter().position(|one| one.worker == worker)?;
        Some(Choice::plain(index, 1, Reason::SessionAffinity))
    }

    /// The worker that took the last request of `session`, unless that has expired.
    pub fn place(&self, session: Session<'_>, now_ms: u64) -> Option<Worker> {
        let place = *self.table.state.lock().places.get(self.key(session)?)?;
        (!self.table.is_old(place, now_ms)).then_some(place.worker)
    }

    /// Records that `session`'s request went to `worker`, its place from `now_ms` on.
    pub fn routed(&self, session: Session<'_>, worker: Worker, now_ms: u64) {
        let Some(key) = self.key(session) else { return };
        let mut state = self.table.state.lock();
        let State { places, kept, moved, begun, expired } = &mut *state;
        *expired += places.drop_while(|&place| self.table.is_old(place, now_ms)) as u64;
        let now = Place { worker, used_ms: now_ms };
        let before = places.get(key).map(|place| place.worker);
        *places.touch(key, || now) = now;
        match before {
            Some(before) if before == worker => *kept += 1,
            Some(_) => *moved += 1,
            None => *begun += 1,
        }
    }

    /// `None` for a request without a session.
    fn key(&self, session: Session<'_>) -> Option<u64> {
        let key = session.key.filter(|key| !key.is_empty())?;
        Some(xxh3_64_with_seed(key.as_bytes(), self.number))
    }
}
