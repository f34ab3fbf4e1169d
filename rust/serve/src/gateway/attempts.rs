//! Decides whether a failed request is sent to another worker.
//!
//! A request that no worker received is tried at as many workers as there are. A request that a
//! worker received and lost may have killed it: it gets one more attempt, or none if two workers
//! lost the same body before. A refused request gets one more attempt. Retries without a dead
//! worker are limited to a small share of the requests in flight, because they would worsen an
//! overload.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::backend::failed::{Failed, Reach};

/// How long lost bodies are remembered, and how many.
const SUSPECT_TIME: Duration = Duration::from_secs(60);
const MAX_SUSPECTS: usize = 4_096;

/// Concurrent retries: this number, or one per this many requests in flight.
const MIN_RETRIES: usize = 10;
const REQUESTS_PER_RETRY: usize = 5;

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
    /// The attempts of one request with this body.
    pub fn of(self: &Arc<Self>, body: &[u8]) -> Attempts {
        let hash = || xxh3_64_with_seed(body, self.seed);
        let is_suspect = self.count.load(Ordering::Relaxed) > 0 && self.is_suspect(hash());
        Attempts { retries: Arc::clone(self), is_suspect, lost: 0, refused: 0, has_permit: false }
    }

    fn is_suspect(&self, hash: u64) -> bool {
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
    /// The same body was lost before.
    is_suspect: bool,
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
                if self.is_suspect || self.lost > 1 {
                    self.retries.suspect(body);
                    return Some(match self.is_suspect {
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use axum::http::StatusCode;

    use super::*;

    fn failed() -> Failed {
        Failed::new("test", "why", StatusCode::BAD_GATEWAY)
    }

    #[test]
    fn what_nobody_had_is_tried_freely() {
        let retries = Arc::new(Retries::default());
        let mut attempts = retries.of(b"a");
        assert!((0..100).all(|_| attempts.failed(&failed().unsent(), b"a", 1).is_none()));
    }

    #[test]
    fn what_one_lost_has_one_more_and_the_same_again_none() {
        let retries = Arc::new(Retries::default());
        let mut attempts = retries.of(b"a");
        assert_eq!(attempts.failed(&failed().died(), b"a", 1), None);
        assert!(attempts.failed(&failed().died(), b"a", 1).unwrap().contains("two workers"));
        let mut again = retries.of(b"a");
        assert!(again.failed(&failed().died(), b"a", 1).unwrap().contains("the same request"));
        let mut other = retries.of(b"b");
        assert_eq!(other.failed(&failed().lost(), b"b", 1), None);
        assert_eq!(retries.of(b"b").failed(&failed().died(), b"b", 1), None, "one loss is none");
        retries.of(b"a").answered(b"a");
        assert_eq!(retries.of(b"a").failed(&failed().died(), b"a", 1), None, "it was answered");
    }

    #[tokio::test(start_paused = true)]
    async fn suspects_are_forgotten() {
        let retries = Arc::new(Retries::default());
        retries.suspect(b"a");
        assert!(retries.of(b"a").is_suspect);
        tokio::time::advance(SUSPECT_TIME).await;
        assert!(!retries.of(b"a").is_suspect);
        for n in 0..3 * MAX_SUSPECTS {
            retries.suspect(&n.to_le_bytes());
        }
        assert_eq!(retries.suspects.lock().since.len(), MAX_SUSPECTS);
    }

    #[test]
    fn retries_are_few_beside_what_is_in_flight() {
        let retries = Arc::new(Retries::default());
        let mut all = Vec::new();
        let mut retry = |in_flight| {
            let mut attempts = retries.of(b"a");
            let why = attempts.failed(&failed(), b"a", in_flight);
            all.push(attempts);
            why.is_none()
        };
        assert_eq!((0..20).filter(|_| retry(20)).count(), 10);
        assert_eq!((0..20).filter(|_| retry(75)).count(), 5);
        all.clear();
        let mut attempts = retries.of(b"a");
        assert_eq!(attempts.failed(&failed(), b"a", 1), None);
        assert!(attempts.failed(&failed(), b"a", 1).unwrap().contains("refused"));
    }
}
