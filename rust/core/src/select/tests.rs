//! Guarantees of a selector beyond its router.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use rand::SeedableRng;
use rand::rngs::SmallRng;
use serde_json::Value;

use super::*;
use crate::catalog::{
    Catalog, CatalogOptions, EngineFacts, Identity, ModelKey, Registration, Source,
};
use crate::clock::{Clock, ManualClock};
use crate::error::Error;
use crate::hash::engine::NameKeys;
use crate::ids::{Tier, Worker};
use crate::index::{Block, Match};
use crate::load::LoadConfig;
use crate::policy::desk::{Desk, Interests};
use crate::policy::{Advice, Candidate, CandidateCost, Outside, Settings, registry};
use crate::select::{Policies, RouteOverride, RouterConfig};

mod busy;
mod cost;
mod draining;
mod growth;
mod histories;
mod late;
mod remote;
mod reuse;
mod room;
mod tiers;

const BLOCK_SIZE: u32 = 4;

struct Bench {
    catalog: Catalog,
    selector: Selector,
    clock: Arc<ManualClock>,
}

fn worker(id: u64) -> Worker {
    Worker::new(id, 0)
}

fn sized() -> RouterConfig {
    of_load(LoadConfig { block_size: BLOCK_SIZE, ..LoadConfig::default() })
}

fn of_load(load: LoadConfig) -> RouterConfig {
    RouterConfig { load, ..RouterConfig::default() }
}

fn bench(overlap: Overlap, options: CatalogOptions, workers: u64) -> Bench {
    configured(
        SelectorConfig { router: sized(), overlap, ..SelectorConfig::default() },
        options,
        workers,
    )
}

fn configured(config: SelectorConfig, options: CatalogOptions, workers: u64) -> Bench {
    with_policies(config, Policies::default(), options, workers)
}

fn with_policies(
    config: SelectorConfig,
    policies: Policies,
    options: CatalogOptions,
    workers: u64,
) -> Bench {
    let clock = Arc::new(ManualClock::default());
    let catalog = Catalog::new(options, Arc::<ManualClock>::clone(&clock));
    let key = ModelKey { model_name: "m".into(), tenant_id: "default".into() };
    let size = match config.router.load.block_size {
        0 => BLOCK_SIZE,
        size => size,
    };
    let model = catalog.model_or_create(&key, Some(size)).unwrap();
    let time = Arc::<ManualClock>::clone(&clock);
    let selector = Selector::with_policies(config, policies, model, time).unwrap();
    selector.set_workers(&(0..workers).map(worker).collect::<Vec<_>>()).unwrap();
    Bench { catalog, selector, clock }
}

fn plain(workers: u64) -> Bench {
    bench(Overlap::Events, CatalogOptions::default(), workers)
}

impl Bench {
    fn prompt(&self, tokens: &[u32]) -> Prompt {
        self.selector.prompt(tokens, &NameKeys::default())
    }

    fn store(&self, at: Worker, tier: Tier, tokens: &[u32]) {
        self.store_prompt(at, tier, &self.prompt(tokens));
    }

    fn store_prompt(&self, at: Worker, tier: Tier, prompt: &Prompt) {
        let blocks: Vec<Block> = (prompt.locals.iter().zip(&prompt.sequence_hashes))
            .map(|(local, sequence)| Block { engine_hash: *sequence, local_hash: *local })
            .collect();
        self.selector.model().index.store(at, tier, None, prompt.seed, &blocks);
    }

    /// Events of these workers are heard from now on.
    fn register(&self, workers: u64) {
        for id in 0..workers {
            self.catalog.register(self.registration(worker(id))).unwrap();
        }
    }

    fn registration(&self, at: Worker) -> Registration {
        Registration {
            worker: at,
            key: self.selector.model().key.clone(),
            block_size: self.selector.model().block_size(),
            endpoint: format!("tcp://127.0.0.1:{}", 5_000 + at.instance_id),
            replay_endpoint: None,
            capacity_blocks: None,
            identity: Identity::default(),
            facts: EngineFacts::default(),
            source: Source::Zmq,
        }
    }

    fn is_idle(&self) -> bool {
        let totals = self.selector.totals();
        (totals.requests, totals.prefill_tokens, totals.blocks) == (0, 0, 0)
    }

    /// Depths that the index tells, predictions included.
    fn known(&self, tokens: &[u32]) -> BTreeMap<u64, u32> {
        let loads = self.selector.potential_loads(&Ask::new(&self.prompt(tokens))).unwrap();
        let found = loads.iter().filter(|load| load.overlap_blocks > 0);
        found.map(|load| (load.worker.instance_id, load.overlap_blocks)).collect()
    }
}

