//! Every row before every cell of workload, load and fleet: what each way to route costs against the best one.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use hashbrown::HashMap;

use crate::lru::Lru;
use crate::outcome::Outcome;
use crate::play::{Fleet, play};
use crate::row::Row;
use crate::timing::Timing;
use crate::traffic::Traffic;
use crate::workload::Workload;

/// Recorded traces to play instead of made ones.
#[derive(Debug, Clone, Default)]
pub struct Traces {
    /// See [`Workload::conversations`].
    pub conversations: Option<Workload>,
    /// See [`Workload::agents`].
    pub agents: Option<Workload>,
}

impl Traces {
    /// Those at the paths that are given. Agents' sessions end after 30 turns or before a prompt of more than 110,000
    /// tokens, and pause for two minutes at the most.
    ///
    /// # Errors
    /// As [`Workload::conversations`].
    pub fn read(conversations: Option<&Path>, agents: Option<&Path>) -> Result<Self, String> {
        Ok(Self {
            conversations: conversations
                .map(|path| Workload::conversations(path, 1.0))
                .transpose()?,
            agents: agents.map(|path| Workload::agents(path, 30, 110_000, 120.0)).transpose()?,
        })
    }
}

/// One workload before one fleet.
#[derive(Debug, Clone)]
pub struct Cell {
    /// What it is about.
    pub group: &'static str,
    /// Which one it is.
    pub name: String,
    traffic: Traffic,
    load: f64,
    is_prefill_only: bool,
    fleet: Fleet,
}

const LIGHT: f64 = 0.25;
const MEDIUM: f64 = 0.5;
const HEAVY: f64 = 0.75;

impl Cell {
    fn new(group: &'static str, traffic: Traffic, load: f64, fleet: Fleet) -> Self {
        let name = traffic.to_string();
        Self { group, name, traffic, load, is_prefill_only: false, fleet }
    }

    fn detailed(mut self, detail: &str) -> Self {
        self.name = format!("{}, {detail}", self.name);
        self
    }

    /// All of them.
    pub fn all() -> Vec<Self> {
        use Traffic::{
            Agents, Bursts, Chat, Conversations, Documents, LongAnswers, Mixed, Unshared,
        };
        let eight = || Fleet::of(8);
        let mut cells = Vec::new();
        for (group, load) in [("light load", LIGHT), ("medium load", MEDIUM), ("heavy load", HEAVY)]
        {
            let with_load = Traffic::ALL.into_iter().filter(|one| *one != Traffic::InLine);
            cells.extend(with_load.map(|traffic| Self::new(group, traffic, load, eight())));
        }
        for workers in [4, 32, 128] {
            for traffic in [Conversations, Agents, Chat, Documents, Mixed] {
                let cell = Self::new("other fleets", traffic, MEDIUM, Fleet::of(workers));
                cells.push(cell.detailed(&format!("{workers} engines")));
            }
        }
        for traffic in [Agents, Chat, Documents, Mixed] {
            // The longest prompt has to fit.
            let capacity_tokens = if traffic == Chat { 40_000 } else { 130_000 };
            let fleet = Fleet { capacity_tokens, ..eight() };
            cells.push(Self::new("small caches", traffic, MEDIUM, fleet));
        }
        for traffic in [Conversations, Chat, Documents, LongAnswers] {
            let mut one = eight();
            one.slowness[3] = 3.0;
            cells.push(Self::new("slow engines", traffic, MEDIUM, one).detailed("one of them"));
            let mut half = eight();
            half.slowness[4..].fill(2.0);
            cells.push(Self::new("slow engines", traffic, MEDIUM, half).detailed("half of them"));
        }
        for traffic in [Chat, Documents, Bursts, Mixed] {
            let alone = Fleet { routers: 3, ..eight() };
            cells.push(Self::new("three routers", traffic, MEDIUM, alone).detailed("alone"));
            let synced = Fleet { routers: 3, sync_us: Some(20_000), ..eight() };
            cells.push(Self::new("three routers", traffic, MEDIUM, synced).detailed("in sync"));
        }
        for traffic in [Conversations, Agents, Chat, Documents] {
            let deaf = Fleet { has_events: false, ..eight() };
            cells.push(Self::new("events", traffic, MEDIUM, deaf).detailed("none"));
        }
        for traffic in [Chat, Documents] {
            let late = Fleet { event_delay_us: 500_000, ..eight() };
            cells.push(Self::new("events", traffic, MEDIUM, late).detailed("0.5 s late"));
        }
        for traffic in [Conversations, Documents, Unshared] {
            let cell = Self::new("prefill only", traffic, MEDIUM, eight());
            cells.push(Self { is_prefill_only: true, ..cell });
        }
        // The conversations need half as much again as there is, and half of it.
        for capacity_tokens in [150_000, 450_000] {
            let fleet = Fleet { capacity_tokens, ..Fleet::of(4) };
            let cell = Self::new("in line", Traffic::InLine, MEDIUM, fleet);
            cells.push(cell.detailed(&format!("caches of {capacity_tokens} tokens")));
        }
        for traffic in [Chat, Documents, Mixed] {
            let large = Fleet { timing: Timing::A100_70B, ..eight() };
            cells.push(Self::new("a 70B model", traffic, MEDIUM, large));
        }
        cells
    }

