//! A day's traffic in virtual time: what policies reuse, and how evenly they spread the work.
//!
//! Eight engines with caches of their own prefill one prompt after the other; the index hears of
//! blocks when a prefill ends. `KVFLASH_TRACE` names a trace to play instead of the one made up here
//! (JSON lines with `timestamp` in ms, `input_length` and `hash_ids` of 512 tokens),
//! `KVFLASH_TRACE_SEED` where chance starts among workers that cost the same.

#![allow(clippy::unwrap_used)]

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::sync::Arc;

use kvflash_core::clock::{Clock, ManualClock};
use kvflash_core::hash;
use kvflash_core::ids::{Tier, Worker};
use kvflash_core::index::{Block, DEFAULT_SEED, Matches, Options, RadixIndex};
use kvflash_core::load::{LoadConfig, PrefillSpeed};
use kvflash_core::policy::{KvScale, Policy};
use kvflash_core::select::{
    Ask, Considered, Known, Policies, Prompt, Reservation, Router, RouterConfig,
};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

const WORKERS: usize = 8;
const BLOCK_TOKENS: u64 = 512;
const CAPACITY_BLOCKS: usize = 3_000;
const PREFILL_TOKENS_PER_S: u64 = 8_000;

#[derive(serde::Deserialize)]
struct Request {
    timestamp: u64,
    input_length: u64,
    hash_ids: Vec<u64>,
}

/// Conversations that all start with the same block; their turns repeat the earlier text.
fn made_up(requests: usize) -> Vec<Request> {
    const OPEN: usize = 120;
    let mut rng = SmallRng::seed_from_u64(7);
    let (mut open, mut next_id, mut at_ms) = (Vec::<Vec<u64>>::new(), 1, 0.0_f64);
    let mut made = Vec::with_capacity(requests);
    while made.len() < requests {
        at_ms += -f64::ln(rng.random_range(1e-9..1.0)) * 300.0;
        let mut which = rng.random_range(0..OPEN);
        if which >= open.len() {
            which = open.len();
            open.push(vec![0]);
        }
        let ids = &mut open[which];
        for _ in 0..rng.random_range(2..30) {
            ids.push(next_id);
            next_id += 1;
        }
        let spare = rng.random_range(0..BLOCK_TOKENS);
        let input_length = ids.len() as u64 * BLOCK_TOKENS - spare;
        made.push(Request { timestamp: at_ms as u64, input_length, hash_ids: ids.clone() });
        if spare > 0 {
            // More text makes another block of it.
            *ids.last_mut().unwrap() = next_id;
            next_id += 1;
        }
        if rng.random_range(0..4) == 0 {
            open.swap_remove(which);
        }
    }
    made
}

fn trace() -> Vec<Request> {
    match std::env::var("KVFLASH_TRACE") {
        Ok(path) => std::fs::read_to_string(path)
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect(),
        Err(_) => made_up(3_000),
    }
}

/// An engine's cache (least recently used goes, tails first) and its queue.
#[derive(Default)]
struct Engine {
    used_at: HashMap<u64, u64>,
    by_age: BTreeMap<u64, u64>,
    age: u64,
    idle_from_ms: u64,
    prefilled_tokens: u64,
}

impl Engine {
    fn cached(&self, ids: &[u64]) -> usize {
        ids.iter().take_while(|id| self.used_at.contains_key(id)).count()
    }

    /// Uses `ids`; what went for them.
    fn take(&mut self, ids: &[u64]) -> Vec<u64> {
        for id in ids.iter().rev() {
            self.age += 1;
            if let Some(before) = self.used_at.insert(*id, self.age) {
                self.by_age.remove(&before);
            }
            self.by_age.insert(self.age, *id);
        }
        let mut evicted = Vec::new();
        while self.used_at.len() > CAPACITY_BLOCKS {
            let (_, id) = self.by_age.pop_first().unwrap();
            self.used_at.remove(&id);
            evicted.push(id);
        }
        evicted
    }
}

/// The end of a prefill: what the engine then says.
struct End {
    worker: usize,
    chain: Vec<u64>,
    known: usize,
    evicted: Vec<u64>,
    booking: Option<Reservation>,
}

#[derive(Debug, Default)]
struct Outcome {
    tokens: u64,
    hit_tokens: u64,
    best_tokens: u64,
    busiest_over_mean: f64,
    ttft_ms: Vec<u64>,
}

