//! The budget of bytes, and the figures themselves.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::*;

/// Streams that grow everything an index has: names that agree and do not, tiers, holes, twins,
/// predictions, evictions in no order.
struct Fleet {
    rng: SmallRng,
    workers: u64,
    trunk: Vec<u64>,
    next: u64,
    held: Vec<Vec<(Tier, u64)>>,
    /// Largest event.
    most: usize,
}

impl Fleet {
    fn new(seed: u64, workers: u64, most: usize) -> Self {
        let rng = SmallRng::seed_from_u64(seed);
        let held = (0..workers).map(|_| Vec::new()).collect();
        Self { rng, workers, trunk: (1..400).collect(), next: 1_000, held, most }
    }

    fn step(&mut self, index: &RadixIndex, owned: &mut Owned) {
        let rng = &mut self.rng;
        let at = rng.random_range(0..self.workers);
        let who = worker(at);
        let held = &mut self.held[at as usize];
        match rng.random_range(0..100) {
            0..60 => {
                let shared = rng.random_range(0..self.trunk.len());
                let mut locals = self.trunk[..shared].to_vec();
                for _ in 0..rng.random_range(1..=self.most) {
                    self.next += 1;
                    locals.push(self.next);
                }
                let own = [0, at, self.next][rng.random_range(0..3)];
                let tier = Tier::ALL[rng.random_range(0..8_usize).saturating_sub(4)];
                let blocks = named(&locals, own);
                owned.call(|| index.store(who, tier, None, SEED + own % 3, &blocks));
                let sample = blocks.choose_multiple(rng, 16);
                held.extend(sample.map(|block| (tier, block.engine_hash)));
            }
            60..75 => {
                held.shuffle(rng);
                held.truncate(10_000);
                let gone = held.split_off(held.len() - held.len().min(12));
                for tier in Tier::ALL {
                    let names: Vec<u64> =
                        gone.iter().filter(|(of, _)| *of == tier).map(|(_, name)| *name).collect();
                    owned.call(|| index.remove(who, tier, &names));
                }
            }
            75..80 => {
                let names: Vec<u64> = held.iter().rev().take(20).map(|(_, name)| *name).collect();
                owned.call(|| index.copy(who, Tier::Host, &names));
            }
            80..95 => {
                let len = rng.random_range(1..self.trunk.len());
                let mut locals = self.trunk[..len].to_vec();
                self.next += 1;
                locals.push(self.next);
                owned.call(|| match who.instance_id % 3 {
                    0 => index.predict_within(who, SEED, &locals, 400),
                    _ => index.predict(who, SEED, &locals),
                });
            }
            95..98 => {
                self.next += 1;
                owned.call(|| index.advance_to(self.next));
            }
            98 => {
                owned.call(|| index.clear(who));
            }
            _ => {
                owned.call(|| index.remove_worker(who));
            }
        }
    }
}

fn warm() {
    // The thread's place among the readers is no index's.
    RadixIndex::default().find_matches(&[1], &mut Matches::new());
}

#[test]
fn what_it_says_it_occupies_is_what_it_asked_for() {
    let _alone = alone();
    warm();
    for (seed, limits) in [
        (1, Limits::default()),
        (2, Limits { predicted_ttl_ms: 10_000, ..Limits::default() }),
        (3, Limits { capacity_blocks: 3_000, predicted_ttl_ms: 5_000, ..Limits::default() }),
        (4, Limits { max_bytes: 3 << 20, predicted_ttl_ms: 5_000, ..Limits::default() }),
        (5, Limits { ttl_ms: 60_000, ..Limits::default() }),
        (6, Limits { ttl_ms: 30_000, predicted_ttl_ms: 5_000, ..Limits::default() }),
        (7, Limits { ttl_ms: 20_000, max_bytes: 3 << 20, ..Limits::default() }),
    ] {
        let mode = if seed % 2 == 0 { CountMode::Set } else { CountMode::Copies };
        let options = Options { count_mode: mode, ..limited(limits) };
        let mut owned = Owned::default();
        let index = owned.call(|| RadixIndex::new(options));
        let mut fleet = Fleet::new(seed, 24, 200);
        for step in 0..1_000 {
            fleet.step(&index, &mut owned);
            let says = owned.call(|| index.stats().bytes);
            assert_eq!(says as isize, owned.bytes, "seed {seed}, step {step}");
            if step % 97 == 0 {
                owned.call(|| index.audit());
            }
        }
        assert!(owned.call(|| index.stats().bytes) > 1 << 20);
        owned.call(|| drop(index));
        assert_eq!(owned.bytes, 0, "all of it was given back");
    }
}

