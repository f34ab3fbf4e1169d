//! The cost of a request on a worker.

use std::fmt;

use crate::ids::Worker;
use crate::load::ActiveLoad;

named! {
    /// How a worker is chosen.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub enum Policy {
        /// Lowest cost: uncached and queued prompt blocks, plus active blocks.
        #[default]
        Kv = "kv",
        /// The candidate with the oldest booking, so that all take turns even if the candidates
        /// change between requests.
        RoundRobin = "round_robin",
        /// Any candidate, all equally likely.
        Random = "random",
        /// Fewest active blocks and blocks to prefill; then fewest active requests.
        LeastLoaded = "least_loaded",
        /// The less loaded of two random candidates.
        PowerOfTwo = "power_of_two",
    }
}

/// How `kv` weighs work to prefill against work saved, besides `overlap_score_weight`. The default
/// is the documented cost; every field is finite and at least 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KvScale {
    /// Saving of a cached block, in blocks to prefill. Above 1 it keeps a prompt with its cache
    /// where the plain cost would spread the load.
    pub overlap_score_credit: f64,
    /// Reduces the credit of a candidate with more prefill queued than the idlest one: at 1, by
    /// half when the excess is as long as the prompt. 0 disables it.
    pub overlap_score_credit_decay: f64,
    /// Weight of the uncached prefill cost.
    pub prefill_load_scale: f64,
    /// Cost of an active request, in blocks.
    pub active_request_weight: f64,
}

impl Default for KvScale {
    fn default() -> Self {
        Self::PLAIN
    }
}

impl KvScale {
    /// The default.
    pub const PLAIN: Self = Self {
        overlap_score_credit: 1.0,
        overlap_score_credit_decay: 0.0,
        prefill_load_scale: 1.0,
        active_request_weight: 0.0,
    };

    /// The fields by name.
    pub fn fields(&self) -> [(&'static str, f64); 4] {
        [
            ("overlap_score_credit", self.overlap_score_credit),
            ("overlap_score_credit_decay", self.overlap_score_credit_decay),
            ("prefill_load_scale", self.prefill_load_scale),
            ("active_request_weight", self.active_request_weight),
        ]
    }

    /// Whether the cost is the plain number of prefilled blocks.
    pub fn is_plain(&self) -> bool {
        *self == Self::PLAIN
    }

    /// Whether blocks that workers hold count, at this weight of the overlap.
    pub fn weighs_overlap(&self, overlap_score_weight: f64) -> bool {
        overlap_score_weight > 0.0 && self.overlap_score_credit > 0.0
    }
}

/// The part of a request that the chosen worker does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Stage {
    /// Prefill and decoding.
    #[default]
    Both,
    /// Only the prefill; another worker decodes.
    Prefill,
    /// Only the decoding; another worker did the prefill.
    Decode,
}

/// The properties of a request that a decision uses.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RequestTerms {
    /// Prompt length in tokens; at least 1.
    pub isl_tokens: u64,
    /// Tokens in a block; 0 while unknown: costs are then in tokens and requests.
    pub block_size: u32,
    /// Blocks that the request would occupy, including duplicates; 0 if blocks are not tracked.
    pub tracked_blocks: u32,
    /// Cost of a block to prefill, in held blocks; finite and at least 0.
    pub overlap_score_weight: f64,
    /// 0 takes the lowest cost; larger values spread the choice. Finite and at least 0.
    pub temperature: f64,
    /// How `kv` weighs its terms.
    pub scale: KvScale,
    /// Prompt tokens still to be prefilled by the idlest candidate; set by
    /// [`among`](Self::among).
    pub least_prefill_tokens: u64,
    /// The part of the request that the chosen worker does.
    pub stage: Stage,
}

/// One worker that could take the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// The worker.
    pub worker: Worker,
    /// Leading blocks of the prompt that it holds, or soon will.
    pub overlap_blocks: u32,
    /// Of these, blocks that are only predicted: the prompt was sent there, and no event has
    /// confirmed it.
    pub predicted_blocks: u32,
    /// Saving of further blocks that it holds in host memory or on disks, in thousandths of a block
    /// to prefill.
    pub lower_milliblocks: u32,
    /// Blocks of the prompt that active requests of the worker already use.
    pub shared_blocks: u32,
    /// Its load.
    pub load: ActiveLoad,
}

impl Candidate {
    /// A worker with `load` that holds none of the prompt.
    pub const fn new(worker: Worker, load: ActiveLoad) -> Self {
        Self {
            worker,
            overlap_blocks: 0,
            predicted_blocks: 0,
            lower_milliblocks: 0,
            shared_blocks: 0,
            load,
        }
    }

