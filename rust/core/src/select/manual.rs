//! Requests that their caller follows by a name of its own: booked here, marked and freed there.

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
    by_id: Mutex<HashMap<String, Reservation>>,
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
        check_name(request_id)?;
        let mut by_id = self.manual.by_id.lock();
        // One whose worker left or that expired is no longer active.
        let is_active = |held: &Reservation| self.router.is_booked(held.request());
        if by_id.get(request_id).is_some_and(is_active) {
            return Err(Error::Conflict(format!("request_id {request_id:?} is active already")));
        }
        let ask = Ask { request_id: Some(request_id), ..*ask };
        let (reservation, selection) = self.select(&ask)?;
        by_id.insert(request_id.to_owned(), reservation);
        Ok(selection)
    }

    /// The prompt of `request_id` is prefilled: its tokens stop counting. Saying it again is activity.
    ///
    /// # Errors
    /// `NotFound` for a name that is not active (any more).
    pub fn mark_prefill_completed(&self, request_id: &str) -> Result<()> {
        let by_id = self.manual.by_id.lock();
        let unknown = || Error::NotFound(format!("no request {request_id:?} is active"));
        let held = by_id.get(request_id).ok_or_else(unknown)?;
        self.router.mark_prefill_completed(held.request()).map_err(|_| unknown())?;
        held.first_token();
        Ok(())
    }

    /// Something was heard of `request_id`: it is not leaked. False when it is not active.
    pub fn touch(&self, request_id: &str) -> bool {
        let by_id = self.manual.by_id.lock();
        by_id.get(request_id).inspect(|held| held.touch()).is_some()
    }

    /// The engine says what `request_id` used. False when it is not active.
    pub fn note_used(&self, request_id: &str, usage: Usage) -> bool {
        let by_id = self.manual.by_id.lock();
        let Some(held) = by_id.get(request_id) else { return false };
        if let Some(tokens) = usage.cached_tokens {
            held.cached(tokens);
        }
        held.used(usage);
        true
    }

    /// `request_id` has generated so many tokens up to now; nothing happens when it is not active.
    pub fn note_generated(&self, request_id: &str, tokens: u64) {
        if let Some(held) = self.manual.by_id.lock().get(request_id) {
            held.generated(tokens);
        }
    }

    /// `request_id` has ended: its load is given back, its prompt need not be prefilled any more either.
    /// False for a name that is not active (any more), which is no error.
    pub fn free(&self, request_id: &str) -> bool {
        let held = self.manual.by_id.lock().remove(request_id);
        held.is_some_and(|held| {
            let was_booked = self.router.is_booked(held.request());
            held.ended(Outcome::Freed);
            was_booked
        })
    }

    /// Requests that are kept by name.
    pub fn reserved(&self) -> usize {
        self.manual.by_id.lock().len()
    }

    /// Forget names whose booking is gone: it expired, or its worker left.
    pub(super) fn forget_gone(&self) {
        self.manual.by_id.lock().retain(|_, held| {
            let is_booked = self.router.is_booked(held.request());
            if !is_booked {
                held.ended(Outcome::Expired);
            }
            is_booked
        });
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
