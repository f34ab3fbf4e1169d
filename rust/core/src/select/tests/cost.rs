//! Recorded choices under overloads, overrides and ties.

use std::collections::BTreeSet;

use super::*;

fn cost_case(number: &str) -> Value {
    let text = include_str!("../../../../../tests/vectors/cost_cases.json");
    let cases: Vec<Value> = serde_json::from_str(text).unwrap();
    assert_eq!(cases.len(), 6);
    let id = format!("dynamo/cost-new-formula/{number}");
    cases.into_iter().find(|case| case["id"] == id.as_str()).unwrap()
}

/// Workers that are too busy for anything, as the case names them.
fn overload(bench: &Bench, case: &Value) {
    for id in case["input"]["overloaded"].as_array().unwrap() {
        let id = worker(id.as_u64().unwrap());
        let report = Report {
            active_prefill_tokens: Some(2),
            kv_total_blocks: Some(1),
            ..Report::default()
        };
        assert!(bench.selector.busy.report(id, &report));
    }
    let thresholds = Thresholds { active_prefill_tokens: Some(1), ..Thresholds::default() };
    bench.selector.busy.set_thresholds(thresholds).unwrap();
}

#[test]
fn overloaded_workers_are_passed_over_and_a_pin_is_not_rerouted() {
    let tokens: Vec<u32> = (0..16).collect();
    let bench = plain(2);
    let prompt = bench.prompt(&tokens);
    let case = cost_case("017");
    bench.store(worker(0), Tier::Device, &tokens);
    overload(&bench, &case);
    let (held, _) = bench.selector.select(&Ask::new(&prompt)).unwrap();
    assert_eq!(held.worker().instance_id, case["expected"]["selected"].as_u64().unwrap());

    for number in ["019", "020"] {
        let case = cost_case(number);
        let bench = plain(case["input"]["workers"].as_array().unwrap().len() as u64);
        overload(&bench, &case);
        let pinned = case["input"]["pinned_worker"].as_u64();
        let pin = pinned.map(|instance_id| Pin { instance_id, dp_rank: None });
        let error = bench.selector.select(&Ask { pin, ..Ask::new(&prompt) }).err().unwrap();
        let Error::AllBusy(text) = &error else { panic!("{number}: {error:?}") };
        let names = pinned.map_or("all 2 workers".to_owned(), |id| format!("worker {id}"));
        assert!(text.contains(&names), "{number}: {text}");
        assert!(bench.is_idle());
    }
}

#[test]
fn a_request_may_want_another_credit() {
    for number in ["013", "014"] {
        let case = cost_case(number);
        let (input, expected) = (&case["input"], &case["expected"]);
        // Blocks of four tokens instead of one: costs are in blocks.
        let blocks = |value: &Value| value.as_u64().unwrap() as u32;
        let bench = plain(2);
        let tokens: Vec<u32> = (0..BLOCK_SIZE * blocks(&input["isl"])).collect();
        let held = BLOCK_SIZE * blocks(&input["workers"]["0"]["device_overlap"]);
        bench.store(worker(0), Tier::Device, &tokens[..held as usize]);
        let pin = Some(Pin { instance_id: 0, dp_rank: None });
        let busy = bench.prompt(&[9; BLOCK_SIZE as usize]);
        let (running, _) = bench.selector.select(&Ask { pin, ..Ask::new(&busy) }).unwrap();
        running.first_token();
        let credit = input["override"]["overlap_score_credit"].as_f64();
        let overrides = RouteOverride { overlap_score_credit: credit, ..RouteOverride::default() };
        let prompt = bench.prompt(&tokens);
        let ask = Ask { overrides, ..Ask::new(&prompt) };
        let (selection, record) = bench.selector.preview(&ask).unwrap();
        assert_eq!(selection.worker.instance_id, expected["selected"].as_u64().unwrap());
        for one in record.candidates() {
            // The recorded costs leave the request's own blocks out.
            let cost = one.terms.cost - f64::from(blocks(&input["isl"]));
            let wanted = &expected["logits"][one.terms.worker.instance_id.to_string()];
            assert_eq!(cost, wanted.as_f64().unwrap(), "{number}");
        }
    }
}

#[test]
fn without_credit_no_guess_about_caches_lowers_the_load() {
    let mut router = sized();
    router.scale.overlap_score_credit = 0.0;
    let overlap = Overlap::Predictions;
    let config = SelectorConfig { router, overlap, ..SelectorConfig::default() };
    let bench = configured(config, CatalogOptions::default(), 2);
    let prompt = bench.prompt(&[1; 16]);
    let pin = Some(Pin { instance_id: 1, dp_rank: None });
    let _running = [(); 3].map(|()| {
        let (held, selection) = bench.selector.select(&Ask { pin, ..Ask::new(&prompt) }).unwrap();
        assert_eq!(selection.expected_blocks(), 0);
        held
    });
    assert_eq!(bench.selector.totals().prefill_tokens, 48);
}

#[test]
fn chance_decides_between_equals() {
    let case = cost_case("025");
    let bench = plain(case["input"]["workers"].as_array().unwrap().len() as u64);
    let prompt = bench.prompt(&[1; 16]);
    let draws = case["input"]["draws"].as_u64().unwrap();
    let drawn = (0..draws).map(|_| {
        let (held, _) = bench.selector.select(&Ask::new(&prompt)).unwrap();
        held.worker()
    });
    let least = case["expected"]["distinct_selected_min"].as_u64().unwrap();
    assert!(drawn.collect::<BTreeSet<_>>().len() as u64 >= least);
}
