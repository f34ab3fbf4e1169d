//! The built-in policies.

use rand::RngCore;

use super::contract::{Candidates, Context, Polarity, RoutePolicy};
use super::cost::CandidateCost;
use super::decision::Choice;
use super::select::select;

named! {
    /// How a worker is chosen.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub enum Policy {
        /// Lowest cost: uncached and queued prompt blocks, plus active blocks.
        #[default]
        Kv = "kv",
        /// The candidate with the oldest booking, so that all take turns even if the candidates
        /// change between requests.
        RoundRobin = "round_robin",
        /// Any candidate, all equally likely.
        Random = "random",
        /// Fewest active blocks and blocks to prefill; then fewest active requests.
        LeastLoaded = "least_loaded",
        /// The less loaded of two random candidates.
        PowerOfTwo = "power_of_two",
    }
}

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
        let request = &context.request;
        scores.clear();
        scores.extend(candidates.list.iter().map(|one| Some(request.terms(*self, one).cost)));
        Some(Polarity::Least)
    }
}
