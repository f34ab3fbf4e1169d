//! The index within its limits: blocks per worker, bytes, age. Invariants are checked after every
//! event, and the index's reported size against a counting allocator.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvflash_core::ids::{Tier, Worker};
use kvflash_core::index::{Block, CountMode, Limits, Matches, Options, RadixIndex, StoreOutcome};
use rand::rngs::SmallRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, SeedableRng};

mod bytes;
mod churn;
mod counted;
#[path = "../oracle/mod.rs"]
mod oracle;

use counted::{Counting, Owned};
use oracle::{BlockIndex, OracleIndex};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const SEED: u64 = 1337;

/// Readers hold back what any index lets go: they don't run beside tests of what settles.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    // A test that failed leaves nothing behind that another would see.
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn worker(id: u64) -> Worker {
    Worker::new(id / 2, (id % 2) as u32)
}

fn limited(limits: Limits) -> Options {
    Options { limits, hash_seed: 42, ..Options::default() }
}

fn chains(locals: &[u64]) -> Vec<u64> {
    let mut chain = None;
    let step = |local: &u64| {
        chain = Some(kvflash_core::hash::extend(chain, *local));
        chain.expect("just set")
    };
    locals.iter().map(step).collect()
}

/// Blocks of a prompt under the names that chain hashes give.
fn named(locals: &[u64], own: u64) -> Vec<Block> {
    let block =
        |(chain, local): (u64, &u64)| Block { engine_hash: chain ^ own, local_hash: *local };
    chains(locals).into_iter().zip(locals).map(block).collect()
}

/// Prompts that share beginnings.
fn prompts(rng: &mut SmallRng, count: usize, longest: usize) -> Vec<Vec<u64>> {
    let mut all: Vec<Vec<u64>> = Vec::new();
    for _ in 0..count {
        let mut prompt = match all.choose(rng) {
            Some(other) => other[..rng.random_range(0..=other.len())].to_vec(),
            None => Vec::new(),
        };
        prompt.truncate(longest - 1);
        for _ in 0..rng.random_range(1..=longest - prompt.len()) {
            prompt.push(rng.random_range(1..4));
        }
        all.push(prompt);
    }
    all
}

/// The blocks of a worker, by chain; checks that no block is held without its parent.
fn held_chains(index: &RadixIndex, who: Worker, prompts: &[Vec<u64>]) -> BTreeSet<u64> {
    let held: BTreeSet<u64> = index.memberships(who).iter().map(|m| m.chain).collect();
    for prompt in prompts {
        let chains = chains(prompt);
        let depth = chains.iter().take_while(|chain| held.contains(chain)).count();
        let beyond = chains[depth..].iter().find(|chain| held.contains(chain));
        assert_eq!(beyond, None, "{who} holds a block without its parent");
    }
    held
}

/// Depths of predictions, per prompt and worker, and how many blocks that are in all.
fn predicted(
    index: &dyn BlockIndex,
    prompts: &[Vec<u64>],
) -> (BTreeMap<(usize, Worker), u32>, BTreeMap<Worker, usize>) {
    let (mut depths, mut blocks) = (BTreeMap::new(), BTreeMap::<Worker, BTreeSet<u64>>::new());
    let mut out = Matches::new();
    for (at, prompt) in prompts.iter().enumerate() {
        index.find_matches(prompt, &mut out);
        let chains = chains(prompt);
        for found in out.as_slice().iter().filter(|found| found.predicted > 0) {
            depths.insert((at, found.worker), found.predicted);
            let own = blocks.entry(found.worker).or_default();
            own.extend(&chains[..found.predicted as usize]);
        }
    }
    (depths, blocks.into_iter().map(|(worker, own)| (worker, own.len())).collect())
}

struct Event {
    who: Worker,
    stored: Option<(usize, usize)>,
}

