//! Requests wait for a worker with room, and clients take turns.

use std::time::Duration;

use kvflash_core::fair::{FairConfig, LineOrder};
use kvflash_core::select::{QueueOptions, QueueThreshold};
use kvflash_serve::frontend::{FairnessOptions, Identity};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use super::engine::Engine;
use super::stage::{Answer, Stage, prompt, with};

/// A line before one worker that prefills one prompt at a time.
fn line(order: LineOrder, limit: usize) -> Stage {
    Stage::new(|options| {
        let threshold = QueueThreshold { batches: 0.5, batched_tokens: 20 };
        let max_wait = Duration::from_secs(60);
        options.routing.queue = Some(QueueOptions { threshold, order, limit, max_wait });
    })
}

const WAITING: &str = "queue_pending_requests{model=\"m\",tenant=\"default\"}";
const TURNS: &str = "turns_waiting{model=\"m\"}";

/// Send one and see it wait.
async fn waits(stage: &Stage, metric: &str, user: &str, body: Value) -> JoinHandle<Answer> {
    let before = stage.metric(metric).await;
    let asking = stage.send(user, body);
    stage.until_metric(metric, before + 1.0).await;
    asking
}

/// Lengths of the prompts in the order in which an engine gets them; `first` runs, `waiting` more wait.
async fn order_of(engine: &mut Engine, waiting: usize) -> Vec<usize> {
    let mut lengths = Vec::new();
    for _ in 0..=waiting {
        let asked = engine.next().await;
        lengths.push(asked.body["prompt"].as_array().unwrap().len());
        asked.done().await;
    }
    lengths
}

#[tokio::test]
async fn the_line_goes_in_its_order() {
    for (order, expected) in [
        (LineOrder::Fcfs, [40, 80, 41, 42]),
        (LineOrder::Lcfs, [40, 42, 41, 80]),
        (LineOrder::Wspt, [40, 41, 42, 80]),
    ] {
        let stage = line(order, 8);
        let mut engine = stage.engine().await.by_hand();
        let mut asking = vec![stage.send("a", prompt(0..40))];
        stage.until_metric("worker_active_requests{worker=\"1:0\"}", 1.0).await;
        for (n, length) in [80, 41, 42].into_iter().enumerate() {
            let from = 1_000 * (n as u32 + 1);
            asking.push(waits(&stage, WAITING, "a", prompt(from..from + length)).await);
            // The clock shows which one came first.
            stage.skip(Duration::from_millis(10)).await;
        }
        assert_eq!(order_of(&mut engine, 3).await, expected, "{order:?}");
        for one in asking {
            assert_eq!(one.await.unwrap().status, 200);
        }
        stage.until_idle().await;
    }
}

#[tokio::test]
async fn a_strict_priority_goes_first() {
    let stage = line(LineOrder::Fcfs, 8);
    let mut engine = stage.engine().await.by_hand();
    let mut asking = vec![stage.send("a", prompt(0..40))];
    stage.until_metric("worker_active_requests{worker=\"1:0\"}", 1.0).await;
    for (length, hints) in [
        (41, json!({})),
        (42, json!({ "strict_priority": 1 })),
        (43, json!({ "strict_priority": 2 })),
    ] {
        let body =
            with(prompt(1_000..1_000 + length), json!({ "nvext": { "agent_hints": hints } }));
        asking.push(waits(&stage, WAITING, "a", body).await);
    }
    assert_eq!(order_of(&mut engine, 3).await, [40, 43, 42, 41]);
    for one in asking {
        assert_eq!(one.await.unwrap().status, 200);
    }
}

#[tokio::test]
async fn a_full_line_and_a_long_wait_are_refused() {
    let stage = line(LineOrder::Fcfs, 1);
    let mut engine = stage.engine().await.by_hand();
    let first = stage.send("a", prompt(0..40));
    let asked = engine.next().await;
    let late = waits(&stage, WAITING, "a", prompt(1_000..1_040)).await;
    let full = stage.ask(&prompt(2_000..2_040)).await;
    assert_eq!((full.status, full.header("retry-after")), (429, Some("1")));
    stage.skip(Duration::from_secs(59)).await;
    assert!(!late.is_finished());
    stage.skip(Duration::from_secs(1)).await;
    let late = late.await.unwrap();
    assert_eq!((late.status, late.header("retry-after")), (503, Some("1")));
    stage.until_metric(WAITING, 0.0).await;
    asked.done().await;
    assert_eq!(first.await.unwrap().status, 200);
    stage.until_idle().await;
}

#[tokio::test]
async fn whoever_leaves_the_line_makes_room_in_it() {
    let stage = line(LineOrder::Fcfs, 1);
    let mut engine = stage.engine().await.by_hand();
    let first = stage.send("a", prompt(0..40));
    let asked = engine.next().await;
    let leaves = waits(&stage, WAITING, "a", prompt(1_000..1_040)).await;
    leaves.abort();
    stage.until_metric(WAITING, 0.0).await;
    let stays = waits(&stage, WAITING, "a", prompt(2_000..2_041)).await;
    asked.done().await;
    let next = engine.next().await;
    assert_eq!(next.body["prompt"].as_array().unwrap().len(), 41);
    next.done().await;
    for one in [first, stays] {
        assert_eq!(one.await.unwrap().status, 200);
    }
    stage.until_idle().await;
}

fn turns(change: impl FnOnce(&mut FairnessOptions)) -> Stage {
    Stage::new(|options| {
        let mut fairness = FairnessOptions {
            queue: FairConfig::default(),
            max_running: 1,
            weights: Vec::new(),
            identity: Identity::default(),
        };
        change(&mut fairness);
        options.fairness = Some(fairness);
    })
}

