//! Hash, walk, choose, book, predict, write down: as one call.

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use super::ask::{Ask, Prompt};
use super::busy::{BusyGate, BusyTable};
use super::config::{Overlap, SelectorConfig};
use super::explain::log;
use super::journal::Journal;
use super::manual::Manual;
use super::outbox::{BookingName, Outbox, Teller, Tiding};
use super::record::Record;
use super::remote::Remote;
use super::reservation::{Line, Reservation};
use crate::catalog::ModelIndex;
use crate::clock::Clock;
use crate::error::Result;
use crate::ids::Worker;
use crate::index::{Match, Matches};
use crate::load::{LoadTotals, WorkerChange, WorkerLoad};
use crate::policy::{Decision, Policy, Reason, Terms};
use crate::router::{RouteOverride, RouteRequest, Router};

/// The index is told the time before a prediction when that is longer ago, in milliseconds.
const ADVANCE_INTERVAL_MS: u64 = 50;

#[derive(Default)]
struct Scratch {
    matches: Matches,
    overlaps: Vec<(Worker, u32)>,
    predictions: Vec<(Worker, u32)>,
    terms: Vec<Terms>,
    passed_over: RefCell<Vec<Terms>>,
}

thread_local! {
    // Buffers of the walk and of the decision, reused by every selection of the thread.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Which worker was selected, and the least that callers want to know about why.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Selection {
    /// The worker.
    pub worker: Worker,
    /// Leading blocks of the prompt that it holds on its device; without events, those predicted.
    pub overlap_blocks: u32,
    /// Leading blocks beyond these that it was credited with because the prompt was sent there lately.
    pub predicted_blocks: u32,
    /// Leading blocks that the best worker of all holds, whether it could take the request or not.
    pub best_blocks: u32,
    /// Why this one.
    pub reason: Reason,
    /// How many were equally good.
    pub ties: usize,
    /// By how much the next one is dearer.
    pub margin: Option<f64>,
}

/// What a request would make of a worker's load.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PotentialLoad {
    /// The worker.
    pub worker: Worker,
    /// Prompt tokens to prefill there, the request's uncached ones included.
    pub potential_prefill_tokens: u64,
    /// Distinct blocks in use there, the request's included.
    pub potential_decode_blocks: u64,
    /// Requests there now.
    pub active_requests: u32,
    /// Leading blocks of the prompt that it was credited with.
    pub overlap_blocks: u32,
}

/// Selects workers for one model.
///
/// # Consistency
/// Every selection sees every booking, first token, end, report and threshold that returned before it,
/// and what the index knew a moment before; predictions of selections that returned before it included.
pub struct Selector {
    pub(super) model: Arc<ModelIndex>,
    pub(super) name: Arc<str>,
    pub(super) router: Arc<Router>,
    overlap: Overlap,
    /// Who is too busy.
    pub busy: BusyTable,
    /// Past decisions.
    pub journal: Arc<Journal>,
    pub(super) manual: Manual,
    pub(super) remote: Remote,
    teller: Teller,
    pub(super) clock: Arc<dyn Clock>,
    /// When the index was last told the time.
    advanced_ms: AtomicU64,
    pub(super) workers: Mutex<Vec<Worker>>,
}

