//! A publisher's memory for its trust: the last known good state, and what was already logged.

use super::code::{Code, Codes};
use super::counters::EventCounts;
use super::registration::ListenerStatus;
use super::trust::{self, Evidence};
use crate::clock::Clock;
use crate::ids::Worker;
use crate::log_limit::LogLimit;

/// Time for a new publisher's first connection; until then it is not worth a warning.
const CONNECT_MS: u64 = 5_000;

/// Kept under the publisher's lock.
#[derive(Debug, Default)]
pub(super) struct Standing {
    /// Counters at the last known good moment.
    baseline: EventCounts,
    /// Evictions of the index until then.
    evicted_before: u64,
    /// Its own observations; the rest of the evidence is read on demand.
    pub seen: Evidence,
    /// Codes that were logged.
    told: Codes,
    /// When it was registered.
    since_ms: u64,
    /// Whether a warning was logged since the last recovery.
    is_warned: bool,
    /// How often each fault may still be logged.
    lines: Vec<(Code, LogLimit)>,
}

impl Standing {
    /// For a publisher registered at `since_ms`; the index has evicted `evicted` blocks so far.
    pub fn new(evicted: u64, since_ms: u64) -> Self {
        Self { evicted_before: evicted, since_ms, ..Self::default() }
    }

    /// All its blocks were dropped, and a new stream begins.
    pub fn forgotten(&mut self, now: EventCounts, evicted: u64) {
        self.right(now, evicted);
        self.seen.is_known_empty = false;
    }

    /// The engine cleared its cache. Problems of its publishing remain.
    pub fn cleared(&mut self, now: EventCounts, evicted: u64) {
        let EventCounts { batches, stored, block_size_mismatch, .. } = self.baseline;
        self.right(EventCounts { batches, stored, block_size_mismatch, ..now }, evicted);
    }

    fn right(&mut self, now: EventCounts, evicted: u64) {
        self.baseline = now;
        self.evicted_before = evicted;
        self.seen.missing_batches = 0;
        self.seen.missed_first_batches = 0;
        self.seen.batches_before = 0;
        self.seen.is_unverified = false;
        self.seen.is_recovered_without_watermark = false;
        self.seen.is_recovered_inexact = false;
    }

    /// The socket's state changed from `before`; `has_position`: whether a batch was applied.
    pub fn socket(&mut self, before: ListenerStatus, status: ListenerStatus, has_position: bool) {
        if status != ListenerStatus::Active {
            return;
        }
        if before == ListenerStatus::Pending && self.seen.was_connected && has_position {
            self.seen.is_unverified = true;
        }
        self.seen.was_connected = true;
    }

    /// A batch was applied, or a replay verified the stream.
    pub fn went_on(&mut self) {
        self.seen.missing_batches = 0;
        self.seen.is_unverified = false;
        self.seen.is_known_empty = false;
    }

    /// Batches were given up; `is_first` if none was applied before.
    pub fn gave_up(&mut self, batches: u64, is_first: bool) {
        self.seen.missing_batches = 0;
        if is_first {
            self.seen.missed_first_batches += batches;
        }
    }

    /// An earlier registration applied this many batches, whose blocks are gone. They can be
    /// requested if there is a replay.
    pub fn returned(&mut self, batches: u64, has_replay: bool) {
        self.seen.missing_batches = if has_replay { batches } else { 0 };
        self.seen.batches_before = if has_replay { 0 } else { batches };
    }

    /// Its blocks came from a peer, with or without a stream position, exact or not.
    pub fn recovered(&mut self, has_watermark: bool, is_exact: bool) {
        self.seen.is_recovered_without_watermark = !has_watermark;
        self.seen.is_recovered_inexact = !is_exact;
        self.seen.is_known_empty = false;
    }

    /// Evidence without data of the socket and the index.
    pub fn evidence(&self, status: ListenerStatus, now: &EventCounts) -> Evidence {
        Evidence {
            status,
            since: now.since(&self.baseline),
            evicted_blocks: self.evicted_before,
            ..self.seen
        }
    }

    /// Evictions of the index since the last known good moment, of `evicted` in total.
    pub fn evicted_since(&self, evicted: u64) -> u64 {
        evicted.saturating_sub(self.evicted_before)
    }

    /// Logs new problems among the codes in `looked_at`, and a recovery. A fault that comes and
    /// goes is logged as often as a [`LogLimit`] allows.
    pub fn tell(
        &mut self,
        clock: &dyn Clock,
        worker: Worker,
        endpoint: &str,
        evidence: &Evidence,
        last_error: Option<&str>,
        looked_at: Codes,
    ) {
        let mut found = trust::findings(evidence).and(looked_at);
        if clock.now_ms() < self.since_ms + CONNECT_MS {
            found = found.without(Codes::EMPTY.with(Code::NeverConnected));
        }
        let before = self.told;
        if found == before.and(looked_at) {
            return;
        }
        self.told = before.without(looked_at).or(found);
        let state = self.told.state();
        for code in found.without(before).iter() {
            let reason = trust::explain(code, evidence, last_error);
            let (code_name, state) = (reason.code, state.name());
            if code.is_passing() {
                tracing::debug!(%worker, endpoint, state, code = code_name, "{}", reason.message);
            } else if let Some(held_back) = self.line(code).pass(clock.now_ms()) {
                self.is_warned = true;
                tracing::warn!(
                    %worker, endpoint, state, code = code_name, fix = reason.fix, held_back,
                    "the index is not exact about a worker: {}", reason.message
                );
            }
        }
        if self.told == Codes::EMPTY && std::mem::take(&mut self.is_warned) {
            tracing::info!(%worker, endpoint, "the index is exact about a worker again");
        }
    }

    fn line(&mut self, code: Code) -> &mut LogLimit {
        let at = self.lines.iter().position(|(known, _)| *known == code).unwrap_or_else(|| {
            self.lines.push((code, LogLimit::default()));
            self.lines.len() - 1
        });
        &mut self.lines[at].1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::ManualClock;

    #[test]
    fn a_new_publisher_has_time_to_connect() {
        let clock = ManualClock::default();
        let mut standing = Standing::new(0, clock.now_ms());
        let silent = Evidence::default();
        let told = |standing: &mut Standing, after_ms| {
            clock.advance(after_ms);
            standing.tell(&clock, Worker::new(1, 0), "tcp://h:1", &silent, None, Codes::all());
            standing.told
        };
        let never = Codes::EMPTY.with(Code::NeverConnected);
        assert_eq!(told(&mut standing, 0), Codes::EMPTY);
        assert_eq!(told(&mut standing, CONNECT_MS - 1), Codes::EMPTY);
        assert!(!standing.is_warned);
        assert_eq!(told(&mut standing, 1), never);
        assert!(standing.is_warned);
    }
}
