//! Reports a decision: the result, its record, log lines, the draining worker that it avoided, and errors for
//! requests without a worker.

use std::sync::Arc;

use super::ask::{Ask, Pin};
use super::config::Overlap;
use super::draining::{Diverted, Wanted};
use super::record::{Outcome, Record, Seen, Selection, kept, told};
use super::selector::Selector;
use crate::error::Error;
use crate::ids::{InstanceId, Worker};
use crate::index::{Match, Matches};
use crate::policy::{AUTO, Candidate, Choice, Decision, Policy};

/// Logs a decision; a macro, because a line's level must be static.
macro_rules! log_decision {
    ($level:ident, $selector:expr, $ask:expr, $decision:expr) => {
        tracing::$level!(
            model = $selector.model.key.model_name, request_id = $ask.request_id,
            worker = %$decision.worker, policy = %$selector.decided_by($decision), reason = %$decision.choice.reason,
            isl_tokens = $ask.prompt.isl_tokens, overlap_blocks = $decision.overlap_blocks,
            predicted_blocks = $decision.terms().predicted_blocks, cost = $decision.terms().cost,
            ties = $decision.choice.ties, margin = $decision.choice.margin,
            candidates = $decision.candidates.len(),
            "routed"
        )
    };
}

impl Selector {
    /// Gives no new requests to the workers `ids`, and to all others again.
    pub fn set_draining(&self, ids: Vec<InstanceId>) {
        self.draining.set(ids);
        // Waiting requests may now use a worker that is back, or fail because none is left.
        self.router.made_room();
    }

    /// The draining worker that `ask` would have used; `unpinned` is the pin that was ignored for
    /// that reason.
    pub(super) fn diverted(&self, ask: &Ask<'_>, unpinned: Option<Pin>) -> Option<Diverted> {
        if let Some(pin) = unpinned {
            return Some(Diverted { from: pin.instance_id, by: Wanted::Pin });
        }
        let is_draining =
            |worker: &Worker| ask.known.draining.binary_search(&worker.instance_id).is_ok();
        if ask.known.draining.is_empty() {
            return None;
        }
        let place = ask.session.worker.or_else(|| self.router.session_place(ask));
        let from = place.filter(is_draining)?.instance_id;
        Some(Diverted { from, by: Wanted::Session })
    }

    fn is_predicted(&self) -> bool {
        matches!(self.overlap, Overlap::Predictions)
    }

    pub(super) fn selection(&self, decision: &Decision<'_>, matches: &Matches) -> Selection {
        let is_predicted = self.is_predicted();
        let (overlap_blocks, predicted_blocks) = told(&decision.terms(), is_predicted);
        let best = |blocks: fn(&Match) -> u32| matches.as_slice().iter().map(blocks).max();
        let best = match is_predicted {
            true => best(|found| found.predicted),
            false => best(|found| found.device),
        };
        let held = matches.as_slice().iter().find(|found| found.worker == decision.worker);
        Selection {
            worker: decision.worker,
            overlap_blocks,
            predicted_blocks,
            lower_blocks: decision.terms().lower_milliblocks / 1_000,
            held_blocks: held.map_or(0, |held| held.device),
            reached_blocks: held.map_or(0, |held| held.external),
            best_blocks: best.unwrap_or(0),
            at_ms: self.clock.now_ms(),
            reason: decision.choice.reason,
            ties: decision.choice.ties,
            margin: decision.choice.margin,
            seed: decision.seed,
        }
    }

