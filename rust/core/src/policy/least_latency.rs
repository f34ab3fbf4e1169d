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
    let list = candidates.metrics;
    let (mut prompt, mut generation) = (Mean::default(), Mean::default());
    for metrics in list {
        prompt.add(metrics.avg_prompt_tokens);
        generation.add(metrics.avg_generation_tokens);
    }
    let prompt = prompt.or(PROMPT_TOKENS);
    let generation = generation.or(GENERATION_TOKENS);
    // An engine that has had no requests yet has times, if any, of a usual one.
    let scaled = |time: f64, own: Option<f64>, usual: f64| {
        time / own.filter(|&tokens| tokens > 0.0).unwrap_or(usual) * usual
    };
    values.extend(list.iter().map(|metrics| {
        let prefill = scaled(metrics.mean_prefill_s?, metrics.avg_prompt_tokens, prompt);
        let decode = scaled(metrics.mean_decode_s?, metrics.avg_generation_tokens, generation);
        Some(metrics.queue_s? + prefill + decode)
    }));
    values.resize(candidates.len(), None);
}

/// The mean of the lengths above 0.
#[derive(Default)]
struct Mean {
    sum: f64,
    count: f64,
}

impl Mean {
    fn add(&mut self, length: Option<f64>) {
        let length = length.filter(|&length| length > 0.0);
        self.sum += length.unwrap_or(0.0);
        self.count += f64::from(u8::from(length.is_some()));
    }

    fn or(self, without: f64) -> f64 {
        if self.count > 0.0 { self.sum / self.count } else { without }
    }
}
