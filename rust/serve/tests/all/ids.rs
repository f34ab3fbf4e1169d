//! Prompts that are tokenized once: as token ids to engines that take them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvflash_core::policy::Policy;
use serde_json::{Value, json};

use super::engine::Engine;
use super::parity::{chat, folder, renderer, tokenizing};
use super::stage::{Stage, until, with};

const CHATS: &str = "/v1/chat/completions";
const SENT: &str = "prompt_tokens_sent_as_ids_total";
const KV_PARAMS: &str = "kv_transfer_params.prompt_token_ids";

fn ids_of(body: &Value, field: &str) -> Option<Vec<u64>> {
    let ids = match field {
        KV_PARAMS => &body["kv_transfer_params"]["prompt_token_ids"],
        other => &body[other],
    };
    ids.as_array().map(|ids| ids.iter().map(|id| id.as_u64().unwrap()).collect())
}

/// An engine that counts its prompt as real ones do: ids in a field that it takes, else what its text gives.
fn counting(engine: &Engine, fields: &'static [&'static str]) {
    let render = renderer();
    engine.renders(renderer());
    engine.replies(move |body| {
        let given = fields.iter().find_map(|field| ids_of(body, field));
        if given.is_none() && body["prompt"].is_array() {
            return (400, json!({ "message": "prompt must be a string" }));
        }
        let tokens = given.map_or_else(|| render(body).unwrap().len(), |ids| ids.len());
        let usage = json!({ "prompt_tokens": tokens, "completion_tokens": 1 });
        (200, json!({ "choices": [], "usage": usage }))
    });
}

/// Added, asked, and compared.
async fn join(stage: &Stage, engine: Engine) -> Engine {
    let engine = stage.add(engine, json!({})).await;
    stage.until_metric("parity_probes_total{outcome=\"compared\"}", 1.0).await;
    until("the engine to be asked", async || engine.count() == 2).await;
    // The second answer is read a moment later.
    for _ in 0..20 {
        takes(stage, &engine).await;
    }
    engine
}

/// What `/workers` says of it.
async fn takes(stage: &Stage, engine: &Engine) -> Value {
    let workers = stage.get("/workers").await;
    let worker = workers.as_array().unwrap().iter().find(|one| one["id"] == engine.id).unwrap();
    worker["token_ids"].clone()
}

