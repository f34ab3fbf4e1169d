//! The index against its dumb twin: random events, every answer compared after every event.
//!
//! `KVFLASH_MODEL_EVENTS` sets how many events each seeded stream plays, `KVFLASH_MODEL_SEEDS` how
//! many seeds each kind of stream is played with (48 streams a seed), `KVFLASH_MODEL_SKIP` how many are
//! passed over first.
//! With `--nocapture` each stream says what was compared.

use kvflash_core::ids::{Tier, Worker};
use kvflash_core::index::{Block, CountMode, Limits, Options, RadixIndex};
use proptest::prelude::*;
use rand::rngs::SmallRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, SeedableRng};

mod pair;
mod streams;

use pair::{Op, Pair, Plan, Seen, are_many, events, run, seeds};
use streams::{Calls, Engine, Eviction, Naming, Prompts, Space};

use crate::oracle::BlockIndex;

/// A stream with too little variety proves nothing. Some of many seeds always lack it: they are
/// reported, and do not fail.
macro_rules! covers {
    ($seen:expr, $($met:expr),+ $(,)?) => {
        $(if !$met {
            assert!(are_many(), "too little covered, not {}: {:?}", stringify!($met), $seen);
            println!("too little covered, not {}: {:?}", stringify!($met), $seen);
        })+
    };
}

fn options(count_mode: CountMode, limits: Limits) -> Options {
    Options { count_mode, limits, hash_seed: 99 }
}

/// Predictions that run out, and nothing else.
fn short_lived() -> Limits {
    Limits { predicted_ttl_ms: 60, ..Limits::default() }
}

/// Limits so small that streams run into each of them.
fn tight() -> Limits {
    Limits { max_blocks: 14, max_workers: 5, ..short_lived() }
}

const NARROW: Space = Space { instances: 3, ranks: 2, names: 12, locals: 2, tiers: 4 };
const DEVICE: Space = Space { instances: 2, ranks: 1, names: 30, locals: 3, tiers: 1 };
const CROWD: Space = Space { instances: 40, ranks: 2, names: 10, locals: 2, tiers: 2 };
const FEW: Space = Space { instances: 3, ranks: 2, names: 0, locals: 0, tiers: 3 };

fn play_chaos(seed: u64, count_mode: CountMode, limits: Limits, space: Space) -> Seen {
    let compare_every = if space.instances > 3 { 8 } else { 1 };
    // Where there is room for few blocks, what a stream has to cover takes longer.
    let events = if (1..100).contains(&limits.max_blocks) { 2 * events() } else { events() };
    let options = options(count_mode, limits);
    let plan = Plan { seed, options, events, compare_every };
    let ask = |rng: &mut SmallRng| streams::chaotic_queries(rng, space.locals);
    let by_ms = (limits.ttl_ms / 8) as i64 + 2;
    let next = |rng: &mut SmallRng| match limits.ttl_ms {
        // As much time passes as blocks stand, whatever that is.
        1.. if rng.random_range(0..12) == 0 => Op::Advance(rng.random_range(0..by_ms)),
        _ => streams::chaos(rng, space),
    };
    run(plan, next, ask)
}

fn run_chaos(seed: u64, count_mode: CountMode, limits: Limits, space: Space) -> Seen {
    let seen = play_chaos(seed, count_mode, limits, space);
    // A run that compared only empty answers would prove nothing.
    covers!(seen, seen.matched * 4 > seen.compared, seen.deepest >= 4, seen.foretold > 0);
    covers!(seen, seen.moved > 0, seen.met("Orphan"), seen.met("SelfReference"));
    // Where there is room for few blocks, few are stored twice.
    let keeps = count_mode == CountMode::Copies && seen.duplicates > 100;
    covers!(seen, (seen.kept > 0) == keeps || seen.duplicates <= 100);
    covers!(seen, (seen.expired > 0) == (limits.predicted_ttl_ms > 0), seen.outgrown > 0);
    covers!(seen, (seen.copied > 0 && seen.lower > 0) == (space.tiers > 1));
    covers!(seen, seen.dump_events > 0, seen.filled > 0);
    seen
}

#[test]
fn chaos_in_all_tiers() {
    for seed in seeds(1) {
        run_chaos(seed, CountMode::Set, Limits::default(), NARROW);
        run_chaos(seed + 1, CountMode::Copies, short_lived(), NARROW);
    }
}

