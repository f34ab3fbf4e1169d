//! The formula: a pure function of what is known of a request and of a worker.
//!
//! # Source
//! The constants are one set for all fleets: the best of a search over fifty simulated workloads, checked on
//! traces and on real engines that the search had not seen; docs/policies.md has the figures.

use super::gaps::Gaps;
use super::marks::{self, MAX_MARKS};
use super::parts::Price;
use super::retention::Retention;
use crate::policy::cost::{ActiveLoad, Stage};

/// What a queued token counts: engines prefill several prompts side by side, so that a request waits for a
/// part of what is queued before it.
const QUEUE_WEIGHT: f64 = 0.5;
/// How much more a queued token counts for each token by which what the worker evicts is cheaper than what the
/// dearest worker does: all that find their blocks nowhere would go there, and wait for each other.
const QUEUE_PER_PRESSURE: f64 = 1.2;
/// What attention adds to a token of prefill for each token in front of it, in tokens.
const ATTENTION: f64 = 3e-5;
/// Running answers that a prefill stalls, at the most: more share the same stall.
const STALLED_MOST: f64 = 2.0;
/// What a request adds to a decode step, in tokens of prefill.
const STEP_PER_REQUEST: f64 = 0.2;
/// What a token of context adds to a decode step.
const STEP_PER_CONTEXT: f64 = 0.002;
/// What a decode step of somebody counts, beside the time to the first token.
const STEP_WEIGHT: f64 = 0.1;
/// What a lost block costs beside a computed one.
const EVICTION: f64 = 6.0;
/// What a token pushed into a full cache costs whatever the gaps between turns are.
const EVICTION_FLAT: f64 = 0.25;
/// What it costs to fetch a token's keys and values from another worker, in tokens of prefill.
const TRANSFER: f64 = 0.1;

/// What a worker's tokens cost beside those of others.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rates {
    /// Its time for a token, as a multiple of what its fleet takes.
    pub slowness: f64,
    /// What a token pushed into its full cache costs, in tokens.
    pub pressure: f64,
}

impl Rates {
    /// Of a worker of which nothing is known.
    pub const NEUTRAL: Self = Self { slowness: 1.0, pressure: 0.0 };
}

/// The price of one request: what of it is the same for all workers is worked out once.
#[derive(Debug)]
pub(super) struct Tariff {
    miss: MissCost,
    /// What a queued token counts, where nothing evicts more dearly than the worker does.
    queued: f64,
    /// What a token costs that is pushed into the dearest cache.
    most_pressure: f64,
    /// What its prefill counts, and the answers that this stalls.
    computed: f64,
    stalled: f64,
    /// What an uncached token counts that is fetched.
    fetched: f64,
    /// What the answer's steps cost on an idle worker, more for each of its requests and for each of their
    /// prompt tokens.
    steps: f64,
    steps_per_request: f64,
    steps_per_context: f64,
}

impl Tariff {
    /// Of a prompt whose uncached tokens cost `miss`, and an answer that is expected to have `answer_tokens`;
    /// `stage` is what is done on the worker, `most_pressure` the highest [`Rates::pressure`] of late.
    pub fn new(answer_tokens: f64, stage: Stage, miss: MissCost, most_pressure: f64) -> Self {
        let weight = if stage == Stage::Prefill { 0.0 } else { STEP_WEIGHT * answer_tokens };
        let added = STEP_PER_REQUEST + STEP_PER_CONTEXT * miss.input;
        let is_fetched = stage == Stage::Decode;
        Self {
            miss,
            queued: if is_fetched { 0.0 } else { QUEUE_WEIGHT },
            most_pressure,
            computed: if is_fetched { 0.0 } else { 1.0 },
            stalled: if stage == Stage::Both { STALLED_MOST } else { 0.0 },
            fetched: if is_fetched { TRANSFER } else { 0.0 },
            steps: weight * added,
            // Its own steps are longer for each of the others, and theirs are longer by it.
            steps_per_request: weight * (STEP_PER_REQUEST + added),
            steps_per_context: weight * STEP_PER_CONTEXT,
        }
    }