/// The users of the next `count` requests at an engine.
async fn served(engine: &mut Engine, count: usize) -> Vec<String> {
    let mut users = Vec::new();
    for _ in 0..count {
        let asked = engine.next().await;
        users.push(asked.headers["user"].clone());
        asked.done().await;
    }
    users
}

#[tokio::test]
async fn a_greedy_client_does_not_hold_up_a_modest_one() {
    let stage = turns(|_| ());
    let mut engine = stage.engine().await.by_hand();
    let mut asking = vec![stage.send("greedy", prompt(0..40))];
    stage.until_metric("turns_total{model=\"m\",outcome=\"granted\"}", 1.0).await;
    for n in 1..6 {
        asking.push(waits(&stage, TURNS, "greedy", prompt(n..n + 40)).await);
    }
    for n in 0..3 {
        asking.push(waits(&stage, TURNS, "modest", prompt(n..n + 40)).await);
    }
    let users = served(&mut engine, 9).await;
    let modest = users.iter().rposition(|user| user == "modest").unwrap();
    assert!(modest <= 6, "{users:?}");
    for one in asking {
        assert_eq!(one.await.unwrap().status, 200);
    }
    stage.until_idle().await;
}

#[tokio::test]
async fn a_client_with_a_fresh_name_for_each_request_is_one_client() {
    let stage = turns(|_| ());
    let mut engine = stage.engine().await.by_hand();
    let hog = |n: u32| {
        let (user, key) = (format!("fresh-{n}"), ("authorization", "Bearer hog"));
        stage.send_with(&[key, ("user", &user)], prompt(n..n + 40))
    };
    let mut asking = vec![hog(0)];
    stage.until_metric("turns_total{model=\"m\",outcome=\"granted\"}", 1.0).await;
    let waiting = "turns_waiting{model=\"m\"}";
    for n in 1..8 {
        asking.push(hog(n));
        stage.until_metric(waiting, f64::from(n)).await;
    }
    // Nor does it help to be called as the other one is.
    let key = ("authorization", "Bearer victim");
    asking.push(stage.send_with(&[key, ("user", "fresh-3")], prompt(100..140)));
    stage.until_metric(waiting, 8.0).await;
    let mut keys = Vec::new();
    for _ in 0..9 {
        let asked = engine.next().await;
        keys.push(asked.headers["authorization"].clone());
        asked.done().await;
    }
    let at = keys.iter().position(|key| key == "Bearer victim").unwrap();
    assert!(at <= 2, "{keys:?}");
    for one in asking {
        assert_eq!(one.await.unwrap().status, 200);
    }
}

#[tokio::test]
async fn a_client_with_a_fresh_key_for_each_request_is_one_client_of_its_address() {
    let stage = turns(|_| ());
    let mut engine = stage.engine().await.by_hand();
    let hog = |n: u32| {
        // With IPv6 a client has more addresses than it can use.
        let (address, key) = (format!("2001:db8::{n:x}"), format!("Bearer fresh-{n}"));
        stage.send_from(&address, &[("authorization", &key), ("user", "hog")], prompt(n..n + 40))
    };
    let mut asking = vec![hog(1)];
    stage.until_metric("turns_total{model=\"m\",outcome=\"granted\"}", 1.0).await;
    for n in 2..9 {
        asking.push(hog(n));
        stage.until_metric(TURNS, f64::from(n - 1)).await;
    }
    for n in 0..3 {
        let headers = [("authorization", "Bearer honest"), ("user", "honest")];
        asking.push(stage.send_from("192.0.2.7", &headers, prompt(100 + n..140 + n)));
        stage.until_metric(TURNS, f64::from(8 + n)).await;
    }
    let users = served(&mut engine, 11).await;
    let last = users.iter().rposition(|user| user == "honest").unwrap();
    assert!(last <= 6, "{users:?}");
    assert_eq!(stage.metric("turn_clients{model=\"m\"}").await, 9.0);
    for one in asking {
        assert_eq!(one.await.unwrap().status, 200);
    }
    stage.until_idle().await;
}

#[tokio::test]
async fn weights_are_shares() {
    let stage = turns(|fairness| fairness.weights = vec![("paying".to_owned(), 3.0)]);
    let mut engine = stage.engine().await.by_hand();
    let mut asking = vec![stage.send("free", prompt(0..40))];
    stage.until_metric("turns_total{model=\"m\",outcome=\"granted\"}", 1.0).await;
    for (user, count) in [("free", 8), ("paying", 12)] {
        for n in 0..count {
            asking.push(waits(&stage, TURNS, user, prompt(n..n + 40)).await);
        }
    }
    let users = served(&mut engine, 21).await;
    let paying = users[1..13].iter().filter(|user| *user == "paying").count();
    assert!((8..=10).contains(&paying), "{users:?}");
    for one in asking {
        assert_eq!(one.await.unwrap().status, 200);
    }
}

#[tokio::test]
async fn a_turn_has_a_limit_of_waiters_and_of_time() {
    let stage = turns(|fairness| {
        fairness.queue.max_queued_per_client = 1;
        fairness.queue.max_wait_ms = 60_000;
    });
    let mut engine = stage.engine().await.by_hand();
    let first = stage.send("a", prompt(0..40));
    let asked = engine.next().await;
    let late = waits(&stage, TURNS, "a", prompt(0..40)).await;
    let full = stage.ask_with(&[("user", "a")], &prompt(0..40)).await;
    assert_eq!((full.status, full.header("retry-after").is_some()), (429, true));
    stage.skip(Duration::from_secs(60)).await;
    assert_eq!(late.await.unwrap().status, 503);
    asked.done().await;
    assert_eq!(first.await.unwrap().status, 200);
    stage.until_idle().await;
}
