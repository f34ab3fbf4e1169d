//! The cost of the index: queries, events, bytes. Prints the median and the best of many rounds;
//! each round is a mean over calls, short enough to fit between two interruptions.
//!
//! `cargo bench --bench index`

use std::fmt::{Display, Formatter, Result};
use std::hint::black_box;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Instant;

use kvflash_core::ids::{Tier, Worker};
use kvflash_core::index::{Block, DEFAULT_SEED, Matches, Options, RadixIndex};
use rand::rngs::SmallRng;
use rand::{Rng, RngCore, SeedableRng};

const ROUNDS: usize = 201;
/// Set in the processes that measure bytes: how many workers hold each prompt.
const SHARERS: &str = "KVFLASH_BENCH_SHARERS";

/// Mean times of a call over rounds, in microseconds.
struct Timing {
    median: f64,
    best: f64,
}

impl Display for Timing {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        write!(f, "{:.2} us (best round {:.2})", self.median, self.best)
    }
}

fn time(calls: usize, mut call: impl FnMut(usize)) -> Timing {
    let mut rounds: Vec<f64> = (0..ROUNDS)
        .map(|round| {
            let start = Instant::now();
            (0..calls).for_each(|n| call(round * calls + n));
            start.elapsed().as_nanos() as f64 / 1e3 / calls as f64
        })
        .collect();
    rounds.sort_by(f64::total_cmp);
    Timing { median: rounds[ROUNDS / 2], best: rounds[0] }
}

fn prompt(rng: &mut SmallRng, blocks: usize) -> Vec<u64> {
    (0..blocks).map(|_| rng.next_u64()).collect()
}

fn store(index: &RadixIndex, worker: Worker, tier: Tier, locals: &[u64], salt: u64) {
    let blocks: Vec<Block> = locals
        .iter()
        .enumerate()
        .map(|(at, &local)| Block {
            engine_hash: local ^ salt ^ (at as u64) << 32,
            local_hash: local,
        })
        .collect();
    index.store(worker, tier, None, DEFAULT_SEED, &blocks);
}

/// `prompts` prompts of `blocks` blocks; `sharers` of `workers` hold each of them to some depth.
fn fill(workers: u64, sharers: u64, prompts: usize, blocks: usize) -> (RadixIndex, Vec<Vec<u64>>) {
    let (index, mut rng) = (RadixIndex::new(Options::default()), SmallRng::seed_from_u64(1));
    let prompts: Vec<Vec<u64>> = (0..prompts).map(|_| prompt(&mut rng, blocks)).collect();
    for prompt in &prompts {
        let first = rng.random_range(0..workers);
        for n in 0..sharers {
            let worker = Worker::new((first + n) % workers, 0);
            let depth = if n % 2 == 0 { blocks } else { rng.random_range(1..=blocks) };
            store(&index, worker, Tier::Device, &prompt[..depth], worker.instance_id << 48);
        }
    }
    (index, prompts)
}

fn queries() {
    for (workers, sharers, prompts, blocks) in
        [(16, 1, 1_000, 118), (16, 16, 1_000, 118), (200, 200, 100, 64), (1_000, 1_000, 20, 64)]
    {
        let (index, prompts) = fill(workers, sharers, prompts, blocks);
        let mut out = Matches::new();
        let cycling = time(50, |n| {
            index.find_matches(&prompts[n % prompts.len()], &mut out);
            assert_eq!(black_box(&out).len() as u64, sharers);
        });
        let same = time(100, |_| index.find_matches(&prompts[0], &mut out));
        println!(
            "query {blocks} blocks, {sharers} of {workers} workers match: {cycling}; one prompt again: {same}"
        );
    }
    let (index, prompts) = fill(16, 16, 1_000, 118);
    for prompt in &prompts {
        store(&index, Worker::new(3, 0), Tier::Host, prompt, 3 << 48);
    }
    let mut out = Matches::new();
    let cycling = time(50, |n| index.find_matches(&prompts[n % 1_000], &mut out));
    println!("the same 118 blocks and 16 workers, one of them with host tier: {cycling}");
    let miss = prompt(&mut SmallRng::seed_from_u64(9), 118);
    let missing = time(1_000, |_| index.find_matches(&miss, &mut out));
    println!("query without any match: {missing}");
}

