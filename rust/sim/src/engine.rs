//! One engine: vLLM's scheduler over its block pool, in steps of virtual time.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::groups::{Group, Reach, alignment, longest_hit};
use crate::pool::{NULL, Pool};
use crate::timing::{Step, Timing};

/// What an engine can hold and compute.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Groups of layers; the first one is told to routers.
    pub groups: Vec<Group>,
    /// Blocks of windows keep their names wherever they are in a prompt. Without it only those that the same prompt
    /// would go on from: vLLM's `prefix_cache_retention_interval` of 0.
    pub names_all_windows: bool,
    /// Blocks of the pool, the null block among them.
    pub blocks: u32,
    /// Requests that run at once.
    pub max_running: usize,
    /// Tokens that a step computes at the most.
    pub max_batched_tokens: u64,
    /// How long its steps take.
    pub timing: Timing,
    /// How many times as slow as `timing` it is.
    pub slowness: f64,
}

/// One request at an engine.
#[derive(Debug)]
pub struct Job {
    /// The caller's number for it.
    pub request: usize,
    /// Tokens of the prompt; at least 1.
    pub input: u64,
    /// Tokens of the answer; at least 1.
    pub output: u64,
    /// Ids of the full blocks of prompt and answer, by group; blocks behind them are nobody else's.
    pub ids: Vec<Arc<[u64]>>,
    /// Its blocks are shared with others, but it does not look for theirs.
    pub skips_cache: bool,
    /// Prompt tokens found in the cache when it was first admitted.
    pub cached: Option<u64>,
    /// When it came, was admitted, and had its first token.
    pub added_us: u64,
    /// See `added_us`.
    pub admitted_us: u64,
    /// See `added_us`.
    pub first_us: u64,
    /// Prompt and answer so far.
    tokens: u64,
    computed: u64,
    tables: Vec<Table>,
}

/// A job's blocks in one group.
#[derive(Debug, Default)]
struct Table {
    blocks: Vec<u32>,
    /// Leading blocks that have their name, or need none.
    named: usize,
    /// Leading blocks that were given back.
    skipped: usize,
}

impl Job {
    /// A request with the ids of its full blocks by group.
    pub fn new(request: usize, input: u64, output: u64, ids: Vec<Arc<[u64]>>) -> Self {
        let tables = ids.iter().map(|_| Table::default()).collect();
        Self {
            request,
            input,
            output,
            ids,
            skips_cache: false,
            cached: None,
            added_us: 0,
            admitted_us: 0,
            first_us: 0,
            tokens: input,
            computed: 0,
            tables,
        }
    }

    fn id(&self, group: usize, block: usize) -> u64 {
        let own = 1 << 62 | (self.request as u64) << 24 | block as u64;
        self.ids[group].get(block).copied().unwrap_or(own)
    }
}

/// Blocks of the first group that an engine says it has, or has no more.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// Evicted.
    Removed(Vec<u64>),
    /// Full, in order, behind `parent`.
    Stored {
        /// The block before the first one.
        parent: Option<u64>,
        /// The blocks.
        ids: Vec<u64>,
    },
}

/// Sums over the engine's life; lengths and times are of requests that have ended, as vLLM counts them.
#[derive(Debug, Default, Clone, Copy)]
pub struct Totals {
    /// Prompt tokens that were computed.
    pub prefilled: u64,
    /// Requests that came.
    pub requests: u64,
    /// Requests that have ended.
    pub finished: u64,
    /// Their prompts.
    pub input: u64,
    /// Their answers.
    pub output: u64,
    /// How long they waited to be admitted.
    pub queue_us: u64,
    /// From there to the first token.
    pub prefill_us: u64,
    /// From there to the last one.
    pub decode_us: u64,
    /// Requests that gave their blocks back and began again.
    pub preemptions: u64,
    /// Time in steps.
    pub busy_us: u64,
}

/// What a step brought.
#[derive(Debug, Default)]
pub struct Done {
    /// Requests that got a token, and the job itself of those that have ended.
    pub advanced: Vec<(usize, Option<Job>)>,
    /// What changed in the cache, in order.
    pub events: Vec<Event>,
}

/// An engine.
///
/// # Source
/// vLLM 0.32: `v1/core/sched/scheduler.py` (running requests first, in their order; the youngest gives way; then
/// waiting ones, in chunks), `v1/core/kv_cache_manager.py` (blocks have their names when they are scheduled, and are
/// let go from the last to the first).
pub struct Engine {
    config: EngineConfig,
    pool: Pool,
    jobs: Vec<Option<Job>>,
    vacant: Vec<usize>,
    waiting: VecDeque<usize>,
    running: Vec<usize>,
    /// Jobs of the step that is under way, and how many tokens of each it computes.
    chunks: Vec<(usize, u64)>,
    events: Vec<Event>,
    is_in_step: bool,
    /// Sums over its life.
    pub totals: Totals,
}

