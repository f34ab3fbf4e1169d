//! Active sequences: requests that were assigned to a worker and have not ended.

use super::blocks::{Blocks, End};
use super::config::{BlockUse, LoadConfig, PrefillSpeed};
use super::decay::Takes;
use super::holders::WHOLE;
use super::recency::Recent;
use super::slots::{Slots, WorkerLoad};
use crate::error::{Error, Result};
use crate::ids::Worker;

/// A request's number in the table; the caller never reuses one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// Sums over all workers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LoadTotals {
    /// Workers in the table.
    pub workers: usize,
    /// Booked and unfinished requests.
    pub requests: u64,
    /// Prompt tokens still to be prefilled.
    pub prefill_tokens: u64,
    /// Sum of the workers' active blocks: a block on two workers counts twice.
    pub blocks: u64,
}

#[derive(Debug)]
struct Request {
    slot: u16,
    /// Booked by another router, so it does not count against the limit.
    is_remote: bool,
    /// Weight of its private blocks, in units of `1 / WHOLE`.
    private_fraction: u16,
    private_blocks: u32,
    prompt_tokens: u64,
    /// Tokens still to be prefilled; 0 once that is done.
    prefill_tokens: u64,
    /// Its number among all bookings, from 1.
    number: u64,
    active_at_ms: u64,
    /// Its shared blocks.
    end: End,
}

/// A request assigned to a worker.
#[derive(Debug, Clone, Copy)]
pub struct Assignment<'a> {
    /// The request.
    pub id: RequestId,
    /// The worker.
    pub worker: Worker,
    /// Blocks that it uses.
    pub blocks: BlockUse<'a>,
    /// Length of its prompt in tokens.
    pub isl_tokens: u64,
    /// Tokens of it that the worker has to prefill.
    pub uncached_tokens: u64,
    /// Estimated duration of the prefill, if its end will not be observed; only for
    /// [`ActiveLoad::queued_tokens`](super::ActiveLoad::queued_tokens).
    pub unseen_ms: Option<u64>,
    /// Assigned by another router, so it takes none of the room.
    pub is_remote: bool,
}

/// The active requests of all workers of one model, and the load that follows from them.
///
/// # Cost
/// `book` compares the request's hashes with those in use, which takes a fraction of a nanosecond
/// each, [`count_shared`](Self::count_shared) too, plus the workers; everything else (except removing
/// workers) hardly depends on the prompt's length. Memory: 8 to 16 bytes for each distinct block and
/// 100 for each run of them, with 8 for each of its workers; bounded by `max_requests` times the blocks
/// of a request.
#[derive(Debug)]
pub struct ActiveSequences {
    config: LoadConfig,
    slots: Slots,
    blocks: Blocks,
    requests: Recent<RequestId, Request>,
    bookings: u64,
    /// Requests booked by other routers.
    remote: usize,
    /// The latest time. Threads read the clock before they get here, so times may arrive slightly
    /// out of order; the list by recency needs them in order.
    now_ms: u64,
}

impl ActiveSequences {
    /// An empty table.
    pub fn new(config: LoadConfig) -> Self {
        Self {
            config,
            slots: Slots::default(),
            blocks: Blocks::default(),
            requests: Recent::new(usize::MAX),
            bookings: 0,
            remote: 0,
            now_ms: 0,
        }
    }

    /// Tokens in a block; 0 while unknown.
    pub fn block_size(&self) -> u32 {
        self.config.block_size
    }

    /// Corrects a model's block size. Active requests keep the tokens that they were counted with.
    pub fn correct_block_size(&mut self, block_size: u32) {
        self.config.block_size = block_size;
    }

    /// Sets the workers of the table. Existing ones keep their requests, new ones start empty;
    /// requests of removed ones, which are returned, are dropped (freeing them later has no effect).
    ///
    /// # Errors
    /// [`Error::Overloaded`] for more than [`super::MAX_WORKERS`]; nothing changes then.
    pub fn set_workers(&mut self, workers: &[Worker]) -> Result<Vec<Worker>> {
        let mut wanted = workers.to_vec();
        wanted.sort_unstable();
        wanted.dedup();
        if wanted.len() > super::MAX_WORKERS {
            let limit = super::MAX_WORKERS;
            return Err(Error::Overloaded(format!(
                "a router supports at most {limit} data-parallel ranks over all workers of a model, got {}; \
                 remove workers, or divide them between several routers",
                wanted.len()
            )));
        }
        let gone: Vec<Worker> = (self.slots.workers().map(|(_, worker)| worker))
            .filter(|worker| wanted.binary_search(worker).is_err())
            .collect();
        self.drop_workers(&gone);
        wanted.retain(|&worker| self.slots.slot(worker).is_none());
        self.slots.add(&wanted);
        Ok(gone)
    }

