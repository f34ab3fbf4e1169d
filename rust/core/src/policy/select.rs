//! The choice itself: the lowest of many costs, or a weighted random choice that prefers lower ones.

use rand::Rng;

use super::cost::{Candidate, CandidateCost, Policy, RequestTerms};
use super::decision::{Choice, Reason};

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
pub fn select(
    policy: Policy,
    request: &RequestTerms,
    candidates: &[Candidate],
    costs: &mut Vec<CandidateCost>,
    rng: &mut (impl Rng + ?Sized),
) -> Option<Choice> {
    let request = request.among(candidates);
    let mut all = Lowest::new();
    match policy {
        // The most common policy has its own loop.
        Policy::Kv => request.fill(Policy::Kv, candidates, costs, |index, candidate, cost| {
            all.see(index, cost, || rank(Policy::Kv, &request, candidate));
        }),
        Policy::RoundRobin | Policy::LeastLoaded => {
            request.fill(policy, candidates, costs, |index, candidate, cost| {
                all.see(index, cost, || rank(policy, &request, candidate));
            });
        }
        Policy::Random | Policy::PowerOfTwo => {
            request.fill(policy, candidates, costs, |_, _, _| {})
        }
    }
    let costs = &*costs;
    let rank = |at: usize| rank(policy, &request, &candidates[at]);
    match (policy, candidates.len()) {
        (Policy::Random, count @ 2..) => {
            Some(Choice::plain(rng.random_range(0..count), count, Reason::Chance))
        }
        (Policy::PowerOfTwo, count @ 2..) => {
            // The second draw skips the first one's index, so that the two differ.
            let first = rng.random_range(0..count);
            let second = rng.random_range(0..count - 1);
            let second = if second < first { second } else { second + 1 };
            let drawn = [first, second];
            let mut lowest = Lowest::new();
            drawn.into_iter().for_each(|at| lowest.see(at, costs[at].cost, || rank(at)));
            Some(among_equals(lowest, drawn.into_iter(), lowest.is_tied(costs, rank), rng))
        }
        // Workers that never had a request are equally due: taken in order, not by chance.
        (Policy::RoundRobin, 2..) => Some(Choice::plain(all.index, 1, Reason::Turn)),
        _ => {
            let temperature = if policy == Policy::Kv { request.temperature } else { 0.0 };
            by_cost(costs, all, temperature, rank, rng)
        }
    }
}

/// One of all candidates, with the `lowest` of their `costs`: that one at temperature 0, where the
/// lowest `rank`, then chance breaks ties. `None` without candidates.
pub(super) fn by_cost(
    costs: &[CandidateCost],
    lowest: Lowest,
    temperature: f64,
    rank: impl Fn(usize) -> u64,
    rng: &mut (impl Rng + ?Sized),
) -> Option<Choice> {
    match costs.len() {
        0 => None,
        1 => Some(Choice::plain(0, 1, Reason::OnlyCandidate)),
        _ if temperature > 0.0 => {
            let values = costs.iter().map(|one| one.cost);
            Some(warm(costs, sample(values, temperature, rng)))
        }
        count => Some(among_equals(lowest, 0..count, lowest.is_tied(costs, rank), rng)),
    }
}

