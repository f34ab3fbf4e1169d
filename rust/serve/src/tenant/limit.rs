//! Limits of client keys: requests per minute, uncached prompt tokens per minute, concurrent
//! requests.

use std::collections::HashMap;
use std::sync::Arc;

use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use kvflash_core::clock::Clock;
use kvflash_core::select::Usage;
use parking_lot::Mutex;

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
    in_flight: u64,
    counts: Counts,
}

impl State {
    /// Applies the key's current limits at this time.
    fn refresh(&mut self, key: &Key, now_ms: u64) {
        self.requests.limit_to(key.rpm, now_ms);
        self.tokens.limit_to(key.tpm, now_ms);
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
            let what = format!("{MAX_METERS} other clients have limits in use, the maximum");
            refusal(&key.id, &what, 1_000)
        })?;
        {
            let state = &mut *meter.lock();
            state.refresh(key, now_ms);
            if let Some(limit) = key.concurrency.filter(|limit| state.in_flight >= *limit) {
                state.counts.concurrency += 1;
                let what =
                    format!("the limit of requests in flight is reached: {limit} (concurrency)");
                return Err(refusal(&key.id, &what, 1_000));
            }
            let what = "requests a minute are the limit (rpm)";
            check(&state.requests, &mut state.counts.requests, &key.id, what)?;
            check(&state.tokens, &mut state.counts.tokens, &key.id, TOKENS)?;
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

const TOKENS: &str = "uncached prompt tokens a minute are the limit (tpm)";

/// # Errors
/// 429 if nothing is left, which `refused` counts; `what` follows the limit.
fn check(bucket: &Bucket, refused: &mut u64, id: &str, what: &str) -> Result<(), Reject> {
    let wait_ms = bucket.wait_ms(1.0);
    let Some(limit) = bucket.limit().filter(|_| wait_ms > 0) else { return Ok(()) };
    *refused += 1;
    Err(refusal(id, &format!("{limit} {what}"), wait_ms))
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
    /// A worker has the request: its computation is charged.
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
            let state = &mut *self.meter.lock();
            state.fill(self.clock.now_ms());
            check(&state.tokens, &mut state.counts.tokens, &self.id, TOKENS)?;
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

    /// The worker failed: what it computed is not charged.
    pub fn spare(&self) {
        self.charge.lock().is_kept = false;
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

/// Milliseconds of a minute.
const MINUTE_MS: f64 = 60_000.0;

/// An allowance per minute, which accumulates for at most a minute. It may become negative if a
/// request uses more than is left; the next ones then wait.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Bucket {
    /// `None` for no limit.
    per_minute: Option<u64>,
    level: f64,
    filled_ms: u64,
}

impl Bucket {
    /// Sets the limit, which may have changed.
    pub fn limit_to(&mut self, per_minute: Option<u64>, now_ms: u64) {
        let before = std::mem::replace(&mut self.per_minute, per_minute);
        let Some(limit) = per_minute else { return };
        match before {
            // A new limit does not restore used units.
            Some(_) => self.level = self.level.min(limit as f64),
            None => (self.level, self.filled_ms) = (limit as f64, now_ms),
        }
    }

    /// Adds the allowance since the last call.
    pub fn fill(&mut self, now_ms: u64) {
        let Some(limit) = self.per_minute else { return };
        let passed = now_ms.saturating_sub(self.filled_ms) as f64;
        self.filled_ms = self.filled_ms.max(now_ms);
        self.level = (self.level + passed * limit as f64 / MINUTE_MS).min(limit as f64);
    }

    pub fn limit(&self) -> Option<u64> {
        self.per_minute
    }

    /// The remaining whole units.
    pub fn remaining(&self) -> u64 {
        self.level.max(0.0) as u64
    }

    /// Whether it is full.
    pub fn is_full(&self) -> bool {
        self.per_minute.is_none_or(|limit| self.level >= limit as f64)
    }

    /// Milliseconds until `wanted` units are available, or until it is full; 0 if they are
    /// available now.
    pub fn wait_ms(&self, wanted: f64) -> u64 {
        let Some(limit) = self.per_minute else { return 0 };
        let missing = wanted.min(limit as f64) - self.level;
        if missing <= 0.0 { 0 } else { (missing * MINUTE_MS / limit as f64).ceil() as u64 }
    }

    /// Milliseconds until it is full.
    pub fn reset_ms(&self) -> u64 {
        self.wait_ms(f64::INFINITY)
    }

    /// Uses `amount`, or returns it if negative.
    pub fn take(&mut self, amount: f64) {
        if let Some(limit) = self.per_minute {
            self.level = (self.level - amount).min(limit as f64);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