    /// The decision with at most `most` of its candidates, and as many that were skipped.
    pub(super) fn record(
        &self,
        request_id: &str,
        ask: &Ask<'_>,
        decision: &Decision<'_>,
        matches: &Matches,
        most: usize,
    ) -> Record {
        let Decision { candidates, costs, choice, .. } = *decision;
        let overlap = |at: usize| candidates[at].overlap_blocks;
        let is_chosen = |at: usize| at == choice.index;
        let open = kept(candidates.len(), |at| costs[at].cost, overlap, is_chosen, most);
        let index = open.binary_search(&choice.index).expect("the chosen one is kept");
        let costs = open.iter().map(|&at| costs[at]).collect();
        let open: Box<[Candidate]> = open.iter().map(|&at| candidates[at]).collect();
        let diverted = self.diverted(ask, ask.known.unpinned);
        let skipped = decision.passed_over;
        let terms = |at: usize| skipped[at].0;
        let is_avoided =
            |at: usize| diverted.is_some_and(|it| it.from == terms(at).worker.instance_id);
        let (cost, overlap) = (|at| terms(at).cost, |at| terms(at).overlap_blocks);
        let passed_over = kept(skipped.len(), cost, overlap, is_avoided, most);
        let passed_over: Box<[_]> = passed_over.iter().map(|&at| skipped[at]).collect();
        let left_out = candidates.len() - open.len() + skipped.len() - passed_over.len();
        // Both lists are in worker order.
        let is_kept = |worker: Worker| {
            left_out == 0
                || open.binary_search_by_key(&worker, |one| one.worker).is_ok()
                || passed_over.binary_search_by_key(&worker, |(one, _)| one.worker).is_ok()
        };
        let credits = self.reuse.credits();
        let credits = credits.iter().flat_map(|low| low.iter());
        let credits = credits.map(|(worker, credit)| (*worker, *credit));
        let found = matches.as_slice().iter().copied();
        let seen = Seen {
            costs,
            found: found.filter(|found| is_kept(found.worker)).collect(),
            credits: credits.filter(|(worker, _)| is_kept(*worker)).collect(),
            is_predicted: self.is_predicted(),
            left_out,
            open,
            passed_over,
        };
        Record {
            request_id: request_id.into(),
            model: Arc::clone(&self.name),
            alias: ask.alias.map(Arc::from),
            decided_at_ms: self.clock.now_ms(),
            policy: self.decided_by(decision),
            instead_of: self.replaced(decision),
            worker: decision.worker,
            choice: Choice { index, ..choice },
            seed: decision.seed,
            request: decision.request,
            prompt_source: ask.prompt.source,
            request_blocks: ask.prompt.sequence_hashes.len() as u32,
            overlap_blocks: self.selection(decision, matches).overlap_blocks,
            diverted,
            seen,
            first_token_ms: None,
            ended_ms: None,
            cached_tokens: None,
            outcome: Outcome::Running,
        }
    }

    /// The policy that chose, which for a single request may be a built-in one instead of `auto` or
    /// of a policy outside the core.
    fn decided_by(&self, decision: &Decision<'_>) -> Arc<str> {
        match decision.policy {
            Some(policy) if policy.name() != &*self.policy_name => policy.name().into(),
            _ => Arc::clone(&self.policy_name),
        }
    }

    /// The policy outside the core that should have chosen, and has not.
    fn replaced(&self, decision: &Decision<'_>) -> Option<Arc<str>> {
        (self.desk().is_some() && decision.policy.is_some()).then(|| Arc::clone(&self.policy_name))
    }

    /// One line for the decision, and one for each candidate's cost: complete at level debug; short
    /// at level info, if decisions are logged.
    pub(super) fn log(&self, ask: &Ask<'_>, decision: &Decision<'_>) {
        let is_kv = decision.policy == Some(Policy::Kv);
        let is_auto = !is_kv && &*self.policy_name == AUTO;
        let prices = || decision.all_terms().filter(|_| is_auto);
        if self.logs_decisions && tracing::enabled!(tracing::Level::INFO) {
            log_decision!(info, self, ask, decision);
            for formula in decision.formulas().filter(|_| is_kv) {
                tracing::info!("{formula:#}");
            }
            prices().for_each(|terms| tracing::info!("worker {}: {}", terms.worker, terms.price));
        } else if tracing::enabled!(tracing::Level::DEBUG) {
            log_decision!(debug, self, ask, decision);
            for formula in decision.formulas().filter(|_| is_kv) {
                tracing::debug!("{formula}");
            }
            prices().for_each(|terms| tracing::debug!("worker {}: {}", terms.worker, terms.price));
        }
    }

    /// Adds details that the router does not know.
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
