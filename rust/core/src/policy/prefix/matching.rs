//! Chooses among the workers that hold some of the prompt.

use rand::{Rng, RngCore};

/// Whether the most and the fewest active requests differ by more than `limit`.
pub fn is_imbalanced(counts: &[i64], limit: i64) -> bool {
    let Some(&first) = counts.first() else { return 0 > limit };
    let range = counts.iter().fold((first, first), |(low, high), &n| (low.min(n), high.max(n)));
    range.1.saturating_sub(range.0) > limit
}

/// Among the candidates with a percentage and at most `mean + factor * standard deviation` active
/// requests: the highest percentage, then the fewest active requests, then chance; with the number of
/// equals. `None` if there is no such candidate. Mean and deviation are over all candidates. `counts` and
/// `percents` have an entry per candidate.
///
/// The deviation is that of a sample: 0 for a single candidate.
pub fn select_matched(
    counts: &[i64],
    percents: &[Option<u32>],
    factor: f64,
    rng: &mut dyn RngCore,
) -> Option<(usize, usize)> {
    let limit = load_limit(counts, factor);
    let able = || {
        let all = counts.iter().zip(percents).enumerate();
        all.filter_map(|(at, (&count, &percent))| Some((at, count, percent?)))
            .filter(|&(_, count, _)| count as f64 <= limit)
    };
    let (mut best, mut index, mut ties) = ((0, i64::MAX), None, 0);
    for (at, count, percent) in able() {
        if index.is_none() || percent > best.0 || (percent == best.0 && count < best.1) {
            (best, index, ties) = ((percent, count), Some(at), 1);
        } else {
            ties += usize::from((percent, count) == best);
        }
    }
    if ties > 1 {
        let nth = rng.random_range(0..ties);
        let mut tied = able().filter(|&(_, count, percent)| (percent, count) == best);
        index = tied.nth(nth).map(|(at, ..)| at);
    }
    index.map(|index| (index, ties))
}

fn load_limit(counts: &[i64], factor: f64) -> f64 {
    let count = counts.len() as f64;
    let mean = sum(counts, |count| count) / count;
    let squares = sum(counts, |count| (count - mean) * (count - mean));
    let deviation = if counts.len() > 1 { (squares / (count - 1.0)).sqrt() } else { 0.0 };
    mean + factor * deviation
}

/// The sum of `of` over all counts, in several independent sums, so that additions can overlap.
fn sum(counts: &[i64], of: impl Fn(f64) -> f64) -> f64 {
    let (chunks, rest) = counts.as_chunks::<8>();
    let mut sums = [0.0; 8];
    for chunk in chunks {
        sums.iter_mut().zip(chunk).for_each(|(sum, &count)| *sum += of(count as f64));
    }
    sums.into_iter().chain(rest.iter().map(|&count| of(count as f64))).sum()
}

/// Highest percentage of each bucket of the metrics, and its label.
pub const BUCKETS: [(u32, &str); 5] =
    [(0, "0"), (25, "1-25"), (50, "26-50"), (75, "51-75"), (100, "76-100")];

/// The bucket of a percentage.
pub fn match_percent_bucket(percent: u32) -> usize {
    BUCKETS.iter().position(|(last, _)| percent <= *last).unwrap_or(BUCKETS.len() - 1)
}
