//! The load of requests at their workers, and the busy thresholds.

use std::sync::Arc;

use axum::http::Method;
use kvflash_core::policy::Policy;
use serde_json::json;

use super::stage::{Stage, prompt, with};

const PREFILL: &str = "worker_active_prefill_tokens{worker=\"1:0\"}";
const BLOCKS: &str = "worker_active_blocks{worker=\"1:0\"}";

#[tokio::test]
async fn a_prompt_counts_until_the_first_token_and_its_blocks_until_the_end() {
    let stage = Stage::new(|options| options.routing.policies.active = Arc::new(Policy::Kv));
    let mut engine = stage.engine().await.by_hand();
    let asking = stage.send("a", with(prompt(0..64), json!({ "stream": true })));
    let mut asked = engine.next().await;
    assert_eq!((stage.metric(PREFILL).await, stage.metric(BLOCKS).await), (64.0, 4.0));
    asked.begin().await;
    asked.event("{\"n\": 1}").await;
    stage.until_metric(PREFILL, 0.0).await;
    assert_eq!(stage.metric(BLOCKS).await, 4.0);
    asked.end().await;
    assert_eq!(asking.await.unwrap().status, 200);
    stage.until_idle().await;
    assert_eq!(stage.metric(BLOCKS).await, 0.0);
}

/// Images have no text: 4 bytes a token is for the rest.
#[tokio::test]
async fn an_image_in_a_request_is_no_text_of_its_prompt() {
    let stage =
        Stage::new(|options| options.routing.policies.active = Arc::new(Policy::LeastLoaded));
    let mut engine = stage.engine().await.by_hand();
    let data = "A".repeat(2_000_000);
    let source = json!({ "type": "base64", "media_type": "image/png", "data": &data });
    let url = format!("data:image/png;base64,{data}");
    for (path, image) in [
        ("/v1/chat/completions", json!({ "type": "image_url", "image_url": { "url": &url } })),
        ("/v1/messages", json!({ "type": "image", "source": source })),
        ("/v1/responses", json!({ "type": "input_image", "image_url": &url })),
    ] {
        let text = json!({ "type": "text", "text": "x".repeat(4_000) });
        let said = json!([{ "role": "user", "content": [text, image] }]);
        let field = if path == "/v1/responses" { "input" } else { "messages" };
        let asking = stage.send_to(path, json!({ "model": "m", field: said }));
        let asked = engine.next().await;
        let tokens = stage.metric(PREFILL).await;
        assert!((1_000.0..1_200.0).contains(&tokens), "{path}: {tokens}");
        asked.done().await;
        assert_eq!(asking.await.unwrap().status, 200);
    }
}

#[tokio::test]
async fn the_less_loaded_worker_is_chosen() {
    let stage =
        Stage::new(|options| options.routing.policies.active = Arc::new(Policy::LeastLoaded));
    let mut slow = stage.engine().await.by_hand();
    let asking = stage.send("a", prompt(0..640));
    let asked = slow.next().await;
    let other = stage.engine().await;
    for n in 0..4 {
        assert_eq!(stage.ask(&prompt(n..n + 40)).await.worker(), other.id);
    }
    asked.done().await;
    assert_eq!(asking.await.unwrap().status, 200);
}

#[tokio::test]
async fn busy_workers_get_nothing_and_none_left_is_a_503() {
    let stage = Stage::new(|options| {
        options.routing.policies.active = Arc::new(Policy::Kv);
        options.routing.selector.thresholds.active_prefill_tokens = Some(100);
    });
    let mut engine = stage.engine().await.by_hand();
    // As much as the threshold is not above it.
    let first = stage.send("a", prompt(0..100));
    let held = engine.next().await;
    let second = stage.send("b", prompt(1_000..1_001));
    let other = engine.next().await;
    assert_eq!(stage.metric(PREFILL).await, 101.0);
    let refused = stage.ask(&prompt(0..40)).await;
    assert_eq!((refused.status, refused.header("retry-after")), (503, Some("1")));
    assert_eq!(stage.metric("refused_requests_total{cause=\"all_busy\"}").await, 1.0);
    let page = stage.call(Method::GET, "/metrics", &[], None).await;
    let unseen = "kvflash_refused_requests_total{cause=\"no_worker\"} 0\n";
    assert!(page.text().contains(unseen), "a rate would miss the first");
    let free = stage.engine().await;
    for n in 0..3 {
        assert_eq!(stage.ask(&prompt(n..n + 40)).await.worker(), free.id);
    }
    let pinned = with(prompt(0..40), json!({ "nvext": { "backend_instance_id": engine.id } }));
    assert_eq!(stage.ask(&pinned).await.status, 503);
    // Without the threshold it may have more.
    let change = json!({ "model": "m", "active_prefill_tokens_threshold": null });
    assert_eq!(stage.post("/busy_threshold", &change).await.status, 200);
    let third = stage.send("c", pinned);
    engine.next().await.done().await;
    held.done().await;
    other.done().await;
    for asking in [first, second, third] {
        assert_eq!(asking.await.unwrap().status, 200);
    }
    stage.until_idle().await;
}
