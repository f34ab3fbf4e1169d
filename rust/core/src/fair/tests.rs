//! Recorded cases of the paper's artifact, and what a queue promises one call at a time.
#![allow(clippy::unwrap_used)]

mod bound;
mod group;
mod line;
mod server;
mod twin;

use serde_json::Value;

use super::ready::{Client, ROOT};
use super::*;
use crate::error::Error;

/// Statistics of one client.
#[derive(Debug, Clone, Copy, PartialEq)]
struct ClientStats<'a> {
    /// Its name; `""` for all clients without one.
    client: &'a str,
    /// Weighted service, including raises.
    counter: f64,
    /// Its weight.
    weight: f64,
    /// Waiting requests.
    queued: usize,
    /// Admitted and unfinished requests.
    running: usize,
}

/// What tests see of a queue besides its answers.
impl<T> FairQueue<T> {
    /// Whether the queue is empty.
    fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Statistics of every client, in no particular order.
    fn clients(&self) -> impl Iterator<Item = ClientStats<'_>> {
        self.clients.all().map(|client| ClientStats {
            client: &client.name,
            counter: self.told(client),
            weight: client.weight,
            queued: client.queue.len(),
            running: client.running,
        })
    }

    /// The counter of `client`; `None` for one that is not remembered.
    fn counter<'a>(&self, client: impl Into<ClientName<'a>>) -> Option<f64> {
        let slot = self.clients.slot(client.into())?;
        Some(self.told(self.clients.at(slot)))
    }

    /// Tokens that the next answer to `client` is expected to have.
    fn predicted<'a>(&self, client: impl Into<ClientName<'a>>) -> f64 {
        let slot = self.clients.slot(client.into());
        slot.map_or(0.0, |slot| self.clients.at(slot).predictor.length())
    }

    fn set_counter(&mut self, client: &str, counter: f64) {
        let known = self.clients.slot(client.into());
        let slot = known.unwrap_or_else(|| self.clients.add(client.into(), 0.0, 1.0));
        self.clients.change(slot, |client| client.counter = counter);
    }

    /// The counter of a client; within a group, among those of the group.
    fn told(&self, client: &Client<T>) -> f64 {
        let floor = if client.parent == ROOT { self.floor } else { 0.0 };
        client.counter.max(floor)
    }
}

fn config(discipline: Discipline) -> FairConfig {
    FairConfig { discipline, ..FairConfig::default() }
}

fn queue(discipline: Discipline) -> FairQueue<u32> {
    FairQueue::new(config(discipline)).unwrap()
}

fn cost(input_tokens: u64) -> Cost {
    Cost { input_tokens, ..Cost::default() }
}

/// Have a request wait, and find it still without limits.
fn push(queue: &mut FairQueue<u32>, client: &str, item: u32, cost: Cost) -> Ticket {
    queue.push(client, item, cost, Standing::default(), 0).unwrap()
}

fn pop(queue: &mut FairQueue<u32>) -> Option<(Grant, u32)> {
    queue.pop(0, |_| true).map(|granted| (granted.grant, granted.item))
}

fn cases(area: &str) -> Vec<Value> {
    let text = include_str!("../../../../tests/vectors/policy_cases.json");
    let cases: Vec<Value> = serde_json::from_str(text).unwrap();
    let wanted = |case: &Value| case["system"] == "vtc-paper" && case["area"] == area;
    cases.into_iter().filter(wanted).collect()
}

#[test]
fn recorded_counters_hold() {
    let cases = cases("counter");
    assert_eq!(cases.len(), 1);
    for case in &cases {
        let mut queue = queue(Discipline::VtcFair);
        let weight = case["input"]["client_weight"].as_f64().unwrap();
        queue.set_weight("a", weight).unwrap();
        let mut grant = None;
        let mut after = Vec::new();
        for event in case["input"]["events"].as_array().unwrap() {
            match event[0].as_str().unwrap() {
                "admit" => {
                    push(&mut queue, "a", 1, cost(event[1].as_u64().unwrap()));
                    grant = pop(&mut queue).map(|(grant, _)| grant);
                }
                "token" => queue.tokens(grant.unwrap(), 1),
                other => panic!("{other}"),
            }
            after.push(queue.counter("a").unwrap());
        }
        let wanted = case["expected"]["counter_after_each"].as_array().unwrap();
        assert_eq!(after, wanted.iter().map(|one| one.as_f64().unwrap()).collect::<Vec<_>>());
    }
}

#[test]
fn recorded_lifts_hold() {
    let cases = cases("counter-lift");
    assert_eq!(cases.len(), 3);
    for case in &cases {
        let mut queue = queue(Discipline::VtcFair);
        let input = &case["input"];
        for (client, count) in input["queued"].as_object().unwrap() {
            for _ in 0..count.as_u64().unwrap() {
                push(&mut queue, client, 1, cost(1));
            }
        }
        for (client, counter) in input["counters"].as_object().unwrap() {
            queue.set_counter(client, counter.as_f64().unwrap());
        }
        push(&mut queue, input["arrival"].as_str().unwrap(), 1, cost(1));
        for (client, counter) in case["expected"].as_object().unwrap() {
            assert_eq!(queue.counter(client.as_str()), counter.as_f64(), "{}", case["id"]);
        }
    }
}

