//! Weighted tokens of each client in a sliding window.

use std::collections::{BTreeMap, VecDeque};

use hashbrown::HashMap;

use super::super::settings::{TimeUnit, VtcSettings};
use crate::error::{Error, Result};

/// Weighted input and output tokens of clients in a sliding window of time units.
///
/// In `document` a client is dropped from the lowest, highest and sum as soon as its tokens leave
/// the window. In `aibrix-compat` that happens when it is next looked up, or when there is no room
/// for another client.
#[derive(Debug)]
pub struct TokenTracker {
    settings: VtcSettings,
    /// Length of a bucket, in milliseconds.
    bucket_ms: u64,
    /// Age after which a bucket is dropped, in buckets.
    window: u64,
    clients: HashMap<Box<str>, Client>,
    /// Number of clients by total above 0; keys are the bits of the number, which sort in its
    /// order.
    totals: BTreeMap<u64, u32>,
    sum: f64,
    /// Buckets in the order of their start (`document`).
    queue: VecDeque<(u64, Box<str>)>,
    uncounted: u64,
    /// The bucket of the last complete sweep.
    swept: Option<u64>,
    /// The latest time seen: requests may be charged slightly out of order.
    now_ms: u64,
}

#[derive(Debug, Default)]
struct Client {
    /// Oldest first.
    buckets: VecDeque<(u64, f64)>,
    total: f64,
}

impl TokenTracker {
    /// A tracker without clients.
    pub fn new(settings: &VtcSettings) -> Self {
        let second_ms = 1_000;
        let (bucket_ms, buckets_per_unit) = match settings.time_unit {
            // With buckets of a second, a window of hours would have thousands per client.
            TimeUnit::Hours => (60 * second_ms, 60),
            TimeUnit::Minutes => (second_ms, 60),
            TimeUnit::Seconds => (second_ms, 1),
            TimeUnit::Milliseconds => (1, 1),
        };
        Self {
            settings: settings.clone(),
            bucket_ms,
            window: settings.window_size.saturating_mul(buckets_per_unit),
            clients: HashMap::new(),
            totals: BTreeMap::new(),
            sum: 0.0,
            queue: VecDeque::new(),
            uncounted: 0,
            swept: None,
            now_ms: 0,
        }
    }

    /// Weighted tokens. Negative numbers count as 0.
    fn weighed(&self, input: f64, output: f64) -> f64 {
        let VtcSettings { input_token_weight, output_token_weight, .. } = self.settings;
        input.max(0.0) * input_token_weight + output.max(0.0) * output_token_weight
    }

    /// Clients that are tracked.
    pub fn len(&self) -> usize {
        self.clients.len()
    }

    /// Requests that were not charged because of the client limit.
    pub fn uncounted(&self) -> u64 {
        self.uncounted
    }

    /// Tokens of `client` in the window; 0 for an unknown client.
    pub fn total(&mut self, client: &str, now_ms: u64) -> f64 {
        self.forget_old(client, now_ms);
        self.clients.get(client).map_or(0.0, |client| client.total)
    }

    /// The share of `client` in all clients' tokens, 0 to 1; 0 without any tokens.
    pub fn share(&mut self, client: &str, now_ms: u64) -> f64 {
        let total = self.total(client, now_ms);
        if self.sum > 0.0 { (total / self.sum).clamp(0.0, 1.0) } else { 0.0 }
    }

    /// Lowest and highest total above 0; the configured ones if there is none.
    pub fn range(&self) -> (f64, f64) {
        let lowest = self.totals.keys().next().map(|&bits| f64::from_bits(bits));
        let highest = self.totals.keys().next_back().map(|&bits| f64::from_bits(bits));
        lowest.zip(highest).unwrap_or(self.settings.default_totals)
    }

