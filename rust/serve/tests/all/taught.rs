//! Chats that nobody makes into tokens: matched by what engines told with their answers to earlier turns.

use std::sync::Arc;

use kvflash_core::policy::Policy;
use kvflash_serve::{Key, Role};
use serde_json::{Value, json};

use super::engine::Engine;
use super::stage::{Answer, Stage, until, with};

const CHATS: &str = "/v1/chat/completions";
const UNTOLD: &str = "untokenized_requests_total{cause=\"tokenize_refused\"}";
const LEARNED: &str = "taught_prompts_total{outcome=\"learned\"}";
const MATCHED: &str = "taught_prompts_total{outcome=\"matched\"}";
const CORRECTED: &str = "taught_prompts_total{outcome=\"corrected\"}";

fn kv() -> Stage {
    Stage::new(|options| options.routing.policies.active = Arc::new(Policy::Kv))
}

/// A prompt as this engine's template writes it, a token a byte: each message, and what an answer begins with.
fn ids_of(body: &Value) -> Vec<u32> {
    let mut ids = Vec::new();
    for message in body["messages"].as_array().unwrap() {
        ids.extend([1, u32::from(message["role"].as_str().unwrap().as_bytes()[0])]);
        ids.extend(message["content"].as_str().unwrap().bytes().map(u32::from));
        ids.push(2);
    }
    ids.extend([1, 97]);
    ids
}

/// vLLM's answer: lists that were not asked for are null.
fn answer(body: &Value, ids: &[u32]) -> Value {
    let is_asked = body["return_token_ids"] == true;
    let told = |ids: &[u32]| if is_asked { json!(ids) } else { Value::Null };
    json!({
        "choices": [{ "index": 0, "message": { "role": "assistant", "content": "b" }, "token_ids": told(&[98]) }],
        "usage": { "prompt_tokens": ids.len(), "completion_tokens": 1 },
        "prompt_token_ids": told(ids),
    })
}

/// An engine that tells no tokens beforehand.
async fn silent(stage: &Stage, adapters: &[&str]) -> Engine {
    let engine = Engine::start(adapters).await;
    engine.renders(|_| None);
    engine.replies(|body| (200, answer(body, &ids_of(body))));
    stage.add(engine, json!({})).await
}

/// The `turns`-th request of a conversation, its messages 200 bytes each.
fn turn(name: &str, turns: usize) -> Value {
    let message = |n: usize| {
        let role = if n.is_multiple_of(2) { "user" } else { "assistant" };
        json!({ "role": role, "content": format!("{name} {n} ").repeat(100)[..200] })
    };
    let messages: Vec<Value> = (0..2 * turns - 1).map(message).collect();
    json!({ "model": "m", "messages": messages, "max_tokens": 1 })
}

