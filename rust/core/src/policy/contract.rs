//! What a policy is told, what it answers and what it must keep to.

use std::fmt;
use std::sync::{Arc, OnceLock};

use rand::RngCore;

use super::cost::{ActiveLoad, Candidate, CandidateCost, RequestTerms};
use super::decision::Choice;
use super::desk::Desk;
use super::engine::EngineMetrics;
use super::price::marks::Marks;
use super::price::ticket::Ticket;
use super::question::Advice;
use super::sample::Sample;
use crate::error::{Error, Result};
use crate::ids::Worker;

/// A way to choose a worker: one file, and one line in the [registry](super::registry).
///
/// For one request the calls come in this order: [`prepare`](Self::prepare) without any lock,
/// [`choose`](Self::choose) under the router's lock, [`routed`](Self::routed) once the request is
/// booked, [`finished`](Self::finished) when it has ended, however it did. A preview makes the
/// first two only, and changes nothing that a later decision could see.
///
/// # Consistency
/// Calls for different requests come from many threads at once; a policy with state keeps it
/// behind a lock of its own, never calls back, and does not block.
pub trait RoutePolicy: fmt::Debug + Send + Sync {
    /// The name in configuration, logs and metrics.
    fn name(&self) -> &str;

    /// The policies that it is made of; they are told whatever it is told, unless it says otherwise.
    fn members(&self) -> &[Arc<dyn RoutePolicy>] {
        &[]
    }

    /// Whether it chooses better when the prompt's tokens are known: it goes by overlaps, sequence
    /// hashes or token ids.
    fn needs_tokens(&self) -> bool {
        self.members().iter().any(|one| one.needs_tokens())
    }

    /// Whether it is to be told the prompt's text, which for a long chat costs as much as forwarding it.
    fn needs_text(&self) -> bool {
        let members = self.members();
        members.is_empty() || members.iter().any(|one| one.needs_text())
    }

    /// Where this policy is asked before the router's lock is taken, when it is outside the core.
    fn desk(&self) -> Option<&Arc<Desk>> {
        None
    }

    /// Work that is worth doing before the router's lock is taken: tokenizing, hashing.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a request that this policy can't route; it names the field.
    fn prepare(&self, context: &Context<'_>) -> Result<()> {
        self.members().iter().try_for_each(|one| one.prepare(context))
    }

    /// Choose among `candidates`; `None` only when there are none. What each of them costs
    /// replaces what is in `costs`, in the same order.
    fn choose(
        &self,
        context: &Context<'_>,
        candidates: &Candidates<'_>,
        costs: &mut Vec<CandidateCost>,
        rng: &mut dyn RngCore,
    ) -> Option<Choice>;

    /// Whether [`scores`](Self::scores) can be asked for: policies that can't be weighed against
    /// others have none.
    fn is_scorer(&self) -> bool {
        false
    }

    /// Judge every candidate, for a weighted choice by several policies. One entry per candidate
    /// replaces what is in `scores`; `None` where nothing is known.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when this policy has no scores, or none for this request.
    fn scores(
        &self,
        _context: &Context<'_>,
        _candidates: &Candidates<'_>,
        _scores: &mut Vec<Option<f64>>,
        _rng: &mut dyn RngCore,
    ) -> Result<Polarity> {
        Err(Error::invalid(format!("policy {} has no scores that could be weighted", self.name())))
    }

    /// How long the prefill of `tokens` prompt tokens of `model` takes, in milliseconds, when nobody sees its
    /// end: it counts as queued for so long. `None`: it counts until the answer ends.
    fn unseen_prefill_ms(&self, _model: &str, _tokens: u64) -> Option<u64> {
        None
    }

    /// Whether it goes by [`ActiveLoad::queued_tokens`], which the load table then keeps apart.
    fn estimates_queue(&self) -> bool {
        false
    }

    /// The request was given to `candidates.list[choice.index]`, by this policy or by another one
    /// that it only watches.
    fn routed(&self, context: &Context<'_>, candidates: &Candidates<'_>, choice: &Choice) {
        self.members().iter().for_each(|one| one.routed(context, candidates, choice));
    }

    /// The request has ended; what it really used.
    fn finished(&self, finished: &Finished<'_>) {
        self.members().iter().for_each(|one| one.finished(finished));
    }

    /// Whether [`evicted`](Self::evicted) and [`cleared`](Self::cleared) are to be called.
    fn watches_caches(&self) -> bool {
        self.members().iter().any(|one| one.watches_caches())
    }

    /// A worker's engine evicted blocks with these local hashes from its device.
    fn evicted(&self, worker: Worker, local_hashes: &[u64], now_ms: u64) {
        self.members().iter().for_each(|one| one.evicted(worker, local_hashes, now_ms));
    }

    /// A worker's device cache is empty now.
    fn cleared(&self, worker: Worker) {
        self.members().iter().for_each(|one| one.cleared(worker));
    }

    /// A worker has gone: forget what was remembered of it.
    fn removed(&self, worker: Worker) {
        self.members().iter().for_each(|one| one.removed(worker));
    }

