//! The policy interface: inputs, outputs and obligations.

use std::fmt;
use std::sync::{Arc, OnceLock};

use rand::RngCore;

use super::cost::{Candidate, CandidateCost, Policy, RequestTerms, Stage};
use super::decision::Choice;
use super::desk::Desk;
use super::engine::EngineMetrics;
use super::price::marks::Marks;
use super::question::Advice;
use crate::error::Result;
use crate::ids::Worker;

/// A way to choose a worker: one file, and one line in the [registry](super::registry).
///
/// Calls for one request come in this order: [`prepare`](Self::prepare) without any lock,
/// [`choose`](Self::choose) under the router's lock, [`routed`](Self::routed) once the request is
/// booked, [`finished`](Self::finished) when it has ended, for whatever reason. A preview makes
/// only the first two calls, and must not change what a later decision sees.
///
/// # Consistency
/// Calls for different requests come from many threads at once. A stateful policy keeps its state
/// behind its own lock, never calls back, and does not block.
pub trait RoutePolicy: fmt::Debug + Send + Sync {
    /// The name in configuration, logs and metrics.
    fn name(&self) -> &str;

    /// The policies that this one combines; by default they receive all of its events.
    fn members(&self) -> &[Arc<dyn RoutePolicy>] {
        &[]
    }

    /// Whether the prompt's tokens improve its choice: it uses overlaps, sequence hashes or token
    /// ids.
    fn needs_tokens(&self) -> bool {
        self.members().iter().any(|one| one.needs_tokens())
    }

    /// Whether it needs the prompt's text or token ids, which for a long chat cost as much as
    /// forwarding it.
    fn needs_text(&self) -> bool {
        let members = self.members();
        members.is_empty() || members.iter().any(|one| one.needs_text())
    }

    /// The desk that asks this policy before the router's lock is taken, if it is outside the core.
    fn desk(&self) -> Option<&Arc<Desk>> {
        None
    }

    /// Why it does not decide as it should at the moment, as text for operators.
    fn trouble(&self) -> Option<String> {
        self.members().iter().find_map(|one| one.trouble())
    }

    /// This policy, if it is built in: it has no state, and needs no more of a request than its
    /// length and the overlaps.
    fn built_in(&self) -> Option<Policy> {
        None
    }

    /// The built-in policy that made `choice`: this one, or the one that stands in for it, because
    /// it is outside the core and gave no choice.
    fn stand_in(&self, _choice: &Choice) -> Option<Policy> {
        self.built_in()
    }

    /// Work to do before the router's lock is taken: tokenizing, hashing.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::error::Error) for a request that this policy can't route;
    /// names the field.
    fn prepare(&self, context: &Context<'_>) -> Result<()> {
        self.members().iter().try_for_each(|one| one.prepare(context))
    }

    /// Chooses among `candidates`; `None` only if there are none. Replaces `costs` with the cost of
    /// each candidate, in order.
    fn choose(
        &self,
        context: &Context<'_>,
        candidates: &Candidates<'_>,
        costs: &mut Vec<CandidateCost>,
        rng: &mut dyn RngCore,
    ) -> Option<Choice>;

    /// Whether [`scores`](Self::scores) is supported: policies that can't be combined with others
    /// have no scores.
    fn is_scorer(&self) -> bool {
        false
    }

    /// Scores every candidate, for a weighted choice by several policies. Replaces `scores` with
    /// one entry per candidate; `None` if unknown. Returns `None` if this policy has no scores, or
    /// none for this request.
    fn scores(
        &self,
        _context: &Context<'_>,
        _candidates: &Candidates<'_>,
        _scores: &mut Vec<Option<f64>>,
        _rng: &mut dyn RngCore,
    ) -> Option<Polarity> {
        None
    }

    /// How long the prefill of `tokens` prompt tokens in `pool` takes, in milliseconds, when its
    /// end is not observed; it counts as queued for that long. `None`: it counts until the answer
    /// ends.
    fn unseen_prefill_ms(&self, pool: &str, tokens: u64) -> Option<u64> {
        self.members().iter().find_map(|one| one.unseen_prefill_ms(pool, tokens))
    }

    /// Whether it uses [`ActiveLoad::queued_tokens`](crate::load::ActiveLoad::queued_tokens), which the load table then maintains.
    fn estimates_queue(&self) -> bool {
        self.members().iter().any(|one| one.estimates_queue())
    }

    /// The request was routed to `candidates.list[choice.index]`, by this policy or by one that it
    /// shadows.
    fn routed(&self, context: &Context<'_>, candidates: &Candidates<'_>, choice: &Choice) {
        self.members().iter().for_each(|one| one.routed(context, candidates, choice));
    }

    /// The request has ended; reports its actual usage.
    fn finished(&self, finished: &Finished<'_>) {
        self.members().iter().for_each(|one| one.finished(finished));
    }