impl Engine {
    /// An idle engine with an empty cache.
    pub fn new(config: EngineConfig) -> Self {
        Self {
            pool: Pool::new(config.blocks),
            config,
            jobs: Vec::new(),
            vacant: Vec::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            chunks: Vec::new(),
            events: Vec::new(),
            is_in_step: false,
            totals: Totals::default(),
        }
    }

    /// Whether [`end`](Self::end) is awaited.
    pub fn is_in_step(&self) -> bool {
        self.is_in_step
    }

    /// Requests in its batch.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Requests that are not admitted yet.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Share of its blocks that requests use, 0 to 1.
    pub fn usage(&self) -> f64 {
        self.pool.usage()
    }

    /// From now on it is so many times as slow as its timing says.
    pub fn set_slowness(&mut self, slowness: f64) {
        self.config.slowness = slowness;
    }

    /// Tokens of a prompt that a request could reuse now: the last token is computed anew.
    pub fn cached_tokens(&self, ids: &[Arc<[u64]>], input: u64) -> u64 {
        longest_hit(&self.config.groups, ids, input - 1, &self.pool).0
    }

    /// Whether it has a block of its first group.
    pub fn holds(&self, id: u64) -> bool {
        self.pool.find((0, id)).is_some()
    }

    /// Forget the cache. No request is running.
    pub fn clear(&mut self) {
        assert!(self.running.is_empty(), "vLLM clears an idle cache only");
        self.pool.clear();
    }

