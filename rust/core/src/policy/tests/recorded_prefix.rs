//! Recorded cases of `prefix-cache`.

use std::collections::BTreeMap;

use rand::SeedableRng;
use rand::rngs::SmallRng;
use serde_json::Value;

use super::super::by_metric::choose_lowest;
use super::super::prefix::*;
use super::super::settings::PrefixSettings;
use super::super::*;
use super::pods::{candidate, cases, check, context, outcomes, pods};
use crate::ids::Worker;

fn settings(profile: Profile, block_size: &Value) -> PrefixSettings {
    let block_size = block_size.as_u64().unwrap() as u32;
    PrefixSettings { block_size, ..Settings::new(profile).prefix }
}

fn bytes(value: &Value) -> Vec<u8> {
    value.as_array().unwrap().iter().map(|byte| byte.as_u64().unwrap() as u8).collect()
}

fn counts(values: &[Value]) -> Vec<i64> {
    values.iter().map(|count| count.as_i64().unwrap()).collect()
}

#[test]
fn recorded_imbalances_hold() {
    let cases = cases("prefix-cache/imbalance");
    assert_eq!(cases.len(), 12);
    for case in &cases {
        let (names, values) = pods(&case["input"]["running_requests"]);
        let counts = counts(&values);
        let limit = case["input"]["imbalance_abs_count"].as_i64().unwrap();
        let wanted = &case["expected"];
        assert_eq!(is_imbalanced(&counts, limit), wanted["imbalanced"], "{}", case["id"]);
        let values: Vec<_> = counts.iter().map(|&count| Some(count as f64)).collect();
        let found = outcomes(|rng| choose_lowest(&values, rng).map(|choice| choice.index));
        check(case, &names, &found, &wanted["min_count_pods"]);
    }
}

#[test]
fn recorded_matched_choices_hold() {
    let cases = cases("prefix-cache/matched-pod-selection");
    assert_eq!(cases.len(), 17);
    for case in &cases {
        let input = &case["input"];
        let (names, values) = pods(&input["running_requests"]);
        let percents: Vec<Option<u32>> = (names.iter())
            .map(|name| input["match_percent"][name].as_u64().map(|percent| percent as u32))
            .collect();
        let factor = input["std_dev_factor"].as_f64().unwrap();
        let counts = counts(&values);
        let found =
            outcomes(|rng| select_matched(&counts, &percents, factor, rng).map(|(index, _)| index));
        check(case, &names, &found, &case["expected"]["acceptable_pods"]);
    }
}

#[test]
fn recorded_request_counts_hold() {
    let cases = cases("prefix-cache/request-counts");
    assert_eq!(cases.len(), 2);
    for case in &cases {
        let (names, values) = pods(&case["input"]["metrics"]);
        // Here requests are counted, not measured: a fraction can't come in.
        let count = |value: &Value| value.as_f64().map(|count| count as u32);
        let list: Vec<_> =
            values.iter().enumerate().map(|(at, value)| candidate(at, count(value))).collect();
        for (at, name) in names.iter().enumerate() {
            assert_eq!(Candidates::new(&list).requests(at), case["expected"][name], "{name}");
        }
    }
}

#[test]
fn recorded_matches_hold() {
    let cases = cases("prefix-cache/match-prefix");
    assert_eq!(cases.len(), 1);
    for profile in Profile::ALL {
        let case = &cases[0];
        let settings = settings(profile, &case["input"]["block_size_bytes"]);
        let hasher = BlockHasher::new(&settings, 7);
        let mut table = PrefixTable::new(&settings);
        let names: Vec<&str> = case["input"]["ready_pods"]
            .as_array()
            .unwrap()
            .iter()
            .flat_map(Value::as_str)
            .collect();
        let worker = |at: usize| Worker::new(at as u64, 0);
        let (mut hashes, mut matches) = (Vec::new(), 0);
        let steps = case["input"]["steps"].as_array().unwrap().iter();
        for (step, wanted) in steps.zip(case["expected"]["steps"].as_array().unwrap()) {
            let model = step["model"].as_str().unwrap();
            if step["op"] == "add_last_hashes" {
                let pod = names.iter().position(|name| step["pod"] == **name).unwrap();
                let end = step["slice"][1].as_u64().map_or(hashes.len(), |end| end as usize);
                table.record(model, &hashes[..end], worker(pod), 0);
                continue;
            }
            hashes = hasher.chain(&bytes(&step["bytes"]));
            assert_eq!(hashes.len() as u64, wanted["num_hashes"]);
            let mut percents = vec![None; names.len()];
            let workers = (0..names.len()).map(worker);
            table.matches(model, &hashes, workers, &[true; 3], 0, &mut percents);
            let found: BTreeMap<_, _> =
                names.iter().zip(&percents).filter_map(|(&name, p)| p.map(|p| (name, p))).collect();
            assert_eq!(serde_json::to_value(found).unwrap(), wanted["matched"], "{profile}");
            matches += 1;
        }
        assert_eq!(matches, 9);
    }
}

