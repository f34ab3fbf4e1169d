//! The choice itself.

use rand::Rng;

use super::cost::{Candidate, CandidateCost, RequestTerms};
use super::decision::{Choice, Decision, Reason};
use super::kind::Policy;
use super::lowest::Lowest;
use super::softmax;

/// Chooses among `candidates`; `None` if there are none. Replaces `costs` with the cost of each
/// candidate; its memory is reused.
///
/// Ties are exact: costs that differ in the last bit do not tie. Among equal `kv` costs, a worker
/// to which the prompt was just sent wins while it has at most one request: its computation need
/// not be repeated, and a burst of equal prompts still spreads. Without a weight for caches it has
/// no precedence. The generator is used only where
/// chance decides: for ties, above temperature 0, for `random` and for `power_of_two`.
///
/// # Cost
/// One pass over the candidates, and a second one if chance decides.
pub fn select<'a>(
    policy: Policy,
    request: &RequestTerms,
    candidates: &'a [Candidate],
    costs: &'a mut Vec<CandidateCost>,
    rng: &mut (impl Rng + ?Sized),
) -> Option<Decision<'a>> {
    let mut request = *request;
    if request.scale.overlap_score_credit_decay > 0.0 {
        let queued =
            candidates.iter().map(|candidate| candidate.load.map_or(0, |l| l.prefill_tokens));
        request.least_prefill_tokens = queued.min().unwrap_or(0);
    }
    let mut all = Lowest::new();
    match policy {
        // The most common policy has its own loop, which also finds the lowest cost.
        Policy::Kv => request.fill(Policy::Kv, candidates, costs, |index, candidate, cost| {
            all.see(index, cost, || rank(Policy::Kv, &request, candidate));
        }),
        _ => request.fill(policy, candidates, costs, |_, _, _| {}),
    }
    let costs = &*costs;
    let lowest_of = |indices: &mut dyn Iterator<Item = usize>| {
        let mut lowest = Lowest::new();
        for index in indices {
            let rank = || rank(policy, &request, &candidates[index]);
            lowest.see(index, value(policy, &costs[index]), rank);
        }
        lowest
    };
    let choice = match (policy, candidates.len()) {
        (_, 0) => return None,
        (_, 1) => Choice::plain(0, 1, Reason::OnlyCandidate),
        (Policy::Kv, _) if request.temperature > 0.0 => {
            let values = costs.iter().map(|one| one.cost);
            warm(costs, softmax::sample(values, request.temperature, rng))
        }
        (Policy::Random, count) => Choice::plain(rng.random_range(0..count), count, Reason::Chance),
        (Policy::PowerOfTwo, count) => {
            // The second draw skips the first one's index, so that the two differ.
            let first = rng.random_range(0..count);
            let second = rng.random_range(0..count - 1);
            let second = if second < first { second } else { second + 1 };
            let drawn = [first, second];
            let lowest = lowest_of(&mut drawn.into_iter());
            settle(policy, &request, lowest, drawn.into_iter(), candidates, costs, rng)
        }
        (Policy::Kv, count) => settle(policy, &request, all, 0..count, candidates, costs, rng),
        (Policy::RoundRobin | Policy::LeastLoaded, count) => {
            let lowest = lowest_of(&mut (0..count));
            settle(policy, &request, lowest, 0..count, candidates, costs, rng)
        }
    };
    Some(Decision::new(Some(policy), request, candidates, costs, choice))
}

/// The value that a policy minimizes.
fn value(policy: Policy, cost: &CandidateCost) -> f64 {
    if policy == Policy::RoundRobin { 0.0 } else { cost.cost }
}

/// The value that it minimizes among equals.
#[inline(always)]
fn rank(policy: Policy, request: &RequestTerms, candidate: &Candidate) -> u64 {
    let requests = candidate.load.as_ref().map_or(0, |load| load.requests);
    match policy {
        Policy::Kv => {
            let is_twin =
                candidate.predicted_blocks > 0 && requests <= 1 && request.weighs_overlap();
            u64::from(!is_twin)
        }
        Policy::Random => 0,
        Policy::LeastLoaded | Policy::PowerOfTwo => u64::from(requests),
        Policy::RoundRobin => candidate.load.map_or(0, |load| load.last_booked),
    }
}

/// One of the `lowest` by cost; chance decides if `is_tied` finds several among `indices`.
pub(super) fn among_equals(
    lowest: Lowest,
    mut indices: impl Iterator<Item = usize>,
    is_tied: impl Fn(usize) -> bool,
    rng: &mut (impl Rng + ?Sized),
) -> Choice {
    let Lowest { mut index, ties, .. } = lowest;
    let mut reason = Reason::LowestCost;
    if ties > 1 {
        reason = Reason::Tie;
        let nth = rng.random_range(0..ties);
        let tied = indices.by_ref().filter(|&at| is_tied(at)).nth(nth);
        index = tied.expect("as many were counted");
    }
    Choice { index, ties, margin: Some(lowest.margin()), reason, score: None }
}

/// One of the `lowest` among the candidates at `indices`, which are at least two.
fn settle(
    policy: Policy,
    request: &RequestTerms,
    lowest: Lowest,
    indices: impl Iterator<Item = usize>,
    candidates: &[Candidate],
    costs: &[CandidateCost],
    rng: &mut (impl Rng + ?Sized),
) -> Choice {
    if policy == Policy::RoundRobin {
        // Workers that never had a request are equally due: taken in order, not by chance.
        return Choice::plain(lowest.index, 1, Reason::Turn);
    }
    let is_tied = |at: usize| {
        value(policy, &costs[at]) == lowest.value
            && rank(policy, request, &candidates[at]) == lowest.rank
    };
    among_equals(lowest, indices, is_tied, rng)
}

/// The result of a choice drawn by temperature.
pub(super) fn warm(costs: &[CandidateCost], index: usize) -> Choice {
    let chosen = costs[index].cost;
    let lowest = costs.iter().map(|one| one.cost).fold(f64::INFINITY, f64::min);
    let ties = costs.iter().filter(|one| one.cost == lowest).count();
    let others = costs.iter().enumerate().filter(|&(at, _)| at != index);
    let next = others.map(|(_, one)| one.cost).fold(f64::INFINITY, f64::min);
    Choice { index, ties, margin: Some(next - chosen), reason: Reason::Temperature, score: None }
}
