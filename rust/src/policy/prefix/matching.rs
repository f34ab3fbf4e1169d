//! Which of the workers that hold some of the prompt takes it.

use std::cmp::Reverse;

use rand::{Rng, RngCore};

/// Whether the most and the fewest active requests differ by more than `limit`.
pub fn is_imbalanced(counts: &[i64], limit: i64) -> bool {
    let most = counts.iter().copied().max().unwrap_or(0);
    let fewest = counts.iter().copied().min().unwrap_or(0);
    most.saturating_sub(fewest) > limit
}

/// Of the candidates with a percentage the one with the highest, then the fewest active requests,
/// then by chance, whose active requests are at most `mean + factor * standard deviation` of all
/// candidates; `None` when there is none. `counts` and `percents` have an entry per candidate.
///
/// The deviation is that of a sample: 0 for a single candidate.
pub fn select_matched(
    counts: &[i64],
    percents: &[Option<u32>],
    factor: f64,
    rng: &mut dyn RngCore,
) -> Option<usize> {
    let limit = load_limit(counts, factor);
    let rank = |at: usize| {
        let able = percents[at].filter(|_| counts[at] as f64 <= limit);
        able.map(|percent| (percent, Reverse(counts[at])))
    };
    let (mut best, mut index, mut ties) = (None, None, 0);
    for at in 0..percents.len() {
        let Some(rank) = rank(at) else { continue };
        if best < Some(rank) {
            (best, index, ties) = (Some(rank), Some(at), 1);
        } else {
            ties += usize::from(best == Some(rank));
        }
    }
    if ties > 1 {
        let nth = rng.random_range(0..ties);
        index = (0..percents.len()).filter(|&at| rank(at) == best).nth(nth);
    }
    index
}

fn load_limit(counts: &[i64], factor: f64) -> f64 {
    let count = counts.len() as f64;
    let mean = counts.iter().map(|&count| count as f64).sum::<f64>() / count;
    let squares: f64 = counts.iter().map(|&count| (count as f64 - mean).powi(2)).sum();
    let deviation = if counts.len() > 1 { (squares / (count - 1.0)).sqrt() } else { 0.0 };
    mean + factor * deviation
}

/// The label that a percentage counts under.
pub const fn match_percent_bucket(percent: u32) -> &'static str {
    match percent {
        0 => "0",
        1..=25 => "1-25",
        26..=50 => "26-50",
        51..=75 => "51-75",
        _ => "76-100",
    }
}