    /// Blocks of the prompt that need no prefill there, rounded down.
    pub fn saved_blocks(&self) -> u32 {
        self.overlap_blocks.saturating_add(self.lower_milliblocks / 1_000)
    }
}

/// The cost of a request on one worker, in prefill tokens, by cause.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Price {
    /// Prefill queued before it.
    pub queue: f32,
    /// Its own uncached tokens, and the answers that their prefill stalls.
    pub prefill: f32,
    /// The decode steps of its answer, and the time that they add to the steps of others.
    pub decode: f32,
    /// Evictions that its blocks cause in a full cache.
    pub eviction: f32,
}

impl Price {
    /// The price of policies without one.
    pub(crate) const NOTHING: Self = Self { queue: 0.0, prefill: 0.0, decode: 0.0, eviction: 0.0 };

    /// The parts by name.
    pub fn parts(&self) -> [(&'static str, f64); 4] {
        [
            ("queue", f64::from(self.queue)),
            ("prefill", f64::from(self.prefill)),
            ("decode", f64::from(self.decode)),
            ("eviction", f64::from(self.eviction)),
        ]
    }

    /// The sum of all parts.
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

/// The value of one candidate that a policy minimizes.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CandidateCost {
    /// The cost; 0 for policies without costs.
    pub cost: f64,
    /// The parts of that cost for `auto`; zeros for other policies.
    pub price: Price,
}

/// The cost of a request on one candidate, term by term.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Terms {
    /// The worker.
    pub worker: Worker,
    /// Leading blocks of the prompt that it holds, or soon will.
    pub overlap_blocks: u32,
    /// How many of these are only predicted.
    pub predicted_blocks: u32,
    /// Saving of blocks in host memory and on disks besides these, in thousandths of a block to
    /// prefill.
    pub lower_milliblocks: u32,
    /// Active requests, without this one.
    pub active_requests: u32,
    /// Tokens to prefill, including those of active requests.
    pub prefill_tokens: u64,
    /// The same in blocks, not rounded; 0 while the block size is unknown.
    pub prefill_blocks: f64,
    /// The part of these that enters the cost; all of them with the default [`KvScale`].
    pub weighed_prefill_blocks: f64,
    /// Distinct blocks in use, including this request; 0 while the block size is unknown.
    pub decode_blocks: u64,
    /// The value that the policy minimizes; 0 for policies without costs.
    pub cost: f64,
    /// The parts of that cost for `auto`; zeros for other policies.
    pub price: Price,
}

impl RequestTerms {
    /// Prompt tokens to prefill on `candidate`, none if it only decodes; savings count in whole
    /// blocks.
    pub fn uncached_tokens(&self, candidate: &Candidate) -> u64 {
        if self.stage == Stage::Decode {
            return 0;
        }
        let saved = u64::from(candidate.saved_blocks()) * u64::from(self.block_size);
        self.isl_tokens.saturating_sub(saved)
    }

    /// These terms, relative to the idlest of `candidates`.
    #[must_use]
    pub fn among(mut self, candidates: &[Candidate]) -> Self {
        if self.scale.overlap_score_credit_decay > 0.0 {
            let queued = candidates.iter().map(|candidate| candidate.load.prefill_tokens);
            self.least_prefill_tokens = queued.min().unwrap_or(0);
        }
        self
    }

    /// Whether blocks that a worker holds can lower its `kv` cost.
    pub(super) fn weighs_overlap(&self) -> bool {
        self.scale.weighs_overlap(self.overlap_score_weight) && self.scale.prefill_load_scale > 0.0
    }

    /// The cost of this request on `candidate`.
    ///
    /// `kv`: `overlap_score_weight * prefill_blocks + decode_blocks`; while the block size is
    /// unknown, `overlap_score_weight * prefill_tokens + active requests`. With another [`KvScale`]
    /// the first product uses `prefill_load_scale * max(0, queued and own blocks - credit *
    /// overlap)`, and active requests are added with their weight. After a predicted overlap, a remainder of
    /// less than a block costs nothing, so that the same prompt is not computed again elsewhere.
    /// Blocks in host memory and on disks count by their weight, after those of the device.
    /// `least_loaded` and `power_of_two`: the load of the candidate, whatever the request.
    ///
    /// # Source
    /// The cost function of the NVIDIA Dynamo KV router documentation.
    #[inline]
    pub fn terms(&self, policy: Policy, candidate: &Candidate) -> Terms {
        let is_plain = self.scale.is_plain();
        let mut terms = self.without_cost(is_plain, candidate);
        terms.cost = self.cost(policy, candidate, &terms);
        terms
    }

