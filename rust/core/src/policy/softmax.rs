//! A weighted random choice that prefers lower costs.

use rand::Rng;

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
