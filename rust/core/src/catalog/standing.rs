//! What a publisher remembers for its trust: since when all was right, and what has been said already.

use super::code::{Code, Codes};
use super::counters::EventCounts;
use super::registration::ListenerStatus;
use super::trust::{self, Evidence};
use crate::clock::Clock;
use crate::ids::Worker;
use crate::log_limit::LogLimit;

/// Kept under the publisher's lock.
#[derive(Debug, Default)]
pub(super) struct Standing {
    /// Counts when all was last known to be right.
    baseline: EventCounts,
    /// Blocks that the index had let go by then.
    evicted_before: u64,
    /// What it has seen itself; the rest of the evidence is read when it is asked for.
    seen: Evidence,
    /// What the log knows of.
    told: Codes,
    /// Has it been warned since it was last told that all is right?
    is_warned: bool,
    /// How often each fault may still be told.
    lines: Vec<(Code, LogLimit)>,
}

impl Standing {
    /// Of a publisher that is registered now, with an index that has let `evicted` blocks go so far.
    pub fn new(evicted: u64) -> Self {
        Self { evicted_before: evicted, ..Self::default() }
    }

    /// All its blocks are forgotten, and a new stream begins.
    pub fn forgotten(&mut self, now: EventCounts, evicted: u64) {
        self.right(now, evicted);
        self.seen.is_known_empty = false;
    }

    /// The engine cleared its cache. What is wrong with how it publishes stays wrong.
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

    /// The socket's state changed; `before` is the one until now, `has_position` whether a batch was applied.
    pub fn socket(&mut self, before: ListenerStatus, status: ListenerStatus, has_position: bool) {
        if status != ListenerStatus::Active {
            return;
        }
        if before == ListenerStatus::Pending && self.seen.was_connected && has_position {
            self.seen.is_unverified = true;
        }
        self.seen.was_connected = true;
    }

    /// Whether the socket was ever connected.
    pub fn has_connected(&self) -> bool {
        self.seen.was_connected
    }

    /// A batch was applied, or a replay showed that the stream goes on.
    pub fn went_on(&mut self) {
        self.seen.missing_batches = 0;
        self.seen.is_unverified = false;
        self.seen.is_known_empty = false;
    }

    /// These batches are being asked for.
    pub fn missing(&mut self, batches: u64) {
        self.seen.missing_batches = batches;
    }

    /// Batches were given up; `is_first` when none was applied before.
    pub fn gave_up(&mut self, batches: u64, is_first: bool) {
        self.seen.missing_batches = 0;
        if is_first {
            self.seen.missed_first_batches += batches;
        }
    }

    /// The engine is being asked for what it published, or not any more.
    pub fn replaying(&mut self, is_replaying: bool) {
        self.seen.is_replaying = is_replaying;
    }

    /// So many batches were applied by an earlier registration, whose blocks are gone. They can be asked
    /// for, or not.
    pub fn returned(&mut self, batches: u64, has_replay: bool) {
        if has_replay {
            self.seen.missing_batches = batches;
        } else {
            self.seen.batches_before = batches;
        }
    }

    /// A replay from the start brought nothing: the engine has published nothing yet.
    pub fn found_empty(&mut self) {
        self.seen.is_known_empty = true;
    }

    /// Its blocks came from a peer, which could say up to which batch or not, and was exact or not.
    pub fn recovered(&mut self, has_watermark: bool, is_exact: bool) {
        self.seen.is_recovered_without_watermark = !has_watermark;
        self.seen.is_recovered_inexact = !is_exact;
        self.seen.is_known_empty = false;
    }

    /// Evidence without what the socket and the index know.
    pub fn evidence(&self, status: ListenerStatus, now: &EventCounts) -> Evidence {
        Evidence {
            status,
            since: now.since(&self.baseline),
            evicted_blocks: self.evicted_before,
            ..self.seen
        }
    }

    /// Blocks that the index has let go since all was right, of `evicted` in total.
    pub fn evicted_since(&self, evicted: u64) -> u64 {
        evicted.saturating_sub(self.evicted_before)
    }

    /// Tell the log what is newly wrong among the codes in `looked_at`, and when all is right again. A fault
    /// that comes and goes is told as often as a [`LogLimit`] allows.
    pub fn tell(
        &mut self,
        clock: &dyn Clock,
        worker: Worker,
        endpoint: &str,
        evidence: &Evidence,
        last_error: Option<&str>,
        looked_at: Codes,
    ) {
        let found = trust::findings(evidence).and(looked_at);
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
