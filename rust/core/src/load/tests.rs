//! Recorded cases, and random operations against a twin that recounts everything every time.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::clock::{Clock, ManualClock};
use crate::error::{Error, Result};
use crate::ids::Worker;

impl ActiveSequences {
    fn give(
        &mut self,
        id: RequestId,
        worker: Worker,
        blocks: BlockUse<'_>,
        isl_tokens: u64,
        overlap_blocks: u32,
        now_ms: u64,
    ) -> Result<()> {
        self.give_unseen(id, worker, blocks, isl_tokens, overlap_blocks, None, now_ms)
    }

    #[allow(clippy::too_many_arguments)]
    fn give_unseen(
        &mut self,
        id: RequestId,
        worker: Worker,
        blocks: BlockUse<'_>,
        isl_tokens: u64,
        overlap_blocks: u32,
        unseen_ms: Option<u64>,
        now_ms: u64,
    ) -> Result<()> {
        let is_remote = false;
        let cached_tokens = u64::from(overlap_blocks) * u64::from(self.block_size());
        let uncached_tokens = isl_tokens.saturating_sub(cached_tokens);
        let work =
            Assignment { id, worker, blocks, isl_tokens, uncached_tokens, unseen_ms, is_remote };
        self.book(&work, now_ms)
    }
}

const WORKER: Worker = Worker::new(1, 0);

/// Cases of this area that the table does not cover yet, and why.
const LEFT: [(&str, &str); 3] = [
    (
        "dynamo/active-sequences/001",
        "hash 4 begins one prompt and ends another: no chained hash does",
    ),
    ("dynamo/active-sequences/004", "membership deltas: for replica sync"),
    ("dynamo/active-sequences/007", "expected prefill durations: for prefill decay"),
];

fn table(config: LoadConfig, workers: &[Worker]) -> ActiveSequences {
    let mut load = ActiveSequences::new(config);
    load.set_workers(workers).unwrap();
    load
}

fn load_of(load: &ActiveSequences, worker: Worker) -> WorkerLoad {
    load.loads().find(|(_, load)| load.worker == worker).unwrap().1
}

fn hashes(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|hash| hash.as_u64().unwrap()).collect()
}

/// Play one operation of a case; requests are numbered by their names.
fn play(load: &mut ActiveSequences, op: &Value) {
    let name = op[1].as_str().unwrap();
    let id = RequestId(name.trim_start_matches('r').parse().unwrap());
    match op[0].as_str().unwrap() {
        "add" => {
            // Cases give the uncached tokens; the prompt fills its blocks.
            let hashes = hashes(&op[2]);
            let size = u64::from(load.block_size());
            let isl_tokens = hashes.len() as u64 * size;
            let overlap = (isl_tokens - op[3].as_u64().unwrap_or(isl_tokens)) / size;
            let blocks = BlockUse::Shared(&hashes);
            load.give(id, WORKER, blocks, isl_tokens, overlap as u32, 0).unwrap();
        }
        "add_output_block" => assert!(load.add_output_blocks(id, 1, op[2].as_f64().unwrap())),
        "mark_prefill_completed" => assert!(load.mark_prefill_completed(id)),
        "free" => assert!(load.free(id)),
        other => panic!("unknown operation {other}"),
    }
}