    /// The cost on a worker that holds `leading` blocks of the prompt, and what saves `lower` thousandths of a
    /// block behind them; with its parts.
    #[inline(always)]
    pub fn price(&self, leading: u32, lower: u32, load: &ActiveLoad, rates: Rates) -> (f64, Price) {
        let Rates { slowness, pressure } = rates;
        let requests = f64::from(load.requests);
        let (uncached, miss) = match lower {
            0 => self.miss.beyond(leading),
            lower => self.miss.beyond_lower(leading, lower),
        };
        let stalls = 1.0 + self.stalled * requests / (requests + STALLED_MOST);
        let crowd = 1.0 + QUEUE_PER_PRESSURE * ((self.most_pressure - pressure).max(0.0));
        let queue = self.queued * slowness * crowd * load.queued_tokens as f64;
        let prefill = self.computed * slowness * miss * stalls + self.fetched * uncached;
        let steps = self.steps
            + self.steps_per_request * requests
            + self.steps_per_context * load.context_tokens as f64;
        let decode = slowness * steps;
        let eviction = pressure * uncached;
        // Numbers beyond all bounds are shown as the largest one.
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

/// The highest pressure among the workers that requests went to of late: each of them is seen about once.
#[derive(Debug, Default)]
pub(super) struct MostPressure {
    /// Of the requests that are counted now, and of those before.
    highest: [f64; 2],
    seen: usize,
}

/// Requests for each worker that are counted together, and how many at the least.
const SEEN_PER_WORKER: usize = 2;
const SEEN_LEAST: usize = 16;

impl MostPressure {
    /// A request went to a worker with this pressure, one of `count`.
    pub fn see(&mut self, pressure: f64, count: usize) {
        let [highest, before] = &mut self.highest;
        *highest = highest.max(pressure);
        self.seen += 1;
        if self.seen >= (SEEN_PER_WORKER * count).max(SEEN_LEAST) {
            (*before, *highest, self.seen) = (*highest, 0.0, 0);
        }
    }

    /// What it is.
    pub fn value(&self) -> f64 {
        self.highest[0].max(self.highest[1])
    }
}

/// What it costs to compute a prompt from some position on, for every position at once.
///
/// Between two marks a token counts the same: less than 1 where many requests want a prefix that few workers
/// hold, because computing it once more serves them all.
#[derive(Debug)]
pub(super) struct MissCost {
    input: f64,
    block_size: f64,
    /// The last token's block, and the tokens before it.
    last: u32,
    most: f64,
    pieces: usize,
    /// Of each piece: what the whole prompt would cost if all before counted as the piece does, and what a token
    /// of it counts; behind the last mark in full.
    costs: [(f64, f64); MAX_MARKS + 1],
}

impl MissCost {
    /// Of a prompt of `input` tokens. `weights`: of the piece that ends at each mark, the shortest prefix first;
    /// what is behind the last one counts in full.
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
        // Saturates, as casts of floats do.
        let last = (most / block_size) as u32;
        Self { input, block_size, last, most, pieces, costs }
    }

    /// Tokens that are not cached behind the first `leading` blocks, and what they cost.
    #[inline(always)]
    pub fn beyond(&self, leading: u32) -> (f64, f64) {
        self.of(leading, f64::from(leading) * self.block_size)
    }

    /// The same where `lower` thousandths of a block more are saved.
    #[cold]
    pub fn beyond_lower(&self, leading: u32, lower: u32) -> (f64, f64) {
        let blocks = f64::from(leading) + f64::from(lower) / 1_000.0;
        // Saturates, as casts of floats do.
        self.of(blocks as u32, blocks * self.block_size)
    }

    /// Behind `cached` tokens, which end in block number `blocks`.
    #[inline(always)]
    fn of(&self, blocks: u32, cached: f64) -> (f64, f64) {
        // The last token is computed in any case.
        let cached = cached.min(self.most);
        let piece = marks::piece_of(blocks.min(self.last)).min(self.pieces);
        let (whole, weight) = self.costs[piece];
        (self.input - cached, whole - weight * work(cached))
    }
}

/// Tokens of work in the first `tokens` of a prompt, attention included.
#[inline(always)]
fn work(tokens: f64) -> f64 {
    tokens * (1.0 + ATTENTION * tokens / 2.0)
}

/// What a token pushed into a worker's full cache costs, in tokens; nothing while there is room.
///
/// The density of the gaps between turns at the age of what goes, per unit of ln(time), is how much of the
/// traffic is lost for each block that comes: a session is dear where the cache keeps blocks about as long as
/// sessions pause, and nearly free where they are lost anyhow or were never to come back.
pub(super) fn pressure(retention: &Retention, gaps: &Gaps, now_ms: u64) -> f64 {
    if !retention.is_full() {
        return 0.0;
    }
    let density = retention.age_ms(now_ms).and_then(|age_ms| gaps.density(age_ms));
    EVICTION_FLAT + EVICTION * density.unwrap_or(0.0)
}
