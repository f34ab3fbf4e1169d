//! The built-in policies as [`RoutePolicy`](super::RoutePolicy).

use rand::RngCore;

use super::contract::{Candidates, Context, Polarity, RoutePolicy, without_scores};
use super::cost::CandidateCost;
use super::decision::Choice;
use super::kind::Policy;
use super::select::select;
use crate::error::Result;

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
        let decision = select(*self, &context.request, candidates.list, costs, rng)?;
        Some(decision.choice)
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
    ) -> Result<Polarity> {
        if !self.is_scorer() {
            return Err(without_scores(self.name()));
        }
        let request = &context.request;
        scores.clear();
        scores.extend(candidates.list.iter().map(|one| Some(request.terms(*self, one).cost)));
        Ok(Polarity::Least)
    }
}
