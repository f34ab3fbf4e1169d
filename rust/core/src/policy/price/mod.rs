//! `auto`: picks the worker where a request costs all requests the least, in prompt tokens.
//!
//! One unit covers everything that a request causes: the prefill queued before it, its own uncached
//! tokens, the answers that its prefill stalls, the decode steps that it lengthens, and the blocks
//! that it evicts from a full cache. [`rule`] is the formula; the other modules learn its inputs
//! from bookings, first tokens, ends and evictions, each in bounded memory.

mod gaps;
pub(super) mod marks;
mod pace;
mod retention;
mod rule;
#[cfg(test)]
mod tests;

use hashbrown::HashMap;
use parking_lot::Mutex;
use rand::RngCore;

use super::contract::{Candidates, Context, Finished, RoutePolicy, Sample, Ticket, pool_label};
use super::cost::{CandidateCost, Stage};
use super::decision::Choice;
use super::select::{Lowest, by_cost};
use crate::ids::Worker;
use gaps::Gaps;
use marks::Wanted;
use pace::{LastWholes, Pace};
use retention::Retention;
use rule::{MissCost, MostPressure, Rates, Tariff};

/// The policy's name.
pub const AUTO: &str = "auto";

/// How long a worker's rates stay valid without new data: in requests, as a share of its cache's
/// retention, and in milliseconds.
const RATES_STAND: f64 = 0.05;
const RATES_STAND_MS: u64 = 1_000;

/// State of one worker. Decisions visit all workers, so their data is contiguous.
#[derive(Debug)]
struct Known {
    worker: Worker,
    rates: Rates,
    /// When the rates expire, in time and in requests; 0 after new data.
    until_ms: u64,
    until_request: u64,
    learned: Box<Learned>,
}

#[derive(Debug, Default)]
struct Learned {
    /// Of the last request that was routed to it; its times are compared with those of others there.
    pool: Box<str>,
    retention: Retention,
    pace: Pace,
    wholes: LastWholes,
}

impl Known {
    fn new(worker: Worker) -> Self {
        Self {
            worker,
            rates: Rates::NEUTRAL,
            until_ms: 0,
            until_request: 0,
            learned: Box::default(),
        }
    }

    /// `now` in requests.
    #[inline(always)]
    fn rates(&mut self, gaps: &Gaps, now_ms: u64, now: u64) -> Rates {
        if now_ms >= self.until_ms || now >= self.until_request {
            self.refresh(gaps, now_ms, now);
        }
        self.rates
    }

    #[cold]
    fn refresh(&mut self, gaps: &Gaps, now_ms: u64, now: u64) {
        let Learned { retention, pace, .. } = &*self.learned;
        let age = retention.age(now).unwrap_or(f64::INFINITY);
        self.rates = Rates {
            slowness: pace.slowness(now_ms),
            pressure: rule::pressure(retention, gaps, now),
        };
        self.until_ms = now_ms.saturating_add(RATES_STAND_MS);
        // Saturates, like every cast from float to integer.
        self.until_request = now.saturating_add(((age * RATES_STAND) as u64).max(1));
    }
}

/// State of the traffic of one pool: the workers of a model that compete for its requests.
#[derive(Debug, Default)]
struct Traffic {
    /// Requests so far: the clock for gaps and ages of blocks. When engines slow down or fewer users
    /// come, both take longer but span about as many requests as before.
    requests: u64,
    gaps: Gaps,
    wanted: Wanted,
    answers: pace::Answers,
    /// Of streamed answers, to the first token, and of others, to the end: one says nothing about
    /// the other.
    prefills: [pace::Prefills; 2],
    wholes: pace::Wholes,
    steps: pace::Steps,
    most_pressure: MostPressure,
}

impl Traffic {
    /// Milliseconds that a prompt token takes.
    fn token_ms(&self) -> f64 {
        match self.prefills[0].seconds_per_token() {
            0.0 => self.wholes.ms_per_token(),
            seconds => seconds * 1_000.0,
        }
    }
}