fn cases(area: &str) -> Vec<Value> {
    let text = include_str!("../../../../tests/vectors/select_cases.json");
    let cases: Vec<Value> = serde_json::from_str(text).unwrap();
    cases.into_iter().filter(|case| case["area"] == area).collect()
}

// ---- one step

#[test]
fn a_selection_follows_the_cache_and_is_booked_until_dropped() {
    let bench = plain(4);
    let tokens: Vec<u32> = (0..14).collect();
    bench.store(worker(2), Tier::Device, &tokens[..8]);
    bench.store(worker(3), Tier::Device, &tokens[..4]);
    let prompt = bench.prompt(&tokens);
    assert_eq!((prompt.isl_tokens, prompt.locals.len()), (14, 3));
    let (held, selection) = bench.selector.select(&Ask::new(&prompt)).unwrap();
    assert_eq!((held.worker(), selection.overlap_blocks, selection.best_blocks), (worker(2), 2, 2));
    let totals = bench.selector.totals();
    assert_eq!((totals.requests, totals.prefill_tokens, totals.blocks), (1, 6, 3));
    held.first_token();
    assert_eq!(bench.selector.totals().prefill_tokens, 0);
    drop(held);
    assert!(bench.is_idle());
    let empty = bench.selector.select(&Ask::new(&bench.prompt(&[]))).err().unwrap();
    assert!(matches!(empty, Error::InvalidArgument(_)), "{empty:?}");
}

#[test]
fn a_preview_changes_nothing_and_answers_alike() {
    let bench = bench(Overlap::EventsAndPredictions, CatalogOptions::default(), 8);
    let prompt = bench.prompt(&[1; 16]);
    let first = bench.selector.preview(&Ask::new(&prompt)).unwrap();
    for _ in 0..20 {
        assert_eq!(bench.selector.preview(&Ask::new(&prompt)).unwrap(), first);
    }
    assert!(bench.is_idle());
    assert_eq!(bench.selector.model().index.stats().predicted, 0);
    assert_eq!(bench.selector.journal.stats(), JournalStats::default());
}

/// `count` equal workers, at a temperature.
fn warm(count: u64) -> Bench {
    let router = RouterConfig { temperature: 1.0, seed: 7, ..sized() };
    let config = SelectorConfig { router, ..SelectorConfig::default() };
    configured(config, CatalogOptions::default(), count)
}

#[test]
fn each_query_draws_anew_and_its_seed_repeats_it() {
    let bench = warm(4);
    let next = |bench: &Bench| bench.selector.preview(&Ask::new(&bench.prompt(&[1; 16]))).unwrap();
    let before = next(&bench);
    let mut reached = BTreeMap::<u64, u32>::new();
    for at in 0..200 {
        let prompt = bench.prompt(&[at; 16]);
        let drawn = bench.selector.query(&Ask::new(&prompt)).unwrap();
        *reached.entry(drawn.worker.instance_id).or_default() += 1;
        assert!(drawn.seed < 1 << 53, "readers of JSON keep it");
        let overrides = RouteOverride { seed: Some(drawn.seed), ..RouteOverride::default() };
        let again = Ask { overrides, ..Ask::new(&prompt) };
        assert_eq!(bench.selector.query(&again).unwrap(), drawn);
        assert_eq!(bench.selector.preview(&again).unwrap().0, drawn);
    }
    assert!(reached.len() == 4 && reached.values().all(|count| *count > 20), "{reached:?}");
    // Questions leave the next request alone, and it is what was shown.
    assert_eq!(next(&bench), before);
    let prompt = bench.prompt(&[1; 16]);
    let (held, booked) = bench.selector.select(&Ask::new(&prompt)).unwrap();
    assert_eq!((booked, held.worker()), (before.0, before.0.worker));
    drop(held);
    assert_ne!(next(&bench).0.seed, booked.seed, "the next one has a number of its own");
    let overrides = RouteOverride { seed: Some(booked.seed), ..RouteOverride::default() };
    let (_held, again) = bench.selector.select(&Ask { overrides, ..Ask::new(&prompt) }).unwrap();
    assert_eq!(again.worker, booked.worker);
}

