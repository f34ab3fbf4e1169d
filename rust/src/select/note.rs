//! What is kept and told of a decision.

use std::sync::Arc;

use super::ask::Ask;
use super::config::Overlap;
use super::record::{CandidateRecord, Outcome, Record};
use super::selection::Selection;
use super::selector::Selector;
use crate::index::{Match, Matches};
use crate::policy::{Decision, Policy, Terms};

impl Selector {
    /// What is told of an overlap: how much of it is held, and how much beyond is a guess. Without
    /// events, guesses are all there is.
    pub(super) fn told(&self, terms: &Terms) -> (u32, u32) {
        match self.overlap {
            Overlap::Predictions => (terms.overlap_blocks, 0),
            _ => (terms.overlap_blocks - terms.predicted_blocks, terms.predicted_blocks),
        }
    }

    pub(super) fn selection(&self, decision: &Decision<'_>, matches: &Matches) -> Selection {
        let (overlap_blocks, predicted_blocks) = self.told(decision.terms());
        let best = |blocks: fn(&Match) -> u32| matches.as_slice().iter().map(blocks).max();
        let best = match self.overlap {
            Overlap::Predictions => best(|found| found.predicted),
            _ => best(|found| found.device),
        };
        Selection {
            worker: decision.worker,
            overlap_blocks,
            predicted_blocks,
            lower_blocks: decision.terms().lower_milliblocks / 1_000,
            best_blocks: best.unwrap_or(0),
            reason: decision.reason,
            ties: decision.ties,
            margin: decision.margin,
        }
    }

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
            policy: Arc::clone(&self.policy_name),
            worker: decision.worker,
            reason: decision.reason,
            ties: decision.ties,
            margin: decision.margin,
            score: decision.score,
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
}

/// One line for the decision, and one for each candidate's cost.
pub(super) fn log(model: &str, policy: &str, ask: &Ask<'_>, decision: &Decision<'_>) {
    if !tracing::enabled!(tracing::Level::DEBUG) {
        return;
    }
    tracing::debug!(
        model, request_id = ask.request_id, worker = %decision.worker, policy,
        reason = %decision.reason, isl_tokens = ask.prompt.isl_tokens,
        overlap_blocks = decision.overlap_blocks,
        predicted_blocks = decision.terms().predicted_blocks, cost = decision.terms().cost,
        ties = decision.ties, margin = decision.margin, candidates = decision.candidates.len(),
        "routed"
    );
    if decision.policy == Some(Policy::Kv) {
        for formula in decision.formulas() {
            tracing::debug!("{formula}");
        }
    }
}
