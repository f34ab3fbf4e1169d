//! The index against its dumb twin: random events, every answer compared after every event.
//!
//! `KVFLASH_MODEL_EVENTS` sets how many events each seeded stream plays.

use std::collections::BTreeMap;

use kvflash::ids::{Tier, Worker};
use kvflash::index::{
    Block, BlockIndex, CountMode, IndexStats, Limits, Matches, Options, OracleIndex, Parent,
    RadixIndex, restore,
};
use proptest::prelude::*;
use rand::rngs::SmallRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, SeedableRng};

/// One event of a stream.
#[derive(Debug, Clone)]
enum Op {
    Store { worker: Worker, tier: Tier, parent: Option<Parent>, seed: u64, blocks: Vec<Block> },
    Remove { worker: Worker, tier: Tier, names: Vec<u64> },
    Clear(Worker),
    RemoveWorker(Worker),
    RemoveInstance(u64),
}

/// The chain hash, worked out here so that the index's own is checked too.
fn chain(parent: Option<u64>, local: u64) -> u64 {
    let Some(parent) = parent else { return local };
    let bytes = [parent.to_le_bytes(), local.to_le_bytes()].concat();
    xxhash_rust::xxh3::xxh3_64_with_seed(&bytes, 1337)
}

fn chains(locals: &[u64]) -> Vec<u64> {
    let mut all: Vec<u64> = Vec::new();
    locals.iter().for_each(|local| all.push(chain(all.last().copied(), *local)));
    all
}

/// What a run came across; a test asserts that it met what it is there for.
#[derive(Debug, Default)]
struct Seen {
    events: usize,
    compared: usize,
    matched: usize,
    deepest: u32,
    rejected: BTreeMap<String, usize>,
    moved: u32,
    refused: u32,
    kept: u32,
}

struct Pair {
    options: Options,
    index: RadixIndex,
    twin: OracleIndex,
    out: [Matches; 2],
    seen: Seen,
}

impl Pair {
    fn new(options: Options) -> Self {
        Self {
            options,
            index: RadixIndex::new(options),
            twin: OracleIndex::new(options),
            out: Default::default(),
            seen: Seen::default(),
        }
    }

    /// Plays one event on both and compares what they return.
    fn play(&mut self, op: &Op) {
        self.seen.events += 1;
        let (index, twin) = (&self.index, &self.twin);
        match op {
            Op::Store { worker, tier, parent, seed, blocks } => {
                let outcome = index.store(*worker, *tier, *parent, *seed, blocks);
                assert_eq!(outcome, twin.store(*worker, *tier, *parent, *seed, blocks));
                if let Some(cause) = outcome.rejected {
                    *self.seen.rejected.entry(format!("{cause:?}")).or_default() += 1;
                }
                self.seen.moved += outcome.moved;
                self.seen.refused += outcome.refused;
            }
            Op::Remove { worker, tier, names } => {
                let outcome = index.remove(*worker, *tier, names);
                assert_eq!(outcome, twin.remove(*worker, *tier, names));
                self.seen.kept += outcome.kept;
            }
            Op::Clear(worker) => assert_eq!(index.clear(*worker), twin.clear(*worker)),
            Op::RemoveWorker(worker) => {
                assert_eq!(index.remove_worker(*worker), twin.remove_worker(*worker));
            }
            Op::RemoveInstance(id) => {
                assert_eq!(index.remove_instance(*id), twin.remove_instance(*id));
            }
        }
    }

    /// Compares everything that can be asked.
    fn compare(&mut self, queries: &[Vec<u64>]) {
        assert_eq!(self.index.workers(), self.twin.workers());
        assert_eq!(self.index.dump(), self.twin.dump());
        let stats = IndexStats { estimated_bytes: 0, ..self.index.stats() };
        assert_eq!(stats, self.twin.stats());
        for worker in self.twin.workers() {
            assert_eq!(self.index.blocks(worker), self.twin.blocks(worker));
            for name in 0..8 {
                let seed = self.index.parent_seed(worker, name);
                assert_eq!(seed, self.twin.parent_seed(worker, name));
                let held = self.index.held_block(worker, name);
                assert_eq!(held, self.twin.held_block(worker, name));
            }
        }
        for query in queries {
            for len in 0..=query.len() {
                self.compare_query(&query[..len]);
            }
        }
    }

