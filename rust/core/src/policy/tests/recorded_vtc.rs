//! Recorded cases of `vtc-basic`.

use std::sync::Mutex;
use std::thread;

use rand::SeedableRng;
use rand::rngs::SmallRng;
use serde_json::{Value, json};

use super::super::settings::{TimeUnit, VtcSettings};
use super::super::vtc_basic::*;
use super::super::*;
use super::pods::{candidate, cases, context, range_at};

fn settings(input: &Value) -> VtcSettings {
    let number = |name: &str, without: f64| input[name].as_f64().unwrap_or(without);
    let base = Settings::new(Profile::AibrixCompat).vtc;
    VtcSettings {
        input_token_weight: number("input_weight", base.input_token_weight),
        output_token_weight: number("output_weight", base.output_token_weight),
        window_size: input["window"].as_u64().unwrap_or(base.window_size),
        time_unit: match input["unit"].as_str() {
            Some("milliseconds") => TimeUnit::Milliseconds,
            Some("seconds") => TimeUnit::Seconds,
            _ => TimeUnit::Minutes,
        },
        max_pod_load: number("max_pod_load", base.max_pod_load),
        ..base
    }
}

#[test]
fn recorded_estimates_hold() {
    let cases = cases("vtc/estimator");
    assert_eq!(cases.len(), 4);
    for case in &cases {
        let message = case["input"]["message"].as_str().unwrap();
        let wanted = |name: &str| case["expected"][name].as_u64().unwrap();
        assert_eq!(estimate(message.len()), (wanted("input_tokens"), wanted("output_tokens")));
    }
}

/// Results of a case's operations: totals, ranges, and whether the last one failed.
fn play(case: &Value, is_compat: bool) -> Value {
    let mut tracker = TokenTracker::new(&VtcSettings { is_compat, ..settings(&case["input"]) });
    let mut now_ms = 1_000_000;
    let (mut totals, mut ranges, mut is_error) = (Vec::new(), Vec::new(), false);
    for op in case["input"]["ops"].as_array().unwrap() {
        let client = op[1].as_str().unwrap_or("");
        let number = |at: usize| op[at].as_f64().unwrap();
        match op[0].as_str().unwrap() {
            "get" => totals.push(tracker.total(client, now_ms)),
            "update" => is_error = tracker.charge(client, number(2), number(3), now_ms).is_err(),
            "minmax" => ranges.push(range_at(&mut tracker, now_ms)),
            "sleep_ms" => now_ms += number(1) as u64,
            other => panic!("{other}"),
        }
    }
    json!({ "get": totals, "minmax": ranges, "is_error": is_error })
}

/// Equal, whether numbers are written as integers or not.
fn numbers(value: &Value) -> Vec<f64> {
    match value {
        Value::Array(values) => values.iter().flat_map(numbers).collect(),
        Value::Null => Vec::new(),
        number => vec![number.as_f64().unwrap()],
    }
}

#[test]
fn recorded_windows_hold() {
    let cases = cases("vtc/token-tracker");
    assert_eq!(cases.len(), 12);
    let mut played = 0;
    for case in &cases {
        let expected = &case["expected"];
        if !case["input"]["ops"][0].is_array() {
            continue;
        }
        played += 1;
        for is_compat in [true, false] {
            let found = play(case, is_compat);
            assert_eq!(numbers(&found["get"]), numbers(&expected["get"]), "{}", case["id"]);
            let is_error = expected["last_op"].is_string();
            assert_eq!(found["is_error"], is_error, "{}", case["id"]);
            // Documented: those who have had nothing for a window do not count.
            let is_idle_case = case["id"] == "aibrix/vtc-token-tracker/016";
            let wanted = match is_compat || !is_idle_case {
                true => numbers(&expected["minmax"]),
                false => vec![1_000.0, 8_000.0],
            };
            assert_eq!(numbers(&found["minmax"]), wanted, "{}", case["id"]);
        }
    }
    assert_eq!(played, 10);
}