    /// Whether to call [`evicted`](Self::evicted) and [`cleared`](Self::cleared).
    fn watches_caches(&self) -> bool {
        self.members().iter().any(|one| one.watches_caches())
    }

    /// A worker's engine evicted blocks with these local hashes from its device.
    fn evicted(&self, worker: Worker, local_hashes: &[u64]) {
        self.members().iter().for_each(|one| one.evicted(worker, local_hashes));
    }

    /// A worker's device cache was cleared.
    fn cleared(&self, worker: Worker) {
        self.members().iter().for_each(|one| one.cleared(worker));
    }

    /// A worker has left: drop its state.
    fn removed(&self, worker: Worker) {
        self.members().iter().for_each(|one| one.removed(worker));
    }

    /// The last worker of a pool has left: drop what is known about its traffic.
    fn closed(&self, pool: &str) {
        self.members().iter().for_each(|one| one.closed(pool));
    }

    /// Reports every counter of this policy, for the metrics, and what it knows at `now_ms`.
    fn samples(&self, now_ms: u64, visit: &mut dyn FnMut(Sample<'_>)) {
        self.members().iter().for_each(|one| one.samples(now_ms, visit));
    }
}

/// One request, as policies see it.
#[derive(Debug, Default)]
pub struct Context<'a> {
    /// Length, block size and weights; before `choose` only the length.
    pub request: RequestTerms,
    /// The requested model.
    pub model: &'a str,
    /// The workers that compete for it; see [`pool_of`].
    pub pool: &'a str,
    /// Text of the prompt in UTF-8, without the surrounding JSON; empty if no policy needs it.
    pub prompt: &'a [u8],
    /// The model's own token ids; empty while unknown.
    pub token_ids: &'a [u32],
    /// Sequence hashes of the prompt's full blocks, in order; empty while unknown.
    pub sequence_hashes: &'a [u64],
    /// Local hashes of the same blocks; empty while unknown.
    pub local_hashes: &'a [u64],
    /// Whether the candidates' overlaps come from engines' events, which are better than a policy's
    /// guess.
    pub is_indexed: bool,
    /// Whether the answer is not streamed, so that its first token is not observed.
    pub is_whole: bool,
    /// Whether the same request was routed before, to a worker that failed.
    pub is_retry: bool,
    /// The request's user; `None` and `""` without one.
    pub user: Option<&'a str>,
    /// The session of the request.
    pub session: Session<'a>,
    /// Advice of a policy outside the core; `None` if it was not asked or did not answer.
    pub advice: Option<&'a Advice>,
    /// Now, on the router's clock.
    pub now_ms: u64,
    /// Results that policies share for this request.
    pub memo: Memo,
}

/// The name of the workers that compete for the requests of a model and tenant; no other pair has
/// it.
pub fn pool_of(model: &str, tenant: &str) -> String {
    format!("{model}\n{tenant}")
}

/// The model and tenant of a pool; a name alone is a model of the tenant `default`.
fn parts_of(pool: &str) -> (&str, &str) {
    pool.split_once('\n').unwrap_or((pool, "default"))
}

/// The model of a pool.
pub(crate) fn model_of(pool: &str) -> &str {
    parts_of(pool).0
}

/// The name of a pool in metrics: its model, with the tenant unless that is `default`.
pub(super) fn pool_label(pool: &str) -> String {
    match parts_of(pool) {
        (model, "default") => model.to_owned(),
        (model, tenant) => format!("{model}:{tenant}"),
    }
}

impl<'a> Context<'a> {
    /// A request to `pool` of which only the terms are known.
    pub fn new(request: RequestTerms, pool: &'a str, now_ms: u64) -> Self {
        Self { request, model: model_of(pool), pool, now_ms, ..Self::default() }
    }
}

/// Links a request to earlier ones.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Session<'a> {
    /// The worker named by the client, resolved by the caller; `None` if there is none or it is
    /// unknown.
    pub worker: Option<Worker>,
    /// A key that all requests of the session share, at most
    /// [`MAX_KEY_BYTES`](super::session::MAX_KEY_BYTES) bytes; `None` and `""` without one.
    pub key: Option<&'a str>,
}

/// Values computed once per request, by the first policy that needs them.
#[derive(Debug, Default)]
pub struct Memo {
    /// Hashes of blocks, and how they are computed.
    prefix: OnceLock<(u64, Vec<u64>)>,
    marks: OnceLock<Marks>,
    ticket: OnceLock<Ticket>,
}

