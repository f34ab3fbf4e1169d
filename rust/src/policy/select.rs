//! The choice itself.

use rand::Rng;

use super::cost::{Candidate, RequestTerms, Terms};
use super::decision::{Decision, Reason};
use super::kind::Policy;
use super::softmax;

/// What a policy minimises, and what it minimises among equals.
type Key = (f64, u64);

struct Choice {
    index: usize,
    ties: usize,
    /// The candidate that would have been next, where the policy compares costs.
    margin: Option<f64>,
    reason: Reason,
}

/// Choose among `candidates`; `None` when there are none. The terms of all of them replace what
/// is in `terms`, whose memory is reused.
///
/// Ties are exact: costs that differ in the last bit do not tie. Of equal costs of `kv`, a worker to
/// which the prompt was just sent comes first while it has one request at most: what it is computing
/// need not be computed twice, and a crowd of equal prompts still spreads. The generator is used only where
/// chance decides: for ties, above temperature 0, for `random` and for `power_of_two`.
///
/// # Cost
/// One pass over the candidates, a second one where chance decides.
pub fn select<'a>(
    policy: Policy,
    request: &RequestTerms,
    candidates: &[Candidate],
    terms: &'a mut Vec<Terms>,
    rng: &mut (impl Rng + ?Sized),
) -> Option<Decision<'a>> {
    let mut request = *request;
    if request.scale.overlap_score_credit_decay > 0.0 {
        let queued =
            candidates.iter().map(|candidate| candidate.load.map_or(0, |l| l.prefill_tokens));
        request.least_prefill_tokens = queued.min().unwrap_or(0);
    }
    terms.clear();
    terms.extend(candidates.iter().map(|candidate| request.terms(policy, candidate)));
    let terms = &*terms;
    let choice = match (policy, candidates.len()) {
        (_, 0) => return None,
        (_, 1) => Choice { index: 0, ties: 1, margin: None, reason: Reason::OnlyCandidate },
        (Policy::Kv, _) if request.temperature > 0.0 => {
            let costs = terms.iter().map(|terms| terms.cost);
            warm(terms, softmax::sample(costs, request.temperature, rng))
        }
        (Policy::Random, count) => {
            let index = rng.random_range(0..count);
            Choice { index, ties: count, margin: None, reason: Reason::Chance }
        }
        (Policy::PowerOfTwo, count) => {
            // The second draw skips the first one's place: two different candidates.
            let first = rng.random_range(0..count);
            let second = rng.random_range(0..count - 1);
            let second = if second < first { second } else { second + 1 };
            lowest(policy, [first, second].into_iter(), candidates, terms, rng)
        }
        (Policy::Kv | Policy::RoundRobin | Policy::LeastLoaded, count) => {
            lowest(policy, 0..count, candidates, terms, rng)
        }
    };
    let chosen = &terms[choice.index];
    Some(Decision {
        worker: chosen.worker,
        overlap_blocks: chosen.overlap_blocks,
        policy,
        request,
        candidates: terms,
        chosen: choice.index,
        ties: choice.ties,
        margin: choice.margin,
        reason: choice.reason,
    })
}

fn key(policy: Policy, candidate: &Candidate, terms: &Terms) -> Key {
    match policy {
        Policy::Kv => {
            let is_twin = terms.predicted_blocks > 0 && terms.active_requests <= 1;
            (terms.cost, u64::from(!is_twin))
        }
        Policy::Random => (terms.cost, 0),
        Policy::LeastLoaded | Policy::PowerOfTwo => (terms.cost, u64::from(terms.active_requests)),
        Policy::RoundRobin => (0.0, candidate.load.map_or(0, |load| load.last_booked)),
    }
}

/// The lowest key among the candidates at `indices`, of which there are at least two.
fn lowest(
    policy: Policy,
    indices: impl Iterator<Item = usize> + Clone,
    candidates: &[Candidate],
    terms: &[Terms],
    rng: &mut (impl Rng + ?Sized),
) -> Choice {
    let keys = indices.map(|index| (index, key(policy, &candidates[index], &terms[index])));
    let (mut index, mut best, mut ties) = (0, (f64::INFINITY, u64::MAX), 0);
    let mut next_cost = f64::INFINITY;
    for (at, key) in keys.clone() {
        if ties == 0 || key < best {
            next_cost = if ties == 0 { next_cost } else { best.0 };
            (index, best, ties) = (at, key, 1);
        } else {
            next_cost = next_cost.min(key.0);
            ties += usize::from(key == best);
        }
    }
    if policy == Policy::RoundRobin {
        // Workers that never had a request are equally due: in their order, not by chance.
        return Choice { index, ties: 1, margin: None, reason: Reason::Turn };
    }
    let mut reason = Reason::LowestCost;
    if ties > 1 {
        reason = Reason::Tie;
        let nth = rng.random_range(0..ties);
        let mut tied = keys.filter(|(_, key)| *key == best).map(|(at, _)| at);
        index = tied.nth(nth).expect("as many were counted");
    }
    Choice { index, ties, margin: Some(next_cost - best.0), reason }
}

/// What is to be said of a choice drawn by temperature.
fn warm(terms: &[Terms], index: usize) -> Choice {
    let chosen = terms[index].cost;
    let lowest = terms.iter().map(|terms| terms.cost).fold(f64::INFINITY, f64::min);
    let ties = terms.iter().filter(|terms| terms.cost == lowest).count();
    let others = terms.iter().enumerate().filter(|&(at, _)| at != index);
    let next = others.map(|(_, terms)| terms.cost).fold(f64::INFINITY, f64::min);
    Choice { index, ties, margin: Some(next - chosen), reason: Reason::Temperature }
}
