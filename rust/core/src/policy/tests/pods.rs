//! Recorded cases, and what they call pods.

use std::collections::BTreeSet;

use rand::SeedableRng;
use rand::rngs::SmallRng;
use serde_json::Value;

use super::super::*;
use super::REQUEST;
use crate::ids::Worker;
use crate::load::ActiveLoad;

/// The cases of AIBrix in `area`.
pub(super) fn cases(area: &str) -> Vec<Value> {
    all().into_iter().filter(|case| case["area"] == area).collect()
}

pub(super) fn all() -> Vec<Value> {
    let text = include_str!("../../../../../tests/vectors/policy_cases.json");
    let cases: Vec<Value> = serde_json::from_str(text).unwrap();
    cases.into_iter().filter(|case| case["system"] == "aibrix").collect()
}

/// Names and values of an object, in the order of the names, as the router orders its workers.
pub(super) fn pods(object: &Value) -> (Vec<String>, Vec<Value>) {
    let mut pods: Vec<(&String, &Value)> = object.as_object().unwrap().iter().collect();
    pods.sort_by_key(|&(name, _)| name);
    pods.into_iter().map(|(name, value)| (name.clone(), value.clone())).unzip()
}

pub(super) fn candidate(id: usize, requests: Option<u32>) -> Candidate {
    let load = ActiveLoad { requests: requests.unwrap_or(0), ..ActiveLoad::default() };
    Candidate::new(Worker::new(id as u64, 0), load)
}

pub(super) fn context(now_ms: u64) -> Context<'static> {
    Context::new(REQUEST, "m", now_ms)
}

pub(super) fn policy(strategy: &str, settings: &Settings) -> std::sync::Arc<dyn RoutePolicy> {
    registry::build(strategy, settings, &mut SmallRng::seed_from_u64(1)).unwrap()
}

/// Every index that `choose` gives for some seed.
pub(super) fn outcomes(mut choose: impl FnMut(&mut SmallRng) -> Option<usize>) -> BTreeSet<usize> {
    (0..200).filter_map(|seed| choose(&mut SmallRng::seed_from_u64(seed))).collect()
}

/// Assert that exactly the pods named by `wanted` come out.
pub(super) fn check(case: &Value, names: &[String], found: &BTreeSet<usize>, wanted: &Value) {
    let wanted: BTreeSet<&str> =
        wanted.as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    let found: BTreeSet<&str> = found.iter().map(|&at| names[at].as_str()).collect();
    assert_eq!(found, wanted, "{}", case["id"]);
}

/// Lowest and highest total of a client, without what has left the window since.
pub(super) fn range_at(tracker: &mut vtc_basic::TokenTracker, now_ms: u64) -> (f64, f64) {
    let _of_nobody = tracker.total("", now_ms);
    tracker.range()
}