#[test]
fn a_budget_of_bytes_holds_after_every_event() {
    let _alone = alone();
    warm();
    for (seed, budget, most) in
        [(1, 64 << 10, 40), (2, 1 << 20, 100), (3, 4 << 20, 1_000), (4, 10 << 20, 300)]
    {
        // In every other run facts run out, too, but not before many gave way.
        let ttl_ms = if seed % 2 == 0 { 100_000 } else { 0 };
        let limits =
            Limits { max_bytes: budget, predicted_ttl_ms: 100_000, ttl_ms, ..Limits::default() };
        let budget = budget.max(Limits::MAX_BYTES_LEAST);
        let mut owned = Owned::default();
        let index = owned.call(|| RadixIndex::new(limited(limits)));
        let mut fleet = Fleet::new(seed, 40, most);
        let mut used = 0;
        for step in 0..1_500 {
            fleet.step(&index, &mut owned);
            let bytes = owned.call(|| index.stats().bytes);
            assert!(bytes <= budget, "step {step}: {bytes} of {budget}");
            used = used.max(bytes);
            if step % 101 == 0 {
                owned.call(|| index.audit());
            }
        }
        let stats = index.stats();
        println!("budget {budget}: most {used}, peak within calls {}, {stats:?}", owned.peak);
        assert!(stats.evicted_blocks_total > 1_000 && used > budget * 3 / 4);
        assert!(stats.memberships > 100, "it keeps working: {stats:?}");
        // The last one stored is there.
        let locals: Vec<u64> = (1 << 40..(1 << 40) + 20).collect();
        index.store(worker(0), Tier::Device, None, SEED, &named(&locals, 0));
        let mut out = Matches::new();
        index.find_matches(&locals, &mut out);
        assert_eq!(out.as_slice().iter().map(|found| found.device).collect::<Vec<_>>(), [20]);
        index.audit();
    }
}

/// The effect of a single event may be larger than the limit.
#[test]
fn events_of_65_536_blocks_fit_any_budget() {
    let _alone = alone();
    warm();
    for budget in [64 << 10, 1 << 20, 10 << 20] {
        let limits = Limits { max_bytes: budget, ..Limits::default() };
        let budget = budget.max(Limits::MAX_BYTES_LEAST);
        let mut owned = Owned::default();
        let index = owned.call(|| RadixIndex::new(limited(limits)));
        for round in 0..20_u64 {
            let locals: Vec<u64> = (0..65_536).map(|at| round << 32 | at).collect();
            let blocks = named(&locals, round);
            let outcome =
                owned.call(|| index.store(worker(round % 3), Tier::Device, None, SEED, &blocks));
            assert_eq!(outcome.added + outcome.refused, 65_536);
            let stats = index.stats();
            assert!(stats.bytes <= budget, "{stats:?}");
            index.audit();
            let mut out = Matches::new();
            index.find_matches(&locals, &mut out);
            let depth = out.as_slice().iter().map(|found| found.device).max().unwrap_or(0) as usize;
            assert!(depth * 30 > budget / 4 || depth == 65_536, "{depth} blocks in {budget} bytes");
            held_chains(&index, worker(round % 3), &[locals]);
        }
        println!("budget {budget}: peak within calls {}", owned.peak);
        // Beside the budget, an event is checked for repeated names.
        assert!(owned.peak as usize <= budget + 65_536 * 48, "not even for a moment: {owned:?}");
    }
}

/// Blocks of idle workers go before those of busy ones, whichever have more.
#[test]
fn the_idle_give_way() {
    let _alone = alone();
    let limits = Limits { max_bytes: 4 << 20, ..Limits::default() };
    let index = RadixIndex::new(limited(limits));
    let store = |who: u64, round: u64| {
        let locals: Vec<u64> = (0..50).map(|at| who << 48 | round << 16 | at).collect();
        index.store(worker(who), Tier::Device, None, SEED, &named(&locals, 0));
    };
    for round in 0..20 {
        (0..10).for_each(|who| store(who, round));
    }
    // One goes on, another refreshes what it has.
    let mut round = 1_000;
    while index.stats().evicted_blocks_total < 7_000 {
        store(0, round);
        if round % 20 == 0 {
            (0..20).for_each(|old| store(1, old));
        }
        round += 1;
        assert!(round < 20_000);
    }
    assert_eq!(index.blocks(worker(1)), 1_000, "in use");
    assert!(index.blocks(worker(0)) > 50_000);
    for who in 2..10 {
        assert!(index.blocks(worker(who)) < 1_000 - 500, "{}", index.blocks(worker(who)));
    }
    index.audit();
}

/// Readers that stay hold back what was let go: the budget holds all the same, and what finds no room is
/// refused.
#[test]
fn readers_that_hold_pins_cost_no_more_bytes() {
    let _alone = alone();
    let budget = 3 << 20;
    let limits = Limits { max_bytes: budget, ..Limits::default() };
    let index = RadixIndex::new(limited(limits));
    let stop = &AtomicBool::new(false);
    struct Stop<'a>(&'a AtomicBool);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Relaxed);
        }
    }
    let trunk: Vec<u64> = (1..400).collect();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut out = Matches::new();
                let mut asked = 0_u64;
                while !stop.load(Relaxed) {
                    index.find_matches(&trunk, &mut out);
                    asked += 1;
                }
                assert!(asked > 10);
            });
        }
        let _stop = Stop(stop);
        let mut fleet = Fleet::new(9, 40, 300);
        let mut owned = Owned::default();
        for step in 0..3_000 {
            fleet.step(&index, &mut owned);
            let bytes = owned.call(|| index.stats().bytes);
            assert!(bytes <= budget, "step {step}: {bytes}");
        }
    });
    index.audit();
    assert!(index.stats().evicted_blocks_total > 10_000);
}
