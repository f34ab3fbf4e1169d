//! Continuous batching in passes, as `python/kvflash/mocker/scheduler.py` has it.

use std::collections::VecDeque;

use super::cache::Cache;
use super::timing::pass_us;

/// What an engine can hold and compute.
#[derive(Debug, Clone, Copy)]
pub struct EngineConfig {
    pub block_size: u64,
    pub capacity_blocks: u64,
    pub max_running: usize,
    pub max_batched_tokens: u64,
}

impl EngineConfig {
    /// The mocker's defaults: a million tokens of cache, in blocks of `block_size`.
    pub fn mocker(block_size: u64) -> Self {
        Self {
            block_size,
            capacity_blocks: 16_384 * 64 / block_size,
            max_running: 256,
            max_batched_tokens: 8_192,
        }
    }

    /// Blocks that admission may fill: 1 % stays free for decoding.
    fn admissible_blocks(&self) -> u64 {
        (0.99 * self.capacity_blocks as f64) as u64
    }
}

/// One request at an engine.
#[derive(Debug)]
pub struct Job {
    /// Which one it is.
    pub request: usize,
    pub input: u64,
    pub output: u64,
    /// Ids of the prompt's full blocks.
    pub ids: Box<[u64]>,
    /// Prompt and answer so far.
    pub tokens: u64,
    /// Prompt tokens found in the cache when it was first admitted.
    pub cached: Option<u64>,
    pub added_us: u64,
    pub admitted_us: u64,
    pub first_us: u64,
    computed: u64,
    stored: u64,
    partial: u64,
}

impl Job {
    pub fn new(request: usize, input: u64, output: u64, ids: &[u64], added_us: u64) -> Self {
        Self {
            request,
            input,
            output,
            ids: ids.into(),
            tokens: input,
            cached: None,
            added_us,
            admitted_us: 0,
            first_us: 0,
            computed: 0,
            stored: 0,
            partial: 0,
        }
    }

    /// Blocks with tokens of the answer are nobody else's.
    fn id(&self, block: u64) -> u64 {
        let own = 1 << 62 | (self.request as u64) << 24 | block;
        self.ids.get(block as usize).copied().unwrap_or(own)
    }

    fn ids(&self, blocks: std::ops::Range<u64>) -> impl DoubleEndedIterator<Item = u64> + Clone {
        blocks.map(|block| self.id(block))
    }

    pub fn is_finished(&self) -> bool {
        self.tokens == self.input + self.output
    }
}

/// Blocks that an engine says it has, or has no more.
#[derive(Debug)]
pub enum Event {
    Removed(Vec<u64>),
    Stored { parent: Option<u64>, ids: Vec<u64> },
}

/// Sums over the engine's life; lengths and times are of requests that have ended, as vLLM counts them.
#[derive(Debug, Default, Clone, Copy)]
pub struct Totals {
    /// Prompt tokens that were computed.
    pub prefilled: u64,
    pub requests: u64,
    pub finished: u64,
    pub input: u64,
    pub output: u64,
    pub queue_us: u64,
    pub prefill_us: u64,
    pub decode_us: u64,
    pub preemptions: u64,
}

/// What a pass brought.
#[derive(Debug, Default)]
pub struct Done {
    /// Requests that got a token, and the job itself of those that have ended.
    pub advanced: Vec<(usize, Option<Job>)>,
    pub events: Vec<Event>,
}

pub struct Engine {
    config: EngineConfig,
    cache: Cache,
    jobs: Vec<Option<Job>>,
    free: Vec<usize>,
    waiting: VecDeque<usize>,
    running: Vec<usize>,
    /// Jobs of the pass that is under way, and how many tokens of each it computes.
    chunks: Vec<(usize, u64)>,
    is_in_pass: bool,
    pub totals: Totals,
}

impl Engine {
    pub fn new(config: EngineConfig) -> Self {
        Self {
            config,
            cache: Cache::new(config.capacity_blocks),
            jobs: Vec::new(),
            free: Vec::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            chunks: Vec::new(),
            is_in_pass: false,
            totals: Totals::default(),
        }
    }

    pub fn is_in_pass(&self) -> bool {
        self.is_in_pass
    }

    pub fn running(&self) -> usize {
        self.running.len()
    }

    pub fn usage(&self) -> f64 {
        self.cache.usage()
    }

    /// Tokens of a prompt that the cache has and a request could use: the last token is computed anew.
    pub fn cached_tokens(&self, ids: &[u64], input: u64) -> u64 {
        let usable = ((input - 1) / self.config.block_size) as usize;
        let ids = ids[..ids.len().min(usable)].iter().copied();
        self.cache.prefix(ids) * self.config.block_size
    }

    /// Have a request wait; however many do, so that all ways to route serve the same requests.
    pub fn add(&mut self, job: Job) {
        let longest = self.config.admissible_blocks() * self.config.block_size;
        assert!(job.input > 0 && job.output > 0 && job.input + job.output <= longest, "{job:?}");
        self.totals.requests += 1;
        let place = self.free.pop().unwrap_or(self.jobs.len());
        if place == self.jobs.len() {
            self.jobs.push(Some(job));
        } else {
            self.jobs[place] = Some(job);
        }
        self.waiting.push_back(place);
    }

    fn job(&mut self, place: usize) -> &mut Job {
        self.jobs[place].as_mut().expect("it has not ended")
    }

