//! Hashes, walks, chooses, books, predicts and records, in one call.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::ask::{Ask, Known, Pin, Prompt};
use super::busy::BusyTable;
use super::config::{Overlap, QueueThreshold, SelectorConfig};
use super::draining::DrainTable;
use super::engines::EngineTable;
use super::manual::Manual;
use super::outbox::{BookingName, Outbox, Tiding};
use super::record::{CANDIDATES_KEPT, Journal, Record, Selection};
use super::remote::Remote;
use super::reservation::{Growth, Line, Reservation};
use super::reuse::ReuseTable;
use super::router::{Considered, Policies, RouteOverride, Router};
use crate::catalog::{ModelIndex, Reuse, Unheard};
use crate::clock::Clock;
use crate::error::Result;
use crate::hash::engine::NameKeys;
use crate::ids::Worker;
use crate::index::Matches;
use crate::load::{LoadTotals, WorkerLoad};
use crate::policy::{Terms, pool_of};

/// The index gets the current time before a prediction if its last update is older than this, in
/// milliseconds. A prediction's age counts from that update, so it may expire early by this much.
const ADVANCE_INTERVAL_MS: u64 = 50;

#[derive(Default)]
pub(super) struct Scratch {
    pub matches: Matches,
    exact: Vec<Reuse>,
    pub overlaps: Vec<(Worker, u32)>,
    pub predictions: Vec<(Worker, u32)>,
    tiers: Vec<(Worker, [u32; 2])>,
    considered: Considered,
}