impl Outcome {
    fn hit_rate(&self) -> f64 {
        self.hit_tokens as f64 / self.tokens as f64
    }

    fn of_best(&self) -> f64 {
        self.hit_tokens as f64 / self.best_tokens as f64
    }
}

fn worker(number: usize) -> Worker {
    Worker::new(number as u64 + 1, 0)
}

fn block(id: u64) -> Block {
    Block { engine_hash: id + 1, local_hash: id + 1 }
}

/// How a request finds its worker.
#[derive(Debug)]
enum Way {
    Router(Policy),
    /// `kv` for workers that only prefill, as these do.
    Prefilling {
        /// The saving of a cached block.
        credit: f64,
        /// How fast they are: what they have done of a prompt counts no more.
        speed: PrefillSpeed,
    },
    /// The worker that holds most, the first among equals.
    LongestMatch,
}

fn play(trace: &[Request], way: &Way) -> Outcome {
    let clock = Arc::new(ManualClock::default());
    let (policy, overlap_score_credit, prefill_speed) = match *way {
        Way::Router(policy) => (policy, 1.0, PrefillSpeed::Unknown),
        Way::Prefilling { credit, speed } => (Policy::Kv, credit, speed),
        Way::LongestMatch => (Policy::Kv, 1.0, PrefillSpeed::Unknown),
    };
    let load = LoadConfig {
        block_size: BLOCK_TOKENS as u32,
        prefill_speed,
        expiry_ms: u64::MAX,
        ..LoadConfig::default()
    };
    let config = RouterConfig {
        load,
        track_active_blocks: !matches!(way, Way::Prefilling { .. }),
        seed: std::env::var("KVFLASH_TRACE_SEED").map_or(1, |seed| seed.parse().unwrap()),
        scale: KvScale { overlap_score_credit, ..KvScale::default() },
        ..RouterConfig::default()
    };
    let policies = Policies { active: Arc::new(policy), ..Policies::default() };
    let router = Arc::new(
        Router::with_policies(config, policies, Arc::clone(&clock) as Arc<dyn Clock>).unwrap(),
    );
    let all: Vec<Worker> = (0..WORKERS).map(worker).collect();
    router.set_workers(&all).unwrap();
    let index = RadixIndex::new(Options::default());
    let mut engines: Vec<Engine> = (0..WORKERS).map(|_| Engine::default()).collect();
    let mut due: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    let mut ends: Vec<Option<End>> = Vec::new();
    let (mut matches, mut considered) = (Matches::new(), Considered::default());
    let mut outcome = Outcome::default();
    let mut now_ms = 0;
    for request in trace {
        while let Some(Reverse((at_ms, number))) = due.peek().copied() {
            if at_ms > request.timestamp {
                break;
            }
            due.pop();
            clock.advance(at_ms - now_ms);
            now_ms = at_ms;
            let end = ends[number].take().unwrap();
            let blocks: Vec<Block> = end.chain[end.known..].iter().map(|id| block(*id)).collect();
            let parent = end.known.checked_sub(1).map(|at| block(end.chain[at]).engine_hash);
            let holder = worker(end.worker);
            index.store(holder, Tier::Device, parent, DEFAULT_SEED, &blocks);
            let names: Vec<u64> = end.evicted.iter().map(|id| block(*id).engine_hash).collect();
            index.remove(holder, Tier::Device, &names);
            if let Some(booking) = end.booking {
                booking.first_token();
            }
        }
        clock.advance(request.timestamp - now_ms);
        now_ms = request.timestamp;
        // Only what is full is kept.
        let full = (request.input_length / BLOCK_TOKENS) as usize;
        let chain = &request.hash_ids[..full.min(request.hash_ids.len())];
        let locals: Vec<u64> = chain.iter().map(|id| block(*id).local_hash).collect();
        let mut sequence_hashes = Vec::new();
        hash::sequence_hashes_into(&locals, &mut sequence_hashes);
        index.find_matches(&locals, &mut matches);
        let overlaps: Vec<(Worker, u32)> =
            matches.as_slice().iter().map(|found| (found.worker, found.device)).collect();
        let (chosen, booking) = match way {
            Way::LongestMatch => {
                let longest = |w: &usize| {
                    let held = overlaps.iter().find(|(holder, _)| *holder == worker(*w));
                    (held.map_or(0, |(_, depth)| *depth), Reverse(*w))
                };
                ((0..WORKERS).max_by_key(longest).unwrap(), None)
            }
            Way::Router(_) | Way::Prefilling { .. } => {
                let isl_tokens = request.input_length;
                let prompt = Prompt { isl_tokens, sequence_hashes, ..Prompt::default() };
                let known = Known { overlaps: &overlaps, ..Known::default() };
                let wanted = Ask { known, ..Ask::new(&prompt) };
                let (booking, _) = router.route(&wanted, &mut considered).unwrap();
                (booking.worker().instance_id as usize - 1, Some(booking))
            }
        };
        let held: Vec<usize> = engines.iter().map(|engine| engine.cached(chain)).collect();
        let best = held.iter().max().unwrap();
        let engine = &mut engines[chosen];
        let uncached = request.input_length - held[chosen] as u64 * BLOCK_TOKENS;
        let start = engine.idle_from_ms.max(request.timestamp);
        engine.idle_from_ms = start + uncached * 1_000 / PREFILL_TOKENS_PER_S;
        engine.prefilled_tokens += uncached;
        outcome.tokens += request.input_length;
        outcome.hit_tokens += held[chosen] as u64 * BLOCK_TOKENS;
        outcome.best_tokens += *best as u64 * BLOCK_TOKENS;
        outcome.ttft_ms.push(engine.idle_from_ms - request.timestamp);
        due.push(Reverse((engine.idle_from_ms, ends.len())));
        let evicted = engine.take(chain);
        let (chain, known) = (chain.to_vec(), held[chosen]);
        ends.push(Some(End { worker: chosen, chain, known, evicted, booking }));
    }
    let most = engines.iter().map(|engine| engine.prefilled_tokens).max().unwrap();
    let sum: u64 = engines.iter().map(|engine| engine.prefilled_tokens).sum();
    outcome.busiest_over_mean = (most * WORKERS as u64) as f64 / sum as f64;
    outcome.ttft_ms.sort_unstable();
    let quantile = |share: f64| outcome.ttft_ms[(outcome.ttft_ms.len() as f64 * share) as usize];
    println!(
        "{way:?}: hit {:.3}, {:.3} of the best {:.3}; prefill skew {:.2}; first token p50 {} p99 {} ms",
        outcome.hit_rate(),
        outcome.of_best(),
        outcome.best_tokens as f64 / outcome.tokens as f64,
        outcome.busiest_over_mean,
        quantile(0.5),
        quantile(0.99),
    );
    outcome
}

