//! Decisions: queried, previewed and booked.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rand::rngs::SmallRng;
use rand::{RngCore, SeedableRng};

use super::config::RouteOverride;
use super::policies::{Considered, Tail};
use super::route::{Router, State};
use crate::error::{Error, Result};
use crate::ids::Worker;
use crate::load::{ActiveSequences, Assignment, RequestId};
use crate::policy::{
    AUTO, Candidate, CandidateCost, Candidates, Choice, Context, Decision, OutsideCandidate,
    OutsideRequest, Policy, Question, RequestTerms, RoutePolicy,
};
use crate::select::ask::Ask;
use crate::select::reservation::Reservation;

impl Router {
    /// Chooses a worker and books the request on it, in one step. Replaces `considered` with all
    /// candidates and their costs; keep it for the next request.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an empty prompt, too many hashes, a session key that is too
    /// long or an override out of range; [`Error::NoWorker`] if no worker is registered or allowed;
    /// [`Error::AllBusy`] if all of these are busy, [`Error::MustWait`] if the request can wait and
    /// none has room; [`Error::Overloaded`] at `max_requests`. Nothing is booked then.
    ///
    /// # Cost
    /// O(blocks of the request + workers); allocates only for blocks that no other request uses.
    pub fn route<'a>(
        self: &Arc<Self>,
        ask: &Ask<'_>,
        considered: &'a mut Considered,
    ) -> Result<(Reservation, Decision<'a>)> {
        self.validate(ask)?;
        let now_ms = self.clock.now_ms();
        let mut context = Self::context(ask, now_ms);
        self.policies.prepare(&context)?;
        let (id, choice, seed, departures) = {
            let mut state = self.state.lock();
            let state = &mut *state;
            let departures = self.departures.load(Ordering::Relaxed);
            state.load.advance(now_ms);
            state.load.check_room()?;
            let mut seeds = state.seeds.clone();
            let (seed, mut rng) = drawn(ask, &mut seeds);
            Self::shut(state, ask, true);
            let choice = self.choose(state, ask, &mut context, considered, &mut rng)?;
            state.seeds = seeds;
            let chosen = &considered.candidates[choice.index];
            let id = RequestId(state.next_request);
            let work = Assignment {
                id,
                worker: chosen.worker,
                blocks: self.block_use(&state.load, &ask.prompt.sequence_hashes, &ask.overrides),
                isl_tokens: ask.prompt.isl_tokens,
                uncached_tokens: context.request.uncached_tokens(chosen),
                unseen_ms: self.unseen_prefill_ms(&context, chosen),
                is_remote: false,
            };
            state.load.book(&work, now_ms)?;
            state.next_request += 1;
            self.keep(ask, chosen.worker, now_ms);
            (id, choice, seed, departures)
        };
        self.policies.routed(&context, &considered.found(), &choice);
        let decision = self.decision(&ask.overrides, &context, considered, choice, seed);
        if self.departures.load(Ordering::Relaxed) != departures
            && !self.has_worker(decision.worker)
        {
            // It left after it was chosen, and the policies may know it again.
            self.forget(decision.worker);
        }
        let told = self.policies.need_facts();
        let tail = told.then(|| Box::new(Tail::new(ask, now_ms, context.memo.into_ticket())));
        Ok((Reservation::new(Arc::clone(self), id, decision.worker, now_ms, tail), decision))
    }

    /// The decision that [`route`](Self::route) would make now. Changes nothing: not the load, not
    /// the turn, not the generator. Repeating it gives the same result.
    ///
    /// # Errors
    /// As [`route`](Self::route), except for [`Error::Overloaded`].
    pub fn preview<'a>(
        &self,
        ask: &Ask<'_>,
        considered: &'a mut Considered,
    ) -> Result<Decision<'a>> {
        self.validate(ask)?;
        let mut context = Self::context(ask, self.clock.now_ms());
        self.policies.active.prepare(&context)?;
        let (choice, seed) = {
            let mut state = self.state.lock();
            state.load.advance(context.now_ms);
            let (seed, mut rng) = drawn(ask, &mut state.seeds.clone());
            Self::shut(&mut state, ask, false);
            let choice = self.choose(&mut state, ask, &mut context, considered, &mut rng)?;
            (choice, seed)
        };
        Ok(self.decision(&ask.overrides, &context, considered, choice, seed))
    }

    /// A decision about the current load, with a separate random draw: where chance decides,
    /// repeating it may give another result, and the decision's seed reproduces this one. Changes
    /// nothing else.
    ///
    /// # Errors
    /// As [`preview`](Self::preview).
    pub fn query<'a>(&self, ask: &Ask<'_>, considered: &'a mut Considered) -> Result<Decision<'a>> {
        let (seed, _) = drawn(ask, &mut self.questions.lock());
        let overrides = RouteOverride { seed: Some(seed), ..ask.overrides };
        self.preview(&Ask { overrides, ..*ask }, considered)
    }

    /// The question about `ask` for a policy outside the core, with the currently eligible
    /// candidates. `None` if there is no such policy, or no choice.
    ///
    /// # Errors
    /// As [`route`](Self::route), except for
    /// [`Error::Overloaded`](crate::error::Error::Overloaded).
    pub fn question(&self, ask: &Ask<'_>) -> Result<Option<Question>> {
        self.validate(ask)?;
        if self.policies.desk().is_none() {
            return Ok(None);
        }
        let mut context = Self::context(ask, self.clock.now_ms());
        let mut considered = Considered::default();
        let mut state = self.state.lock();
        state.load.advance(context.now_ms);
        Self::shut(&mut state, ask, false);
        self.gather(&mut state, ask, &mut context, &mut considered)?;
        drop(state);
        let found = considered.found();
        // A session that stays on its worker needs no policy.
        let is_kept = self.kept(ask, found.list, &[], context.now_ms).is_some();
        Ok((found.len() > 1 && !is_kept).then(|| Question {
            request: OutsideRequest::of(&context),
            candidates: (0..found.len())
                .map(|index| OutsideCandidate {
                    candidate: found.list[index],
                    metrics: found.metrics(index),
                    terms: context.request.terms(Policy::Kv, &found.list[index]),
                })
                .collect(),
        }))
    }

    /// How long the request's prefill on `chosen` counts as queued, if its end is not observed.
    fn unseen_prefill_ms(&self, context: &Context<'_>, chosen: &Candidate) -> Option<u64> {
        if !context.is_whole {
            return None;
        }
        let tokens = context.request.uncached_tokens(chosen);
        self.policies.each().find_map(|policy| policy.unseen_prefill_ms(context.pool, tokens))
    }

    /// The policy that decides about a request with these overrides. Under `auto` a request that
    /// overrides a setting of the formula, which `auto` does not have, is decided by the formula.
    pub(in crate::select) fn decider(&self, overrides: &RouteOverride) -> &dyn RoutePolicy {
        let active = &*self.policies.active;
        if active.name() == AUTO && overrides.is_of_formula() { &Policy::Kv } else { active }
    }

    /// Converts `choice` to a decision.
    fn decision<'a>(
        &self,
        overrides: &RouteOverride,
        context: &Context<'_>,
        considered: &'a Considered,
        choice: Choice,
        seed: u64,
    ) -> Decision<'a> {
        let Considered { candidates, costs, passed_over, .. } = considered;
        let policy = self.decider(overrides).stand_in(&choice);
        let request = context.request;
        let chosen = &candidates[choice.index];
        Decision {
            worker: chosen.worker,
            overlap_blocks: chosen.overlap_blocks,
            policy,
            request: if policy.is_some() { request.among(candidates) } else { request },
            candidates,
            costs,
            passed_over,
            choice,
            seed,
        }
    }

    /// The policies' view of `ask`; of its terms only the length is known before they choose.
    fn context<'a>(ask: &Ask<'a>, now_ms: u64) -> Context<'a> {
        let isl_tokens = ask.prompt.isl_tokens;
        let known = RequestTerms { isl_tokens, ..RequestTerms::default() };
        let is_hashed = ask.prompt.block_size > 0;
        Context {
            prompt: ask.text,
            token_ids: ask.token_ids,
            sequence_hashes: &ask.prompt.sequence_hashes,
            local_hashes: if is_hashed { &ask.prompt.locals } else { &[] },
            is_whole: ask.is_whole,
            is_retry: ask.is_retry,
            is_indexed: ask.known.is_indexed,
            user: ask.user,
            session: ask.session,
            advice: ask.advice,
            ..Context::new(known, ask.known.pool, now_ms)
        }
    }

    /// Fills in the candidates of `ask` from the current load.
    fn gather(
        &self,
        state: &mut State,
        ask: &Ask<'_>,
        context: &mut Context<'_>,
        considered: &mut Considered,
    ) -> Result<()> {
        let blocks = self.block_use(&state.load, &ask.prompt.sequence_hashes, &ask.overrides);
        context.request = self.terms(&state.load, ask, blocks);
        self.fill(state, ask, &context.request, blocks, considered)?;
        let Considered { candidates, metrics, .. } = considered;
        metrics.clear();
        if let Some(reports) = ask.known.metrics {
            let report = |one: &Candidate| reports.get(&one.worker).copied().unwrap_or_default();
            metrics.extend(candidates.iter().map(report));
        }
        Ok(())
    }

    /// Chooses among the candidates of `ask`.
    fn choose(
        &self,
        state: &mut State,
        ask: &Ask<'_>,
        context: &mut Context<'_>,
        considered: &mut Considered,
        rng: &mut SmallRng,
    ) -> Result<Choice> {
        self.gather(state, ask, context, considered)?;
        let Considered { candidates, costs, metrics, .. } = considered;
        let found = Candidates { list: candidates, metrics };
        let choice = self.decider(&ask.overrides).choose(context, &found, costs, rng);
        let choice = choice.ok_or_else(|| no_candidate(&state.load))?;
        let kept = self.kept(ask, candidates, costs, context.now_ms);
        Ok(kept.unwrap_or(choice))
    }

    /// The candidate with the session of `ask`, whatever a policy has chosen; `costs` are those of
    /// the candidates.
    pub(super) fn kept(
        &self,
        ask: &Ask<'_>,
        candidates: &[Candidate],
        costs: &[CandidateCost],
        now_ms: u64,
    ) -> Option<Choice> {
        let kept = self.affinity.as_ref()?.kept(ask.session, candidates, now_ms)?;
        let has_costs = [AUTO, Policy::Kv.name()].contains(&self.policies.active.name());
        let others = costs.iter().enumerate().filter(|&(at, _)| at != kept.index);
        let next = others.map(|(_, one)| one.cost).reduce(f64::min);
        let margin = next.filter(|_| has_costs).map(|next| next - costs[kept.index].cost);
        Some(Choice { margin, ..kept })
    }

    /// The worker of the session of `ask`, by its key.
    pub(in crate::select) fn session_place(&self, ask: &Ask<'_>) -> Option<Worker> {
        self.affinity.as_ref()?.place(ask.session, self.clock.now_ms())
    }

    /// Records that the session of `ask` is at `worker` from now on. Called under the lock of the
    /// choice, so that the session's next request sees it.
    pub(super) fn keep(&self, ask: &Ask<'_>, worker: Worker, now_ms: u64) {
        if let Some(seat) = &self.affinity {
            seat.routed(ask.session, worker, now_ms);
        }
    }
}

/// The seed of a decision, given by the request or drawn from `seeds`, and its generator.
fn drawn(ask: &Ask<'_>, seeds: &mut SmallRng) -> (u64, SmallRng) {
    // 53 bits, which every JSON reader keeps exactly.
    let seed = ask.overrides.seed.unwrap_or_else(|| seeds.next_u64() >> 11);
    (seed, SmallRng::seed_from_u64(seed))
}

fn no_candidate(load: &ActiveSequences) -> Error {
    let count = load.worker_count();
    Error::NoWorker(format!("none of the {count} registered workers is allowed for this request"))
}
