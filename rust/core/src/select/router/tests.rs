//! Guarantees of the router beyond the policies: one step, one guard, no trace of a preview.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Arc;

use rand::SeedableRng;
use rand::rngs::SmallRng;

use super::*;
use crate::clock::{ManualClock, SystemClock};
use crate::error::Error;
use crate::ids::Worker;
use crate::load::{ActiveLoad, LoadConfig, WorkerLoad};
use crate::policy::{Policy, Reason};
use crate::select::{Ask, Known, Prompt, Reservation};

mod affinity;
mod by_policy;
mod speed;

fn workers(ids: impl IntoIterator<Item = u64>) -> Vec<Worker> {
    ids.into_iter().map(|id| Worker::new(id, 0)).collect()
}

fn router(config: RouterConfig, ids: impl IntoIterator<Item = u64>) -> Arc<Router> {
    decided_by(Policy::Kv, config, ids)
}

fn decided_by(
    policy: Policy,
    config: RouterConfig,
    ids: impl IntoIterator<Item = u64>,
) -> Arc<Router> {
    let policies = Policies { active: Arc::new(policy), ..Policies::default() };
    let clock = Arc::new(ManualClock::default());
    let router = Router::with_policies(config, policies, clock).unwrap();
    router.set_workers(&workers(ids)).unwrap();
    Arc::new(router)
}

fn sized(block_size: u32) -> RouterConfig {
    of_load(LoadConfig { block_size, ..LoadConfig::default() })
}

fn of_load(load: LoadConfig) -> RouterConfig {
    RouterConfig { load, ..RouterConfig::default() }
}

/// Never given back: a test asks few.
fn request(isl_tokens: u64, sequence_hashes: &[u64]) -> Ask<'static> {
    let sequence_hashes = sequence_hashes.to_vec();
    let prompt = Prompt { isl_tokens, sequence_hashes, ..Prompt::default() };
    Ask::new(Box::leak(Box::new(prompt)))
}

fn holding(overlaps: &[(Worker, u32)]) -> Known<'_> {
    Known { overlaps, ..Known::default() }
}

fn is_idle(loads: &[WorkerLoad]) -> bool {
    let is_idle = |load: ActiveLoad| (load.requests, load.prefill_tokens, load.blocks) == (0, 0, 0);
    loads.iter().all(|load| is_idle(load.active))
}

#[test]
fn configuration_faults_name_the_field() {
    let base = RouterConfig::default;
    let faulty = [
        ("overlap_score_weight", RouterConfig { overlap_score_weight: -1.0, ..base() }),
        ("overlap_score_weight", RouterConfig { overlap_score_weight: f64::NAN, ..base() }),
        ("temperature", RouterConfig { temperature: f64::INFINITY, ..base() }),
        ("temperature", RouterConfig { temperature: -0.1, ..base() }),
        ("expiry_ms", of_load(LoadConfig { expiry_ms: 0, ..LoadConfig::default() })),
        ("max_requests", of_load(LoadConfig { max_requests: 0, ..LoadConfig::default() })),
        ("max_requests", of_load(LoadConfig { max_requests: usize::MAX, ..LoadConfig::default() })),
    ];
    for (field, config) in faulty {
        let fault =
            Router::with_policies(config, Policies::default(), Arc::new(SystemClock::default()))
                .err()
                .unwrap();
        let Error::Config(text) = &fault else { panic!("{fault:?}") };
        assert!(text.starts_with(field), "{text}");
    }
    assert!(
        Router::with_policies(base(), Policies::default(), Arc::new(SystemClock::default()))
            .is_ok()
    );
}

