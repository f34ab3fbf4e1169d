//! Policies that minimize one value per candidate.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rand::{Rng, RngCore};

use super::contract::{Candidates, Context, Polarity, RoutePolicy};
use super::cost::CandidateCost;
use super::decision::{Choice, Reason};
use super::select::Lowest;
use super::select::among_equals;
use crate::error::Result;

/// Appends one value per candidate, in order; `None` if the candidate lacks the data.
pub(super) type Values = fn(&Candidates<'_>, &mut Vec<Option<f64>>);

/// The lowest value wins, and chance decides ties. Candidates without a value are skipped, unless
/// all lack one: then any of them is taken. A candidate without a value has infinite cost.
#[derive(Debug)]
pub(super) struct ByMetric {
    name: &'static str,
    values: Values,
    /// None of the latest candidates had a value.
    is_blind: AtomicBool,
}

impl ByMetric {
    pub(super) fn policy(name: &'static str, values: Values) -> Arc<dyn RoutePolicy> {
        Arc::new(Self { name, values, is_blind: AtomicBool::new(false) })
    }

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
                "policy {} prefers no worker: none that could take the latest request reported its metric; see \
                 what the engines' GET /metrics lacks, or set another --router-mode",
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
    ) -> Result<Polarity> {
        scores.clear();
        self.read(candidates, scores);
        Ok(Polarity::Least)
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
