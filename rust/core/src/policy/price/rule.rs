//! The formula: a pure function of the known state of a request and of a worker.
//!
//! # Source
//! The constants are one set for all fleets: the best of a search over fifty simulated workloads,
//! checked on traces and on real engines outside of the search; docs/policies.md has the figures.

use super::gaps::Gaps;
use super::marks::{self, MAX_MARKS};
use super::retention::Retention;
use crate::load::ActiveLoad;
use crate::policy::cost::{Price, Stage};

/// Weight of a queued token: engines prefill several prompts side by side, so a request waits for
/// only part of its queue.
const QUEUE_WEIGHT: f64 = 0.5;
/// Additional weight of a token in a long queue for each token by which this worker's evictions are
/// cheaper than those of the costliest worker. Otherwise all requests without cached blocks would
/// queue up there.
const QUEUE_PER_PRESSURE: f64 = 6.0;
/// Queue without additional weight, in decode steps: it delays the first token about as little as
/// the steps themselves, and blocks that another worker would lose cost more.
const FREE_STEPS: f64 = 10.0;
/// Queue beyond that, in prompts like this one, at which half of the additional weight applies.
const HALF_CROWDED: f64 = 0.4;
/// Prefill cost that attention adds per token and preceding token, in tokens.
const ATTENTION: f64 = 3e-5;
/// Maximum running answers that a prefill stalls.
const STALLED_MOST: f64 = 1.0;
/// Answers that a prefill stalls, by running answers, as shares of [`STALLED_MOST`]: a division for each
/// worker is much of a decision's time.
const STALLED_SHARES: [f64; 64] = {
    let mut shares = [0.0; 64];
    let mut at = 0;
    while at < shares.len() {
        shares[at] = at as f64 / (at as f64 + STALLED_MOST);
        at += 1;
    }
    shares
};
/// Cost that a request adds to a decode step, in prefill tokens.
const STEP_PER_REQUEST: f64 = 0.2;
/// Cost that a context token adds to a decode step.
const STEP_PER_CONTEXT: f64 = 0.002;
/// Weight of a decode step relative to the time to the first token.
const STEP_WEIGHT: f64 = 0.07;
/// Cost of a lost block relative to a computed one.
const EVICTION: f64 = 5.0;
/// Cost of a token pushed into a full cache, whatever the gaps between turns are.
const EVICTION_FLAT: f64 = 0.25;
/// Cost of fetching a token's keys and values from another worker, in prefill tokens.
const TRANSFER: f64 = 0.1;

/// A worker's cost factors relative to other workers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rates {
    /// Its time per token, as a multiple of the fleet's.
    pub slowness: f64,
    /// Cost of a token pushed into its full cache, in tokens.
    pub pressure: f64,
}

impl Rates {
    /// The factors of a worker without data.
    pub const NEUTRAL: Self = Self { slowness: 1.0, pressure: 0.0 };
}

/// The price of one request; the parts that are equal for all workers are computed once.
#[derive(Debug)]
pub(super) struct Tariff {
    miss: MissCost,
    /// Weight of a queued token on the worker with the costliest evictions.
    queued: f64,
    /// Cost of a token pushed into the costliest cache.
    most_pressure: f64,
    /// Queued tokens without additional weight, and more tokens at which half of
    /// [`QUEUE_PER_PRESSURE`] applies.
    free: f64,
    half_crowded: f64,
    /// Weight of its prefill, including the answers that it stalls.
    computed: f64,
    stalled: f64,
    /// Weight of an uncached token that is fetched.
    fetched: f64,
    /// Cost of the answer's steps on an idle worker, plus costs for each of its requests and for
    /// each of their prompt tokens.
    steps: f64,
    steps_per_request: f64,
    steps_per_context: f64,
}

impl Tariff {
    /// For a prompt with uncached tokens that cost `miss`, and an expected answer of
    /// `answer_tokens`; `stage` is the part done on the worker, `most_pressure` the highest recent
    /// [`Rates::pressure`], `step_tokens` the time of a decode step in tokens of prefill.
    pub fn new(
        answer_tokens: f64,
        stage: Stage,
        miss: MissCost,
        most_pressure: f64,
        step_tokens: f64,
    ) -> Self {
        let weight = if stage == Stage::Prefill { 0.0 } else { STEP_WEIGHT * answer_tokens };
        let added = STEP_PER_REQUEST + STEP_PER_CONTEXT * miss.input;
        let is_fetched = stage == Stage::Decode;
        let half_crowded = HALF_CROWDED * miss.input.max(1.0);
        Self {
            miss,
            queued: if is_fetched { 0.0 } else { QUEUE_WEIGHT },
            most_pressure,
            free: FREE_STEPS * step_tokens,
            half_crowded,
            computed: if is_fetched { 0.0 } else { 1.0 },
            stalled: if stage == Stage::Both { STALLED_MOST } else { 0.0 },
            fetched: if is_fetched { TRANSFER } else { 0.0 },
            steps: weight * added,
            // Each other request lengthens its steps, and it lengthens theirs.
            steps_per_request: weight * (STEP_PER_REQUEST + added),
            steps_per_context: weight * STEP_PER_CONTEXT,
        }
    }