#[test]
fn chaos_on_the_device() {
    for seed in seeds(3) {
        run_chaos(seed, CountMode::Set, short_lived(), DEVICE);
        run_chaos(seed + 1, CountMode::Copies, Limits::default(), DEVICE);
    }
}

#[test]
fn chaos_within_tight_limits() {
    for seed in seeds(5) {
        for (seed, mode) in [(seed, CountMode::Set), (seed + 1, CountMode::Copies)] {
            let seen = run_chaos(seed, mode, tight(), NARROW);
            covers!(seen, seen.refused > 0, seen.met("SlotsExhausted"));
        }
    }
}

/// Predictions that are not renewed expire: at once, soon, and so late that time is counted in
/// ticks.
#[test]
fn chaos_of_blocks_that_run_out() {
    for seed in seeds(9) {
        for (n, ttl_ms) in (0..).zip([1, 7, 60, 700, 1_000_000]) {
            let mut expired = 0;
            for (m, space) in (0..).zip([NARROW, DEVICE]) {
                let limits = Limits { ttl_ms, ..Limits::default() };
                let mode = if n % 2 == 0 { CountMode::Copies } else { CountMode::Set };
                let seen = play_chaos(seed + 10 * n + m, mode, limits, space);
                covers!(seen, seen.matched * 8 > seen.compared, seen.deepest >= 4);
                expired += seen.expired;
            }
            covers!((expired, ttl_ms), expired > 20);
        }
        let limits = Limits { ttl_ms: 90, max_blocks: 30, ..short_lived() };
        let seen = run_chaos(seed, CountMode::Copies, limits, NARROW);
        covers!(seen, seen.refused > 0);
    }
}

#[test]
fn chaos_in_a_crowd() {
    for seed in seeds(7) {
        run_chaos(seed, CountMode::Set, Limits::default(), CROWD);
        run_chaos(seed + 1, CountMode::Copies, short_lived(), CROWD);
    }
}

/// Long runs, cut, holed, healed and branched off anywhere, under names of every kind.
#[test]
fn slices_of_a_tree_of_prompts() {
    let namings = [Naming::Shared, Naming::Permuted, Naming::Placed, Naming::Numbered];
    for seed in seeds(20) {
        for (n, naming) in (0..).zip(namings) {
            for (m, (len, alphabet)) in (0..).zip([(1..12, 2), (20..160, 3)]) {
                let seed = seed + 2 * n + m;
                let mut rng = SmallRng::seed_from_u64(seed);
                let prompts = Prompts::grow(&mut rng, 8, len, alphabet);
                let mode = if rng.random() { CountMode::Set } else { CountMode::Copies };
                let plan = Plan {
                    seed,
                    options: options(mode, short_lived()),
                    events: events() / 8,
                    compare_every: 4,
                };
                let next = |rng: &mut SmallRng| streams::slice(rng, FEW, &prompts, naming);
                let seen = run(plan, next, |rng| prompts.queries(rng));
                covers!(seen, seen.matched * 3 > seen.compared, seen.added > 100);
                covers!(seen, seen.met("Orphan"), seen.expired > 0, seen.deepest > 8 || m == 0);
                assert!(seen.moved == 0 || naming == Naming::Numbered, "{seen:?}");
                covers!(seen, seen.moved > 0 || naming != Naming::Numbered);
            }
        }
    }
}

/// The same with facts that run out, of which prompts share long parts.
#[test]
fn slices_that_run_out() {
    for seed in seeds(30) {
        let namings = [Naming::Shared, Naming::Placed, Naming::Numbered];
        for (n, ttl_ms) in (0..).zip([40, 300, 900]) {
            let mut expired = 0;
            for (m, naming) in (0..).zip(namings) {
                let seed = seed + 3 * n + m;
                let prompts = Prompts::grow(&mut SmallRng::seed_from_u64(seed), 8, 20..160, 3);
                let limits = Limits { ttl_ms, ..Limits::default() };
                let plan = Plan {
                    seed,
                    options: options(CountMode::Copies, limits),
                    events: events() / 8,
                    compare_every: 4,
                };
                let next = |rng: &mut SmallRng| streams::slice(rng, FEW, &prompts, naming);
                let seen = run(plan, next, |rng| prompts.queries(rng));
                covers!(seen, seen.matched * 5 > seen.compared, seen.deepest > 8);
                expired += seen.expired;
            }
            covers!((expired, ttl_ms), expired > 20);
        }
    }
}

