//! Limits of client keys: requests per minute, uncached prompt tokens per minute, concurrent
//! requests.

use std::collections::HashMap;
use std::sync::Arc;

use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use kvflash_core::clock::Clock;
use kvflash_core::select::Usage;
use parking_lot::Mutex;

use super::bucket::Bucket;
use crate::{Key, Reject};

/// As many keys as a file may have; beyond them those whose limits are untouched are forgotten, and where there are
/// none further clients are refused.
const MAX_METERS: usize = 10_000;

/// Admitted and refused requests, by reason.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Counts {
    /// Admitted requests.
    pub served: u64,
    /// Refused by requests per minute.
    pub requests: u64,
    /// Refused by uncached prompt tokens per minute.
    pub tokens: u64,
    /// Refused by concurrent requests.
    pub concurrency: u64,
    /// Uncached prompt tokens.
    pub uncached_tokens: u64,
}

#[derive(Debug, Default)]
struct State {
    requests: Bucket,
    tokens: Bucket,
    concurrency: Option<u64>,
    in_flight: u64,
    counts: Counts,
}

impl State {
    /// Applies the key's current limits at this time.
    fn refresh(&mut self, key: &Key, now_ms: u64) {
        self.requests.limit_to(key.rpm, now_ms);
        self.tokens.limit_to(key.tpm, now_ms);
        self.concurrency = key.concurrency;
        self.fill(now_ms);
    }

    fn fill(&mut self, now_ms: u64) {
        self.requests.fill(now_ms);
        self.tokens.fill(now_ms);
    }

    fn is_idle(&self) -> bool {
        self.in_flight == 0 && self.requests.is_full() && self.tokens.is_full()
    }
}

/// Each client key's usage of its limits.
///
/// # Consistency
/// A request is counted before it is admitted: concurrent requests never exceed the limits, except
/// for the tokens of the last one. Every process counts separately.
///
/// # Cost
/// Two locks, held for some arithmetic; nothing for requests without a key.
pub(crate) struct Meters {
    clock: Arc<dyn Clock>,
    table: Mutex<HashMap<String, Arc<Mutex<State>>>>,
}

impl Meters {
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self { clock, table: Mutex::default() }
    }

    /// Nothing for one more client than are counted.
    fn meter(&self, id: &str) -> Option<Arc<Mutex<State>>> {
        let mut table = self.table.lock();
        if let Some(meter) = table.get(id) {
            return Some(Arc::clone(meter));
        }
        if table.len() >= MAX_METERS {
            let now_ms = self.clock.now_ms();
            table.retain(|_, meter| {
                let mut state = meter.lock();
                state.fill(now_ms);
                !state.is_idle()
            });
            if table.len() >= MAX_METERS {
                return None;
            }
        }
        Some(Arc::clone(table.entry(id.to_owned()).or_default()))
    }

    /// Admits a request of `key`, and holds a slot for it until the result is dropped.
    ///
    /// # Errors
    /// 429 with the limit, and when to retry.
    pub fn begin(&self, key: &Key) -> Result<Running, Reject> {
        let now_ms = self.clock.now_ms();
        let meter = self.meter(&key.id).ok_or_else(|| {
            let what =
                format!("{MAX_METERS} other clients use their limits, the most that are counted");
            refusal(&key.id, &what, 1_000)
        })?;
        {
            let mut state = meter.lock();
            state.refresh(key, now_ms);
            if let Some(limit) = state.concurrency.filter(|limit| state.in_flight >= *limit) {
                state.counts.concurrency += 1;
                let what = format!("{limit} requests are in flight, the limit (concurrency)");
                return Err(refusal(&key.id, &what, 1_000));
            }
            if let Some(limit) = state.requests.limit()
                && state.requests.wait_ms(1.0) > 0
            {
                state.counts.requests += 1;
                let wait_ms = state.requests.wait_ms(1.0);
                let what = format!("{limit} requests a minute are the limit (rpm)");
                return Err(refusal(&key.id, &what, wait_ms));
            }
            check_tokens(&mut state, &key.id)?;
            state.requests.take(1.0);
            state.in_flight += 1;
            state.counts.served += 1;
        }
        let clock = Arc::clone(&self.clock);
        Ok(Running { clock, meter, id: key.id.clone(), charge: Mutex::default() })
    }

    /// Adds the remaining allowance of `key` to a response's headers.
    pub fn tell(&self, key: &Key, headers: &mut HeaderMap) {
        if key.rpm.is_none() && key.tpm.is_none() {
            return;
        }
        let Some(meter) = self.meter(&key.id) else { return };
        let mut state = meter.lock();
        state.refresh(key, self.clock.now_ms());
        for (bucket, names) in
            [(&state.requests, &REQUEST_HEADERS), (&state.tokens, &TOKEN_HEADERS)]
        {
            let Some(limit) = bucket.limit() else { continue };
            let reset = format!("{}s", bucket.reset_ms().div_ceil(100) as f64 / 10.0);
            let [of_limit, of_remaining, of_reset] = names.map(HeaderName::from_static);
            headers.insert(of_limit, limit.into());
            headers.insert(of_remaining, bucket.remaining().into());
            if let Ok(reset) = HeaderValue::try_from(reset) {
                headers.insert(of_reset, reset);
            }
        }
    }

    /// Outcomes of each key's requests, and requests in flight.
    pub fn all(&self) -> Vec<(String, Counts, u64)> {
        let table = self.table.lock();
        let told = |(id, meter): (&String, &Arc<Mutex<State>>)| {
            let state = meter.lock();
            (id.clone(), state.counts, state.in_flight)
        };
        table.iter().map(told).collect()
    }
}