#[test]
fn calls_that_cannot_be_served_say_why_and_book_nothing() {
    let config = of_load(LoadConfig { block_size: 4, max_requests: 1, ..LoadConfig::default() });
    let router = router(config, []);
    let mut considered = Considered::default();
    let ask = request(8, &[1, 2]);
    let none = router.route(&ask, &mut considered).err().unwrap();
    assert_eq!(none, Error::NoWorker("no worker is registered for this model".into()));
    router.set_workers(&workers([1, 2])).unwrap();
    let nobody = |_: Worker| false;
    let barred = router.route(&Ask { allowed: Some(&nobody), ..ask }, &mut considered);
    let text = "none of the 2 registered workers is allowed for this request";
    assert_eq!(barred.err().unwrap(), Error::NoWorker(text.into()));
    let empty = router.route(&request(0, &[]), &mut considered).err().unwrap();
    assert!(matches!(empty, Error::InvalidArgument(_)), "{empty:?}");
    let overrides = RouteOverride { temperature: Some(-1.0), ..RouteOverride::default() };
    let wrong = router.preview(&Ask { overrides, ..ask }, &mut considered).err().unwrap();
    assert!(matches!(wrong, Error::InvalidArgument(_)), "{wrong:?}");
    assert!(is_idle(&router.loads()));
    let (_booking, _) = router.route(&ask, &mut considered).unwrap();
    let full = router.route(&ask, &mut Considered::default()).err().unwrap();
    assert!(matches!(full, Error::Overloaded(_)), "{full:?}");
    assert!(router.preview(&ask, &mut Considered::default()).is_ok(), "a preview needs no room");
}

#[test]
fn a_booking_holds_its_load_until_it_is_dropped() {
    let router = router(sized(4), [1]);
    let mut considered = Considered::default();
    let worker = Worker::new(1, 0);
    let overlaps = [(worker, 1), (Worker::new(77, 0), 9)];
    let ask = Ask { known: holding(&overlaps), ..request(10, &[1, 2]) };
    let (booking, decision) = router.route(&ask, &mut considered).unwrap();
    assert_eq!((booking.worker(), decision.overlap_blocks), (worker, 1));
    assert_eq!(decision.choice.reason, Reason::OnlyCandidate);
    let load = |requests, prefill_tokens, blocks| {
        let active = ActiveLoad {
            requests,
            prefill_tokens,
            queued_tokens: prefill_tokens,
            context_tokens: u64::from(requests) * 10,
            blocks,
            last_booked: 1,
        };
        vec![WorkerLoad { worker, active, prefill_tokens_per_s: None }]
    };
    assert_eq!(router.loads(), load(1, 6, 2));
    booking.first_token();
    booking.first_token();
    assert_eq!(router.loads(), load(1, 0, 2));
    booking.add_output_blocks(1, 1.5);
    assert_eq!(router.loads(), load(1, 0, 3));
    drop(booking);
    assert_eq!(router.loads(), load(0, 0, 0));
}

#[test]
fn a_booking_outlives_its_worker_and_its_expiry_in_peace() {
    let clock = Arc::new(ManualClock::default());
    let config = of_load(LoadConfig { block_size: 4, expiry_ms: 1_600, ..LoadConfig::default() });
    let router =
        Arc::new(Router::with_policies(config, Policies::default(), clock.clone()).unwrap());
    router.set_workers(&workers([1])).unwrap();
    let mut considered = Considered::default();
    let (orphan, _) = router.route(&request(8, &[1, 2]), &mut considered).unwrap();
    assert_eq!(router.set_workers(&workers([2])), Ok(workers([1])));
    assert!(!router.is_booked(orphan.request()));
    router.set_workers(&workers([1])).unwrap();
    let (leaked, _) = router.route(&request(8, &[1, 2]), &mut considered).unwrap();
    let (alive, _) = router.route(&request(8, &[1, 2]), &mut considered).unwrap();
    for _ in 0..17 {
        clock.advance(100);
        alive.touch();
    }
    assert_eq!(router.expire(), [leaked.request()]);
    for dead in [orphan, leaked] {
        dead.first_token();
        dead.touch();
        dead.add_output_blocks(1, 0.5);
    }
    assert_eq!(router.totals().requests, 1);
    drop(alive);
    assert!(is_idle(&router.loads()));
}