    /// Charges tokens to `client`. Negative numbers count as 0.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a client without a name.
    pub fn charge(&mut self, client: &str, input: f64, output: f64, now_ms: u64) -> Result<()> {
        if client.is_empty() {
            return Err(Error::invalid("the client's name is empty"));
        }
        self.forget_old(client, now_ms);
        let tokens = self.weighed(input, output);
        if tokens <= 0.0 {
            return Ok(());
        }
        if !self.clients.contains_key(client) {
            if self.clients.len() >= self.settings.max_clients {
                self.sweep();
            }
            if self.clients.len() >= self.settings.max_clients {
                self.uncounted += 1;
                return Ok(());
            }
            self.clients.insert(client.into(), Client::default());
        }
        let Some(entry) = self.clients.get_mut(client) else { return Ok(()) };
        let bucket = self.now_ms / self.bucket_ms;
        match entry.buckets.back_mut() {
            Some((at, sum)) if *at >= bucket => *sum += tokens,
            _ => {
                entry.buckets.push_back((bucket, tokens));
                if !self.settings.is_compat {
                    self.queue.push_back((bucket, client.into()));
                }
            }
        }
        let before = entry.total;
        entry.total += tokens;
        let after = entry.total;
        self.move_total(before, after);
        Ok(())
    }

    /// Refunds a charge to `client`, as far as it is still in the window.
    pub fn refund(&mut self, client: &str, input: f64, output: f64, charged_at_ms: u64) {
        let tokens = self.weighed(input, output);
        let bucket = charged_at_ms / self.bucket_ms;
        if bucket < self.oldest() {
            return;
        }
        let Some(entry) = self.clients.get_mut(client) else { return };
        // If the clock was ahead, the charge may be in a later bucket.
        let at = entry.buckets.partition_point(|&(at, _)| at < bucket);
        let Some((_, sum)) = entry.buckets.get_mut(at) else { return };
        let taken = tokens.min(*sum);
        *sum -= taken;
        let before = entry.total;
        entry.total = (entry.total - taken).max(0.0);
        let after = entry.total;
        self.move_total(before, after);
    }

    /// The oldest bucket of the window.
    fn oldest(&self) -> u64 {
        (self.now_ms / self.bucket_ms).saturating_sub(self.window)
    }

    /// Drops what has left the window: of all clients, in `aibrix-compat` of `client` only.
    fn forget_old(&mut self, client: &str, now_ms: u64) {
        self.now_ms = self.now_ms.max(now_ms);
        let oldest = self.oldest();
        if self.settings.is_compat {
            return self.forget_of(client, oldest);
        }
        while let Some((bucket, _)) = self.queue.front() {
            if *bucket >= oldest {
                break;
            }
            if let Some((_, client)) = self.queue.pop_front() {
                self.forget_of(&client, oldest);
            }
        }
    }

    /// Drops what has left the window of all clients, including those whose look-up would do it, to
    /// make room for others. At most once per bucket, because it visits all of them.
    fn sweep(&mut self) {
        let bucket = self.now_ms / self.bucket_ms;
        if !self.settings.is_compat || self.swept == Some(bucket) {
            return;
        }
        self.swept = Some(bucket);
        let oldest = self.oldest();
        let is_old = |client: &Client| client.buckets.back().is_none_or(|(at, _)| *at < oldest);
        let old: Vec<Box<str>> = self
            .clients
            .iter()
            .filter(|(_, client)| is_old(client))
            .map(|(name, _)| name.clone())
            .collect();
        for client in old {
            self.forget_of(&client, oldest);
        }
    }

    fn forget_of(&mut self, client: &str, oldest: u64) {
        let Some(entry) = self.clients.get_mut(client) else { return };
        let before = entry.total;
        while let Some(&(bucket, tokens)) = entry.buckets.front() {
            if bucket >= oldest {
                break;
            }
            entry.buckets.pop_front();
            entry.total = (entry.total - tokens).max(0.0);
        }
        let is_gone = entry.buckets.is_empty();
        // Floating-point sums leave a remainder.
        let after = if is_gone { 0.0 } else { entry.total };
        entry.total = after;
        if is_gone {
            self.clients.remove(client);
        }
        self.move_total(before, after);
    }

    fn move_total(&mut self, before: f64, after: f64) {
        if before > 0.0
            && let Some(count) = self.totals.get_mut(&before.to_bits())
        {
            *count -= 1;
            if *count == 0 {
                self.totals.remove(&before.to_bits());
            }
        }
        if after > 0.0 {
            *self.totals.entry(after.to_bits()).or_insert(0) += 1;
        }
        self.sum += after - before;
        if self.totals.is_empty() {
            self.sum = 0.0;
        }
    }
}
