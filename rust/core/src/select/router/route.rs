//! The load of the workers, and the cost of a request on each of them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use rand::SeedableRng;
use rand::rngs::SmallRng;

use super::config::{RouteOverride, RouterConfig};
use super::policies::{Considered, Policies, Tail};
use crate::catalog::CacheWatch;
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::ids::{InstanceId, Worker};
use crate::load::{ActiveSequences, Assignment, BlockUse, LoadTotals, RequestId, WorkerLoad};
use crate::policy::session::check_key;
use crate::policy::{Affinity, Candidate, KvScale, RequestTerms, Seat, Stage, Terms};
use crate::select::ask::{Ask, Known};
use crate::select::reuse::Removals;

/// Maximum sequence hashes of a request: a prompt of 16 million tokens in blocks of 16.
const MAX_REQUEST_BLOCKS: usize = 1 << 20;

/// Maximum prompt tokens that another router's booking counts: it says any number, and the loads
/// add them up. No prompt has as many.
const MAX_REMOTE_TOKENS: u64 = u32::MAX as u64;

/// Activity of a request is recorded once in this fraction of its expiry.
const TOUCHES_PER_EXPIRY: u64 = 16;

/// Called when a worker may have room for more.
pub type RoomWatch = Box<dyn Fn() + Send + Sync>;

/// Assigns requests of one model to workers and tracks their load.
///
/// # Consistency
/// Every decision sees every booking, first token and end that returned before it. Two decisions
/// never see the same load unless nothing was booked in between.
pub struct Router {
    /// The configuration it was created with; [`block_size`](Self::block_size) is the current block
    /// size.
    pub config: RouterConfig,
    /// The deciding and shadow policies.
    pub policies: Policies,
    pub(super) affinity: Option<Seat>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) state: Mutex<State>,
    /// How often workers have left.
    pub(super) departures: AtomicU64,
    pub(super) watch: OnceLock<RoomWatch>,
    pub(in crate::select) removals: Removals,
    /// Draws the seeds of queries, so that these do not affect the seeds of bookings.
    pub(super) questions: Mutex<SmallRng>,
}

pub(super) struct State {
    pub load: ActiveSequences,
    /// Draws the seed of each booking.
    pub seeds: SmallRng,
    pub next_request: u64,
    pub scratch: Scratch,
}

/// Memory reused between decisions; its content does not outlive a decision.
#[derive(Default)]
pub(super) struct Scratch {
    /// By slot.
    overlaps: Vec<u32>,
    /// By slot.
    predictions: Vec<u32>,
    /// By slot.
    tiers: Vec<[u32; 2]>,
    /// By slot.
    shared: Vec<u32>,
    /// Instances too busy, ascending.
    shut: Vec<InstanceId>,
    /// Workers that were passed over, and whether they are draining.
    passed: Vec<(Candidate, bool)>,
}

impl Router {
    /// A router without workers, with deciding policies or shadows.
    ///
    /// # Errors
    /// [`Error::Config`] with the name of the first field that is out of range.
    pub fn with_policies(
        mut config: RouterConfig,
        policies: Policies,
        clock: Arc<dyn Clock>,
    ) -> Result<Self> {
        config.validate()?;
        config.load.estimates_queue = policies.estimates_queue();
        let state = State {
            load: ActiveSequences::new(config.load),
            seeds: SmallRng::seed_from_u64(config.seed),
            next_request: 1,
            scratch: Scratch::default(),
        };
        let (state, watch) = (Mutex::new(state), OnceLock::new());
        let departures = AtomicU64::new(0);
        let affinity = policies.affinity.as_ref().map(Affinity::seat);
        let questions = Mutex::new(SmallRng::seed_from_u64(!config.seed));
        let removals = Removals::default();
        Ok(Self {
            config,
            policies,
            affinity,
            clock,
            state,
            departures,
            watch,
            removals,
            questions,
        })
    }

