//! Requests that their caller follows by a name of its own: booked here, marked and freed there.

use std::net::IpAddr;

use hashbrown::HashMap;
use parking_lot::Mutex;

use super::ask::Ask;
use super::record::Outcome;
use super::reservation::Reservation;
use super::router::Usage;
use super::selection::Selection;
use super::selector::Selector;
use crate::error::{Error, Result};

/// Longest name of a request.
pub const MAX_REQUEST_ID_BYTES: usize = 256;

/// Reservations by name. As many as the router has bookings, and those whose booking went a moment ago.
#[derive(Default)]
pub(super) struct Manual {
    names: Mutex<Names>,
}

#[derive(Default)]
struct Names {
    by_id: HashMap<String, (Reservation, Option<IpAddr>)>,
    /// How many each caller has.
    callers: HashMap<IpAddr, usize>,
}

impl Names {
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
    /// As there; `Conflict` when a request of that name is active; `InvalidArgument` for a name that is
    /// empty or longer than [`MAX_REQUEST_ID_BYTES`].
    ///
    /// # Consistency
    /// Of two calls with one name, one books and the other fails.
    pub fn reserve(&self, request_id: &str, ask: &Ask<'_>) -> Result<Selection> {
        self.reserve_for(None, request_id, ask)
    }

    /// The same for somebody at `caller`, who may have three quarters of all reservations: one who frees none
    /// leaves the others room.
    ///
    /// # Errors
    /// As there; `Overloaded` beyond that.
    pub fn reserve_for(
        &self,
        caller: Option<IpAddr>,
        request_id: &str,
        ask: &Ask<'_>,
    ) -> Result<Selection> {
        check_name(request_id)?;
        let mut names = self.manual.names.lock();
        // One whose worker left or that expired is no longer active.
        let is_active = |held: &Reservation| self.router.is_booked(held.request());
        if names.get(request_id).is_some_and(is_active) {
            return Err(Error::Conflict(format!("request_id {request_id:?} is already active")));
        }
        let limit = self.router.config().max_requests.div_ceil(4) * 3;
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

    /// The prompt of `request_id` is prefilled: its tokens stop counting. Saying it again is activity.
    ///
    /// # Errors
    /// `NotFound` for a name that is not active (any more).
    pub fn mark_prefill_completed(&self, request_id: &str) -> Result<()> {
        let names = self.manual.names.lock();
        let unknown = || Error::NotFound(format!("no request {request_id:?} is active"));
        let held = names.get(request_id).ok_or_else(unknown)?;
        self.router.mark_prefill_completed(held.request()).map_err(|_| unknown())?;
        held.first_token();
        Ok(())
    }

    /// Something was heard of `request_id`: it is not leaked. False when it is not active.
    pub fn touch(&self, request_id: &str) -> bool {
        let names = self.manual.names.lock();
        names.get(request_id).inspect(|held| held.touch()).is_some()
    }

    /// The engine says what `request_id` used. False when it is not active.
    pub fn note_used(&self, request_id: &str, usage: Usage) -> bool {
        let names = self.manual.names.lock();
        let Some(held) = names.get(request_id) else { return false };
        if let Some(tokens) = usage.cached_tokens {
            held.cached(tokens);
        }
        held.used(usage);
        true
    }

    /// `request_id` has generated so many tokens up to now; nothing happens when it is not active.
    pub fn note_generated(&self, request_id: &str, tokens: u64) {
        if let Some(held) = self.manual.names.lock().get(request_id) {
            held.generated(tokens);
        }
    }

    /// `request_id` has ended: its load is given back, its prompt need not be prefilled any more either.
    /// False for a name that is not active (any more), which is no error.
    pub fn free(&self, request_id: &str) -> bool {
        let held = self.manual.names.lock().remove(request_id);
        held.is_some_and(|held| {
            let was_booked = self.router.is_booked(held.request());
            held.ended(Outcome::Freed);
            was_booked
        })
    }

    /// Requests that are kept by name.
    pub fn reserved(&self) -> usize {
        self.manual.names.lock().by_id.len()
    }

    /// Forget names whose booking is gone: it expired, or its worker left.
    pub(super) fn forget_gone(&self) {
        let names = &mut *self.manual.names.lock();
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