#[test]
fn without_weight_the_index_is_not_asked_but_blocks_are_counted() {
    let router = RouterConfig { overlap_score_weight: 0.0, ..sized() };
    let config = SelectorConfig { router, ..SelectorConfig::default() };
    let bench = configured(config, CatalogOptions::default(), 2);
    let tokens: Vec<u32> = (0..16).collect();
    bench.store(worker(1), Tier::Device, &tokens);
    let prompt = bench.prompt(&tokens);
    let (held, selection) = bench.selector.select(&Ask::new(&prompt)).unwrap();
    assert_eq!((selection.overlap_blocks, selection.best_blocks), (0, 0));
    assert_eq!(bench.selector.totals().blocks, 4);
    assert_eq!(bench.selector.model().index.stats().predicted, 0, "nor told anything");
    drop(held);
    // A request may want it otherwise, both ways.
    let overrides = RouteOverride { overlap_score_weight: Some(1.0), ..RouteOverride::default() };
    let ask = Ask { overrides, ..Ask::new(&prompt) };
    let (_held, selection) = bench.selector.select(&ask).unwrap();
    assert_eq!((selection.worker, selection.overlap_blocks), (worker(1), 4));
}

#[test]
fn a_request_may_want_its_blocks_counted_in_full() {
    let bench = plain(1);
    let prompt = bench.prompt(&[7; 16]);
    let _first = bench.selector.select(&Ask::new(&prompt)).unwrap();
    let _second = bench.selector.select(&Ask::new(&prompt)).unwrap();
    let shared = bench.selector.totals().blocks;
    let overrides = RouteOverride { assume_kv_reuse: Some(false), ..RouteOverride::default() };
    let _third = bench.selector.select(&Ask { overrides, ..Ask::new(&prompt) }).unwrap();
    assert_eq!((shared, bench.selector.totals().blocks), (4, 8));
}

#[test]
fn pins_and_lists_are_obeyed_and_their_refusals_say_why() {
    let bench = plain(3);
    let ranks: Vec<Worker> =
        (0..3).map(worker).chain([Worker::new(9, 0), Worker::new(9, 1)]).collect();
    bench.selector.set_workers(&ranks).unwrap();
    let prompt = bench.prompt(&[1; 8]);
    let select = |pin: Option<Pin>, allowed: Option<&dyn Fn(Worker) -> bool>| {
        let ask = Ask { pin, allowed, ..Ask::new(&prompt) };
        bench.selector.select(&ask).map(|(_, selection)| selection.worker)
    };
    for _ in 0..8 {
        let pinned = Pin { instance_id: 2, dp_rank: None };
        assert_eq!(select(Some(pinned), None), Ok(worker(2)));
        let ranked = Pin { instance_id: 9, dp_rank: Some(1) };
        assert_eq!(select(Some(ranked), None), Ok(Worker::new(9, 1)));
        assert_eq!(select(None, Some(&|one: Worker| one.instance_id == 1)), Ok(worker(1)));
    }
    for (pin, name) in [
        (Pin { instance_id: 5, dp_rank: None }, "5"),
        (Pin { instance_id: 9, dp_rank: Some(2) }, "9 rank 2"),
    ] {
        let wanted = format!("the pinned worker {name} is not registered");
        assert_eq!(select(Some(pin), None), Err(Error::NoWorker(wanted)));
    }
    let nobody = select(None, Some(&|_| false)).err().unwrap();
    assert!(matches!(nobody, Error::NoWorker(_)), "{nobody:?}");
    assert!(bench.is_idle());
}

#[test]
fn potential_loads_are_those_of_every_worker() {
    let bench = plain(3);
    assert_eq!(plain(0).selector.potential_loads(&Ask::new(&bench.prompt(&[1]))), Ok(vec![]));
    let tokens: Vec<u32> = (0..18).collect();
    bench.store(worker(1), Tier::Device, &tokens[..8]);
    let prompt = bench.prompt(&tokens);
    let pin = Some(Pin { instance_id: 0, dp_rank: None });
    let _held = bench.selector.select(&Ask { pin, ..Ask::new(&prompt) }).unwrap();
    let loads = bench.selector.potential_loads(&Ask::new(&prompt)).unwrap();
    let told: Vec<_> = loads
        .iter()
        .map(|load| {
            let id = load.worker.instance_id;
            (id, load.prefill_tokens, load.decode_blocks, load.active_requests)
        })
        .collect();
    assert_eq!(told, [(0, 36, 4, 1), (1, 10, 4, 0), (2, 18, 4, 0)]);
}

// ---- by name

