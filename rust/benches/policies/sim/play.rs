//! One row's run: arrivals, turns, decisions, passes, events and health checks in the order of time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use kvflash::clock::ManualClock;
use kvflash::fair::{Cost, FairConfig, FairQueue, Grant, Options, Used};
use kvflash::ids::{Tier, Worker};
use kvflash::index::{Block, DEFAULT_SEED};
use kvflash::policy::EngineMetrics;
use kvflash::router::{Facts, Usage};
use kvflash::select::{Ask, Outcome as End, Reservation, Selector};

use super::engine::{Engine, EngineConfig, Event, Job};
use super::outcome::Outcome;
use super::row::Row;
use super::workload::{Workload, local_hash, text};

/// Engines of every run.
pub const WORKERS: usize = 8;
/// How often engines' metrics are asked for.
const PROBE_US: u64 = 2_000_000;
/// How often the frontend's timer runs.
const TICK_US: u64 = 1_000_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    PassEnd(usize),
    Probe,
    Tick,
}

/// A request on its way.
struct Flight {
    worker: usize,
    reservation: Reservation,
    grant: Option<Grant>,
}

struct Turns {
    queue: FairQueue<usize>,
    running: usize,
    limit: usize,
}

struct Play<'a> {
    workload: &'a Workload,
    row: &'a Row,
    clock: Arc<ManualClock>,
    selector: Selector,
    engines: Vec<Engine>,
    turns: Option<Turns>,
    flights: Vec<Option<Flight>>,
    due: BinaryHeap<Reverse<(u64, Due)>>,
    now_us: u64,
    text: Vec<u8>,
    admitted: Vec<(usize, u64)>,
    outcome: Outcome,
}

/// Play `workload` by `row`, until the last answer is complete.
pub fn play(workload: &Workload, row: &Row) -> Outcome {
    let clock = Arc::new(ManualClock::default());
    let workers: Vec<Worker> = (0..WORKERS).map(worker).collect();
    let longest = workload.requests.iter().map(|one| one.input).max().unwrap_or(0);
    let turns = row.fairness.map(|(discipline, max_running)| {
        let config = FairConfig {
            discipline,
            // Nobody is refused: all rows serve the same requests.
            max_queued: usize::MAX,
            max_queued_per_client: usize::MAX,
            max_wait_ms: u64::MAX / 2,
            ..FairConfig::default()
        };
        let queue = FairQueue::new(config).expect("the limits are legal");
        Turns { queue, running: 0, limit: max_running * WORKERS }
    });
    let config = EngineConfig::mocker(workload.block_size);
    let mut play = Play {
        workload,
        row,
        selector: row.selector(&workers, workload.block_size as u32, &clock),
        clock,
        engines: (0..WORKERS).map(|_| Engine::new(config)).collect(),
        turns,
        flights: (0..workload.requests.len()).map(|_| None).collect(),
        due: BinaryHeap::from([Reverse((0, Due::Probe)), Reverse((0, Due::Tick))]),
        now_us: 0,
        // Policies that do not cut the text look at its length only.
        text: vec![0; 4 * longest as usize],
        admitted: Vec::new(),
        outcome: Outcome::new(workload),
    };
    play.run();
    let totals = play.engines.iter().map(|engine| engine.totals).collect();
    let Play { mut outcome, now_us, .. } = play;
    outcome.end(totals, now_us);
    outcome
}

fn worker(number: usize) -> Worker {
    Worker::new(number as u64 + 1, 0)
}

