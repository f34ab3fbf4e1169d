//! A policy outside the core: it scores candidates before the lock is taken, and the eligible
//! candidate with the highest score wins. Without advice `kv` chooses.

use std::sync::Arc;

use rand::RngCore;

use super::contract::{Candidates, Context, Finished, RoutePolicy, Sample};
use super::cost::{CandidateCost, Policy};
use super::decision::{Choice, Reason};
use super::desk::Desk;
use super::question::{Ended, News, OutsideCandidate, OutsideRequest};
use super::select::select;
use crate::ids::Worker;

/// The policy that answers at a [`Desk`].
#[derive(Debug)]
pub struct Outside {
    desk: Arc<Desk>,
}

impl Outside {
    /// The policy that answers at `desk`.
    pub fn new(desk: Arc<Desk>) -> Self {
        Self { desk }
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        // The answering thread has nothing more to wait for.
        self.desk.close();
    }
}

impl OutsideRequest {
    /// Copies `context`, including its prompt.
    pub fn of(context: &Context<'_>) -> Self {
        Self {
            model: context.model.into(),
            isl_tokens: context.request.isl_tokens,
            block_size: context.request.block_size,
            prompt: context.prompt.into(),
            token_ids: context.token_ids.into(),
            user: context.user.map(Box::from),
            session_key: context.session.key.map(Box::from),
            session_worker: context.session.worker,
        }
    }
}

impl Ended {
    /// Copies `finished`.
    pub fn of(finished: &Finished<'_>) -> Self {
        Self {
            model: finished.model.into(),
            user: finished.user.map(Box::from),
            worker: finished.worker,
            input_tokens: finished.input_tokens,
            cached_tokens: finished.cached_tokens,
            output_tokens: finished.output_tokens,
            duration_ms: finished.now_ms.saturating_sub(finished.routed_at_ms),
        }
    }
}

impl RoutePolicy for Outside {
    fn name(&self) -> &str {
        self.desk.name()
    }

    fn needs_tokens(&self) -> bool {
        true
    }

    fn desk(&self) -> Option<&Arc<Desk>> {
        Some(&self.desk)
    }

    fn trouble(&self) -> Option<String> {
        self.desk.trouble()
    }

    fn stand_in(&self, choice: &Choice) -> Option<Policy> {
        // A single candidate, and a session's worker, need no policy.
        let is_kv = !matches!(
            choice.reason,
            Reason::HighestScore | Reason::SessionAffinity | Reason::OnlyCandidate
        );
        is_kv.then_some(Policy::Kv)
    }

    fn choose(
        &self,
        context: &Context<'_>,
        candidates: &Candidates<'_>,
        costs: &mut Vec<CandidateCost>,
        rng: &mut dyn RngCore,
    ) -> Option<Choice> {
        let fallback = select(Policy::Kv, &context.request, candidates.list, costs, rng)?;
        let Some(advice) = context.advice else { return Some(fallback) };
        let scored = candidates.list.iter().enumerate();
        let scored = scored.filter_map(|(at, one)| Some((at, advice.score(one.worker)?)));
        let scored: Vec<(usize, f64)> = scored.collect();
        let high = scored.iter().map(|(_, score)| *score).fold(f64::NEG_INFINITY, f64::max);
        let best = scored.iter().filter(|(_, score)| *score == high);
        let ties = best.clone().count();
        let Some(&(index, score)) = best.min_by(|a, b| costs[a.0].cost.total_cmp(&costs[b.0].cost))
        else {
            return Some(fallback);
        };
        let others = scored.iter().filter(|(at, _)| *at != index);
        let next = others.map(|(_, score)| *score).fold(f64::NEG_INFINITY, f64::max);
        let margin = next.is_finite().then_some(score - next);
        Some(Choice { index, ties, margin, reason: Reason::HighestScore, score: Some(score) })
    }

    fn routed(&self, context: &Context<'_>, candidates: &Candidates<'_>, choice: &Choice) {
        if context.advice.is_some() && choice.reason != Reason::SessionAffinity {
            self.desk.followed(choice.reason == Reason::HighestScore);
        }
        let news = || {
            let candidate = candidates.list[choice.index];
            let terms = context.request.terms(Policy::Kv, &candidate);
            let metrics = candidates.metrics(choice.index);
            let candidate = OutsideCandidate { candidate, metrics, terms };
            News::Routed(Box::new(OutsideRequest::of(context)), Box::new(candidate))
        };
        self.desk.tell(news, |wanted| wanted.routed);
    }

    fn finished(&self, finished: &Finished<'_>) {
        self.desk.tell(|| News::Finished(Ended::of(finished)), |wanted| wanted.finished);
    }

    fn removed(&self, worker: Worker) {
        self.desk.tell(|| News::Removed(worker), |wanted| wanted.removed);
    }

    fn samples(&self, _now_ms: u64, visit: &mut dyn FnMut(Sample<'_>)) {
        self.desk.samples(visit);
    }
}