#[test]
fn recorded_hashes_hold() {
    let vectors = cases("prefix-cache/hash-vector");
    assert_eq!(vectors.len(), 2);
    for case in &vectors {
        let input = &case["input"];
        let settings = settings(Profile::AibrixCompat, &input["block_size_bytes"]);
        let hasher = BlockHasher::new(&settings, input["seed"].as_u64().unwrap());
        let text = input["text_utf8"].as_str().unwrap();
        let found = hasher.chain(text.as_bytes()).into_iter().map(|hash| hash.to_string());
        let wanted = case["expected"]["hashes"].as_array().unwrap().iter();
        assert_eq!(
            found.collect::<Vec<_>>(),
            wanted.map(|hash| hash.as_str().unwrap()).collect::<Vec<_>>()
        );
    }
    let chains = cases("prefix-cache/hash-chaining");
    assert_eq!(chains.len(), 1);
    let input = &chains[0]["input"];
    let settings = settings(Profile::AibrixCompat, &input["block_size_bytes"]);
    let hasher = BlockHasher::new(&settings, 99);
    let [a, b, c, d] = ["a", "b", "c", "d"].map(|name| hasher.chain(&bytes(&input[name])));
    assert_eq!(a, hasher.chain(&bytes(&input["a"])));
    assert_eq!(a[0], c[0]);
    assert!(a[1] != b[1] && a[1] != c[1] && a[0] != d[0] && a[1] != d[1]);
}

#[test]
fn recorded_hash_counts_hold() {
    let cases = cases("kv-sync/hash-count");
    assert_eq!(cases.len(), 3);
    for case in &cases {
        let settings = settings(Profile::AibrixCompat, &case["input"]["block_size_bytes"]);
        let count = case["input"]["num_bytes"].as_u64().unwrap() as usize;
        let hashes = BlockHasher::new(&settings, 0).chain(&vec![1; count]);
        assert_eq!(hashes.len() as u64, case["expected"]["num_hashes"]);
    }
}

#[test]
fn recorded_seeds_hold() {
    let cases = cases("prefix-cache/hash-seed");
    assert_eq!(cases.len(), 3);
    for case in &cases {
        let look = |name: &str| case["input"]["env"][name].as_str().map(str::to_owned);
        for profile in Profile::ALL {
            let settings = Settings::read(profile, look).unwrap();
            let mut rng = SmallRng::seed_from_u64(5);
            let seeds = [settings.hash_seed(&mut rng), settings.hash_seed(&mut rng)];
            match case["expected"]["seed"].as_u64() {
                Some(wanted) => assert_eq!(seeds, [wanted; 2]),
                None => assert_ne!(seeds[0], seeds[1]),
            }
        }
    }
}

#[test]
fn recorded_evictions_hold() {
    let cases = cases("prefix-cache/lru");
    assert_eq!(cases.len(), 2);
    for case in cases.iter().flat_map(|case| Profile::ALL.map(|profile| (case, profile))) {
        let (case, profile) = case;
        let input = &case["input"];
        let settings = PrefixSettings {
            max_blocks: input["capacity"].as_u64().unwrap() as usize,
            eviction_duration_ms: input["ttl_s"].as_u64().unwrap_or(100) * 1_000,
            ..Settings::new(profile).prefix
        };
        let mut table = PrefixTable::new(&settings);
        let number = |op: &Value| op[1].as_str().unwrap()[3..].parse::<u64>().unwrap();
        let (mut now_ms, mut found) = (10_000, Vec::new());
        for op in input["ops"].as_array().unwrap() {
            match op[0].as_str().unwrap() {
                "put" => table.put(0, number(op), Worker::new(number(op), 0), now_ms),
                "get" => {
                    found.push(table.has(0, number(op)).then(|| format!("value{}", number(op))))
                }
                "advance_s" => now_ms += (op[1].as_f64().unwrap() * 1_000.0) as u64,
                "evict" => table.expire(now_ms),
                other => panic!("{other}"),
            }
        }
        assert_eq!(serde_json::to_value(found).unwrap(), case["expected"]["get_results"]);
    }
}