/// Ascending by worker, in the order of the candidates.
#[derive(Debug, Default)]
struct Workers(Vec<Known>);

impl Workers {
    /// The index of a worker, or where to insert it.
    fn place(&self, worker: Worker) -> std::result::Result<usize, usize> {
        self.0.binary_search_by_key(&worker, |known| known.worker)
    }

    /// The state of a worker that requests were routed to.
    fn find(&mut self, worker: Worker) -> Option<&mut Known> {
        let at = self.place(worker).ok()?;
        Some(&mut self.0[at])
    }

    /// The same, created if missing.
    fn known(&mut self, worker: Worker) -> &mut Known {
        let at = match self.place(worker) {
            Ok(at) => at,
            Err(at) => {
                self.0.insert(at, Known::new(worker));
                at
            }
        };
        &mut self.0[at]
    }
}

#[derive(Debug, Default)]
struct State {
    workers: Workers,
    /// By pool.
    traffic: HashMap<Box<str>, Traffic>,
}

/// The policy.
///
/// # Cost
/// One pass over the candidates, O(1) for each; O(log blocks) for the prompt under the router's
/// lock. Memory: about 8 KiB per worker, 3 MiB per pool.
#[derive(Debug, Default)]
pub struct PricePolicy {
    state: Mutex<State>,
}

impl PricePolicy {
    /// Fills `costs` with the request's cost on every candidate; returns the lowest.
    fn price(
        &self,
        context: &Context<'_>,
        candidates: &Candidates<'_>,
        costs: &mut Vec<CandidateCost>,
    ) -> Lowest {
        let request = &context.request;
        let size = f64::from(request.block_size);
        let input = request.isl_tokens as f64;
        let mut guard = self.state.lock();
        let State { workers, traffic } = &mut *guard;
        let traffic = traffic.entry_ref(context.pool).or_default();
        let step_tokens = traffic.steps.tokens(traffic.token_ms());
        let Traffic { requests, gaps, wanted, answers, most_pressure, .. } = traffic;
        let marks = context.memo.marks(context.sequence_hashes);
        let overlaps = candidates.list.iter().map(|one| one.overlap_blocks);
        let weights = wanted.weights(marks, overlaps);
        let miss = MissCost::new(input, size, &weights);
        let answer_tokens = answers.mean_tokens(context.now_ms);
        let most_pressure = most_pressure.value();
        let tariff = Tariff::new(answer_tokens, request.stage, miss, most_pressure, step_tokens);
        let mut lowest = Lowest::new();
        let mut next = 0;
        costs.clear();
        costs.reserve(candidates.len());
        for (index, one) in candidates.list.iter().enumerate() {
            let mut rates = Rates::NEUTRAL;
            // Both are in worker order.
            while let Some(known) = workers.0.get_mut(next)
                && known.worker <= one.worker
            {
                next += 1;
                if known.worker == one.worker {
                    rates = known.rates(gaps, context.now_ms, *requests);
                    break;
                }
            }
            let (cost, price) =
                tariff.price(one.overlap_blocks, one.lower_milliblocks, &one.load, rates);
            lowest.see(index, cost, || u64::from(one.load.requests));
            costs.push(CandidateCost { cost, price });
        }
        lowest
    }
}

impl RoutePolicy for PricePolicy {
    fn name(&self) -> &str {
        AUTO
    }

    fn needs_text(&self) -> bool {
        false
    }

    fn needs_tokens(&self) -> bool {
        true
    }

    fn choose(
        &self,
        context: &Context<'_>,
        candidates: &Candidates<'_>,
        costs: &mut Vec<CandidateCost>,
        rng: &mut dyn RngCore,
    ) -> Option<Choice> {
        let lowest = self.price(context, candidates, costs);
        // Among equal costs the fewest requests win, then chance: round-robin would move the
        // sessions of one worker to the next one, again and again.
        let rank = |at: usize| u64::from(candidates.requests(at));
        by_cost(costs, lowest, context.request.temperature, rank, rng)
    }

