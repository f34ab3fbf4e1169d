//! One engine prefills, another one decodes.

use std::sync::Arc;
use std::time::Duration;

use axum::http::Method;
use kvflash_core::fair::LineOrder;
use kvflash_core::policy::{Policy, Profile, Settings, registry};
use kvflash_core::select::{QueueOptions, QueueThreshold};
use kvflash_serve::frontend::EnforceDisagg;
use serde_json::{Value, json};

use super::engine::Engine;
use super::stage::{Stage, prompt, with};

const PREFILLER: &str = "x-kvflash-prefill-worker";

pub async fn prefiller(stage: &Stage) -> Engine {
    let engine = Engine::start(&[]).await;
    engine.answers(200, json!({ "choices": [], "kv_transfer_params": { "remote_port": 9 } }));
    stage.add(engine, json!({ "role": "prefill" })).await
}

fn body() -> Value {
    with(prompt(0..64), json!({ "max_tokens": 20 }))
}

#[tokio::test]
async fn the_decode_request_carries_what_the_prefill_left() {
    let stage = Stage::new(|_| ());
    let (decode, prefill) = (stage.engine().await, prefiller(&stage).await);
    let answer = stage.ask(&body()).await;
    let prefilled_by = format!("{}:0", prefill.id);
    assert_eq!((answer.status, answer.worker()), (200, decode.id));
    assert_eq!(answer.header(PREFILLER), Some(prefilled_by.as_str()));
    let (copy, request) = (prefill.bodies().remove(0), decode.bodies().remove(0));
    assert_eq!((&copy["max_tokens"], &copy["stream"]), (&json!(1), &json!(false)));
    assert_eq!(copy["kv_transfer_params"]["do_remote_decode"], true);
    assert_eq!(request["max_tokens"], 20);
    assert_eq!(request["kv_transfer_params"], json!({ "remote_port": 9 }));
    stage.until_idle().await;
}

#[tokio::test]
async fn thresholds_of_a_model_are_those_of_its_prefill_workers_too() {
    let stage = Stage::new(|options| {
        options.routing.selector.thresholds.active_prefill_tokens = Some(40);
    });
    let (_decode, mut slow) = (stage.engine().await, prefiller(&stage).await.by_hand());
    let asking = stage.send("a", body());
    let held = slow.next().await;
    let change = json!({ "model": "m", "active_prefill_tokens_threshold": null });
    assert!(stage.ask(&body()).await.header(PREFILLER).is_none(), "it is busy");
    assert_eq!(stage.post("/busy_threshold", &change).await.status, 200);
    assert_eq!(stage.get("/busy_threshold").await["thresholds"], json!([]));
    let second = stage.send("b", body());
    for held in [held, slow.next().await] {
        held.done().await;
    }
    for asking in [asking, second] {
        asking.await.unwrap();
    }
    stage.until_idle().await;
}

#[tokio::test]
async fn thresholds_are_set_where_they_are_listed() {
    let stage = Stage::new(|_| ());
    let _prefill = prefiller(&stage).await;
    let change = json!({ "model": "m", "active_prefill_tokens_threshold": 40 });
    let answer = stage.post("/busy_threshold", &change).await;
    assert_eq!(answer.status, 200);
    let listed = stage.get("/busy_threshold").await["thresholds"].clone();
    assert_eq!(listed[0]["active_prefill_tokens_threshold"], 40, "{listed}");
}

#[tokio::test]
async fn a_prefill_that_fails_goes_to_another_and_then_the_decoder_does_all() {
    let stage = Stage::new(|_| ());
    let decode = stage.engine().await;
    let (bad, good) = (prefiller(&stage).await, prefiller(&stage).await);
    bad.answers(500, json!({ "error": "no blocks" }));
    for _ in 0..2 {
        let answer = stage.ask(&body()).await;
        assert_eq!((answer.status, answer.header(PREFILLER).is_some()), (200, true));
    }
    assert_eq!((good.count(), bad.count() >= 1), (2, true));
    good.answers(500, json!({ "error": "no blocks" }));
    let answer = stage.ask(&body()).await;
    assert_eq!((answer.status, answer.header(PREFILLER)), (200, None));
    assert!(decode.bodies()[2].get("kv_transfer_params").is_none());
    // The request itself is wrong: no other worker is tried.
    let wrong = json!({ "error": { "message": "bad prompt", "param": "prompt" } });
    good.answers(400, wrong.clone());
    bad.answers(400, wrong.clone());
    let refused = stage.ask(&body()).await;
    assert_eq!((refused.status, decode.count()), (400, 3));
    // As without a prefill worker: the engine's own words.
    for field in ["message", "param"] {
        assert_eq!(refused.json()["error"][field], wrong["error"][field]);
    }
    stage.until_idle().await;
}

