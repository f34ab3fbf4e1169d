//! Workers that take no new requests.

use super::*;
use crate::policy::Affinity;
use crate::select::Wanted;

fn ask_of(prompt: &Prompt) -> Ask<'_> {
    Ask { request_id: Some("r"), ..Ask::new(prompt) }
}

#[test]
fn a_draining_worker_gets_nothing_new_and_keeps_what_it_has() {
    let bench = plain(3);
    let tokens: Vec<u32> = (0..16).collect();
    bench.store(worker(1), Tier::Device, &tokens);
    let prompt = bench.prompt(&tokens);
    let (running, selection) = bench.selector.select(&ask_of(&prompt)).unwrap();
    assert_eq!(selection.worker, worker(1));
    bench.selector.set_draining(vec![1]);
    for _ in 0..8 {
        let (_, selection) = bench.selector.select(&ask_of(&prompt)).unwrap();
        assert_ne!(selection.worker, worker(1));
    }
    let load = bench.selector.loads()[1];
    assert_eq!((load.worker, load.active.requests), (worker(1), 1), "what it has goes on");
    let (_, record) = bench.selector.preview(&ask_of(&prompt)).unwrap();
    let candidate = record.candidates().pop().unwrap();
    assert_eq!((candidate.terms.worker, candidate.device_blocks), (worker(1), 4));
    assert!(candidate.is_draining && !candidate.is_busy);
    assert_eq!(record.diverted, None);
    assert!(bench.selector.potential_loads(&ask_of(&prompt)).unwrap().len() == 2);
    bench.selector.set_draining(Vec::new());
    let (_, selection) = bench.selector.select(&ask_of(&prompt)).unwrap();
    assert_eq!((selection.worker, selection.overlap_blocks), (worker(1), 4), "it is back");
    drop(running);
}

/// The candidates of a decision by `policy`: an open worker, and one that is draining.
fn open_and_draining(policy: &str) -> [serde_json::Value; 2] {
    let active = registry::build(policy, &Settings::default(), &mut SmallRng::seed_from_u64(1));
    let policies = Policies { active: active.unwrap(), ..Policies::default() };
    let router = sized();
    let config = SelectorConfig { router, ..SelectorConfig::default() };
    let bench = with_policies(config, policies, CatalogOptions::default(), 2);
    bench.selector.set_draining(vec![1]);
    let prompt = bench.prompt(&[1; 8]);
    let (_, record) = bench.selector.preview(&ask_of(&prompt)).unwrap();
    let candidates = [0, 1].map(|at| record.decision()["candidates"][at].clone());
    assert_eq!(candidates[1]["is_draining"], true);
    candidates
}

#[test]
fn a_worker_that_auto_passes_over_has_no_price() {
    let [open, draining] = open_and_draining("auto");
    for field in ["cost", "price", "formula"] {
        let [open, draining] = [&open[field], &draining[field]];
        assert!(!open.is_null() && draining.is_null(), "{field}: {open} {draining}");
    }
}

#[test]
fn a_worker_that_was_passed_over_has_the_deciding_policy_s_cost_or_none() {
    for (policy, is_known) in [("kv", true), ("least_loaded", true), ("least-request", false)] {
        let [open, draining] = open_and_draining(policy);
        assert_eq!((open["cost"].is_null(), draining["cost"].is_null()), (false, !is_known));
        let has_formula = draining.get("formula").is_some();
        assert!(has_formula == (policy == "kv") && draining.get("price").is_none(), "{draining}");
    }
}

#[test]
fn the_cost_of_a_worker_that_was_passed_over_is_the_one_it_would_have_beside_the_others() {
    let mut router = sized();
    router.scale.overlap_score_credit_decay = 1.0;
    let config = SelectorConfig { router, ..SelectorConfig::default() };
    let bench = with_policies(config, Policies::default(), CatalogOptions::default(), 2);
    let tokens: Vec<u32> = (0..16).collect();
    bench.store(worker(1), Tier::Device, &tokens);
    let other = bench.prompt(&[9; 8]);
    let _running = [0, 1].map(|instance_id| {
        let pin = Some(Pin { instance_id, dp_rank: None });
        bench.selector.select(&Ask { pin, ..Ask::new(&other) }).unwrap().0
    });
    let prompt = bench.prompt(&tokens);
    let cost = || {
        let (_, record) = bench.selector.preview(&ask_of(&prompt)).unwrap();
        let candidates = record.candidates();
        candidates.iter().find(|one| one.terms.worker == worker(1)).unwrap().terms.cost
    };
    let open = cost();
    bench.selector.set_draining(vec![1]);
    assert_eq!(cost(), open);
}

#[test]
fn pins_and_sessions_go_elsewhere_and_the_decision_says_so() {
    let affinity = Some(Arc::new(Affinity::new(60).unwrap()));
    let policies = Policies { affinity, ..Policies::default() };
    let router = sized();
    let config = SelectorConfig { router, ..SelectorConfig::default() };
    let bench = with_policies(config, policies, CatalogOptions::default(), 2);
    let prompt = bench.prompt(&[1; 8]);
    let pinned = Ask { pin: Some(Pin { instance_id: 1, dp_rank: None }), ..ask_of(&prompt) };
    let mut keyed = ask_of(&prompt);
    keyed.session.key = Some("s");
    let pinned_to_1 = Ask { session: keyed.session, ..pinned };
    assert_eq!(bench.selector.select(&pinned_to_1).unwrap().1.worker, worker(1));
    bench.selector.set_draining(vec![1]);
    for (ask, by) in [(&pinned, Wanted::Pin), (&keyed, Wanted::Session)] {
        let (selection, record) = bench.selector.preview(ask).unwrap();
        assert_eq!(selection.worker, worker(0));
        let diverted = record.diverted.unwrap();
        assert_eq!((diverted.from, diverted.by), (1, by));
        let told = &record.decision()["diverted"];
        let wanted = serde_json::json!({"from": 1, "by": by.name(), "because": "draining"});
        assert_eq!(*told, wanted);
    }
    assert_eq!(bench.selector.select(&pinned).unwrap().1.worker, worker(0));
}

#[test]
fn where_all_are_draining_the_refusal_says_so() {
    let bench = plain(2);
    let prompt = bench.prompt(&[1; 8]);
    bench.selector.set_draining(vec![1, 0]);
    let error = bench.selector.select(&ask_of(&prompt)).err().unwrap();
    let wanted = "all 2 workers that may take this request are draining";
    assert!(matches!(&error, Error::NoWorker(text) if text == wanted), "{error}");
    assert!(bench.is_idle());
    // One that is busy is there: the others' end is not the reason.
    bench.selector.set_draining(vec![0]);
    let thresholds = Thresholds { active_prefill_tokens: Some(1), ..Thresholds::default() };
    bench.selector.busy.set_thresholds(thresholds).unwrap();
    let _booked = bench.selector.select(&ask_of(&prompt)).unwrap();
    let error = bench.selector.select(&ask_of(&prompt)).err().unwrap();
    assert!(matches!(&error, Error::AllBusy(_)), "{error}");
}