#[test]
fn recorded_cases_hold() {
    let text = include_str!("../../../../tests/vectors/load_cases.json");
    let cases: Vec<Value> = serde_json::from_str(text).unwrap();
    let mut visited = Vec::new();
    let mut left = Vec::new();
    for case in cases.iter().filter(|case| case["area"] == "active-sequences") {
        let id = case["id"].as_str().unwrap();
        if LEFT.iter().any(|(name, _)| *name == id) {
            left.push(id);
            continue;
        }
        visited.push(id);
        let (input, expected) = (&case["input"], &case["expected"]);
        let config = LoadConfig {
            block_size: input["block_size"].as_u64().unwrap_or(4) as u32,
            track_prefill_tokens: input["track_prefill_tokens"] != Value::Bool(false),
            prefill_speed: PrefillSpeed::Unknown,
            ..LoadConfig::default()
        };
        let mut load = table(config, &[WORKER]);
        let ops = input["ops"].as_array().unwrap();
        let mut checked = 0;
        for (at, op) in ops.iter().enumerate() {
            play(&mut load, op);
            let now = load_of(&load, WORKER).active;
            let mut check = |wanted: &Value, got: u64, what: &str| {
                if let Some(wanted) = wanted.as_u64() {
                    assert_eq!(got, wanted, "{id}: {what} after operation {at}");
                    checked += 1;
                }
            };
            check(&expected["blocks_tokens_after_each"][at][0], now.blocks, "blocks");
            check(&expected["blocks_tokens_after_each"][at][1], now.prefill_tokens, "tokens");
            check(&expected["blocks_after_each"][at], now.blocks, "blocks");
            check(&expected["tokens_after_each"][at], now.prefill_tokens, "tokens");
            if at + 1 == ops.len() {
                check(&expected["blocks_final"], now.blocks, "blocks");
            }
        }
        assert!(checked >= 4, "{id}: only {checked} values were compared");
    }
    let names = ["002", "005"].map(|n| format!("dynamo/active-sequences/{n}"));
    assert_eq!(visited, names);
    assert_eq!(left, LEFT.map(|(name, _)| name));
}

/// The left case 001, with a hash of its own for the prompt of one block.
#[test]
fn a_block_counts_once_however_many_requests_use_it() {
    let mut load = table(LoadConfig { block_size: 4, ..LoadConfig::default() }, &[WORKER]);
    let mut book = |id: u64, hashes: &[u64], overlap| {
        let isl_tokens = 4 * hashes.len() as u64;
        let blocks = BlockUse::Shared(hashes);
        load.give(RequestId(id), WORKER, blocks, isl_tokens, overlap, 0).unwrap();
        load_of(&load, WORKER).active
    };
    let steps = [book(1, &[1, 2, 3], 0), book(2, &[9], 0), book(3, &[1, 2, 3, 4], 4)];
    assert_eq!(steps.map(|now| (now.blocks, now.prefill_tokens)), [(3, 12), (4, 16), (5, 16)]);
    for (id, left) in [(2, (4, 12)), (3, (3, 12)), (1, (0, 0))] {
        load.free(RequestId(id));
        let now = load_of(&load, WORKER).active;
        assert_eq!((now.blocks, now.prefill_tokens), left);
    }
}

#[test]
fn booking_errors_change_nothing() {
    let config = LoadConfig { block_size: 4, max_requests: 2, ..LoadConfig::default() };
    let mut load = table(config, &[WORKER]);
    let blocks = BlockUse::Shared(&[1, 2]);
    load.give(RequestId(1), WORKER, blocks, 8, 0, 0).unwrap();
    let before = load_of(&load, WORKER);
    let again = load.give(RequestId(1), WORKER, blocks, 8, 0, 0);
    assert!(matches!(again, Err(Error::Conflict(_))), "{again:?}");
    let nowhere = load.give(RequestId(2), Worker::new(9, 1), blocks, 8, 0, 0);
    assert_eq!(nowhere, Err(Error::NotFound("worker 9:1 is not registered".into())));
    assert_eq!(load_of(&load, WORKER), before);
    load.give(RequestId(2), WORKER, blocks, 8, 0, 0).unwrap();
    let full = load.give(RequestId(3), WORKER, blocks, 8, 0, 0);
    assert!(matches!(full, Err(Error::Overloaded(_))), "{full:?}");
    assert_eq!(load.totals().requests, 2);
    load.free(RequestId(1));
    load.give(RequestId(3), WORKER, blocks, 8, 0, 0).unwrap();
}

#[test]
fn requests_that_are_gone_are_not_found_but_freed_in_peace() {
    let mut load = table(LoadConfig::default(), &[WORKER]);
    load.give(RequestId(1), WORKER, BlockUse::Private(3), 10, 0, 0).unwrap();
    assert_eq!(load.set_workers(&[]), Ok(vec![WORKER]));
    assert!(!load.free(RequestId(1)));
    assert!(!load.mark_prefill_completed(RequestId(1)));
    assert!(!load.touch(RequestId(1), 5));
    assert!(!load.add_output_blocks(RequestId(1), 1, 0.5));
    load.set_workers(&[WORKER]).unwrap();
    assert_eq!(load_of(&load, WORKER).active.blocks, 0);
}