thread_local! {
    // Buffers of the walk and of the decision, reused by every selection of the thread.
    pub(super) static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Assigns numbers to selectors.
static NEXT_SELECTOR: AtomicU64 = AtomicU64::new(1);

/// Selects workers for one model.
///
/// # Consistency
/// Every selection sees every booking, first token, end, report and threshold that returned before
/// it, and the index as of a moment before, including predictions of selections that returned
/// before it.
pub struct Selector {
    pub(super) model: Arc<ModelIndex>,
    pub(super) name: Arc<str>,
    pool: Box<str>,
    pub(super) router: Arc<Router>,
    pub(super) policy_name: Arc<str>,
    pub(super) overlap: Overlap,
    pub(super) queue: Option<QueueThreshold>,
    pub(super) logs_decisions: bool,
    /// Busy workers.
    pub busy: BusyTable,
    /// Draining workers.
    pub draining: DrainTable,
    /// The engines' own reports.
    pub engines: EngineTable,
    /// Comparison of engines' reuse with their events, and the resulting credit.
    pub reuse: ReuseTable,
    /// Past decisions.
    pub journal: Arc<Journal>,
    pub(super) manual: Mutex<Manual>,
    pub(super) remote: Mutex<Remote>,
    outbox: Arc<Outbox>,
    /// Its number among the selectors of the process.
    number: u64,
    pub(super) clock: Arc<dyn Clock>,
    /// When the index last got the current time.
    advanced_ms: AtomicU64,
    pub(super) workers: Mutex<Vec<Worker>>,
}

impl Selector {
    /// A selector over `model`, without workers, with deciding policies or shadows.
    ///
    /// # Errors
    /// `Config` or `InvalidArgument`, naming the first field that is out of range.
    pub fn with_policies(
        config: SelectorConfig,
        policies: Policies,
        model: Arc<ModelIndex>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self> {
        config.validate()?;
        let policy_name = policies.active.name().into();
        let watches = policies.each().any(|one| one.watches_caches());
        let watches = watches || config.overlap != Overlap::Predictions;
        let router = Arc::new(Router::with_policies(config.router, policies, Arc::clone(&clock))?);
        if watches {
            let router: Weak<Router> = Arc::downgrade(&router);
            model.watch(router);
        }
        Ok(Self {
            name: model.key.model_name.as_str().into(),
            pool: pool_of(&model.key.model_name, &model.key.tenant_id).into(),
            model,
            router,
            policy_name,
            engines: EngineTable::default(),
            reuse: ReuseTable::default(),
            overlap: config.overlap,
            queue: config.queue,
            logs_decisions: config.logs_decisions,
            busy: BusyTable::new(config.thresholds)?,
            draining: DrainTable::default(),
            journal: Arc::new(Journal::new(config.journal_bytes)),
            manual: Mutex::default(),
            remote: Mutex::default(),
            outbox: Arc::default(),
            // Relaxed: the numbers only have to be unique.
            number: NEXT_SELECTOR.fetch_add(1, Ordering::Relaxed),
            clock,
            advanced_ms: AtomicU64::new(0),
            workers: Mutex::default(),
        })
    }

    /// Uses `journal` instead of its own, to share it between models.
    pub fn with_journal(mut self, journal: Arc<Journal>) -> Self {
        self.journal = journal;
        self
    }

    /// Reports bookings to `outbox` instead of its own.
    pub fn with_outbox(mut self, outbox: Arc<Outbox>) -> Self {
        self.outbox = outbox;
        self
    }

    /// Receives its bookings, once it is turned on.
    pub fn outbox(&self) -> &Arc<Outbox> {
        &self.outbox
    }

    /// Its index.
    pub fn model(&self) -> &Arc<ModelIndex> {
        &self.model
    }

    /// The name of the deciding policy.
    pub fn policy_name(&self) -> &str {
        &self.policy_name
    }

    /// The deciding and shadow policies.
    pub fn policies(&self) -> &Policies {
        &self.router.policies
    }

    /// Whether prompts must be hashed: some policy uses tokens or caches.
    pub fn needs_tokens(&self) -> bool {
        self.router.policies.each().any(|one| one.needs_tokens())
    }

    /// Whether some policy needs more of a request than its tokens.
    pub fn needs_facts(&self) -> bool {
        self.router.policies.need_facts()
    }

    /// Whether some policy needs the prompt's text or its tokens themselves, besides their hashes.
    pub fn needs_text(&self) -> bool {
        self.router.policies.each().any(|one| one.needs_text())
    }

    /// Tokens in a block; 0 until an engine has reported it.
    pub fn block_size(&self) -> u32 {
        let size = self.model.block_size().unwrap_or(0);
        if size > 0 && self.router.block_size() != size {
            self.router.correct_block_size(size);
        }
        size
    }

    /// Hashes a prompt for [`select`](Self::select); `keys` separates it from others with the same
    /// tokens.
    ///
    /// # Cost
    /// O(tokens); for models with several cache groups one more digest per block.
    pub fn prompt(&self, tokens: &[u32], keys: &NameKeys<'_>) -> Prompt {
        let seed = self.model.seed(keys.lora.map(|(name, _)| name), keys.cache_salt);
        let locals = self.model.locals(tokens, keys);
        Prompt {
            isl_tokens: tokens.len() as u64,
            names: self.model.names(tokens, keys),
            ..Prompt::of_hashes(locals, self.block_size(), seed)
        }
    }

    /// The last worker has left for good: the policies drop what they know about its traffic.
    pub fn close(&self) {
        self.router.policies.each().for_each(|one| one.closed(&self.pool));
    }

    /// Sets the workers to select from. All state of others is dropped: their requests, reports,
    /// blocks and predictions.
    ///
    /// # Errors
    /// `Overloaded` for more than [`crate::load::MAX_WORKERS`]; nothing changes then.
    pub fn set_workers(&self, workers: &[Worker]) -> Result<()> {
        let mut known = self.workers.lock();
        let gone = self.router.set_workers(workers)?;
        self.busy.set_workers(workers);
        let mut wanted = workers.to_vec();
        wanted.sort_unstable();
        self.engines.keep(|worker| wanted.binary_search(&worker).is_ok());
        self.reuse.keep(|worker| wanted.binary_search(&worker).is_ok());
        self.router.removals.keep(|worker| wanted.binary_search(&worker).is_ok());
        for worker in gone {
            self.model.index.remove_worker(worker);
        }
        *known = wanted;
        drop(known);
        self.forget_gone();
        self.forget_gone_remote();
        Ok(())
    }

    /// Selects a worker and books the request there.
    ///
    /// # Errors
    /// `InvalidArgument` for an empty prompt or an override out of range; `NoWorker` if none is
    /// registered or allowed, or the pinned one is not; `AllBusy` if all of these are busy;
    /// `MustWait` if the caller can wait and none of these has room; `Overloaded` at the limit of
    /// bookings. Nothing is booked then.
    ///
    /// # Cost
    /// O(blocks + workers) besides the walk; a write to the index if predictions are on.
    pub fn select(&self, ask: &Ask<'_>) -> Result<(Reservation, Selection)> {
        self.with_known(ask, |ask, matches, considered| {
            let (mut reservation, decision) = self.router.route(ask, considered)?;
            self.log(ask, &decision);
            let selection = self.selection(&decision, matches);
            self.predict(ask, &selection);
            reservation.line = ask.request_id.filter(|_| self.journal.is_on()).map(|id| Line {
                journal: Arc::clone(&self.journal),
                number: self.journal.push(self.record(
                    id,
                    ask,
                    &decision,
                    matches,
                    CANDIDATES_KEPT,
                )),
                has_first_token: AtomicBool::new(false),
            });
            reservation.told = self.outbox.is_on().then(|| {
                let name = BookingName(self.number, reservation.request());
                self.outbox.added(self.tiding(name, ask, &selection));
                (Arc::clone(&self.outbox), name)
            });
            let is_counted = self.router.config.track_output_blocks;
            reservation.growth = is_counted.then(|| Growth::new(ask)).flatten();
            Ok((reservation, selection))
        })
    }

    /// The selection that would be made now, with all of its inputs; nothing is booked, predicted
    /// or kept. Repeating it gives the same result.
    ///
    /// # Errors
    /// As [`select`](Self::select), except for `Overloaded`.
    pub fn preview(&self, ask: &Ask<'_>) -> Result<(Selection, Record)> {
        self.with_known(&Ask { waits: false, ..*ask }, |ask, matches, considered| {
            let decision = self.router.preview(ask, considered)?;
            let id = ask.request_id.unwrap_or_default();
            let record = self.record(id, ask, &decision, matches, usize::MAX);
            Ok((self.selection(&decision, matches), record))
        })
    }

    /// A selection for a caller that books elsewhere: as [`preview`](Self::preview), but with a new
    /// random draw each time.
    ///
    /// # Errors
    /// As [`preview`](Self::preview).
    pub fn query(&self, ask: &Ask<'_>) -> Result<Selection> {
        self.with_known(&Ask { waits: false, ..*ask }, |ask, matches, considered| {
            let decision = self.router.query(ask, considered)?;
            Ok(self.selection(&decision, matches))
        })
    }

    /// Every allowed worker's load if it took the request, in worker order; changes nothing. Empty
    /// without workers.
    ///
    /// # Errors
    /// `InvalidArgument` for an empty prompt or an override out of range.
    pub fn potential_loads(&self, ask: &Ask<'_>) -> Result<Vec<Terms>> {
        self.with_known(&Ask { waits: false, ..*ask }, |ask, _, considered| {
            self.router.potential(ask, considered)
        })
    }

    /// The most leading tokens of the prompt that any allowed worker holds, or soon will.
    pub fn most_held_tokens(&self, ask: &Ask<'_>) -> u64 {
        let blocks = SCRATCH.with_borrow_mut(|scratch| {
            self.walk(ask, scratch);
            let known = scratch.overlaps.iter().chain(&scratch.predictions);
            let allowed = known.filter(|(worker, _)| ask.allows(*worker));
            allowed.map(|(_, blocks)| *blocks).max().unwrap_or(0)
        });
        u64::from(blocks) * u64::from(ask.prompt.block_size)
    }

    /// Load of every worker as booked here, in worker order.
    pub fn loads(&self) -> Vec<WorkerLoad> {
        self.router.loads()
    }

    /// Sums over all workers.
    pub fn totals(&self) -> LoadTotals {
        self.router.totals()
    }

    /// Expires old entries: inactive bookings, other routers' shares of the load, and predictions.
    /// Returns the number of bookings. Call it on a timer.
    pub fn tick(&self) -> usize {
        let now_ms = self.clock.now_ms();
        self.touch_remote(now_ms);
        self.busy.expire_shares(now_ms.saturating_sub(self.router.config.load.expiry_ms));
        let expired = self.router.expire();
        if !expired.is_empty() {
            self.forget_gone();
            self.forget_gone_remote();
            for gone in &expired {
                self.outbox.freed(BookingName(self.number, *gone));
            }
        }
        self.tell_time(now_ms);
        self.settle_unheard();
        expired.len()
    }

    /// Marks workers whose blocks the index knows completely by now, whatever it missed at first.
    fn settle_unheard(&self) {
        for (worker, why) in self.model.all_unheard() {
            let report = self.busy.reported(worker).and_then(|report| report.kv_total_blocks);
            if let Some(capacity_blocks) = report.filter(|_| why == Unheard::Missed)
                && self.model.settle_unheard(worker, capacity_blocks)
            {
                tracing::info!(%worker, capacity_blocks, "index complete: known blocks fill the worker's cache");
            }
        }
    }

    fn tiding(&self, name: BookingName, ask: &Ask<'_>, selection: &Selection) -> Tiding {
        let config = &self.router.config;
        let is_tracked = config.track_active_blocks && ask.prompt.block_size > 0;
        let is_shared = ask.overrides.assume_kv_reuse.unwrap_or(config.assume_kv_reuse);
        let hashes = &ask.prompt.sequence_hashes;
        // Blocks that no other request shares have hashes of their own, whatever the others assume.
        let unshared = || hashes.iter().map(|_| rand::random()).collect();
        Tiding::Added {
            name,
            worker: selection.worker,
            hashes: is_tracked
                .then(|| if is_shared { hashes.as_slice().into() } else { unshared() }),
            isl_tokens: ask.prompt.isl_tokens,
            overlap_blocks: match ask.overrides.is_prefilled_elsewhere() {
                // All of it, also while the block size is unknown.
                true => ask.prompt.isl_tokens.div_ceil(u64::from(self.block_size()).max(1)) as u32,
                false => selection.expected_blocks() + selection.lower_blocks,
            },
        }
    }

    fn weight(&self, overrides: &RouteOverride) -> f64 {
        overrides.overlap_score_weight.unwrap_or(self.router.config.overlap_score_weight)
    }

    /// The workers' overlaps with the prompt. Skipped if overlaps have no weight.
    pub(super) fn walk(&self, ask: &Ask<'_>, scratch: &mut Scratch) {
        scratch.overlaps.clear();
        scratch.predictions.clear();
        scratch.tiers.clear();
        if !self.uses_overlaps(&ask.overrides, ask.prompt) {
            scratch.matches = Matches::new();
            return;
        }
        self.end_predictions();
        let Prompt { locals, names, isl_tokens, .. } = ask.prompt;
        self.model.find(locals, names, *isl_tokens, &mut scratch.matches, &mut scratch.exact);
        if let Some(overlaps) = ask.overlaps {
            scratch.matches.set_device(overlaps);
        }
        let has_tiers = self.router.config.tiers.is_any();
        let low = self.reuse.credits();
        for found in scratch.matches.as_slice() {
            let credit = low.as_ref().and_then(|low| low.get(&found.worker)).copied();
            let credited = |blocks| credit.map_or(blocks, |credit| scaled(blocks, credit));
            let (device, predicted) = (credited(found.device), credited(found.predicted));
            if has_tiers && found.external > found.device {
                let lower = [credited(found.host), credited(found.external)];
                scratch.tiers.push((found.worker, lower));
            }
            if device > 0 {
                scratch.overlaps.push((found.worker, device));
            }
            if predicted > device && self.overlap != Overlap::Events {
                scratch.predictions.push((found.worker, predicted));
            }
        }
    }

    /// Drops expired predictions, so that they earn no credit between two ticks. Without any, the
    /// writer's lock is not taken.
    fn end_predictions(&self) {
        if self.overlap == Overlap::Events {
            return;
        }
        let now_ms = self.clock.now_ms();
        if now_ms >= self.model.index.predictions_due_ms() {
            self.tell_time(now_ms);
        }
    }

    fn tell_time(&self, now_ms: u64) {
        // Relaxed: a repeated or slightly late time does no harm.
        self.advanced_ms.store(now_ms, Ordering::Relaxed);
        self.model.index.advance_to(now_ms);
    }

    /// Whether the workers' overlaps with `prompt` affect the decision.
    pub fn uses_overlaps(&self, overrides: &RouteOverride, prompt: &Prompt) -> bool {
        let (policy, shadows) = (self.router.decider(overrides), &self.policies().shadows);
        // Without credit there are no events, and guesses must not lower the load either.
        let credit = self.router.config.scale.overlap_score_credit;
        let has_credit =
            credit > 0.0 || overrides.overlap_score_credit.is_some_and(|own| own > 0.0);
        let has_weight = policy.built_in().is_none() || self.weight(overrides) > 0.0 && has_credit;
        (policy.needs_tokens() && has_weight
            || shadows.iter().any(|shadow| shadow.policy().needs_tokens()))
            && !prompt.locals.is_empty()
    }

    /// Whether the workers' overlaps come from events; only computed for policies that need it.
    fn is_indexed(&self, ask: &Ask<'_>) -> bool {
        self.needs_facts()
            && ask.prompt.block_size > 0
            && self.overlap != Overlap::Predictions
            && (!self.model.workers().is_empty()
                || ask.overlaps.is_some_and(|overlaps| !overlaps.is_empty()))
    }

    /// Walks the index for `ask` and passes it on with everything known here.
    pub(super) fn with_known<T>(
        &self,
        ask: &Ask<'_>,
        then: impl FnOnce(&Ask<'_>, &Matches, &mut Considered) -> Result<T>,
    ) -> Result<T> {
        SCRATCH.with_borrow_mut(|scratch| {
            self.walk(ask, scratch);
            let Scratch { matches, overlaps, predictions, tiers, considered, .. } = scratch;
            let draining = self.draining.all();
            let is_open = |pin: &Pin| draining.binary_search(&pin.instance_id).is_err();
            let pin = ask.pin.filter(is_open);
            let reports = self.needs_facts().then(|| self.engines.all());
            let known = Known {
                overlaps,
                predictions,
                tiers,
                busy: Some(&self.busy),
                queue: self.queue.filter(|_| ask.waits),
                metrics: reports.as_deref().filter(|reports| !reports.is_empty()),
                pool: &self.pool,
                is_indexed: self.is_indexed(ask),
                draining: &draining,
                unpinned: ask.pin.filter(|pin| !is_open(pin)),
            };
            let ask = Ask { known, pin, ..*ask };
            then(&ask, matches, considered).map_err(|error| self.explain(&ask, error))
        })
    }

    /// Predicts that the chosen worker will hold the prompt, unless it already does.
    fn predict(&self, ask: &Ask<'_>, selection: &Selection) {
        let Prompt { locals, seed, .. } = ask.prompt;
        let is_held = self.overlap != Overlap::Predictions
            && selection.overlap_blocks as usize == locals.len();
        // A worker without received events may cache nothing at all, so it earns no credit by
        // predictions.
        let is_heard = self.overlap == Overlap::Predictions
            || ask.overlaps.is_some()
            || self.model.workers().binary_search(&selection.worker).is_ok();
        if self.overlap == Overlap::Events
            || is_held
            || !is_heard
            || !self.uses_overlaps(&ask.overrides, ask.prompt)
        {
            return;
        }
        let now_ms = self.clock.now_ms();
        if now_ms.saturating_sub(self.advanced_ms.load(Ordering::Relaxed)) >= ADVANCE_INTERVAL_MS {
            self.tell_time(now_ms);
        }
        // With events a prediction only bridges the time until they arrive.
        let is_history = self.overlap == Overlap::Predictions;
        let report = is_history.then(|| self.busy.reported(selection.worker)).flatten();
        let capacity = report.and_then(|report| report.kv_total_blocks);
        self.model.predict(selection.worker, *seed, locals, capacity);
    }
}

/// `blocks` of a worker weighted by `credit`, rounded down.
fn scaled(blocks: u32, credit: f64) -> u32 {
    (f64::from(blocks) * credit) as u32
}