#[tokio::test]
async fn a_second_prefill_of_a_request_is_no_turn_of_its_session() {
    let stage = Stage::new(|options| {
        let settings = Settings::new(Profile::Document);
        let auto = registry::build("auto", &settings, &mut rand::rng());
        options.routing.policies.active = auto.unwrap();
    });
    let decode = stage.engine().await;
    decode.answers(200, json!({ "usage": { "prompt_tokens": 64, "completion_tokens": 3 } }));
    // Both prefill the prompt, and its blocks cannot be fetched.
    let prefills = [prefiller(&stage).await, prefiller(&stage).await];
    prefills.iter().for_each(|prefill| prefill.answers(200, json!({ "choices": [] })));
    let gaps = async || {
        let page = stage.scrape().await;
        let of_pools = page.lines().filter(|line| line.starts_with("kvflash_auto_session_gaps"));
        of_pools.map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect::<Vec<f64>>()
    };
    let alone = stage.ask(&body()).await;
    assert_eq!((alone.status, alone.header(PREFILLER)), (200, None));
    assert_eq!(prefills.each_ref().map(Engine::count), [1, 1]);
    // Of those that prefill, and of those that decode.
    assert_eq!(gaps().await, [0.0, 0.0]);
    assert_eq!(stage.ask(&body()).await.status, 200);
    assert_eq!(gaps().await, [1.0, 1.0]);
}

#[tokio::test]
async fn where_it_is_enforced_nobody_decodes_alone() {
    let stage = Stage::new(|options| options.enforce_disagg = EnforceDisagg::Always);
    let decode = stage.engine().await;
    let refused = stage.ask(&body()).await;
    assert_eq!((refused.status, decode.count()), (503, 0));
    stage.until_metric("refused_requests_total{cause=\"no_prefill\"}", 1.0).await;
    let mut pinned = body();
    for (n, field) in
        ["prefill_worker_id", "decode_worker_id", "backend_instance_id"].iter().enumerate()
    {
        pinned["nvext"] = json!({ *field: 77 });
        let refused = stage.ask(&pinned).await;
        let param = format!("nvext.{field}");
        assert_eq!((refused.status, &refused.json()["error"]["param"]), (404, &json!(param)));
        stage.until_metric("refused_requests_total{cause=\"invalid\"}", n as f64 + 1.0).await;
    }
    let continued = json!({ "input": "x", "previous_response_id": "r" });
    assert_eq!(stage.post("/v1/responses", &continued).await.status, 501);
    stage.until_metric("refused_requests_total{cause=\"no_prefill\"}", 2.0).await;
    let status = async |path: &str| stage.call(Method::GET, path, &[], None).await.status;
    // Nothing says otherwise.
    let answer = stage.call(Method::GET, "/ready", &[], None).await;
    let reason = "--enforce-disagg is set, and no prefill worker is healthy";
    assert_eq!((answer.status, &answer.json()["reason"]), (503, &json!(reason)));
    let answer = stage.call(Method::GET, "/health", &[], None).await;
    assert_eq!((answer.status, &answer.json()["status"]), (503, &json!("unavailable")));
    assert!(answer.text().contains("no prefill worker is healthy"), "{}", answer.text());
    assert_eq!(stage.metric("ready").await, 0.0);
    let explained = stage.post("/explain", &body()).await;
    assert_eq!((explained.status, explained.text()), (503, refused.text()));
    let query = with(body(), json!({ "nvext": { "annotations": ["query_instance_id"] } }));
    assert_eq!(stage.ask(&query).await.status, 503);
    let prefill = prefiller(&stage).await;
    assert_eq!((status("/ready").await, status("/health").await), (200, 200));
    assert_eq!(stage.ask(&body()).await.status, 200);
    assert_eq!(stage.ask(&query).await.status, 200);
    assert_eq!(stage.post("/explain", &body()).await.status, 200);
    prefill.answers(500, json!({ "error": "no blocks" }));
    assert_eq!(stage.ask(&body()).await.status, 502);
    prefill.answers(503, json!({ "error": "busy" }));
    let busy = stage.ask(&body()).await;
    assert_eq!((busy.status, busy.header("retry-after")), (503, Some("1")), "{}", busy.text());
    assert_eq!(decode.count(), 1);
    stage.until_idle().await;
}