impl Memo {
    /// The result of `make`, cached for the first `maker`; other makers compute theirs with every
    /// call. `maker` identifies how the hashes are computed.
    pub fn hashes(&self, maker: u64, make: impl Fn() -> Vec<u64>) -> std::borrow::Cow<'_, [u64]> {
        let (kept, hashes) = self.prefix.get_or_init(|| (maker, make()));
        if *kept == maker { hashes.into() } else { make().into() }
    }

    /// The marks of the prompt with these sequence hashes, cached.
    pub fn marks(&self, sequence_hashes: &[u64]) -> &Marks {
        self.marks.get_or_init(|| Marks::of(sequence_hashes))
    }

    /// Keeps `ticket` for the end of the request; only the first one is kept.
    pub fn set_ticket(&self, ticket: Ticket) {
        // The policy that chooses is called first.
        let _kept = self.ticket.set(ticket);
    }

    /// The ticket, if a policy set one.
    pub fn into_ticket(self) -> Option<Ticket> {
        self.ticket.into_inner()
    }
}

/// Values computed when a request was routed, returned to the policy at its end.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Ticket {
    /// Prefixes of the prompt that count as wanted while the request runs.
    pub marks: Marks,
    /// Prefill tokens between the request and its first token.
    pub work_tokens: f64,
    /// Of these, its own.
    pub own_tokens: f64,
    /// Its number among the requests of its pool.
    pub number: u64,
    /// Hash of the prompt's last full block; `None` while unknown.
    pub tail: Option<u64>,
    /// Whether its answer is not streamed.
    pub is_whole: bool,
    /// The part of the request that the worker does.
    pub stage: Stage,
}

/// The workers that may take a request, with their engines' reports.
#[derive(Debug, Clone, Copy)]
pub struct Candidates<'a> {
    /// The workers, in worker order.
    pub list: &'a [Candidate],
    /// One entry per candidate, or empty if engines report nothing.
    pub metrics: &'a [EngineMetrics],
}

impl<'a> Candidates<'a> {
    /// Candidates without engine metrics.
    pub const fn new(list: &'a [Candidate]) -> Self {
        Self { list, metrics: &[] }
    }

    /// The number of candidates.
    pub const fn len(&self) -> usize {
        self.list.len()
    }

    /// Whether there are no candidates.
    pub const fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The engine report of candidate `index`; empty if there is none.
    pub fn metrics(&self, index: usize) -> EngineMetrics {
        self.metrics.get(index).copied().unwrap_or_default()
    }

    /// Active requests of candidate `index` as booked here.
    pub fn requests(&self, index: usize) -> u32 {
        self.list[index].load.requests
    }

    /// Requests on the engine of candidate `index`: its own count, or the bookings here if engines
    /// report nothing at all.
    pub fn running(&self, index: usize) -> f64 {
        match self.metrics.get(index) {
            Some(metrics) => metrics.running_requests.unwrap_or(0.0),
            None => f64::from(self.requests(index)),
        }
    }

    /// Fills `costs` with `cost`, the value that the policy minimizes, of each candidate.
    #[inline]
    pub fn fill(&self, costs: &mut Vec<CandidateCost>, mut cost: impl FnMut(usize) -> f64) {
        costs.clear();
        let priceless = |index| CandidateCost { cost: cost(index), ..CandidateCost::default() };
        costs.extend((0..self.list.len()).map(priceless));
    }
}

/// Whether high or low scores are better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Polarity {
    /// High scores.
    Most,
    /// Low scores.
    Least,
}

/// A request that has ended, with its actual usage.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Finished<'a> {
    /// The requested model.
    pub model: &'a str,
    /// As [`Context::pool`].
    pub pool: &'a str,
    /// The request's user.
    pub user: Option<&'a str>,
    /// The worker that served it.
    pub worker: Worker,
    /// Length of [`Context::prompt`], from which estimates were made.
    pub prompt_bytes: usize,
    /// When it was routed, on the router's clock.
    pub routed_at_ms: u64,
    /// Now, on the same clock.
    pub now_ms: u64,
    /// Tokens of the prompt, as the engine counted them.
    pub input_tokens: u64,
    /// Of these, tokens that the engine had cached.
    pub cached_tokens: u64,
    /// Tokens that were generated.
    pub output_tokens: u64,
    /// Time from the decision to the first token, or to the end of an unstreamed answer; `None`
    /// without an answer.
    pub first_token_ms: Option<u64>,
    /// The ticket that a policy set when the request was routed.
    pub ticket: Option<&'a Ticket>,
}

/// One counter or gauge of a policy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample<'a> {
    /// Name without the program's prefix; counters end in `_total`.
    pub name: &'a str,
    /// What it is, as a sentence without a full stop.
    pub help: &'static str,
    /// Label and its value; `("", "")` without a label.
    pub label: (&'a str, &'a str),
    /// The value.
    pub value: f64,
}

impl<'a> Sample<'a> {
    /// A sample without a label.
    pub const fn plain(name: &'a str, help: &'static str, value: f64) -> Self {
        Self { name, help, label: ("", ""), value }
    }
}
