//! Invariants of the price for all numbers.
#![allow(clippy::unwrap_used)]

mod properties;

use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::SmallRng;

use super::*;
use crate::load::ActiveLoad;
use crate::policy::{Candidate, KvScale, Marks, Reason, RequestTerms, pool_of};

const BLOCK: u32 = 16;

fn request(isl_tokens: u64) -> RequestTerms {
    RequestTerms {
        isl_tokens,
        block_size: BLOCK,
        tracked_blocks: 0,
        overlap_score_weight: 1.0,
        temperature: 0.0,
        scale: KvScale::PLAIN,
        least_prefill_tokens: 0,
        stage: Stage::Both,
    }
}

fn candidate(id: u64, overlap_blocks: u32, load: ActiveLoad) -> Candidate {
    Candidate { overlap_blocks, ..Candidate::new(Worker::new(id, 0), load) }
}

fn load(requests: u32, queued_tokens: u64) -> ActiveLoad {
    let context_tokens = u64::from(requests) * 1_000;
    ActiveLoad { requests, queued_tokens, context_tokens, ..ActiveLoad::default() }
}

/// The choice among `list`, and everybody's terms.
fn decide(
    policy: &PricePolicy,
    context: &Context<'_>,
    list: &[Candidate],
) -> (Choice, Vec<CandidateCost>) {
    let mut terms = Vec::new();
    let mut rng = SmallRng::seed_from_u64(7);
    let choice = policy.choose(context, &Candidates::new(list), &mut terms, &mut rng).unwrap();
    (choice, terms)
}

/// The choice among `list`, and everybody's cost.
fn choose(policy: &PricePolicy, context: &Context<'_>, list: &[Candidate]) -> (Choice, Vec<f64>) {
    let (choice, terms) = decide(policy, context, list);
    (choice, terms.iter().map(|terms| terms.cost).collect())
}

fn chosen(policy: &PricePolicy, isl_tokens: u64, list: &[Candidate]) -> Worker {
    let context = Context::new(request(isl_tokens), "m", 0);
    list[choose(policy, &context, list).0.index].worker
}

fn candidates() -> impl Strategy<Value = Vec<Candidate>> {
    let one = (0..80_u32, 0..20_u32, 0..20_000_u64);
    prop::collection::vec(one, 1..9).prop_map(|all| {
        let list = (1..).zip(all);
        list.map(|(id, (blocks, requests, tokens))| candidate(id, blocks, load(requests, tokens)))
            .collect()
    })
}

proptest! {
    #[test]
    fn costs_are_finite_and_the_lowest_is_chosen(list in candidates(), isl_tokens in 1..200_000_u64) {
        let context = Context::new(request(isl_tokens), "m", 0);
        let (choice, costs) = choose(&PricePolicy::default(), &context, &list);
        prop_assert!(costs.iter().all(|cost| cost.is_finite() && *cost > 0.0), "{costs:?}");
        let lowest = costs.iter().copied().fold(f64::INFINITY, f64::min);
        prop_assert_eq!(costs[choice.index], lowest);
    }

    #[test]
    fn a_longer_match_never_costs_more_whatever_others_want(
        wants in prop::collection::vec(0..64_usize, 0..12), held in prop::collection::vec(0..70_u32, 1..6),
    ) {
        let hashes: Vec<u64> = (1..65).collect();
        let policy = PricePolicy::default();
        for depth in wants {
            let memo = Marks::of(&hashes[..depth]);
            policy.state.lock().traffic.entry_ref("m").or_default().wanted.add(&memo);
        }
        let list: Vec<Candidate> = (1..).zip(&held).map(|(id, blocks)| candidate(id, *blocks, load(1, 0))).collect();
        let context = Context { sequence_hashes: &hashes, ..Context::new(request(64 * 16 + 5), "m", 0) };
        let (_, costs) = choose(&policy, &context, &list);
        for (a, cost_a) in held.iter().zip(&costs) {
            for (b, cost_b) in held.iter().zip(&costs) {
                prop_assert!(a < b || cost_a <= &(cost_b + 1e-3), "{held:?} {costs:?}");
            }
        }
    }
}