impl Selector {
    /// A selector over `model`, without workers.
    ///
    /// # Errors
    /// `Config` or `InvalidArgument`, naming the first field that is out of range.
    pub fn new(
        config: SelectorConfig,
        model: Arc<ModelIndex>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self> {
        config.validate()?;
        Ok(Self {
            name: model.key.model_name.as_str().into(),
            model,
            router: Arc::new(Router::new(config.router, Arc::clone(&clock))?),
            overlap: config.overlap,
            busy: BusyTable::new(config.thresholds)?,
            journal: Arc::new(Journal::new(config.journal_bytes)),
            manual: Manual::default(),
            remote: Remote::default(),
            teller: Teller::new(Arc::default()),
            clock,
            advanced_ms: AtomicU64::new(0),
            workers: Mutex::default(),
        })
    }

    /// Keep decisions in `journal` instead of one of its own: several models share it.
    pub fn with_journal(mut self, journal: Arc<Journal>) -> Self {
        self.journal = journal;
        self
    }

    /// Tell bookings to `outbox` instead of one of its own.
    pub fn with_outbox(mut self, outbox: Arc<Outbox>) -> Self {
        self.teller = Teller::new(outbox);
        self
    }

    /// Where its bookings are told, once that is turned on.
    pub fn outbox(&self) -> &Arc<Outbox> {
        &self.teller.outbox
    }

    /// Its index.
    pub fn model(&self) -> &Arc<ModelIndex> {
        &self.model
    }

    /// The policy that chooses.
    pub fn policy(&self) -> Policy {
        self.router.config().policy
    }

    /// Tokens in a block; 0 while no engine has told.
    pub fn block_size(&self) -> u32 {
        let size = self.model.block_size().unwrap_or(0);
        if size > 0 && self.router.block_size() == 0 {
            // Conflict means that another thread was first, with the same index's size.
            let _ = self.router.set_block_size(size);
        }
        size
    }

    /// Hash a prompt for [`select`](Self::select).
    ///
    /// # Cost
    /// O(tokens).
    pub fn prompt(
        &self,
        tokens: &[u32],
        lora_name: Option<&str>,
        cache_salt: Option<&str>,
    ) -> Prompt {
        let seed = self.model.seed(lora_name, cache_salt);
        Prompt::of_tokens(tokens, self.block_size(), seed)
    }

    /// Make `workers` the workers to select from. What is known of others is forgotten: their
    /// requests, reports, blocks and predictions.
    ///
    /// # Errors
    /// `InvalidArgument` for more than [`crate::load::MAX_WORKERS`]; nothing changes then.
    pub fn set_workers(&self, workers: &[Worker]) -> Result<WorkerChange> {
        let mut known = self.workers.lock();
        let change = self.router.set_workers(workers)?;
        self.busy.set_workers(workers);
        let mut wanted = workers.to_vec();
        wanted.sort_unstable();
        for worker in known.iter().filter(|worker| wanted.binary_search(worker).is_err()) {
            self.model.index.remove_worker(*worker);
        }
        *known = wanted;
        drop(known);
        self.forget_gone();
        self.forget_gone_remote();
        Ok(change)
    }

    /// Select a worker and book the request there.
    ///
    /// # Errors
    /// `InvalidArgument` for an empty prompt or an override out of range; `NoWorker` when none is
    /// registered or allowed, or the pinned one is not; `AllBusy` when all of these are busy;
    /// `Overloaded` at the limit of bookings. Nothing is booked then.
    ///
    /// # Cost
    /// O(blocks + workers) beside the walk; a write to the index where predictions are on.
    pub fn select(&self, ask: &Ask<'_>) -> Result<(Reservation, Selection)> {
        SCRATCH.with_borrow_mut(|scratch| {
            self.walk(ask, scratch);
            let Scratch { matches, overlaps, predictions, terms, passed_over } = scratch;
            let gate = BusyGate { table: &self.busy, passed_over };
            let allowed = |worker| is_allowed(ask, worker);
            let request = self.request(ask, overlaps, predictions, &allowed, &gate);
            let (booking, decision) =
                self.router.route(&request, terms).map_err(|error| self.explain(ask, error))?;
            log(&self.model.key.model_name, ask, &decision);
            let selection = self.selection(&decision, matches);
            self.predict(ask, &selection);
            let line = ask.request_id.filter(|_| self.journal.is_on()).map(|id| {
                let record = self.record(id, ask, &decision, matches, &passed_over.borrow());
                Line {
                    journal: Arc::clone(&self.journal),
                    clock: Arc::clone(&self.clock),
                    number: self.journal.push(record),
                    has_first_token: AtomicBool::new(false),
                }
            });
            let outbox = &self.teller.outbox;
            let told = outbox.is_on().then(|| {
                let name = self.teller.name(booking.request());
                outbox.added(self.tiding(name, ask, &selection));
                (Arc::clone(outbox), name)
            });
            Ok((Reservation::new(booking, line, told), selection))
        })
    }

    /// The selection that would be made now, with all that goes into it; nothing is booked, predicted
    /// or kept. Asking twice gives the same answer twice.
    ///
    /// # Errors
    /// As [`select`](Self::select), but for `Overloaded`.
    pub fn preview(&self, ask: &Ask<'_>) -> Result<(Selection, Record)> {
        SCRATCH.with_borrow_mut(|scratch| {
            self.walk(ask, scratch);
            let Scratch { matches, overlaps, predictions, terms, passed_over } = scratch;
            let gate = BusyGate { table: &self.busy, passed_over };
            let allowed = |worker| is_allowed(ask, worker);
            let request = self.request(ask, overlaps, predictions, &allowed, &gate);
            let decision =
                self.router.preview(&request, terms).map_err(|error| self.explain(ask, error))?;
            let id = ask.request_id.unwrap_or_default();
            let record = self.record(id, ask, &decision, matches, &passed_over.borrow());
            Ok((self.selection(&decision, matches), record))
        })
    }

    /// What the request would make of every allowed worker's load, in worker order; changes nothing.
    /// Empty without workers.
    ///
    /// # Errors
    /// `InvalidArgument` for an empty prompt or an override out of range.
    pub fn potential_loads(&self, ask: &Ask<'_>) -> Result<Vec<PotentialLoad>> {
        SCRATCH.with_borrow_mut(|scratch| {
            self.walk(ask, scratch);
            let Scratch { overlaps, predictions, terms, passed_over, .. } = scratch;
            let gate = BusyGate { table: &self.busy, passed_over };
            let allowed = |worker| is_allowed(ask, worker);
            let request = self.request(ask, overlaps, predictions, &allowed, &gate);
            self.router.potential(&request, terms)?;
            let load = |terms: &Terms| PotentialLoad {
                worker: terms.worker,
                potential_prefill_tokens: terms.prefill_tokens,
                potential_decode_blocks: terms.decode_blocks,
                active_requests: terms.active_requests,
                overlap_blocks: terms.overlap_blocks,
            };
            Ok(terms.iter().map(load).collect())
        })
    }

    /// Load of every worker as booked here, in worker order.
    pub fn loads(&self) -> Vec<WorkerLoad> {
        self.router.loads()
    }

    /// Sums over all workers.
    pub fn totals(&self) -> LoadTotals {
        self.router.totals()
    }

    /// Let go of what is too old: bookings of which nothing was heard, and predictions. Returns how many
    /// bookings. Call it on a timer.
    pub fn tick(&self) -> usize {
        let now_ms = self.clock.now_ms();
        self.touch_remote(now_ms);
        let expired = self.router.expire();
        if !expired.is_empty() {
            self.forget_gone();
            self.forget_gone_remote();
            for gone in &expired {
                self.teller.outbox.freed(self.teller.name(gone.request));
            }
        }
        self.advanced_ms.store(now_ms, Ordering::Relaxed);
        self.model.index.advance_to(now_ms);
        expired.len()
    }

    fn tiding(&self, name: BookingName, ask: &Ask<'_>, selection: &Selection) -> Tiding {
        let is_tracked = self.router.config().track_active_blocks && ask.prompt.block_size > 0;
        Tiding::Added {
            name,
            worker: selection.worker,
            hashes: is_tracked.then(|| ask.prompt.sequence_hashes.as_slice().into()),
            isl_tokens: ask.prompt.isl_tokens,
            overlap_blocks: selection.overlap_blocks + selection.predicted_blocks,
        }
    }

    fn weight(&self, overrides: &RouteOverride) -> f64 {
        overrides.overlap_score_weight.unwrap_or(self.router.config().overlap_score_weight)
    }

    /// What workers hold of the prompt. Without weight nobody asks.
    fn walk(&self, ask: &Ask<'_>, scratch: &mut Scratch) {
        scratch.overlaps.clear();
        scratch.predictions.clear();
        scratch.passed_over.borrow_mut().clear();
        if !self.uses_index(ask) {
            scratch.matches = Matches::new();
            return;
        }
        self.model.index.find_matches(&ask.prompt.locals, &mut scratch.matches);
        if let Some(overlaps) = ask.overlaps {
            scratch.matches.set_device(overlaps);
        }
        for found in scratch.matches.as_slice() {
            if found.device > 0 {
                scratch.overlaps.push((found.worker, found.device));
            }
            if found.predicted > found.device && self.overlap != Overlap::Events {
                scratch.predictions.push((found.worker, found.predicted));
            }
        }
    }

    /// Whether what workers hold of `prompt` has a part in the decision.
    pub fn uses_overlaps(&self, overrides: &RouteOverride, prompt: &Prompt) -> bool {
        let is_asked = self.policy() == Policy::Kv && self.weight(overrides) > 0.0;
        is_asked && !prompt.locals.is_empty()
    }

    fn uses_index(&self, ask: &Ask<'_>) -> bool {
        self.uses_overlaps(&ask.overrides, ask.prompt)
    }

    fn request<'a>(
        &self,
        ask: &Ask<'a>,
        overlaps: &'a [(Worker, u32)],
        predictions: &'a [(Worker, u32)],
        allowed: &'a dyn Fn(Worker) -> bool,
        gate: &'a BusyGate<'a>,
    ) -> RouteRequest<'a> {
        let is_restricted = ask.allowed.is_some() || ask.pin.is_some();
        RouteRequest {
            isl_tokens: ask.prompt.isl_tokens,
            sequence_hashes: &ask.prompt.sequence_hashes,
            overlaps,
            predictions,
            allowed: is_restricted.then_some(allowed),
            gate: if self.busy.is_any_set() { Some(gate) } else { None },
            overrides: ask.overrides,
        }
    }

    /// The chosen worker will hold the prompt, unless it does already.
    fn predict(&self, ask: &Ask<'_>, selection: &Selection) {
        let Prompt { locals, seed, .. } = ask.prompt;
        let is_held = self.overlap != Overlap::Predictions
            && selection.overlap_blocks as usize == locals.len();
        // One whose events nobody hears may keep nothing at all: it earns no credit by guesses either.
        let is_heard = self.overlap == Overlap::Predictions
            || self.model.workers().binary_search(&selection.worker).is_ok();
        if self.overlap == Overlap::Events || is_held || !is_heard || !self.uses_index(ask) {
            return;
        }
        let now_ms = self.clock.now_ms();
        // Relaxed: a time that is told twice or a little late does no harm.
        if now_ms.saturating_sub(self.advanced_ms.load(Ordering::Relaxed)) >= ADVANCE_INTERVAL_MS {
            self.advanced_ms.store(now_ms, Ordering::Relaxed);
            self.model.index.advance_to(now_ms);
        }
        self.model.index.predict(selection.worker, *seed, locals);
    }

    /// What is told of an overlap: how much of it is held, and how much beyond is a guess. Without
    /// events, guesses are all there is.
    pub(super) fn told(&self, terms: &Terms) -> (u32, u32) {
        match self.overlap {
            Overlap::Predictions => (terms.overlap_blocks, 0),
            _ => (terms.overlap_blocks - terms.predicted_blocks, terms.predicted_blocks),
        }
    }

    pub(super) fn selection(&self, decision: &Decision<'_>, matches: &Matches) -> Selection {
        let (overlap_blocks, predicted_blocks) = self.told(decision.terms());
        let best = |blocks: fn(&Match) -> u32| matches.as_slice().iter().map(blocks).max();
        let best = match self.overlap {
            Overlap::Predictions => best(|found| found.predicted),
            _ => best(|found| found.device),
        };
        Selection {
            worker: decision.worker,
            overlap_blocks,
            predicted_blocks,
            best_blocks: best.unwrap_or(0),
            reason: decision.reason,
            ties: decision.ties,
            margin: decision.margin,
        }
    }
}

impl fmt::Debug for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Selector")
            .field("model", &self.model.key)
            .field("router", &self.router)
            .field("overlap", &self.overlap)
            .finish_non_exhaustive()
    }
}

fn is_allowed(ask: &Ask<'_>, worker: Worker) -> bool {
    ask.pin.is_none_or(|pin| pin.fits(worker)) && ask.allowed.is_none_or(|allowed| allowed(worker))
}
