//! The values of policies that minimize one metric per candidate.

use super::contract::Candidates;
use super::engine::EngineMetrics;

type Values = Vec<Option<f64>>;

fn each(
    candidates: &Candidates<'_>,
    values: &mut Values,
    of: impl Fn(EngineMetrics) -> Option<f64>,
) {
    values.extend((0..candidates.len()).map(|index| of(candidates.metrics(index))));
}

/// Active requests, as this router booked them.
pub(super) fn requests(candidates: &Candidates<'_>, values: &mut Values) {
    let requests = |index| Some(f64::from(candidates.requests(index)));
    values.extend((0..candidates.len()).map(requests));
}

/// KV usage of accelerator and host together.
pub(super) fn kv_usage(candidates: &Candidates<'_>, values: &mut Values) {
    // Most engines have no blocks in host memory and do not report them.
    let both = |metrics: EngineMetrics| {
        metrics.gpu_kv_usage.map(|gpu| gpu + metrics.cpu_kv_usage.unwrap_or(0.0))
    };
    each(candidates, values, both);
}

/// KV usage of the accelerator.
pub(super) fn gpu_kv_usage(candidates: &Candidates<'_>, values: &mut Values) {
    each(candidates, values, |metrics| metrics.gpu_kv_usage);
}

/// The share of the time in which the accelerator was busy.
pub(super) fn busy_ratio(candidates: &Candidates<'_>, values: &mut Values) {
    each(candidates, values, |metrics| metrics.busy_ratio);
}

/// Utilization, as engines define it.
pub(super) fn utilization(candidates: &Candidates<'_>, values: &mut Values) {
    each(candidates, values, |metrics| metrics.utilization);
}

/// Weight of a prompt token, in generated tokens.
const PROMPT_WEIGHT: f64 = 2.0;

/// Work that the worker has done, with prompts counted twice.
pub(super) fn throughput(candidates: &Candidates<'_>, values: &mut Values) {
    each(candidates, values, |metrics| {
        Some(PROMPT_WEIGHT * metrics.avg_prompt_tokens? + metrics.avg_generation_tokens?)
    });
}

/// Lengths of a typical request until an engine reports any, in tokens.
const PROMPT_TOKENS: f64 = 10.0;
const GENERATION_TOKENS: f64 = 100.0;

/// `queue + prefill per token * typical prompt + decode per token * typical answer`, in seconds;
/// typical lengths are the mean over the engines that report a length above 0.
pub(super) fn latency(candidates: &Candidates<'_>, values: &mut Values) {
    let list = candidates.metrics;
    let mean = |length: fn(&EngineMetrics) -> Option<f64>, without: f64| {
        let lengths = list.iter().filter_map(length).filter(|&length| length > 0.0);
        let (sum, count) = lengths.fold((0.0, 0.0), |(sum, count), one| (sum + one, count + 1.0));
        if count > 0.0 { sum / count } else { without }
    };
    let prompt = mean(|metrics| metrics.avg_prompt_tokens, PROMPT_TOKENS);
    let generation = mean(|metrics| metrics.avg_generation_tokens, GENERATION_TOKENS);
    // An engine without requests so far reports times, if any, of a typical one.
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

/// One counter or gauge of a policy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample<'a> {
    /// Name without the program's prefix; counters end in `_total`.
    pub name: &'a str,
    /// What it is, as a sentence without a full stop.
    pub help: &'static str,
    /// Label and its value; `("", "")` without a label.
    pub label: (&'a str, &'a str),
    /// The value.
    pub value: f64,
}

impl<'a> Sample<'a> {
    /// A sample without a label.
    pub const fn plain(name: &'a str, help: &'static str, value: f64) -> Self {
        Self { name, help, label: ("", ""), value }
    }
}