    /// Assigns a request to a worker: its uncached tokens are to be prefilled, its blocks are in
    /// use.
    ///
    /// # Errors
    /// [`Error::Conflict`] for a request that is already booked, [`Error::NotFound`] for a worker
    /// that is not in the table, [`Error::Overloaded`] at `max_requests`. Nothing changes then.
    pub fn book(&mut self, work: &Assignment<'_>, now_ms: u64) -> Result<()> {
        let Assignment { id, worker, isl_tokens, uncached_tokens, unseen_ms, is_remote, .. } =
            *work;
        if self.is_booked(id) {
            return Err(Error::Conflict(format!("request {} is already booked", id.0)));
        }
        let slot = self
            .slots
            .slot(worker)
            .ok_or_else(|| Error::NotFound(format!("worker {worker} is not registered")))?;
        if !is_remote {
            self.check_room()?;
        }
        let (hashes, private_blocks) = match work.blocks {
            BlockUse::Untracked => (&[][..], 0),
            BlockUse::Shared(hashes) => (hashes, 0),
            BlockUse::Private(count) => (&[][..], count),
        };
        let (end, added) = self.blocks.acquire(hashes, slot, self.slots.capacity());
        let request = Request {
            slot,
            is_remote,
            private_fraction: WHOLE,
            private_blocks,
            prompt_tokens: isl_tokens,
            prefill_tokens: if self.config.track_prefill_tokens { uncached_tokens } else { 0 },
            number: self.bookings + 1,
            active_at_ms: self.hear(now_ms),
            end,
        };
        self.bookings += 1;
        self.remote += usize::from(is_remote);
        let (prefill_tokens, now_ms) = (request.prefill_tokens, request.active_at_ms);
        let speed = self.config.prefill_speed;
        let counters = self.slots.counters(slot);
        counters.requests += 1;
        counters.context_tokens += isl_tokens;
        let takes = match speed {
            PrefillSpeed::Unknown => None,
            PrefillSpeed::Told(per_s) => Some(Takes::told(prefill_tokens, per_s)),
            PrefillSpeed::Learned => Some(counters.prefills.learned(prefill_tokens)),
        };
        if self.config.estimates_queue {
            let takes = match unseen_ms {
                Some(ms) => Takes::Told(ms),
                None => counters.queue.learned(prefill_tokens),
            };
            counters.queue.push(self.bookings, prefill_tokens, takes, now_ms);
        }
        match takes {
            None => counters.prefills.add(prefill_tokens),
            Some(takes) => {
                counters.prefills.push(self.bookings, prefill_tokens, takes, now_ms);
            }
        }
        counters.blocks += added + u64::from(private_blocks);
        counters.last_booked = self.bookings;
        self.requests.insert(id, request);
        Ok(())
    }

    /// Checks that another request can be booked.
    ///
    /// # Errors
    /// [`Error::Overloaded`] at `max_requests`.
    pub fn check_room(&self) -> Result<()> {
        let limit = self.config.max_requests;
        if self.requests.len() < limit + self.remote {
            return Ok(());
        }
        Err(Error::Overloaded(format!("{limit} requests are active, the limit (max_requests)")))
    }

    /// Marks the prompt of `id` as prefilled: its tokens no longer count. Repeating it changes
    /// nothing. False for a request that is not booked.
    pub fn mark_prefill_completed(&mut self, id: RequestId) -> bool {
        let Some(request) = self.requests.get_mut(id) else { return false };
        let tokens = std::mem::take(&mut request.prefill_tokens);
        let counters = self.slots.counters(request.slot);
        counters.queue.complete(request.number, self.now_ms);
        let prefills = &mut counters.prefills;
        match self.config.prefill_speed {
            PrefillSpeed::Unknown => prefills.subtract(tokens),
            PrefillSpeed::Told(_) | PrefillSpeed::Learned => {
                prefills.complete(request.number, self.now_ms);
            }
        }
        true
    }

    /// Records activity of `id`, so that it does not expire. False for a request that is not booked.
    pub fn touch(&mut self, id: RequestId, now_ms: u64) -> bool {
        let now_ms = self.hear(now_ms);
        let Some(place) = self.requests.place(id) else { return false };
        self.requests[place].active_at_ms = now_ms;
        self.requests.renew(place);
        true
    }

    /// Adds `count` generated blocks to `id`. `fraction`, limited to 0..=1, is the expected rest of
    /// its output: all blocks that only this request references count by that fraction from now on,
    /// because they will soon be freed. False for a request that is not booked.
    pub fn add_output_blocks(&mut self, id: RequestId, count: u32, fraction: f64) -> bool {
        let fraction = (fraction.clamp(0.0, 1.0) * f64::from(WHOLE)).round() as u16;
        let Some(request) = self.requests.get_mut(id) else { return false };
        let (held, before) = (request.private_blocks, request.private_discount());
        request.private_blocks = request.private_blocks.saturating_add(count);
        let count = request.private_blocks - held;
        request.private_fraction = fraction;
        let change = request.private_discount() as i64 - before as i64
            + self.blocks.weigh(request.end, request.slot, fraction);
        let counters = self.slots.counters(request.slot);
        counters.blocks += u64::from(count);
        let discount = counters.discount.checked_add_signed(change);
        counters.discount = discount.expect("what a block gets back was taken from it before");
        true
    }

