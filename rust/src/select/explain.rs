//! What a decision was made of: for the journal, for the log, and for those who got none.

use std::sync::Arc;

use super::ask::Ask;
use super::record::{CandidateRecord, Outcome, Record};
use super::selector::Selector;
use crate::error::Error;
use crate::index::{Match, Matches};
use crate::policy::{Decision, Policy, Terms};

impl Selector {
    pub(super) fn record(
        &self,
        request_id: &str,
        ask: &Ask<'_>,
        decision: &Decision<'_>,
        matches: &Matches,
        passed_over: &[Terms],
    ) -> Record {
        let mut found: Vec<&Match> = matches.as_slice().iter().collect();
        found.sort_unstable_by_key(|found| found.worker);
        let candidate = |terms: &Terms, is_busy| {
            let place = found.binary_search_by_key(&terms.worker, |found| found.worker);
            let held = place.ok().map(|place| found[place]);
            let blocks = |tier: fn(&Match) -> u32| held.map_or(0, tier);
            CandidateRecord {
                terms: *terms,
                overlap_blocks: self.told(terms).0,
                device_blocks: blocks(|held| held.device),
                host_blocks: blocks(|held| held.host),
                disk_blocks: blocks(|held| held.external),
                predicted_blocks: blocks(|held| held.predicted),
                is_busy,
            }
        };
        let open = decision.candidates.iter().map(|terms| candidate(terms, false));
        let busy = passed_over.iter().map(|terms| candidate(terms, true));
        Record {
            request_id: request_id.into(),
            model: Arc::clone(&self.name),
            decided_at_ms: self.clock.now_ms(),
            policy: decision.policy,
            worker: decision.worker,
            reason: decision.reason,
            ties: decision.ties,
            margin: decision.margin,
            request: decision.request,
            request_blocks: ask.prompt.sequence_hashes.len() as u32,
            overlap_blocks: self.selection(decision, matches).overlap_blocks,
            candidates: open.chain(busy).collect(),
            first_token_ms: None,
            ended_ms: None,
            cached_tokens: None,
            outcome: Outcome::Running,
        }
    }

    /// Say what the router cannot know.
    pub(super) fn explain(&self, ask: &Ask<'_>, error: Error) -> Error {
        match (error, ask.pin) {
            (Error::NoWorker(_), Some(pin))
                if !self.workers.lock().iter().any(|worker| pin.fits(*worker)) =>
            {
                Error::NoWorker(format!("the pinned worker {pin} is not registered"))
            }
            (Error::AllBusy(text), pin) => {
                let who = pin.map_or(text, |pin| format!("the pinned worker {pin} is busy"));
                let thresholds = self.busy.thresholds();
                Error::AllBusy(format!(
                    "Service temporarily unavailable: {who}. Thresholds in force: {thresholds}; try \
                     again later, or raise or unset them (POST /busy_threshold)"
                ))
            }
            (error, _) => error,
        }
    }
}

/// One line for the decision, and one for each candidate's cost.
pub(super) fn log(model: &str, ask: &Ask<'_>, decision: &Decision<'_>) {
    if !tracing::enabled!(tracing::Level::DEBUG) {
        return;
    }
    tracing::debug!(
        model, request_id = ask.request_id, worker = %decision.worker, policy = %decision.policy,
        reason = %decision.reason, isl_tokens = ask.prompt.isl_tokens,
        overlap_blocks = decision.overlap_blocks,
        predicted_blocks = decision.terms().predicted_blocks, cost = decision.terms().cost,
        ties = decision.ties, margin = decision.margin, candidates = decision.candidates.len(),
        "routed"
    );
    if decision.policy == Policy::Kv {
        for formula in decision.formulas() {
            tracing::debug!("{formula}");
        }
    }
}
