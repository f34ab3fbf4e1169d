//! Clients with keys: their limits, and whose turn it is.

use kvflash_core::policy::Policy;
use kvflash_serve::frontend::{FairnessOptions, Identity};
use kvflash_serve::{Key, Role};
use serde_json::json;

use super::stage::{Answer, Stage, prompt};

fn key(id: &str) -> Key {
    Key {
        id: id.to_owned(),
        role: Role::Client,
        tenant: id.to_owned(),
        rpm: None,
        tpm: None,
        concurrency: None,
        is_isolated: false,
        allow: Vec::new(),
    }
}

fn kv() -> Stage {
    Stage::new(|options| options.router.policy = Policy::Kv)
}

fn left(answer: &Answer, of: &str) -> u64 {
    answer.header(&format!("x-ratelimit-remaining-{of}")).unwrap().parse().unwrap()
}

#[tokio::test]
async fn requests_and_tokens_a_minute_are_limited_and_told() {
    let stage = kv();
    let _engine = stage.engine().await;
    let client = Key { rpm: Some(3), tpm: Some(1_000), ..key("a") };
    let first = stage.ask_as(&client, &[], &prompt(0..161)).await;
    assert_eq!((first.status, left(&first, "requests"), left(&first, "tokens")), (200, 2, 839));
    assert_eq!(first.header("x-ratelimit-limit-tokens"), Some("1000"));
    assert_eq!(first.header("x-ratelimit-reset-requests"), Some("20s"));
    // Ten blocks are cached, and one token is computed anew.
    let second = stage.ask_as(&client, &[], &prompt(0..161)).await;
    assert_eq!((second.status, left(&second, "tokens")), (200, 838));
    let third = stage.ask_as(&client, &[], &prompt(0..161)).await;
    assert_eq!(third.status, 200);
    let refused = stage.ask_as(&client, &[], &prompt(0..161)).await;
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("20")));
    assert_eq!(left(&refused, "requests"), 0);
    let error = &refused.json()["error"];
    assert_eq!(error["type"], "rate_limit_error");
    assert!(error["message"].as_str().unwrap().contains("3 requests a minute are the limit (rpm)"));
    let body = json!({ "model": "m", "max_tokens": 1, "messages": [] });
    let refused = stage.post_as(&client, "/v1/messages", &[], &body).await;
    assert_eq!((refused.status, &refused.json()["type"]), (429, &json!("error")));
    // Another client, and one without a key, are not held up.
    assert_eq!(stage.ask_as(&key("b"), &[], &prompt(0..161)).await.status, 200);
    let without = stage.ask(&prompt(0..161)).await;
    assert_eq!((without.status, without.header("x-ratelimit-limit-requests")), (200, None));
    let metrics = stage.scrape().await;
    for row in [
        "kvflash_client_requests_total{client=\"a\",outcome=\"served\"} 3",
        "kvflash_client_requests_total{client=\"a\",outcome=\"refused_requests\"} 2",
        "kvflash_client_uncached_prompt_tokens_total{client=\"a\"} 163",
        "kvflash_client_requests_in_flight{client=\"a\"} 0",
    ] {
        assert!(metrics.contains(row), "{row}");
    }
}

#[tokio::test]
async fn what_the_engine_says_it_had_cached_is_not_charged() {
    let stage = kv();
    let engine = stage.engine().await;
    let usage = json!({ "prompt_tokens": 161, "completion_tokens": 1,
                        "prompt_tokens_details": { "cached_tokens": 150 } });
    engine.answers(200, json!({ "choices": [], "usage": usage }));
    let client = Key { tpm: Some(200), ..key("a") };
    assert_eq!(left(&stage.ask_as(&client, &[], &prompt(0..161)).await, "tokens"), 39);
    stage.until_idle().await;
    let second = stage.ask_as(&client, &[], &prompt(1_000..1_161)).await;
    assert_eq!((second.status, left(&second, "tokens")), (200, 28), "200 - 11 - 161");
    // Requests that no worker answers cost nothing.
    engine.closes();
    assert_eq!(stage.ask_as(&client, &[], &prompt(2_000..2_161)).await.status, 502);
    stage.until_idle().await;
    engine.answers(200, json!({ "choices": [] }));
    stage.until_healthy(engine.id, true).await;
    let third = stage.ask_as(&client, &[], &prompt(3_000..3_010)).await;
    assert_eq!((third.status, left(&third, "tokens")), (200, 168), "200 - 11 - 11 - 10");
}

#[tokio::test]
async fn requests_at_once_are_limited_until_their_answers_end() {
    let stage = kv();
    let mut engine = stage.engine().await.by_hand();
    let client = Key { concurrency: Some(1), ..key("a") };
    let first = stage.send_as(&client, &[], prompt(0..40));
    let asked = engine.next().await;
    let refused = stage.ask_as(&client, &[], &prompt(0..40)).await;
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")));
    asked.done().await;
    assert_eq!(first.await.unwrap().status, 200);
    let second = stage.send_as(&client, &[], prompt(0..40));
    engine.next().await.done().await;
    assert_eq!(second.await.unwrap().status, 200);
    // A client that leaves takes no place with it.
    let gone = stage.send_as(&client, &[], prompt(0..40));
    let asked = engine.next().await;
    gone.abort();
    asked.gone().await;
    stage.until_idle().await;
    let last = stage.send_as(&client, &[], prompt(0..40));
    engine.next().await.done().await;
    assert_eq!(last.await.unwrap().status, 200);
}

#[tokio::test]
async fn explanations_count_like_requests() {
    let stage = kv();
    let _engine = stage.engine().await;
    let client = Key { rpm: Some(2), ..key("a") };
    for status in [200, 200, 429] {
        assert_eq!(stage.post_as(&client, "/explain", &[], &prompt(0..40)).await.status, status);
    }
}

#[tokio::test]
async fn turns_go_by_the_key_whatever_a_client_calls_itself() {
    let stage = Stage::new(|options| {
        let identity = Identity::User;
        let (queue, weights) = (Default::default(), Vec::new());
        options.fairness = Some(FairnessOptions { queue, max_running: 1, weights, identity });
    });
    let mut engine = stage.engine().await.by_hand();
    let hog = |n: u32| {
        let user = format!("fresh-{n}");
        stage.send_as(
            &key("hog"),
            &[("user", &user), ("accept-language", "hog")],
            prompt(n..n + 40),
        )
    };
    let mut asking = vec![hog(0)];
    stage.until_metric("turns_total{model=\"m\",outcome=\"granted\"}", 1.0).await;
    let waiting = "turns_waiting{model=\"m\"}";
    for n in 1..8 {
        asking.push(hog(n));
        stage.until_metric(waiting, f64::from(n)).await;
    }
    let victim = [("user", "fresh-3"), ("accept-language", "victim")];
    asking.push(stage.send_as(&key("victim"), &victim, prompt(100..140)));
    stage.until_metric(waiting, 8.0).await;
    let mut served = Vec::new();
    for _ in 0..9 {
        let asked = engine.next().await;
        served.push(asked.headers["accept-language"].clone());
        asked.done().await;
    }
    assert!(served.iter().position(|who| who == "victim").unwrap() <= 2, "{served:?}");
    for one in asking {
        assert_eq!(one.await.unwrap().status, 200);
    }
}