/// Every way to name, every order of eviction: no event of an engine that behaves is refused.
#[test]
fn engines_that_behave_are_never_refused() {
    for seed in seeds(40) {
        let mut n = seed;
        for eviction in [Eviction::TailFirst, Eviction::HeadFirst, Eviction::Random] {
            for calls in [Calls::Permuted, Calls::Numbered, Calls::Fresh] {
                n += 1;
                run_engines(n, eviction, calls);
            }
        }
    }
}

fn run_engines(seed: u64, eviction: Eviction, calls: Calls) {
    let mut rng = SmallRng::seed_from_u64(seed);
    // Short prompts of a tiny alphabet in one half of the runs, long ones in the other.
    let len = if seed.is_multiple_of(2) { 1..9 } else { 30..200 };
    let (alphabet, longest) = (2 + seed % 3, len.end - 1);
    let prompts = Prompts::grow(&mut rng, 12, len, alphabet);
    let worker = |n: u32| Worker::new(u64::from(n / 2), n % 2);
    let capacity = longest.max(40);
    let engine = |n| Engine::new(worker(n), eviction, calls, capacity).offloading(n >= 2);
    let mut engines: Vec<Engine> = (0..4).map(engine).collect();
    let plan = Plan { seed, options: Options::default(), events: events() / 6, compare_every: 4 };
    let next = |rng: &mut SmallRng| {
        let prompt = prompts.prompt(rng);
        let engine = rng.random_range(0..engines.len());
        engines[engine].step(rng, &prompt)
    };
    let seen = run(plan, next, |rng| prompts.queries(rng));
    assert!(seen.rejected.is_empty() && seen.moved == 0 && seen.refused == 0, "{seen:?}");
    covers!(seen, seen.deepest as usize * 4 > longest, seen.copied > 0);
    covers!(seen, seen.matched * 2 > seen.compared);
}

/// Removals that got lost: what an engine calls a block still stands for other content here.
#[test]
fn lost_removals_make_names_move() {
    for seed in seeds(60) {
        let mut rng = SmallRng::seed_from_u64(seed);
        let prompts = Prompts::grow(&mut rng, 12, 4..60, 3);
        let engine = |n| {
            let engine = Engine::new(Worker::new(n, 0), Eviction::Random, Calls::Numbered, 80);
            engine.offloading(n == 0).losing_removals()
        };
        let mut engines: Vec<Engine> = (0..3).map(engine).collect();
        let plan =
            Plan { seed, options: Options::default(), events: events() / 4, compare_every: 4 };
        let next = |rng: &mut SmallRng| {
            let prompt = prompts.prompt(rng);
            let engine = rng.random_range(0..engines.len());
            engines[engine].step(rng, &prompt)
        };
        let seen = run(plan, next, |rng| prompts.queries(rng));
        assert!(seen.rejected.is_empty(), "{seen:?}");
        covers!(seen, seen.moved > 0);
    }
}

/// More workers than a machine word has bits, and than any short list holds, on one prompt.
#[test]
fn a_crowd_on_one_prompt() {
    for (seed, do_agree) in seeds(70).flat_map(|seed| [(seed, true), (seed + 1, false)]) {
        let mut rng = SmallRng::seed_from_u64(seed);
        let prompts = Prompts::grow(&mut rng, 1, 40..41, 3);
        let mut beside = prompts.all[0].clone();
        beside[25] += 1;
        let asked = vec![prompts.all[0].clone(), beside];
        let plan = Plan {
            seed,
            options: options(CountMode::Set, short_lived()),
            events: events() / 3,
            compare_every: 64,
        };
        let next = |rng: &mut SmallRng| streams::crowded(rng, 240, &prompts.all[0], do_agree);
        let seen = run(plan, next, |_| asked.clone());
        covers!(seen, seen.most_matches > 150, seen.deepest == 40);
        covers!(seen, seen.lower > 0, seen.foretold > 0);
    }
}