impl Play<'_> {
    fn run(&mut self) {
        let mut next = 0;
        let mut left = self.workload.requests.len();
        while left > 0 {
            let arrival_us = self.workload.requests.get(next).map(|request| request.at_us);
            let Reverse((due_us, _)) = *self.due.peek().expect("the timers are always due");
            if let Some(at_us) = arrival_us.filter(|&at_us| at_us < due_us) {
                self.pass_time(at_us);
                self.arrive(next);
                next += 1;
                continue;
            }
            let Some(Reverse((at_us, due))) = self.due.pop() else { break };
            self.pass_time(at_us);
            match due {
                Due::PassEnd(at) => left -= self.end_pass(at),
                Due::Probe => {
                    (0..WORKERS).for_each(|at| self.probe(at));
                    self.due.push(Reverse((at_us + PROBE_US, Due::Probe)));
                }
                Due::Tick => {
                    self.selector.tick();
                    self.due.push(Reverse((at_us + TICK_US, Due::Tick)));
                }
            }
        }
    }

    fn pass_time(&mut self, to_us: u64) {
        self.clock.advance(to_us / 1_000 - self.now_us / 1_000);
        self.now_us = to_us;
    }

    fn arrive(&mut self, number: usize) {
        if self.turns.is_none() {
            return self.dispatch(number, None);
        }
        let prompt = &self.workload.prompts[number];
        let held = self.selector.preview(&Ask::new(prompt)).expect("there are workers").0;
        let cached = prompt.reusable_blocks(held.overlap_blocks) * self.workload.block_size;
        let cost =
            Cost { input_tokens: prompt.isl_tokens, cached_tokens: cached, output_tokens: None };
        let client = &self.workload.clients[self.workload.requests[number].client].name;
        let turns = self.turns.as_mut().expect("it is there");
        let pushed =
            turns.queue.push(client, number, cost, Options::default(), self.now_us / 1_000);
        assert!(pushed.is_ok(), "the queue has no limits");
        self.call_next();
    }

    fn call_next(&mut self) {
        while let Some(turns) = self.turns.as_mut().filter(|turns| turns.running < turns.limit) {
            let Some(granted) = turns.queue.pop(self.now_us / 1_000, |_| true) else { return };
            turns.running += 1;
            self.dispatch(granted.item, Some(granted.grant));
        }
    }

    fn dispatch(&mut self, number: usize, grant: Option<Grant>) {
        let request = &self.workload.requests[number];
        if self.row.needs_text() {
            text(request, number, self.workload.block_size, &mut self.text);
        }
        let ask = Ask {
            facts: Facts {
                prompt: &self.text[..4 * request.input as usize],
                user: Some(&self.workload.clients[request.client].name),
                ..Facts::default()
            },
            ..Ask::new(&self.workload.prompts[number])
        };
        let (reservation, selection) = self.selector.select(&ask).expect("there are workers");
        let worker = selection.worker.instance_id as usize - 1;
        let job = Job::new(number, request.input, request.output, &request.ids, self.now_us);
        self.engines[worker].add(job);
        self.flights[number] = Some(Flight { worker, reservation, grant });
        if !self.engines[worker].is_in_pass() {
            self.begin_pass(worker);
        }
    }

    fn begin_pass(&mut self, at: usize) {
        self.admitted.clear();
        if let Some(took_us) = self.engines[at].begin(self.now_us, &mut self.admitted) {
            self.due.push(Reverse((self.now_us + took_us, Due::PassEnd(at))));
        }
        for &(number, cached) in &self.admitted {
            let request = &self.workload.requests[number];
            let held = |engine: &Engine| engine.cached_tokens(&request.ids, request.input);
            let best = self.engines.iter().map(held).max().unwrap_or(0).max(cached);
            self.outcome.admitted(number, cached, best);
        }
    }

    /// How many requests have ended.
    fn end_pass(&mut self, at: usize) -> usize {
        let done = self.engines[at].end(self.now_us);
        for event in done.events {
            self.tell(at, &event);
        }
        let mut ended = 0;
        for (number, job) in done.advanced {
            let request = &self.workload.requests[number];
            let is_first = self.outcome.token(number, request.at_us, self.now_us);
            let flight = self.flights[number].as_ref().expect("it has not ended");
            debug_assert_eq!(flight.worker, at);
            if is_first {
                flight.reservation.first_token();
            }
            if let (Some(turns), Some(grant)) = (&mut self.turns, flight.grant) {
                turns.queue.tokens(grant, 1);
            }
            if let Some(job) = job {
                ended += 1;
                self.finish(number, &job);
            }
        }
        self.begin_pass(at);
        self.call_next();
        ended
    }

    fn finish(&mut self, number: usize, job: &Job) {
        let Some(flight) = self.flights[number].take() else { return };
        let cached = job.cached.unwrap_or(0);
        flight.reservation.used(Usage {
            input_tokens: Some(job.input),
            cached_tokens: Some(cached),
            output_tokens: Some(job.output),
        });
        flight.reservation.ended(End::Complete);
        drop(flight.reservation);
        self.outcome.finished(job.output, self.now_us - job.first_us);
        if let (Some(turns), Some(grant)) = (&mut self.turns, flight.grant) {
            let used =
                Used { input_tokens: Some((job.input, cached)), output_tokens: Some(job.output) };
            assert!(turns.queue.finish(grant, used));
            turns.running -= 1;
        }
    }

    fn tell(&self, at: usize, event: &Event) {
        if !self.row.has_events {
            return;
        }
        let model = self.selector.model();
        match event {
            Event::Removed(ids) => {
                model.evict(worker(at), Tier::Device, ids);
            }
            Event::Stored { parent, ids } => {
                let block = |&id: &u64| Block { engine_hash: id, local_hash: local_hash(id) };
                let blocks: Vec<Block> = ids.iter().map(block).collect();
                let told =
                    model.index.store(worker(at), Tier::Device, *parent, DEFAULT_SEED, &blocks);
                assert!(told.rejected.is_none(), "engines store parents first");
            }
        }
    }

    /// What vLLM reports of itself, means over its life.
    fn probe(&self, at: usize) {
        let engine = &self.engines[at];
        let totals = engine.totals;
        let mean = |sum: u64, count: u64| (count > 0).then(|| sum as f64 / count as f64);
        let seconds = |sum, count| mean(sum, count).map(|us| us / 1e6);
        let metrics = EngineMetrics {
            running_requests: Some(engine.running() as f64),
            gpu_kv_usage: Some(engine.usage()),
            queue_s: seconds(totals.queue_us, totals.finished),
            mean_prefill_s: seconds(totals.prefill_us, totals.finished),
            mean_decode_s: seconds(totals.decode_us, totals.finished),
            avg_prompt_tokens: mean(totals.input, totals.finished),
            avg_generation_tokens: mean(totals.output, totals.finished),
            ..EngineMetrics::default()
        };
        self.selector.engines.report(worker(at), metrics);
    }
}