#[test]
fn recorded_buckets_hold() {
    let cases = cases("prefix-cache/metrics");
    assert_eq!(cases.len(), 1);
    let percents = cases[0]["input"]["match_percent"].as_array().unwrap().iter();
    let wanted = cases[0]["expected"]["bucket"].as_array().unwrap();
    assert_eq!(percents.len(), wanted.len());
    for (percent, wanted) in percents.zip(wanted) {
        let bucket = match_percent_bucket(percent.as_u64().unwrap() as u32);
        assert_eq!(BUCKETS[bucket].1, wanted);
    }
}

#[test]
fn the_recorded_match_of_synchronised_hashes_holds() {
    let cases = cases("kv-sync/match");
    assert_eq!(cases.len(), 1);
    let input = &cases[0]["input"];
    let settings = settings(Profile::AibrixCompat, &input["block_size_bytes"]);
    let hasher = BlockHasher::new(&settings, 0);
    let mut table = PrefixTable::new(&settings);
    let (pod, model) = (Worker::new(1, 0), input["model"].as_str().unwrap());
    let text: Vec<u8> = (0..=255).collect();
    let mut hashes = Vec::new();
    let steps = input["steps"].as_array().unwrap().iter();
    for (step, wanted) in steps.zip(cases[0]["expected"]["matched"].as_array().unwrap()) {
        if step[0] == "add" {
            table.record(model, &hashes, pod, 0);
            continue;
        }
        hashes = hasher.chain(&text[..step[1].as_u64().unwrap() as usize]);
        let mut percents = [None];
        table.matches(model, &hashes, [pod].into_iter(), &[true], 0, &mut percents);
        assert_eq!(percents[0].map(u64::from), wanted["pod1"].as_u64());
    }
}

#[test]
fn the_recorded_run_holds() {
    let cases = cases("prefix-cache/e2e");
    assert_eq!(cases.len(), 1);
    let input = &cases[0]["input"];
    for seed in 0..100 {
        let compat = Settings::new(Profile::AibrixCompat);
        assert_eq!(compat.prefix.imbalance_abs_count, input["imbalance_abs_count"]);
        assert_eq!(compat.prefix.standard_deviation_factor, input["std_dev_factor"]);
        assert_eq!(compat.prefix.block_size, input["block_size_bytes"]);
        let mut rng = SmallRng::seed_from_u64(seed);
        let policy = registry::build("prefix-cache", &compat, &mut rng).unwrap();
        let mut running = vec![0; input["pods"].as_array().unwrap().len()];
        let mut known = BTreeMap::<String, usize>::new();
        let (mut last, mut terms) = (0, Vec::new());
        let steps = input["steps"].as_array().unwrap().iter();
        for (step, wanted) in steps.zip(cases[0]["expected"]["steps"].as_array().unwrap()) {
            let text = step.as_str().unwrap();
            if text.starts_with("(add 6") {
                running[last] += 6;
                continue;
            }
            let list: Vec<_> =
                running.iter().enumerate().map(|(at, &count)| candidate(at, Some(count))).collect();
            let candidates = Candidates::new(&list);
            let context = Context { prompt: text.as_bytes(), ..context(0) };
            policy.prepare(&context).unwrap();
            let choice = policy.choose(&context, &candidates, &mut terms, &mut rng).unwrap();
            policy.routed(&context, &candidates, &choice);
            last = choice.index;
            running[last] += 1;
            if let Some(name) = wanted["pod"].as_str() {
                let name = name.split(' ').next().unwrap();
                let pod = *known.entry(name.into()).or_insert(last);
                assert_eq!(pod, last, "seed {seed}, {text}: {name}");
            }
            let list = |key: &str| wanted[key].as_array().cloned().unwrap_or_default();
            for other in list("must_differ_from") {
                assert_ne!(known[other.as_str().unwrap()], last, "seed {seed}, {text}");
            }
            let may = list("pod_in");
            let is_one = |name: &Value| known[name.as_str().unwrap()] == last;
            assert!(may.is_empty() || may.iter().any(is_one), "seed {seed}, {text}");
        }
        assert_eq!(known.len(), 4);
    }
}