    fn estimates_queue(&self) -> bool {
        true
    }

    fn unseen_prefill_ms(&self, pool: &str, tokens: u64) -> Option<u64> {
        let state = self.state.lock();
        Some(state.traffic.get(pool)?.wholes.prefill_ms(tokens))
    }

    fn routed(&self, context: &Context<'_>, candidates: &Candidates<'_>, choice: &Choice) {
        let chosen = &candidates.list[choice.index];
        let own = context.request.uncached_tokens(chosen);
        let marks = context.memo.marks(context.sequence_hashes);
        let best = candidates.list.iter().map(|one| one.overlap_blocks).max().unwrap_or(0);
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let traffic = state.traffic.entry_ref(context.pool).or_default();
        traffic.requests += 1;
        // Of a decode stage, the turn was seen before, when its prefill was routed.
        if context.request.stage != Stage::Decode {
            let Context { sequence_hashes, is_retry, .. } = *context;
            traffic.gaps.see(sequence_hashes, best as usize, is_retry, traffic.requests);
        }
        let number = traffic.requests;
        traffic.wanted.add(marks);
        let known = state.workers.known(chosen.worker);
        if *known.learned.pool != *context.pool {
            known.learned.pool = context.pool.into();
        }
        if context.is_indexed {
            known.learned.retention.used(context.local_hashes, number);
        }
        traffic.most_pressure.see(known.rates.pressure, candidates.len());
        drop(guard);
        context.memo.set_ticket(Ticket {
            marks: marks.clone(),
            work_tokens: chosen.load.queued_tokens.saturating_add(own) as f64,
            own_tokens: own as f64,
            number,
            tail: context.sequence_hashes.last().copied(),
            is_whole: context.is_whole,
            stage: context.request.stage,
        });
    }

    fn finished(&self, finished: &Finished<'_>) {
        let Some(ticket) = finished.ticket else { return };
        let mut guard = self.state.lock();
        let state = &mut *guard;
        // A worker that has left meanwhile stays forgotten.
        let mut known = state.workers.find(finished.worker);
        // Nor does a closed pool come back with its last requests.
        let Some(traffic) = state.traffic.get_mut(finished.pool) else { return };
        traffic.wanted.remove(&ticket.marks);
        if finished.output_tokens > 0 && ticket.stage != Stage::Prefill {
            traffic.answers.see(finished.output_tokens as f64, finished.now_ms);
        }
        if ticket.stage == Stage::Decode {
            return;
        }
        // Some gateways report only the end.
        let is_answered = finished.first_token_ms.is_some() || finished.output_tokens > 0;
        if let Some(last) = ticket.tail.filter(|_| !is_answered) {
            traffic.gaps.failed(last, ticket.number);
        }
        let Some(ms) = finished.first_token_ms else { return };
        if let Some(known) = known.as_mut().filter(|_| ticket.is_whole) {
            let (last, answer) = (&mut known.learned.wholes, finished.output_tokens as f64);
            traffic.wholes.see(last, ticket.own_tokens, answer, ms as f64);
        }
        if ticket.stage != Stage::Prefill {
            let token_ms = traffic.token_ms();
            let (steps, prefill_ms) = match ticket.is_whole {
                true => (finished.output_tokens, token_ms * ticket.work_tokens),
                false => (finished.output_tokens.saturating_sub(1), ms as f64),
            };
            let took_ms = finished.now_ms.saturating_sub(finished.routed_at_ms) as f64;
            traffic.steps.see(steps, took_ms - prefill_ms, token_ms);
        }
        let prefills = &mut traffic.prefills[usize::from(ticket.is_whole)];
        let residual = prefills.see(ticket.work_tokens, ms as f64);
        if let (Some(known), Some(residual)) = (known, residual) {
            known.learned.pace.see(residual, finished.now_ms);
            known.until_ms = 0;
        }
        if prefills.is_time_to_compare() {
            // Other pools have other models, and their times other expectations.
            let all = state.workers.0.iter_mut().map(|known| &mut *known.learned);
            let rivals = all.filter(|learned| *learned.pool == *finished.pool);
            Pace::compare(rivals.map(|learned| &mut learned.pace));
        }
    }