/// One event on both: engines that store prompts from their start or from what they hold, copy the
/// beginning of what they hold to other tiers, evict from the end; and routers that predict.
fn play(
    rng: &mut SmallRng,
    prompts: &[Vec<u64>],
    both: [&dyn BlockIndex; 2],
    now_ms: &mut u64,
    tiers: usize,
) -> Event {
    let who = worker(rng.random_range(0..4));
    let at = rng.random_range(0..prompts.len());
    let prompt = &prompts[at];
    let len = rng.random_range(1..=prompt.len());
    let own = if who.dp_rank == 1 { 77 } else { 0 };
    let blocks = named(prompt, own);
    let mut stored = None;
    match rng.random_range(0..20) {
        0..11 => {
            let tier = Tier::ALL[rng.random_range(0..2 * tiers).saturating_sub(tiers)];
            let from = if rng.random() { 0 } else { rng.random_range(0..len) };
            let parent = from.checked_sub(1).map(|at| blocks[at].engine_hash);
            let outcomes: Vec<StoreOutcome> =
                both.map(|index| index.store(who, tier, parent, SEED, &blocks[from..len])).into();
            if outcomes[0].rejected.is_none() {
                stored = Some((at, len));
            }
        }
        11..13 if tiers > 1 => {
            let names: Vec<u64> = blocks[..len].iter().map(|block| block.engine_hash).collect();
            let tier = Tier::ALL[rng.random_range(1..tiers)];
            let _ = both.map(|index| index.copy(who, tier, &names));
        }
        11..17 => {
            let _ = both.map(|index| index.predict(who, SEED, &prompt[..len]));
        }
        17 => {
            *now_ms += rng.random_range(0..30);
            let _ = both.map(|index| index.advance_to(*now_ms));
        }
        18 if rng.random_bool(0.1) => {
            let _ = both.map(|index| index.clear(who));
        }
        _ if rng.random_bool(0.05) => {
            let _ = both.map(|index| index.remove_worker(who));
        }
        _ => {}
    }
    Event { who, stored }
}

#[test]
fn capacity_holds_after_every_event() {
    let _alone = alone();
    let (mut evicted, mut expired, mut whole, mut cut) = (0, 0, 0, 0);
    for seed in 0..12 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let longest = [8, 40, 200][seed as usize % 3];
        let tiers = [1, 4][seed as usize % 2];
        let prompts = prompts(&mut rng, 14, longest);
        let capacity = longest * 3 / 2;
        let ttl = if seed % 4 < 2 { 0 } else { 100 };
        let limits =
            Limits { capacity_blocks: capacity, predicted_ttl_ms: ttl, ..Limits::default() };
        let index = RadixIndex::new(limited(limits));
        let oracle = OracleIndex::new(limited(limits));
        let mut now_ms = 0;
        for _ in 0..400 {
            let event = play(&mut rng, &prompts, [&index, &oracle], &mut now_ms, tiers);
            index.audit();
            for who in index.workers() {
                assert!(index.blocks(who) <= capacity, "{who}");
                let held = index.memberships(who);
                let all: BTreeSet<_> = oracle.memberships(who).into_iter().collect();
                assert!(held.iter().all(|one| all.contains(one)), "{who} holds what it never got");
                held_chains(&index, who, &prompts);
            }
            if let Some((at, len)) = event.stored.filter(|(_, len)| *len * tiers <= capacity) {
                let held = held_chains(&index, event.who, &prompts);
                let chains = chains(&prompts[at][..len]);
                let there = chains.iter().filter(|chain| held.contains(chain)).count();
                // Where something hung once behind the place where this prompt branches off, the end of
                // the run stays until nothing hangs on it at all: the new blocks may go first.
                whole += usize::from(there == len);
                cut += usize::from(there < len);
            }
            let (depths, counts) = predicted(&index, &prompts);
            let (all_depths, _) = predicted(&oracle, &prompts);
            assert!(counts.values().all(|count| *count <= capacity));
            assert_eq!(counts.values().sum::<usize>(), index.stats().predicted, "no holes");
            for (place, depth) in depths {
                assert!(all_depths.get(&place).is_some_and(|all| depth <= *all));
            }
        }
        evicted += index.stats().evicted_blocks_total;
        expired += index.stats().expired_blocks_total;
    }
    assert!(evicted > 10_000 && expired > 100, "{evicted} {expired}");
    assert!(whole > 500 && cut * 50 < whole, "what was stored last is there: {whole}, {cut} not");
}