#[test]
fn names_are_booked_once_marked_and_freed() {
    let bench = plain(2);
    let selector = &bench.selector;
    let prompt = bench.prompt(&[1; 8]);
    let ask = Ask::new(&prompt);
    let selection = selector.reserve("req-1", &ask).unwrap();
    assert_eq!(selector.loads()[selection.worker.instance_id as usize].active.prefill_tokens, 8);
    let again = selector.reserve("req-1", &ask).err().unwrap();
    assert_eq!(again, Error::Conflict("request_id \"req-1\" is already active".into()));
    assert_eq!(selector.totals().requests, 1);
    assert_eq!(
        (selector.mark_prefill_completed("req-1"), selector.totals().prefill_tokens),
        (Ok(()), 0)
    );
    assert_eq!(selector.mark_prefill_completed("req-1"), Ok(()));
    let unknown = selector.mark_prefill_completed("req-2").err().unwrap();
    assert_eq!(unknown, Error::NotFound("no request \"req-2\" is active".into()));
    assert!(selector.free("req-1"));
    assert!(!selector.free("req-1"), "which is no error");
    assert!(bench.is_idle());
    assert!(selector.mark_prefill_completed("req-1").is_err());
    selector.reserve("req-1", &ask).unwrap();
    assert!(selector.free("req-1"));
    for name in ["", &"x".repeat(MAX_REQUEST_ID_BYTES + 1)] {
        let error = selector.reserve(name, &ask).err().unwrap().to_string();
        assert!(error.starts_with("request_id must have 1..=256 bytes, got"), "{error}");
    }
}

#[test]
fn names_end_by_idleness_and_with_their_worker() {
    let bench = plain(2);
    let selector = &bench.selector;
    let prompt = bench.prompt(&[1; 8]);
    let pinned =
        |id| Ask { pin: Some(Pin { instance_id: id, dp_rank: None }), ..Ask::new(&prompt) };
    selector.reserve("idle", &pinned(0)).unwrap();
    selector.reserve("alive", &pinned(0)).unwrap();
    bench.clock.advance(200_000);
    assert!(selector.touch("alive") && !selector.touch("nobody"));
    bench.clock.advance(200_000);
    assert_eq!((selector.tick(), selector.reserved(), selector.totals().requests), (1, 1, 1));
    assert!(!selector.free("idle"));
    assert_eq!(selector.journal.find("idle")[0].outcome, Outcome::Expired);
    selector.reserve("gone", &pinned(1)).unwrap();
    selector.set_workers(&[worker(0)]).unwrap();
    assert_eq!((selector.reserved(), selector.totals().requests), (1, 1));
    assert!(!selector.free("gone") && selector.mark_prefill_completed("gone").is_err());
    // The name is free again at once.
    selector.reserve("gone", &pinned(0)).unwrap();
}

#[test]
fn one_caller_leaves_room_for_the_others() {
    let router = of_load(LoadConfig { max_requests: 8, ..sized().load });
    let config = SelectorConfig { router, ..SelectorConfig::default() };
    let bench = configured(config, CatalogOptions::default(), 2);
    let selector = &bench.selector;
    let prompt = bench.prompt(&[1; 8]);
    let [greedy, other] = [1, 2].map(|last| Some(IpAddr::from([10, 0, 0, last])));
    let reserve = |caller, name: &str| selector.reserve_for(caller, name, &Ask::new(&prompt));
    for at in 0..6 {
        reserve(greedy, &format!("greedy-{at}")).unwrap();
    }
    let error = reserve(greedy, "greedy-6").err().unwrap();
    assert!(matches!(&error, Error::Overloaded(why) if why.contains("10.0.0.1 has 6")), "{error}");
    reserve(other, "other").unwrap();
    assert!(selector.free("greedy-0"));
    reserve(greedy, "greedy-6").unwrap();
    assert!(reserve(greedy, "greedy-7").is_err());
    // Those that expire are theirs no more.
    bench.clock.advance(400_000);
    selector.tick();
    for at in 0..6 {
        reserve(greedy, &format!("later-{at}")).unwrap();
    }
    assert!(reserve(greedy, "later-6").is_err());
}

#[test]
fn a_hundred_bookings_at_once_spread() {
    let bench = plain(4);
    let selector = &bench.selector;
    std::thread::scope(|scope| {
        for thread in 0..4_u32 {
            let bench = &bench;
            scope.spawn(move || {
                for at in 0..25 {
                    let prompt = bench.prompt(&[thread * 100 + at; 16]);
                    bench.selector.reserve(&format!("{thread}-{at}"), &Ask::new(&prompt)).unwrap();
                }
            });
        }
    });
    let requests: Vec<u32> = selector.loads().iter().map(|load| load.active.requests).collect();
    assert_eq!(requests, [25; 4]);
    for thread in 0..4 {
        assert!((0..25).all(|at| selector.free(&format!("{thread}-{at}"))));
    }
    assert!(bench.is_idle());
}

// ---- predictions

fn foreseeing(ttl_ms: u64, workers: u64) -> Bench {
    let options = CatalogOptions { predicted_ttl_ms: ttl_ms, ..CatalogOptions::default() };
    let bench = bench(Overlap::EventsAndPredictions, options, workers);
    bench.register(workers);
    bench
}

