//! Recorded keys of the orders, and a line against a sorted list.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::Value;

use super::super::{Line, LineOrder, Standing, Wish};
use crate::error::Error;

fn wish(of: &Value) -> Wish {
    Wish {
        strict_priority: of["strict_priority"].as_u64().unwrap_or(0) as u32,
        priority_jump: of["priority_jump"].as_f64().unwrap_or(0.0),
    }
}

/// The blocks of the best eligible worker, as given in the case.
fn cached_tokens(input: &Value) -> u64 {
    let overlaps = input["overlap_blocks"].as_object().unwrap();
    let pin = input["pinned_worker"].as_u64().map(|id| id.to_string());
    let may = |id: &String| pin.as_ref().is_none_or(|pin| pin == id);
    let found = overlaps.iter().filter(|(id, _)| may(id));
    let blocks = found.map(|(_, blocks)| blocks.as_u64().unwrap()).max().unwrap_or(0);
    blocks * input["block_size"].as_u64().unwrap()
}

fn is_key(standing: Standing, key: &Value) -> bool {
    let (strict, score) = (key[0].as_u64().unwrap(), key[1].as_f64().unwrap());
    u64::from(standing.strict_priority) == strict && standing.score == score
}

#[test]
fn recorded_keys_hold() {
    let text = include_str!("../../../../../tests/vectors/queue_cases.json");
    let cases: Vec<Value> = serde_json::from_str(text).unwrap();
    assert_eq!(cases.len(), 6);
    for case in &cases {
        let (id, input, expected) = (&case["id"], &case["input"], &case["expected"]);
        let order = input["policy"].as_str().map(|name| name.parse::<LineOrder>().unwrap());
        if input["isl"].is_u64() {
            let cached = cached_tokens(input);
            let isl_tokens = input["isl"].as_u64().unwrap();
            let standing = order.unwrap().standing(&wish(input), 3.0, isl_tokens, cached);
            assert!(is_key(standing, &expected["key"]), "{id}: {standing:?}");
            continue;
        }
        let names: Vec<&String> = input.as_object().unwrap().keys().collect();
        let names: Vec<&String> = names.into_iter().filter(|name| *name != "policy").collect();
        assert_eq!(names.len(), 2, "{id}");
        // Strict priority is the same under every order.
        let orders = order.map_or(LineOrder::ALL.to_vec(), |order| vec![order]);
        for order in orders {
            let mut line = Line::new(2);
            for name in &names {
                let of = &input[name.as_str()];
                let arrival_s = of["arrival_s"].as_f64().unwrap_or(0.0);
                let standing = order.standing(&wish(of), arrival_s, 100, 0);
                if let Some(key) = expected["keys"].get(name.as_str()) {
                    assert!(is_key(standing, key), "{id} {name}: {standing:?}");
                }
                line.push(standing, 100, name.as_str()).unwrap();
            }
            let first = line.first().map(|(_, name)| *name);
            assert_eq!(first, expected["first"].as_str(), "{id} {order:?}");
        }
    }
}

#[test]
fn a_line_leaves_as_a_sorted_list_would() {
    let mut rng = SmallRng::seed_from_u64(7);
    let (mut left, mut refused) = (0, 0);
    for _ in 0..50 {
        let mut line = Line::new(20);
        // Later ones go behind their equals: a stable sort.
        let mut twin: Vec<(Standing, u64, usize)> = Vec::new();
        let mut places = Vec::new();
        for item in 0..200 {
            if rng.random_bool(0.6) {
                let strict_priority = rng.random_range(0..3);
                let score = f64::from(rng.random_range(-3..3));
                let (standing, isl_tokens) =
                    (Standing { strict_priority, score }, rng.random_range(1..100));
                match line.push(standing, isl_tokens, item) {
                    Ok(place) => {
                        places.push((place, item));
                        twin.push((standing, isl_tokens, item));
                        twin.sort_by_key(|one| std::cmp::Reverse(one.0));
                    }
                    Err(error) => {
                        assert!(matches!(error, Error::Overloaded(_)), "{error:?}");
                        assert_eq!(twin.len(), 20);
                        refused += 1;
                    }
                }
            } else if !places.is_empty() {
                let (place, item) = places.swap_remove(rng.random_range(0..places.len()));
                assert_eq!(line.remove(place), Some(item));
                assert_eq!(line.remove(place), None);
                twin.retain(|(_, _, other)| *other != item);
                left += 1;
            }
            assert_eq!(line.len(), twin.len());
            assert_eq!(line.is_empty(), twin.is_empty());
            assert_eq!(line.isl_tokens(), twin.iter().map(|(_, tokens, _)| tokens).sum::<u64>());
            let mut order = Vec::new();
            let mut next = line.first();
            while let Some((place, item)) = next {
                order.push(*item);
                next = line.after(place);
            }
            assert_eq!(order, twin.iter().map(|(_, _, item)| *item).collect::<Vec<_>>());
        }
    }
    assert!(left > 500 && refused > 50, "{left} {refused}");
}

#[test]
fn an_unknown_order_is_refused_with_those_there_are() {
    let error = "lifo".parse::<LineOrder>().unwrap_err().to_string();
    assert!(error.contains("fcfs, lcfs, wspt") && error.contains("lifo"), "{error}");
}