#[test]
fn too_many_workers_are_refused_as_a_whole() {
    let mut load = table(LoadConfig::default(), &[WORKER]);
    let many: Vec<Worker> = (0..=MAX_WORKERS as u64).map(|id| Worker::new(id, 0)).collect();
    let error = load.set_workers(&many).unwrap_err();
    assert!(matches!(error, Error::Overloaded(_)), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("at most 65535") && text.contains("got 65536"), "{text}");
    assert_eq!(load.worker_count(), 1);
    load.set_workers(&many[1..]).unwrap();
    assert_eq!(load.worker_count(), MAX_WORKERS);
    load.set_workers(&many[..MAX_WORKERS]).unwrap();
    let mut by_slot = Vec::new();
    load.spread::<u32>(&[], &mut by_slot);
    assert_eq!(by_slot.len(), MAX_WORKERS, "slots are reused");
}

#[test]
fn activity_postpones_expiry() {
    let clock = ManualClock::default();
    let config = LoadConfig { expiry_ms: 100, ..LoadConfig::default() };
    let mut load = table(config, &[WORKER]);
    for id in 1..=3 {
        load.give(RequestId(id), WORKER, BlockUse::Private(1), 1, 0, clock.now_ms()).unwrap();
    }
    clock.advance(60);
    assert!(load.touch(RequestId(1), clock.now_ms()));
    clock.advance(40);
    assert_eq!(load.expire(clock.now_ms()), [], "idle for exactly expiry_ms is not older");
    clock.advance(1);
    assert_eq!(load.expire(clock.now_ms()), [RequestId(2), RequestId(3)]);
    clock.advance(59);
    assert_eq!(load.expire(clock.now_ms()), []);
    clock.advance(1);
    assert_eq!(load.expire(clock.now_ms()), [RequestId(1)]);
    assert_eq!(load_of(&load, WORKER).active.blocks, 0);
}

#[test]
fn a_late_clock_reading_does_not_shorten_a_life() {
    let config = LoadConfig { expiry_ms: 100, ..LoadConfig::default() };
    let mut load = table(config, &[WORKER]);
    load.give(RequestId(1), WORKER, BlockUse::Untracked, 1, 0, 500).unwrap();
    load.give(RequestId(2), WORKER, BlockUse::Untracked, 1, 0, 450).unwrap();
    assert_eq!(load.expire(90), [], "a reading from long ago");
    assert!(load.touch(RequestId(1), 480));
    assert_eq!(load.expire(600), []);
    assert_eq!(load.expire(601).len(), 2);
}

#[test]
fn a_faded_block_is_whole_again_for_the_next_request() {
    // Enough workers that the block's holders become an array.
    let workers: Vec<Worker> = (1..=40).map(|id| Worker::new(id, 0)).collect();
    let mut load = table(LoadConfig::default(), &workers);
    let blocks = BlockUse::Shared(&[7]);
    for (id, &worker) in (1..).zip(&workers) {
        load.give(RequestId(id), worker, blocks, 1, 0, 0).unwrap();
    }
    assert!(load.add_output_blocks(RequestId(1), 1, 0.0));
    assert_eq!(load_of(&load, WORKER).active.blocks, 0);
    load.free(RequestId(1));
    load.give(RequestId(99), WORKER, blocks, 1, 0, 0).unwrap();
    assert_eq!(load_of(&load, WORKER).active.blocks, 1);
    load.free(RequestId(99));
    assert_eq!(load.totals().blocks, 39);
}

#[test]
fn values_find_their_workers_in_any_order() {
    let workers: Vec<Worker> = (0..30).map(|id| Worker::new(id * 7 % 31, 0)).collect();
    let load = table(LoadConfig::default(), &workers);
    let ordered: Vec<(Worker, u32)> =
        (0..31).map(|id| (Worker::new(id, 0), id as u32 + 1)).collect();
    let mut by_slot = Vec::new();
    for turn in 0..31 {
        let mut list = ordered.clone();
        list.rotate_left(turn);
        list.swap(3, 17);
        list.remove(turn % 5);
        load.spread(&list, &mut by_slot);
        for (slot, load) in load.loads() {
            let wanted = list.iter().find(|(worker, _)| *worker == load.worker);
            assert_eq!(by_slot[slot], wanted.map_or(0, |(_, value)| *value));
        }
    }
}