/// Every policy, warm and cold.
fn every_config() -> Vec<(Policy, RouterConfig)> {
    let mut configs = Vec::new();
    for policy in Policy::ALL {
        for temperature in [0.0, 0.8] {
            configs.push((policy, RouterConfig { temperature, seed: 42, ..sized(4) }));
        }
    }
    configs
}

#[test]
fn a_preview_leaves_no_trace() {
    for (policy, config) in every_config() {
        let [asked, fresh] = [(); 2].map(|()| decided_by(policy, config.clone(), 1..=5));
        let [mut a, mut b, mut c] = [1, 2, 3].map(|_| Considered::default());
        let mut held = Vec::new();
        for turn in 0..60_u64 {
            let hashes = [turn % 3, turn % 3 + 10, turn];
            let ask = request(5 + turn % 9, &hashes);
            let loads = asked.loads();
            let foreseen = asked.preview(&ask, &mut a).unwrap();
            assert_eq!(foreseen, asked.preview(&ask, &mut b).unwrap(), "{policy} {config:?}");
            assert_eq!(asked.loads(), loads);
            let (booking, decision) = asked.route(&ask, &mut b).unwrap();
            assert_eq!(foreseen, decision, "the preview is what happens next: {policy} {config:?}");
            let (other, undisturbed) = fresh.route(&ask, &mut c).unwrap();
            assert_eq!(decision, undisturbed, "{policy} {config:?}");
            held.push((booking, other));
            if turn % 4 == 3 {
                drop(held.remove(0));
            }
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_day_and_another_seed_another() {
    for (policy, config) in every_config() {
        let day = |seed: u64| -> Vec<u64> {
            let router = decided_by(policy, RouterConfig { seed, ..config.clone() }, 1..=6);
            let mut considered = Considered::default();
            let mut held = Vec::new();
            let mut chosen = Vec::new();
            for turn in 0..80_u64 {
                let (booking, decision) =
                    router.route(&request(8, &[turn]), &mut considered).unwrap();
                chosen.push(decision.worker.instance_id);
                held.push(booking);
                if turn % 3 == 2 {
                    drop(held.swap_remove(turn as usize % held.len()));
                }
            }
            chosen
        };
        assert_eq!(day(1), day(1), "{policy} {config:?}");
        if policy != Policy::RoundRobin {
            assert_ne!(day(1), day(2), "{policy} {config:?}");
        }
    }
}

#[test]
fn round_robin_is_fair_while_workers_come_and_go() {
    let router = decided_by(Policy::RoundRobin, RouterConfig::default(), [1, 2, 3]);
    let mut considered = Considered::default();
    let mut turns = |allowed: Option<&dyn Fn(Worker) -> bool>, count: usize| -> Vec<u64> {
        let ask = Ask { allowed, ..request(1, &[]) };
        (0..count)
            .map(|_| router.route(&ask, &mut considered).unwrap().1.worker.instance_id)
            .collect()
    };
    assert_eq!(turns(None, 5), [1, 2, 3, 1, 2]);
    router.set_workers(&workers([1, 2, 3, 9])).unwrap();
    assert_eq!(turns(None, 6), [9, 3, 1, 2, 9, 3]);
    router.set_workers(&workers([1, 3, 9])).unwrap();
    assert_eq!(turns(None, 4), [1, 9, 3, 1]);
    // Two kinds of requests with different workers do not spoil each other's turns.
    let (mine, other) = (|w: Worker| w.instance_id != 9, |w: Worker| w.instance_id == 9);
    let mut mixed = Vec::new();
    for _ in 0..4 {
        mixed.extend(turns(Some(&mine), 1));
        mixed.extend(turns(Some(&other), 1));
    }
    assert_eq!(mixed, [3, 9, 1, 9, 3, 9, 1, 9]);
}

/// How many of `count` requests each of `ids` workers gets, when all are active at once.
fn burst(
    config: RouterConfig,
    ids: u64,
    count: u64,
    overlaps: &[(Worker, u32)],
) -> BTreeMap<u64, u64> {
    let router = router(config, 1..=ids);
    let mut considered = Considered::default();
    let mut held = Vec::new();
    let mut chosen = BTreeMap::new();
    for turn in 0..count {
        // The first block is everybody's system prompt, the rest is each request's own.
        let hashes: Vec<u64> =
            (0..32).map(|at| if at == 0 { 7 } else { turn * 100 + at }).collect();
        let ask = Ask { known: holding(overlaps), ..request(32 * 16, &hashes) };
        let (booking, decision) = router.route(&ask, &mut considered).unwrap();
        *chosen.entry(decision.worker.instance_id).or_default() += 1;
        held.push(booking);
    }
    chosen
}

#[test]
fn a_shared_first_block_does_not_collapse_the_fleet_onto_one_worker() {
    let config = RouterConfig { seed: 9, ..sized(16) };
    let all: Vec<(Worker, u32)> = workers(1..=8).into_iter().map(|worker| (worker, 1)).collect();
    let nobody = burst(config.clone(), 8, 80, &[]);
    let everybody = burst(config.clone(), 8, 80, &all);
    let one = burst(config, 8, 80, &all[..1]);
    let even: BTreeMap<u64, u64> = (1..=8).map(|id| (id, 10)).collect();
    assert_eq!(nobody, even);
    assert_eq!(everybody, even);
    assert_eq!(one.len(), 8, "the worker with the block is preferred, not overrun: {one:?}");
    assert!(one.values().all(|&share| (9..=12).contains(&share)), "{one:?}");
}

#[test]
fn a_burst_of_one_request_spreads_even_where_its_prompt_is_cached() {
    let router = router(sized(16), 1..=4);
    let overlaps: Vec<_> = workers(1..=4).into_iter().map(|worker| (worker, 8)).collect();
    let hashes: Vec<u64> = (1..=8).collect();
    let ask = Ask { known: holding(&overlaps), ..request(8 * 16 + 3, &hashes) };
    let mut considered = Considered::default();
    let held: Vec<_> = (0..40).map(|_| router.route(&ask, &mut considered).unwrap().0).collect();
    let loads = router.loads();
    assert!(loads.iter().all(|load| load.active.requests == 10), "{loads:?}");
    assert!(
        loads.iter().all(|load| load.active.blocks == 8),
        "shared blocks count once: {loads:?}"
    );
    drop(held);
    assert!(is_idle(&router.loads()));
}

#[test]
fn overrides_hold_for_one_request() {
    let router = router(sized(16), [1, 2]);
    let overlaps = [(Worker::new(1, 0), 4)];
    let hashes = [1, 2, 3, 4];
    let ask = Ask { known: holding(&overlaps), ..request(64, &hashes) };
    let mut considered = Considered::default();
    let decision = router.preview(&ask, &mut considered).unwrap();
    assert_eq!((decision.worker.instance_id, decision.choice.ties), (1, 1));
    let overrides = RouteOverride { overlap_score_weight: Some(0.0), ..RouteOverride::default() };
    let blind = Ask { overrides, ..ask };
    let decision = router.preview(&blind, &mut considered).unwrap();
    assert_eq!((decision.choice.ties, decision.request.overlap_score_weight), (2, 0.0));
    let overrides = RouteOverride { temperature: Some(3.0), ..RouteOverride::default() };
    let decision = router.preview(&Ask { overrides, ..ask }, &mut considered).unwrap();
    assert_eq!(decision.choice.reason, Reason::Temperature);
    assert_eq!(router.preview(&ask, &mut considered).unwrap().choice.ties, 1);
}

#[test]
fn blocks_count_as_the_configuration_says() {
    let ask = request(34, &[1, 2]);
    let blocks_after_two = |config: RouterConfig| -> (u64, u64) {
        let router = router(config, [1]);
        let mut considered = Considered::default();
        let held = [(); 2].map(|()| router.route(&ask, &mut considered).unwrap().0);
        let next = router.preview(&ask, &mut considered).unwrap().terms().decode_blocks;
        let blocks = router.loads()[0].active.blocks;
        drop(held);
        assert!(is_idle(&router.loads()));
        (blocks, next)
    };
    assert_eq!(blocks_after_two(sized(16)), (2, 2));
    let counted_each = RouterConfig { assume_kv_reuse: false, ..sized(16) };
    assert_eq!(blocks_after_two(counted_each), (4, 6));
    let untracked = RouterConfig { track_active_blocks: false, ..sized(16) };
    assert_eq!(blocks_after_two(untracked), (0, 0));
    assert_eq!(blocks_after_two(sized(0)), (0, 0));
}

#[test]
fn the_block_size_may_be_learnt_later() {
    let router = router(sized(0), [1, 2]);
    let overlaps = [(Worker::new(2, 0), 2)];
    let ask = Ask { known: holding(&overlaps), ..request(40, &[1, 2]) };
    let mut considered = Considered::default();
    let early = {
        let (booking, decision) = router.route(&ask, &mut considered).unwrap();
        assert_eq!((decision.choice.ties, decision.terms().cost), (2, 40.0));
        booking
    };
    router.correct_block_size(16);
    assert_eq!(router.block_size(), 16);
    drop(early);
    let (booking, decision) = router.route(&ask, &mut considered).unwrap();
    assert_eq!((decision.worker.instance_id, decision.terms().cost), (2, 2.5));
    drop(booking);
    assert!(is_idle(&router.loads()));
}

#[test]
fn many_threads_leave_nothing_behind() {
    const THREADS: u64 = 8;
    const TURNS: u64 = 2_000;
    let config =
        of_load(LoadConfig { block_size: 4, expiry_ms: 3_600_000, ..LoadConfig::default() });
    let router = Arc::new(
        Router::with_policies(config, Policies::default(), Arc::new(SystemClock::default()))
            .unwrap(),
    );
    router.set_workers(&workers(0..40)).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let router = &router;
            scope.spawn(move || {
                let (mut considered, mut held) = (Considered::default(), Vec::new());
                for turn in 0..TURNS {
                    let hashes: Vec<u64> = (0..turn % 9).map(|at| at * (1 + turn % 3)).collect();
                    let ask = request(1 + turn % 50, &hashes);
                    let (booking, decision) = router.route(&ask, &mut considered).unwrap();
                    assert_eq!(decision.worker, booking.worker());
                    match turn % 4 {
                        0 => drop(booking),
                        1 => booking.first_token(),
                        _ => held.push(booking),
                    }
                    if held.len() > 20 {
                        held.swap_remove(turn as usize % 20).touch();
                    }
                    if thread == 0 && turn % 50 == 0 {
                        router.set_workers(&workers(turn % 7..40 - turn % 5)).unwrap();
                        let others = (turn % 7..40 - turn % 5).filter(|id| *id != 20);
                        router.set_workers(&workers(others)).unwrap();
                        assert!(router.expire().is_empty());
                    }
                }
            });
        }
    });
    let totals = router.totals();
    assert_eq!((totals.requests, router.state.lock().load.distinct_blocks()), (0, 0));
    assert!(is_idle(&router.loads()), "{:?}", router.loads());
    let last = router.loads().iter().map(|load| load.active.last_booked).max();
    assert!(last > Some(THREADS * TURNS - 1_000), "every turn was booked");
}

#[test]
fn decisions_can_be_explained() {
    let router = router(sized(16), [1, 2]);
    let mut considered = Considered::default();
    let overlaps = [(Worker::new(2, 0), 1)];
    let ask = Ask { known: holding(&overlaps), ..request(40, &[1, 2]) };
    let decision = router.preview(&ask, &mut considered).unwrap();
    let lines: Vec<String> = decision.formulas().map(|formula| formula.to_string()).collect();
    let tail =
        "cached blocks: 3.500 = 1.000 * prefill_blocks + decode_blocks = 1.000 * 1.500 + 2.000";
    assert_eq!(lines.len(), 2);
    assert_eq!(lines[1], format!("Formula for worker_id=2 dp_rank=0 with 1 {tail}"));
    assert_eq!(decision.choice.margin, Some(1.0));
}