#[test]
fn a_prompt_sent_twice_in_a_row_goes_to_one_worker_before_any_event() {
    for tokens in [16, 18] {
        let bench = foreseeing(5_000, 8);
        for round in 0..16 {
            let prompt = bench.prompt(&vec![1_000 + round; tokens]);
            let (first, one) = bench.selector.select(&Ask::new(&prompt)).unwrap();
            let (second, two) = bench.selector.select(&Ask::new(&prompt)).unwrap();
            assert_eq!(first.worker(), second.worker(), "the first is still being prefilled");
            assert_eq!((one.predicted_blocks, two.predicted_blocks), (0, 4));
            assert_eq!((two.overlap_blocks, two.best_blocks), (0, 0), "nothing is held yet");
            drop(first);
            drop(second);
            let (_third, three) = bench.selector.select(&Ask::new(&prompt)).unwrap();
            assert_eq!(three.worker, one.worker);
        }
    }
}

#[test]
fn a_worker_whose_events_nobody_hears_earns_no_credit() {
    let options = CatalogOptions { predicted_ttl_ms: 5_000, ..CatalogOptions::default() };
    let bench = bench(Overlap::EventsAndPredictions, options, 2);
    let prompt = bench.prompt(&[1; 8]);
    drop(bench.selector.select(&Ask::new(&prompt)).unwrap());
    assert_eq!(bench.selector.model().index.stats().predicted, 0);
    // A remote indexer hears them for this router.
    let told = Ask { overlaps: Some(&[]), ..Ask::new(&prompt) };
    let (_first, one) = bench.selector.select(&told).unwrap();
    let (_second, two) = bench.selector.select(&told).unwrap();
    assert_eq!((two.worker, two.predicted_blocks), (one.worker, 2));
}

#[test]
fn a_crowd_of_one_prompt_spreads() {
    let bench = foreseeing(5_000, 4);
    let prompt = bench.prompt(&[3; 16]);
    let held: Vec<_> =
        (0..40).map(|_| bench.selector.select(&Ask::new(&prompt)).unwrap()).collect();
    let most = bench.selector.loads().iter().map(|load| load.active.requests).max().unwrap();
    assert!(most <= 25, "{most} of {} on one worker", held.len());
}

#[test]
fn predictions_end_and_facts_stay() {
    let bench = foreseeing(1_000, 3);
    let prompt = bench.prompt(&[5; 12]);
    let (_, selection) = bench.selector.select(&Ask::new(&prompt)).unwrap();
    let id = selection.worker.instance_id;
    assert_eq!(bench.known(&[5; 12]), BTreeMap::from([(id, 3)]));
    bench.clock.advance(1_000);
    bench.selector.tick();
    assert_eq!(bench.known(&[5; 12]), BTreeMap::new());
    bench.store(worker(1), Tier::Device, &[5; 12]);
    let (_, held) = bench.selector.select(&Ask::new(&prompt)).unwrap();
    assert_eq!((held.overlap_blocks, held.predicted_blocks), (3, 0));
    assert_eq!(bench.selector.model().index.stats().predicted, 0, "what is held is no guess");
}

#[test]
fn a_prediction_earns_no_credit_beyond_its_time_without_a_tick() {
    for overlap in [Overlap::EventsAndPredictions, Overlap::Predictions] {
        let options = CatalogOptions { predicted_ttl_ms: 1_000, ..CatalogOptions::default() };
        let bench = bench(overlap, options, 3);
        let prompt = bench.prompt(&[5; 12]);
        // A remote indexer hears the workers' events.
        let ask = || Ask {
            overlaps: (overlap != Overlap::Predictions).then_some(&[]),
            ..Ask::new(&prompt)
        };
        let credit = || {
            let (selection, _) = bench.selector.preview(&ask()).unwrap();
            selection.overlap_blocks + selection.predicted_blocks
        };
        bench.clock.advance(70);
        drop(bench.selector.select(&ask()).unwrap());
        bench.clock.advance(999);
        assert_eq!(credit(), 3, "{overlap:?}");
        bench.clock.advance(1);
        assert_eq!(credit(), 0, "{overlap:?}");
        assert_eq!(bench.selector.model().index.stats().predicted, 0, "{overlap:?}");
        // So does the way to a booking.
        let (_held, selection) = bench.selector.select(&ask()).unwrap();
        assert_eq!((selection.overlap_blocks, selection.predicted_blocks), (0, 0), "{overlap:?}");
    }
}