    /// What is played in it.
    pub fn workload(&self, traces: &Traces, seed: u64) -> Workload {
        let workers = self.fleet.workers();
        let requests = (300 * workers).clamp(1_500, 9_000);
        let mut workload = match (self.traffic, &traces.conversations, &traces.agents) {
            (Traffic::Conversations, Some(all), _) => {
                let mut all = all.clone();
                let count = requests.min(all.sessions.len());
                // Another stretch of the trace for each seed.
                let first = (seed as usize * 2_503) % (all.sessions.len() - count + 1);
                let start_us = all.sessions[first].at_us;
                all.sessions = all.sessions[first..first + count].to_vec();
                all.sessions.iter_mut().for_each(|session| session.at_us -= start_us);
                all
            }
            (Traffic::Agents, _, Some(all)) => {
                let mut all = all.clone();
                let first = (seed as usize * 97) % all.sessions.len();
                all.sessions.rotate_left(first);
                for (at, session) in all.sessions.iter_mut().enumerate() {
                    session.at_us = at as u64 * 1_000_000;
                }
                all.truncate(requests);
                all
            }
            (traffic, ..) => traffic.make(seed, requests),
        };
        if self.is_prefill_only {
            workload = workload.prefill_only();
        }
        workload.at_load(self.load, workers, &self.fleet.timing)
    }
}

/// What is compared; the lowest is the best.
pub const METRICS: [&str; 10] = [
    "uncached",
    "TTFT mean",
    "TTFT p50",
    "TTFT p99",
    "gap p50",
    "gap p99",
    "end to end p50",
    "end to end p99",
    "missed SLO",
    "imbalance",
];

/// Where in [`METRICS`] the p99 of first tokens is.
pub const TTFT_P99: usize = 3;

/// One row in one cell.
#[derive(Debug, Clone, Copy)]
pub struct Figures {
    /// As [`METRICS`]: the share of prompt tokens not found in the cache at the first admission, milliseconds, the share
    /// of requests outside the objective, and the busiest engine's time over the mean.
    pub values: [f64; 10],
    /// Prompt tokens found in the cache at the first admission, of all.
    pub hit: f64,
    /// The same of what the best engine had.
    pub of_best: f64,
    /// Share of the time in which engines were in a step.
    pub utilization: f64,
}

impl Figures {
    fn new(outcome: &Outcome, timing: &Timing) -> Self {
        // A second, and twice what an idle engine takes for the whole prompt; tokens as fast as four steps.
        let per_token_ms = 2.0 * timing.prefill_us / 1e3;
        let good = outcome.goodput(1_000.0, per_token_ms, 4.0 * timing.step_us / 1e3);
        Self {
            values: [
                1.0 - outcome.hit_rate(),
                outcome.mean_ttft_ms(),
                outcome.ttft_ms(0.5, false),
                outcome.ttft_ms(0.99, false),
                outcome.gap_ms(0.5),
                outcome.gap_ms(0.99),
                outcome.end_to_end_ms(0.5),
                outcome.end_to_end_ms(0.99),
                1.0 - good,
                outcome.spread(|totals| totals.busy_us),
            ],
            hit: outcome.hit_rate(),
            of_best: outcome.of_best(),
            utilization: outcome.utilization(),
        }
    }
}

/// What no decision can change much: shares of prompt tokens.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Reused if all caches were one, the least recently used blocks lost first.
    pub one_pool: f64,
    /// Reused if each session, or each system prompt, had its engine from the start; the better of the two.
    pub partition: f64,
}

/// All rows in one cell.
#[derive(Debug, Clone)]
pub struct Played {
    /// The cell.
    pub cell: Cell,
    /// By row.
    pub figures: Vec<Figures>,
    /// See there.
    pub bounds: Bounds,
}