const REQUEST_HEADERS: [&str; 3] =
    ["x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"];
const TOKEN_HEADERS: [&str; 3] =
    ["x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"];

/// # Errors
/// 429 if no tokens are left.
fn check_tokens(state: &mut State, id: &str) -> Result<(), Reject> {
    let Some(limit) = state.tokens.limit() else { return Ok(()) };
    let wait_ms = state.tokens.wait_ms(1.0);
    if wait_ms == 0 {
        return Ok(());
    }
    state.counts.tokens += 1;
    let what = format!("{limit} uncached prompt tokens a minute are the limit (tpm)");
    Err(refusal(id, &what, wait_ms))
}

fn refusal(id: &str, what: &str, wait_ms: u64) -> Reject {
    let retry_after_s = u32::try_from(wait_ms.div_ceil(1_000)).unwrap_or(u32::MAX).max(1);
    let message = format!("key {id:?}: {what}; try again in {retry_after_s} s");
    let reject = Reject::new(StatusCode::TOO_MANY_REQUESTS, message);
    Reject { retry_after_s: Some(retry_after_s), ..reject }
}

/// Tokens charged for a request.
#[derive(Debug, Default)]
struct Charge {
    tokens: u64,
    /// A worker answers: its computation is charged.
    is_kept: bool,
}

/// An admitted request. Dropping it frees its slot and refunds tokens that no worker computed.
pub(crate) struct Running {
    clock: Arc<dyn Clock>,
    meter: Arc<Mutex<State>>,
    id: String,
    charge: Mutex<Charge>,
}

impl Running {
    /// Charges prompt tokens that no cache holds, before they are computed.
    ///
    /// # Errors
    /// 429 if none are left. A remainder need not suffice: the next requests then wait.
    pub fn charge(&self, tokens: u64) -> Result<(), Reject> {
        {
            let mut state = self.meter.lock();
            state.fill(self.clock.now_ms());
            check_tokens(&mut state, &self.id)?;
            state.tokens.take(tokens as f64);
        }
        self.charge.lock().tokens = tokens;
        Ok(())
    }

    /// Sets the number that a worker computes, as far as is known now.
    pub fn computes(&self, tokens: u64) {
        let before = {
            let mut charge = self.charge.lock();
            charge.is_kept = true;
            std::mem::replace(&mut charge.tokens, tokens)
        };
        self.meter.lock().tokens.take(tokens as f64 - before as f64);
    }

