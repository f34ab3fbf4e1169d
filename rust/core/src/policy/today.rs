//! `kv`, `round_robin`, `random`, `least_loaded` and `power_of_two` in the form of the others.

use std::sync::Arc;

use rand::RngCore;

use super::contract::{Candidates, Context, Polarity, RoutePolicy};
use super::cost::Terms;
use super::decision::Choice;
use super::kind::Policy;
use super::select::select;
use crate::error::{Error, Result};

/// One of [`Policy::ALL`].
#[derive(Debug)]
struct Today(Policy);

pub(super) fn policy(policy: Policy) -> Arc<dyn RoutePolicy> {
    Arc::new(Today(policy))
}

impl RoutePolicy for Today {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn choose(
        &self,
        context: &Context<'_>,
        candidates: &Candidates<'_>,
        terms: &mut Vec<Terms>,
        rng: &mut dyn RngCore,
    ) -> Option<Choice> {
        let decision = select(self.0, &context.request, candidates.list, terms, rng)?;
        Some(decision.choice())
    }

    fn needs_tokens(&self) -> bool {
        self.0 == Policy::Kv
    }

    fn is_scorer(&self) -> bool {
        matches!(self.0, Policy::Kv | Policy::LeastLoaded)
    }

    fn scores(
        &self,
        context: &Context<'_>,
        candidates: &Candidates<'_>,
        scores: &mut Vec<Option<f64>>,
        _rng: &mut dyn RngCore,
    ) -> Result<Polarity> {
        if !self.is_scorer() {
            return Err(Error::invalid(format!("policy {} has no scores to be weighed", self.0)));
        }
        let request = &context.request;
        scores.clear();
        scores.extend(candidates.list.iter().map(|one| Some(request.terms(self.0, one).cost)));
        Ok(Polarity::Least)
    }
}