#[test]
fn without_events_routing_is_the_knowledge() {
    let options = CatalogOptions { predicted_ttl_ms: 120_000, ..CatalogOptions::default() };
    let approximate = || bench(Overlap::Predictions, options.clone(), 2);
    let route = |bench: &Bench, id: u64, tokens: &[u32]| {
        let prompt = bench.prompt(tokens);
        let pin = Some(Pin { instance_id: id, dp_rank: None });
        bench.selector.select(&Ask { pin, ..Ask::new(&prompt) }).unwrap().1
    };
    let all = cases("approx");
    assert_eq!(all.len(), 2);
    let tokens = |value: &Value| -> Vec<u32> {
        value.as_array().unwrap().iter().map(|token| token.as_u64().unwrap() as u32).collect()
    };
    let wanted = |value: &Value| -> BTreeMap<u64, u32> {
        let entries = value.as_object().unwrap().iter();
        entries.map(|(id, n)| (id.parse().unwrap(), n.as_u64().unwrap() as u32)).collect()
    };
    for case in &all {
        let (bench, input, expected) = (approximate(), &case["input"], &case["expected"]);
        let routed = match &input["routed"] {
            Value::Array(all) => all.clone(),
            one => vec![one.clone()],
        };
        for one in &routed {
            route(&bench, one["worker"].as_u64().unwrap(), &tokens(&one["tokens"]));
        }
        let query = tokens(&input["query"]);
        let first =
            if expected["before"].is_null() { &expected["overlap"] } else { &expected["before"] };
        assert_eq!(bench.known(&query), wanted(first), "{}", case["id"]);
        if let Some(gone) = input["then_remove_worker"].as_u64() {
            bench.selector.set_workers(&[worker(1 - gone)]).unwrap();
            assert_eq!(bench.known(&query), wanted(&expected["after"]), "{}", case["id"]);
            // It comes back, and holds nothing of what it held.
            bench.selector.set_workers(&[worker(0), worker(1)]).unwrap();
            assert_eq!(bench.known(&query), wanted(&expected["after"]), "{}", case["id"]);
        }
    }
    let bench = approximate();
    assert_eq!(route(&bench, 0, &[1; 8]).overlap_blocks, 0);
    let second = route(&bench, 0, &[1; 8]);
    assert_eq!((second.overlap_blocks, second.predicted_blocks, second.best_blocks), (2, 0, 2));
    // Routing again counts from then on, asking does not.
    bench.clock.advance(100_000);
    route(&bench, 0, &[1; 8]);
    bench.clock.advance(100_000);
    bench.selector.tick();
    assert_eq!(bench.known(&[1; 8]), BTreeMap::from([(0, 2)]));
    bench.clock.advance(20_000);
    bench.selector.tick();
    assert_eq!(bench.known(&[1; 8]), BTreeMap::new());
}

#[test]
fn too_many_predictions_are_pruned_oldest_first() {
    let all = cases("approx-prune");
    assert_eq!(all.len(), 3);
    let number = |value: &Value| value.as_u64().unwrap() as usize;
    for case in &all {
        let input = &case["input"];
        let most = number(&input["max_tree_size"]);
        let target = (most as f64 * input["target_ratio"].as_f64().unwrap()).floor() as usize;
        let order: Vec<u32> = match input["insert_order"].as_array() {
            Some(order) => order.iter().map(|one| number(one) as u32).collect(),
            None => (1..=number(&input["route_single_block_sequences"]) as u32).collect(),
        };
        // The recorded cases prune when all is in: as many fit before as were inserted by then.
        let mut distinct = order.clone();
        distinct.sort_unstable();
        distinct.dedup();
        let size = input["prune_with_size"].as_u64().map_or(most, |size| size as usize);
        let limit = if size > most { distinct.len() } else { most };
        let options =
            CatalogOptions { max_predicted: (limit, target), ..CatalogOptions::default() };
        let bench = bench(Overlap::Predictions, options, 2);
        let route = |token: u32| {
            let prompt = bench.prompt(&[token; 4]);
            let pin = Some(Pin { instance_id: u64::from(token % 2), dp_rank: None });
            drop(bench.selector.select(&Ask { pin, ..Ask::new(&prompt) }).unwrap());
        };
        for token in &order {
            route(*token);
        }
        let predicted = || bench.selector.model().index.stats().predicted;
        let is_kept = |token: &u32| !bench.known(&[*token; 4]).is_empty();
        if limit > most {
            // One more than fits sets it off; it is the newest and stays in the place of one.
            assert_eq!(predicted(), distinct.len());
            route(99);
            let kept: Vec<u32> = distinct.iter().copied().filter(is_kept).collect();
            let wanted: Vec<u32> = case["expected"]["kept"]
                .as_array()
                .unwrap()
                .iter()
                .map(|one| number(one) as u32)
                .collect();
            assert_eq!((predicted(), kept.len()), (target, target - 1), "{}", case["id"]);
            assert!(kept.iter().all(|token| wanted.contains(token)), "{}: {kept:?}", case["id"]);
        } else {
            assert_eq!(order.iter().copied().filter(is_kept).collect::<Vec<_>>(), [5, 6]);
        }
    }
}

