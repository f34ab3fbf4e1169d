//! No client takes more than its share: of memory, of places, of the threads that serve.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http_body_util::StreamBody;
use hyper::body::Frame;
use kvflash_core::policy::Policy;
use kvflash_serve::frontend::FrontendOptions;
use kvflash_serve::{Face, Http, HttpSettings};
use serde_json::json;

use super::engine::Engine;
use super::parity::tokenizing;
use super::stage::{Stage, prompt, until, with};

fn bounded(options: &mut FrontendOptions, settings: HttpSettings) {
    options.http = Http::of(settings, Face::Control).unwrap();
}

fn by_tokens(options: &mut FrontendOptions) {
    options.routing.policies.active = Arc::new(Policy::Kv);
}

/// A body of these pieces, the last of which never comes.
fn endless(pieces: Vec<Bytes>) -> axum::body::Body {
    use futures_util::StreamExt;
    let frames =
        stream::iter(pieces.into_iter().map(|data| Ok::<_, std::io::Error>(Frame::data(data))));
    axum::body::Body::new(StreamBody::new(frames.chain(stream::pending())))
}

#[tokio::test]
async fn a_body_that_crawls_takes_no_place_and_ends() {
    let stage = Stage::new(|options| options.own.max_concurrent_requests = 1);
    let _engine = stage.engine().await;
    let crawling = stage.send_raw(endless(vec![Bytes::from_static(b"{")]));
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert_eq!(stage.ask(&prompt(0..40)).await.status, 200, "the only place is free");
    stage.skip(Duration::from_secs(4)).await;
    assert!(!crawling.is_finished());
    stage.skip(Duration::from_secs(2)).await;
    let answer = crawling.await.unwrap();
    assert_eq!(answer.status, 408);
    assert!(answer.text().contains("8192 bytes per second"), "{}", answer.text());
    assert_eq!(stage.metric("bodies_refused_total{cause=\"slow\"}").await, 1.0);
}

#[tokio::test]
async fn bodies_have_a_limit_of_memory_together() {
    let stage = Stage::new(|options| {
        let settings = HttpSettings { max_buffered_bytes: 1 << 20, ..HttpSettings::default() };
        bounded(options, settings);
    });
    let _engine = stage.engine().await;
    let held = stage.send_raw(endless(vec![Bytes::from(vec![b' '; 900 << 10])]));
    stage.until_metric("buffered_bodies_bytes", f64::from(900 << 10)).await;
    let large = with(prompt(0..40), json!({ "user": "u".repeat(200 << 10) }));
    let refused = stage.ask(&large).await;
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")));
    assert!(refused.text().contains("--max-buffered-bytes"), "{}", refused.text());
    assert_eq!(stage.ask(&prompt(0..40)).await.status, 200, "small ones are served");
    held.abort();
    stage.until_metric("buffered_bodies_bytes", 0.0).await;
    assert_eq!(stage.ask(&large).await.status, 200);
    stage.until_metric("buffered_bodies_bytes", 0.0).await;
}

#[tokio::test]
async fn a_body_that_is_rewritten_counts_until_its_answer_ends() {
    let stage = Stage::new(|options| options.own.model_alias = vec!["g=m".to_owned()]);
    let mut engine = stage.engine().await.by_hand();
    let more = json!({ "model": "g", "user": "u".repeat(200 << 10) });
    let large = with(prompt(0..40), more);
    let asking = stage.send("a", large.clone());
    let asked = engine.next().await;
    let buffered = stage.metric("buffered_bodies_bytes").await;
    assert!((buffered - large.to_string().len() as f64).abs() < 1e-9, "{buffered}");
    asked.done().await;
    assert_eq!(asking.await.unwrap().status, 200);
    stage.until_metric("buffered_bodies_bytes", 0.0).await;
}

#[tokio::test]
async fn settings_and_workers_are_changed_by_small_bodies() {
    let stage = Stage::new(|_| ());
    let body = json!({ "url": format!("http://{}", "a".repeat(70_000)) });
    for path in ["/workers", "/busy_threshold"] {
        let answer = stage.post(path, &body).await;
        assert_eq!(answer.status, 413, "{path}: {}", answer.text());
        assert!(answer.text().contains("than 65536 bytes"), "{}", answer.text());
    }
}

