//! Weighted combinations of policies: `a:2,b:1`.

use std::sync::Arc;

use parking_lot::Mutex;
use rand::RngCore;

use super::contract::{Candidates, Context, Polarity, RoutePolicy};
use super::cost::CandidateCost;
use super::decision::{Choice, Reason};
use super::registry;
use super::select::Lowest;
use super::settings::Settings;
use crate::error::{Error, Result};

/// Highest weight of a member.
pub const MAX_WEIGHT: u32 = 1_000_000;

/// Most members; a longer list is a mistake.
pub const MAX_MEMBERS: usize = 32;

/// The members of a strategy and their weights, in order: `a:2,b,c:0` is `[(a, 2), (b, 1)]`.
///
/// The default weight is 1; members of weight 0 are left out. `pd` and names that begin with `slo`
/// can't be combined: the first of them is used alone.
///
/// # Errors
/// [`Error::InvalidArgument`] for an empty item, a weight that is not an integer in
/// 0..=[`MAX_WEIGHT`], more than [`MAX_MEMBERS`] items, or an empty result.
pub fn parse(strategy: &str) -> Result<Vec<(&str, u32)>> {
    let fault = |fault: String| Error::invalid(format!("strategy {strategy:?}: {fault}"));
    let mut members = Vec::new();
    for item in strategy.split(',') {
        let (name, weight) = match item.trim().split_once(':') {
            None => (item.trim(), 1),
            Some((name, weight)) => {
                let legal = weight.trim().parse().ok().filter(|&weight| weight <= MAX_WEIGHT);
                let weight = legal.ok_or_else(|| {
                    fault(format!(
                        "the weight of {name:?} must be an integer in 0..={MAX_WEIGHT}, got \
                         {weight:?}"
                    ))
                })?;
                (name.trim(), weight)
            }
        };
        if name.is_empty() {
            return Err(fault("an item has no name".into()));
        }
        if members.len() == MAX_MEMBERS {
            return Err(fault(format!("more than {MAX_MEMBERS} items")));
        }
        members.push((name, weight));
    }
    members.retain(|&(_, weight)| weight > 0);
    let is_alone = |name: &str| name == "pd" || name.starts_with("slo");
    if let Some(&alone) = members.iter().find(|(name, _)| is_alone(name)) {
        members = vec![alone];
    }
    if members.is_empty() {
        return Err(fault("every weight is 0".into()));
    }
    Ok(members)
}

/// The policy that `strategy` names: a single one, or several as a weighted choice.
///
/// # Errors
/// As [`parse`]; also for an unknown name and, in a combination, for a policy without scores.
pub fn build(
    strategy: &str,
    settings: &Settings,
    rng: &mut dyn RngCore,
) -> Result<Arc<dyn RoutePolicy>> {
    let items = parse(strategy)?;
    if let [(name, _)] = items[..] {
        return registry::build_one(name, settings, rng);
    }
    let total: f64 = items.iter().map(|&(_, weight)| f64::from(weight)).sum();
    let (mut members, mut weights) = (Vec::new(), Vec::new());
    for (name, weight) in items {
        let policy = registry::build_one(name, settings, rng)?;
        if !policy.is_scorer() {
            return Err(Error::invalid(format!(
                "strategy {strategy:?}: {name:?} has no scores that could be weighted"
            )));
        }
        members.push(policy);
        weights.push(f64::from(weight) / total);
    }
    Ok(Arc::new(Multi { name: strategy.into(), members, weights, scratch: Mutex::default() }))
}

#[derive(Debug)]
struct Multi {
    name: Box<str>,
    members: Vec<Arc<dyn RoutePolicy>>,
    /// One per member; their sum is 1.
    weights: Vec<f64>,
    scratch: Mutex<Scratch>,
}

#[derive(Debug, Default)]
struct Scratch {
    scores: Vec<Option<f64>>,
    sums: Vec<f64>,
}

impl RoutePolicy for Multi {
    fn name(&self) -> &str {
        &self.name
    }

    fn members(&self) -> &[Arc<dyn RoutePolicy>] {
        &self.members
    }

    fn choose(
        &self,
        context: &Context<'_>,
        candidates: &Candidates<'_>,
        costs: &mut Vec<CandidateCost>,
        rng: &mut dyn RngCore,
    ) -> Option<Choice> {
        let mut scratch = self.scratch.lock();
        let Scratch { scores, sums } = &mut *scratch;
        sums.clear();
        sums.resize(candidates.len(), 0.0);
        for (policy, weight) in self.members.iter().zip(&self.weights) {
            // A member without scores for this request does not contribute.
            if let Some(polarity) = policy.scores(context, candidates, scores, rng) {
                add(scores, polarity, *weight, sums);
            }
        }
        candidates.fill(costs, |index| -sums[index]);
        highest(sums)
    }
}

/// Adds `weight` times the scores, scaled to 0..=1 with 1 the best, to `sums`.
///
/// A missing or infinite score counts as 0; if all scores are equal each counts as 1.
pub(super) fn add(scores: &[Option<f64>], polarity: Polarity, weight: f64, sums: &mut [f64]) {
    let finite = |score: Option<f64>| score.filter(|score| score.is_finite());
    let known = scores.iter().filter_map(|&score| finite(score));
    let range = (f64::INFINITY, f64::NEG_INFINITY);
    let (low, high) = known.fold(range, |(low, high), score| (low.min(score), high.max(score)));
    for (sum, &score) in sums.iter_mut().zip(scores) {
        let Some(score) = finite(score) else { continue };
        let share = if high == low { 1.0 } else { (score - low) / (high - low) };
        let share = if polarity == Polarity::Most || high == low { share } else { 1.0 - share };
        *sum += weight * share;
    }
}

/// The highest sum; the first of equal ones, so that members with finer scores decide.
pub(super) fn highest(sums: &[f64]) -> Option<Choice> {
    let mut lowest = Lowest::new();
    sums.iter().enumerate().for_each(|(at, sum)| lowest.see(at, -sum, || 0));
    let Lowest { index, ties, .. } = lowest;
    let margin = Some(lowest.margin()).filter(|margin| margin.is_finite());
    let score = Some(*sums.get(index)?);
    Some(Choice { index, ties, margin, reason: Reason::HighestScore, score })
}