    /// Records the engine's usage of a prompt; without a count of cached tokens, the expected one
    /// is used.
    pub fn used(&self, usage: Usage) {
        let Some(input) = usage.input_tokens else { return };
        let expected = self.charge.lock().tokens;
        self.computes(match usage.cached_tokens {
            Some(cached) => input.saturating_sub(cached),
            None => expected.min(input),
        });
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let Charge { tokens, is_kept } = *self.charge.get_mut();
        let mut state = self.meter.lock();
        state.in_flight -= 1;
        match is_kept {
            true => state.counts.uncached_tokens += tokens,
            false => state.tokens.take(-(tokens as f64)),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kvflash_core::clock::ManualClock;

    use super::super::tests::key;
    use super::*;

    fn meters() -> (Meters, Arc<ManualClock>) {
        let clock = Arc::new(ManualClock::default());
        (Meters::new(Arc::<ManualClock>::clone(&clock)), clock)
    }

    #[test]
    fn requests_a_minute_come_back_one_by_one() {
        let (meters, clock) = meters();
        let key = Key { rpm: Some(2), ..key("a") };
        for _ in 0..2 {
            drop(meters.begin(&key).unwrap());
        }
        let reject = meters.begin(&key).err().unwrap();
        assert_eq!((reject.status.as_u16(), reject.retry_after_s), (429, Some(30)));
        assert!(reject.message.contains("2 requests a minute are the limit (rpm)"));
        drop(meters.begin(&self::key("b")).unwrap());
        clock.advance(30_000);
        drop(meters.begin(&key).unwrap());
        assert!(meters.begin(&key).is_err());
        let counts = meters.all().into_iter().find(|(id, ..)| id == "a").unwrap().1;
        assert_eq!((counts.served, counts.requests), (3, 2));
    }

    #[test]
    fn only_what_no_cache_held_is_charged_and_only_once_it_is_computed() {
        let (meters, clock) = meters();
        let key = Key { tpm: Some(600), ..key("a") };
        let first = meters.begin(&key).unwrap();
        first.charge(700).unwrap();
        let reject = meters.begin(&key).err().unwrap();
        assert_eq!(reject.retry_after_s, Some(11), "a debt of 100 and one more token");
        // The worker held most of it.
        first.computes(100);
        let second = meters.begin(&key).unwrap();
        second.charge(500).unwrap();
        let third = meters.begin(&key).err().unwrap();
        assert!(third.message.contains("uncached prompt tokens"), "{}", third.message);
        // No worker answered it.
        drop(second);
        meters.begin(&key).unwrap().charge(500).unwrap();
        let usage = |input, cached| Usage {
            input_tokens: Some(input),
            cached_tokens: cached,
            output_tokens: None,
        };
        first.used(usage(700, None));
        first.used(usage(700, Some(620)));
        drop(first);
        clock.advance(60_000);
        let mut headers = HeaderMap::new();
        meters.tell(&key, &mut headers);
        assert_eq!(headers["x-ratelimit-remaining-tokens"], "600");
        assert_eq!(meters.all()[0].1.uncached_tokens, 80, "as the engine says");
    }

    #[test]
    fn requests_at_once_have_a_limit_and_a_dropped_one_makes_room() {
        let (meters, _) = meters();
        let key = Key { concurrency: Some(1), ..key("a") };
        let running = meters.begin(&key).unwrap();
        let reject = meters.begin(&key).err().unwrap();
        assert!(reject.message.contains("1 requests are in flight"), "{}", reject.message);
        drop(running);
        drop(meters.begin(&key).unwrap());
        assert_eq!(meters.all()[0].2, 0);
    }

    #[test]
    fn headers_tell_what_is_left() {
        let (meters, _) = meters();
        let key = Key { rpm: Some(60), tpm: Some(600), ..key("a") };
        let running = meters.begin(&key).unwrap();
        running.charge(15).unwrap();
        let mut headers = HeaderMap::new();
        meters.tell(&key, &mut headers);
        let told: Vec<&str> = REQUEST_HEADERS
            .iter()
            .chain(&TOKEN_HEADERS)
            .map(|name| headers[*name].to_str().unwrap())
            .collect();
        assert_eq!(told, ["60", "59", "1s", "600", "585", "1.5s"]);
        let mut none = HeaderMap::new();
        meters.tell(&self::key("b"), &mut none);
        assert!(none.is_empty());
    }

    #[test]
    fn keys_that_are_idle_are_forgotten_at_the_limit() {
        let (meters, clock) = meters();
        let limited = Key { rpm: Some(60), ..key("used") };
        drop(meters.begin(&limited).unwrap());
        for n in 1..MAX_METERS {
            drop(meters.begin(&key(&n.to_string())).unwrap());
        }
        drop(meters.begin(&key("one more")).unwrap());
        let ids: Vec<String> = meters.all().into_iter().map(|(id, ..)| id).collect();
        assert!(ids.len() == 2 && ids.contains(&"used".to_owned()), "{ids:?}");
        clock.advance(60_000);
    }

    #[test]
    fn one_more_client_than_are_counted_is_refused() {
        let (meters, clock) = meters();
        let limited = |n: usize| Key { rpm: Some(60), ..key(&n.to_string()) };
        for n in 0..MAX_METERS {
            drop(meters.begin(&limited(n)).unwrap());
        }
        let reject = meters.begin(&limited(MAX_METERS)).err().unwrap();
        assert_eq!((reject.status.as_u16(), reject.retry_after_s), (429, Some(1)));
        assert!(
            reject.message.contains("10000 other clients use their limits"),
            "{}",
            reject.message
        );
        let mut headers = HeaderMap::new();
        meters.tell(&limited(MAX_METERS), &mut headers);
        assert!(headers.is_empty() && meters.all().len() == MAX_METERS);
        // Those that are counted go on, and one that has not asked for long makes room.
        drop(meters.begin(&limited(0)).unwrap());
        clock.advance(1_000);
        drop(meters.begin(&limited(MAX_METERS)).unwrap());
    }
}