// ---- journal

#[test]
fn a_decision_is_kept_with_all_that_went_into_it_and_what_came_of_it() {
    let bench = plain(3);
    let tokens: Vec<u32> = (0..16).collect();
    bench.store(worker(1), Tier::Device, &tokens[..8]);
    bench.store(worker(1), Tier::Host, &tokens[..12]);
    let prompt = bench.prompt(&tokens);
    let ask = Ask { request_id: Some("r"), ..Ask::new(&prompt) };
    bench.clock.advance(10);
    let (held, _) = bench.selector.select(&ask).unwrap();
    let record = &bench.selector.journal.find("r")[0];
    assert_eq!(
        (record.worker, record.outcome, record.decided_at_ms),
        (worker(1), Outcome::Running, 10)
    );
    assert_eq!((record.request_blocks, record.overlap_blocks), (4, 2));
    let candidates = record.candidates();
    let tiers: Vec<_> = candidates
        .iter()
        .map(|one| (one.device_blocks, one.host_blocks, one.disk_blocks, one.is_busy))
        .collect();
    assert_eq!(tiers, [(0, 0, 0, false), (2, 3, 3, false), (0, 0, 0, false)]);
    let costs: Vec<f64> = candidates.iter().map(|one| one.terms.cost).collect();
    // A block in host memory saves three quarters of one to prefill.
    assert_eq!((costs, record.choice.margin), (vec![8.0, 5.25, 8.0], Some(2.75)));
    bench.clock.advance(30);
    held.first_token();
    held.cached(8);
    bench.clock.advance(5);
    held.ended(Outcome::Complete);
    drop(held);
    let record = &bench.selector.journal.find("r")[0];
    assert_eq!((record.first_token_ms, record.ended_ms), (Some(30), Some(35)));
    assert_eq!((record.cached_tokens, record.outcome), (Some(8), Outcome::Complete));
    // Tried twice: both are there, in order.
    drop(bench.selector.select(&ask).unwrap());
    let outcomes: Vec<_> =
        bench.selector.journal.find("r").iter().map(|record| record.outcome).collect();
    assert_eq!(outcomes, [Outcome::Complete, Outcome::Failed]);
    assert!(bench.selector.journal.find("nobody").is_empty());
}

#[test]
fn of_a_large_fleet_a_past_decision_keeps_the_chosen_and_the_cheapest_candidates() {
    let bench = plain(200);
    let tokens: Vec<u32> = (0..16).collect();
    // The workers from 120 on are the cheapest.
    (120..200).for_each(|id| bench.store(worker(id), Tier::Device, &tokens[..12]));
    bench.store(worker(150), Tier::Device, &tokens);
    let prompt = bench.prompt(&tokens);
    let ask = Ask { request_id: Some("r"), ..Ask::new(&prompt) };
    let (_, all) = bench.selector.preview(&ask).unwrap();
    assert_eq!(all.candidates().len(), 200);
    assert_eq!(all.decision()["candidates_left_out"], 0);
    let (held, _) = bench.selector.select(&ask).unwrap();
    let record = &bench.selector.journal.find("r")[0];
    let kept = record.candidates();
    assert_eq!((kept.len(), record.decision()["candidates_left_out"].clone()), (64, 136.into()));
    assert!(kept.iter().all(|one| one.terms.worker >= worker(120) && one.device_blocks >= 3));
    let chosen = &kept[record.choice.index];
    assert_eq!((chosen.terms.worker, chosen.device_blocks), (worker(150), 4));
    drop(held);
    // The costliest is kept where it was chosen.
    let (costs, held) = ([3.0, 1.0, 2.0, 4.0, 5.0], [0, 0, 0, 0, 7]);
    let kept =
        |wanted, most| record::kept(5, |at| costs[at], |at| held[at], |at| at == wanted, most);
    assert_eq!((kept(3, 2), kept(3, 3), kept(2, 3)), (vec![3, 4], vec![1, 3, 4], vec![1, 2, 4]));
    assert_eq!(kept(0, 5), [0, 1, 2, 3, 4]);
}