fn events() {
    let mut rng = SmallRng::seed_from_u64(2);
    let (index, worker) = (RadixIndex::new(Options::default()), Worker::new(1, 0));
    let calls = 200;
    let batches: Vec<Vec<Block>> = (0..ROUNDS * calls)
        .map(|_| {
            (0..8)
                .map(|_| Block { engine_hash: rng.next_u64(), local_hash: rng.next_u64() })
                .collect()
        })
        .collect();
    let stored = time(calls, |n| {
        let parent = (n % 8 > 0).then(|| batches[n - 1][7].engine_hash);
        let outcome = index.store(worker, Tier::Device, parent, DEFAULT_SEED, &batches[n]);
        assert_eq!(outcome.added, 8);
    });
    let shared = time(calls, |n| {
        let parent = (n % 8 > 0).then(|| batches[n - 1][7].engine_hash);
        let outcome =
            index.store(Worker::new(2, 0), Tier::Device, parent, DEFAULT_SEED, &batches[n]);
        assert_eq!(outcome.added, 8);
    });
    let blocks = ROUNDS * calls * 8;
    println!(
        "{blocks} blocks held twice: {} bytes each by the index's own count",
        index.stats().bytes / blocks
    );
    let removed = time(calls, |n| {
        let names: Vec<u64> = batches[n].iter().rev().map(|b| b.engine_hash).collect();
        assert_eq!(index.remove(worker, Tier::Device, &names).removed, 8);
    });
    let start = Instant::now();
    let dropped = index.clear(Worker::new(2, 0));
    let clear = start.elapsed().as_nanos() as f64 / dropped as f64;
    println!(
        "stored event of 8 blocks: new {stored}, held by another {shared}; removed event of 8: {removed}; clear: {clear:.0} ns a block"
    );
}

/// Resident bytes of this process; 0 where the system does not tell.
fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok());
    pages.unwrap_or(0) * 4096
}

/// In a process of its own for each figure: freed memory would be used again and not show.
fn bytes(sharers: u64) {
    let before = resident_bytes();
    let (index, prompts) = fill(16, sharers, 16_000, 64);
    let prompt_bytes = prompts.len() * 64 * 8;
    let stats = index.stats();
    let resident = resident_bytes().saturating_sub(before + prompt_bytes);
    println!(
        "{} blocks, {} memberships: {} resident bytes a membership, {} by the index's own count",
        stats.unique_blocks,
        stats.memberships,
        resident / stats.memberships,
        stats.bytes / stats.memberships
    );
}

/// Queries of one thread while others write.
fn beside_writers() {
    let (index, prompts) = fill(16, 16, 1_000, 118);
    let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut rng = SmallRng::seed_from_u64(3);
            while !stop.load(Relaxed) {
                let worker = Worker::new(rng.random_range(0..16), 0);
                let prompt = prompt(&mut rng, 8);
                store(&index, worker, Tier::Device, &prompt, 0);
                let names: Vec<u64> =
                    (0..8).map(|at| prompt[at] ^ (at as u64) << 32).rev().collect();
                index.remove(worker, Tier::Device, &names);
                written.fetch_add(2, Relaxed);
            }
        });
        let mut out = Matches::new();
        let start = Instant::now();
        let cycling = time(50, |n| index.find_matches(&prompts[n % 1_000], &mut out));
        let seconds = start.elapsed().as_secs_f64();
        stop.store(true, Relaxed);
        let rate = written.load(Relaxed) as f64 / seconds;
        println!(
            "query 118 blocks, 16 workers, beside a writer of {:.0} k events/s: {cycling}",
            rate / 1e3
        );
    });
}

fn main() {
    if let Ok(sharers) = std::env::var(SHARERS) {
        return bytes(sharers.parse().expect("a number of workers"));
    }
    for sharers in ["1", "4", "16"] {
        let program = std::env::current_exe().expect("this program has a path");
        let done = Command::new(program).env(SHARERS, sharers).status();
        assert!(done.is_ok_and(|status| status.success()));
    }
    queries();
    events();
    beside_writers();
}
