//! A worker is taken out of service, and comes back with what it holds.

use std::sync::Arc;

use kvflash_core::policy::Policy;
use kvflash_core::select::Overlap;
use serde_json::{Value, json};

use super::engine::Engine;
use super::stage::{Answer, BLOCK, Stage, prompt, with};

fn kv() -> Stage {
    Stage::new(|options| options.routing.policies.active = Arc::new(Policy::Kv))
}

async fn put_state(stage: &Stage, id: u64, state: &str) -> Answer {
    stage.patch(&format!("/workers/{id}"), &json!({ "state": state })).await
}

#[tokio::test]
async fn a_draining_worker_gets_nothing_new_and_shows_what_it_still_has() {
    let stage = kv();
    let mut leaving = stage.engine().await.by_hand();
    let running = stage.send("a", prompt(0..64));
    let mut asked = leaving.next().await;
    asked.begin().await;
    let other = stage.engine().await;
    let entry = put_state(&stage, leaving.id, "draining").await;
    assert_eq!(entry.status, 200, "{}", entry.text());
    assert_eq!(
        (&entry.json()["state"], &entry.json()["in_flight"]),
        (&json!("draining"), &json!(1))
    );
    // The same prompt, a pin, and many at once.
    let pin = with(prompt(0..64), json!({ "nvext": { "backend_instance_id": leaving.id } }));
    for body in [&prompt(0..64), &pin, &prompt(7..80)] {
        let answer = stage.ask(body).await;
        assert_eq!((answer.status, answer.worker()), (200, other.id));
    }
    let explained = stage.post("/explain", &pin).await.json();
    let wanted = json!({ "from": leaving.id, "by": "pin", "because": "draining" });
    assert_eq!(explained["diverted"], wanted);
    let candidates = explained["candidates"].as_array().unwrap();
    let is_draining: Vec<&Value> = candidates.iter().map(|one| &one["is_draining"]).collect();
    assert_eq!(is_draining, [&json!(false), &json!(true)]);
    let row = format!("kvflash_worker_draining{{worker=\"{}\"}} 1", leaving.id);
    assert!(stage.scrape().await.contains(&row));
    asked.end().await;
    assert_eq!(running.await.unwrap().status, 200);
    stage.until_idle().await;
    let path = format!("/workers/{}", leaving.id);
    assert_eq!(stage.get(&path).await["in_flight"], 0);
    assert_eq!(put_state(&stage, leaving.id, "active").await.json()["state"], "active");
    let _elsewhere = stage.send("a", pin);
    leaving.next().await.done().await;
}

/// SGLang reports how many ranks it has.
#[tokio::test]
async fn a_worker_that_has_more_ranks_than_were_given_stays_out_of_service() {
    let stage = Stage::new(|options| {
        options.routing.policies.active = Arc::new(Policy::Kv);
        options.routing.selector.overlap = Overlap::Events;
    });
    let engine = Engine::start(&[]).await;
    let events = json!({
        "publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657",
    });
    let told = json!({ "page_size": BLOCK, "dp_size": 2, "kv_events_config": events.to_string() });
    engine.tells("/server_info", told);
    let engine = stage.add(engine, json!({ "state": "draining" })).await;
    let entry = stage.get(&format!("/workers/{}", engine.id)).await;
    assert_eq!((&entry["dp_size"], &entry["state"]), (&json!(2), &json!("draining")));
}

#[tokio::test]
async fn blocks_of_a_worker_that_comes_back_count_again() {
    let stage = kv();
    let (one, two) = (stage.engine().await, stage.engine().await);
    let home = stage.ask(&prompt(0..65)).await.worker();
    put_state(&stage, home, "draining").await;
    let away = stage.ask(&prompt(0..65)).await;
    assert_eq!(away.worker(), one.id + two.id - home);
    put_state(&stage, home, "active").await;
    put_state(&stage, away.worker(), "draining").await;
    let back = stage.ask(&prompt(0..65)).await;
    assert_eq!((back.worker(), back.overlap()), (home, 4));
}

#[tokio::test]
async fn where_all_are_draining_requests_and_probes_hear_so() {
    let stage = kv();
    let engine = stage.engine().await;
    assert_eq!(stage.get("/ready").await["ready"], true);
    put_state(&stage, engine.id, "draining").await;
    let answer = stage.ask(&prompt(0..64)).await;
    assert_eq!(answer.status, 503);
    assert!(answer.text().contains("1 healthy, 1 draining"), "{}", answer.text());
    let ready = stage.get("/ready").await;
    assert_eq!(ready["reason"], "all healthy decode workers are draining");
    let health = stage.get("/health").await;
    assert_eq!(
        (&health["status"], &health["draining_workers"]),
        (&json!("unavailable"), &json!(1))
    );
    put_state(&stage, engine.id, "active").await;
    assert_eq!(stage.ask(&prompt(0..64)).await.status, 200);
}

#[tokio::test]
async fn what_is_no_change_of_a_worker_is_refused() {
    let stage = kv();
    let engine = stage.engine().await;
    let path = format!("/workers/{}", engine.id);
    for (path, body, status, wanted) in [
        (&*path, json!({ "state": "gone" }), 400, "state: must be active or draining"),
        (&*path, json!({ "url": "http://x" }), 400, "unknown field `url`"),
        ("/workers/99", json!({ "state": "active" }), 404, "no worker 99 is registered"),
        (
            "/workers/x",
            json!({ "state": "active" }),
            400,
            "a worker id must be a number, got \\\"x\\\"",
        ),
    ] {
        let answer = stage.patch(path, &body).await;
        assert_eq!(answer.status, status, "{path} {body}");
        assert!(answer.text().contains(wanted), "{}", answer.text());
    }
    assert_eq!(stage.get(&path).await["state"], "active");
    assert!(stage.get("/workers/99").await["error"]["message"].is_string());
}
