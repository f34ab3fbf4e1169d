//! A decision and its reasons.

use std::fmt;

use super::cost::{Candidate, CandidateCost, Policy, RequestTerms, Terms};
use crate::ids::Worker;

named! {
    /// Why this candidate was chosen.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum Reason {
        /// There was no other candidate.
        OnlyCandidate = "only_candidate",
        /// It alone had the lowest cost (of the two drawn, for `power_of_two`).
        LowestCost = "lowest_cost",
        /// Several had the lowest cost; chance decided.
        Tie = "tie",
        /// Drawn at a temperature above 0, with cheaper candidates more likely.
        Temperature = "temperature",
        /// It was its turn.
        Turn = "turn",
        /// Drawn at random.
        Chance = "chance",
        /// It held the most of the prompt among the candidates that were not too busy.
        PrefixMatch = "prefix_match",
        /// The candidates that hold some of the prompt were too busy; it had the fewest requests.
        PrefixMatchSkipped = "prefix_match_skipped",
        /// No candidate holds any of the prompt; it had the fewest requests.
        LeastRequestFallback = "least_request_fallback",
        /// The client named it.
        SessionHeader = "session_header",
        /// The session's key maps to it.
        SessionKey = "session_key",
        /// An earlier turn of the conversation went there.
        SessionPrefix = "session_prefix",
        /// The session's last request went there; this overrides the policy.
        SessionAffinity = "session_affinity",
        /// It had the highest weighted score of several policies.
        HighestScore = "highest_score",
    }
}

/// The chosen candidate, the number of ties, and the reason.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// Index of the candidate.
    pub index: usize,
    /// How many candidates were equally good and better than all others; 1 without a tie. `random`
    /// treats all as equal.
    pub ties: usize,
    /// The lowest cost among the others (for `power_of_two`, of the other one drawn) minus the
    /// chosen one's; negative if a temperature preferred a costlier one. `None` if costs don't
    /// decide, and without other candidates.
    pub margin: Option<f64>,
    /// The reason.
    pub reason: Reason,
    /// The value that decided, if that is not a cost: the held percentage of the prompt
    /// (`prefix-cache`), the weighted sum (several policies), the client's share (`vtc-basic`).
    pub score: Option<f64>,
}

impl Choice {
    /// The candidate at `index`, one of `ties` equals, chosen by neither cost nor score.
    pub(super) const fn plain(index: usize, ties: usize, reason: Reason) -> Self {
        Self { index, ties, margin: None, reason, score: None }
    }
}

/// The chosen worker, the candidates and the reason. Borrows the candidates and their costs; their
/// terms are computed on demand.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision<'a> {
    /// The chosen worker.
    pub worker: Worker,
    /// Leading blocks of the prompt that it holds.
    pub overlap_blocks: u32,
    /// The policy that chose; `None` if it is not built in. A policy outside the core that has not
    /// chosen has its stand-in here.
    pub policy: Option<Policy>,
    /// The request as the policy saw it.
    pub request: RequestTerms,
    /// Every candidate, in the order they were given.
    pub candidates: &'a [Candidate],
    /// The cost of each candidate.
    pub costs: &'a [CandidateCost],
    /// Workers that might take the request and were left out, with its cost there: because they are
    /// draining (`true`), or busy.
    pub passed_over: &'a [(Terms, bool)],
    /// The chosen one of `candidates`.
    pub choice: Choice,
    /// The seed of the random draw.
    pub seed: u64,
}

impl Decision<'_> {
    /// Terms of the chosen worker.
    pub fn terms(&self) -> Terms {
        self.request.terms_at(&self.candidates[self.choice.index], &self.costs[self.choice.index])
    }

    /// Terms of every candidate, in the order they were given.
    pub fn all_terms(&self) -> impl ExactSizeIterator<Item = Terms> {
        let each = self.candidates.iter().zip(self.costs);
        each.map(|(candidate, cost)| self.request.terms_at(candidate, cost))
    }

    /// The calculated cost of each candidate, one line each.
    pub fn formulas(&self) -> impl ExactSizeIterator<Item = Formula<'_>> {
        self.all_terms().map(|terms| terms.formula(&self.request))
    }
}

impl Terms {
    /// These terms of `request`, as a log line.
    pub fn formula<'a>(&self, request: &'a RequestTerms) -> Formula<'a> {
        Formula { terms: *self, request }
    }
}

/// Displays the calculation of a candidate's `kv` cost with named terms and three decimals; `{:#}`
/// gives a short form with one decimal.
#[derive(Debug, Clone, Copy)]
pub struct Formula<'a> {
    terms: Terms,
    request: &'a RequestTerms,
}

impl fmt::Display for Formula<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Terms { worker, overlap_blocks, .. } = self.terms;
        let weight = self.request.overlap_score_weight;
        let (names, prefill, decode) = match self.request.block_size {
            0 => (
                ["prefill_tokens", "active_requests"],
                self.terms.prefill_tokens as f64,
                f64::from(self.terms.active_requests),
            ),
            _ => (
                [
                    if self.request.scale.is_plain() {
                        "prefill_blocks"
                    } else {
                        "weighed_prefill_blocks"
                    },
                    "decode_blocks",
                ],
                self.terms.weighed_prefill_blocks,
                self.terms.decode_blocks as f64,
            ),
        };
        let requests = self.request.scale.active_request_weight;
        let active = f64::from(self.terms.active_requests);
        let is_charged = requests > 0.0 && self.request.block_size > 0;
        let charge = if is_charged { requests * active } else { 0.0 };
        let cost = weight * prefill + decode + charge;
        let instance = worker.instance_id;
        if f.alternate() {
            write!(f, "Formula for worker_{instance}: {cost:.1} = {weight:.1} * {prefill:.1} + ")?;
            write!(f, "{decode:.1}")?;
            if is_charged {
                write!(f, " + {requests:.1} * {active:.0}")?;
            }
            write!(f, " (cached_blocks: {overlap_blocks}")?;
            return match worker.dp_rank {
                0 => f.write_str(")"),
                rank => write!(f, ", dp_rank: {rank})"),
            };
        }
        let rank = worker.dp_rank;
        write!(f, "Formula for worker_id={instance} dp_rank={rank} with {overlap_blocks} cached ")?;
        write!(f, "blocks: {cost:.3} = {weight:.3} * {} + {}", names[0], names[1])?;
        if is_charged {
            write!(f, " + {requests:.3} * active_requests")?;
        }
        write!(f, " = {weight:.3} * {prefill:.3} + {decode:.3}")?;
        if is_charged {
            write!(f, " + {requests:.3} * {active}")?;
        }
        Ok(())
    }
}