// ---- the twin ----

#[derive(Debug, Clone)]
struct TwinRequest {
    id: u64,
    worker: Worker,
    hashes: Vec<u64>,
    private: Vec<f64>,
    prompt_tokens: u64,
    prefill_tokens: u64,
    active_at_ms: u64,
}

#[derive(Debug, Default)]
struct Twin {
    workers: BTreeMap<Worker, u64>,
    requests: Vec<TwinRequest>,
    /// The count of a shared block, where it is not 1.
    fractions: BTreeMap<(Worker, Path), f64>,
    bookings: u64,
}

/// A block with all blocks before it.
type Path = Vec<u64>;

fn paths(hashes: &[u64]) -> impl Iterator<Item = Path> {
    (1..=hashes.len()).map(|len| hashes[..len].to_vec())
}

impl Twin {
    fn entries(&self, worker: Worker) -> Vec<Path> {
        let own = self.requests.iter().filter(|request| request.worker == worker);
        own.flat_map(|request| paths(&request.hashes)).collect()
    }

    fn retain(&mut self, keep: impl FnMut(&TwinRequest) -> bool) -> usize {
        let before = self.requests.len();
        self.requests.retain(keep);
        let held: BTreeSet<(Worker, Path)> = self
            .requests
            .iter()
            .flat_map(|request| paths(&request.hashes).map(|path| (request.worker, path)))
            .collect();
        self.fractions.retain(|key, _| held.contains(key));
        before - self.requests.len()
    }

    fn load(&self, worker: Worker) -> WorkerLoad {
        let own: Vec<_> = self.requests.iter().filter(|r| r.worker == worker).collect();
        let distinct: BTreeSet<Path> = self.entries(worker).into_iter().collect();
        let shared = distinct.into_iter().map(|path| self.fractions.get(&(worker, path)));
        let shared: f64 = shared.map(|fraction| fraction.copied().unwrap_or(1.0)).sum();
        let private: f64 = own.iter().flat_map(|request| &request.private).sum();
        let active = ActiveLoad {
            requests: own.len() as u32,
            prefill_tokens: own.iter().map(|request| request.prefill_tokens).sum(),
            queued_tokens: own.iter().map(|request| request.prefill_tokens).sum(),
            context_tokens: own.iter().map(|request| request.prompt_tokens).sum(),
            blocks: (shared + private).round() as u64,
            last_booked: self.workers[&worker],
        };
        WorkerLoad { worker, active, prefill_tokens_per_s: None }
    }

    fn shared(&self, worker: Worker, probe: &[u64]) -> u32 {
        let entries = self.entries(worker);
        paths(probe).filter(|path| entries.contains(path)).count() as u32
    }
}

#[derive(Debug, Clone)]
enum Op {
    SetWorkers(u64, u64),
    Remove(u64),
    Book { id: u64, worker: u64, prompt: Vec<u64>, isl: u64, overlap: u32 },
    BookPrivate { id: u64, worker: u64, blocks: u32 },
    BookEverywhere { prompt: Vec<u64> },
    Mark(u64),
    Touch(u64),
    Output(u64, u8),
    Free(u64),
    FreeSome(u64),
    Advance(u64),
    Expire,
}

/// Prompts as chains from a small tree, or any numbers, which may repeat, although hashes do not.
fn prompt() -> impl Strategy<Value = Vec<u64>> {
    let chain = prop::collection::vec(0u64..2, 0..10).prop_map(|turns| {
        let mut chain = vec![3_u64];
        for turn in turns {
            chain.push(chain[chain.len() - 1] * 2 + turn);
        }
        chain
    });
    let same = (0usize..12).prop_map(|len| (0..len).map(|at| 2 << at).collect());
    prop_oneof![4 => chain, 2 => same, 1 => prop::collection::vec(0u64..6, 0..6)]
}