    fn compare_query(&mut self, locals: &[u64]) {
        let [mine, theirs] = &mut self.out;
        self.twin.find_matches(locals, theirs);
        theirs.sort();
        self.index.find_matches(locals, mine);
        mine.sort();
        assert_eq!(mine.as_slice(), theirs.as_slice(), "{locals:?}");
        self.index.find_matches_by_sequence(&chains(locals), mine);
        mine.sort();
        assert_eq!(mine.as_slice(), theirs.as_slice(), "by sequence, {locals:?}");
        let mut counts = Vec::new();
        mine.frequencies(&mut counts);
        for (depth, count) in counts.iter().enumerate() {
            let deeper = theirs.as_slice().iter().filter(|m| m.device as usize > depth).count();
            assert_eq!(*count as usize, deeper);
        }
        self.seen.compared += 1;
        self.seen.matched += usize::from(!theirs.is_empty());
        let deepest = theirs.as_slice().iter().map(|m| m.external).max();
        self.seen.deepest = self.seen.deepest.max(deepest.unwrap_or(0));
        self.index.find_matches_early_exit(locals, mine);
        mine.sort();
        self.twin.find_matches_early_exit(locals, theirs);
        theirs.sort();
        assert_eq!(mine.as_slice(), theirs.as_slice(), "early exit, {locals:?}");
    }

    /// Loads the dump into an empty index, in any order, and compares that one's answers.
    fn compare_reloaded(&mut self, rng: &mut SmallRng, queries: &[Vec<u64>]) {
        let limits = Limits { max_blocks: 0, ..self.options.limits };
        let copy = RadixIndex::new(Options { limits, ..self.options });
        let dump = self.index.dump();
        let mut shuffled = dump.clone();
        if rng.random() {
            shuffled.shuffle(rng);
        }
        for block in &shuffled {
            assert_eq!(restore(&copy, block).added, 1, "{block:?}");
        }
        assert_eq!(copy.dump(), dump);
        // By names alone, as a feeder that knows no chain hashes would: where parents are held.
        for block in dump.iter().filter(|block| block.parent_engine.is_some()) {
            let named = kvflash::index::DumpBlock { parent_chain: None, ..*block };
            assert_eq!(restore(&copy, &named).duplicates, 1, "{block:?}");
        }
        let [mine, theirs] = &mut self.out;
        for query in queries {
            copy.find_matches(query, mine);
            self.twin.find_matches(query, theirs);
            mine.sort();
            theirs.sort();
            assert_eq!(mine.as_slice(), theirs.as_slice());
        }
    }
}

fn options(count_mode: CountMode, limits: Limits) -> Options {
    Options { count_mode, limits, hash_seed: 99, ..Options::default() }
}

/// Limits so small that streams run into each of them.
fn tight() -> Limits {
    Limits { max_blocks: 14, max_workers: 5, min_ghosts: 3 }
}

/// What a chaotic stream is drawn from.
#[derive(Clone, Copy)]
struct Space {
    instances: u64,
    ranks: u32,
    names: u64,
    locals: u64,
    tiers: usize,
}

const NARROW: Space = Space { instances: 3, ranks: 2, names: 12, locals: 2, tiers: 4 };
const DEVICE: Space = Space { instances: 2, ranks: 1, names: 30, locals: 3, tiers: 1 };
const CROWD: Space = Space { instances: 40, ranks: 2, names: 10, locals: 2, tiers: 2 };

/// A stream with no regard for what is valid: tiny alphabets, so that names move, repeat and twin.
fn chaos(rng: &mut SmallRng, space: Space) -> Op {
    let id = rng.random_range(0..space.instances);
    let worker = Worker::new(id, rng.random_range(0..space.ranks));
    let tier = Tier::ALL[rng.random_range(0..space.tiers)];
    let name = |rng: &mut SmallRng| rng.random_range(0..space.names);
    match rng.random_range(0..100) {
        0..62 => {
            let parent = match rng.random_range(0..10) {
                0..4 => None,
                4 => Some(Parent::Chain(chains(&[1, 2, 1])[rng.random_range(0..3)])),
                _ => Some(Parent::Engine(name(rng))),
            };
            let block = |rng: &mut SmallRng| Block {
                engine_hash: name(rng),
                local_hash: rng.random_range(1..=space.locals),
            };
            let blocks = (0..rng.random_range(0..5)).map(|_| block(rng)).collect();
            Op::Store { worker, tier, parent, seed: 1337 + rng.random_range(0..2), blocks }
        }
        62..97 => {
            let names = (0..rng.random_range(1..4)).map(|_| name(rng)).collect();
            Op::Remove { worker, tier, names }
        }
        97 => Op::Clear(worker),
        98 => Op::RemoveWorker(worker),
        _ => Op::RemoveInstance(id),
    }
}

fn queries(rng: &mut SmallRng, locals: u64) -> Vec<Vec<u64>> {
    (0..6).map(|_| (0..7).map(|_| rng.random_range(1..=locals)).collect()).collect()
}