    /// Name every counter of this policy, for the metrics.
    fn samples(&self, visit: &mut dyn FnMut(Sample<'_>)) {
        self.members().iter().for_each(|one| one.samples(visit));
    }
}

/// One request, as policies see it.
#[derive(Debug)]
pub struct Context<'a> {
    /// Length, block size and weights.
    pub request: RequestTerms,
    /// The model that was asked for.
    pub model: &'a str,
    /// Text of the prompt, UTF-8, without the JSON around it; empty when nobody needs it.
    pub prompt: &'a [u8],
    /// The model's own token ids; empty while unknown.
    pub token_ids: &'a [u32],
    /// Sequence hashes of the prompt's full blocks, in order; empty while unknown.
    pub sequence_hashes: &'a [u64],
    /// Local hashes of the same blocks; empty while unknown.
    pub local_hashes: &'a [u64],
    /// Candidates' overlaps come from engines' events: what a policy guesses itself is worse.
    pub is_indexed: bool,
    /// The answer comes as a whole, so that nobody sees its first token.
    pub is_whole: bool,
    /// Whose request it is; `None` and `""` for nobody's.
    pub user: Option<&'a str>,
    /// What ties it to earlier requests.
    pub session: Session<'a>,
    /// What a policy outside the core said of it; `None` when it was not asked or did not answer.
    pub advice: Option<&'a Advice>,
    /// Now, on the router's clock.
    pub now_ms: u64,
    /// What policies have worked out about this request.
    pub memo: Memo,
}

impl<'a> Context<'a> {
    /// A request of `model` about which only its terms are known.
    pub fn new(request: RequestTerms, model: &'a str, now_ms: u64) -> Self {
        Self {
            request,
            model,
            prompt: &[],
            token_ids: &[],
            sequence_hashes: &[],
            local_hashes: &[],
            is_indexed: false,
            is_whole: false,
            user: None,
            session: Session::default(),
            advice: None,
            now_ms,
            memo: Memo::default(),
        }
    }
}

/// What ties a request to earlier ones.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Session<'a> {
    /// The worker that the client was told, resolved by the door; `None` without or when unknown.
    pub worker: Option<Worker>,
    /// A key that all requests of the session carry, at most
    /// [`MAX_KEY_BYTES`](super::session::MAX_KEY_BYTES) bytes; `None` and `""` for none.
    pub key: Option<&'a str>,
}

/// What is worked out once for a request, by whichever policy needs it first.
#[derive(Debug, Default)]
pub struct Memo {
    prefix: OnceLock<PrefixMemo>,
    marks: OnceLock<Marks>,
    ticket: OnceLock<Ticket>,
}

#[derive(Debug)]
struct PrefixMemo {
    maker: u64,
    hashes: Box<[u64]>,
}

impl Memo {
    /// The hashes that `make` gives, made once by the first `maker` to ask; another one makes its
    /// own with every call. `maker` identifies how they are made.
    pub fn hashes(&self, maker: u64, make: impl Fn() -> Vec<u64>) -> std::borrow::Cow<'_, [u64]> {
        let kept = self.prefix.get_or_init(|| PrefixMemo { maker, hashes: make().into() });
        if kept.maker == maker { kept.hashes.as_ref().into() } else { make().into() }
    }

    /// The marks of the prompt with these sequence hashes, made once.
    pub fn marks(&self, sequence_hashes: &[u64]) -> &Marks {
        self.marks.get_or_init(|| Marks::of(sequence_hashes))
    }

    /// Keep `ticket` for the end of the request; the first one stays.
    pub fn set_ticket(&self, ticket: Ticket) {
        // The policy that chooses is told first.
        let _kept = self.ticket.set(ticket);
    }

    /// The ticket, if a policy kept one.
    pub fn into_ticket(self) -> Option<Ticket> {
        self.ticket.into_inner()
    }
}

/// The workers that may take a request, and what their engines report.
#[derive(Debug, Clone, Copy)]
pub struct Candidates<'a> {
    /// The workers, in worker order.
    pub list: &'a [Candidate],
    /// One entry per candidate, or none at all where engines report nothing.
    pub metrics: &'a [EngineMetrics],
}

impl<'a> Candidates<'a> {
    /// Candidates without engine metrics.
    pub const fn new(list: &'a [Candidate]) -> Self {
        Self { list, metrics: &[] }
    }

    /// How many there are.
    pub const fn len(&self) -> usize {
        self.list.len()
    }

    /// Whether there is none.
    pub const fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// What the engine of candidate `index` reports; nothing where it reports nothing.
    pub fn metrics(&self, index: usize) -> EngineMetrics {
        self.metrics.get(index).copied().unwrap_or_default()
    }

    /// Active requests of candidate `index` as booked here; 0 for one the load table does not know.
    pub fn requests(&self, index: usize) -> u32 {
        self.list[index].load.map_or(0, |load| load.requests)
    }

    /// What candidate `index` is busy with; idle for one the load table does not know.
    pub fn load(&self, index: usize) -> ActiveLoad {
        self.list[index].load.unwrap_or_default()
    }

    /// Requests on the engine of candidate `index`: its own count, or what was booked here where
    /// engines report nothing at all.
    pub fn running(&self, index: usize) -> f64 {
        match self.metrics.get(index) {
            Some(metrics) => metrics.running_requests.unwrap_or(0.0),
            None => f64::from(self.requests(index)),
        }
    }

    /// Fill `costs`: `cost` says what the policy minimises of each candidate.
    #[inline]
    pub fn fill(&self, costs: &mut Vec<CandidateCost>, mut cost: impl FnMut(usize) -> f64) {
        costs.clear();
        let priceless = |index| CandidateCost { cost: cost(index), ..CandidateCost::default() };
        costs.extend((0..self.list.len()).map(priceless));
    }
}

/// Which scores are good.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Polarity {
    /// High ones.
    Most,
    /// Low ones.
    Least,
}

/// A request that has ended, and what it really used.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Finished<'a> {
    /// The model that was asked for.
    pub model: &'a str,
    /// Whose request it was.
    pub user: Option<&'a str>,
    /// Who served it.
    pub worker: Worker,
    /// Length of [`Context::prompt`]; what an estimate was made from.
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
    /// Time from the decision to the first token, or to the end of an answer that came as a whole; `None`
    /// without an answer.
    pub first_token_ms: Option<u64>,
    /// What a policy worked out when the request was routed.
    pub ticket: Option<&'a Ticket>,
}
