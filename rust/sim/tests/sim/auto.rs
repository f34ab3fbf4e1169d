//! The behaviour of `auto` before engines, over time.

use std::ops::Range;
use std::sync::Arc;

use kvflash_core::policy::AUTO;
use kvflash_sim::outcome::Outcome;
use kvflash_sim::play::{Fleet, play};
use kvflash_sim::row::Row;
use kvflash_sim::timing::Timing;
use kvflash_sim::traffic;
use kvflash_sim::workload::{Session, Turn, Workload};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

const BLOCK: u64 = 16;

/// `workers` engines of `tokens_per_ms` each, with caches that never fill.
fn fleet(workers: usize, tokens_per_ms: f64) -> Fleet {
    let timing = Timing {
        step_us: 10_000.0,
        prefill_us: 1_000.0 / tokens_per_ms,
        attention_us: 0.0,
        sequence_us: 200.0,
        context_us: 0.0,
    };
    Fleet { capacity_tokens: 8 << 20, timing, ..Fleet::of(workers) }
}

/// Requests that come one by one.
struct Traffic {
    rng: SmallRng,
    next_id: u64,
    sessions: Vec<Session>,
}

impl Traffic {
    fn new() -> Self {
        Self { rng: SmallRng::seed_from_u64(11), next_id: 1 << 32, sessions: Vec::new() }
    }

    /// At `at_ms` a prompt that begins with the blocks `shared` and goes on with `own` tokens that no other one has.
    fn add(&mut self, at_ms: u64, shared: Range<u64>, own: u64, output: u64) {
        let input = (shared.end - shared.start) * BLOCK + own;
        let first = self.next_id;
        self.next_id += own / BLOCK;
        let ids: Arc<[u64]> = shared.chain(first..self.next_id).collect();
        let turns = vec![Turn { pause_us: 0, input, output, ids }];
        self.sessions.push(Session { client: 0, at_us: at_ms * 1_000, turns });
    }

    /// Requests at random for `ms`, `per_s` a second on average.
    fn serve(
        &mut self,
        ms: u64,
        per_s: f64,
        mut shared: impl FnMut() -> Range<u64>,
        own: u64,
        output: u64,
    ) {
        for at_ms in 0..ms {
            if self.rng.random_bool(per_s / 1_000.0) {
                self.add(at_ms, shared(), own, output);
            }
        }
    }

    fn play(self, fleet: &Fleet) -> Outcome {
        let workload = Workload::of_sessions("scenario", BLOCK, self.sessions);
        play(&workload, fleet, &Row::new(AUTO))
    }
}

/// Requests of these milliseconds that each worker got, over the mean.
fn shares(outcome: &Outcome, workers: usize, ms: Range<u64>) -> Vec<f64> {
    let mut counts = vec![0_u32; workers];
    let within = outcome.ways.iter().filter(|way| ms.contains(&(way.at_us / 1_000)));
    within.for_each(|way| counts[way.engine] += 1);
    let mean = f64::from(counts.iter().sum::<u32>()) / workers as f64;
    counts.into_iter().map(|count| f64::from(count) / mean).collect()
}

#[test]
fn a_new_prefix_that_many_want_at_once_spreads_over_the_fleet() {
    for tokens_per_ms in [10.0, 50.0, 200.0] {
        let mut traffic = Traffic::new();
        (0..300).for_each(|number| traffic.add(10 * number, 0..1_875, 100, 200));
        let outcome = traffic.play(&fleet(32, tokens_per_ms));
        let shares = shares(&outcome, 32, 0..3_000);
        assert_eq!(outcome.ways.len(), 300);
        assert!(shares.iter().all(|share| (0.3..=3.0).contains(share)), "{shares:?}");
    }
}

#[test]
fn a_worker_that_recovers_has_its_share_within_a_minute() {
    // Requests a second among four workers: many, and so few that a slow worker is hardly asked.
    for per_s in [20.0, 4.0, 1.0] {
        let mut traffic = Traffic::new();
        traffic.serve(240_000, per_s, || 0..0, 1_000, 100);
        let mut fleet = Fleet { changes: vec![(120_000_000, 2, 1.0)], ..fleet(4, 10.0) };
        fleet.slowness[2] = 5.0;
        let outcome = traffic.play(&fleet);
        let slow = shares(&outcome, 4, 60_000..120_000);
        let healthy = shares(&outcome, 4, 180_000..240_000);
        assert!(slow[2] < 0.6, "{per_s}: {slow:?}");
        assert!(healthy[2] > 0.7, "{per_s}: {healthy:?}");
    }
}

#[test]
fn a_hair_slower_than_the_others_is_no_reason_to_get_nothing() {
    // So few requests that all workers are mostly idle.
    let mut traffic = Traffic::new();
    traffic.serve(300_000, 1.0, || 0..0, 1_000, 20);
    let mut fleet = fleet(4, 10.0);
    fleet.slowness[1] = 1.03;
    let shares = shares(&traffic.play(&fleet), 4, 100_000..300_000);
    assert!(shares.iter().all(|share| (0.6..=1.4).contains(share)), "{shares:?}");
}

#[test]
fn replicas_that_do_not_hear_each_other_do_not_oscillate() {
    let mut traffic = Traffic::new();
    // Sixteen system prompts, each with questions that were never asked before.
    let mut turn = 0;
    let system = || {
        turn = (turn + 7) % 16;
        turn * 10_000..turn * 10_000 + 62
    };
    traffic.serve(80_000, 40.0, system, 500, 100);
    let outcome = traffic.play(&Fleet { routers: 2, ..fleet(8, 20.0) });
    for window in 2..8 {
        let shares = shares(&outcome, 8, window * 10_000..(window + 1) * 10_000);
        assert!(shares.iter().all(|share| (0.5..=1.5).contains(share)), "{window}: {shares:?}");
    }
}

#[test]
fn answers_without_streams_cost_little_reuse() {
    // The engines' load grows with the conversations, and with it what all answers take.
    let hit = |has_streams| {
        let hits = (0..8).map(|seed| {
            let fleet = Fleet { capacity_tokens: 40_000, has_streams, seed, ..Fleet::of(4) };
            play(&traffic::Traffic::InLine.make(seed, 480), &fleet, &Row::new(AUTO)).hit_rate()
        });
        hits.sum::<f64>() / 8.0
    };
    let (streamed, whole) = (hit(true), hit(false));
    assert!(whole > 0.92 * streamed, "{whole} of {streamed}");
}