#[test]
fn what_was_used_last_stays_longest() {
    let _alone = alone();
    let limits = Limits { capacity_blocks: 30, ..Limits::default() };
    let index = RadixIndex::new(limited(limits));
    let who = worker(0);
    let chain = |first: u64, len: u64| named(&(first..first + len).collect::<Vec<_>>(), 0);
    let depth = |first: u64, len: u64| {
        let mut out = Matches::new();
        index.find_matches(&(first..first + len).collect::<Vec<_>>(), &mut out);
        out.as_slice().iter().map(|found| found.device).max().unwrap_or(0)
    };
    let store = |blocks: &[Block], parent| {
        assert_eq!(index.store(who, Tier::Device, parent, SEED, blocks).rejected, None);
        index.audit();
    };
    for first in [100, 200, 300] {
        store(&chain(first, 10), None);
    }
    // Storing it again refreshes it; a part of it is enough for the blocks in front.
    store(&chain(100, 10)[..1], None);
    store(&chain(400, 10), None);
    assert_eq!([100, 200, 300, 400].map(|first| depth(first, 10)), [10, 0, 10, 10]);
    // The end goes first.
    store(&chain(500, 3), None);
    assert_eq!([100, 300, 400, 500].map(|first| depth(first, 10)), [10, 7, 10, 3]);
    // A following block counts as a use: the whole chain above is as young as its last block.
    let long: Vec<Block> = chain(100, 14);
    store(&long[10..], Some(long[9].engine_hash));
    assert_eq!([100, 300, 400, 500].map(|first| depth(first, 14)), [14, 3, 10, 3]);
    store(&chain(600, 13), None);
    assert_eq!([100, 300, 400, 500, 600].map(|first| depth(first, 14)), [14, 0, 0, 3, 13]);
    // Larger than everything: its first blocks stay.
    store(&chain(1_000, 100), None);
    assert_eq!((depth(1_000, 100), index.blocks(who)), (30, 30));
}

/// A run that others hang on: its end may go, and what they hang on goes after the last of them.
#[test]
fn nothing_goes_below_what_is_held() {
    let _alone = alone();
    let limits = Limits { capacity_blocks: 40, ..Limits::default() };
    let index = RadixIndex::new(limited(limits));
    let who = worker(0);
    let trunk: Vec<u64> = (1..=20).collect();
    let branch =
        |first: u64| -> Vec<u64> { trunk[..10].iter().copied().chain(first..first + 10).collect() };
    let device = |locals: &[u64]| {
        let mut out = Matches::new();
        index.find_matches(locals, &mut out);
        out.as_slice().iter().map(|found| found.device).max().unwrap_or(0)
    };
    let store = |locals: &[u64]| {
        let blocks = named(locals, 0);
        let parent = (locals.len() > 12).then(|| blocks[9].engine_hash);
        let from = if parent.is_some() { 10 } else { 0 };
        index.store(who, Tier::Device, parent, SEED, &blocks[from..]);
        index.audit();
    };
    index.store(who, Tier::Device, None, SEED, &named(&trunk, 0));
    store(&branch(100));
    store(&branch(200));
    assert_eq!(index.blocks(who), 40);
    store(&branch(300));
    // The end of the trunk was no part of the later prompts, or is as young as they are.
    assert_eq!(device(&branch(300)), 20);
    assert_eq!(device(&branch(200)), 20);
    for first in [400, 500, 600] {
        store(&branch(first));
        assert_eq!(device(&branch(first)), 20);
        assert!(index.blocks(who) <= 40);
    }
    // Something else altogether: of the branches the oldest go first, the trunk last.
    index.store(who, Tier::Device, None, SEED, &named(&(900..925).collect::<Vec<_>>(), 0));
    index.audit();
    assert!(device(&branch(600)) >= 10 && device(&branch(400)) <= 10);
    assert_eq!(index.blocks(who), 40);
}