    /// The cost of `ask` on every allowed worker now, including busy ones; changes nothing. Empty
    /// without workers.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] as [`route`](Self::route).
    pub fn potential(&self, ask: &Ask<'_>, considered: &mut Considered) -> Result<Vec<Terms>> {
        self.validate(ask)?;
        let now_ms = self.clock.now_ms();
        let mut state = self.state.lock();
        let state = &mut *state;
        state.load.advance(now_ms);
        let blocks = self.block_use(&state.load, &ask.prompt.sequence_hashes, &ask.overrides);
        let known = self.terms(&state.load, ask, blocks);
        let ask = Ask { known: Known { queue: None, ..ask.known }, ..*ask };
        state.scratch.shut.clear();
        match self.fill(state, &ask, &known, blocks, considered) {
            Err(Error::NoWorker(_)) => return Ok(Vec::new()),
            other => other?,
        }
        let policy = self.policies.active.built_in().unwrap_or_default();
        Ok(considered.candidates.iter().map(|one| known.terms(policy, one)).collect())
    }

    /// Whether `request` is booked: neither freed, nor expired, nor gone with its worker.
    pub fn is_booked(&self, request: RequestId) -> bool {
        self.state.lock().load.is_booked(request)
    }

    /// Whether `worker` is registered.
    pub fn has_worker(&self, worker: Worker) -> bool {
        self.state.lock().load.has_worker(worker)
    }

    /// Books another router's request at `worker` like this router's own, except for the request
    /// limit; at most 2^32 - 1 tokens count. [`free`](Self::free) ends it.
    ///
    /// # Errors
    /// [`Error::NotFound`] for a worker that is not registered, [`Error::InvalidArgument`] for too many
    /// hashes.
    pub fn book_remote(
        &self,
        worker: Worker,
        hashes: Option<&[u64]>,
        isl_tokens: u64,
        overlap_blocks: u32,
    ) -> Result<RequestId> {
        check_blocks(hashes.map_or(0, <[u64]>::len))?;
        let isl_tokens = isl_tokens.min(MAX_REMOTE_TOKENS);
        let now_ms = self.clock.now_ms();
        let mut state = self.state.lock();
        let overrides = RouteOverride::default();
        let blocks = self.block_use(&state.load, hashes.unwrap_or_default(), &overrides);
        let id = RequestId(state.next_request);
        let cached_tokens = u64::from(overlap_blocks) * u64::from(state.load.block_size());
        let uncached_tokens = isl_tokens.saturating_sub(cached_tokens);
        let (unseen_ms, is_remote) = (None, true);
        let work =
            Assignment { id, worker, blocks, isl_tokens, uncached_tokens, unseen_ms, is_remote };
        state.load.book(&work, now_ms)?;
        state.next_request += 1;
        Ok(id)
    }

    /// Marks the prompt of `request` as prefilled, and the request as active. False if it is not
    /// booked.
    pub fn mark_prefill_completed(&self, request: RequestId) -> bool {
        let is_booked = self.with_load(|load, now_ms| {
            load.mark_prefill_completed(request) && load.touch(request, now_ms)
        });
        if is_booked {
            self.made_room();
        }
        is_booked
    }

    /// Has the policies forget a worker.
    pub(super) fn forget(&self, worker: Worker) {
        self.policies.each().for_each(|one| one.removed(worker));
    }

    /// Sets the registered workers; returns those that are no longer. See
    /// [`ActiveSequences::set_workers`].
    ///
    /// # Errors
    /// [`Error::Overloaded`] for more than [`crate::load::MAX_WORKERS`]; nothing changes then.
    pub fn set_workers(&self, workers: &[Worker]) -> Result<Vec<Worker>> {
        let gone = self.state.lock().load.set_workers(workers)?;
        if !gone.is_empty() {
            // Relaxed: a policy that keeps state of workers orders this by its own lock.
            self.departures.fetch_add(1, Ordering::Relaxed);
        }
        gone.iter().for_each(|worker| self.forget(*worker));
        self.made_room();
        Ok(gone)
    }

    /// Tokens in a block; 0 while unknown.
    pub fn block_size(&self) -> u32 {
        self.state.lock().load.block_size()
    }

    /// Sets the block size that the index has learned. Active requests keep counting as before.
    pub fn correct_block_size(&self, block_size: u32) {
        self.state.lock().load.correct_block_size(block_size);
    }

    /// Load of every registered worker, in worker order.
    pub fn loads(&self) -> Vec<WorkerLoad> {
        self.with_load(|load, _| load.loads().map(|(_, load)| load).collect())
    }

    /// Sums over all workers.
    pub fn totals(&self) -> LoadTotals {
        self.with_load(|load, _| load.totals())
    }

