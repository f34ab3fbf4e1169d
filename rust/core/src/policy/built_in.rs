//! The built-in policies as route policies.

use rand::RngCore;

use super::contract::{Candidates, Context, Polarity, RoutePolicy};
use super::cost::{CandidateCost, Policy};
use super::decision::Choice;
use super::select::select;

impl RoutePolicy for Policy {
    fn name(&self) -> &str {
        Policy::name(*self)
    }

    fn choose(
        &self,
        context: &Context<'_>,
        candidates: &Candidates<'_>,
        costs: &mut Vec<CandidateCost>,
        rng: &mut dyn RngCore,
    ) -> Option<Choice> {
        select(*self, &context.request, candidates.list, costs, rng)
    }

    fn built_in(&self) -> Option<Policy> {
        Some(*self)
    }

    fn needs_text(&self) -> bool {
        false
    }

    fn needs_tokens(&self) -> bool {
        *self == Self::Kv
    }

    fn is_scorer(&self) -> bool {
        matches!(self, Self::Kv | Self::LeastLoaded)
    }

    fn scores(
        &self,
        context: &Context<'_>,
        candidates: &Candidates<'_>,
        scores: &mut Vec<Option<f64>>,
        _rng: &mut dyn RngCore,
    ) -> Option<Polarity> {
        if !self.is_scorer() {
            return None;
        }
        let request = context.request.among(candidates.list);
        scores.clear();
        scores.extend(candidates.list.iter().map(|one| Some(request.terms(*self, one).cost)));
        Some(Polarity::Least)
    }
}