fn op() -> impl Strategy<Value = Op> {
    let id = 0u64..24;
    let worker = 0u64..40;
    prop_oneof![
        2 => (0u64..30, 1u64..40).prop_map(|(from, count)| Op::SetWorkers(from, count)),
        1 => worker.clone().prop_map(Op::Remove),
        12 => (id.clone(), worker.clone(), prompt(), 0u64..60, 0u32..9).prop_map(
            |(id, worker, prompt, isl, overlap)| Op::Book { id, worker, prompt, isl, overlap }
        ),
        2 => (id.clone(), worker, 0u32..5)
            .prop_map(|(id, worker, blocks)| Op::BookPrivate { id, worker, blocks }),
        3 => prompt().prop_map(|prompt| Op::BookEverywhere { prompt }),
        4 => id.clone().prop_map(Op::Mark),
        4 => id.clone().prop_map(Op::Touch),
        4 => (id.clone(), 0u8..=8).prop_map(|(id, eighths)| Op::Output(id, eighths)),
        8 => id.prop_map(Op::Free),
        3 => (2u64..5).prop_map(Op::FreeSome),
        4 => (1u64..60).prop_map(Op::Advance),
        4 => Just(Op::Expire),
    ]
}

struct Pair {
    real: ActiveSequences,
    twin: Twin,
    clock: ManualClock,
    probes: Vec<Vec<u64>>,
    next_mass_id: u64,
}

const EXPIRY_MS: u64 = 100;
const BLOCK_SIZE: u64 = 4;
const MAX_REQUESTS: usize = 300;

impl Pair {
    fn new() -> Self {
        let config = LoadConfig {
            block_size: BLOCK_SIZE as u32,
            expiry_ms: EXPIRY_MS,
            max_requests: MAX_REQUESTS,
            track_prefill_tokens: true,
            estimates_queue: false,
            prefill_speed: PrefillSpeed::Unknown,
        };
        Self {
            real: ActiveSequences::new(config),
            twin: Twin::default(),
            clock: ManualClock::default(),
            probes: vec![vec![2, 4, 8, 16, 32, 64], vec![1, 3, 1, 7, 99, 2, 2, 4], vec![]],
            next_mass_id: 1000,
        }
    }

    fn book(&mut self, id: u64, worker: Worker, blocks: BlockUse<'_>, isl: u64, overlap: u32) {
        let now = self.clock.now_ms();
        let got = self.real.give(RequestId(id), worker, blocks, isl, overlap, now);
        let twin = &mut self.twin;
        if twin.requests.iter().any(|request| request.id == id) {
            assert!(matches!(got, Err(Error::Conflict(_))), "{got:?}");
        } else if !twin.workers.contains_key(&worker) {
            assert!(matches!(got, Err(Error::NotFound(_))), "{got:?}");
        } else if twin.requests.len() == MAX_REQUESTS {
            assert!(matches!(got, Err(Error::Overloaded(_))), "{got:?}");
        } else {
            assert_eq!(got, Ok(()));
            let (hashes, private) = match blocks {
                BlockUse::Untracked => (vec![], 0),
                BlockUse::Shared(hashes) => (hashes.to_vec(), 0),
                BlockUse::Private(count) => (vec![], count as usize),
            };
            twin.bookings += 1;
            twin.workers.insert(worker, twin.bookings);
            twin.requests.push(TwinRequest {
                id,
                worker,
                hashes,
                private: vec![1.0; private],
                prompt_tokens: isl,
                prefill_tokens: isl.saturating_sub(u64::from(overlap) * BLOCK_SIZE),
                active_at_ms: now,
            });
        }
    }