#[test]
fn recorded_predictions_hold() {
    let cases = cases("pred");
    assert_eq!(cases.len(), 2);
    for case in &cases {
        let (input, expected) = (&case["input"], &case["expected"]);
        let number = |name: &str| input[name].as_u64().unwrap();
        let mut queue = queue(Discipline::VtcPred);
        // An earlier answer is what the prediction rests on.
        push(&mut queue, "a", 1, cost(0));
        let (earlier, _) = pop(&mut queue).unwrap();
        let output_tokens = Some(number("predicted_len"));
        assert!(queue.finish(earlier, Used { output_tokens, input_tokens: None }));
        queue.set_counter("a", 0.0);
        push(&mut queue, "a", 2, cost(number("input_len")));
        let (grant, _) = pop(&mut queue).unwrap();
        let counter = |queue: &FairQueue<u32>| queue.counter("a").unwrap();
        assert_eq!(counter(&queue), expected["at_admission"].as_f64().unwrap());
        (0..number("actual_len")).for_each(|_| queue.tokens(grant, 1));
        let after = expected["after_8_tokens"].as_f64();
        after.into_iter().for_each(|after| assert_eq!(counter(&queue), after));
        assert!(queue.finish(grant, Used::default()));
        assert_eq!(counter(&queue), expected["final"].as_f64().unwrap());
    }
}

#[test]
fn recorded_averages_hold() {
    let cases = cases("pred-window");
    assert_eq!(cases.len(), 1);
    for case in &cases {
        assert_eq!(case["input"]["window"].as_f64(), Some(super::ready::WINDOW));
        let mut queue = queue(Discipline::VtcPred);
        let lengths = case["input"]["finished_lengths"].as_array().unwrap();
        let wanted = case["expected"]["predictions_after_each"].as_array().unwrap();
        assert_eq!(queue.predicted("a"), 0.0);
        for (length, wanted) in lengths.iter().zip(wanted) {
            push(&mut queue, "a", 1, cost(1));
            let (grant, _) = pop(&mut queue).unwrap();
            queue.tokens(grant, length.as_u64().unwrap());
            queue.finish(grant, Used::default());
            assert_eq!(queue.predicted("a"), wanted.as_f64().unwrap());
        }
    }
}

#[test]
fn every_case_of_the_paper_has_its_test() {
    let areas = ["counter", "counter-lift", "pred", "pred-window"];
    assert_eq!(areas.iter().map(|area| cases(area).len()).sum::<usize>(), 7);
}

#[test]
fn nobody_waiting_means_no_lift_until_somebody_has_waited() {
    let mut queue = queue(Discipline::VtcFair);
    queue.set_counter("a", 100.0);
    push(&mut queue, "c", 1, cost(1));
    assert_eq!(queue.counter("c"), Some(0.0), "nobody has ever waited");
    pop(&mut queue).unwrap();
    push(&mut queue, "a", 2, cost(5));
    let (grant, _) = pop(&mut queue).unwrap();
    queue.tokens(grant, 10);
    push(&mut queue, "b", 3, cost(1));
    assert_eq!(queue.counter("b"), Some(125.0), "where the last one that waited is now");
}

#[test]
fn cached_tokens_are_free_or_cheaper() {
    for (cached_share, wanted) in [(0.0, 40.0), (0.25, 55.0), (1.0, 100.0)] {
        let config = FairConfig { cached_share, ..FairConfig::default() };
        let mut queue = FairQueue::new(config).unwrap();
        let cost = Cost { cached_tokens: 60, ..cost(100) };
        push(&mut queue, "a", 1, cost);
        let (grant, _) = pop(&mut queue).unwrap();
        assert_eq!(queue.counter("a"), Some(wanted));
        // The engine had nothing cached, and generated more than was counted.
        let used = Used { input_tokens: Some((100, 0)), output_tokens: Some(7) };
        queue.tokens(grant, 5);
        queue.finish(grant, used);
        assert_eq!(queue.counter("a"), Some(114.0));
    }
    let config = FairConfig { cached_share: 1.5, ..FairConfig::default() };
    let error = FairQueue::<u32>::new(config).unwrap_err().to_string();
    assert_eq!(error, "cached_share must be in 0..=1, got 1.5");
}

#[test]
fn weights_divide_what_is_charged() {
    let mut queue = queue(Discipline::VtcFair);
    queue.set_weight("a", 4.0).unwrap();
    push(&mut queue, "a", 1, cost(8));
    let (grant, _) = pop(&mut queue).unwrap();
    queue.tokens(grant, 2);
    assert_eq!(queue.counter("a"), Some(3.0));
    for weight in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let error = queue.set_weight("a", weight).unwrap_err().to_string();
        assert!(error.contains("weight of client \"a\" must be finite and above 0"), "{error}");
    }
}

