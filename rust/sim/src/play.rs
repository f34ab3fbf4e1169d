//! One run: arrivals, turns, decisions, steps, events, probes and what replicas tell each other, in the order of time.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use kvflash_core::clock::ManualClock;
use kvflash_core::fair::{Cost, FairConfig, FairQueue, Grant, Standing, Used};
use kvflash_core::ids::{Tier, Worker};
use kvflash_core::index::{Block, DEFAULT_SEED};
use kvflash_core::policy::{EngineMetrics, Session as Tie};
use kvflash_core::select::{Ask, Outcome as End, Prompt, Reservation, Selector, Tiding, Usage};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::engine::{Engine, EngineConfig, Event, Job};
use crate::groups::{Group, Reach};
use crate::outcome::Outcome;
use crate::row::Row;
use crate::timing::Timing;
use crate::workload::{Turn, Workload, local_hash, text};

/// How often the frontend's timer runs.
const TICK_US: u64 = 1_000_000;
/// Requests that run at once on an engine, and tokens of a step.
const MAX_RUNNING: usize = 256;
const MAX_BATCHED_TOKENS: u64 = 8_192;

/// What routes to what.
#[derive(Debug, Clone)]
pub struct Fleet {
    /// How many times as slow as `timing` each engine is.
    pub slowness: Vec<f64>,
    /// At this moment the first engine's slowness becomes the second figure, in microseconds.
    pub changes: Vec<(u64, usize, f64)>,
    /// Tokens of each engine's cache.
    pub capacity_tokens: u64,
    /// How long engines' steps take.
    pub timing: Timing,
    /// Routers side by side; each request comes to any of them.
    pub routers: usize,
    /// How long it takes until a router hears of another one's bookings, in microseconds; `None` for never.
    pub sync_us: Option<u64>,
    /// How long it takes until routers hear of engines' events, in microseconds.
    pub event_delay_us: u64,
    /// Engines publish events.
    pub has_events: bool,
    /// Answers are streamed. Routers learn of the first token of another one at its end.
    pub has_streams: bool,
    /// Chance: of the router that a request comes to, and of its choices.
    pub seed: u64,
}

impl Fleet {
    /// `workers` equal engines of 400,000 tokens behind one router.
    pub fn of(workers: usize) -> Self {
        Self {
            slowness: vec![1.0; workers],
            changes: Vec::new(),
            capacity_tokens: 400_000,
            timing: Timing::H100_8B,
            routers: 1,
            sync_us: None,
            event_delay_us: 0,
            has_events: true,
            has_streams: true,
            seed: 1,
        }
    }

    /// Engines.
    pub fn workers(&self) -> usize {
        self.slowness.len()
    }

    fn engine(&self, at: usize, block_size: u64) -> Engine {
        Engine::new(EngineConfig {
            groups: vec![Group { reach: Reach::Full, block_size }],
            names_all_windows: true,
            blocks: (self.capacity_tokens / block_size) as u32 + 1,
            max_running: MAX_RUNNING,
            max_batched_tokens: MAX_BATCHED_TOKENS,
            timing: self.timing,
            slowness: self.slowness[at],
        })
    }
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    StepEnd(usize),
    /// A place in [`Fleet::changes`].
    Change(usize),
    /// The first batch of events that waits for an engine's listeners.
    Events(usize),
    /// The first batch of bookings that a router's replicas have still to hear.
    Sync(usize),
    Probe,
    Tick,
    /// Session and turn.
    Arrive(usize, usize),
}

/// A request on its way.
struct Flight {
    session: usize,
    turn: usize,
    worker: usize,
    router: usize,
    reservation: Reservation,
    grant: Option<Grant>,
}

struct Turns {
    queue: FairQueue<Waiting>,
    running: usize,
    limit: usize,
}

/// A request before its decision.
struct Waiting {
    number: usize,
    session: usize,
    turn: usize,
    prompt: Prompt,
}

