//! The policies of a router: the deciding one, shadows, and their events.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::ids::Worker;
use crate::policy::{
    Affinity, Candidate, CandidateCost, Candidates, Choice, Context, Desk, EngineMetrics, Finished,
    Policy, RoutePolicy, Sample, Shadow, Terms, Ticket, model_of,
};
use crate::select::ask::Ask;

/// The policies of a router. Routers may share them.
#[derive(Debug, Clone)]
pub struct Policies {
    /// Chooses the worker.
    pub active: Arc<dyn RoutePolicy>,
    /// Run alongside the deciding one without deciding.
    pub shadows: Vec<Arc<Shadow>>,
    /// Keeps sessions on their workers, whichever policy chooses.
    pub affinity: Option<Arc<Affinity>>,
}

impl Default for Policies {
    fn default() -> Self {
        Self { active: Arc::new(Policy::default()), shadows: Vec::new(), affinity: None }
    }
}

impl Policies {
    /// Whether any of them needs more of a request than its length and the overlaps.
    pub fn need_facts(&self) -> bool {
        self.active.built_in().is_none() || !self.shadows.is_empty()
    }

    /// The deciding one, then the shadows.
    pub(in crate::select) fn each(&self) -> impl Iterator<Item = &dyn RoutePolicy> {
        std::iter::once(&*self.active).chain(self.shadows.iter().map(|shadow| shadow.policy()))
    }

    /// What keeps each of them from deciding as it should at the moment, as text for operators.
    pub fn troubles(&self) -> impl Iterator<Item = String> {
        self.each().filter_map(|policy| policy.trouble())
    }

    /// Whether any of them uses estimates of the queue.
    pub(super) fn estimates_queue(&self) -> bool {
        self.each().any(|policy| policy.estimates_queue())
    }

    /// The desk that asks the deciding policy in advance, if it is outside the core.
    pub fn desk(&self) -> Option<&Arc<Desk>> {
        self.active.desk()
    }

    /// Reports every counter of the deciding policy and of the shadows, and what the former knows
    /// at `now_ms` on the router's clock.
    pub fn samples(&self, now_ms: u64, visit: &mut dyn FnMut(Sample<'_>)) {
        self.active.samples(now_ms, visit);
        self.shadows.iter().for_each(|shadow| shadow.samples(visit));
        if let Some(affinity) = &self.affinity {
            affinity.samples(visit);
        }
    }

    pub(super) fn prepare(&self, context: &Context<'_>) -> crate::error::Result<()> {
        for shadow in &self.shadows {
            // A refusal is counted when the request is decided.
            let _refused = shadow.policy().prepare(context);
        }
        self.active.prepare(context)
    }

    pub(super) fn routed(&self, context: &Context<'_>, found: &Candidates<'_>, choice: &Choice) {
        self.active.routed(context, found, choice);
        for shadow in &self.shadows {
            let _wanted = shadow.observe(context, found, choice);
        }
    }
}

/// A request's actual usage, as far as its engine reports it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub input_tokens: Option<u64>,
    /// Of these, tokens that the engine had cached.
    pub cached_tokens: Option<u64>,
    /// Tokens that were generated.
    pub output_tokens: Option<u64>,
}

impl Usage {
    /// Limits the values to what is plausible, because engines and clients send them and counters
    /// add them up. No prompt or answer has more than 2^32 tokens, and reused tokens can't exceed
    /// the prompt.
    pub fn plausible(self) -> Self {
        let most = u64::from(u32::MAX);
        let bounded = |tokens: Option<u64>, most: u64| tokens.map(|tokens| tokens.min(most));
        let input_tokens = bounded(self.input_tokens, most);
        Self {
            input_tokens,
            cached_tokens: bounded(self.cached_tokens, input_tokens.unwrap_or(most)),
            output_tokens: bounded(self.output_tokens, most),
        }
    }

    /// These values, with gaps filled from `earlier`.
    pub fn or(self, earlier: Self) -> Self {
        Self {
            input_tokens: self.input_tokens.or(earlier.input_tokens),
            cached_tokens: self.cached_tokens.or(earlier.cached_tokens),
            output_tokens: self.output_tokens.or(earlier.output_tokens),
        }
    }
}

/// Data about a booked request for policies at its end.
#[derive(Debug)]
pub(crate) struct Tail {
    pool: Box<str>,
    user: Option<Box<str>>,
    prompt_bytes: usize,
    isl_tokens: u64,
    routed_at_ms: u64,
    /// Time of the first token, from 1 on; 0 before it.
    first_token_ms: AtomicU64,
    usage: Mutex<Usage>,
    ticket: Option<Ticket>,
}

impl Tail {
    pub fn new(ask: &Ask<'_>, routed_at_ms: u64, ticket: Option<Ticket>) -> Self {
        Self {
            pool: ask.known.pool.into(),
            user: ask.user.map(Box::from),
            prompt_bytes: ask.text.len(),
            isl_tokens: ask.prompt.isl_tokens,
            routed_at_ms,
            first_token_ms: AtomicU64::new(0),
            usage: Mutex::default(),
            ticket,
        }
    }

    pub fn first_token(&self, now_ms: u64) {
        // Relaxed: it is read after all others have released the booking. The first value counts.
        let none = self.first_token_ms.load(Ordering::Relaxed) == 0;
        if none {
            self.first_token_ms.store(now_ms.max(1), Ordering::Relaxed);
        }
    }

    pub fn used(&self, usage: Usage) {
        let mut known = self.usage.lock();
        *known = usage.or(*known);
    }

    /// A request without an answer used nothing; without a report of the engine, it used its
    /// prompt.
    pub fn finished(&self, worker: Worker, now_ms: u64) -> Finished<'_> {
        let usage = *self.usage.lock();
        let first_token_ms = match self.first_token_ms.load(Ordering::Relaxed) {
            0 => None,
            at_ms => Some(at_ms.saturating_sub(self.routed_at_ms)),
        };
        let prefilled = if first_token_ms.is_some() { self.isl_tokens } else { 0 };
        Finished {
            model: model_of(&self.pool),
            pool: &self.pool,
            user: self.user.as_deref(),
            worker,
            prompt_bytes: self.prompt_bytes,
            routed_at_ms: self.routed_at_ms,
            now_ms,
            input_tokens: usage.input_tokens.unwrap_or(prefilled),
            cached_tokens: usage.cached_tokens.unwrap_or(0),
            output_tokens: usage.output_tokens.unwrap_or(0),
            first_token_ms,
            ticket: self.ticket.as_ref(),
        }
    }
}

/// The candidates of a decision and their costs, in memory that callers reuse.
#[derive(Debug, Default)]
pub struct Considered {
    pub(super) candidates: Vec<Candidate>,
    pub(super) costs: Vec<CandidateCost>,
    pub(super) metrics: Vec<EngineMetrics>,
    /// As [`Decision::passed_over`](crate::policy::Decision::passed_over).
    pub(super) passed_over: Vec<(Terms, bool)>,
}

impl Considered {
    /// The candidates as policies see them.
    pub(super) fn found(&self) -> Candidates<'_> {
        Candidates { list: &self.candidates, metrics: &self.metrics }
    }
}
