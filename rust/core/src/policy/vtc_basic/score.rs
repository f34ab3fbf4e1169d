//! A worker's score for a client; low scores are good.

use super::super::settings::VtcSettings;

/// Estimated tokens of a prompt of `prompt_bytes`, and of its answer.
pub const fn estimate(prompt_bytes: usize) -> (u64, u64) {
    let input = (prompt_bytes as u64).div_ceil(4);
    (input, (3 * input).div_ceil(2))
}

/// The scores of `aibrix-compat`, without chance, appended to `scores`.
///
/// A client's total, divided by the midpoint between the lowest and the highest total (at least
/// `default_totals.0`), is a position among the workers; each scores its distance from it. That
/// position is always below 2, so only the first three workers are ever preferred.
pub fn position_scores(
    settings: &VtcSettings,
    total: f64,
    (lowest, highest): (f64, f64),
    loads: impl ExactSizeIterator<Item = f64>,
    scores: &mut Vec<f64>,
) {
    let bucket = ((lowest + highest) / 2.0).max(settings.default_totals.0);
    let place = (total / bucket).min(loads.len().saturating_sub(1) as f64);
    weigh(settings, place, |index| index as f64, loads, scores);
}

/// The scores of `document`, appended to `scores`.
///
/// `share` is the client's part of all clients' tokens, 0 to 1. The workers are spread evenly
/// between 0 and 1, in order; each scores its distance from the share.
pub fn share_scores(
    settings: &VtcSettings,
    share: f64,
    loads: impl ExactSizeIterator<Item = f64>,
    scores: &mut Vec<f64>,
) {
    let last = loads.len().saturating_sub(1).max(1) as f64;
    weigh(settings, share, |index| index as f64 / last, loads, scores);
}

fn weigh(
    settings: &VtcSettings,
    place: f64,
    place_of: impl Fn(usize) -> f64,
    loads: impl Iterator<Item = f64>,
    scores: &mut Vec<f64>,
) {
    scores.extend(loads.enumerate().map(|(index, load)| {
        let fairness = (place_of(index) - place).abs();
        let used = load / settings.max_pod_load;
        // With documented values, a worker with twice the maximum load is worse than a full one.
        let utilization = if settings.is_compat { used.min(1.0) } else { used };
        settings.fairness_weight * fairness + settings.utilization_weight * utilization
    }));
}