/// One prompt of over 20,000 blocks: stored in long events, holed, healed, branched off, evicted.
#[test]
fn a_very_long_chain() {
    const LEN: usize = 20_480;
    const FORK: usize = LEN / 2 - 239;
    let mut rng = SmallRng::seed_from_u64(80);
    // The same block many times in a row, too.
    let locals: Vec<u64> = (0..LEN as u64).map(|at| if at % 1_000 < 20 { 7 } else { at }).collect();
    let name = |worker: Worker, at: usize| at as u64 ^ worker.instance_id << 32;
    let stored = |worker: Worker, from: usize, to: usize| {
        let block = |at| Block { engine_hash: name(worker, at), local_hash: locals[at] };
        let parent = from.checked_sub(1).map(|at| name(worker, at));
        Op::Store { worker, tier: Tier::Device, parent, blocks: (from..to).map(block).collect() }
    };
    let removed = |worker: Worker, at: &mut dyn Iterator<Item = usize>| {
        let names = at.map(|at| name(worker, at)).collect();
        Op::Remove { worker, tier: Tier::Device, names }
    };
    let mut pair = Pair::new(Options::default());
    let [a, b, c] = [0, 1, 2].map(|id| Worker::new(id, 0));
    for from in (0..LEN).step_by(128) {
        pair.play(&stored(a, from, from + 128));
        if from < LEN / 2 {
            pair.play(&stored(b, from, from + 128));
        }
    }
    pair.play(&stored(c, 0, LEN));
    pair.play(&streams::predict(b, locals[..LEN - 1].to_vec()));
    pair.compare(&[]);
    pair.compare_query(&locals, 1);
    assert_eq!((pair.seen.most_matches, pair.seen.deepest as usize), (3, LEN));

    let mut holes: Vec<usize> = (0..12).map(|_| rng.random_range(LEN / 4..LEN - 1)).collect();
    for &at in &holes {
        pair.play(&removed(c, &mut [at].into_iter()));
        pair.compare_query(&locals, 61);
    }
    pair.compare(&[]);
    pair.compare_replayed(&[locals[..LEN / 4].to_vec()]);
    holes.shuffle(&mut rng);
    for &at in &holes {
        pair.play(&stored(c, at, at + 1));
        pair.compare_query(&locals, 61);
    }
    pair.compare(&[]);

    // Another way to go on, from the middle of everything; then eviction from the tail.
    let mut branch = locals[..FORK].to_vec();
    branch.extend(1..=300_u64);
    let blocks = (0..300).map(|n| Block { engine_hash: 1 << 50 | n, local_hash: n + 1 }).collect();
    let parent = Some(name(a, FORK - 1));
    pair.play(&Op::Store { worker: a, tier: Tier::Device, parent, blocks });
    pair.compare_query(&branch, 7);
    for worker in [a, c] {
        for to in [LEN - 480, FORK + 300, FORK, FORK - 1, 130] {
            let held = pair.twin.blocks(worker);
            pair.play(&removed(worker, &mut (to..held.min(LEN)).rev()));
            pair.compare_query(&locals, 97);
            pair.compare_query(&branch, 97);
        }
        pair.compare(&[]);
    }
    pair.play(&Op::Clear(b));
    pair.play(&removed(a, &mut (0..130)));
    pair.play(&Op::RemoveWorker(c));
    pair.compare(&[locals[..300].to_vec()]);
    pair.compare_query(&branch, 13);
    assert_eq!(pair.index.stats().memberships, 300, "of the branch");
}

#[test]
fn churn_leaves_nothing_behind() {
    let index = RadixIndex::default();
    let worker = Worker::new(1, 0);
    let mut rng = SmallRng::seed_from_u64(90);
    let mut churn = |cycle: u64| {
        let names: Vec<u64> = (0..50).map(|n| cycle * 1_000 + n).collect();
        let block = |name: &u64| Block { engine_hash: *name, local_hash: name ^ 77 };
        let mut blocks: Vec<Block> = names.iter().map(block).collect();
        let tier = *[Tier::Device, Tier::Host].choose(&mut rng).expect("not empty");
        assert_eq!(index.store(worker, tier, None, cycle, &blocks).added, 50);
        // A branch, so that runs have children; then everything goes, in some order.
        blocks.iter_mut().for_each(|block| block.engine_hash += 500);
        blocks[0].local_hash += 1;
        assert_eq!(index.store(worker, tier, Some(names[20]), cycle, &blocks).added, 50);
        let mut names: Vec<u64> = names.iter().flat_map(|name| [*name, name + 500]).collect();
        names.shuffle(&mut rng);
        assert_eq!(index.remove(worker, tier, &names).removed, 100);
        index.stats().bytes
    };
    // By then the tables have seen enough churn to have their final size.
    let baseline = (0..500).map(&mut churn).max().unwrap_or(0);
    (500..1_000).for_each(|cycle| _ = churn(cycle));
    // Memory held back by readers of other tests is freed when they have moved on.
    let is_back = |bytes: usize| bytes <= baseline + baseline / 20;
    assert!((1_000..5_000).any(|cycle| is_back(churn(cycle))), "{baseline} -> {:?}", index.stats());
    index.audit();
    let stats = index.stats();
    assert_eq!((stats.unique_blocks, stats.memberships, stats.holders), (0, 0, 0));
}

