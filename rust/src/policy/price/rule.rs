//! The formula: a pure function of what is known of a request and of a worker.
//!
//! # Source
//! The constants are one set for all fleets: the best of a search over fifty simulated workloads, checked on
//! traces and on real engines that the search had not seen; docs/policies.md has the figures.

use std::fmt;

use super::gaps::Gaps;
use super::marks::MAX_MARKS;
use super::retention::Retention;
use crate::policy::cost::Stage;

/// What a queued token counts: engines prefill several prompts side by side, so that a request waits for a
/// part of what is queued before it.
const QUEUE_WEIGHT: f64 = 0.5;
/// What attention adds to a token of prefill for each token in front of it, in tokens.
const ATTENTION: f64 = 3e-5;
/// Running answers that a prefill stalls, at the most: more share the same stall.
const STALLED_MOST: f64 = 4.0;
/// What a request adds to a decode step, in tokens of prefill.
const STEP_PER_REQUEST: f64 = 0.2;
/// What a token of context adds to a decode step.
const STEP_PER_CONTEXT: f64 = 0.002;
/// What a decode step of somebody counts, beside the time to the first token.
const STEP_WEIGHT: f64 = 0.1;
/// What a lost block costs beside a computed one.
const EVICTION: f64 = 4.0;
/// What a token pushed into a full cache costs whatever the gaps between turns are.
const EVICTION_FLAT: f64 = 0.25;
/// What it costs to fetch a token's keys and values from another worker, in tokens of prefill.
const TRANSFER: f64 = 0.1;

/// What a request costs on one worker, in tokens of prefill, by cause.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Price {
    /// Prefill queued before it.
    pub queue: f32,
    /// Its own uncached tokens, and the answers that their prefill stalls.
    pub prefill: f32,
    /// Its answer's steps, and what they add to the others' steps.
    pub decode: f32,
    /// What its blocks push out of a full cache.
    pub eviction: f32,
}

impl Price {
    /// The parts by name.
    pub fn parts(&self) -> [(&'static str, f64); 4] {
        [
            ("queue", f64::from(self.queue)),
            ("prefill", f64::from(self.prefill)),
            ("decode", f64::from(self.decode)),
            ("eviction", f64::from(self.eviction)),
        ]
    }

    /// All of it.
    pub fn total(&self) -> f64 {
        self.parts().into_iter().map(|(_, part)| part).sum()
    }
}

impl fmt::Display for Price {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} tokens", self.total())?;
        for (at, (name, part)) in self.parts().into_iter().enumerate() {
            write!(f, "{} {name} {part:.1}", if at == 0 { " =" } else { " +" })?;
        }
        Ok(())
    }
}

/// What the price of one worker depends on. Tokens are prompt tokens unless said otherwise.
#[derive(Debug, Clone, Copy)]
pub(super) struct Inputs {
    /// Length of the prompt; at least 1.
    pub input_tokens: f64,
    /// Leading tokens that need not be computed there.
    pub cached_tokens: f64,
    /// Tokens that the worker has still to prefill.
    pub queued_tokens: f64,
    /// Requests that it has.
    pub requests: f64,
    /// Sum of the lengths of their prompts.
    pub context_tokens: f64,
    /// Length of the answer that is to be expected.
    pub answer_tokens: f64,
    /// Time that it takes for a token, as a multiple of what its fleet takes.
    pub slowness: f64,
    /// What a token pushed into its cache costs, in tokens.
    pub pressure: f64,
    /// What is done there.
    pub stage: Stage,
}

pub(super) fn price(inputs: &Inputs, miss: &MissCost) -> Price {
    let Inputs { input_tokens, requests, slowness, answer_tokens, .. } = *inputs;
    // The last token is computed in any case.
    let cached = inputs.cached_tokens.clamp(0.0, input_tokens - 1.0);
    let uncached = input_tokens - cached;
    let step = STEP_PER_REQUEST * (requests + 1.0)
        + STEP_PER_CONTEXT * (inputs.context_tokens + input_tokens);
    let added = STEP_PER_REQUEST + STEP_PER_CONTEXT * input_tokens;
    let decode = STEP_WEIGHT * answer_tokens * slowness * (step + requests * added);
    let stalled = STALLED_MOST * requests / (requests + STALLED_MOST);
    let own = slowness * miss.beyond(cached);
    let eviction = inputs.pressure * uncached;
    let queue = QUEUE_WEIGHT * slowness * inputs.queued_tokens;
    let (queue, prefill, decode) = match inputs.stage {
        Stage::Both => (queue, own * (1.0 + stalled), decode),
        Stage::Prefill => (queue, own, 0.0),
        Stage::Decode => (0.0, TRANSFER * uncached, decode),
    };
    Price {
        queue: queue as f32,
        prefill: prefill as f32,
        decode: decode as f32,
        eviction: eviction as f32,
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
    weights: [f64; MAX_MARKS],
    /// Cost from the start of each piece to the end of the prompt.
    from: [f64; MAX_MARKS + 1],
    pieces: usize,
}

impl MissCost {
    /// `weights`: of the piece that ends at each mark, the shortest prefix first; what is behind the last
    /// one counts in full.
    pub fn new(input: f64, block_size: f64, weights: &[f64]) -> Self {
        let mut of = Self {
            input,
            block_size,
            weights: [1.0; MAX_MARKS],
            from: [0.0; MAX_MARKS + 1],
            pieces: weights.len(),
        };
        of.weights[..weights.len()].copy_from_slice(weights);
        let mut behind = work(input) - work(of.start(of.pieces).min(input));
        of.from[of.pieces] = behind;
        for piece in (0..of.pieces).rev() {
            let (start, end) = (of.start(piece).min(input), of.start(piece + 1).min(input));
            behind += of.weights[piece] * (work(end) - work(start));
            of.from[piece] = behind;
        }
        of
    }

    /// Where a piece starts, in tokens.
    fn start(&self, piece: usize) -> f64 {
        match piece {
            0 => 0.0,
            piece => super::marks::blocks_of(piece - 1) as f64 * self.block_size,
        }
    }

    /// The cost of all tokens behind the first `cached`.
    pub fn beyond(&self, cached: f64) -> f64 {
        if self.pieces == 0 {
            return work(self.input) - work(cached);
        }
        let blocks = cached / self.block_size;
        let piece = super::marks::piece_of(blocks as u64).min(self.pieces);
        let weight = if piece < self.pieces { self.weights[piece] } else { 1.0 };
        self.from[piece] - weight * (work(cached) - work(self.start(piece).min(self.input)))
    }
}

/// Tokens of work in the first `tokens` of a prompt, attention included.
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