#[test]
fn recorded_windows_hold_from_many_threads() {
    let cases = cases("vtc/token-tracker");
    let case = |id: &str| cases.iter().find(|case| case["id"] == id).unwrap();
    for is_compat in [true, false] {
        let shared = case("aibrix/vtc-token-tracker/010");
        let settings_of = |case: &Value| VtcSettings { is_compat, ..settings(&case["input"]) };
        let tracker = Mutex::new(TokenTracker::new(&settings_of(shared)));
        thread::scope(|scope| {
            for id in 0..20 {
                let tracker = &tracker;
                scope.spawn(move || {
                    for _ in 0..50 {
                        let tokens = f64::from(id + 1);
                        tracker.lock().unwrap().charge("shared", tokens, tokens, 5_000).unwrap();
                    }
                });
            }
        });
        let total = tracker.lock().unwrap().total("shared", 5_000);
        assert_eq!(total, shared["expected"]["total"].as_f64().unwrap());

        let many = case("aibrix/vtc-token-tracker/008");
        let tracker = Mutex::new(TokenTracker::new(&settings_of(many)));
        for (tokens, now_ms) in [(100.0, 1_000), (50.0, 1_119)] {
            thread::scope(|scope| {
                for user in 0..10_u64 {
                    let tracker = &tracker;
                    scope.spawn(move || {
                        let (name, tokens) = (user.to_string(), tokens * (user + 1) as f64);
                        tracker.lock().unwrap().charge(&name, tokens, 0.0, now_ms).unwrap();
                    });
                }
            });
        }
        let range = tracker.lock().unwrap().range();
        let wanted = |name: &str| many["expected"][name].as_f64().unwrap();
        assert_eq!(range, (wanted("min"), wanted("max")));
    }
}

#[test]
fn recorded_scores_hold() {
    let cases = cases("vtc/basic-routing");
    assert_eq!(cases.len(), 7);
    for case in &cases {
        let (id, input, expected) = (&case["id"], &case["input"], &case["expected"]);
        let settings = settings(input);
        let loads = || input["pod_loads"].as_array().unwrap().iter().map(|l| l.as_f64().unwrap());
        let score = |total: f64, all: &[f64]| {
            let range = (
                all.iter().copied().fold(f64::INFINITY, f64::min),
                all.iter().copied().fold(0.0, f64::max),
            );
            let (mut scores, loads) = (Vec::new(), loads().collect::<Vec<_>>());
            position_scores(&settings, total, range, loads.into_iter(), &mut scores);
            scores
        };
        let lowest = |scores: &[f64]| {
            (0..scores.len()).min_by(|&a, &b| scores[a].total_cmp(&scores[b])).unwrap()
        };
        match id.as_str().unwrap().rsplit_once('/').unwrap().1 {
            "001" | "002" => {
                let all = numbers(&input["all_user_totals"]);
                let scores = score(input["user_total"].as_f64().unwrap(), &all);
                for (found, wanted) in
                    scores.iter().zip(numbers(&expected["scores_without_random"]))
                {
                    assert!((found - wanted).abs() < 1e-9, "{id}: {scores:?}");
                }
                assert_eq!(lowest(&scores) as u64, expected["pod_index"]);
            }
            "004" => {
                let policy = VtcBasic::new(&settings);
                let list = [candidate(0, Some(0))];
                let candidates = Candidates::new(&list);
                let prompt = input["message"].as_str().unwrap().as_bytes();
                let context = Context { prompt, user: input["user"].as_str(), ..context(5_000) };
                let mut rng = SmallRng::seed_from_u64(1);
                let choice = policy.choose(&context, &candidates, &mut Vec::new(), &mut rng);
                policy.routed(&context, &candidates, &choice.unwrap());
                assert_eq!(
                    Some(policy.tokens("user1", 5_000)),
                    expected["tokens_after_route"].as_f64()
                );
            }
            "005" => {
                let indices: Vec<usize> = numbers(&input["tokens"])
                    .into_iter()
                    .map(|tokens| lowest(&score(tokens, &[tokens])))
                    .collect();
                assert!(indices.is_sorted(), "{id}: {indices:?}");
            }
            "007" => {
                let policy = VtcBasic::new(&settings);
                let list = [candidate(0, Some(0)), candidate(1, Some(0))];
                let (mut scores, mut rng) = (Vec::new(), SmallRng::seed_from_u64(1));
                let context = Context { user: Some("u"), ..context(5_000) };
                let candidates = Candidates::new(&list);
                let polarity = policy.scores(&context, &candidates, &mut scores, &mut rng);
                assert_eq!(polarity, Some(Polarity::Least));
                assert!(scores.len() == 2 && scores.iter().all(Option::is_some));
                let nobody = Context { user: None, ..context };
                assert!(policy.scores(&nobody, &candidates, &mut scores, &mut rng).is_none());
            }
            "008" | "010" => {
                let all = numbers(&input["all_user_totals"]);
                let scores = score(input["user_total"].as_f64().unwrap(), &all);
                assert_eq!(scores.len() as u64, input["num_pods"]);
                // The first worker stands at 0: its distance is the place itself.
                let place = expected["normalized"].as_f64().unwrap();
                assert!((scores[0] - place).abs() < 1e-9, "{id}: {scores:?}");
                assert_eq!(lowest(&scores), 2);
            }
            other => panic!("{other}"),
        }
    }
}
