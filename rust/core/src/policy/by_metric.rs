//! Policies that minimize one value per candidate.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rand::{Rng, RngCore};

use super::contract::{Candidates, Context, Polarity, RoutePolicy};
use super::cost::CandidateCost;
use super::decision::{Choice, Reason};
use super::engine::EngineMetrics;
use super::select::{Lowest, among_equals};

/// Appends one value per candidate, in order; `None` if the candidate lacks the data.
pub(super) type Values = fn(&Candidates<'_>, &mut Vec<Option<f64>>);

/// The lowest value wins, and chance decides ties. Candidates without a value are skipped, unless
/// all lack one: then any of them is taken. A candidate without a value has infinite cost.
#[derive(Debug)]
struct ByMetric {
    name: &'static str,
    values: Values,
    /// None of the latest candidates had a value.
    is_blind: AtomicBool,
}

/// The policy `name`, which minimizes `values`.
pub(super) fn lowest(name: &'static str, values: Values) -> Arc<dyn RoutePolicy> {
    Arc::new(ByMetric { name, values, is_blind: AtomicBool::new(false) })
}

impl ByMetric {
    fn read(&self, candidates: &Candidates<'_>, values: &mut Vec<Option<f64>>) {
        (self.values)(candidates, values);
        let is_blind = !values.is_empty() && values.iter().all(Option::is_none);
        // Relaxed: a slightly outdated report does no harm. Read first, so that decisions of many
        // threads don't wait for a value that hardly ever changes.
        if self.is_blind.load(Ordering::Relaxed) != is_blind {
            self.is_blind.store(is_blind, Ordering::Relaxed);
        }
    }
}

impl RoutePolicy for ByMetric {
    fn name(&self) -> &str {
        self.name
    }

    fn trouble(&self) -> Option<String> {
        self.is_blind.load(Ordering::Relaxed).then(|| {
            format!(
                "policy {} prefers no worker: no worker that could take the latest request reported the policy's \
                 metric; check that the engines' GET /metrics has it, or set another --router-mode",
                self.name
            )
        })
    }

    fn choose(
        &self,
        _context: &Context<'_>,
        candidates: &Candidates<'_>,
        costs: &mut Vec<CandidateCost>,
        rng: &mut dyn RngCore,
    ) -> Option<Choice> {
        let mut values = Vec::with_capacity(candidates.len());
        self.read(candidates, &mut values);
        candidates.fill(costs, |index| values[index].unwrap_or(f64::INFINITY));
        choose_lowest(&values, rng)
    }

    fn is_scorer(&self) -> bool {
        true
    }

    fn scores(
        &self,
        _context: &Context<'_>,
        candidates: &Candidates<'_>,
        scores: &mut Vec<Option<f64>>,
        _rng: &mut dyn RngCore,
    ) -> Option<Polarity> {
        scores.clear();
        self.read(candidates, scores);
        Some(Polarity::Least)
    }
}

/// The lowest of `values`, with ties broken by chance; any candidate if there are no values; `None`
/// without candidates.
pub(super) fn choose_lowest(values: &[Option<f64>], rng: &mut dyn RngCore) -> Option<Choice> {
    let count = values.len();
    if count <= 1 {
        return (count == 1).then_some(Choice::plain(0, 1, Reason::OnlyCandidate));
    }
    let mut lowest = Lowest::new();
    for (at, value) in values.iter().enumerate() {
        if let Some(value) = *value {
            lowest.see(at, value, || 0);
        }
    }
    if lowest.ties == 0 {
        return Some(Choice::plain(rng.random_range(0..count), count, Reason::Chance));
    }
    let choice = among_equals(lowest, 0..count, |at| values[at] == Some(lowest.value), rng);
    Some(Choice { margin: choice.margin.filter(|margin| margin.is_finite()), ..choice })
}

/// One value of each engine's report.
pub(super) fn each(
    candidates: &Candidates<'_>,
    values: &mut Vec<Option<f64>>,
    of: impl Fn(EngineMetrics) -> Option<f64>,
) {
    values.extend((0..candidates.len()).map(|index| of(candidates.metrics(index))));
}

/// Active requests, as this router booked them.
pub(super) fn requests(candidates: &Candidates<'_>, values: &mut Vec<Option<f64>>) {
    let requests = |index| Some(f64::from(candidates.requests(index)));
    values.extend((0..candidates.len()).map(requests));
}

/// KV usage of accelerator and host together.
pub(super) fn kv_usage(candidates: &Candidates<'_>, values: &mut Vec<Option<f64>>) {
    // Most engines have no blocks in host memory and do not report them.
    let both = |metrics: EngineMetrics| {
        metrics.gpu_kv_usage.map(|gpu| gpu + metrics.cpu_kv_usage.unwrap_or(0.0))
    };
    each(candidates, values, both);
}

/// Weight of a prompt token, in generated tokens.
const PROMPT_WEIGHT: f64 = 2.0;

/// Work that the worker has done, with prompts counted twice.
pub(super) fn throughput(candidates: &Candidates<'_>, values: &mut Vec<Option<f64>>) {
    each(candidates, values, |metrics| {
        Some(PROMPT_WEIGHT * metrics.avg_prompt_tokens? + metrics.avg_generation_tokens?)
    });
}

/// Lengths of a typical request until an engine reports any, in tokens.
const PROMPT_TOKENS: f64 = 10.0;
const GENERATION_TOKENS: f64 = 100.0;

/// `queue + prefill per token * typical prompt + decode per token * typical answer`, in seconds;
/// typical lengths are the mean over the engines that report a length above 0.
pub(super) fn latency(candidates: &Candidates<'_>, values: &mut Vec<Option<f64>>) {
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