    fn play(&mut self, op: &Op) {
        let now = self.clock.now_ms();
        let at = |twin: &Twin, id: u64| twin.requests.iter().position(|r| r.id == id);
        match op {
            Op::SetWorkers(from, count) => {
                let workers: Vec<_> = (*from..from + count).map(|id| Worker::new(id, 0)).collect();
                let gone = self.real.set_workers(&workers).unwrap();
                let before = self.twin.workers.keys().copied();
                let wanted: Vec<_> = before.filter(|worker| !workers.contains(worker)).collect();
                assert_eq!(gone, wanted);
                self.twin.workers.retain(|worker, _| workers.contains(worker));
                for &worker in &workers {
                    self.twin.workers.entry(worker).or_insert(0);
                }
                self.twin.retain(|r| workers.contains(&r.worker));
            }
            Op::Remove(id) => {
                let worker = Worker::new(*id, 0);
                let gone = self.twin.workers.remove(&worker).map(|_| worker);
                self.twin.retain(|request| request.worker != worker);
                let left: Vec<Worker> = self.twin.workers.keys().copied().collect();
                assert_eq!(self.real.set_workers(&left), Ok(gone.into_iter().collect()));
            }
            Op::Book { id, worker, prompt, isl, overlap } => {
                let worker = Worker::new(*worker, 0);
                self.book(*id, worker, BlockUse::Shared(prompt), *isl, *overlap);
                self.probes.push(prompt.clone());
            }
            Op::BookPrivate { id, worker, blocks } => {
                self.book(*id, Worker::new(*worker, 0), BlockUse::Private(*blocks), 8, 0);
            }
            Op::BookEverywhere { prompt } => {
                for worker in self.twin.workers.keys().copied().collect::<Vec<_>>() {
                    self.next_mass_id += 1;
                    self.book(self.next_mass_id, worker, BlockUse::Shared(prompt), 7, 0);
                }
                self.probes.push(prompt.clone());
            }
            Op::Mark(id) => {
                let got = self.real.mark_prefill_completed(RequestId(*id));
                let place = at(&self.twin, *id);
                assert_eq!(got, place.is_some());
                if let Some(place) = place {
                    self.twin.requests[place].prefill_tokens = 0;
                }
            }
            Op::Touch(id) => {
                let place = at(&self.twin, *id);
                assert_eq!(self.real.touch(RequestId(*id), now), place.is_some());
                if let Some(place) = place {
                    self.twin.requests[place].active_at_ms = now;
                }
            }
            Op::Output(id, eighths) => {
                // Every other time any request that is active, mass bookings included.
                let nth = self.twin.requests.get(*id as usize * 5).filter(|_| id % 2 == 0);
                let id = nth.map_or(*id, |request| request.id);
                self.output(id, f64::from(*eighths) / 8.0);
            }
            Op::Free(id) => {
                let freed = self.twin.retain(|request| request.id != *id);
                assert_eq!(self.real.free(RequestId(*id)), freed == 1);
            }
            Op::FreeSome(step) => {
                let ids: Vec<u64> = self.twin.requests.iter().map(|request| request.id).collect();
                for id in ids.into_iter().filter(|id| id % step == 0) {
                    assert!(self.real.free(RequestId(id)));
                    self.twin.retain(|request| request.id != id);
                }
            }
            Op::Advance(by_ms) => self.clock.advance(*by_ms),
            Op::Expire => {
                let active_at_ms = |id: &u64| {
                    let found = at(&self.twin, *id).expect("it is booked");
                    self.twin.requests[found].active_at_ms
                };
                let mut got: Vec<_> = self.real.expire(now).iter().map(|id| id.0).collect();
                assert!(got.is_sorted_by_key(active_at_ms));
                let is_old = |request: &TwinRequest| now - request.active_at_ms > EXPIRY_MS;
                let old = self.twin.requests.iter().filter(|request| is_old(request));
                let mut wanted: Vec<_> = old.map(|request| request.id).collect();
                self.twin.retain(|request| !is_old(request));
                got.sort_unstable();
                wanted.sort_unstable();
                assert_eq!(got, wanted);
            }
        }
        self.compare();
    }

    fn output(&mut self, id: u64, fraction: f64) {
        let got = self.real.add_output_blocks(RequestId(id), 1, fraction);
        let Some(place) = self.twin.requests.iter().position(|r| r.id == id) else {
            assert!(!got);
            return;
        };
        assert!(got);
        let request = &mut self.twin.requests[place];
        request.private.push(fraction);
        request.private.fill(fraction);
        let (worker, hashes) = (request.worker, request.hashes.clone());
        let entries = self.twin.entries(worker);
        for path in paths(&hashes) {
            if entries.iter().filter(|&entry| *entry == path).count() == 1 {
                self.twin.fractions.insert((worker, path), fraction);
            }
        }
    }

