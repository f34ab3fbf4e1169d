//! A decision, and what it rests on.

use std::fmt;

use super::cost::{Candidate, CandidateCost, RequestTerms, Terms};
use super::kind::Policy;
use crate::ids::Worker;

named! {
    /// Why this candidate and no other.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum Reason {
        /// There was no other candidate.
        OnlyCandidate = "only_candidate",
        /// It alone had the lowest cost (of the two drawn, for `power_of_two`).
        LowestCost = "lowest_cost",
        /// Several had the lowest cost; chance decided between them.
        Tie = "tie",
        /// Drawn at a temperature above 0, cheaper ones more likely.
        Temperature = "temperature",
        /// It was its turn.
        Turn = "turn",
        /// Chance alone.
        Chance = "chance",
        /// It held the most of the prompt among those that were not too busy.
        PrefixMatch = "prefix_match",
        /// Those that hold some of the prompt were too busy; it had the fewest requests.
        PrefixMatchSkipped = "prefix_match_skipped",
        /// Nobody holds any of the prompt; it had the fewest requests.
        LeastRequestFallback = "least_request_fallback",
        /// The client named it.
        SessionHeader = "session_header",
        /// The session's key belongs to it.
        SessionKey = "session_key",
        /// An earlier turn of the conversation went there.
        SessionPrefix = "session_prefix",
        /// The session's last request went there, whatever the policy would have chosen.
        SessionAffinity = "session_affinity",
        /// It had the highest weighted score of several policies.
        HighestScore = "highest_score",
    }
}

/// Which candidate, among how many equals and why.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// Where among the candidates it is.
    pub index: usize,
    /// How many candidates were equally good and better than all others: 1 without a tie.
    pub ties: usize,
    /// The lowest cost among the others minus the chosen one's; `None` where costs don't decide.
    pub margin: Option<f64>,
    /// Why this one.
    pub reason: Reason,
    /// What the chosen one was judged by where that is no cost: the percentage of the prompt it
    /// holds (`prefix-cache`), the weighted sum (several policies), the client's share
    /// (`vtc-basic`).
    pub score: Option<f64>,
}

impl Choice {
    /// The candidate at `index`, one of `ties` equals, by neither cost nor score.
    pub(super) const fn plain(index: usize, ties: usize, reason: Reason) -> Self {
        Self { index, ties, margin: None, reason, score: None }
    }
}

/// Which worker was chosen, among whom and why. Borrows the candidates, and what the policy said of
/// each; their terms are worked out when they are asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision<'a> {
    /// The chosen worker.
    pub worker: Worker,
    /// Leading blocks of the prompt that it holds.
    pub overlap_blocks: u32,
    /// The policy that chose; `None` for one that is not built in.
    pub policy: Option<Policy>,
    /// The request as the policy saw it.
    pub request: RequestTerms,
    /// Every candidate, in the order they were given.
    pub candidates: &'a [Candidate],
    /// What each of them costs.
    pub costs: &'a [CandidateCost],
    /// Where in `candidates` the chosen one is.
    pub chosen: usize,
    /// How many candidates the policy found equally good and better than all others: 1 without a
    /// tie. `random` finds all equal.
    pub ties: usize,
    /// The lowest cost among the others (the other one drawn, for `power_of_two`) minus the chosen
    /// one's; negative when a temperature preferred a dearer one. `None` without costs or others.
    pub margin: Option<f64>,
    /// Why this one.
    pub reason: Reason,
    /// See [`Choice::score`].
    pub score: Option<f64>,
    /// The number that chance was drawn from; 0 where the caller drew by a generator of its own.
    pub seed: u64,
}

impl<'a> Decision<'a> {
    /// `choice` among `candidates`, which cost `costs`.
    pub fn new(
        policy: Option<Policy>,
        request: RequestTerms,
        candidates: &'a [Candidate],
        costs: &'a [CandidateCost],
        choice: &Choice,
    ) -> Self {
        let chosen = &candidates[choice.index];
        Self {
            worker: chosen.worker,
            overlap_blocks: chosen.overlap_blocks,
            policy,
            request,
            candidates,
            costs,
            chosen: choice.index,
            ties: choice.ties,
            margin: choice.margin,
            reason: choice.reason,
            score: choice.score,
            seed: 0,
        }
    }

    /// The same, drawn from `seed`.
    #[must_use]
    pub fn drawn_from(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// The choice alone.
    pub fn choice(&self) -> Choice {
        Choice {
            index: self.chosen,
            ties: self.ties,
            margin: self.margin,
            reason: self.reason,
            score: self.score,
        }
    }

    /// Terms of the chosen worker.
    pub fn terms(&self) -> Terms {
        self.request.terms_at(&self.candidates[self.chosen], &self.costs[self.chosen])
    }

    /// Terms of every candidate, in the order they were given.
    pub fn all_terms(&self) -> impl ExactSizeIterator<Item = Terms> {
        let each = self.candidates.iter().zip(self.costs);
        each.map(|(candidate, cost)| self.request.terms_at(candidate, cost))
    }

    /// The cost of each candidate, worked out; one line each.
    pub fn formulas(&self) -> impl ExactSizeIterator<Item = Formula<'_>> {
        self.all_terms().map(|terms| terms.formula(&self.request))
    }
}

impl Terms {
    /// These terms, of `request`, as the line of a log.
    pub fn formula<'a>(&self, request: &'a RequestTerms) -> Formula<'a> {
        Formula { terms: *self, request }
    }
}

/// Shows how the `kv` cost of a candidate comes about, with three decimals and the names of its terms;
/// with `{:#}` in short, with one decimal.
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
        if f.alternate() {
            let active = f64::from(self.terms.active_requests);
            let is_charged = requests > 0.0 && self.request.block_size > 0;
            let charge = if is_charged { requests * active } else { 0.0 };
            let cost = weight * prefill + decode + charge;
            let instance = worker.instance_id;
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
        if requests > 0.0 && self.request.block_size > 0 {
            let active = self.terms.active_requests;
            let cost = weight * prefill + decode + requests * f64::from(active);
            return write!(
                f,
                "Formula for worker_id={} dp_rank={} with {overlap_blocks} cached blocks: \
                 {cost:.3} = {weight:.3} * {} + {} + {requests:.3} * active_requests = \
                 {weight:.3} * {prefill:.3} + {decode:.3} + {requests:.3} * {active}",
                worker.instance_id, worker.dp_rank, names[0], names[1],
            );
        }
        let cost = weight * prefill + decode;
        write!(
            f,
            "Formula for worker_id={} dp_rank={} with {overlap_blocks} cached blocks: \
             {cost:.3} = {weight:.3} * {} + {} = {weight:.3} * {prefill:.3} + {decode:.3}",
            worker.instance_id, worker.dp_rank, names[0], names[1],
        )
    }
}