impl Played {
    /// How many times the best row's figure each row's is, by row and metric; 1 is the best one. Shares are compared
    /// with 2 % added, so that next to nothing is not infinitely more than nothing.
    pub fn regrets(&self) -> Vec<[f64; 10]> {
        let shifted = |figures: &Figures| {
            let mut values = figures.values;
            values[0] += 0.02;
            values[8] += 0.02;
            values
        };
        let mut best = [f64::INFINITY; 10];
        for figures in &self.figures {
            let values = shifted(figures);
            best.iter_mut().zip(values).for_each(|(best, value)| *best = best.min(value));
        }
        let ratio = |value: f64, best: f64| if best > 0.0 { value / best } else { 1.0 };
        let one = |figures: &Figures| {
            let values = shifted(figures);
            std::array::from_fn(|at| ratio(values[at], best[at]))
        };
        self.figures.iter().map(one).collect()
    }
}

/// Play every row in every cell on `threads` threads; `seen` is called when a cell is done.
pub fn run(
    cells: Vec<Cell>,
    rows: &[Row],
    traces: &Traces,
    seed: u64,
    threads: usize,
    seen: &(dyn Fn(&Played) + Sync),
) -> Vec<Played> {
    let next = AtomicUsize::new(0);
    let done: Mutex<BTreeMap<usize, Played>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                loop {
                    // Relaxed: only that no two are alike.
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(cell) = cells.get(at) else { return };
                    let played = one(cell, rows, traces, seed);
                    seen(&played);
                    done.lock().expect("no thread panics with it").insert(at, played);
                }
            });
        }
    });
    done.into_inner().expect("no thread panics with it").into_values().collect()
}

fn one(cell: &Cell, rows: &[Row], traces: &Traces, seed: u64) -> Played {
    let workload = cell.workload(traces, seed);
    let fleet = Fleet { seed, ..cell.fleet.clone() };
    let mut figures = Vec::new();
    for row in rows {
        figures.push(Figures::new(&play(&workload, &fleet, row), &fleet.timing));
    }
    let bounds = bounds(&workload, &fleet);
    Played { cell: cell.clone(), figures, bounds }
}

/// Turns in the order in which they would come if answers took no time.
fn in_order(workload: &Workload) -> Vec<(usize, usize)> {
    let mut order = Vec::new();
    for (session, one) in workload.sessions.iter().enumerate() {
        let mut at_us = one.at_us;
        for (number, turn) in one.turns.iter().enumerate() {
            at_us += turn.pause_us;
            order.push((at_us, session, number));
        }
    }
    order.sort_unstable();
    order.into_iter().map(|(_, session, turn)| (session, turn)).collect()
}

fn bounds(workload: &Workload, fleet: &Fleet) -> Bounds {
    let order = in_order(workload);
    let blocks = (fleet.capacity_tokens / workload.block_size) as usize;
    let workers = fleet.workers();
    let input: u64 = workload.sessions.iter().flat_map(|one| &one.turns).map(|one| one.input).sum();
    let share = |caches: &mut [Lru], place: &mut dyn FnMut(usize, u64, u64) -> usize| {
        let mut cached = 0;
        for &(session, turn) in &order {
            let turn = &workload.sessions[session].turns[turn];
            let root = turn.ids.first().copied().unwrap_or(session as u64);
            let at = place(session, root, turn.input);
            let usable = ((turn.input - 1) / workload.block_size) as usize;
            let usable = usable.min(turn.ids.len());
            cached += caches[at].matched(&turn.ids[..usable]) as u64 * workload.block_size;
            caches[at].add(&turn.ids);
        }
        cached as f64 / input as f64
    };
    let one_pool = share(&mut [Lru::new(workers * blocks)], &mut |_, _, _| 0);
    let fixed = |by_root: bool| {
        let mut caches: Vec<Lru> = (0..workers).map(|_| Lru::new(blocks)).collect();
        let mut places: HashMap<u64, usize> = HashMap::new();
        let mut given = vec![0; workers];
        share(&mut caches, &mut |session, root, input| {
            let key = if by_root { root } else { session as u64 };
            let least = || (0..workers).min_by_key(|&at| given[at]).unwrap_or(0);
            let at = *places.entry(key).or_insert_with(least);
            given[at] += input;
            at
        })
    };
    Bounds { one_pool, partition: fixed(false).max(fixed(true)) }
}