/// The value that it minimizes among equals.
#[inline(always)]
fn rank(policy: Policy, request: &RequestTerms, candidate: &Candidate) -> u64 {
    let requests = candidate.load.requests;
    match policy {
        Policy::Kv => {
            let is_twin =
                candidate.predicted_blocks > 0 && requests <= 1 && request.weighs_overlap();
            u64::from(!is_twin)
        }
        Policy::Random => 0,
        Policy::LeastLoaded | Policy::PowerOfTwo => u64::from(requests),
        Policy::RoundRobin => candidate.load.last_booked,
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

/// The result of a choice drawn by temperature.
fn warm(costs: &[CandidateCost], index: usize) -> Choice {
    let chosen = costs[index].cost;
    let lowest = costs.iter().map(|one| one.cost).fold(f64::INFINITY, f64::min);
    let ties = costs.iter().filter(|one| one.cost == lowest).count();
    let others = costs.iter().enumerate().filter(|&(at, _)| at != index);
    let next = others.map(|(_, one)| one.cost).fold(f64::INFINITY, f64::min);
    Choice { index, ties, margin: Some(next - chosen), reason: Reason::Temperature, score: None }
}

/// The lowest value so far. A value above the two lowest costs one comparison.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lowest {
    /// Index of the first of the lowest.
    pub index: usize,
    /// The lowest value; ties are broken by the lowest rank.
    pub value: f64,
    pub rank: u64,
    /// How many have this value and rank; 0 before the first value.
    pub ties: usize,
    /// The lowest of all other values; infinite without any.
    pub next: f64,
}

impl Lowest {
    pub fn new() -> Self {
        Self { index: 0, value: f64::INFINITY, rank: u64::MAX, ties: 0, next: f64::INFINITY }
    }

    /// Adds a value, which must not be NaN; `rank` is called only if it may decide.
    #[inline(always)]
    pub fn see(&mut self, index: usize, value: f64, rank: impl FnOnce() -> u64) {
        if value <= self.next {
            self.take(index, value, rank());
        }
    }

    #[inline(never)]
    fn take(&mut self, index: usize, value: f64, rank: u64) {
        if self.ties == 0 {
            *self = Self { index, value, rank, ties: 1, next: self.next };
        } else if (value, rank) < (self.value, self.rank) {
            *self = Self { index, value, rank, ties: 1, next: self.value };
        } else {
            self.next = value;
            self.ties += usize::from((value, rank) == (self.value, self.rank));
        }
    }

    /// Whether a candidate is one of the lowest.
    fn is_tied(
        self,
        costs: &[CandidateCost],
        rank: impl Fn(usize) -> u64,
    ) -> impl Fn(usize) -> bool {
        move |at| costs[at].cost == self.value && rank(at) == self.rank
    }

    /// The difference between the lowest of the others and the lowest.
    pub fn margin(&self) -> f64 {
        self.next - self.value
    }
}

/// An index into `costs`, drawn by [`weights`]; 0 if it is empty.
///
/// At 0 the lowest costs are equally likely, and no others are drawn. Above 0 a cost `c` weighs
/// `exp(-(c / range) / temperature)`, with `range` the largest minus the lowest. Only the relative
/// spread matters: `[0, 1]` and `[0, 100]` are the same. Equal costs are equally likely.
pub(super) fn sample(
    costs: impl Iterator<Item = f64> + Clone,
    temperature: f64,
    rng: &mut (impl Rng + ?Sized),
) -> usize {
    let weight = weights(costs.clone(), temperature);
    let total: f64 = costs.clone().map(&weight).sum();
    let mut left = rng.random::<f64>() * total;
    let mut last = 0;
    for (index, cost) in costs.enumerate() {
        let weight = weight(cost);
        if weight > 0.0 {
            // Rounding may leave a remainder after the last one; it never selects a weight of zero.
            last = index;
            left -= weight;
            if left < 0.0 {
                break;
            }
        }
    }
    last
}

/// The weight of each cost; the lowest one weighs 1, so the sum is never 0.
pub(super) fn weights(costs: impl Iterator<Item = f64>, temperature: f64) -> impl Fn(f64) -> f64 {
    let (lowest, highest) =
        costs.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), c| (low.min(c), high.max(c)));
    let range = highest - lowest;
    // Costs that overflowed have no finite range and count as equal.
    let is_flat = !(range > 0.0 && range.is_finite());
    move |cost| {
        if cost == lowest || is_flat {
            1.0
        } else if temperature > 0.0 {
            // Shifted by the lowest: the probabilities are the same, and no exponential overflows.
            (-((cost - lowest) / range) / temperature).exp()
        } else {
            0.0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lowest(values: &[(f64, u64)]) -> Lowest {
        let mut lowest = Lowest::new();
        for (index, &(value, rank)) in values.iter().enumerate() {
            lowest.see(index, value, || rank);
        }
        lowest
    }

    #[test]
    fn the_lowest_its_equals_and_the_next_are_those_of_a_sorted_list() {
        let lists: [&[(f64, u64)]; 7] = [
            &[(3.0, 0), (1.0, 0), (2.0, 0)],
            &[(1.0, 0), (1.0, 0), (2.0, 0), (1.0, 0)],
            &[(1.0, 1), (1.0, 0), (1.0, 0), (0.5, 7), (0.5, 7)],
            &[(2.0, 0), (1.0, 1), (1.0, 0)],
            &[(f64::INFINITY, 0), (f64::INFINITY, 0)],
            &[(5.0, 3)],
            &[(4.0, 0), (3.0, 0), (3.5, 0), (9.0, 0), (3.2, 0)],
        ];
        for list in lists {
            let mut sorted: Vec<_> = list.iter().copied().enumerate().collect();
            sorted.sort_by(|a, b| a.1.partial_cmp(&b.1).expect("no NaN"));
            let found = lowest(list);
            let (index, best) = sorted[0];
            assert_eq!((found.index, (found.value, found.rank)), (index, best), "{list:?}");
            assert_eq!(found.ties, list.iter().filter(|&&one| one == best).count(), "{list:?}");
            let next = sorted.get(1).map_or(f64::INFINITY, |(_, (value, _))| *value);
            assert_eq!(found.next, next, "{list:?}");
        }
        assert_eq!(lowest(&[]).ties, 0);
    }
}
