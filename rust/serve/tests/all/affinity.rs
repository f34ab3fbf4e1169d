//! Where a request goes: to what is cached, where its session is, where it is pinned.

use std::sync::Arc;
use std::time::Duration;

use kvflash_core::policy::{Affinity, Policy};
use serde_json::{Value, json};

use super::engine::Engine;
use super::stage::{Answer, Stage, prompt, with};

fn kv() -> Stage {
    Stage::new(|options| options.routing.policies.active = Arc::new(Policy::Kv))
}

/// Where a prompt is expected to be held: the worker, blocks.
fn held(answer: &Answer) -> (u64, u64) {
    (answer.worker(), answer.overlap())
}

#[tokio::test]
async fn a_prompt_goes_where_its_beginning_was_sent() {
    let stage = kv();
    let _engines = [stage.engine().await, stage.engine().await, stage.engine().await];
    let first = stage.ask(&prompt(0..64)).await;
    assert_eq!((first.status, first.overlap()), (200, 0));
    let home = first.worker();
    // It goes on where it was, even if others would be next.
    let _elsewhere = stage.ask(&prompt(1_000..1_064)).await;
    assert_eq!(held(&stage.ask(&prompt(0..100)).await), (home, 4));
    assert_eq!(stage.ask(&prompt(1..65)).await.overlap(), 0);
}

#[tokio::test]
async fn a_salt_and_an_adapter_keep_prompts_apart() {
    let stage = kv();
    let _one = stage.add(Engine::start(&["a", "b"]).await, json!({})).await;
    // Four blocks, and the token that is always computed.
    let of = |more: Value| with(prompt(0..65), more);
    let plain = of(json!({}));
    let kinds = [
        of(json!({ "cache_salt": "x" })),
        of(json!({ "cache_salt": "y" })),
        of(json!({ "model": "a" })),
        of(json!({ "model": "b" })),
        of(json!({ "model": "a", "cache_salt": "x" })),
    ];
    assert_eq!(stage.ask(&plain).await.overlap(), 0);
    for kind in &kinds {
        let answer = stage.ask(kind).await;
        assert_eq!((answer.status, answer.overlap()), (200, 0), "{kind}");
    }
    for kind in kinds.iter().chain([&plain]) {
        assert_eq!(stage.ask(kind).await.overlap(), 4, "{kind}");
    }
}

#[tokio::test]
async fn an_adapter_goes_to_workers_that_have_it() {
    let stage = Stage::new(|_| ());
    let _without = stage.engine().await;
    let with_it = stage.add(Engine::start(&["a"]).await, json!({})).await;
    for n in 0..4 {
        let body = with(prompt(n..n + 40), json!({ "model": "a" }));
        assert_eq!(stage.ask(&body).await.worker(), with_it.id);
    }
    let body = with(prompt(0..40), json!({ "model": "nobody" }));
    assert_eq!(stage.ask(&body).await.status, 404);
    assert_eq!(stage.ask(&json!([])).await.status, 400);
    assert_eq!(stage.metric("refused_requests_total{cause=\"invalid\"}").await, 2.0);
}

#[tokio::test]
async fn another_name_of_a_model_goes_to_workers_that_have_it() {
    let stage = Stage::new(|_| ());
    let without = [stage.engine().await, stage.engine().await, stage.engine().await];
    let with_it = Engine::start(&[]).await;
    with_it.becomes(&["m", "m2"]);
    let with_it = stage.add(with_it, json!({})).await;
    for n in 0..4 {
        let body = with(prompt(n..n + 40), json!({ "model": "m2" }));
        assert_eq!(stage.ask(&body).await.worker(), with_it.id);
    }
    assert_eq!(without.each_ref().map(Engine::count), [0; 3]);
    with_it.health(500);
    stage.until_healthy(with_it.id, false).await;
    let refused = stage.ask(&with(prompt(0..40), json!({ "model": "m2" }))).await;
    let told = "4 registered, 3 healthy, of which 3 do not serve \"m2\"";
    assert_eq!(refused.status, 503);
    assert!(refused.json()["error"]["message"].as_str().unwrap().contains(told));
    // Both names are of one model, which a request need not name.
    let body = json!({ "prompt": [1, 2, 3] });
    assert_eq!(stage.ask(&body).await.status, 200);
}

#[tokio::test]
async fn pins_are_obeyed() {
    let stage = kv();
    let engines = [stage.engine().await, stage.engine().await, stage.engine().await];
    for engine in engines.iter().chain(&engines) {
        let body = with(prompt(0..64), json!({ "nvext": { "backend_instance_id": engine.id } }));
        assert_eq!(stage.ask(&body).await.worker(), engine.id);
    }
    let body = with(prompt(0..64), json!({ "nvext": { "backend_instance_id": 99 } }));
    assert_eq!(stage.ask(&body).await.status, 404);
    // A pinned worker that fails is not replaced.
    engines[0].closes();
    let body = with(prompt(0..64), json!({ "nvext": { "backend_instance_id": engines[0].id } }));
    assert_eq!(stage.ask(&body).await.status, 502);
    // One that fails its health check is told as the reason, not a fleet that has others.
    engines[1].health(500);
    stage.until_healthy(engines[1].id, false).await;
    let body = with(prompt(0..64), json!({ "nvext": { "backend_instance_id": engines[1].id } }));
    let refused = stage.ask(&body).await;
    let wanted = format!("the pinned worker {} is unhealthy: ", engines[1].id);
    assert!(refused.status == 503 && refused.text().contains(&wanted), "{}", refused.text());
    assert_eq!(engines.map(|engine| engine.count()), [3, 2, 2]);
}

#[tokio::test]
async fn a_question_for_the_worker_sends_nothing_and_books_nothing() {
    let stage = kv();
    let engine = stage.engine().await;
    let body = with(prompt(0..64), json!({ "nvext": { "annotations": ["query_instance_id"] } }));
    let answer = stage.ask(&body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(engine.count(), 0);
    stage.until_idle().await;
    assert_eq!(stage.ask(&prompt(0..65)).await.overlap(), 0);
}

#[tokio::test]
async fn a_session_stays_until_its_time_is_over() {
    let stage = Stage::new(|options| {
        options.routing.policies.affinity = Some(Arc::new(Affinity::new(60).unwrap()));
    });
    let _engines = [stage.engine().await, stage.engine().await, stage.engine().await];
    let session = [("x-session-key", "s")];
    let home = stage.ask_with(&session, &prompt(0..40)).await.worker();
    for n in 0..4 {
        assert_eq!(stage.ask_with(&session, &prompt(n..n + 40)).await.worker(), home);
    }
    let others = [stage.ask(&prompt(0..40)).await, stage.ask(&prompt(0..40)).await];
    assert_ne!(others[0].worker(), others[1].worker());
    stage.remove(home).await;
    let next = stage.ask_with(&session, &prompt(0..40)).await.worker();
    assert_ne!(next, home);
    assert_eq!(stage.ask_with(&session, &prompt(0..40)).await.worker(), next);
    stage.skip(Duration::from_secs(61)).await;
    let mut seen: Vec<u64> = Vec::new();
    for _ in 0..2 {
        seen.push(stage.ask_with(&session, &prompt(0..40)).await.worker());
        stage.skip(Duration::from_secs(61)).await;
    }
    assert_ne!(seen[0], seen[1], "round robin goes on for a session that is over");
}