#[test]
fn priorities_order_a_clients_own_requests_only() {
    let mut queue = queue(Discipline::VtcFair);
    let standing = |strict_priority, score| Standing { strict_priority, score };
    queue.push("a", 1, cost(10), standing(0, 0.0), 0).unwrap();
    queue.push("b", 2, cost(10), standing(0, 0.0), 0).unwrap();
    queue.push("a", 3, cost(10), standing(0, 5.0), 0).unwrap();
    queue.push("a", 4, cost(10), standing(0, 5.0), 0).unwrap();
    queue.push("a", 5, cost(10), standing(0, -0.5), 0).unwrap();
    queue.push("a", 6, cost(10), standing(1, -9.0), 0).unwrap();
    // Both counters are 0; the request that b has waiting came before what a puts first.
    let order: Vec<u32> = std::iter::from_fn(|| pop(&mut queue)).map(|(_, item)| item).collect();
    assert_eq!(order, [2, 6, 3, 4, 1, 5]);
}

#[test]
fn what_does_not_fit_stops_the_queue() {
    let mut queue = FairQueue::new(FairConfig::default()).unwrap();
    push(&mut queue, "a", 1, cost(1));
    push(&mut queue, "b", 2, cost(1));
    assert_eq!(queue.pop(0, |&item| item != 1), None);
    assert_eq!(queue.pop(0, |&item| item == 1).map(|granted| granted.item), Some(1));
}

#[test]
fn every_limit_refuses() {
    let limits = FairConfig { max_queued: 3, max_queued_per_client: 2, ..FairConfig::default() };
    let mut queue = FairQueue::new(limits).unwrap();
    queue.max_clients = 2;
    let refused = |queue: &mut FairQueue<u32>, client: &str, item| {
        let refused = queue.push(client, item, cost(1), Standing::default(), 0).unwrap_err();
        assert!((1_000..=60_000).contains(&refused.retry_after_ms));
        (refused.refusal, refused.error.to_string())
    };
    push(&mut queue, "a", 1, cost(1));
    push(&mut queue, "a", 2, cost(1));
    let (refusal, error) = refused(&mut queue, "a", 3);
    assert_eq!(refusal, Refusal::ClientQueueFull);
    assert_eq!(error, "2 requests of client \"a\" wait, the limit (--fairness-queue-limit)");
    push(&mut queue, "b", 4, cost(1));
    let (refusal, error) = refused(&mut queue, "b", 5);
    assert_eq!(refusal, Refusal::QueueFull);
    assert_eq!(error, "3 requests wait for their turn, the limit (--max-concurrent-requests)");
    let (grant, item) = pop(&mut queue).unwrap();
    assert_eq!(item, 1);
    let (refusal, error) = refused(&mut queue, "c", 6);
    assert_eq!(refusal, Refusal::TooManyClients);
    assert_eq!(error, "2 clients have requests, the limit; try again later");
    let (refusal, _) = refused(&mut queue, &"x".repeat(257), 7);
    assert!(matches!(refusal, Refusal::Name(Error::InvalidArgument(_))), "{refusal:?}");
    let stats = queue.stats();
    assert_eq!((stats.refused_clients_total, stats.refused_names_total), (1, 1));
    // When a client is idle it makes room.
    queue.finish(grant, Used::default());
    let (grant, item) = pop(&mut queue).unwrap();
    assert_eq!(item, 4);
    queue.finish(grant, Used::default());
    push(&mut queue, "c", 8, cost(1));
    assert_eq!((queue.counter("b"), queue.stats().forgotten_clients_total), (None, 1));
}

#[test]
fn time_runs_out_and_requests_are_taken_back() {
    let mut queue =
        FairQueue::new(FairConfig { max_wait_ms: 100, ..FairConfig::default() }).unwrap();
    let mut push = |client, item, now_ms| {
        queue.push(client, item, cost(1), Standing::default(), now_ms).unwrap()
    };
    push("a", 1, 0);
    push("a", 2, 10);
    let ticket = push("b", 3, 20);
    assert!(queue.expire(99).is_empty());
    // The next call, whichever it is, finds the expired request.
    assert!(queue.pop(100, |_| false).is_none());
    assert_eq!(queue.expire(100), [1]);
    assert_eq!(queue.cancel(ticket), Some(3));
    assert_eq!(queue.cancel(ticket), None);
    assert!(queue.expire(109).is_empty());
    assert_eq!(queue.expire(110), [2]);
    assert!(queue.is_empty());
    let stats = queue.stats();
    assert_eq!((stats.expired_total, stats.cancelled_total, stats.queued), (2, 1, 0));
    assert!(queue.pop(110, |_| true).is_none());
}

#[test]
fn disciplines_have_one_name_each() {
    for discipline in Discipline::ALL {
        assert_eq!(discipline.name().parse(), Ok(discipline));
        assert_eq!(discipline.to_string().replace('-', "_").parse(), Ok(discipline));
    }
    let unknown = "wfq".parse::<Discipline>().unwrap_err().to_string();
    assert!(unknown.contains("vtc-max-fair") && unknown.contains("wfq"), "{unknown}");
}