#[tokio::test]
async fn a_prompt_is_refused_by_its_length_before_it_is_read() {
    let stage = Stage::new(by_tokens);
    // 4,096 tokens: 64 KiB of text.
    let engine = Engine::with(&[], 4_096).await;
    let engine = stage.add(engine, json!({})).await;
    let text = |bytes| json!({ "model": "m", "prompt": "a".repeat(bytes) });
    let refused = stage.ask(&text(100_000)).await;
    assert_eq!(refused.status, 400);
    for part in
        ["has 100000 bytes", "more than 65536 bytes", "max_model_len is 4096", "--max-prompt-bytes"]
    {
        assert!(refused.text().contains(part), "{}", refused.text());
    }
    let refused = stage.ask(&prompt(0..20_000)).await;
    assert_eq!(refused.status, 400, "{}", refused.text());
    assert_eq!(engine.count(), 0);
    assert_eq!(stage.ask(&text(60_000)).await.status, 200);
    // A picture does not count as text.
    let picture = json!({ "type": "image_url", "image_url": { "url": "a".repeat(100_000) } });
    let chat = json!({ "model": "m", "messages": [{ "role": "user", "content": [picture] }] });
    assert_eq!(stage.post("/v1/chat/completions", &chat).await.status, 200);
    let chat =
        json!({ "model": "m", "messages": [{ "role": "user", "content": "a".repeat(100_000) }] });
    assert_eq!(stage.post("/v1/chat/completions", &chat).await.status, 400);
}

#[tokio::test]
async fn the_limit_of_prompts_can_be_set() {
    let stage = Stage::new(|options| {
        by_tokens(options);
        options.own.max_prompt_bytes = 40_000;
    });
    let _engine = stage.engine().await;
    let text = |bytes| json!({ "model": "m", "prompt": "a".repeat(bytes) });
    assert_eq!(stage.ask(&text(50_000)).await.status, 400);
    assert_eq!(stage.ask(&text(39_000)).await.status, 200);
}

#[tokio::test]
async fn counters_hold_whatever_an_engine_says_of_itself() {
    let stage = Stage::new(|_| ());
    let engine = stage.engine().await;
    let usage = json!({
        "prompt_tokens": 40, "completion_tokens": u64::MAX,
        "prompt_tokens_details": { "cached_tokens": u64::MAX },
    });
    engine.answers(200, json!({ "choices": [], "usage": usage }));
    for _ in 0..2 {
        assert_eq!(stage.ask(&prompt(0..40)).await.status, 200);
    }
    // No more of a prompt than it has.
    stage.until_metric("tokens_total{stage=\"delivered\"}", 80.0).await;
}

#[tokio::test]
async fn a_model_that_nobody_serves_any_more_leaves_no_series_behind() {
    let stage = Stage::new(|_| ());
    let engine = stage.engine().await;
    assert_eq!(stage.ask(&prompt(0..40)).await.status, 200);
    let series = async || {
        let answer = stage.scrape().await;
        answer.lines().filter(|line| line.contains("model=\"m\"")).count()
    };
    assert!(series().await > 0);
    stage.remove(engine.id).await;
    until("the series to go", async || series().await == 0).await;
}

#[tokio::test]
async fn a_client_plants_no_warning() {
    let stage = tokenizing();
    let engine = stage.engine().await;
    engine.answers(400, json!({ "error": { "message": "messages: wrong" } }));
    let wrong = [json!("x"), json!([5]), json!([{ "role": 5, "content": "a" }]), json!([{}])];
    for messages in &wrong {
        let body = json!({ "model": "m", "messages": messages });
        let answer = stage.post("/v1/chat/completions", &body).await;
        assert_eq!(answer.status, 400, "{}", answer.text());
    }
    let refused = "untokenized_requests_total{cause=\"refused\"}";
    assert!(stage.metric(refused).await >= 1.0);
    let warnings = stage.get("/health").await["warnings"].to_string();
    assert!(!warnings.contains("chat template"), "{warnings}");
}

#[tokio::test]
async fn a_compressed_body_is_refused_by_name() {
    let stage = Stage::new(|_| ());
    let _engine = stage.engine().await;
    let answer = stage.ask_with(&[("content-encoding", "gzip")], &prompt(0..40)).await;
    assert_eq!(answer.status, 415);
    assert!(answer.text().contains("content-encoding"), "{}", answer.text());
    let answer = stage.ask_with(&[("content-encoding", "Identity")], &prompt(0..40)).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
}

#[tokio::test]
async fn a_worker_that_is_kept_is_connected_to_where_workers_may_be_now() {
    let name = format!("kvflash-kept-{}", std::process::id());
    let path = std::env::temp_dir().join(name);
    let kept = |allow: &str| {
        let (worker_allow, state_file) = (allow.to_owned(), Some(path.clone()));
        Stage::new(|options| {
            let settings = HttpSettings { worker_allow, state_file, ..HttpSettings::default() };
            bounded(options, settings);
        })
    };
    let mut engine = Engine::start(&[]).await;
    engine.url = engine.url.replace("127.0.0.1", "localhost");
    let stage = kept("127.0.0.1, ::1");
    let engine = stage.add(engine, json!({})).await;
    drop(stage);
    let asked = engine.count();
    let stage = kept("10.0.0.0/8");
    let mut error = serde_json::Value::Null;
    until("the refusal", async || {
        error = stage.get("/workers").await[0]["last_error"].take();
        !error.is_null()
    })
    .await;
    let error = error.as_str().unwrap();
    assert!(error.contains("not among the addresses of --worker-allow"), "{error}");
    assert_eq!((stage.ask(&prompt(0..40)).await.status, engine.count()), (503, asked));
    std::fs::remove_file(&path).unwrap();
}
