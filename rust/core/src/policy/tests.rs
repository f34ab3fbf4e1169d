//! Recorded cases of cost and temperature, and what each policy promises.
#![allow(clippy::unwrap_used)]

mod outside;
mod pods;
mod promised_others;
mod promised_prefix;
mod promised_shadows;
mod promised_vtc;
mod recorded_others;
mod recorded_prefix;
mod recorded_vtc;

use std::collections::BTreeMap;

use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use serde_json::Value;

use super::*;
use crate::ids::Worker;
use crate::load::{ActiveLoad, ActiveSequences, Assignment, BlockUse, LoadConfig, RequestId};

const REQUEST: RequestTerms = RequestTerms {
    isl_tokens: 1,
    block_size: 1,
    tracked_blocks: 0,
    overlap_score_weight: 1.0,
    temperature: 0.0,
    scale: KvScale::PLAIN,
    least_prefill_tokens: 0,
    stage: Stage::Both,
};

fn candidate(id: u64, load: ActiveLoad) -> Candidate {
    Candidate::new(Worker::new(id, 0), load)
}

/// A decision as routers make it.
fn select<'a>(
    policy: Policy,
    request: &RequestTerms,
    candidates: &'a [Candidate],
    costs: &'a mut Vec<CandidateCost>,
    rng: &mut SmallRng,
) -> Option<Decision<'a>> {
    let choice = super::select(policy, request, candidates, costs, rng)?;
    let chosen = &candidates[choice.index];
    Some(Decision {
        worker: chosen.worker,
        overlap_blocks: chosen.overlap_blocks,
        policy: Some(policy),
        request: request.among(candidates),
        candidates,
        costs,
        passed_over: &[],
        choice,
        seed: 0,
    })
}

/// Candidates of `REQUEST` in half blocks, so that their costs are `costs` (at least 0.5).
fn costing(costs: &[f64]) -> (RequestTerms, Vec<Candidate>) {
    let load =
        |cost: f64| ActiveLoad { prefill_tokens: (2.0 * cost) as u64 - 1, ..ActiveLoad::default() };
    let candidates = (1..).zip(costs).map(|(id, &cost)| candidate(id, load(cost))).collect();
    (RequestTerms { block_size: 2, ..REQUEST }, candidates)
}

fn cases(area: &str) -> Vec<Value> {
    let text = include_str!("../../../../tests/vectors/load_cases.json");
    let cases: Vec<Value> = serde_json::from_str(text).unwrap();
    cases.into_iter().filter(|case| case["area"] == area).collect()
}

