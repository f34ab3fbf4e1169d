//! Tokens that are made here against those of the engines: what differs is left to the engines.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use kvflash_core::policy::Policy;
use kvflash_core::text::{ChatRequest, Prompt, TextModel};
use serde_json::{Value, json};

use super::engine::Engine;
use super::stage::{Stage, until};

const HOUR: Duration = Duration::from_secs(3_600);
const COMPARED: &str = "parity_probes_total{outcome=\"compared\"}";

pub fn folder() -> PathBuf {
    // Of this run, if Cargo runs it: checkouts that share a target folder share programs, too.
    let package = std::env::var("CARGO_MANIFEST_DIR");
    let package = package.unwrap_or_else(|_| env!("CARGO_MANIFEST_DIR").to_owned());
    PathBuf::from(package).join("../../tests/vectors/tiny-llama")
}

/// A frontend that tokenizes.
pub fn tokenizing() -> Stage {
    Stage::new(|options| {
        options.routing.policies.active = Arc::new(Policy::Kv);
        options.own.tokenizer = vec![folder().display().to_string()];
    })
}

/// The tokens of a body of `/tokenize` as the model itself makes them.
pub fn renderer() -> impl Fn(&Value) -> Option<Vec<u32>> + Send + Sync + 'static {
    static TINY: LazyLock<TextModel> =
        LazyLock::new(|| TextModel::from_folder(folder(), Default::default()).unwrap());
    let model = &*TINY;
    move |body| {
        if let Some(prompt) = body["prompt"].as_str() {
            return Some(model.completion_tokens(prompt, true).unwrap());
        }
        let messages = body["messages"].to_string();
        let request = ChatRequest { messages: Some(&messages), ..ChatRequest::default() };
        match model.chat_tokens(&request).unwrap() {
            Prompt::Tokens(tokens) => Some(tokens),
            other => panic!("{other:?}"),
        }
    }
}

pub fn chat(text: &str) -> Value {
    json!({ "model": "m", "messages": [{ "role": "user", "content": text }] })
}

fn with_tools(text: &str) -> Value {
    let mut body = chat(text);
    body["tools"] = json!([{ "type": "function", "function": { "name": "f", "parameters": {} } }]);
    body
}

/// The entry of a form in `/health`.
async fn form(stage: &Stage, name: &str) -> (String, String) {
    let form = &stage.get("/health").await["parity"]["m"]["1.2.3"]["forms"][name];
    let text = |field: &str| form[field].as_str().unwrap().to_owned();
    (text("outcome"), text("renderer"))
}