    /// Have a request wait; however many do, so that all ways to route serve the same requests.
    pub fn add(&mut self, job: Job) {
        let smallest = self.config.groups.iter().map(|group| group.block_size).min();
        let longest = u64::from(self.config.blocks - 1) * smallest.unwrap_or(1)
            / self.config.groups.len() as u64;
        assert!(job.input > 0 && job.output > 0 && job.input + job.output <= longest, "{job:?}");
        self.totals.requests += 1;
        let place = self.vacant.pop().unwrap_or(self.jobs.len());
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

    /// Plan the next step: how long it takes in microseconds, and the requests admitted for the first
    /// time with the tokens they found in the cache. `None` when there is nothing to do.
    pub fn begin(&mut self, now_us: u64, admitted: &mut Vec<(usize, u64)>) -> Option<u64> {
        assert!(!self.is_in_step);
        let mut budget = self.config.max_batched_tokens;
        let mut is_short = false;
        self.chunks.clear();
        let mut at = 0;
        while at < self.running.len() && budget > 0 {
            let place = self.running[at];
            let job = self.job(place);
            let count = (job.tokens - job.computed).min(budget);
            if !self.has_room(place, count, &mut is_short) {
                break;
            }
            self.allocate(place, count);
            self.chunks.push((place, count));
            budget -= count;
            at += 1;
        }
        while budget > 0 && !is_short {
            let Some((place, count)) = self.admit(budget, now_us, admitted) else { break };
            self.chunks.push((place, count));
            budget -= count;
        }
        if self.chunks.is_empty() {
            assert!(self.waiting.is_empty(), "a request that fits is admitted in the end");
            return None;
        }
        self.is_in_step = true;
        let mut step = Step::default();
        for &(place, count) in &self.chunks {
            let job = self.jobs[place].as_ref().expect("it has not ended");
            if job.computed >= job.input && count == 1 {
                step.decode(job.computed);
            } else {
                step.prefill(job.computed, count);
            }
        }
        self.totals.prefilled += step.prefill as u64;
        let took_us = step.us(&self.config.timing, self.config.slowness);
        self.totals.busy_us += took_us;
        Some(took_us)
    }

    /// Let the step take effect.
    pub fn end(&mut self, now_us: u64) -> Done {
        assert!(self.is_in_step);
        self.is_in_step = false;
        let mut done = Done::default();
        for (place, count) in std::mem::take(&mut self.chunks) {
            let job = self.job(place);
            job.computed += count;
            if job.computed < job.tokens {
                continue;
            }
            job.tokens += 1;
            if job.first_us == 0 {
                job.first_us = now_us;
            }
            let (request, is_finished) = (job.request, job.tokens == job.input + job.output);
            if !is_finished {
                done.advanced.push((request, None));
                continue;
            }
            self.running.retain(|&other| other != place);
            self.let_go(place);
            let job = self.jobs[place].take().expect("it ends once");
            self.vacant.push(place);
            self.totals.finished += 1;
            self.totals.input += job.input;
            self.totals.output += job.output;
            self.totals.queue_us += job.admitted_us - job.added_us;
            self.totals.prefill_us += job.first_us - job.admitted_us;
            self.totals.decode_us += now_us - job.first_us;
            done.advanced.push((request, Some(job)));
        }
        done.events = std::mem::take(&mut self.events);
        done
    }

    /// Blocks for `count` more tokens; younger requests give way. False when it gave way itself.
    fn has_room(&mut self, place: usize, count: u64, is_short: &mut bool) -> bool {
        loop {
            self.give_back(place);
            if self.missing(place, count) <= self.pool.free() {
                return true;
            }
            *is_short = true;
            let victim = self.running.pop().expect("the one that asks is running");
            self.let_go(victim);
            self.job(victim).computed = 0;
            self.waiting.push_front(victim);
            self.totals.preemptions += 1;
            if victim == place {
                return false;
            }
        }
    }

    /// Blocks that `count` more tokens need beside those that it has.
    fn missing(&self, place: usize, count: u64) -> usize {
        let job = self.jobs[place].as_ref().expect("it has not ended");
        let tokens = job.computed + count;
        let of = |(table, group): (&Table, &Group)| {
            (tokens.div_ceil(group.block_size) as usize).saturating_sub(table.blocks.len())
        };
        job.tables.iter().zip(&self.config.groups).map(of).sum()
    }

    /// Give back blocks that no layer of their group looks at any more.
    fn give_back(&mut self, place: usize) {
        let Self { pool, jobs, config, .. } = self;
        let job = jobs[place].as_mut().expect("it has not ended");
        for (table, group) in job.tables.iter_mut().zip(&config.groups) {
            let skipped = (group.skipped(job.computed) / group.block_size) as usize;
            let skipped = skipped.min(table.blocks.len());
            if skipped > table.skipped {
                let gone = &mut table.blocks[table.skipped..skipped];
                pool.release(gone.iter().rev().copied());
                gone.fill(NULL);
                table.skipped = skipped;
            }
        }
    }

    /// Take the blocks for `count` more tokens, and name those that are full then.
    fn allocate(&mut self, place: usize, count: u64) {
        let Self { pool, jobs, config, events, .. } = self;
        let job = jobs[place].as_mut().expect("it has not ended");
        let tokens = job.computed + count;
        for (at, group) in config.groups.iter().enumerate() {
            let table = &mut job.tables[at];
            while (table.blocks.len() as u64) < tokens.div_ceil(group.block_size) {
                table.blocks.push(pool.take());
            }
        }
        let removed: Vec<u64> =
            pool.drain_removed().into_iter().filter(|key| key.0 == 0).map(|key| key.1).collect();
        if !removed.is_empty() {
            events.push(Event::Removed(removed));
        }
        let align = alignment(&config.groups);
        for (at, group) in config.groups.iter().enumerate() {
            let (first, full) = (job.tables[at].named, (tokens / group.block_size) as usize);
            if full <= first {
                continue;
            }
            let ids: Vec<u64> = (first..full).map(|block| job.id(at, block)).collect();
            let named = match group.reach {
                Reach::Window(wide) if !config.names_all_windows => {
                    let end = (job.input - 1) / align * align / group.block_size;
                    let needed = (wide - 1).div_ceil(group.block_size);
                    end.saturating_sub(needed) as usize..end as usize
                }
                _ => 0..full,
            };
            for (number, (block, &id)) in
                (first..).zip(job.tables[at].blocks[first..full].iter().zip(&ids))
            {
                if *block != NULL && named.contains(&number) {
                    pool.name(*block, (at as u8, id));
                }
            }
            job.tables[at].named = full;
            if at == 0 {
                let parent = first.checked_sub(1).map(|block| job.id(0, block));
                events.push(Event::Stored { parent, ids });
            }
        }
    }

    fn let_go(&mut self, place: usize) {
        let Self { pool, jobs, .. } = self;
        let job = jobs[place].as_mut().expect("it has not ended");
        for table in &mut job.tables {
            let Table { blocks, .. } = std::mem::take(table);
            pool.release(blocks.into_iter().rev());
        }
    }

    fn admit(
        &mut self,
        budget: u64,
        now_us: u64,
        admitted: &mut Vec<(usize, u64)>,
    ) -> Option<(usize, u64)> {
        let place =
            *self.waiting.front().filter(|_| self.running.len() < self.config.max_running)?;
        let job = self.jobs[place].as_ref()?;
        let none = || (0, vec![Vec::new(); self.config.groups.len()]);
        let (cached, hits) = match job.skips_cache {
            true => none(),
            false => longest_hit(&self.config.groups, &job.ids, job.tokens - 1, &self.pool),
        };
        let count = (job.tokens - cached).min(budget);
        let fits = |(group, hit): (&Group, &Vec<u32>)| {
            (cached + count).div_ceil(group.block_size) as usize - hit.len()
                + self.pool.free_among(hit)
        };
        let needed: usize = self.config.groups.iter().zip(&hits).map(fits).sum();
        if needed > self.pool.free() {
            return None;
        }
        for (at, hit) in hits.into_iter().enumerate() {
            self.pool.touch(&hit);
            let table = &mut self.jobs[place].as_mut()?.tables[at];
            (table.named, table.skipped, table.blocks) = (hit.len(), 0, hit);
        }
        let job = self.job(place);
        job.computed = cached;
        if job.cached.is_none() {
            job.cached = Some(cached);
            job.admitted_us = now_us;
            admitted.push((job.request, cached));
        }
        self.allocate(place, count);
        self.waiting.pop_front();
        self.running.push(place);
        Some((place, count))
    }
}