fn any_op() -> impl Strategy<Value = Op> {
    let worker = (0..2_u64, 0..2_u32).prop_map(|(id, rank)| Worker::new(id, rank));
    let tier = prop_oneof![3 => Just(Tier::Device), 2 => (1..4_usize).prop_map(|t| Tier::ALL[t])];
    let parent = prop_oneof![2 => Just(None), 4 => (0..8_u64).prop_map(Some)];
    let block = (0..8_u64, 1..3_u64)
        .prop_map(|(engine_hash, local_hash)| Block { engine_hash, local_hash });
    let blocks = prop::collection::vec(block, 0..5);
    let held = (worker.clone(), tier.clone(), prop::collection::vec(0..8_u64, 1..4));
    let prompt = prop::collection::vec(1..3_u64, 0..5);
    prop_oneof![
        12 => (worker.clone(), tier, parent, blocks).prop_map(
            |(worker, tier, parent, blocks)| Op::Store { worker, tier, parent, blocks }
        ),
        6 => held.clone().prop_map(|(worker, tier, names)| Op::Remove { worker, tier, names }),
        2 => held.prop_map(|(worker, tier, names)| Op::Copy { worker, tier, names }),
        1 => (worker.clone(), prompt).prop_map(|(worker, locals)| streams::predict(worker, locals)),
        1 => (-3..8_i64).prop_map(Op::Advance),
        1 => worker.clone().prop_map(Op::Clear),
        1 => worker.prop_map(Op::RemoveWorker),
        1 => (0..2_u64).prop_map(Op::RemoveInstance),
    ]
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..Default::default() }
}

proptest! {
    #![proptest_config(config(192))]

    /// Short streams that shrink to the few events which show a mistake.
    #[test]
    fn any_stream(
        ops in prop::collection::vec(any_op(), 1..60),
        copies in any::<bool>(),
        is_tight in any::<bool>(),
        ttl_ms in prop_oneof![Just(0_u64), Just(5), Just(300)],
    ) {
        let mode = if copies { CountMode::Copies } else { CountMode::Set };
        let limits = if is_tight {
            Limits { max_blocks: 9, max_workers: 3, predicted_ttl_ms: 10, ..Limits::default() }
        } else {
            Limits::default()
        };
        let limits = Limits { ttl_ms, ..limits };
        let mut pair = Pair::new(options(mode, limits));
        let asked = [vec![1, 1, 1, 1], vec![1, 1, 2, 1], vec![2, 1, 2, 2], vec![1, 2, 2, 1]];
        for op in &ops {
            pair.play(op);
            pair.compare(&asked);
        }
        pair.compare_replayed(&asked);
    }
}

proptest! {
    #![proptest_config(config(128))]

    /// The same with runs: slices of a few prompts that part at known places.
    #[test]
    fn any_slices(
        slices in prop::collection::vec(
            ((0..3_u64, 0..5_usize), (prop_oneof![Just(0_usize), 0..39_usize], 1..40_usize), 0..100_u32, 0..10_usize),
            1..40,
        ),
        naming in 0..4_usize,
        ttl_ms in prop_oneof![Just(0_u64), Just(70), Just(400)],
    ) {
        let fork = |prompt: &[u64], at: usize, from: u64| -> Vec<u64> {
            prompt[..at].iter().copied().chain((from..).take(40 - at)).collect()
        };
        let trunk: Vec<u64> = (1..=40).collect();
        let (first, second) = (fork(&trunk, 13, 100), fork(&trunk, 13, 200));
        let third = fork(&first, 27, 300);
        let all = [trunk, first, second, third, vec![5; 40]];
        let prompts = Prompts::of(all.to_vec());
        let naming =
            [Naming::Shared, Naming::Permuted, Naming::Placed, Naming::Numbered][naming];
        let mut pair = Pair::new(options(CountMode::Set, Limits { ttl_ms, ..short_lived() }));
        for ((id, prompt), (from, len), what, tier) in slices {
            let at = (prompt, from..(from + len).min(40));
            let tier = Tier::ALL[tier.saturating_sub(7)];
            pair.play(&streams::slice_op(Worker::new(id, 0), tier, &prompts, at, naming, what));
            pair.compare(&prompts.all);
        }
        pair.compare_replayed(&prompts.all);
    }
}