async fn rendered_for(stage: &Stage, engine: &Engine, body: &Value) -> usize {
    let before = engine.tokenized();
    let answer = stage.post("/v1/chat/completions", body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    engine.tokenized() - before
}

#[tokio::test]
async fn a_form_that_differs_is_rendered_by_the_engine_until_two_comparisons_agree() {
    let stage = tokenizing();
    let engine = Engine::start(&["sql"]).await;
    let (render, is_odd) = (renderer(), Arc::new(AtomicBool::new(true)));
    let odd = Arc::clone(&is_odd);
    engine.renders(move |body| {
        let mut tokens = render(body)?;
        if odd.load(Ordering::SeqCst) && !body["tools"].is_null() {
            tokens.push(7);
        }
        Some(tokens)
    });
    let engine = stage.add(engine, json!({})).await;
    stage.until_metric(COMPARED, 1.0).await;
    let known = |outcome: &str, renderer: &str| (outcome.to_owned(), renderer.to_owned());
    let (agrees, here) = (known("agrees", "frontend"), known("agrees", "engine"));
    assert_eq!(form(&stage, "tools").await, known("differs", "engine"));
    for name in ["text", "chat", "turns", "reasoning", "unicode", "template_kwargs", "adapter"] {
        assert_eq!(form(&stage, name).await, agrees, "{name}");
    }
    let tools = "parity{model=\"m\",version=\"1.2.3\",form=\"tools\"}";
    assert_eq!(stage.metric(tools).await, 0.0);
    let warnings = stage.get("/health").await["warnings"].to_string();
    assert!(
        warnings.contains("the forms tools get") && warnings.contains("--tokenizer"),
        "{warnings}"
    );
    assert_eq!(rendered_for(&stage, &engine, &with_tools("a")).await, 1);
    assert_eq!(rendered_for(&stage, &engine, &chat("a")).await, 0);

    is_odd.store(false, Ordering::SeqCst);
    stage.skip(HOUR).await;
    stage.until_metric(COMPARED, 2.0).await;
    assert_eq!(form(&stage, "tools").await, here);
    assert_eq!(rendered_for(&stage, &engine, &with_tools("b")).await, 1);
    stage.skip(HOUR).await;
    stage.until_metric(COMPARED, 3.0).await;
    assert_eq!(form(&stage, "tools").await, agrees);
    assert_eq!(stage.metric(tools).await, 1.0);
    assert_eq!(rendered_for(&stage, &engine, &with_tools("c")).await, 0);
}

#[tokio::test]
async fn comparisons_are_few_and_one_worker_does_for_all() {
    let stage = tokenizing();
    let mut engines = Vec::new();
    for _ in 0..3 {
        let engine = Engine::start(&[]).await;
        engine.renders(renderer());
        engines.push(stage.add(engine, json!({})).await);
    }
    stage.until_metric(COMPARED, 1.0).await;
    // The text prompts are asked of each worker when it joins.
    until("all workers to be looked at", async || {
        engines.iter().map(Engine::tokenized).sum::<usize>() == 3 * 3 + 12
    })
    .await;
    stage.skip(HOUR / 2).await;
    stage.skip(HOUR / 2).await;
    stage.until_metric(COMPARED, 2.0).await;
    assert_eq!(engines.iter().map(Engine::tokenized).sum::<usize>(), 3 * 3 + 2 * 12);
    let adapter = form(&stage, "adapter").await;
    assert_eq!(adapter, ("not compared".to_owned(), "frontend".to_owned()));
}

#[tokio::test]
async fn an_engine_that_renders_nothing_is_not_compared() {
    let stage = tokenizing();
    let engine = Engine::start(&[]).await;
    engine.renders(|_| None);
    let engine = stage.add(engine, json!({})).await;
    stage.until_metric(COMPARED, 1.0).await;
    for name in ["text", "chat", "tools"] {
        let found = form(&stage, name).await;
        assert_eq!(found, ("not compared".to_owned(), "frontend".to_owned()), "{name}");
    }
    assert_eq!(rendered_for(&stage, &engine, &with_tools("a")).await, 0);
}

/// The same conversation by each of the three APIs that have one.
fn conversations(text: &str) -> [(&'static str, Value); 3] {
    let messages = json!([{ "role": "user", "content": text }]);
    [
        ("/v1/chat/completions", chat(text)),
        ("/v1/messages", json!({ "model": "m", "max_tokens": 5, "messages": messages })),
        ("/v1/responses", json!({ "model": "m", "input": text })),
    ]
}

#[tokio::test]
async fn a_conversation_has_the_same_tokens_by_each_api() {
    let stage = tokenizing();
    let mut engines = Vec::new();
    for _ in 0..2 {
        engines.push(stage.add(Engine::start(&[]).await, json!({})).await);
    }
    stage.until_metric(COMPARED, 1.0).await;
    let text = "The quick brown fox jumps over the lazy dog. ".repeat(12);
    let mut found = Vec::new();
    for (path, body) in conversations(&text) {
        let answer = stage.post(path, &body).await;
        stage.until_idle().await;
        found.push((answer.status, answer.worker(), answer.overlap()));
    }
    let (_, worker, _) = found[0];
    assert!(found[1].2 > 4, "{found:?}");
    assert_eq!(found[1..], [(200, worker, found[1].2); 2]);
    // Engines without a renderer prove nothing, and are asked nothing more.
    let known = ("not compared".to_owned(), "frontend".to_owned());
    assert_eq!(form(&stage, "messages").await, known);
}

#[tokio::test]
async fn an_api_that_engines_render_otherwise_is_left_to_them() {
    let stage = tokenizing();
    let engine = Engine::start(&[]).await;
    let tokens: Vec<u32> = (100..182).collect();
    engine.renders_any(json!({ "token_ids": tokens, "features": null, "request_id": "r" }));
    let engine = stage.add(engine, json!({})).await;
    stage.until_metric(COMPARED, 1.0).await;
    let [_, messages, responses] = conversations("hello");
    for (name, (path, body)) in [("messages", messages), ("responses", responses)] {
        assert_eq!(form(&stage, name).await, ("differs".to_owned(), "engine".to_owned()));
        stage.post(path, &body).await;
        // 82 tokens are five blocks, and both requests are the same prompt.
        assert_eq!(stage.post(path, &body).await.overlap(), 5);
    }
    drop(engine);
}

#[tokio::test]
async fn results_of_a_model_go_with_its_last_worker() {
    let stage = tokenizing();
    let engine = Engine::start(&[]).await;
    let render = renderer();
    engine.renders(move |body| {
        let mut tokens = render(body)?;
        tokens.push(7);
        Some(tokens)
    });
    let engine = stage.add(engine, json!({})).await;
    stage.until_metric(COMPARED, 1.0).await;
    let health = stage.get("/health").await;
    assert!(health["warnings"].to_string().contains("model m: prompts of the forms"), "{health}");
    stage.remove(engine.id).await;
    let health = stage.get("/health").await;
    assert_eq!((&health["parity"], &health["warnings"]), (&json!({}), &json!([])));
    assert!(!stage.scrape().await.contains("kvflash_parity{"));
    // It is compared again when it comes back.
    let _engine = stage.add(engine, json!({})).await;
    stage.until_metric(COMPARED, 2.0).await;
}