async fn post(stage: &Stage, body: &Value) -> Answer {
    let answer = stage.post(CHATS, body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer
}

/// What would be decided for it: how its tokens were found, and its blocks that are known.
async fn explained(stage: &Stage, body: &Value) -> (String, u64) {
    let told = post_to(stage, "/explain", body).await;
    let blocks = told["request_blocks"].as_u64().unwrap();
    (told["prompt_source"].as_str().unwrap().to_owned(), blocks)
}

async fn post_to(stage: &Stage, path: &str, body: &Value) -> Value {
    let answer = stage.post(path, body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

#[tokio::test]
async fn the_next_turn_goes_where_the_last_one_was() {
    let stage = kv();
    let engines = [silent(&stage, &[]).await, silent(&stage, &[]).await];
    let first = post(&stage, &turn("a", 1)).await;
    assert_eq!(first.json(), answer(&json!({}), &ids_of(&turn("a", 1))), "as if nobody had asked");
    let of_first = engines.iter().find(|one| one.id == first.worker()).unwrap();
    let asked = with(turn("a", 1), json!({ "return_token_ids": true }));
    assert_eq!(of_first.bodies(), [asked]);
    assert_eq!((stage.metric(UNTOLD).await, stage.metric(LEARNED).await), (1.0, 1.0));
    // 205 tokens, but for the 32 that might be others now.
    assert_eq!(explained(&stage, &turn("a", 2)).await, ("taught".to_owned(), 10));
    assert_eq!(explained(&stage, &turn("b", 2)).await, ("unknown".to_owned(), 0));

    let second = stage.post_with(CHATS, &[("x-request-id", "two")], &turn("a", 2)).await;
    assert_eq!(second.status, 200);
    assert_eq!(stage.get("/why/two").await["decisions"][0]["prompt_source"], "taught");
    // Others come between; the third turn finds what the second one left.
    for name in ["b", "c", "d"] {
        post(&stage, &turn(name, 1)).await;
    }
    let third = post(&stage, &turn("a", 3)).await;
    assert_eq!((third.worker(), third.overlap()), (second.worker(), 10));
    let told = explained(&stage, &turn("a", 4)).await;
    assert_eq!(told, ("taught".to_owned(), (5 * 203 + 2 - 32) / 16));
    assert_eq!(stage.metric(CORRECTED).await, 0.0);
    assert!(
        stage.metric(MATCHED).await >= 2.0 && stage.metric("taught_cache_bytes").await > 4_000.0
    );
    let workers = stage.get("/workers").await;
    let of_first = workers.as_array().unwrap().iter().find(|one| one["id"] == first.worker());
    assert_eq!(of_first.unwrap()["tells_token_ids"], true);
}

#[tokio::test]
async fn a_stream_tells_with_its_first_event_and_its_client_sees_no_ids() {
    let stage = kv();
    let mut engine = silent(&stage, &[]).await.by_hand();
    let body = with(turn("a", 1), json!({ "stream": true }));
    let client = stage.send_to(CHATS, body.clone());
    let mut asked = engine.next().await;
    assert_eq!(asked.body["return_token_ids"], true);
    asked.begin().await;
    let ids = json!(ids_of(&body));
    asked
        .event(&format!(r#"{{"choices":[{{"index":0,"delta":{{"role":"assistant"}}}}],"prompt_token_ids":{ids}}}"#))
        .await;
    asked
        .event(r#"{"choices":[{"index":0,"delta":{},"token_ids":[7],"finish_reason":null}]}"#)
        .await;
    // Known before the answer is over.
    until("the prompt to be learned", async || stage.metric(LEARNED).await > 0.0).await;
    asked.event(r#"{"choices":[{"index":0,"delta":{"content":"b"},"token_ids":[8]}]}"#).await;
    asked.end().await;
    let seen = [
        r#"data: {"choices":[{"index":0,"delta":{"role":"assistant"}}],"prompt_token_ids":null}"#,
        r#"data: {"choices":[{"index":0,"delta":{"content":"b"},"token_ids":null}]}"#,
        "data: [DONE]\n\n",
    ];
    assert_eq!(client.await.unwrap().text(), seen.join("\n\n"));
    assert_eq!(explained(&stage, &turn("a", 2)).await, ("taught".to_owned(), 10));
}

#[tokio::test]
async fn the_first_refusal_ends_it_and_loses_nothing() {
    let stage = kv();
    let engine = silent(&stage, &[]).await;
    engine.replies(|body| match &body["return_token_ids"] {
        Value::Null => (200, answer(body, &ids_of(body))),
        _ => (400, json!({ "error": "return_token_ids: extra fields not permitted" })),
    });
    for asked in [2, 1] {
        let before = engine.count();
        post(&stage, &turn("a", 1)).await;
        assert_eq!(engine.count() - before, asked);
        assert_eq!(engine.bodies().pop().unwrap(), turn("a", 1));
    }
    assert_eq!(stage.metric("taught_given_up_total{cause=\"refused\"}").await, 1.0);
    assert_eq!(stage.get("/workers").await[0]["tells_token_ids"], false);
    // What is wrong with or without it is no reason.
    let other = silent(&stage, &[]).await;
    other.answers(400, json!({ "error": "bad temperature" }));
    stage.remove(engine.id).await;
    assert_eq!(stage.post(CHATS, &turn("a", 1)).await.status, 400);
    assert_eq!(stage.get("/workers").await[0]["tells_token_ids"], Value::Null);
}

#[tokio::test]
async fn an_engine_whose_answer_has_no_ids_is_not_asked_again() {
    let stage = kv();
    let engine = silent(&stage, &[]).await;
    let ask = async || {
        post(&stage, &turn("a", 1)).await;
        engine.bodies().pop().unwrap()["return_token_ids"].clone()
    };
    // An answer that only has an error says nothing of it.
    engine.answers(200, json!({ "error": { "message": "out of memory" } }));
    assert_eq!(ask().await, true);
    engine.answers(200, json!({ "choices": [{ "message": { "content": "prompt_token_ids" } }] }));
    assert_eq!(ask().await, true);
    assert_eq!(ask().await, Value::Null);
    assert_eq!(stage.metric("taught_given_up_total{cause=\"absent\"}").await, 1.0);
    assert_eq!(stage.metric(LEARNED).await, 0.0);
}

#[tokio::test]
async fn a_client_that_asks_itself_gets_the_ids() {
    let stage = kv();
    let engine = silent(&stage, &[]).await;
    let body = with(turn("a", 1), json!({ "return_token_ids": true }));
    let told = post(&stage, &body).await;
    assert_eq!(told.json(), answer(&body, &ids_of(&body)));
    assert_eq!(engine.bodies(), [body]);
    assert_eq!(explained(&stage, &turn("a", 2)).await.0, "taught");
    let not = with(turn("b", 1), json!({ "return_token_ids": false }));
    assert_eq!(post(&stage, &not).await.json()["prompt_token_ids"], Value::Null);
    assert_eq!(explained(&stage, &turn("b", 2)).await.0, "taught");
}

#[tokio::test]
async fn what_shares_no_cache_or_no_template_is_not_taught() {
    let stage = kv();
    let _engine = silent(&stage, &["sql"]).await;
    post(&stage, &turn("a", 1)).await;
    let next = turn("a", 2);
    for more in [
        json!({ "model": "sql" }),
        json!({ "cache_salt": "s" }),
        json!({ "tools": [{ "type": "function", "function": { "name": "f" } }] }),
        json!({ "chat_template_kwargs": { "enable_thinking": false } }),
        json!({ "reasoning_effort": "low" }),
        json!({ "a_field_of_tomorrow": 1 }),
        json!({ "truncate_prompt_tokens": 7 }),
    ] {
        assert_eq!(
            explained(&stage, &with(next.clone(), more.clone())).await.0,
            "unknown",
            "{more}"
        );
    }
    for more in [
        json!({ "temperature": 0.5, "max_tokens": 9, "user": "u" }),
        json!({ "stream": true, "stream_options": { "include_usage": true } }),
    ] {
        assert_eq!(
            explained(&stage, &with(next.clone(), more.clone())).await.0,
            "taught",
            "{more}"
        );
    }
    // Not the same bytes.
    let mut other = next.clone();
    other["messages"][0]["content"] = json!("x");
    assert_eq!(explained(&stage, &other).await.0, "unknown");
    let key = Key::new("a", Role::Client);
    let of_key = async || {
        let told = stage.post_as(&key, "/explain", &[], &next).await.json();
        told["prompt_source"].as_str().unwrap().to_owned()
    };
    assert_eq!(of_key().await, "unknown", "another tenant");
    assert_eq!(stage.post_as(&key, CHATS, &[], &turn("a", 1)).await.status, 200);
    assert_eq!(of_key().await, "taught");
}

#[tokio::test]
async fn a_template_that_writes_an_earlier_turn_anew_is_noticed() {
    let stage = kv();
    let engine = silent(&stage, &[]).await;
    post(&stage, &turn("a", 1)).await;
    assert_eq!(explained(&stage, &turn("a", 2)).await.1, 10);
    // From the 64th token on it is another prompt now.
    engine.replies(|body| {
        let mut ids = ids_of(body);
        if body["messages"].as_array().unwrap().len() > 1 {
            ids.remove(63);
        }
        (200, answer(body, &ids))
    });
    post(&stage, &turn("a", 2)).await;
    assert_eq!(stage.metric(CORRECTED).await, 1.0);
    let mut branch = turn("a", 2);
    branch["messages"][2]["content"] = json!("something else");
    assert_eq!(explained(&stage, &branch).await, ("taught".to_owned(), 3));
    post(&stage, &branch).await;
    assert_eq!(stage.metric(CORRECTED).await, 1.0, "no more was promised than is true");
}

#[tokio::test]
async fn it_can_be_turned_off() {
    let stage = Stage::new(|options| {
        options.routing.policies.active = Arc::new(Policy::Kv);
        options.own.taught_cache = 0;
    });
    let engine = silent(&stage, &[]).await;
    let body = with(turn("a", 1), json!({ "return_token_ids": true }));
    for body in [turn("a", 1), body] {
        post(&stage, &body).await;
        assert_eq!(engine.bodies().pop().unwrap(), body);
    }
    assert_eq!(explained(&stage, &turn("a", 2)).await.0, "unknown");
    // Nor does a policy that needs no tokens ask.
    let stage = Stage::new(|_| {});
    let engine = silent(&stage, &[]).await;
    post(&stage, &turn("a", 1)).await;
    assert_eq!(engine.bodies(), [turn("a", 1)]);
}