    fn watches_caches(&self) -> bool {
        true
    }

    fn evicted(&self, worker: Worker, local_hashes: &[u64]) {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let Some(known) = state.workers.find(worker) else { return };
        let Some(traffic) = state.traffic.get(&known.learned.pool) else { return };
        known.learned.retention.evicted(local_hashes, traffic.requests);
        known.until_request = 0;
    }

    fn cleared(&self, worker: Worker) {
        let mut state = self.state.lock();
        let Some(known) = state.workers.find(worker) else { return };
        known.learned.retention = Retention::default();
        known.until_request = 0;
    }

    fn removed(&self, worker: Worker) {
        let mut state = self.state.lock();
        if let Ok(at) = state.workers.place(worker) {
            state.workers.0.remove(at);
        }
    }

    fn closed(&self, pool: &str) {
        self.state.lock().traffic.remove(pool);
    }

    fn samples(&self, now_ms: u64, visit: &mut dyn FnMut(Sample<'_>)) {
        let state = self.state.lock();
        for (pool, traffic) in &state.traffic {
            let pool = pool_label(pool);
            let label = ("model", pool.as_str());
            let mut tell = |name, help, value| visit(Sample { name, help, label, value });
            let (mean, spread, count) = traffic.gaps.ln_gap();
            tell(
                "auto_answer_tokens",
                "Mean length of an answer in the last minute",
                traffic.answers.clone().mean_tokens(now_ms),
            );
            tell(
                "auto_session_gap_requests",
                "Typical number of requests to the model between two of a session",
                mean.exp(),
            );
            tell(
                "auto_session_gap_log_spread",
                "Spread of the sessions' gaps, in units of ln(requests)",
                spread,
            );
            tell(
                "auto_session_gaps_total",
                "Observed gaps between the requests of a session",
                count as f64,
            );
            tell(
                "auto_wanted_prefixes",
                "Prefixes that requests in flight want",
                traffic.wanted.len() as f64,
            );
            tell(
                "auto_prefill_seconds_per_token",
                "Time that a streamed prompt takes per uncached token",
                traffic.prefills[0].seconds_per_token(),
            );
            tell(
                "auto_step_seconds",
                "Time between two tokens of an answer",
                traffic.steps.ms() / 1_000.0,
            );
            tell(
                "auto_whole_seconds_per_token",
                "Time that each prompt token adds to an answer without streaming",
                traffic.wholes.ms_per_token() / 1_000.0,
            );
        }
        for known in &state.workers.0 {
            let Learned { pool, retention, pace, .. } = &*known.learned;
            let worker = known.worker.to_string();
            let label = ("worker", worker.as_str());
            let mut tell = |name, help, value| visit(Sample { name, help, label, value });
            tell(
                "auto_worker_slowness_ratio",
                "The worker's time to the first token relative to the others'",
                pace.slowness(now_ms),
            );
            let traffic = state.traffic.get(pool);
            let requests = traffic.map_or(0, |one| one.requests);
            if let Some(age) = retention.age(requests) {
                tell(
                    "auto_worker_retention_requests",
                    "Requests to the model since the last use of the blocks that the worker evicts now",
                    age,
                );
            }
            tell(
                "auto_worker_eviction_price_ratio",
                "Price of pushing a token into the worker's full cache, in prompt tokens; 0 while it has room",
                traffic.map_or(0.0, |one| rule::pressure(retention, &one.gaps, requests)),
            );
        }
    }
}