#[test]
fn recorded_costs_hold() {
    let cases = cases("cost");
    let ids: Vec<_> = cases.iter().map(|case| case["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["001", "002", "004", "005", "007"].map(|id| format!("dynamo/cost/{id}")));
    for case in &cases {
        let (input, expected) = (&case["input"], &case["expected"]);
        let weight = input["overlap_score_weight"].as_f64().unwrap();
        match case["id"].as_str().unwrap() {
            "dynamo/cost/001" => check_choice(weight, &input["workers"], expected),
            "dynamo/cost/002" => check_doc_example(weight, input, expected),
            id => check_terms(id, weight, input, expected),
        }
    }
}

fn check_choice(weight: f64, workers: &Value, expected: &Value) {
    let workers = workers.as_object().unwrap();
    assert_eq!(workers.len(), 3);
    let mut candidates = Vec::new();
    for (id, terms) in workers {
        // One token a block: the request brings one of the prefill blocks itself.
        let load = ActiveLoad {
            prefill_tokens: terms["prefill_blocks"].as_u64().unwrap() - 1,
            blocks: terms["decode_blocks"].as_u64().unwrap(),
            ..ActiveLoad::default()
        };
        candidates.push(candidate(id.parse().unwrap(), load));
    }
    let request = RequestTerms { overlap_score_weight: weight, ..REQUEST };
    let (mut terms, mut rng) = (Vec::new(), SmallRng::seed_from_u64(1));
    let decision = select(Policy::Kv, &request, &candidates, &mut terms, &mut rng).unwrap();
    for terms in decision.all_terms() {
        let id = terms.worker.instance_id.to_string();
        assert_eq!(terms.cost, expected["costs"][&id].as_f64().unwrap(), "worker {id}");
    }
    assert_eq!(decision.worker.instance_id.to_string(), expected["selected"]);
    assert_eq!((decision.choice.ties, decision.choice.margin), (1, Some(1.0)));
    assert_eq!(decision.choice.reason, Reason::LowestCost);
}

fn check_doc_example(weight: f64, input: &Value, expected: &Value) {
    let prefill_tokens = (input["prefill_blocks"].as_f64().unwrap() * 16.0) as u64;
    let overlap_blocks = input["cached_blocks"].as_u64().unwrap() as u32;
    let request = RequestTerms {
        isl_tokens: u64::from(overlap_blocks) * 16 + prefill_tokens,
        block_size: 16,
        overlap_score_weight: weight,
        ..REQUEST
    };
    let blocks = input["decode_blocks"].as_f64().unwrap() as u64;
    let load = ActiveLoad { blocks, ..ActiveLoad::default() };
    let candidate = Candidate { overlap_blocks, ..Candidate::new(Worker::new(7, 2), load) };
    let terms = request.terms(Policy::Kv, &candidate);
    assert_eq!(terms.cost, expected["cost"].as_f64().unwrap());
    assert_eq!(
        terms.formula(&request).to_string(),
        "Formula for worker_id=7 dp_rank=2 with 15 cached blocks: 125.500 = 1.000 * prefill_blocks \
         + decode_blocks = 1.000 * 100.500 + 25.000"
    );
    assert_eq!(
        format!("{:#}", terms.formula(&request)),
        "Formula for worker_7: 125.5 = 1.0 * 100.5 + 25.0 (cached_blocks: 15, dp_rank: 2)"
    );
    let alone = Terms { worker: Worker::new(1, 0), ..terms };
    assert_eq!(
        format!("{:#}", alone.formula(&request)),
        "Formula for worker_1: 125.5 = 1.0 * 100.5 + 25.0 (cached_blocks: 15)"
    );
}

fn check_terms(id: &str, weight: f64, input: &Value, expected: &Value) {
    let number = |name: &str| input[name].as_u64().unwrap();
    let hashes = |name: &str| -> Vec<u64> {
        input[name].as_array().unwrap().iter().map(|hash| hash.as_u64().unwrap()).collect()
    };
    let block_size = number("block_size") as u32;
    let worker = Worker::new(1, 0);
    let mut load = ActiveSequences::new(LoadConfig { block_size, ..LoadConfig::default() });
    load.set_workers(&[worker]).unwrap();
    let active = hashes("active_block_hashes");
    let tokens = number("active_prefill_tokens");
    let work = Assignment {
        id: RequestId(1),
        worker,
        blocks: BlockUse::Shared(&active),
        isl_tokens: tokens,
        uncached_tokens: tokens,
        unseen_ms: None,
        is_remote: false,
    };
    load.book(&work, 0).unwrap();
    let wanted = hashes("request_sequence_hashes");
    let mut shared = Vec::new();
    load.count_shared(&wanted, &mut shared);
    let (slot, now) = load.loads().next().unwrap();
    let candidate = Candidate {
        overlap_blocks: number("overlap_blocks") as u32,
        shared_blocks: shared[slot],
        ..Candidate::new(worker, now.active)
    };
    let request = RequestTerms {
        isl_tokens: number("isl"),
        block_size,
        tracked_blocks: wanted.len() as u32,
        overlap_score_weight: weight,
        ..REQUEST
    };
    let terms = request.terms(Policy::Kv, &candidate);
    assert_eq!(terms.prefill_blocks, expected["prefill_blocks"].as_f64().unwrap(), "{id}");
    assert_eq!(terms.decode_blocks, expected["decode_blocks"].as_u64().unwrap(), "{id}");
    assert_eq!(terms.cost, expected["logit"].as_f64().unwrap(), "{id}");
}

/// Probability of each cost at `temperature`, in the same order.
fn probabilities(costs: &[f64], temperature: f64) -> Vec<f64> {
    let weight = select::weights(costs.iter().copied(), temperature);
    let total: f64 = costs.iter().map(|&cost| weight(cost)).sum();
    costs.iter().map(|&cost| weight(cost) / total).collect()
}

#[test]
fn recorded_temperatures_hold() {
    const DRAWS: usize = 40_000;
    let cases = cases("softmax");
    assert_eq!(cases.len(), 10);
    let (mut sets, mut spreads) = (0, 0);
    for case in &cases {
        let (id, input, expected) = (&case["id"], &case["input"], &case["expected"]);
        let temperature = input["temperature"].as_f64().unwrap();
        let logits = input["logits"].as_object().unwrap();
        let names: Vec<&String> = logits.keys().collect();
        let costs: Vec<f64> = logits.values().map(|cost| cost.as_f64().unwrap()).collect();
        let exact = probabilities(&costs, temperature);
        assert!((exact.iter().sum::<f64>() - 1.0).abs() < 1e-12, "{id}");
        let mut rng = SmallRng::seed_from_u64(11);
        let mut drawn = vec![0_usize; costs.len()];
        for _ in 0..DRAWS {
            drawn[select::sample(costs.iter().copied(), temperature, &mut rng)] += 1;
        }
        if let Some(wanted) = expected["candidates"].as_array() {
            sets += 1;
            for (at, name) in names.iter().enumerate() {
                let is_wanted = wanted.iter().any(|wanted| wanted == *name);
                assert_eq!(exact[at] > 0.0, is_wanted, "{id}: {name}");
                assert_eq!(drawn[at] > 0, is_wanted, "{id}: {name}");
            }
        }
        if let Some(wanted) = expected["probabilities"].as_object() {
            spreads += 1;
            for (at, name) in names.iter().enumerate() {
                let wanted = wanted[*name].as_f64().unwrap();
                assert!((exact[at] - wanted).abs() < 1e-8, "{id}: {name}: {}", exact[at]);
                // Five standard deviations, and one draw for those near 0.
                let error = 5.0 * (wanted * (1.0 - wanted) / DRAWS as f64).sqrt();
                let share = drawn[at] as f64 / DRAWS as f64;
                let is_near = (share - wanted).abs() < error + 1.0 / DRAWS as f64;
                assert!(is_near, "{id}: {name}: {share} instead of {wanted}");
            }
        }
    }
    assert_eq!((sets, spreads), (6, 4));
}

#[test]
fn select_at_a_temperature_draws_the_probabilities() {
    let (request, candidates) = costing(&[18.0, 10.0, 11.0]);
    let request = RequestTerms { temperature: 1.0, ..request };
    let (mut terms, mut rng) = (Vec::new(), SmallRng::seed_from_u64(3));
    let mut drawn = [0; 3];
    let mut margins = BTreeMap::new();
    for _ in 0..10_000 {
        let decision = select(Policy::Kv, &request, &candidates, &mut terms, &mut rng).unwrap();
        assert_eq!((decision.choice.reason, decision.choice.ties), (Reason::Temperature, 1));
        drawn[decision.choice.index] += 1;
        margins.insert(decision.choice.index, decision.choice.margin);
    }
    for (drawn, wanted) in drawn.into_iter().zip([0.1635, 0.4444, 0.3922]) {
        assert!((f64::from(drawn) / 10_000.0 - wanted).abs() < 0.025, "{drawn}");
    }
    assert_eq!(margins, BTreeMap::from([(0, Some(-8.0)), (1, Some(1.0)), (2, Some(-1.0))]));
}

#[test]
fn softmax_survives_extremes() {
    let even = |count: usize| vec![1.0 / count as f64; count];
    assert!(probabilities(&[], 1.0).is_empty());
    assert_eq!(probabilities(&[4.0, 4.0], 1.0), even(2));
    assert_eq!(probabilities(&[4.0, 4.0], 0.0), even(2));
    assert_eq!(probabilities(&[1.0, 2.0], f64::MIN_POSITIVE), [1.0, 0.0]);
    assert_eq!(probabilities(&[1e300, 0.0], 1e-3), [0.0, 1.0]);
    assert_eq!(probabilities(&[f64::MAX, -f64::MAX], 1.0), even(2));
    let nearly_even = probabilities(&[1.0, 2.0], 1e12);
    assert!((nearly_even[0] - 0.5).abs() < 1e-9);
}

#[test]
fn scores_of_kv_are_its_costs_where_credit_fades() {
    let scale = KvScale { overlap_score_credit_decay: 1.0, ..KvScale::PLAIN };
    let request = RequestTerms { isl_tokens: 8, scale, ..REQUEST };
    let list = [(1, 4), (2, 9)].map(|(id, prefill_tokens)| {
        let load = ActiveLoad { prefill_tokens, ..ActiveLoad::default() };
        Candidate { overlap_blocks: 4, ..candidate(id, load) }
    });
    let (mut costs, mut scores) = (Vec::new(), Vec::new());
    let mut rng = SmallRng::seed_from_u64(1);
    select(Policy::Kv, &request, &list, &mut costs, &mut rng).unwrap();
    let context = Context { request, ..Context::default() };
    Policy::Kv.scores(&context, &Candidates::new(&list), &mut scores, &mut rng).unwrap();
    assert_eq!(scores, costs.iter().map(|one| Some(one.cost)).collect::<Vec<_>>());
}

#[test]
fn ties_are_exact_and_evenly_drawn() {
    let (request, candidates) = costing(&[5.0, 3.0, 3.0, 3.5, 3.0]);
    let (mut terms, mut rng) = (Vec::new(), SmallRng::seed_from_u64(5));
    let mut drawn = [0_u32; 5];
    for _ in 0..9_000 {
        let decision = select(Policy::Kv, &request, &candidates, &mut terms, &mut rng).unwrap();
        assert_eq!((decision.choice.ties, decision.choice.margin), (3, Some(0.0)));
        assert_eq!(decision.choice.reason, Reason::Tie);
        assert_eq!(decision.terms().cost, 3.0);
        drawn[decision.choice.index] += 1;
    }
    assert_eq!((drawn[0], drawn[3]), (0, 0));
    for share in [drawn[1], drawn[2], drawn[4]] {
        assert!((2_700..3_300).contains(&share), "{drawn:?}");
    }
}

#[test]
fn without_a_block_size_tokens_and_requests_decide() {
    let request = RequestTerms { isl_tokens: 30, block_size: 0, ..REQUEST };
    let busy = ActiveLoad { requests: 2, prefill_tokens: 10, blocks: 9, ..ActiveLoad::default() };
    let terms = request.terms(Policy::Kv, &candidate(1, busy));
    assert_eq!((terms.prefill_blocks, terms.decode_blocks, terms.cost), (0.0, 0, 42.0));
    assert_eq!(
        terms.formula(&request).to_string(),
        "Formula for worker_id=1 dp_rank=0 with 0 cached blocks: 42.000 = 1.000 * prefill_tokens \
         + active_requests = 1.000 * 40.000 + 2.000"
    );
}

#[test]
fn least_loaded_takes_blocks_then_requests_then_chance() {
    let load = |requests, prefill_tokens, blocks| ActiveLoad {
        requests,
        prefill_tokens,
        blocks,
        ..ActiveLoad::default()
    };
    let request = RequestTerms { block_size: 16, ..REQUEST };
    let loads = [load(1, 32, 3), load(3, 16, 3), load(2, 0, 4), load(2, 64, 0), load(9, 0, 5)];
    let candidates: Vec<_> = (0..).zip(loads).map(|(id, load)| candidate(id, load)).collect();
    let (mut terms, mut rng) = (Vec::new(), SmallRng::seed_from_u64(5));
    let mut drawn = [0_u32; 5];
    for _ in 0..1_000 {
        let policy = Policy::LeastLoaded;
        let decision = select(policy, &request, &candidates, &mut terms, &mut rng).unwrap();
        assert_eq!(
            (decision.terms().cost, decision.choice.ties, decision.choice.margin),
            (4.0, 2, Some(0.0))
        );
        drawn[decision.choice.index] += 1;
    }
    assert_eq!((drawn[0], drawn[1], drawn[4]), (0, 0, 0), "worker 1 has more requests");
    assert!(drawn[2] > 400 && drawn[3] > 400, "{drawn:?}");
}

#[test]
fn power_of_two_compares_two_different_candidates() {
    let (request, _) = costing(&[]);
    let load = |blocks| ActiveLoad { blocks, ..ActiveLoad::default() };
    let candidates = [candidate(1, load(1)), candidate(2, load(2)), candidate(3, load(3))];
    let (mut terms, mut rng) = (Vec::new(), SmallRng::seed_from_u64(5));
    let mut drawn = [0_u32; 3];
    for _ in 0..3_000 {
        let policy = Policy::PowerOfTwo;
        let decision = select(policy, &request, &candidates, &mut terms, &mut rng).unwrap();
        assert!(decision.choice.margin > Some(0.0), "the two are never the same");
        drawn[decision.choice.index] += 1;
    }
    assert!((1_900..2_100).contains(&drawn[0]), "two of three pairs: {drawn:?}");
    assert_eq!(drawn[2], 0, "the busiest never wins");
}

#[test]
fn random_is_even() {
    let (request, candidates) = costing(&[1.0, 50.0, 9.0]);
    let (mut terms, mut rng) = (Vec::new(), SmallRng::seed_from_u64(5));
    let mut drawn = [0_u32; 3];
    for _ in 0..3_000 {
        let decision = select(Policy::Random, &request, &candidates, &mut terms, &mut rng).unwrap();
        assert_eq!((decision.choice.ties, decision.choice.margin), (3, None));
        drawn[decision.choice.index] += 1;
    }
    assert!(drawn.iter().all(|drawn| (850..1_150).contains(drawn)), "{drawn:?}");
}

#[test]
fn policies_have_one_name_each() {
    let mut rng = SmallRng::seed_from_u64(5);
    let mut build = |name: &str| registry::build(name, &Settings::default(), &mut rng);
    for policy in Policy::ALL {
        for name in [policy.to_string(), policy.to_string().replace('_', "-")] {
            assert_eq!(build(&name).unwrap().built_in(), Some(policy));
        }
    }
    let unknown = build("fastest").unwrap_err().to_string();
    assert!(unknown.contains("round_robin") && unknown.contains("fastest"), "{unknown}");
}

fn candidates() -> impl Strategy<Value = Vec<Candidate>> {
    let load = (0u32..4, 0u64..40, 0u64..6, 0u64..9).prop_map(
        |(requests, prefill_tokens, blocks, last_booked)| ActiveLoad {
            requests,
            prefill_tokens,
            blocks,
            last_booked,
            ..ActiveLoad::default()
        },
    );
    let one = (0u32..6, prop::option::weighted(0.2, 0u32..3), 0u32..5, load);
    prop::collection::vec(one, 0..12).prop_map(|all| {
        let numbered = (0..).zip(all);
        numbered
            .map(|(id, (overlap_blocks, predicted, shared_blocks, load))| Candidate {
                overlap_blocks,
                predicted_blocks: predicted.unwrap_or(0).min(overlap_blocks),
                shared_blocks,
                ..candidate(id, load)
            })
            .collect()
    })
}

#[test]
fn a_prompt_that_was_just_sent_somewhere_goes_there_again_but_not_in_crowds() {
    let request = RequestTerms { isl_tokens: 39, block_size: 10, tracked_blocks: 3, ..REQUEST };
    let twin = |requests: u32| {
        let load = ActiveLoad { requests, prefill_tokens: 39, blocks: 3, ..ActiveLoad::default() };
        let held = Candidate { overlap_blocks: 3, predicted_blocks: 3, ..candidate(1, load) };
        Candidate { shared_blocks: 3, ..held }
    };
    let idle = candidate(2, ActiveLoad::default());
    let mut chosen = [0_usize; 2];
    for seed in 0..64 {
        for requests in [1, 2] {
            let mut rng = SmallRng::seed_from_u64(seed);
            let mut terms = Vec::new();
            let candidates = [idle, twin(requests)];
            let decision = select(Policy::Kv, &request, &candidates, &mut terms, &mut rng).unwrap();
            // The nine tokens behind the last full block make no difference.
            assert_eq!(decision.costs[0].cost, decision.costs[1].cost);
            chosen[requests as usize - 1] += usize::from(decision.worker == Worker::new(1, 0));
        }
    }
    assert_eq!(chosen[0], 64, "one request there: the twin joins it");
    assert!((10..54).contains(&chosen[1]), "two: chance decides, {}", chosen[1]);
    // Held blocks are not predicted ones: a tie is a tie.
    let terms = |predicted_blocks| {
        let one = Candidate { predicted_blocks, ..twin(1) };
        request.terms(Policy::Kv, &one).prefill_tokens
    };
    assert_eq!((terms(0), terms(3)), (48, 39));
}

#[test]
fn a_prompt_that_was_just_sent_somewhere_ties_where_caches_have_no_weight() {
    let load = ActiveLoad::default();
    let twin = Candidate { overlap_blocks: 3, predicted_blocks: 3, ..candidate(1, load) };
    let candidates = [candidate(2, load), twin];
    let scale = |change: fn(&mut KvScale)| {
        let mut scale = KvScale::PLAIN;
        change(&mut scale);
        scale
    };
    let request = RequestTerms { isl_tokens: 30, block_size: 10, ..REQUEST };
    for request in [
        RequestTerms { overlap_score_weight: 0.0, ..request },
        RequestTerms { scale: scale(|scale| scale.overlap_score_credit = 0.0), ..request },
        RequestTerms { scale: scale(|scale| scale.prefill_load_scale = 0.0), ..request },
    ] {
        let chosen = |seed| {
            let mut rng = SmallRng::seed_from_u64(seed);
            select(Policy::Kv, &request, &candidates, &mut Vec::new(), &mut rng).unwrap().worker
        };
        let first = (0..64).filter(|&seed| chosen(seed) == Worker::new(1, 0)).count();
        assert!((10..54).contains(&first), "{request:?}: {first} of 64");
    }
}

proptest! {
    #[test]
    fn the_same_inputs_give_the_same_decision(
        candidates in candidates(),
        policy in prop::sample::select(Policy::ALL.to_vec()),
        temperature in prop::sample::select(vec![0.0, 0.3, 2.0]),
        block_size in prop::sample::select(vec![0, 1, 16]),
        seed in any::<u64>(),
    ) {
        let request = RequestTerms {
            isl_tokens: 50,
            block_size,
            tracked_blocks: 4,
            overlap_score_weight: 0.7,
            temperature,
            ..REQUEST
        };
        let stale = CandidateCost { cost: 99.0, ..CandidateCost::default() };
        let (mut terms, mut again) = (Vec::new(), vec![stale]);
        let rng = SmallRng::seed_from_u64(seed);
        let first = select(policy, &request, &candidates, &mut terms, &mut rng.clone());
        let second = select(policy, &request, &candidates, &mut again, &mut rng.clone());
        prop_assert_eq!(&first, &second);
        prop_assert_eq!(first.is_none(), candidates.is_empty());
        let Some(decision) = first else { return Ok(()) };
        prop_assert_eq!(decision.costs.len(), candidates.len());
        prop_assert_eq!(decision.worker, candidates[decision.choice.index].worker);
        prop_assert_eq!(decision.overlap_blocks, candidates[decision.choice.index].overlap_blocks);
        prop_assert!(decision.choice.ties >= 1 && decision.choice.ties <= candidates.len());
        let compares = temperature == 0.0 && policy == Policy::Kv || policy == Policy::LeastLoaded;
        if compares {
            let cost = decision.terms().cost;
            let others = || decision.costs.iter().enumerate()
                .filter(|&(at, _)| at != decision.choice.index).map(|(_, terms)| terms.cost);
            prop_assert!(others().all(|other| other >= cost));
            let next = others().min_by(f64::total_cmp);
            prop_assert_eq!(decision.choice.margin, next.map(|next| next - cost));
        }
        if policy == Policy::Kv && temperature == 0.0 {
            let cost = decision.terms().cost;
            let equal = decision.costs.iter().filter(|terms| terms.cost == cost).count();
            let is_foretold = candidates.iter().any(|candidate| candidate.predicted_blocks > 0);
            prop_assert!(decision.choice.ties == equal || (is_foretold && decision.choice.ties < equal));
        }
    }
}

#[test]
fn weighed_costs_are_as_published() {
    let (mut rng, mut all) = (SmallRng::seed_from_u64(1), Vec::new());
    let mut compared = 0;
    for case in cases("cost-new-formula") {
        let (id, input, expected) = (&case["id"], &case["input"], &case["expected"]);
        let number = |value: &Value, field: &str, default: f64| {
            value.get(field).map_or(default, |found| found.as_f64().unwrap())
        };
        let scale = KvScale {
            overlap_score_credit: number(input, "overlap_score_credit", 1.0),
            overlap_score_credit_decay: number(input, "overlap_score_credit_decay", 0.0),
            prefill_load_scale: number(input, "prefill_load_scale", 1.0),
            active_request_weight: number(input, "decode_active_request_weight", 0.0),
        };
        let request = RequestTerms {
            isl_tokens: input["isl"].as_u64().unwrap(),
            block_size: input["block_size"].as_u64().unwrap() as u32,
            tracked_blocks: 100,
            scale,
            ..REQUEST
        };
        let load = |worker: &Value| ActiveLoad {
            requests: number(worker, "active_requests", 0.0) as u32,
            prefill_tokens: number(worker, "active_prefill_tokens", 0.0) as u64,
            blocks: number(worker, "active_decode_blocks", 0.0) as u64,
            ..ActiveLoad::default()
        };
        let candidate = |id: u64, worker: &Value| Candidate {
            overlap_blocks: number(worker, "device_overlap", 0.0) as u32,
            shared_blocks: 100 - number(worker, "additional_active_blocks", 0.0) as u32,
            ..candidate(id, load(worker))
        };
        let candidates: Vec<Candidate> = match input.get("workers") {
            Some(workers) => (workers.as_object().unwrap().iter())
                .map(|(id, worker)| candidate(id.parse().unwrap(), worker))
                .collect(),
            None => vec![candidate(0, &input["worker"])],
        };
        let decision = select(Policy::Kv, &request, &candidates, &mut all, &mut rng).unwrap();
        for terms in decision.all_terms() {
            let wanted = match expected.get("logits") {
                Some(logits) => &logits[terms.worker.instance_id.to_string()],
                None => &expected["logit"],
            };
            assert!((terms.cost - wanted.as_f64().unwrap()).abs() < 1e-8, "{id}: {terms:?}");
            let formula = terms.formula(&decision.request).to_string();
            assert!(formula.contains(&format!(": {:.3} = ", terms.cost)), "{id}: {formula}");
            compared += 1;
        }
        if let Some(selected) = expected.get("selected") {
            assert_eq!(decision.worker.instance_id, selected.as_u64().unwrap(), "{id}");
        }
    }
    assert_eq!(compared, 11);
}
