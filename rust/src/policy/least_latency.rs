//! `least-latency`: the shortest time that a request of usual length is expected to take.

use std::sync::Arc;

use rand::RngCore;

use super::by_metric::ByMetric;
use super::contract::{Candidates, RoutePolicy};
use super::settings::Settings;
use crate::error::Result;

pub(super) fn build(_: &Settings, _: &mut dyn RngCore) -> Result<Arc<dyn RoutePolicy>> {
    Ok(ByMetric::policy("least-latency", values))
}

/// Lengths of a usual request while no engine reports any, in tokens.
const PROMPT_TOKENS: f64 = 10.0;
const GENERATION_TOKENS: f64 = 100.0;

/// `queue + prefill per token * usual prompt + decode per token * usual answer`, in seconds; what is
/// usual is the mean over the engines that report a length above 0.
fn values(candidates: &Candidates<'_>, values: &mut Vec<Option<f64>>) {
    let all = || (0..candidates.len()).map(|index| candidates.metrics(index));
    let prompt = usual(all().filter_map(|metrics| metrics.avg_prompt_tokens), PROMPT_TOKENS);
    let generation =
        usual(all().filter_map(|metrics| metrics.avg_generation_tokens), GENERATION_TOKENS);
    // An engine that has had no requests yet has times, if any, of a usual one.
    let scaled = |time: f64, own: Option<f64>, usual: f64| {
        time / own.filter(|&tokens| tokens > 0.0).unwrap_or(usual) * usual
    };
    values.extend(all().map(|metrics| {
        let prefill = scaled(metrics.mean_prefill_s?, metrics.avg_prompt_tokens, prompt);
        let decode = scaled(metrics.mean_decode_s?, metrics.avg_generation_tokens, generation);
        Some(metrics.queue_s? + prefill + decode)
    }));
}

fn usual(lengths: impl Iterator<Item = f64>, without: f64) -> f64 {
    let (sum, count) = lengths
        .filter(|&length| length > 0.0)
        .fold((0.0, 0.0), |(sum, count), length| (sum + length, count + 1.0));
    if count > 0.0 { sum / count } else { without }
}