    /// Plan the next pass: how long it takes in microseconds, and the requests admitted for the first
    /// time with what they found in the cache. `None` when there is nothing to do.
    pub fn begin(&mut self, now_us: u64, admitted: &mut Vec<(usize, u64)>) -> Option<u64> {
        assert!(!self.is_in_pass);
        let mut budget = self.config.max_batched_tokens;
        self.chunks.clear();
        while self.chunks.len() < self.running.len() && budget > 0 {
            let place = self.running[self.chunks.len()];
            let job = self.job(place);
            let count = (job.tokens - job.computed).min(budget);
            if !self.reserve(place, count) {
                break;
            }
            self.chunks.push((place, count));
            budget -= count;
        }
        while budget > 0 {
            let Some((place, count)) = self.admit(budget, now_us, admitted) else { break };
            self.chunks.push((place, count));
            budget -= count;
        }
        if self.chunks.is_empty() {
            assert!(self.waiting.is_empty(), "a request that fits is admitted in the end");
            return None;
        }
        self.is_in_pass = true;
        let (mut tokens, mut decodes) = (0, 0);
        for &(place, count) in &self.chunks {
            let job = self.jobs[place].as_ref().expect("it has not ended");
            tokens += count;
            decodes += u64::from(count == 1 && job.computed >= job.input);
        }
        self.totals.prefilled += tokens - decodes;
        Some(pass_us(tokens - decodes, decodes, self.cache.usage()))
    }

    /// Let the pass take effect.
    pub fn end(&mut self, now_us: u64) -> Done {
        assert!(self.is_in_pass);
        self.is_in_pass = false;
        let mut done = Done::default();
        let evicted = self.cache.drain_evicted();
        if !evicted.is_empty() {
            done.events.push(Event::Removed(evicted));
        }
        for (place, count) in std::mem::take(&mut self.chunks) {
            self.job(place).computed += count;
            done.events.extend(self.store(place));
            let job = self.job(place);
            if job.computed < job.tokens {
                continue;
            }
            job.tokens += 1;
            let (request, is_finished) = (job.request, job.is_finished());
            if job.first_us == 0 {
                job.first_us = now_us;
            }
            if !is_finished {
                done.advanced.push((request, None));
                continue;
            }
            self.running.retain(|&other| other != place);
            self.let_go(place);
            let job = self.jobs[place].take().expect("it ends once");
            self.free.push(place);
            self.totals.finished += 1;
            self.totals.input += job.input;
            self.totals.output += job.output;
            self.totals.queue_us += job.admitted_us - job.added_us;
            self.totals.prefill_us += job.first_us - job.admitted_us;
            self.totals.decode_us += now_us - job.first_us;
            done.advanced.push((request, Some(job)));
        }
        done
    }

    fn blocks_of(&self, tokens: u64) -> u64 {
        tokens.div_ceil(self.config.block_size)
    }

    /// Blocks for `count` more tokens; younger requests give way. False when it gave way itself.
    fn reserve(&mut self, place: usize, count: u64) -> bool {
        let job = self.jobs[place].as_ref().expect("it has not ended");
        let wanted = self.blocks_of(job.computed + count);
        let Some(missing) = wanted.checked_sub(job.stored + job.partial).filter(|&n| n > 0) else {
            return true;
        };
        while !self.cache.take(std::iter::empty(), missing) {
            let victim = self.running.pop().expect("the one that asks is running");
            self.let_go(victim);
            self.job(victim).computed = 0;
            self.waiting.push_front(victim);
            self.totals.preemptions += 1;
            if victim == place {
                return false;
            }
        }
        self.job(place).partial += missing;
        true
    }

    fn let_go(&mut self, place: usize) {
        let Self { cache, jobs, .. } = self;
        let job = jobs[place].as_mut().expect("it has not ended");
        cache.release(job.ids(0..job.stored), job.partial);
        (job.stored, job.partial) = (0, 0);
    }

    fn admit(
        &mut self,
        budget: u64,
        now_us: u64,
        admitted: &mut Vec<(usize, u64)>,
    ) -> Option<(usize, u64)> {
        let place =
            *self.waiting.front().filter(|_| self.running.len() < self.config.max_running)?;
        let size = self.config.block_size;
        let blocks = self.blocks_of(self.jobs[place].as_ref()?.tokens);
        let Self { cache, jobs, .. } = self;
        let job = jobs[place].as_mut()?;
        let hits = cache.prefix(job.ids(0..(job.tokens - 1) / size));
        let cached = hits * size;
        let partial = blocks - hits;
        let growth = cache.growth(job.ids(0..hits), partial);
        if cache.used() + growth > self.config.admissible_blocks() {
            return None;
        }
        let is_taken = cache.take(job.ids(0..hits), partial);
        assert!(is_taken, "what may be admitted is less than there is");
        (job.stored, job.partial, job.computed) = (hits, partial, cached);
        if job.cached.is_none() {
            job.cached = Some(cached);
            job.admitted_us = now_us;
            admitted.push((job.request, cached));
        }
        let count = (job.tokens - cached).min(budget);
        self.waiting.pop_front();
        self.running.push(place);
        Some((place, count))
    }

    /// The blocks that a job has filled in this pass.
    fn store(&mut self, place: usize) -> Option<Event> {
        let Self { cache, jobs, config, .. } = self;
        let job = jobs[place].as_mut().expect("it has not ended");
        let (mut first, full) = (job.stored, job.computed / config.block_size);
        if full <= first {
            return None;
        }
        let known = job.ids(first..full).filter(|&id| !cache.promote(id)).count() as u64;
        job.partial -= full - first;
        job.stored = full;
        // Another request may have stored the first ones meanwhile.
        first += known;
        let parent = first.checked_sub(1).map(|block| job.id(block));
        (first < full).then(|| Event::Stored { parent, ids: job.ids(first..full).collect() })
    }
}