struct Play<'a> {
    workload: &'a Workload,
    fleet: &'a Fleet,
    row: &'a Row,
    clock: Arc<ManualClock>,
    routers: Vec<Selector>,
    engines: Vec<Engine>,
    /// Sessions that wait for others, and their next turns; see [`Workload::at_once`].
    line: VecDeque<(usize, usize)>,
    turns: Option<Turns>,
    flights: Vec<Option<Flight>>,
    due: BinaryHeap<Reverse<(u64, Due)>>,
    unheard: Vec<VecDeque<Vec<Event>>>,
    untold: Vec<VecDeque<Vec<Tiding>>>,
    rng: SmallRng,
    now_us: u64,
    text: Vec<u8>,
    admitted: Vec<(usize, u64)>,
    outcome: Outcome,
}

/// Play `workload` before `fleet` by `row`, until the last answer is complete.
pub fn play(workload: &Workload, fleet: &Fleet, row: &Row) -> Outcome {
    let row = &Row { has_events: row.has_events && fleet.has_events, ..row.clone() };
    let clock = Arc::new(ManualClock::default());
    let count = fleet.workers();
    let workers: Vec<Worker> = (0..count).map(worker).collect();
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
        Turns { queue, running: 0, limit: max_running * count }
    });
    let size = workload.block_size as u32;
    let router = |number: usize| {
        let seed = fleet.seed + number as u64;
        let router = row.selector(&workers, size, fleet.capacity_tokens, &clock, seed);
        if fleet.sync_us.is_some() {
            router.outbox().turn_on(usize::MAX / 4);
        }
        router
    };
    let turn = |number: usize| workload.sessions[number].turns[0].pause_us;
    let first = workload.at_once.unwrap_or(usize::MAX).min(workload.sessions.len());
    let arrivals = workload.sessions[..first].iter().enumerate();
    let arrivals = arrivals
        .map(|(number, session)| Reverse((session.at_us + turn(number), Due::Arrive(number, 0))));
    let changes = fleet.changes.iter().enumerate();
    let changes = changes.map(|(number, &(at_us, ..))| Reverse((at_us, Due::Change(number))));
    let mut play = Play {
        workload,
        fleet,
        row,
        routers: (0..fleet.routers).map(router).collect(),
        clock,
        engines: (0..count).map(|at| fleet.engine(at, workload.block_size)).collect(),
        line: (first..workload.sessions.len()).map(|number| (number, 0)).collect(),
        turns,
        flights: Vec::new(),
        due: [Reverse((0, Due::Probe)), Reverse((0, Due::Tick))]
            .into_iter()
            .chain(arrivals)
            .chain(changes)
            .collect(),
        unheard: (0..count).map(|_| VecDeque::new()).collect(),
        untold: (0..fleet.routers).map(|_| VecDeque::new()).collect(),
        rng: SmallRng::seed_from_u64(fleet.seed),
        now_us: 0,
        text: Vec::new(),
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
        let mut left = self.workload.requests();
        while left > 0 {
            let Some(Reverse((at_us, due))) = self.due.pop() else { break };
            self.clock.advance(at_us / 1_000 - self.now_us / 1_000);
            self.now_us = at_us;
            match due {
                Due::StepEnd(at) => left -= self.end_step(at),
                Due::Change(number) => {
                    let (_, at, slowness) = self.fleet.changes[number];
                    self.engines[at].set_slowness(slowness);
                }
                Due::Events(at) => {
                    let batch = self.unheard[at].pop_front().expect("one for each");
                    batch.iter().for_each(|event| self.hear(at, event));
                }
                Due::Sync(from) => {
                    let batch = self.untold[from].pop_front().expect("one for each");
                    self.sync(from, &batch);
                }
                Due::Probe => {
                    (0..self.engines.len()).for_each(|at| self.probe(at));
                    self.due.push(Reverse((at_us + self.row.probe_us(), Due::Probe)));
                }
                Due::Tick => {
                    self.routers.iter().for_each(|router| _ = router.tick());
                    self.due.push(Reverse((at_us + TICK_US, Due::Tick)));
                }
                Due::Arrive(session, turn) => self.arrive(session, turn),
            }
        }
    }

    fn turn(&self, session: usize, turn: usize) -> &Turn {
        &self.workload.sessions[session].turns[turn]
    }

    fn arrive(&mut self, session: usize, turn: usize) {
        let client = self.workload.sessions[session].client;
        let prompt = self.workload.prompt(self.turn(session, turn));
        let number = self.outcome.arrived(client, prompt.isl_tokens, self.now_us);
        self.flights.push(None);
        let waiting = Waiting { number, session, turn, prompt };
        let Some(turns) = &mut self.turns else { return self.dispatch(&waiting, None) };
        let prompt = &waiting.prompt;
        let held = self.routers[0].preview(&Ask::new(prompt)).expect("there are workers").0;
        let cached = prompt.reusable_blocks(held.overlap_blocks) * self.workload.block_size;
        let cost = Cost { input_tokens: prompt.isl_tokens, cached_tokens: cached };
        let client = self.workload.clients[client].name.as_str();
        let pushed =
            turns.queue.push(client, waiting, cost, Standing::default(), self.now_us / 1_000);
        assert!(pushed.is_ok(), "the queue has no limits");
        self.call_next();
    }

    fn call_next(&mut self) {
        while let Some(turns) = self.turns.as_mut().filter(|turns| turns.running < turns.limit) {
            let Some(granted) = turns.queue.pop(self.now_us / 1_000, |_| true) else { return };
            turns.running += 1;
            self.dispatch(&granted.item, Some(granted.grant));
        }
    }

    fn dispatch(&mut self, waiting: &Waiting, grant: Option<Grant>) {
        let &Waiting { number, session, turn, ref prompt } = waiting;
        let request = &self.workload.sessions[session].turns[turn];
        if self.row.needs_text() {
            text(request, number, self.workload.block_size, &mut self.text);
        } else {
            // Policies that do not cut the text look at its length only.
            self.text.resize(4 * request.input as usize, 0);
        }
        let client = &self.workload.clients[self.workload.sessions[session].client].name;
        let ask = Ask {
            text: &self.text[..4 * request.input as usize],
            user: Some(client),
            session: Tie { worker: None, key: Some(client) },
            is_whole: !self.fleet.has_streams,
            ..Ask::new(prompt)
        };
        let router = match self.routers.len() {
            1 => 0,
            count => self.rng.random_range(0..count),
        };
        let (reservation, selection) =
            self.routers[router].select(&ask).expect("there are workers");
        let worker = selection.worker.instance_id as usize - 1;
        let mut job =
            Job::new(number, request.input, request.output, vec![Arc::clone(&request.ids)]);
        job.added_us = self.now_us;
        self.engines[worker].add(job);
        self.outcome.sent(number, worker);
        self.flights[number] = Some(Flight { session, turn, worker, router, reservation, grant });
        self.tell(router);
        if !self.engines[worker].is_in_step() {
            self.begin_step(worker);
        }
    }

    fn begin_step(&mut self, at: usize) {
        self.admitted.clear();
        if let Some(took_us) = self.engines[at].begin(self.now_us, &mut self.admitted) {
            self.due.push(Reverse((self.now_us + took_us, Due::StepEnd(at))));
        }
        for &(number, cached) in &self.admitted {
            let Some(flight) = &self.flights[number] else { continue };
            let turn = &self.workload.sessions[flight.session].turns[flight.turn];
            let ids = std::slice::from_ref(&turn.ids);
            let mut best = cached;
            // Its own engine holds all of it by now.
            let others = self.engines.iter().enumerate().filter(|(other, _)| *other != at);
            for (_, engine) in others {
                // Prefixes are lost from their ends: who lacks the next block has no more.
                let next = (best / self.workload.block_size) as usize;
                if turn.ids.get(next).is_some_and(|id| engine.holds(*id)) {
                    best = best.max(engine.cached_tokens(ids, turn.input));
                }
            }
            self.outcome.admitted(number, cached, best);
        }
    }

    /// How many requests have ended.
    fn end_step(&mut self, at: usize) -> usize {
        let done = self.engines[at].end(self.now_us);
        self.publish(at, done.events);
        let mut ended = 0;
        for (number, job) in done.advanced {
            let is_first = self.outcome.token(number, self.now_us);
            let flight = self.flights[number].as_ref().expect("it has not ended");
            debug_assert_eq!(flight.worker, at);
            let router = flight.router;
            if is_first && self.fleet.has_streams {
                flight.reservation.first_token();
            }
            if let (Some(turns), Some(grant)) = (&mut self.turns, flight.grant) {
                turns.queue.tokens(grant, 1);
            }
            let is_end = job.is_some();
            if let Some(job) = job {
                ended += 1;
                self.finish(number, &job);
            }
            if is_first || is_end {
                self.tell(router);
            }
        }
        self.begin_step(at);
        self.call_next();
        ended
    }

    fn finish(&mut self, number: usize, job: &Job) {
        let Some(flight) = self.flights[number].take() else { return };
        let cached = job.cached.unwrap_or(0);
        if !self.fleet.has_streams {
            flight.reservation.first_token();
        }
        flight.reservation.used(Usage {
            input_tokens: Some(job.input),
            cached_tokens: Some(cached),
            output_tokens: Some(job.output),
        });
        flight.reservation.ended(End::Complete);
        drop(flight.reservation);
        self.outcome.finished(number, job.output, self.now_us - job.first_us, self.now_us);
        if let (Some(turns), Some(grant)) = (&mut self.turns, flight.grant) {
            let used =
                Used { input_tokens: Some((job.input, cached)), output_tokens: Some(job.output) };
            assert!(turns.queue.finish(grant, used));
            turns.running -= 1;
        }
        let next = flight.turn + 1;
        let turn = self.workload.sessions[flight.session].turns.get(next);
        if self.workload.at_once.is_some() {
            self.line.extend(turn.map(|_| (flight.session, next)));
            let first = self.line.pop_front();
            let arrival =
                first.map(|(session, turn)| Reverse((self.now_us, Due::Arrive(session, turn))));
            self.due.extend(arrival);
        } else if let Some(turn) = turn {
            let at_us = self.now_us + turn.pause_us;
            self.due.push(Reverse((at_us, Due::Arrive(flight.session, next))));
        }
    }

    fn publish(&mut self, at: usize, events: Vec<Event>) {
        if !self.row.has_events || events.is_empty() {
            return;
        }
        match self.fleet.event_delay_us {
            0 => events.iter().for_each(|event| self.hear(at, event)),
            delay_us => {
                self.unheard[at].push_back(events);
                self.due.push(Reverse((self.now_us + delay_us, Due::Events(at))));
            }
        }
    }

    fn hear(&self, at: usize, event: &Event) {
        for router in &self.routers {
            let model = router.model();
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
    }

    /// What a router has to tell its replicas.
    fn tell(&mut self, from: usize) {
        let Some(delay_us) = self.fleet.sync_us else { return };
        let batch = self.routers[from].outbox().take(Duration::ZERO, usize::MAX);
        if !batch.is_empty() {
            self.untold[from].push_back(batch);
            self.due.push(Reverse((self.now_us + delay_us, Due::Sync(from))));
        }
    }

    fn sync(&self, from: usize, batch: &[Tiding]) {
        let id = from as u64 + 1;
        let others = self.routers.iter().enumerate().filter(|(at, _)| *at != from);
        for (_, router) in others {
            for tiding in batch {
                match tiding {
                    Tiding::Added { name, worker, hashes, isl_tokens, overlap_blocks } => {
                        let hashes = hashes.as_deref();
                        let name = name.to_string();
                        router.remote_add(id, &name, *worker, hashes, *isl_tokens, *overlap_blocks);
                    }
                    Tiding::Prefilled(name) => _ = router.remote_prefilled(id, &name.to_string()),
                    Tiding::Freed(name) => _ = router.remote_free(id, &name.to_string()),
                }
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
            // For rules that go by the queue's length.
            utilization: Some(engine.waiting() as f64),
            ..EngineMetrics::default()
        };
        for router in &self.routers {
            router.engines.report(worker(at), metrics);
        }
    }
}
