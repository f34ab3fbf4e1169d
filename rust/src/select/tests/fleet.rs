//! Simple engines before one or several selectors: one prompt at a time beside all answers, endless caches.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::policy::{AUTO, Profile, Settings, registry};
use crate::router::{Policies, Usage};

pub(super) const FLEET_BLOCK: u32 = 16;
/// What a decode step takes, and more for each answer in it.
const STEP_MS: f64 = 10.0;
const STEP_MS_PER_ANSWER: f64 = 0.2;

struct Job {
    /// Held until the answer ends.
    reservation: Reservation,
    prompt: Arc<Prompt>,
    /// Tokens to compute; `None` before the prompt's turn.
    prefill_left: Option<f64>,
    output: u64,
    output_left: f64,
}

struct Engine {
    tokens_per_ms: f64,
    waiting: VecDeque<Job>,
    running: Vec<Job>,
    held: HashSet<u64>,
}

impl Engine {
    /// A millisecond of work; a prompt that it stored.
    fn work(&mut self, scatter: f64, chance: &mut SmallRng) -> Option<Arc<Prompt>> {
        let is_prefilling = !self.waiting.is_empty();
        let step_ms = STEP_MS + STEP_MS_PER_ANSWER * self.running.len() as f64;
        let share = if is_prefilling { 0.5 } else { 1.0 } / step_ms;
        self.running.iter_mut().for_each(|job| job.output_left -= share);
        for done in self.running.extract_if(.., |job| job.output_left <= 0.0) {
            let output_tokens = Some(done.output);
            done.reservation.used(Usage { output_tokens, ..Usage::default() });
        }
        let job = self.waiting.front_mut()?;
        let Prompt { sequence_hashes, isl_tokens, .. } = &*job.prompt;
        let left = job.prefill_left.get_or_insert_with(|| {
            let held = sequence_hashes.iter().take_while(|hash| self.held.contains(*hash));
            let cached = held.count() as u64 * u64::from(FLEET_BLOCK);
            let tokens = isl_tokens.saturating_sub(cached).max(1) as f64;
            tokens * chance.random_range(1.0 / (1.0 + scatter)..=1.0 + scatter)
        });
        *left -= self.tokens_per_ms;
        if *left > 0.0 {
            return None;
        }
        let done = self.waiting.pop_front()?;
        done.reservation.first_token();
        self.held.extend(&done.prompt.sequence_hashes);
        let prompt = Arc::clone(&done.prompt);
        self.running.push(done);
        Some(prompt)
    }
}

/// Engines, and the routers that send them requests: each knows its own bookings only, and all events.
pub(super) struct Fleet {
    pub routers: Vec<Bench>,
    engines: Vec<Engine>,
    chance: SmallRng,
    now_ms: u64,
    /// By how much a prompt may take longer or shorter than its tokens do: 0.25 is a quarter.
    pub scatter: f64,
    /// When each request went where.
    pub sent: Vec<(u64, usize)>,
}

impl Fleet {
    /// `workers` engines of `tokens_per_ms` each behind `routers` that choose by `auto`.
    pub fn new(routers: u64, workers: u64, tokens_per_ms: f64) -> Self {
        let made = |seed| {
            let settings = Settings::new(Profile::Document);
            let auto = registry::build(AUTO, &settings, &mut SmallRng::seed_from_u64(seed));
            let policies = Policies { active: Some(auto.unwrap()), ..Policies::default() };
            let router = RouterConfig {
                block_size: FLEET_BLOCK,
                estimates_queue: true,
                seed,
                ..RouterConfig::default()
            };
            let config = SelectorConfig { router, journal_bytes: 0, ..SelectorConfig::default() };
            let options = CatalogOptions { predicted_ttl_ms: 5_000, ..CatalogOptions::default() };
            let bench = with_policies(config, policies, options, workers);
            bench.register(workers);
            bench
        };
        let engine = |_| Engine {
            tokens_per_ms,
            waiting: VecDeque::new(),
            running: Vec::new(),
            held: HashSet::new(),
        };
        Self {
            routers: (0..routers).map(made).collect(),
            engines: (0..workers).map(engine).collect(),
            chance: SmallRng::seed_from_u64(11),
            now_ms: 0,
            scatter: 0.25,
            sent: Vec::new(),
        }
    }

    pub fn set_speed(&mut self, worker: usize, tokens_per_ms: f64) {
        self.engines[worker].tokens_per_ms = tokens_per_ms;
    }

    /// Have a router send a prompt for an answer of `output` tokens.
    pub fn send(&mut self, router: usize, prompt: &Arc<Prompt>, output: u64) {
        let (reservation, _) = self.routers[router].selector.select(&Ask::new(prompt)).unwrap();
        let worker = reservation.worker().instance_id as usize;
        self.sent.push((self.now_ms, worker));
        self.engines[worker].waiting.push_back(Job {
            reservation,
            prompt: Arc::clone(prompt),
            prefill_left: None,
            output,
            output_left: output as f64,
        });
    }

    /// A prompt that begins with `shared` and goes on with `own` tokens that no other one has.
    pub fn prompt(&mut self, shared: &[u32], own: usize) -> Arc<Prompt> {
        let mut tokens = shared.to_vec();
        tokens.extend((0..own).map(|_| self.chance.random::<u32>() >> 1));
        Arc::new(self.routers[0].prompt(&tokens))
    }

    /// Let a millisecond pass.
    pub fn pass(&mut self) {
        self.now_ms += 1;
        self.routers.iter().for_each(|router| router.clock.advance(1));
        for (id, engine) in (0..).zip(&mut self.engines) {
            if let Some(prompt) = engine.work(self.scatter, &mut self.chance) {
                self.routers.iter().for_each(|router| {
                    router.store_prompt(worker(id), Tier::Device, &prompt);
                });
            }
        }
    }

    /// Let `ms` pass, in which requests come at random, `per_s` a second on average, by any router.
    pub fn serve(
        &mut self,
        ms: u64,
        per_s: f64,
        mut next: impl FnMut(&mut Self) -> (Arc<Prompt>, u64),
    ) {
        for _ in 0..ms {
            if self.chance.random_bool(per_s / 1_000.0) {
                let (prompt, output) = next(self);
                let router = self.chance.random_range(0..self.routers.len());
                self.send(router, &prompt, output);
            }
            self.pass();
        }
    }

    /// Requests that each worker got in the last `ms`, over the mean.
    pub fn shares(&self, ms: u64) -> Vec<f64> {
        let since_ms = self.now_ms.saturating_sub(ms);
        let mut counts = vec![0_u32; self.engines.len()];
        for (_, worker) in self.sent.iter().rev().take_while(|(at_ms, _)| *at_ms >= since_ms) {
            counts[*worker] += 1;
        }
        let mean = f64::from(counts.iter().sum::<u32>()) / counts.len() as f64;
        counts.into_iter().map(|count| f64::from(count) / mean).collect()
    }
}