#[test]
fn equals_are_served_evenly_and_the_least_loaded_first() {
    let policy = PricePolicy::default();
    let mut list: Vec<Candidate> = (1..5).map(|id| candidate(id, 0, load(2, 0))).collect();
    let context = Context::new(request(100), "m", 0);
    let (mut counts, mut terms) = ([0; 4], Vec::new());
    let mut rng = SmallRng::seed_from_u64(7);
    for _ in 0..4_000 {
        let found = Candidates::new(&list);
        let choice = policy.choose(&context, &found, &mut terms, &mut rng).unwrap();
        assert_eq!((choice.ties, choice.margin), (4, Some(0.0)));
        counts[choice.index] += 1;
    }
    assert!(counts.iter().all(|count| (900..1_100).contains(count)), "{counts:?}");
    list[2].load.requests = 1;
    assert_eq!(chosen(&policy, 100, &list), Worker::new(3, 0));
}

#[test]
fn a_full_cache_has_a_price_and_an_empty_one_has_none() {
    let policy = PricePolicy::default();
    let local_hashes: Vec<u64> =
        (1..100_u64).map(|at| at.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
    let list = [candidate(1, 0, load(0, 0)), candidate(2, 0, load(0, 0))];
    let context = Context {
        local_hashes: &local_hashes,
        sequence_hashes: &local_hashes,
        is_indexed: true,
        ..Context::new(request(99 * 16), "m", 1_000)
    };
    let (choice, costs) = choose(&policy, &context, &list);
    assert_eq!(costs[0], costs[1]);
    policy.routed(&context, &Candidates::new(&list), &Choice { index: 0, ..choice });
    policy.evicted(Worker::new(1, 0), &local_hashes[..4]);
    let context = Context::new(request(1_000), "m", 6_000);
    let (choice, costs) = choose(&policy, &context, &list);
    assert_eq!((choice.index, costs[0] > costs[1]), (1, true));
    policy.cleared(Worker::new(1, 0));
    let (_, costs) = choose(&policy, &context, &list);
    assert_eq!(costs[0], costs[1]);
}

#[test]
fn a_prefill_worker_has_no_steps_and_a_decode_worker_no_queue() {
    let policy = PricePolicy::default();
    let price = |stage| {
        let context = Context::new(RequestTerms { stage, ..request(1_000) }, "m", 0);
        let mut terms = Vec::new();
        let list = [candidate(1, 0, load(3, 500)), candidate(2, 0, load(0, 0))];
        let mut rng = SmallRng::seed_from_u64(7);
        policy.choose(&context, &Candidates::new(&list), &mut terms, &mut rng);
        terms[0].price
    };
    let (both, prefill, decode) = (price(Stage::Both), price(Stage::Prefill), price(Stage::Decode));
    assert!(both.queue == 250.0 && both.decode > 0.0 && both.prefill > prefill.prefill);
    assert!(prefill.decode == 0.0 && prefill.queue == 250.0);
    assert!(decode.queue == 0.0 && decode.prefill < 0.2 * prefill.prefill);
    assert_eq!(decode.decode, both.decode);
}

/// The values of the model's metric `name`.
fn samples(policy: &PricePolicy, name: &str) -> Vec<f64> {
    samples_at(policy, name, 0)
}

fn samples_at(policy: &PricePolicy, name: &str, now_ms: u64) -> Vec<f64> {
    let mut values = Vec::new();
    policy.samples(now_ms, &mut |one| values.extend((one.name == name).then_some(one.value)));
    values
}

#[test]
fn a_prompt_that_is_decoded_elsewhere_is_no_second_turn() {
    let policy = PricePolicy::default();
    let list = [candidate(1, 0, load(0, 0))];
    let route = |stage, hashes: &[u64], now_ms| {
        let request = RequestTerms { stage, ..request(1_000) };
        let context = Context { sequence_hashes: hashes, ..Context::new(request, "m", now_ms) };
        let (choice, _) = choose(&policy, &context, &list);
        policy.routed(&context, &Candidates::new(&list), &choice);
        let ticket = context.memo.into_ticket().unwrap();
        policy.finished(&properties::finished(1, &ticket, 5, 0, now_ms + 5));
        samples(&policy, "auto_session_gaps_total")[0]
    };
    assert_eq!(route(Stage::Prefill, &[1, 2], 0), 0.0);
    assert_eq!(route(Stage::Decode, &[1, 2], 50), 0.0);
    assert_eq!(route(Stage::Prefill, &[1, 2, 3], 9_000), 1.0);
}

#[test]
fn blocks_of_decode_workers_age_with_requests() {
    let policy = PricePolicy::default();
    let list = [candidate(1, 0, load(0, 0))];
    let local_hashes: Vec<u64> = (1..5).collect();
    for hash in &local_hashes {
        let request = RequestTerms { stage: Stage::Decode, ..request(1_000) };
        let context = Context {
            local_hashes: std::slice::from_ref(hash),
            is_indexed: true,
            ..Context::new(request, "m", 0)
        };
        let (choice, _) = choose(&policy, &context, &list);
        policy.routed(&context, &Candidates::new(&list), &choice);
    }
    policy.evicted(Worker::new(1, 0), &local_hashes[..1]);
    assert_eq!(samples(&policy, "auto_worker_retention_requests"), [3.0]);
}

#[test]
fn a_retry_after_the_first_token_is_no_turn_and_begins_a_pause() {
    let policy = PricePolicy::default();
    let list = [candidate(1, 0, load(0, 0))];
    let route = |is_retry, hashes: &[u64], now_ms| {
        let context = Context::new(request(1_000), "m", now_ms);
        let context = Context { sequence_hashes: hashes, is_retry, ..context };
        let (choice, _) = choose(&policy, &context, &list);
        policy.routed(&context, &Candidates::new(&list), &choice);
        let ticket = context.memo.into_ticket().unwrap();
        policy.finished(&properties::finished(1, &ticket, 5, 3, now_ms + 5));
        samples(&policy, "auto_session_gaps_total")[0]
    };
    assert_eq!(route(false, &[1, 2], 0), 0.0);
    assert_eq!(route(true, &[1, 2], 50), 0.0);
    (0..8).for_each(|other| _ = route(false, &[100 + other], 60 + other));
    assert_eq!(route(false, &[1, 2, 3], 9_050), 1.0);
    let gap = samples(&policy, "auto_session_gap_requests")[0];
    assert!((gap - 9.0).abs() < 1e-9, "{gap}");
}

#[test]
fn a_worker_whose_answers_are_not_streamed_is_not_slow_but_teaches_steps() {
    let policy = PricePolicy::default();
    let list = [candidate(1, 0, load(0, 0)), candidate(2, 0, load(0, 0))];
    let mut now_ms = 10_000;
    for turn in 0..400_u64 {
        let is_whole = turn % 2 == 0;
        let context =
            Context { is_whole, ..Context::new(request(100 + turn * 37 % 900), "m", now_ms) };
        let index = usize::from(is_whole);
        let choice =
            Choice { index, ties: 1, margin: None, reason: Reason::LowestCost, score: None };
        policy.routed(&context, &Candidates::new(&list), &choice);
        let ticket = context.memo.into_ticket().unwrap();
        let ms = 5 + ticket.own_tokens as u64 / 10 + if is_whole { 2_000 } else { 0 };
        now_ms += 10;
        let id = list[index].worker.instance_id;
        let finished = properties::finished(id, &ticket, ms, 100, now_ms);
        // 99 steps of 10 ms follow a first token; a whole answer has 100 of 20 ms.
        let now_ms = now_ms + if is_whole { 0 } else { 990 };
        policy.finished(&Finished { now_ms, ..finished });
    }
    assert_eq!(samples(&policy, "auto_worker_slowness_ratio"), [1.0, 1.0]);
    let step_s = samples(&policy, "auto_step_seconds")[0];
    assert!((step_s - 0.015).abs() < 0.000_2, "{step_s}");
    let per_token = samples(&policy, "auto_prefill_seconds_per_token")[0];
    assert!((per_token - 0.000_1).abs() < 0.000_01, "{per_token}");
}

#[test]
fn a_worker_is_compared_with_those_of_its_own_pool() {
    let policy = PricePolicy::default();
    let list: Vec<Candidate> = (1..6).map(|id| candidate(id, 0, load(0, 0))).collect();
    let mut now_ms = 10_000;
    for turn in 0..1_200_u64 {
        // One model has four workers, another one has one, which becomes slow.
        let index = (turn % 5) as usize;
        let pool = if index == 4 { "b" } else { "a" };
        let context = Context::new(request(100 + turn * 37 % 900), pool, now_ms);
        let choice =
            Choice { index, ties: 1, margin: None, reason: Reason::LowestCost, score: None };
        policy.routed(&context, &Candidates::new(&list), &choice);
        let ticket = context.memo.into_ticket().unwrap();
        let is_slow = index == 4 && turn > 900;
        let ms = (10 + ticket.own_tokens as u64 / 10) * if is_slow { 5 } else { 1 };
        now_ms += 10;
        let finished = properties::finished(index as u64 + 1, &ticket, ms, 100, now_ms);
        policy.finished(&Finished { pool, ..finished });
    }
    assert_eq!(samples_at(&policy, "auto_worker_slowness_ratio", now_ms), [1.0; 5]);
}

#[test]
fn a_cleared_cache_shows_no_price_before_the_next_request() {
    let policy = PricePolicy::default();
    let list = [candidate(1, 0, load(0, 0)), candidate(2, 0, load(0, 0))];
    let context = Context {
        local_hashes: &[1, 2],
        sequence_hashes: &[1, 2],
        is_indexed: true,
        ..Context::new(request(33), "m", 0)
    };
    let (choice, _) = choose(&policy, &context, &list);
    policy.routed(&context, &Candidates::new(&list), &Choice { index: 0, ..choice });
    policy.evicted(Worker::new(1, 0), &[2]);
    assert_eq!(samples(&policy, "auto_worker_eviction_price_ratio"), [0.25]);
    choose(&policy, &context, &list);
    policy.cleared(Worker::new(1, 0));
    assert_eq!(samples(&policy, "auto_worker_eviction_price_ratio"), [0.0]);
}

#[test]
fn a_closed_model_leaves_nothing() {
    let policy = PricePolicy::default();
    let list = [candidate(1, 0, load(0, 0))];
    for model in ["a", "b"] {
        let context = Context::new(request(1_000), model, 0);
        let (choice, _) = choose(&policy, &context, &list);
        policy.routed(&context, &Candidates::new(&list), &choice);
    }
    policy.closed("a");
    assert_eq!(samples(&policy, "auto_wanted_prefixes").len(), 1);
    // Another tenant's pool, and the prefill workers of a model, are others.
    for tenant in ["default", "prefill"] {
        let pool = pool_of("b:prefill", tenant);
        let context = Context { pool: &pool, ..Context::new(request(1_000), "b:prefill", 0) };
        let (choice, _) = choose(&policy, &context, &list);
        policy.routed(&context, &Candidates::new(&list), &choice);
    }
    let mut labels = Vec::new();
    policy.samples(0, &mut |one| {
        labels.extend((one.label.0 == "model").then(|| one.label.1.to_owned()))
    });
    labels.sort();
    labels.dedup();
    assert_eq!(labels, ["b", "b:prefill", "b:prefill:prefill"]);
    policy.closed(&pool_of("b:prefill", "default"));
    policy.closed(&pool_of("b:prefill", "prefill"));
    assert_eq!(samples(&policy, "auto_wanted_prefixes").len(), 1);
    let ticket = Ticket {
        marks: Marks::default(),
        work_tokens: 1.0,
        own_tokens: 1.0,
        number: 1,
        tail: None,
        is_whole: false,
        stage: Stage::Both,
    };
    policy.finished(&Finished {
        model: "a",
        pool: "a",
        worker: Worker::new(1, 0),
        user: None,
        prompt_bytes: 0,
        routed_at_ms: 0,
        now_ms: 9,
        input_tokens: 1,
        cached_tokens: 0,
        output_tokens: 1,
        first_token_ms: Some(1),
        ticket: Some(&ticket),
    });
    assert_eq!(samples(&policy, "auto_wanted_prefixes").len(), 1);
}

#[test]
fn a_long_queue_counts_more_where_evicting_is_cheap() {
    let queue = |most_pressure, pressure, queued_tokens| {
        let miss = MissCost::new(1_000.0, f64::from(BLOCK), &[]);
        let tariff = Tariff::new(0.0, Stage::Both, miss, most_pressure, 100.0);
        let load = ActiveLoad { queued_tokens, ..ActiveLoad::default() };
        tariff.price(0, 0, &load, Rates { slowness: 1.0, pressure }).1.queue
    };
    assert_eq!(
        [queue(0.0, 0.0, 1_500), queue(3.0, 3.0, 1_500), queue(0.0, 3.0, 1_500)],
        [750.0; 3]
    );
    assert_eq!([queue(3.0, 2.0, 1_500), queue(3.0, 0.0, 1_500)], [3_250.0, 8_250.0]);
    // Ten steps count no more than elsewhere; several prompts count almost the whole addition.
    assert_eq!([queue(3.0, 0.0, 0), queue(3.0, 0.0, 1_000)], [0.0, 500.0]);
    assert_eq!(queue(3.0, 2.0, 5_600), 18_256.0);

    let mut most = MostPressure::default();
    most.see(5.0, 4);
    assert_eq!(most.value(), 5.0);
    (0..30).for_each(|_| most.see(1.0, 4));
    assert_eq!(most.value(), 5.0);
    most.see(1.0, 4);
    assert_eq!(most.value(), 1.0);
}