async fn sent(stage: &Stage, engine: &Engine, path: &str, body: &Value) -> Value {
    let answer = stage.post(path, body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    engine.bodies().pop().unwrap()
}

#[tokio::test]
async fn each_engine_gets_ids_in_the_field_that_it_takes() {
    let fields: [(&[&str], _, _); 4] = [
        (&["prompt", KV_PARAMS], json!("prompt"), json!(KV_PARAMS)),
        (&["prompt", "input_ids"], json!("prompt"), json!("input_ids")),
        (&["prompt"], json!("prompt"), json!(null)),
        (&[], json!(null), json!(null)),
    ];
    for (fields, completions, chats) in fields {
        let stage = tokenizing();
        let engine = Engine::start(&[]).await;
        counting(&engine, fields);
        let engine = join(&stage, engine).await;
        let known = takes(&stage, &engine).await;
        assert_eq!((&known["completions"], &known["chat"]), (&completions, &chats), "{fields:?}");

        let text = json!({ "model": "m", "prompt": "Name a river", "max_tokens": 3 });
        let tokens = renderer()(&text).unwrap();
        let got = sent(&stage, &engine, "/v1/completions", &text).await;
        let mut wanted = text.clone();
        if completions != Value::Null {
            wanted["prompt"] = json!(tokens);
        }
        assert_eq!(got, wanted);

        let body = chat("Name a river");
        let tokens = renderer()(&body).unwrap();
        let got = sent(&stage, &engine, CHATS, &body).await;
        let wanted = match chats.as_str() {
            Some(KV_PARAMS) => {
                with(body, json!({ "kv_transfer_params": { "prompt_token_ids": tokens } }))
            }
            Some(field) => with(body, json!({ field: tokens })),
            None => body,
        };
        assert_eq!(got, wanted);
    }
}

#[tokio::test]
async fn tokens_that_are_sent_are_counted_and_an_engine_is_asked_once() {
    let stage = tokenizing();
    let engine = Engine::start(&[]).await;
    counting(&engine, &["prompt", KV_PARAMS]);
    let engine = join(&stage, engine).await;
    let body = chat("Name a river");
    let tokens = renderer()(&body).unwrap().len() as f64;
    for n in 1..=3 {
        sent(&stage, &engine, CHATS, &body).await;
        stage.until_metric(SENT, f64::from(n) * tokens).await;
    }
    // It is looked at again, and was asked.
    stage.skip(std::time::Duration::from_secs(3_600)).await;
    stage.until_metric("parity_probes_total{outcome=\"compared\"}", 2.0).await;
    assert_eq!(engine.count(), 2 + 3);
}

#[tokio::test]
async fn what_is_more_than_its_ids_goes_as_it_came() {
    let stage = tokenizing();
    let engine = Engine::with(&[], 400).await;
    counting(&engine, &["prompt", KV_PARAMS]);
    let engine = join(&stage, engine).await;
    for more in [
        json!({ "echo": true }),
        json!({ "prompt_logprobs": 1 }),
        json!({ "truncate_prompt_tokens": 3 }),
        json!({ "kv_transfer_params": {} }),
        json!({ "n": 2 }),
        // No adapter was compared, and these chats' variables were in no comparison.
        json!({ "reasoning_effort": "low" }),
        // The engine is to say by itself that this is too much.
        json!({ "max_tokens": 400 }),
    ] {
        let body = with(chat("Name a river"), more);
        assert_eq!(sent(&stage, &engine, CHATS, &body).await, body);
    }
    for more in [json!({ "echo": true }), json!({ "suffix": "x" })] {
        let body = with(json!({ "model": "m", "prompt": "Name a river" }), more);
        assert_eq!(sent(&stage, &engine, "/v1/completions", &body).await, body);
    }
    assert_eq!(stage.metric(SENT).await, 0.0);
}

#[tokio::test]
async fn a_form_that_was_not_compared_is_not_sent_as_ids() {
    let stage = tokenizing();
    let engine = Engine::start(&[]).await;
    counting(&engine, &["prompt", KV_PARAMS]);
    let render = renderer();
    engine.renders(move |body| render(body).filter(|_| body["tools"].is_null()));
    let engine = join(&stage, engine).await;
    let tools = json!({ "tools": [{ "type": "function", "function": { "name": "f" } }] });
    let body = with(chat("Name a river"), tools);
    assert_eq!(sent(&stage, &engine, CHATS, &body).await, body);
    let plain = sent(&stage, &engine, CHATS, &chat("Name a river")).await;
    assert!(ids_of(&plain, KV_PARAMS).is_some());
}

#[tokio::test]
async fn the_first_refusal_turns_it_off_and_loses_nothing() {
    let stage = tokenizing();
    let engine = Engine::start(&[]).await;
    counting(&engine, &["prompt", KV_PARAMS]);
    let engine = join(&stage, engine).await;
    engine.replies(|body| match ids_of(body, KV_PARAMS) {
        Some(_) => (400, json!({ "error": "kv_transfer_params.prompt_token_ids" })),
        None => (200, json!({ "choices": [] })),
    });
    let body = chat("Name a river");
    assert_eq!(sent(&stage, &engine, CHATS, &body).await, body);
    assert_eq!(engine.count(), 2 + 2);
    assert_eq!(stage.metric("token_ids_given_up_total{cause=\"refused\"}").await, 1.0);
    let warnings = stage.get("/health").await["warnings"].clone();
    assert_eq!(stage.metric("health_warnings").await, warnings.as_array().unwrap().len() as f64);
    let warnings = warnings.to_string();
    assert!(warnings.contains("it answered 400 Bad Request to token ids"), "{warnings}");
    assert_eq!(sent(&stage, &engine, CHATS, &body).await, body);
    assert_eq!(engine.count(), 2 + 3);
    let known = takes(&stage, &engine).await;
    assert_eq!((&known["chat"], &known["completions"]), (&json!(null), &json!("prompt")));
}

#[tokio::test]
async fn a_wrong_request_is_answered_as_without_ids_and_turns_nothing_off() {
    let stage = tokenizing();
    let engine = Engine::start(&[]).await;
    counting(&engine, &["prompt", KV_PARAMS]);
    let engine = join(&stage, engine).await;
    engine.replies(|body| match ids_of(body, KV_PARAMS) {
        Some(_) => (400, json!({ "error": "with ids" })),
        None => (400, json!({ "error": "bad temperature" })),
    });
    let answer = stage.post(CHATS, &chat("Name a river")).await;
    assert_eq!((answer.status, answer.json()["error"].as_str()), (400, Some("bad temperature")));
    assert_eq!(takes(&stage, &engine).await["chat"], json!(KV_PARAMS));
    stage.until_idle().await;
}

#[tokio::test]
async fn a_count_that_disagrees_turns_it_off() {
    let stage = tokenizing();
    let engine = Engine::start(&[]).await;
    counting(&engine, &["prompt", KV_PARAMS]);
    let engine = join(&stage, engine).await;
    // As text the prompt has one token more than routing counts: one request in 64 shows it.
    let (render, is_odd) = (renderer(), Arc::new(AtomicBool::new(false)));
    let odd = Arc::clone(&is_odd);
    engine.replies(move |body| {
        let given = ids_of(body, KV_PARAMS).map(|ids| ids.len());
        odd.fetch_or(given.is_none(), Ordering::SeqCst);
        let tokens = given.unwrap_or_else(|| render(body).unwrap().len() + 1);
        (200, json!({ "choices": [], "usage": { "prompt_tokens": tokens } }))
    });
    for _ in 0..64 {
        assert!(!is_odd.load(Ordering::SeqCst));
        sent(&stage, &engine, CHATS, &chat("Name a river")).await;
    }
    assert!(is_odd.load(Ordering::SeqCst));
    stage.until_metric("token_ids_given_up_total{cause=\"other_count\"}", 1.0).await;
    assert_eq!(takes(&stage, &engine).await["chat"], json!(null));
}

#[tokio::test]
async fn it_can_be_turned_off() {
    let stage = Stage::new(|options| {
        options.routing.policies.active = Arc::new(Policy::Kv);
        options.own.tokenizer = vec![folder().display().to_string()];
        options.own.send_token_ids = false;
    });
    let engine = Engine::start(&[]).await;
    counting(&engine, &["prompt", KV_PARAMS]);
    let engine = stage.add(engine, json!({})).await;
    stage.until_metric("parity_probes_total{outcome=\"compared\"}", 1.0).await;
    let body = chat("Name a river");
    assert_eq!(sent(&stage, &engine, CHATS, &body).await, body);
    assert_eq!(engine.count(), 1);
}