#[test]
fn kv_takes_most_of_what_can_be_had_and_spreads_the_work() {
    let trace = trace();
    let turns = play(&trace, &Way::Router(Policy::RoundRobin));
    let idlest = play(&trace, &Way::Router(Policy::LeastLoaded));
    let spreads = |kv: &Outcome| {
        assert!(kv.busiest_over_mean < 1.3, "{:.2}", kv.busiest_over_mean);
        for other in [&turns, &idlest] {
            assert!(
                kv.hit_rate() > 1.5 * other.hit_rate(),
                "{} {}",
                kv.hit_rate(),
                other.hit_rate()
            );
        }
    };
    spreads(&play(&trace, &Way::Router(Policy::Kv)));
    let told = PrefillSpeed::Told(PREFILL_TOKENS_PER_S as f64);
    for (credit, speed, share) in [
        (1.0, told, 0.87),
        (1.0, PrefillSpeed::Learned, 0.86),
        (2.0, PrefillSpeed::Unknown, 0.88),
        (2.0, PrefillSpeed::Learned, 0.91),
    ] {
        let kv = play(&trace, &Way::Prefilling { credit, speed });
        spreads(&kv);
        assert!(kv.of_best() >= share, "{:.3} of what the best worker held", kv.of_best());
    }
}

#[test]
fn where_all_prompts_begin_alike_the_longest_match_alone_would_take_one_worker() {
    let trace = trace();
    let longest = play(&trace, &Way::LongestMatch);
    assert!(longest.busiest_over_mean > 0.9 * WORKERS as f64, "{}", longest.busiest_over_mean);
    for credit in [1.0, 2.0] {
        let kv = play(&trace, &Way::Prefilling { credit, speed: PrefillSpeed::Unknown });
        assert!(kv.busiest_over_mean < 1.3, "{:.2}", kv.busiest_over_mean);
    }
}