fn events() -> usize {
    std::env::var("KVFLASH_MODEL_EVENTS").ok().and_then(|n| n.parse().ok()).unwrap_or(2_500)
}

/// Plays a stream; on a failure the seed and the event are in the output.
fn run(
    seed: u64,
    options: Options,
    locals: u64,
    mut next: impl FnMut(&mut SmallRng) -> Op,
) -> Seen {
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut pair = Pair::new(options);
    let mut asked = queries(&mut rng, locals);
    for event in 0..events() {
        if event % 16 == 0 {
            asked = queries(&mut rng, locals);
        }
        let op = next(&mut rng);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pair.play(&op);
            pair.compare(&asked);
            if event % 64 == 0 {
                pair.compare_reloaded(&mut rng, &asked);
            }
        }));
        if let Err(cause) = result {
            eprintln!("seed {seed}, event {event}: {op:?}");
            std::panic::resume_unwind(cause);
        }
    }
    pair.seen
}

fn run_chaos(seed: u64, count_mode: CountMode, limits: Limits, space: Space) -> Seen {
    let seen = run(seed, options(count_mode, limits), space.locals, |rng| chaos(rng, space));
    // A run that compared only empty answers would prove nothing.
    assert!(seen.matched * 4 > seen.compared, "{seen:?}");
    assert!(seen.deepest >= 4 && seen.moved > 0, "{seen:?}");
    assert!(seen.rejected["Orphan"] > 0 && seen.rejected["SelfReference"] > 0, "{seen:?}");
    assert_eq!(seen.kept > 0, count_mode == CountMode::Copies, "{seen:?}");
    seen
}

#[test]
fn chaos_in_all_tiers() {
    run_chaos(1, CountMode::Set, Limits::default(), NARROW);
    run_chaos(2, CountMode::Copies, Limits::default(), NARROW);
}

#[test]
fn chaos_on_the_device() {
    run_chaos(3, CountMode::Set, Limits::default(), DEVICE);
    run_chaos(4, CountMode::Copies, Limits { min_ghosts: 2, ..Limits::default() }, DEVICE);
}

#[test]
fn chaos_within_tight_limits() {
    for (seed, mode) in [(5, CountMode::Set), (6, CountMode::Copies)] {
        let seen = run_chaos(seed, mode, tight(), NARROW);
        assert!(seen.refused > 0 && seen.rejected["SlotsExhausted"] > 0, "{seen:?}");
    }
}

#[test]
fn chaos_in_a_crowd() {
    run_chaos(7, CountMode::Set, Limits::default(), CROWD);
    run_chaos(8, CountMode::Copies, Limits::default(), CROWD);
}

/// In which order an engine evicts.
#[derive(Clone, Copy)]
enum Eviction {
    TailFirst,
    HeadFirst,
    Random,
}

/// An engine that behaves: stores what it lacks under what it holds, evicts what it holds.
struct Engine {
    worker: Worker,
    eviction: Eviction,
    /// Held blocks: chain hash and name, parents first.
    cache: Vec<(u64, u64)>,
    capacity: usize,
}

impl Engine {
    /// Engines disagree about names: each permutes the chain hash in a way of its own.
    fn name(&self, chain: u64) -> u64 {
        chain.wrapping_mul(2 * self.worker.instance_id + 1).rotate_left(self.worker.dp_rank)
    }

    fn step(&mut self, rng: &mut SmallRng, locals: u64) -> Op {
        if self.cache.len() >= self.capacity {
            return self.evict(rng);
        }
        let prompt: Vec<u64> =
            (0..rng.random_range(1..8)).map(|_| rng.random_range(1..=locals)).collect();
        let chains = chains(&prompt);
        let is_held = |chain: &u64| self.cache.iter().any(|block| block.0 == *chain);
        let Some(first) = chains.iter().position(|chain| !is_held(chain)) else {
            return self.evict(rng);
        };
        // Like engines with prefix caching: what lies behind a hole is stored again with it.
        let fresh = &chains[first..];
        let blocks = fresh.iter().zip(&prompt[first..]);
        let blocks = blocks.map(|(c, l)| Block { engine_hash: self.name(*c), local_hash: *l });
        let op = Op::Store {
            worker: self.worker,
            tier: Tier::Device,
            parent: first.checked_sub(1).map(|at| Parent::Engine(self.name(chains[at]))),
            seed: 1337,
            blocks: blocks.collect(),
        };
        for chain in fresh {
            self.cache.retain(|block| block.0 != *chain);
            self.cache.push((*chain, self.name(*chain)));
        }
        op
    }