    /// Calls `act` with the current load and time.
    fn with_load<T>(&self, act: impl FnOnce(&mut ActiveSequences, u64) -> T) -> T {
        let now_ms = self.clock.now_ms();
        let load = &mut self.state.lock().load;
        load.advance(now_ms);
        act(load, now_ms)
    }

    /// Frees requests that have been idle for longer than `expiry_ms`, longest idle first. Call it
    /// on a timer: it costs nothing if there are none.
    pub fn expire(&self) -> Vec<RequestId> {
        let now_ms = self.clock.now_ms();
        let expired = self.state.lock().load.expire(now_ms);
        if let Some(seat) = &self.affinity {
            seat.table.expire(now_ms);
        }
        if !expired.is_empty() {
            self.made_room();
        }
        expired
    }

    /// Registers `watch`, called without any lock of the router whenever a prompt is prefilled, a
    /// request ends, or workers change. Only the first one is kept.
    pub fn watch_room(&self, watch: RoomWatch) {
        // There is already one, which is kept.
        let _refused = self.watch.set(watch);
    }

    pub(in crate::select) fn made_room(&self) {
        if let Some(watch) = self.watch.get() {
            watch();
        }
    }

    pub(crate) fn now_ms(&self) -> u64 {
        self.clock.now_ms()
    }

    pub(crate) fn touch_interval_ms(&self) -> u64 {
        self.config.load.expiry_ms / TOUCHES_PER_EXPIRY
    }

    pub(crate) fn touch(&self, request: RequestId, now_ms: u64) {
        self.state.lock().load.touch(request, now_ms);
    }

    pub(crate) fn add_output_blocks(&self, request: RequestId, count: u32, fraction: f64) {
        self.state.lock().load.add_output_blocks(request, count, fraction);
    }

    pub(crate) fn free(&self, request: RequestId) {
        self.with_load(|load, _| load.free(request));
        self.made_room();
    }

    pub(crate) fn finished(&self, worker: Worker, tail: &Tail) {
        let finished = tail.finished(worker, self.clock.now_ms());
        self.policies.each().for_each(|one| one.finished(&finished));
    }

    pub(super) fn validate(&self, ask: &Ask<'_>) -> Result<()> {
        if ask.prompt.isl_tokens == 0 {
            return Err(Error::invalid(
                "isl_tokens must be at least 1, got 0: the prompt is empty",
            ));
        }
        check_blocks(ask.prompt.sequence_hashes.len())?;
        if self.affinity.is_some() {
            check_key("session_key", ask.session.key)?;
        }
        ask.overrides.validate()
    }