/// Ages against the twin, to the block; and a prediction that is repeated costs nothing more.
#[test]
fn predictions_end_to_the_millisecond() {
    let _alone = alone();
    for seed in 0..20 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let prompts = prompts(&mut rng, 10, [6, 60, 300][seed as usize % 3]);
        let limits = Limits { predicted_ttl_ms: 50, ..Limits::default() };
        let (index, oracle) = (RadixIndex::new(limited(limits)), OracleIndex::new(limited(limits)));
        let mut now_ms = 0;
        for _ in 0..400 {
            let prompt = prompts.choose(&mut rng).expect("some");
            let len = rng.random_range(1..=prompt.len());
            let who = worker(rng.random_range(0..3));
            let fresh = index.predict(who, SEED, &prompt[..len]);
            assert_eq!(fresh, oracle.predict(who, SEED, &prompt[..len]));
            now_ms += rng.random_range(0..12);
            assert_eq!(index.advance_to(now_ms), oracle.advance_to(now_ms));
            if rng.random_bool(0.02) {
                index.remove_worker(who);
                oracle.remove_worker(who);
            }
            index.audit();
            assert_eq!(predicted(&index, &prompts), predicted(&oracle, &prompts));
        }
    }
}

/// Histories against the twin, to the block: of what lengths, with what times beside them, and with evictions
/// that leave holes.
#[test]
fn histories_keep_what_was_predicted_last() {
    let _alone = alone();
    let mut outgrown = 0;
    for seed in 0..20 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let prompts = prompts(&mut rng, 10, [6, 60, 300][seed as usize % 3]);
        let limits = Limits { predicted_ttl_ms: 50, ..Limits::default() };
        let (index, oracle) = (RadixIndex::new(limited(limits)), OracleIndex::new(limited(limits)));
        let both = [&index as &dyn BlockIndex, &oracle];
        let mut most = 100;
        for now_ms in 0..400 {
            let prompt = prompts.choose(&mut rng).expect("some");
            let prompt = &prompt[..rng.random_range(1..=prompt.len())];
            let who = worker(rng.random_range(0..4));
            if rng.random_bool(0.05) {
                most = rng.random_range(0..200);
            }
            let fresh = both.map(|index| match who.instance_id {
                // From some time on.
                0 | 1 if now_ms > 50 => index.predict_within(who, SEED, prompt, most),
                _ => index.predict(who, SEED, prompt),
            });
            assert_eq!(fresh[0], fresh[1]);
            if rng.random_bool(0.3) {
                let from = rng.random_range(0..prompt.len());
                let blocks = named(prompt, 1);
                let names: Vec<u64> =
                    blocks[from..].iter().map(|block| block.engine_hash).collect();
                for index in both {
                    index.store(who, Tier::Device, None, SEED, &blocks);
                    index.remove(who, Tier::Device, &names[..names.len().min(5)]);
                }
            }
            let _ = both.map(|index| index.advance_to(now_ms));
            if rng.random_bool(0.02) {
                let _ = both.map(|index| index.clear(who));
            }
            if rng.random_bool(0.02) {
                let _ = both.map(|index| index.remove_worker(who));
            }
            index.audit();
            assert_eq!(predicted(&index, &prompts), predicted(&oracle, &prompts));
            let stats = both.map(|index| index.stats());
            assert_eq!(stats[0].expired_blocks_total, stats[1].expired_blocks_total);
            assert_eq!(stats[0].predicted, stats[1].predicted);
        }
        outgrown += index.stats().expired_blocks_total;
    }
    assert!(outgrown > 1_000, "{outgrown}");
}

#[test]
fn histories_do_not_pile_up() {
    let _alone = alone();
    let index = RadixIndex::default();
    let mut settled = 0;
    for round in 0..200_000 {
        // One that all have in common, one that comes again, and one of its own.
        let own: Vec<u64> =
            (0..5).chain((0..20).map(|at| round % 400 * 100 + at + 1_000)).collect();
        index.predict_within(worker(round % 3), SEED, &own, 1_000);
        assert!(index.stats().predicted <= 3_000);
        if round == 10_000 {
            settled = index.stats().bytes;
        }
    }
    let bytes = index.stats().bytes;
    assert!(bytes <= settled + settled / 20, "{settled} -> {bytes}");
    index.audit();
}