    fn evict(&mut self, rng: &mut SmallRng) -> Op {
        let mut names = Vec::new();
        for _ in 0..rng.random_range(1..=self.cache.len().min(6)) {
            let at = match self.eviction {
                Eviction::TailFirst => self.cache.len() - 1,
                Eviction::HeadFirst => 0,
                Eviction::Random => rng.random_range(0..self.cache.len()),
            };
            names.push(self.cache.remove(at).1);
        }
        Op::Remove { worker: self.worker, tier: Tier::Device, names }
    }
}

#[test]
fn engines_that_behave_are_never_refused() {
    for (seed, eviction) in
        [(10, Eviction::TailFirst), (11, Eviction::HeadFirst), (12, Eviction::Random)]
    {
        let worker = |n: u32| Worker::new(u64::from(n / 2), n % 2);
        let engine = |n| Engine { worker: worker(n), eviction, cache: Vec::new(), capacity: 60 };
        let mut engines: Vec<Engine> = (0..5).map(engine).collect();
        let seen = run(seed, Options::default(), 2, |rng| {
            let at = rng.random_range(0..engines.len());
            engines[at].step(rng, 2)
        });
        assert!(seen.rejected.is_empty() && seen.moved == 0, "{seen:?}");
        assert!(seen.deepest == 7, "{seen:?}");
    }
}

#[test]
fn churn_leaves_nothing_behind() {
    let index = RadixIndex::default();
    let worker = Worker::new(1, 0);
    let mut rng = SmallRng::seed_from_u64(20);
    let mut baseline = 0;
    for cycle in 0..1_000_u64 {
        let names: Vec<u64> = (0..50).map(|n| cycle * 1_000 + n).collect();
        let block = |name: &u64| Block { engine_hash: *name, local_hash: name ^ 77 };
        let blocks: Vec<Block> = names.iter().map(block).collect();
        let tier = *[Tier::Device, Tier::Host].choose(&mut rng).expect("not empty");
        assert_eq!(index.store(worker, tier, None, cycle, &blocks).added, 50);
        assert_eq!(index.remove(worker, tier, &names).removed, 50);
        // By then the table of evicted names has seen enough churn to have its final size.
        if cycle == 500 {
            baseline = index.stats().estimated_bytes;
        }
    }
    let stats = index.stats();
    assert_eq!((stats.unique_blocks, stats.memberships, stats.holders), (0, 0, 0));
    assert!(stats.estimated_bytes <= baseline + baseline / 20, "{baseline} -> {stats:?}");
}

fn any_op() -> impl Strategy<Value = Op> {
    let worker = (0..2_u64, 0..2_u32).prop_map(|(id, rank)| Worker::new(id, rank));
    let tier = prop_oneof![3 => Just(Tier::Device), 2 => (1..4_usize).prop_map(|t| Tier::ALL[t])];
    let parent = prop_oneof![
        2 => Just(None),
        4 => (0..8_u64).prop_map(|name| Some(Parent::Engine(name))),
        1 => (0..3_usize).prop_map(|at| Some(Parent::Chain(chains(&[1, 1, 2])[at]))),
    ];
    let block = (0..8_u64, 1..3_u64)
        .prop_map(|(engine_hash, local_hash)| Block { engine_hash, local_hash });
    let blocks = prop::collection::vec(block, 0..5);
    prop_oneof![
        12 => (worker.clone(), tier.clone(), parent, 1337..1339_u64, blocks).prop_map(
            |(worker, tier, parent, seed, blocks)| Op::Store { worker, tier, parent, seed, blocks }
        ),
        7 => (worker.clone(), tier, prop::collection::vec(0..8_u64, 1..4))
            .prop_map(|(worker, tier, names)| Op::Remove { worker, tier, names }),
        1 => worker.clone().prop_map(Op::Clear),
        1 => worker.prop_map(Op::RemoveWorker),
        1 => (0..2_u64).prop_map(Op::RemoveInstance),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, failure_persistence: None, ..Default::default() })]

    /// Short streams that shrink to the few events which show a mistake.
    #[test]
    fn any_stream(
        ops in prop::collection::vec(any_op(), 1..60),
        copies in any::<bool>(),
        is_tight in any::<bool>(),
    ) {
        let mode = if copies { CountMode::Copies } else { CountMode::Set };
        let limits = if is_tight {
            Limits { max_blocks: 9, max_workers: 3, min_ghosts: 1 }
        } else {
            Limits::default()
        };
        let mut pair = Pair::new(options(mode, limits));
        let asked = [vec![1, 1, 1, 1], vec![1, 1, 2, 1], vec![2, 1, 2, 2], vec![1, 2, 2, 1]];
        for op in &ops {
            pair.play(op);
            pair.compare(&asked);
        }
    }
}
