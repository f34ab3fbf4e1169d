//! Decides whether a failed request is sent to another worker.
//!
//! A request that no worker received is tried at as many workers as there are. A request that a
//! worker received and lost may have killed it: it gets one more attempt, or none if two workers
//! lost the same body before. A refused request gets one more attempt. Retries without a dead
//! worker are limited to a small share of the requests in flight, because they would worsen an
//! overload.

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::http::StatusCode;
use parking_lot::Mutex;
use tokio::time::Instant;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::Reject;

/// How long lost bodies are remembered, and how many.
const SUSPECT_TIME: Duration = Duration::from_secs(60);
const MAX_SUSPECTS: usize = 4_096;

/// Concurrent retries: this number, or one per this many requests in flight.
const MIN_RETRIES: usize = 10;
const REQUESTS_PER_RETRY: usize = 5;

/// The cause of an attempt that ended because the prefill beside it failed.
pub(crate) const PREFILL_FAILED: &str = "prefill_failed";

/// Shared by all requests of a frontend.
#[derive(Debug)]
pub(crate) struct Retries {
    running: AtomicUsize,
    seed: u64,
    suspects: Mutex<Suspects>,
    /// Number of suspects, readable without the lock.
    count: AtomicUsize,
}

#[derive(Debug, Default)]
struct Suspects {
    since: HashMap<u64, Instant>,
    /// Ordered by time; some are no longer in the map, or were added again.
    order: VecDeque<(u64, Instant)>,
}

impl Default for Retries {
    fn default() -> Self {
        let (running, count) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self { running, seed: rand::random(), suspects: Mutex::default(), count }
    }
}

impl Retries {
    /// The attempts of one request, or of its prefill.
    pub fn begin(self: &Arc<Self>) -> Attempts {
        Attempts { retries: Arc::clone(self), lost: 0, refused: 0, has_permit: false }
    }

    /// Whether workers lost this body lately.
    fn is_suspect(&self, body: &[u8]) -> bool {
        let hash = xxh3_64_with_seed(body, self.seed);
        let suspects = self.suspects.lock();
        suspects.since.get(&hash).is_some_and(|since| since.elapsed() < SUSPECT_TIME)
    }

    /// Records that a worker had this body and was lost.
    fn suspect(&self, body: &[u8]) {
        let (hash, now) = (xxh3_64_with_seed(body, self.seed), Instant::now());
        let mut suspects = self.suspects.lock();
        suspects.since.insert(hash, now);
        suspects.order.push_back((hash, now));
        while let Some((hash, since)) = suspects.order.front().copied() {
            if suspects.order.len() <= MAX_SUSPECTS && since.elapsed() < SUSPECT_TIME {
                break;
            }
            suspects.order.pop_front();
            if suspects.since.get(&hash) == Some(&since) {
                suspects.since.remove(&hash);
            }
        }
        self.count.store(suspects.since.len(), Ordering::Relaxed);
    }

    /// Clears a body that a worker has answered.
    fn clear(&self, body: &[u8]) {
        if self.count.load(Ordering::Relaxed) > 0 {
            let mut suspects = self.suspects.lock();
            suspects.since.remove(&xxh3_64_with_seed(body, self.seed));
            self.count.store(suspects.since.len(), Ordering::Relaxed);
        }
    }
}

/// The outcomes of one request's attempts.
#[derive(Debug)]
pub(crate) struct Attempts {
    retries: Arc<Retries>,
    lost: usize,
    refused: usize,
    /// It counts as a concurrent retry.
    has_permit: bool,
}

impl Attempts {
    /// Records a failed attempt with `body`, with `in_flight` requests in progress; returns why
    /// there is no other attempt, if so.
    pub fn failed(
        &mut self,
        failed: &Failed,
        body: &[u8],
        in_flight: usize,
    ) -> Option<&'static str> {
        let is_free = match failed.reach {
            Reach::Never => true,
            Reach::Refused => {
                self.refused += 1;
                if self.refused > 1 {
                    return Some("two workers refused the request");
                }
                false
            }
            Reach::Lost { is_death } => {
                self.lost += 1;
                // Also by its prefill, or by another request.
                let is_suspect = self.retries.is_suspect(body);
                if is_suspect || self.lost > 1 {
                    self.retries.suspect(body);
                    return Some(match is_suspect {
                        true => "workers lost the same request less than 60 s ago",
                        false => "two workers lost the request",
                    });
                }
                is_death
            }
        };
        if is_free || self.has_permit {
            return None;
        }
        let limit = MIN_RETRIES.max(in_flight / REQUESTS_PER_RETRY);
        if self.retries.running.fetch_add(1, Ordering::Relaxed) >= limit {
            self.retries.running.fetch_sub(1, Ordering::Relaxed);
            return Some("the limit of retries is reached: 20 % of the requests in flight");
        }
        self.has_permit = true;
        None
    }

    /// Records that a worker answers it.
    pub fn answered(&self, body: &[u8]) {
        self.retries.clear(body);
    }
}

impl Drop for Attempts {
    fn drop(&mut self) {
        if self.has_permit {
            self.retries.running.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// How far a request came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// No worker received it: it may be retried without limit.
    Never,
    /// The worker received it and refused it.
    Refused,
    /// The worker received it and did not answer: it may have processed all of it, or died from it.
    Lost {
        /// Whether the worker appears to have ended or to answer no requests at all.
        is_death: bool,
    },
}

/// An attempt that ended before the first byte.
#[derive(Debug, Clone)]
pub(crate) struct Failed {
    pub cause: &'static str,
    pub reach: Reach,
    pub message: String,
    /// The client's status if no other worker succeeds.
    pub status: StatusCode,
    /// The request's field at fault.
    pub param: Option<Cow<'static, str>>,
    pub is_engine_at_fault: bool,
    /// The request itself is invalid, so no other worker would succeed.
    pub is_final: bool,
}

impl Failed {
    /// A failure that is not the engine's fault: it refused the request.
    pub fn new(cause: &'static str, message: impl Into<String>, status: StatusCode) -> Self {
        let (message, reach) = (message.into(), Reach::Refused);
        let (param, is_engine_at_fault, is_final) = (None, false, false);
        Self { cause, reach, message, status, param, is_engine_at_fault, is_final }
    }

    /// The worker never received the request.
    pub fn unsent(self) -> Self {
        Self { reach: Reach::Never, ..self }
    }

    /// The worker received the request and is not known to have ended.
    pub fn lost(self) -> Self {
        Self { reach: Reach::Lost { is_death: false }, ..self }
    }

    /// The worker received the request and appears to have ended.
    pub fn died(self) -> Self {
        Self { reach: Reach::Lost { is_death: true }, ..self }
    }

    /// The request itself is invalid.
    pub fn invalid(reject: Reject) -> Self {
        let Reject { status, message, param, .. } = reject;
        Self { param, is_final: true, ..Self::new("invalid", message, status) }
    }

    /// Marks it as the engine's fault.
    pub fn fault(self) -> Self {
        Self { is_engine_at_fault: true, ..self }
    }
}

impl From<Failed> for Reject {
    fn from(failed: Failed) -> Self {
        Self { param: failed.param, ..Self::new(failed.status, failed.message) }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