#[tokio::test]
async fn waits_for_a_prefill_worker_are_counted_apart() {
    let stage = Stage::new(|options| {
        let threshold = QueueThreshold { batches: 1.0, batched_tokens: 1_000 };
        let (order, limit, max_wait) = (LineOrder::Fcfs, 10, Duration::from_secs(60));
        options.routing.queue = Some(QueueOptions { threshold, order, limit, max_wait });
    });
    let (_decode, _prefill) = (stage.engine().await, prefiller(&stage).await);
    assert_eq!(stage.ask(&body()).await.status, 200);
    for name in ["queue_wait_seconds_count", "prefill_queue_wait_seconds_count"] {
        assert_eq!(stage.metric(name).await, 1.0, "{name}");
    }
    // The counts of one queue end with its workers; a sum of both would fall.
    let scrape = stage.call(Method::GET, "/metrics", &[], None).await;
    for tenant in ["default", "prefill"] {
        let row = format!(r#"queue_pending_requests{{model="m",tenant="{tenant}"}} 0"#);
        assert!(scrape.text().contains(&row), "{row}");
    }
}

#[tokio::test]
async fn a_response_is_kept_where_it_is_decoded() {
    let stage = Stage::new(|_| ());
    let (decode, prefill) = (stage.engine().await, prefiller(&stage).await);
    let body = json!({ "model": "m", "input": "hello", "store": true, "background": true });
    assert_eq!(stage.post("/v1/responses", &body).await.status, 200);
    let (copy, request) = (prefill.bodies().remove(0), decode.bodies().remove(0));
    assert_eq!((&copy["store"], copy.get("background")), (&json!(false), None));
    assert_eq!((&copy["max_output_tokens"], &copy["stream"]), (&json!(1), &json!(false)));
    assert_eq!((&request["store"], &request["background"]), (&json!(true), &json!(true)));
}

#[tokio::test]
async fn a_response_that_continues_none_is_prefilled_elsewhere() {
    let stage = Stage::new(|_| ());
    let (_decode, prefill) = (stage.engine().await, prefiller(&stage).await);
    for (before, is_prefilled) in [(Value::Null, true), (json!("resp_1"), false)] {
        let body = json!({ "model": "m", "input": "hello", "previous_response_id": before });
        let answer = stage.post("/v1/responses", &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(answer.header(PREFILLER).is_some(), is_prefilled, "{before}");
    }
    assert_eq!(prefill.count(), 1);
}

#[tokio::test]
async fn a_prompt_that_is_prefilled_elsewhere_is_no_work_for_its_decoder() {
    let stage = Stage::new(|options| options.routing.policies.active = Arc::new(Policy::Kv));
    let mut decode = stage.engine().await.by_hand();
    let mut prefill = prefiller(&stage).await.by_hand();
    let asking = stage.send("a", body());
    let asked = prefill.next().await;
    let load = |id: u64| format!("worker_active_prefill_tokens{{worker=\"{id}:0\"}}");
    assert_eq!(stage.metric(&load(prefill.id)).await, 64.0);
    assert_eq!(stage.metric(&load(decode.id)).await, 0.0);
    asked.answer(200, &json!({ "kv_transfer_params": { "remote_port": 9 } })).await;
    let asked = decode.next().await;
    for worker in [prefill.id, decode.id] {
        assert_eq!(stage.metric(&load(worker)).await, 0.0);
    }
    asked.done().await;
    assert_eq!(asking.await.unwrap().status, 200);
    stage.until_idle().await;
}