    /// The cost on a worker that holds `leading` blocks of the prompt, and blocks after them that
    /// save `lower` thousandths of a block; with its parts.
    #[inline(always)]
    pub fn price(&self, leading: u32, lower: u32, load: &ActiveLoad, rates: Rates) -> (f64, Price) {
        let Rates { slowness, pressure } = rates;
        let requests = f64::from(load.requests);
        let share = match STALLED_SHARES.get(load.requests as usize) {
            Some(share) => *share,
            None => requests / (requests + STALLED_MOST),
        };
        let (uncached, miss) = match lower {
            0 => self.miss.beyond(leading),
            lower => self.miss.beyond_lower(leading, lower),
        };
        let stalls = 1.0 + self.stalled * share;
        let queued = float(load.queued_tokens);
        let long = (queued - self.free).max(0.0);
        let crowd = QUEUE_PER_PRESSURE * long / (long + self.half_crowded);
        let crowd = 1.0 + crowd * (self.most_pressure - pressure).max(0.0);
        let queue = self.queued * slowness * crowd * queued;
        let prefill = self.computed * slowness * miss * stalls + self.fetched * uncached;
        let steps = self.steps
            + self.steps_per_request * requests
            + self.steps_per_context * float(load.context_tokens);
        let decode = slowness * steps;
        let eviction = pressure * uncached;
        // Infinite parts are shown as the largest number.
        let finite = |part: f64| (part as f32).min(f32::MAX);
        let price = Price {
            queue: finite(queue),
            prefill: finite(prefill),
            decode: finite(decode),
            eviction: finite(eviction),
        };
        (queue + prefill + decode + eviction, price)
    }
}

/// A count as a float. Of an i64 the processor makes one at once, of a u64 in six steps.
#[inline(always)]
fn float(count: u64) -> f64 {
    count.min(i64::MAX as u64) as i64 as f64
}

/// The highest pressure among workers with recent requests: each of them is seen about once.
#[derive(Debug, Default)]
pub(super) struct MostPressure {
    /// Of the current and the previous round of requests.
    highest: [f64; 2],
    seen: usize,
}

/// Requests per worker in one round, and the minimum of a round.
const SEEN_PER_WORKER: usize = 2;
const SEEN_LEAST: usize = 16;

impl MostPressure {
    /// Records that a request went to a worker with this pressure, one of `count`.
    pub fn see(&mut self, pressure: f64, count: usize) {
        let [highest, before] = &mut self.highest;
        *highest = highest.max(pressure);
        self.seen += 1;
        if self.seen >= (SEEN_PER_WORKER * count).max(SEEN_LEAST) {
            (*before, *highest, self.seen) = (*highest, 0.0, 0);
        }
    }

    /// The current value.
    pub fn value(&self) -> f64 {
        self.highest[0].max(self.highest[1])
    }
}

/// The cost of computing a prompt from any position on, for every position at once.
///
/// Between two marks all tokens have the same weight. It is below 1 if many requests want a prefix
/// that few workers hold, because computing it once more serves them all.
#[derive(Debug)]
pub(super) struct MissCost {
    input: f64,
    block_size: f64,
    /// The last token's block, and the number of tokens before it.
    last: u32,
    most: f64,
    pieces: usize,
    /// For each piece: the cost of the whole prompt if all tokens before had the piece's weight,
    /// and the weight of its tokens; after the last mark the weight is 1.
    costs: [(f64, f64); MAX_MARKS + 1],
}

impl MissCost {
    /// For a prompt of `input` tokens. `weights`: of the piece that ends at each mark, the shortest
    /// prefix first; tokens after the last mark count in full.
    pub fn new(input: f64, block_size: f64, weights: &[f64]) -> Self {
        let pieces = weights.len();
        let mut costs = [(0.0, 1.0); MAX_MARKS + 1];
        costs[pieces] = (work(input), 1.0);
        for (piece, weight) in weights.iter().enumerate().rev() {
            let (whole, next) = costs[piece + 1];
            let end = work(input.min(marks::blocks_of(piece) as f64 * block_size));
            costs[piece] = (whole - next * end + weight * end, *weight);
        }
        let most = (input - 1.0).max(0.0);
        // Saturates, like every cast from float to integer.
        let last = (most / block_size) as u32;
        Self { input, block_size, last, most, pieces, costs }
    }

    /// Uncached tokens after the first `leading` blocks, and their cost.
    #[inline(always)]
    pub fn beyond(&self, leading: u32) -> (f64, f64) {
        self.of(leading, f64::from(leading) * self.block_size)
    }

    /// The same with `lower` more thousandths of a block saved.
    #[cold]
    pub fn beyond_lower(&self, leading: u32, lower: u32) -> (f64, f64) {
        let blocks = f64::from(leading) + f64::from(lower) / 1_000.0;
        // Saturates, like every cast from float to integer.
        self.of(blocks as u32, blocks * self.block_size)
    }

    /// After `cached` tokens, which end in block number `blocks`.
    #[inline(always)]
    fn of(&self, blocks: u32, cached: f64) -> (f64, f64) {
        // The last token is always computed.
        // Neither is NaN, which `min` would look for.
        let cached = if cached < self.most { cached } else { self.most };
        let piece = marks::piece_of(blocks.min(self.last)).min(self.pieces);
        let (whole, weight) = self.costs[piece];
        (self.input - cached, whole - weight * work(cached))
    }
}

/// Work of the first `tokens` of a prompt in tokens, including attention.
#[inline(always)]
fn work(tokens: f64) -> f64 {
    tokens * (1.0 + ATTENTION * tokens / 2.0)
}

/// The cost of a token pushed into a worker's full cache, in tokens; 0 while there is room.
///
/// The density of the gaps between turns at the age of evicted blocks, per unit of ln(age), gives
/// the share of traffic that is lost per new block. A session is costly if the cache keeps blocks
/// about as long as sessions pause, and nearly free if its blocks are lost anyway or never needed
/// again.
pub(super) fn pressure(retention: &Retention, gaps: &Gaps, now: u64) -> f64 {
    if !retention.is_full() {
        return 0.0;
    }
    let density = retention.age(now).and_then(|age| gaps.density(age));
    EVICTION_FLAT + EVICTION * density.unwrap_or(0.0)
}