    fn compare(&self) {
        let (real, twin) = (&self.real, &self.twin);
        let loads: Vec<_> = real.loads().map(|(_, load)| load).collect();
        let wanted: Vec<_> = twin.workers.keys().map(|&worker| twin.load(worker)).collect();
        assert_eq!(loads, wanted);
        assert_eq!(real.totals().requests, twin.requests.len() as u64);
        let mut counts = Vec::new();
        let newest = self.probes.len().saturating_sub(4);
        for probe in self.probes[newest..].iter().chain(&self.probes[..2]) {
            real.count_shared(probe, &mut counts);
            for (slot, load) in real.loads() {
                assert_eq!(counts[slot], twin.shared(load.worker, probe), "{probe:?}");
            }
        }
        let totals = real.totals();
        let distinct: BTreeSet<Path> =
            twin.requests.iter().flat_map(|request| paths(&request.hashes)).collect();
        assert_eq!(real.distinct_blocks(), distinct.len());
        assert!(real.runs().0 <= distinct.len());
        assert_eq!(totals.blocks, wanted.iter().map(|load| load.active.blocks).sum::<u64>());
        assert_eq!(totals.requests, twin.requests.len() as u64);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_count_is_that_of_the_twin(ops in prop::collection::vec(op(), 1..60)) {
        let mut pair = Pair::new();
        pair.play(&Op::SetWorkers(0, 36));
        for op in &ops {
            pair.play(op);
        }
        for id in pair.twin.requests.iter().map(|request| request.id).collect::<Vec<_>>() {
            prop_assert!(pair.real.free(RequestId(id)));
        }
        let totals = pair.real.totals();
        prop_assert_eq!((totals.requests, totals.prefill_tokens, totals.blocks), (0, 0, 0));
        prop_assert_eq!(pair.real.distinct_blocks(), 0);
        prop_assert_eq!(pair.real.runs(), (0, 0));
    }
}

#[test]
fn requests_that_end_anywhere_in_a_long_prompt_leave_it_in_one_run() {
    let workers: Vec<Worker> = (1..=40).map(|id| Worker::new(id, 0)).collect();
    let mut load = table(LoadConfig::default(), &workers);
    let prompt: Vec<u64> = (1..=6_000).collect();
    let book = |load: &mut ActiveSequences, id: u64, blocks: usize| {
        let worker = workers[id as usize % 40];
        load.give(RequestId(id), worker, BlockUse::Shared(&prompt[..blocks]), 1, 0, 0).unwrap();
    };
    book(&mut load, 0, prompt.len());
    let anywhere = |id: usize| 1 + (id * 1_237) % 5_999;
    for end in [anywhere, |id| id, |id| 5_000 - id] {
        for id in 1..=500 {
            book(&mut load, id, end(id as usize));
        }
        let (runs, room) = load.runs();
        assert_eq!((load.distinct_blocks(), runs), (6_000, 501));
        assert!(room <= 2 * 6_000, "{room}");
        // All that one request uses is joined, whatever the order in which the others end.
        for id in (1..=500).map(|id| 1 + id * 7 % 500) {
            load.free(RequestId(id));
        }
        assert_eq!((load.distinct_blocks(), load.runs().0), (6_000, 1));
    }
}

#[test]
fn what_should_be_left_of_a_queue_is_told_beside_what_is_not_done() {
    let config = LoadConfig { block_size: 16, estimates_queue: true, ..LoadConfig::default() };
    let mut load = table(config, &[WORKER]);
    let unseen = Some(100);
    load.give_unseen(RequestId(1), WORKER, BlockUse::Untracked, 800, 0, unseen, 1_000).unwrap();
    load.give_unseen(RequestId(2), WORKER, BlockUse::Untracked, 400, 0, Some(50), 1_000).unwrap();
    let both = |load: &ActiveSequences| {
        let ActiveLoad { prefill_tokens, queued_tokens, .. } = load_of(load, WORKER).active;
        (prefill_tokens, queued_tokens)
    };
    assert_eq!(both(&load), (1_200, 1_200));
    load.advance(1_050);
    assert_eq!(both(&load), (1_200, 800));
    load.advance(2_000);
    assert_eq!(both(&load), (1_200, 0));
    assert!(load.mark_prefill_completed(RequestId(1)));
    load.free(RequestId(2));
    assert_eq!(both(&load), (0, 0));
}