    /// Ends `id`, for whatever reason, including a prompt that is not prefilled yet. False for a
    /// request that is not booked, which is not an error.
    pub fn free(&mut self, id: RequestId) -> bool {
        let place = self.requests.place(id);
        place.inspect(|&place| self.drop_request(place)).is_some()
    }

    /// Frees requests without activity for more than `expiry_ms`, longest idle first. Costs nothing
    /// if there are none: call it on a timer.
    pub fn expire(&mut self, now_ms: u64) -> Vec<RequestId> {
        let now_ms = self.hear(now_ms);
        let mut expired = Vec::new();
        while let Some(place) = self.requests.first() {
            if now_ms - self.requests[place].active_at_ms <= self.config.expiry_ms {
                break;
            }
            expired.push(self.requests.key(place));
            self.drop_request(place);
        }
        expired
    }

    /// Whether `worker` is in the table.
    pub fn has_worker(&self, worker: Worker) -> bool {
        self.slots.slot(worker).is_some()
    }

    /// Whether `id` is booked.
    pub fn is_booked(&self, id: RequestId) -> bool {
        self.requests.place(id).is_some()
    }

    /// Workers in the table.
    pub fn worker_count(&self) -> usize {
        self.slots.len()
    }

    /// Every worker's load, in worker order, with its slot: the index for the result of
    /// [`count_shared`](Self::count_shared), valid until workers change.
    pub fn loads(&self) -> impl ExactSizeIterator<Item = (usize, WorkerLoad)> + '_ {
        let loads = self.slots.loads(self.now_ms, self.config.estimates_queue);
        loads.map(|(slot, load)| (usize::from(slot), load))
    }

    /// Sets `counts[slot]`, for every slot, to the number of leading blocks of `hashes` that its
    /// worker uses now.
    pub fn count_shared(&self, hashes: &[u64], counts: &mut Vec<u32>) {
        counts.clear();
        counts.resize(self.slots.capacity(), 0);
        self.blocks.count(hashes, counts);
    }

    /// Sets `by_slot[slot]`, for every slot, to the value of its worker in `by_worker`; the default
    /// if it has none. Workers that are not in the table are ignored.
    pub fn spread<T: Copy + Default>(&self, by_worker: &[(Worker, T)], by_slot: &mut Vec<T>) {
        by_slot.clear();
        by_slot.resize(self.slots.capacity(), T::default());
        self.slots.slots_of(by_worker, |slot, value| by_slot[usize::from(slot)] = value);
    }

    /// Sums over all workers.
    pub fn totals(&self) -> LoadTotals {
        let mut totals = LoadTotals { workers: self.slots.len(), ..LoadTotals::default() };
        for (_, WorkerLoad { active, .. }) in self.loads() {
            totals.requests += u64::from(active.requests);
            totals.prefill_tokens += active.prefill_tokens;
            totals.blocks += active.blocks;
        }
        totals
    }

    /// Different blocks in use on any worker.
    #[cfg(test)]
    pub(crate) fn distinct_blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Runs that these blocks are kept as, and the hashes that they have memory for.
    #[cfg(test)]
    pub(crate) fn runs(&self) -> (usize, usize) {
        self.blocks.runs()
    }

    /// Advances the time to `now_ms`: prompts in progress count less.
    pub fn advance(&mut self, now_ms: u64) {
        self.hear(now_ms);
    }

    /// Removes `workers`, which are in the table, and their requests.
    fn drop_workers(&mut self, workers: &[Worker]) {
        let mut is_gone = vec![false; self.slots.capacity()];
        for slot in workers.iter().filter_map(|&worker| self.slots.slot(worker)) {
            is_gone[usize::from(slot)] = true;
        }
        for place in self.requests.places(|request| is_gone[usize::from(request.slot)]) {
            self.drop_request(place);
        }
        self.slots.remove(workers);
    }

    fn hear(&mut self, now_ms: u64) -> u64 {
        self.now_ms = self.now_ms.max(now_ms);
        self.now_ms
    }

    fn drop_request(&mut self, place: u32) {
        let request = self.requests.remove(place);
        self.remote -= usize::from(request.is_remote);
        let released = self.blocks.release(request.end, request.slot);
        let counters = self.slots.counters(request.slot);
        counters.requests -= 1;
        counters.context_tokens -= request.prompt_tokens;
        counters.queue.remove(request.number, self.now_ms);
        match self.config.prefill_speed {
            PrefillSpeed::Unknown => counters.prefills.subtract(request.prefill_tokens),
            PrefillSpeed::Told(_) | PrefillSpeed::Learned => {
                counters.prefills.remove(request.number, self.now_ms);
            }
        }
        counters.blocks -= released.blocks + u64::from(request.private_blocks);
        counters.discount -= released.discount + request.private_discount();
    }
}

impl Request {
    fn private_discount(&self) -> u64 {
        u64::from(self.private_blocks) * u64::from(WHOLE - self.private_fraction)
    }
}