#[test]
fn repeated_predictions_do_not_pile_up() {
    let _alone = alone();
    let limits = Limits { predicted_ttl_ms: 1 << 40, capacity_blocks: 1_000, ..Limits::default() };
    let index = RadixIndex::new(limited(limits));
    let prompt: Vec<u64> = (0..50).collect();
    let mut settled = 0;
    for now_ms in 0..1_000_000 {
        index.advance_to(now_ms);
        index.predict(worker(0), SEED, &prompt);
        if now_ms == 1_000 {
            settled = index.stats().bytes;
        }
    }
    assert_eq!(index.stats().bytes, settled);
    // Others that push each other out.
    for round in 0..100_000 {
        let own: Vec<u64> = (0..20).map(|at| round * 100 + at + 1_000).collect();
        index.predict(worker(0), SEED, &own);
        if round == 1_000 {
            settled = index.stats().bytes;
        }
    }
    let bytes = index.stats().bytes;
    assert!(bytes <= settled + settled / 20, "{settled} -> {bytes}");
    index.audit();
}

/// The cost of limits besides the blocks: with runs of 50 blocks and all limits enabled.
#[test]
fn order_and_age_cost_less_than_two_bytes_a_block() {
    let _alone = alone();
    let bytes = |limits: Limits, predict: bool| {
        let index = RadixIndex::new(limited(limits));
        for prompt in 0..4_000_u64 {
            let locals: Vec<u64> = (0..50).map(|at| prompt << 16 | at).collect();
            if predict {
                index.predict(worker(prompt % 8), SEED, &locals);
            } else {
                index.store(worker(prompt % 8), Tier::Device, None, SEED, &named(&locals, 0));
            }
        }
        index.stats().bytes as f64 / 200_000.0
    };
    let limits = Limits {
        capacity_blocks: 1 << 30,
        max_bytes: 1 << 30,
        predicted_ttl_ms: 1_000,
        ..Limits::default()
    };
    for predict in [false, true] {
        let (without, with) = (bytes(Limits::default(), predict), bytes(limits, predict));
        // The links of the order are in every member: 8 bytes, 8 of when it was used, 3 beside.
        let cost = with - without + 19.0 / 50.0;
        println!(
            "predictions {predict}: {without:.2} -> {with:.2} B a block; {cost:.2} for limits"
        );
        assert!(cost < 2.0, "{cost} bytes a block");
    }
}

#[test]
fn bytes_come_back_when_everything_goes() {
    let _alone = alone();
    let index = RadixIndex::default();
    let fill = |index: &RadixIndex| {
        for id in 0..40 {
            let start = if id < 20 { 1 } else { id };
            let locals: Vec<u64> = (start..start + 200).collect();
            index.store(worker(id), Tier::Device, None, SEED, &named(&locals, 1));
            index.predict(worker(id), SEED, &locals);
        }
        index.store(worker(0), Tier::Disk, None, SEED, &named(&[1], 1));
        let full = index.stats().bytes;
        (0..40).for_each(|id| _ = index.remove_worker(worker(id)));
        assert_eq!(index.stats().unique_blocks, 0);
        full
    };
    // Which numbers are given again differs from round to round, and pages with it; it must not grow.
    let rounds = |index: &RadixIndex| {
        let round = |_| (fill(index), index.stats().bytes);
        let all: Vec<(usize, usize)> = (0..40).map(round).collect();
        all.into_iter().fold((0, 0), |most, round| (most.0.max(round.0), most.1.max(round.1)))
    };
    let (full, empty) = rounds(&index);
    assert!(full > empty + 20 * 200 * 16, "{full} -> {empty}");
    let (again, left) = rounds(&index);
    assert!(again <= full + full / 20, "{full} -> {again}");
    assert!(left <= empty + empty / 20, "{empty} -> {left}");
}