    pub(super) fn block_use<'a>(
        &self,
        load: &ActiveSequences,
        hashes: &'a [u64],
        overrides: &RouteOverride,
    ) -> BlockUse<'a> {
        if !self.config.track_active_blocks || load.block_size() == 0 {
            BlockUse::Untracked
        } else if overrides.assume_kv_reuse.unwrap_or(self.config.assume_kv_reuse) {
            BlockUse::Shared(hashes)
        } else {
            BlockUse::Private(hashes.len() as u32)
        }
    }

    pub(super) fn terms(
        &self,
        load: &ActiveSequences,
        ask: &Ask<'_>,
        blocks: BlockUse<'_>,
    ) -> RequestTerms {
        let overrides = ask.overrides;
        let weight = overrides.overlap_score_weight.unwrap_or(self.config.overlap_score_weight);
        RequestTerms {
            isl_tokens: ask.prompt.isl_tokens,
            block_size: load.block_size(),
            tracked_blocks: blocks.len(),
            overlap_score_weight: weight,
            temperature: overrides.temperature.unwrap_or(self.config.temperature),
            scale: KvScale {
                overlap_score_credit: overrides
                    .overlap_score_credit
                    .unwrap_or(self.config.scale.overlap_score_credit),
                prefill_load_scale: overrides
                    .prefill_load_scale
                    .unwrap_or(self.config.scale.prefill_load_scale),
                ..self.config.scale
            },
            least_prefill_tokens: 0,
            stage: match overrides.is_prefilled_elsewhere() {
                true => Stage::Decode,
                false => self.config.stage,
            },
        }
    }

    /// Finds the workers that are too busy for `ask` at the current load; a decision `keeps` what it saw.
    pub(super) fn shut(state: &mut State, ask: &Ask<'_>, keeps: bool) {
        let State { load, scratch, .. } = state;
        scratch.shut.clear();
        if let Some(busy) = ask.known.busy {
            busy.collect(load.loads().map(|(_, load)| load), keeps, &mut scratch.shut);
        }
    }

    /// Sets `candidates` to those of `ask`, from the current load, without the workers that are
    /// [too busy](Self::shut).
    pub(super) fn fill(
        &self,
        state: &mut State,
        ask: &Ask<'_>,
        known: &RequestTerms,
        blocks: BlockUse<'_>,
        considered: &mut Considered,
    ) -> Result<()> {
        let State { load, scratch, .. } = state;
        let Considered { candidates, passed_over, .. } = considered;
        candidates.clear();
        passed_over.clear();
        if load.worker_count() == 0 {
            return Err(Error::NoWorker("no worker is registered for this model".into()));
        }
        let hashes = if let BlockUse::Shared(hashes) = blocks { hashes } else { &[] };
        load.count_shared(hashes, &mut scratch.shared);
        load.spread(ask.known.overlaps, &mut scratch.overlaps);
        load.spread(ask.known.predictions, &mut scratch.predictions);
        load.spread(ask.known.tiers, &mut scratch.tiers);
        let policy = self.policies.active.built_in().unwrap_or_default();
        // A `for` loop would call the iterator's `next` for each worker; this is compiled into one loop.
        load.loads().for_each(|(slot, load)| {
            if !ask.allows(load.worker) {
                return;
            }
            let (held, predicted) = (scratch.overlaps[slot], scratch.predictions[slot]);
            let leading = held.max(predicted);
            let [host, disk] = scratch.tiers[slot];
            let candidate = Candidate {
                worker: load.worker,
                overlap_blocks: leading,
                predicted_blocks: predicted.saturating_sub(held),
                lower_milliblocks: self.config.tiers.milliblocks(leading, host, disk),
                shared_blocks: scratch.shared[slot],
                load: load.active,
            };
            let id = load.worker.instance_id;
            let is_draining = ask.known.draining.binary_search(&id).is_ok();
            if is_draining || scratch.shut.binary_search(&id).is_ok() {
                scratch.passed.push((candidate, is_draining));
            } else {
                candidates.push(candidate);
            }
        });
        // As the policy would judge them beside the candidates.
        let known = known.among(candidates);
        let passed = scratch.passed.drain(..);
        passed_over
            .extend(passed.map(|(one, is_draining)| (known.terms(policy, &one), is_draining)));
        if candidates.is_empty() && !passed_over.is_empty() {
            let all =
                |count, are| format!("all {count} workers that may take this request are {are}");
            return Err(match passed_over.iter().filter(|(_, is_draining)| !is_draining).count() {
                0 => Error::NoWorker(all(passed_over.len(), "draining")),
                busy => Error::AllBusy(all(busy, "busy")),
            });
        }
        check_room(&ask.known, candidates)
    }
}

/// Passes engines' evictions to the policies, and to the comparison with answers.
impl CacheWatch for Router {
    fn evicted(&self, worker: Worker, local_hashes: &[u64]) {
        self.removals.removed(worker, local_hashes, self.clock.now_ms());
        self.policies.each().for_each(|one| one.evicted(worker, local_hashes));
    }

    fn cleared(&self, worker: Worker) {
        self.removals.cleared(worker, self.clock.now_ms());
        self.policies.each().for_each(|one| one.cleared(worker));
    }
}

fn check_blocks(blocks: usize) -> Result<()> {
    if blocks <= MAX_REQUEST_BLOCKS {
        return Ok(());
    }
    let limit = MAX_REQUEST_BLOCKS;
    Err(Error::invalid(format!("{blocks} sequence hashes; the limit is {limit}")))
}

/// Checks that one of `candidates` has room to prefill, if the request can wait.
///
/// # Errors
/// [`Error::MustWait`] if none has.
fn check_room(known: &Known<'_>, candidates: &[Candidate]) -> Result<()> {
    let Some((busy, threshold)) = known.busy.zip(known.queue) else { return Ok(()) };
    let queued = |one: &Candidate| (one.worker, one.load.prefill_tokens);
    let count = candidates.len();
    if count > 0 && busy.are_all_full(threshold, candidates.iter().map(queued)) {
        return Err(Error::MustWait(format!(
            "all {count} workers that may take this request have more to prefill than \
             router_queue_threshold allows"
        )));
    }
    Ok(())
}
