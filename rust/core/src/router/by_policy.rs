//! Decisions that policies beside those that are built in make or watch.

use std::sync::Arc;

use rand::rngs::SmallRng;

use super::booking::Booking;
use super::policies::{Buffers, Tail};
use super::request::RouteRequest;
use super::route::{Router, State, drawn, no_candidate};
use crate::error::Result;
use crate::load::RequestId;
use crate::policy::desk::{OutsideCandidate, OutsideRequest};
use crate::policy::{self, Candidate, Choice, Context, Decision, Policy, Question, Terms};

impl Router {
    /// As [`route`](Self::route), where policies beside those that are built in choose or watch.
    pub(super) fn route_by<'a>(
        self: &Arc<Self>,
        request: &RouteRequest<'_>,
        terms: &'a mut Vec<Terms>,
        now_ms: u64,
    ) -> Result<(Booking, Decision<'a>)> {
        let mut context = self.context(request, now_ms);
        self.policies.prepare(&context)?;
        let mut buffers = self.spare.take();
        let (id, choice, seed) = {
            let mut state = self.state.lock();
            let state = &mut *state;
            state.load.advance(now_ms);
            state.load.check_room()?;
            let mut seeds = state.seeds.clone();
            let (seed, mut rng) = drawn(request, &mut seeds);
            let choice =
                self.choose(state, request, &mut context, &mut buffers, terms, &mut rng)?;
            state.seeds = seeds;
            let chosen = &buffers.candidates[choice.index];
            let blocks = self.block_use(&state.load, request);
            let id = RequestId(state.next_request);
            let (isl, saved) = (request.isl_tokens, chosen.saved_blocks());
            let unseen_ms = self.unseen_prefill_ms(&context, chosen);
            state.load.book_for(id, chosen.worker, blocks, isl, saved, unseen_ms, now_ms)?;
            state.next_request += 1;
            self.keep(request, chosen.worker, now_ms);
            (id, choice, seed)
        };
        self.policies.routed(&context, &buffers.found(), &choice);
        self.spare.give_back(buffers);
        let decision =
            Decision::new(self.chooser(), context.request, terms, &choice).drawn_from(seed);
        let tail = Box::new(Tail::new(request, now_ms, context.memo.into_ticket()));
        Ok((Booking::new(Arc::clone(self), id, decision.worker, now_ms, Some(tail)), decision))
    }

    pub(super) fn preview_by<'a>(
        &self,
        request: &RouteRequest<'_>,
        terms: &'a mut Vec<Terms>,
    ) -> Result<Decision<'a>> {
        let mut context = self.context(request, self.clock.now_ms());
        self.policies.prepare(&context)?;
        let mut buffers = self.spare.take();
        let (choice, seed) = {
            let mut state = self.state.lock();
            state.load.advance(context.now_ms);
            let (seed, mut rng) = drawn(request, &mut state.seeds.clone());
            let choice =
                self.choose(&mut state, request, &mut context, &mut buffers, terms, &mut rng)?;
            (choice, seed)
        };
        self.spare.give_back(buffers);
        Ok(Decision::new(self.chooser(), context.request, terms, &choice).drawn_from(seed))
    }

    /// What a policy outside the core is to be asked about `request`: those that may take it now.
    /// `None` when there is no such policy, or no choice.
    ///
    /// # Errors
    /// As [`route`](Self::route), but for [`Error::Overloaded`](crate::error::Error::Overloaded).
    pub fn question(&self, request: &RouteRequest<'_>) -> Result<Option<Question>> {
        self.validate(request)?;
        if self.policies.desk().is_none() {
            return Ok(None);
        }
        let mut context = self.context(request, self.clock.now_ms());
        let mut buffers = self.spare.take();
        let filled = {
            let mut state = self.state.lock();
            self.gather(&mut state, request, &mut context, &mut buffers)
        };
        let found = buffers.found();
        // Where a session stays nobody is asked.
        let is_kept = self.kept(request, found.list, &[], context.now_ms).is_some();
        let question = (found.len() > 1 && !is_kept).then(|| Question {
            request: OutsideRequest::of(&context),
            candidates: (0..found.len())
                .map(|index| OutsideCandidate {
                    candidate: found.list[index],
                    metrics: found.metrics(index),
                    terms: context.request.terms(Policy::Kv, &found.list[index]),
                })
                .collect(),
        });
        self.spare.give_back(buffers);
        filled.map(|()| question)
    }

    /// How long the request's prefill on `chosen` counts as queued, where its end is not seen.
    fn unseen_prefill_ms(&self, context: &Context<'_>, chosen: &Candidate) -> Option<u64> {
        let active = self.policies.active.as_ref().filter(|_| context.is_whole)?;
        active.unseen_prefill_ms(context.model, context.request.uncached_tokens(chosen))
    }

    /// The built-in policy that chooses, if one does.
    fn chooser(&self) -> Option<Policy> {
        self.policies.active.is_none().then_some(self.config.policy)
    }

    /// What policies are told of `request`, from a look at the load that may be old when they choose.
    fn context<'a>(&self, request: &RouteRequest<'a>, now_ms: u64) -> Context<'a> {
        let load = &self.state.lock().load;
        let known = self.terms(load, request, self.block_use(load, request));
        request.facts.context(request, known, now_ms)
    }

    /// Make the candidates of `request` from what is active now.
    fn gather(
        &self,
        state: &mut State,
        request: &RouteRequest<'_>,
        context: &mut Context<'_>,
        buffers: &mut Buffers,
    ) -> Result<()> {
        buffers.candidates.clear();
        let blocks = self.block_use(&state.load, request);
        context.request = self.terms(&state.load, request, blocks);
        self.fill(state, request, &context.request, blocks)?;
        std::mem::swap(&mut state.scratch.candidates, &mut buffers.candidates);
        buffers.ask(request.facts.metrics);
        Ok(())
    }

    /// Choose among the candidates of `request`.
    fn choose(
        &self,
        state: &mut State,
        request: &RouteRequest<'_>,
        context: &mut Context<'_>,
        buffers: &mut Buffers,
        terms: &mut Vec<Terms>,
        rng: &mut SmallRng,
    ) -> Result<Choice> {
        self.gather(state, request, context, buffers)?;
        let choice = match &self.policies.active {
            Some(active) => active.choose(context, &buffers.found(), terms, rng),
            None => {
                let candidates = &buffers.candidates;
                policy::select(self.config.policy, &context.request, candidates, terms, rng)
                    .map(|decision| decision.choice())
            }
        };
        let choice = choice.ok_or_else(|| no_candidate(&state.load))?;
        let kept = self.kept(request, &buffers.candidates, terms, context.now_ms);
        Ok(kept.unwrap_or(choice))
    }
}
