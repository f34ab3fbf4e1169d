//! Requests that callers manage by name: booked, marked and freed in separate calls.

use std::net::IpAddr;

use hashbrown::HashMap;

use super::ask::Ask;
use super::record::{Outcome, Selection};
use super::reservation::Reservation;
use super::router::Usage;
use super::selector::Selector;
use crate::error::{Error, Result};

/// Longest name of a request.
pub const MAX_REQUEST_ID_BYTES: usize = 256;

/// Reservations by name: current bookings, and those that have just ended.
#[derive(Default)]
pub(super) struct Manual {
    by_id: HashMap<String, (Reservation, Option<IpAddr>)>,
    /// Number of reservations per caller.
    callers: HashMap<IpAddr, usize>,
}

impl Manual {
    fn get(&self, request_id: &str) -> Option<&Reservation> {
        self.by_id.get(request_id).map(|(held, _)| held)
    }

    fn insert(&mut self, request_id: &str, reservation: Reservation, caller: Option<IpAddr>) {
        if let Some((_, before)) = self.by_id.insert(request_id.to_owned(), (reservation, caller)) {
            self.forget(before);
        }
        if let Some(caller) = caller {
            *self.callers.entry(caller).or_default() += 1;
        }
    }

    fn remove(&mut self, request_id: &str) -> Option<Reservation> {
        let (held, caller) = self.by_id.remove(request_id)?;
        self.forget(caller);
        Some(held)
    }

    fn forget(&mut self, caller: Option<IpAddr>) {
        let Some(caller) = caller else { return };
        let count = self.callers.entry(caller).or_default();
        *count = count.saturating_sub(1);
        if *count == 0 {
            self.callers.remove(&caller);
        }
    }
}

impl Selector {
    /// As [`select`](Self::select), kept under `request_id` until [`free`](Self::free).
    ///
    /// # Errors
    /// As there; `Conflict` if a request of that name is active; `InvalidArgument` for a name that
    /// is empty or longer than [`MAX_REQUEST_ID_BYTES`].
    ///
    /// # Consistency
    /// Of two calls with one name, one books and the other fails.
    pub fn reserve(&self, request_id: &str, ask: &Ask<'_>) -> Result<Selection> {
        self.reserve_for(None, request_id, ask)
    }

    /// The same for a client at `caller`, which may have three quarters of all reservations, so
    /// that a client that frees none leaves room for others.
    ///
    /// # Errors
    /// As there; `Overloaded` above that limit.
    pub fn reserve_for(
        &self,
        caller: Option<IpAddr>,
        request_id: &str,
        ask: &Ask<'_>,
    ) -> Result<Selection> {
        check_name(request_id)?;
        let mut names = self.manual.lock();
        // A request whose worker left or that expired is no longer active.
        let is_active = |held: &Reservation| self.router.is_booked(held.request());
        if names.get(request_id).is_some_and(is_active) {
            return Err(Error::Conflict(format!("request_id {request_id:?} is already active")));
        }
        let limit = self.router.config.load.max_requests.div_ceil(4) * 3;
        if let Some(caller) = caller
            && names.callers.get(&caller).is_some_and(|count| *count >= limit)
        {
            return Err(Error::Overloaded(format!(
                "{caller} has {limit} active requests, three quarters of --max-concurrent-requests: free \
                 those that have ended"
            )));
        }
        let ask = Ask { request_id: Some(request_id), ..*ask };
        let (reservation, selection) = self.select(&ask)?;
        names.insert(request_id, reservation, caller);
        Ok(selection)
    }

    /// Marks the prompt of `request_id` as prefilled: its tokens no longer count. Further calls
    /// count as activity.
    ///
    /// # Errors
    /// `NotFound` for a name that is not active.
    pub fn mark_prefill_completed(&self, request_id: &str) -> Result<()> {
        let names = self.manual.lock();
        let held = names.get(request_id).filter(|held| self.router.is_booked(held.request()));
        let unknown = || Error::NotFound(format!("no request {request_id:?} is active"));
        held.ok_or_else(unknown)?.first_token();
        Ok(())
    }

    /// Records activity of `request_id`, so that it does not expire. False if it is not active.
    pub fn touch(&self, request_id: &str) -> bool {
        let names = self.manual.lock();
        names.get(request_id).inspect(|held| held.touch()).is_some()
    }

    /// Records the engine's usage counts of `request_id`. False if it is not active.
    pub fn note_used(&self, request_id: &str, usage: Usage) -> bool {
        let names = self.manual.lock();
        let Some(held) = names.get(request_id) else { return false };
        if let Some(tokens) = usage.cached_tokens {
            held.cached(tokens);
        }
        held.used(usage);
        true
    }

    /// Sets the number of tokens that `request_id` has generated so far; no effect if it is not
    /// active.
    pub fn note_generated(&self, request_id: &str, tokens: u64) {
        if let Some(held) = self.manual.lock().get(request_id) {
            held.generated(tokens);
        }
    }

    /// Ends `request_id`: frees its load, including a prompt that is not prefilled yet. False for a
    /// name that is not active, which is not an error.
    pub fn free(&self, request_id: &str) -> bool {
        let held = self.manual.lock().remove(request_id);
        held.is_some_and(|held| {
            let was_booked = self.router.is_booked(held.request());
            held.ended(Outcome::Freed);
            was_booked
        })
    }

    /// Number of requests kept by name.
    pub fn reserved(&self) -> usize {
        self.manual.lock().by_id.len()
    }

    /// Forgets names without a booking: it expired, or its worker left.
    pub(super) fn forget_gone(&self) {
        let names = &mut *self.manual.lock();
        let mut gone = Vec::new();
        names.by_id.retain(|_, (held, caller)| {
            let is_booked = self.router.is_booked(held.request());
            if !is_booked {
                held.ended(Outcome::Expired);
                gone.push(*caller);
            }
            is_booked
        });
        gone.into_iter().for_each(|caller| names.forget(caller));
    }
}

fn check_name(request_id: &str) -> Result<()> {
    let len = request_id.len();
    if len == 0 || len > MAX_REQUEST_ID_BYTES {
        return Err(Error::invalid(format!(
            "request_id must have 1..={MAX_REQUEST_ID_BYTES} bytes, got {len}"
        )));
    }
    Ok(())
}