    /// The terms of `candidate`, with `cost` from a policy.
    pub fn terms_at(&self, candidate: &Candidate, cost: &CandidateCost) -> Terms {
        let CandidateCost { cost, price } = *cost;
        Terms { cost, price, ..self.without_cost(self.scale.is_plain(), candidate) }
    }

    /// Replaces `costs` with the cost of all `candidates` under `policy`; passes each to `see`.
    #[inline(always)]
    pub(super) fn fill(
        &self,
        policy: Policy,
        candidates: &[Candidate],
        costs: &mut Vec<CandidateCost>,
        mut see: impl FnMut(usize, &Candidate, f64),
    ) {
        let is_plain = self.scale.is_plain();
        costs.clear();
        costs.extend(candidates.iter().enumerate().map(|(index, candidate)| {
            let terms = self.without_cost(is_plain, candidate);
            let cost = self.cost(policy, candidate, &terms);
            see(index, candidate, cost);
            CandidateCost { cost, price: Price::NOTHING }
        }));
    }

    /// All terms except the cost, which depends on the policy.
    #[inline(always)]
    fn without_cost(&self, is_plain: bool, candidate: &Candidate) -> Terms {
        let block_size = u64::from(self.block_size);
        let load = &candidate.load;
        // An overlap longer than the prompt is an error of its source and saves no more.
        let lower_tokens = match candidate.lower_milliblocks {
            0 => 0,
            lower => (u64::from(lower) * block_size).saturating_add(500) / 1_000,
        };
        let cached_tokens =
            (u64::from(candidate.overlap_blocks) * block_size).saturating_add(lower_tokens);
        let own_tokens = self.isl_tokens.saturating_sub(cached_tokens);
        let is_twin = candidate.predicted_blocks > 0 && own_tokens < block_size;
        let own_tokens = if is_twin { 0 } else { own_tokens };
        let own_blocks = self.tracked_blocks.saturating_sub(candidate.shared_blocks);
        let prefill_tokens = load.prefill_tokens.saturating_add(own_tokens);
        let decode_blocks = load.blocks.saturating_add(u64::from(own_blocks));
        let prefill_blocks = self.blocks_of(prefill_tokens);
        let weighed_prefill_blocks = match is_plain || block_size == 0 {
            true => prefill_blocks,
            false => self.weigh(candidate, prefill_blocks),
        };
        Terms {
            worker: candidate.worker,
            overlap_blocks: candidate.overlap_blocks,
            predicted_blocks: candidate.predicted_blocks,
            lower_milliblocks: candidate.lower_milliblocks,
            active_requests: load.requests,
            prefill_tokens,
            prefill_blocks,
            weighed_prefill_blocks,
            decode_blocks: if block_size == 0 { 0 } else { decode_blocks },
            cost: 0.0,
            price: Price::NOTHING,
        }
    }

    /// The cost of a candidate under `policy`, from its other terms.
    #[inline(always)]
    fn cost(&self, policy: Policy, candidate: &Candidate, terms: &Terms) -> f64 {
        let requests = f64::from(terms.active_requests);
        match policy {
            Policy::Kv if self.block_size == 0 => {
                self.overlap_score_weight * terms.prefill_tokens as f64 + requests
            }
            Policy::Kv => {
                self.overlap_score_weight * terms.weighed_prefill_blocks
                    + terms.decode_blocks as f64
                    + self.scale.active_request_weight * requests
            }
            Policy::LeastLoaded | Policy::PowerOfTwo => {
                let ActiveLoad { blocks, prefill_tokens: tokens, .. } = candidate.load;
                match self.block_size {
                    0 => tokens as f64,
                    _ => blocks as f64 + self.blocks_of(tokens),
                }
            }
            Policy::RoundRobin | Policy::Random => 0.0,
        }
    }

    #[inline(always)]
    fn blocks_of(&self, tokens: u64) -> f64 {
        match self.block_size {
            0 => 0.0,
            size => tokens as f64 / f64::from(size),
        }
    }

    /// Blocks to prefill as weighed by [`KvScale`]; `prefill_blocks` excludes the overlap.
    fn weigh(&self, candidate: &Candidate, prefill_blocks: f64) -> f64 {
        let overlap = f64::from(candidate.overlap_blocks);
        let queued = candidate.load.prefill_tokens;
        let excess = self.blocks_of(queued.saturating_sub(self.least_prefill_tokens));
        let fading = self.scale.overlap_score_credit_decay * excess;
        let share = fading / self.blocks_of(self.isl_tokens.max(1));
        let credit = self.scale.overlap_score_credit * overlap / (1.0 + share);
        self.scale.prefill_load_scale * (prefill_blocks + overlap - credit).max(0.0)
    }
}