#[test]
fn a_decision_names_the_policy_that_made_it() {
    let desk = Arc::new(Desk::new("python:mine", 5, Interests::default()));
    let policies = Policies { active: Arc::new(Outside::new(desk)), ..Policies::default() };
    let router = sized();
    let config = SelectorConfig { router, overlap: Overlap::Events, ..SelectorConfig::default() };
    let bench = with_policies(config, policies, CatalogOptions::default(), 2);
    let prompt = bench.prompt(&[1; 8]);
    let made = |advice| {
        let ask = Ask { request_id: Some("r"), advice, ..Ask::new(&prompt) };
        drop(bench.selector.select(&ask).unwrap());
        bench.selector.journal.find("r").pop().unwrap().decision()
    };
    let question = bench.selector.question(&Ask::new(&prompt)).unwrap();
    let advice = Advice::new(&question, &[Some(0.0), Some(1.0)]);
    let followed = made(Some(&advice));
    assert_eq!(
        (&followed["policy"], &followed["reason"]),
        (&"python:mine".into(), &"highest_score".into())
    );
    assert_eq!(
        (&followed["instead_of"], &followed["candidates"][0]["formula"]),
        (&Value::Null, &Value::Null)
    );
    // It was late, raised an error or answered nonsense.
    let replaced = made(None);
    assert_eq!(
        (&replaced["policy"], &replaced["instead_of"]),
        (&"kv".into(), &"python:mine".into())
    );
    assert!(replaced["candidates"][0]["formula"].is_string(), "{replaced}");
}

#[test]
fn blocks_that_are_only_predicted_are_not_told_as_cached() {
    let mut rng = SmallRng::seed_from_u64(1);
    let active = registry::build("auto", &Settings::default(), &mut rng).unwrap();
    let policies = Policies { active, ..Policies::default() };
    let router = sized();
    let config = SelectorConfig { router, ..SelectorConfig::default() };
    let options = CatalogOptions { predicted_ttl_ms: 5_000, ..CatalogOptions::default() };
    let bench = with_policies(config, policies, options, 2);
    bench.register(2);
    let prompt = bench.prompt(&(0..400).collect::<Vec<_>>());
    drop(bench.selector.select(&Ask::new(&prompt)).unwrap());
    let (selection, record) = bench.selector.preview(&Ask::new(&prompt)).unwrap();
    assert_eq!((selection.overlap_blocks, selection.expected_blocks()), (0, 100));
    let because = record.decision()["because"].as_str().unwrap().to_owned();
    assert!(because.contains("100 more blocks predicted"), "{because}");
    assert!(!because.contains("cached"), "{because}");
}

#[test]
fn the_journal_keeps_the_latest_within_its_bytes() {
    let bench = plain(2);
    let prompt = bench.prompt(&[1; 8]);
    let ask = |id| Ask { request_id: Some(id), ..Ask::new(&prompt) };
    drop(bench.selector.select(&ask("probe")).unwrap());
    let record = bench.selector.journal.find("probe").pop().unwrap();
    let one = bench.selector.journal.stats().bytes;
    let journal = Journal::new(3 * one);
    let named = |id: &str| Record { request_id: id.into(), ..record.clone() };
    let first = journal.push(named("a-000"));
    for id in ["b-000", "a-000", "c-000"] {
        journal.push(named(id));
    }
    assert_eq!(journal.stats(), JournalStats { records: 3, bytes: 3 * one, dropped_total: 1 });
    assert_eq!(journal.find("a-000").len(), 1, "the second one only");
    journal.update(first, |_| panic!("it is gone"));
    journal.push(named("d-000"));
    journal.push(named("e-000"));
    assert!(journal.find("a-000").is_empty() && journal.find("b-000").is_empty());
    assert_eq!(journal.find("e-000").len(), 1);
    let small = Journal::new(one - 1);
    let none = small.push(named("f-000"));
    small.update(none, |_| panic!("it was never there"));
    assert_eq!(small.stats(), JournalStats { dropped_total: 1, ..JournalStats::default() });
    assert!(!Journal::new(0).is_on());
}

#[test]
fn a_candidate_takes_as_much_of_the_journal_as_the_manual_says() {
    let manual = include_str!("../../../../docs/routing.md");
    let [seen, found] = [size_of::<Candidate>() + size_of::<CandidateCost>(), size_of::<Match>()];
    let text = format!("A candidate takes {seen} bytes, and {found} more if it holds blocks");
    assert!(manual.contains(&text), "{text}");
}

#[test]
fn settings_are_checked_by_name() {
    let faulty = |config: SelectorConfig| config.validate().err().unwrap().to_string();
    let router = RouterConfig { temperature: -1.0, ..RouterConfig::default() };
    let config = SelectorConfig { router, ..SelectorConfig::default() };
    assert!(faulty(config).starts_with("temperature"));
    let thresholds = Thresholds { active_decode_blocks: Some(1.5), ..Thresholds::default() };
    let config = SelectorConfig { thresholds, ..SelectorConfig::default() };
    let text = faulty(config);
    assert_eq!(text, "active_decode_blocks_threshold must be between 0.0 and 1.0, got 1.5");
    let clock = ManualClock::default();
    assert_eq!(clock.now_ms(), 0);
}
