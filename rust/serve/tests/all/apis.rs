//! Every API has the same way: matched where its prompt is known, balanced by load where it has none. The gateway
//! contract of all of them is in `contract`.

use std::collections::BTreeSet;
use std::sync::Arc;

use kvflash_core::policy::{Policy, Profile, Settings, registry};
use serde_json::{Value, json};

use super::engine::Engine;
use super::parity::folder;
use super::stage::{Stage, until, with};

const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";

fn tokens(count: u32) -> Vec<u32> {
    (100..100 + count).collect()
}

async fn kv_stage() -> (Stage, [Engine; 2]) {
    let stage = Stage::new(|options| options.routing.policies.active = Arc::new(Policy::Kv));
    let engines = [stage.engine().await, stage.engine().await];
    (stage, engines)
}

/// The same prompt again and again, as `path` has it, goes where it went first; this is how much of it is held.
async fn overlaps(stage: &Stage, path: &str, body: &Value) -> (u64, u64) {
    let first = stage.post(path, body).await;
    assert_eq!((first.status, first.overlap()), (200, 0), "{path}: {}", first.text());
    let mut overlap = 0;
    for _ in 0..4 {
        let again = stage.post(path, body).await;
        assert_eq!((again.status, again.worker()), (200, first.worker()), "{path}");
        overlap = again.overlap();
    }
    stage.until_idle().await;
    (first.worker(), overlap)
}

#[tokio::test]
async fn token_ids_are_matched_as_they_come() {
    let (stage, _engines) = kv_stage().await;
    let sampling = json!({ "sampling_params": {} });
    let (worker, overlap) =
        overlaps(&stage, "/generate", &with(json!({ "input_ids": tokens(66) }), sampling.clone()))
            .await;
    assert_eq!(overlap, 4);
    // It is the same prompt, whichever API it comes to.
    let body = with(json!({ "token_ids": tokens(66) }), sampling);
    let answer = stage.post("/inference/v1/generate", &body).await;
    assert_eq!((answer.worker(), answer.overlap()), (worker, 4), "{}", answer.text());
    let answer = stage.ask(&json!({ "model": "m", "prompt": tokens(66) })).await;
    assert_eq!((answer.worker(), answer.overlap()), (worker, 4));
}

#[tokio::test]
async fn what_is_more_than_token_ids_earns_no_credit() {
    let (stage, _engines) = kv_stage().await;
    overlaps(&stage, "/generate", &json!({ "input_ids": tokens(66) })).await;
    for more in [
        json!({ "lora_path": "adapter" }),
        json!({ "extra_key": "tenant" }),
        json!({ "image_data": "http://h/i.png" }),
        json!({ "input_ids": [tokens(66), tokens(3)] }),
    ] {
        let answer = stage.post("/generate", &with(json!({ "input_ids": tokens(66) }), more)).await;
        assert_eq!((answer.status, answer.overlap()), (200, 0), "{}", answer.text());
    }
    let parts = json!({ "token_ids": tokens(66), "content_parts": [{"type": "image_url"}] });
    assert_eq!(stage.post("/inference/v1/generate", &parts).await.overlap(), 0);
    // An image stands where a token is repeated: other blocks from there on.
    let features = json!({
        "mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": 20, "length": 4}]}
    });
    let body = json!({ "token_ids": tokens(66), "features": features });
    assert_eq!(stage.post("/inference/v1/generate", &body).await.overlap(), 1);
}

#[tokio::test]
async fn a_prompt_of_embeddings_is_left_to_the_engine() {
    let (stage, _engines) = kv_stage().await;
    overlaps(&stage, "/v1/completions", &json!({ "model": "m", "prompt": tokens(66) })).await;
    let embeds = json!({ "model": "m", "prompt_embeds": "bnVtYmVycw==".repeat(10_000) });
    // Beside a prompt they are another one of a batch.
    let beside = with(embeds.clone(), json!({ "prompt": tokens(66) }));
    for body in [&embeds, &beside] {
        let answer = stage.ask(body).await;
        assert_eq!((answer.status, answer.overlap()), (200, 0), "{}", answer.text());
        let explained = stage.post("/explain", body).await;
        assert_eq!(explained.json()["prompt_source"], "unknown", "{}", explained.text());
        assert!(explained.json()["isl_tokens"].as_u64() < Some(500), "{}", explained.text());
    }
    assert!(stage.metric("untokenized_requests_total{cause=\"not_text\"}").await >= 2.0);
    let none = with(embeds, json!({ "prompt_embeds": null }));
    assert_eq!(stage.ask(&none).await.status, 400);
}

#[tokio::test]
async fn responses_and_messages_are_what_the_engine_renders() {
    let (stage, engines) = kv_stage().await;
    for engine in &engines {
        engine.renders_any(json!({ "token_ids": tokens(66), "features": null, "request_id": "r" }));
    }
    let responses = json!({ "model": "m", "input": "hello" });
    let (worker, overlap) = overlaps(&stage, RESPONSES, &responses).await;
    assert_eq!(overlap, 4);
    let messages = json!({ "model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}] });
    let answer = stage.post(MESSAGES, &messages).await;
    assert_eq!((answer.worker(), answer.overlap()), (worker, 4));
    // The text before it and the template's output are unknown outside the engine.
    let stored = with(responses, json!({ "previous_response_id": "resp_1" }));
    assert_eq!(stage.post(RESPONSES, &stored).await.overlap(), 0);
    let silent = with(messages, json!({ "thinking": {"type": "disabled"} }));
    assert_eq!(stage.post(MESSAGES, &silent).await.overlap(), 0);
}

#[tokio::test]
async fn an_engine_that_does_not_render_is_asked_once() {
    let (stage, engines) = kv_stage().await;
    for _ in 0..6 {
        let answer = stage.post(RESPONSES, &json!({ "model": "m", "input": "hello" })).await;
        assert_eq!((answer.status, answer.overlap()), (200, 0));
    }
    assert_eq!(engines.iter().map(Engine::count).sum::<usize>(), 6);
    assert_eq!(stage.metric("untokenized_requests_total{cause=\"not_text\"}").await, 6.0);
}

#[tokio::test]
async fn what_has_no_prompt_is_balanced_by_load_and_keeps_its_path() {
    let stage = Stage::new(|options| options.routing.policies.active = Arc::new(Policy::Kv));
    let mut busy = stage.engine().await.by_hand();
    let held = stage.send_to("/v1/embeddings", json!({ "model": "m", "input": "x".repeat(4_000) }));
    let asked = busy.next().await;
    let free = stage.engine().await;
    for (path, body) in [
        ("/v1/embeddings", json!({ "model": "m", "input": "hello" })),
        ("/v1/rerank", json!({ "model": "m", "query": "q", "documents": ["a", "b"] })),
        ("/v2/rerank", json!({ "query": "q", "documents": ["a", "b"] })),
        ("/rerank", json!({ "query": "q", "documents": ["a", "b"] })),
        ("/v1/score", json!({ "text_1": "a", "text_2": "b" })),
        ("/score", json!({ "text_1": "a", "text_2": "b" })),
        ("/classify", json!({ "input": "a" })),
        ("/pooling", json!({ "input": "a" })),
        ("/tokenize", json!({ "prompt": "a" })),
        ("/detokenize", json!({ "tokens": [1] })),
        ("/v1/messages/count_tokens", json!({ "model": "m", "messages": [] })),
    ] {
        let answer = stage.post(path, &body).await;
        assert_eq!((answer.status, answer.worker()), (200, free.id), "{path}: {}", answer.text());
        let seen = (free.paths().pop(), free.bodies().pop());
        assert_eq!(seen, (Some(path.to_owned()), Some(body)));
        let name = format!("requests_total{{endpoint=\"{path}\",status=\"200\"}}");
        assert_eq!(stage.metric(&name).await, 1.0, "{name}");
    }
    asked.done().await;
    assert_eq!(held.await.unwrap().status, 200);
    stage.until_idle().await;
}

#[tokio::test]
async fn uploads_name_their_model_and_have_a_limit_of_their_own() {
    let stage = Stage::new(|options| {
        options.own.max_body_bytes = 100;
        options.own.max_upload_bytes = 1_000;
    });
    let engine = stage.engine().await;
    let upload = |model: &str, bytes: usize| {
        let sound = "x".repeat(bytes);
        format!(
            "--b\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\n{model}\r\n--b\r\n\
             content-disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\n{sound}\r\n--b--\r\n"
        )
        .into_bytes()
    };
    let kind = "multipart/form-data; boundary=b";
    for path in ["/v1/audio/transcriptions", "/v1/audio/translations"] {
        let answer = stage.upload(path, kind, upload("m", 500)).await;
        assert_eq!((answer.status, engine.paths().pop().as_deref()), (200, Some(path)));
        let answer = stage.upload(path, kind, upload("other", 500)).await;
        assert_eq!(answer.status, 404, "{}", answer.text());
        let answer = stage.upload(path, kind, upload("m", 1_000)).await;
        assert_eq!(answer.status, 413);
        assert!(answer.text().contains("--max-upload-bytes"), "{}", answer.text());
        let answer = stage.upload(path, "application/json", b"{}".to_vec()).await;
        assert_eq!(answer.status, 400, "{}", answer.text());
    }
    assert_eq!(engine.count(), 2);
    stage.until_idle().await;
}

#[tokio::test]
async fn an_api_that_an_engine_lacks_is_told_by_its_path() {
    let stage = Stage::new(|_| ());
    let (lacks, has) = (stage.engine().await, stage.engine().await);
    lacks.answers(404, json!({ "detail": "Not Found" }));
    for _ in 0..2 {
        let answer = stage.post("/v1/embeddings", &json!({ "input": "x" })).await;
        assert_eq!((answer.status, answer.worker()), (200, has.id));
    }
    has.answers(
        404,
        json!({ "error": {"message": "Not Found", "type": "Not Found", "code": 404} }),
    );
    let answer = stage.post("/v1/embeddings", &json!({ "input": "x" })).await;
    assert_eq!(answer.status, 501);
    let text = answer.text();
    assert!(
        text.contains("does not serve POST /v1/embeddings: its engine has no such API (tried ["),
        "{text}"
    );
    // Any other 404 is the engine's own.
    has.answers(404, json!({ "error": {"message": "The model does not exist", "code": 404} }));
    lacks.answers(404, json!({ "error": {"message": "The model does not exist", "code": 404} }));
    assert_eq!(stage.post("/v1/embeddings", &json!({ "input": "x" })).await.status, 404);
    stage.until_idle().await;
}

#[tokio::test]
async fn a_request_is_explained_by_its_path() {
    let (stage, _engines) = kv_stage().await;
    overlaps(&stage, "/generate", &json!({ "input_ids": tokens(66) })).await;
    let body = json!({ "input_ids": tokens(66) });
    let answer = stage.post("/explain?path=/generate", &body).await;
    assert_eq!(answer.json()["prompt_tokens"], 66, "{}", answer.text());
    let answer = stage.post("/explain?path=/nothing", &body).await;
    assert_eq!(answer.status, 400);
    assert!(
        answer.text().contains("path: /explain does not support /nothing"),
        "{}",
        answer.text()
    );
}

#[tokio::test]
async fn a_response_is_continued_where_it_is_kept_at_every_replica() {
    let stage = Stage::new(|_| ());
    let engines = [stage.engine().await, stage.engine().await, stage.engine().await];
    let first = stage.post(RESPONSES, &json!({ "model": "m", "input": "hello" })).await;
    let keeper = engines.iter().find(|engine| engine.id == first.worker()).unwrap();
    let id = keeper.bodies()[0]["request_id"].as_str().unwrap().to_owned();
    assert!(id.starts_with("resp_") && id.contains("_kv"), "{id}");
    // A replica that numbers the same engines otherwise.
    let replica = Stage::new(|_| ());
    for engine in engines.iter().rev() {
        let added = replica.post("/workers", &json!({ "url": engine.url })).await;
        replica.until_healthy(added.json()["id"].as_u64().unwrap(), true).await;
    }
    let next = json!({ "model": "m", "input": "more", "previous_response_id": id });
    for _ in 0..3 {
        assert_eq!(stage.post(RESPONSES, &next).await.worker(), keeper.id);
        assert_eq!(replica.post(RESPONSES, &next).await.status, 200);
    }
    assert_eq!(keeper.count(), 7);
    // The engine has forgotten it.
    keeper.answers(404, json!({ "error": {"message": "Response with id 'x' not found."} }));
    let answer = stage.post(RESPONSES, &next).await;
    assert_eq!(answer.status, 404);
    assert!(answer.text().contains("VLLM_ENABLE_RESPONSES_API_STORE=1"), "{}", answer.text());
    stage.remove(keeper.id).await;
    let answer = stage.post(RESPONSES, &next).await;
    assert_eq!(
        (answer.status, &answer.json()["error"]["param"]),
        (404, &json!("previous_response_id"))
    );
    // An id of another origin is for the engines to judge, and a client's own stays.
    let other =
        json!({ "model": "m", "input": "x", "previous_response_id": "resp_1", "request_id": "r" });
    assert_eq!(stage.post(RESPONSES, &other).await.status, 200);
    assert!(engines.iter().any(|engine| engine.bodies().contains(&other)));
    stage.until_idle().await;
}

#[tokio::test]
async fn an_engine_gets_the_request_id_that_the_client_is_told() {
    let stage = Stage::new(|_| ());
    let mut engine = stage.engine().await.by_hand();
    let body = json!({ "model": "m", "prompt": "hello" });
    let too_long = "x".repeat(257);
    for own in [None, Some("own"), Some(too_long.as_str())] {
        let headers: Vec<_> = own.iter().map(|id| ("x-request-id", *id)).collect();
        let asking = stage.send_with(&headers, body.clone());
        let asked = engine.next().await;
        let received = asked.headers["x-request-id"].clone();
        asked.done().await;
        let answer = asking.await.unwrap();
        assert_eq!(answer.header("x-request-id"), Some(received.as_str()));
        assert_eq!(own == Some(received.as_str()), own == Some("own"));
    }
}

#[tokio::test]
async fn tokens_that_are_only_counted_are_no_input() {
    let stage = Stage::new(|_| ());
    let engine = stage.engine().await;
    engine.answers(200, json!({ "input_tokens": 40 }));
    let body = json!({ "model": "m", "messages": [] });
    let input = "tokens_total{stage=\"input\"}";
    assert_eq!(stage.post("/v1/messages/count_tokens", &body).await.status, 200);
    assert_eq!(stage.metric(input).await, 0.0);
    assert_eq!(stage.post(MESSAGES, &body).await.status, 200);
    stage.until_metric(input, 40.0).await;
}

#[tokio::test]
async fn an_alias_is_told_beside_its_model() {
    let stage = Stage::new(|options| options.own.model_alias = vec!["g=m".to_owned()]);
    let engine = stage.engine().await;
    let body = json!({ "model": "g", "prompt": tokens(40) });
    let answer = stage.ask_with(&[("x-request-id", "one")], &body).await;
    assert_eq!((answer.status, engine.bodies()[0]["model"].as_str()), (200, Some("m")));
    let why = stage.get("/why/one").await;
    let decision = &why["decisions"][0];
    assert_eq!((&decision["alias"], &decision["model"]), (&json!("g"), &json!("m")));
    let explained = stage.post("/explain", &body).await.json();
    assert_eq!((&explained["alias"], &explained["model"]), (&json!("g"), &json!("m")));
    stage.until_metric("aliased_requests_total{alias=\"g\",model=\"m\"}", 2.0).await;
    let card = stage.get("/v1/models/g").await;
    assert_eq!((&card["id"], &card["root"]), (&json!("g"), &json!("m")));
    let models = stage.get("/v1/models").await;
    assert!(models["data"].as_array().unwrap().contains(&card), "{models}");
    let form = "--b\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\ng\r\n--b--\r\n";
    let kind = "multipart/form-data; boundary=b";
    let path = "/v1/audio/transcriptions";
    assert_eq!(stage.upload(path, kind, form.as_bytes().to_vec()).await.status, 200);
}

#[tokio::test]
async fn an_alias_of_several_models_keeps_its_sessions() {
    let stage = Stage::new(|options| options.own.model_alias = vec!["g=a:50,b:50".to_owned()]);
    let engine = stage.add(Engine::start(&["a", "b"]).await, json!({})).await;
    let body = json!({ "model": "g", "prompt": tokens(40) });
    for key in 0..20 {
        let key = format!("session-{key}");
        for _ in 0..3 {
            let answer = stage.ask_with(&[("x-session-key", key.as_str())], &body).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
        }
    }
    let models: Vec<_> =
        engine.bodies().iter().map(|body| body["model"].as_str().unwrap().to_owned()).collect();
    assert!(
        models.chunks(3).all(|three| three.iter().all(|model| *model == three[0])),
        "{models:?}"
    );
    assert!(models.contains(&"a".to_owned()) && models.contains(&"b".to_owned()));
}

#[tokio::test]
async fn a_session_that_names_its_worker_keeps_the_model_of_an_alias() {
    let stage = Stage::new(|options| {
        options.own.model_alias = vec!["split=m1:1,m2:1".to_owned()];
        let settings = Settings::read(Profile::default(), |_| None).unwrap();
        let policy = registry::build("session-affinity", &settings, &mut rand::rng());
        options.routing.policies.active = policy.unwrap();
    });
    let engines = ["m1", "m2"].map(Engine::of);
    let [first, second] = engines;
    let _engines =
        [stage.add(first.await, json!({})).await, stage.add(second.await, json!({})).await];
    let body = json!({ "model": "split", "prompt": tokens(40) });
    let mut homes = BTreeSet::new();
    while homes.len() < 2 {
        let answer = stage.ask(&body).await;
        let id = answer.header("x-session-id").unwrap().to_owned();
        for _ in 0..10 {
            let next = stage.ask_with(&[("x-session-id", &id)], &body).await;
            assert_eq!((next.status, next.worker()), (200, answer.worker()));
        }
        homes.insert(answer.worker());
    }
    // Of a worker that is gone: the session starts over.
    let gone = [("x-session-id", "MTAuMC4wLjE6ODAwMC8w")];
    let mut others = BTreeSet::new();
    until("both models", async || {
        others.insert(stage.ask_with(&gone, &body).await.worker());
        others.len() == 2
    })
    .await;
}

/// Two engines with a model each, and aliases of both.
async fn split_stage() -> (Stage, [Engine; 2]) {
    let aliases = ["split=m1:1,m2:1", "first=m1"].map(str::to_owned).to_vec();
    let stage = Stage::new(|options| options.own.model_alias = aliases);
    let m1 = stage.add(Engine::of("m1").await, json!({})).await;
    let m2 = stage.add(Engine::of("m2").await, json!({})).await;
    (stage, [m1, m2])
}

/// The id of a response that `model`'s engine keeps.
async fn kept_id(stage: &Stage, keeper: &Engine, model: &str) -> String {
    let first = stage.post(RESPONSES, &json!({ "model": model, "input": "hello" })).await;
    assert_eq!((first.status, first.worker()), (200, keeper.id));
    keeper.bodies().pop().unwrap()["request_id"].as_str().unwrap().to_owned()
}

fn next(model: &str, id: &str) -> Value {
    json!({ "model": model, "input": "more", "previous_response_id": id })
}

#[tokio::test]
async fn a_kept_response_decides_the_model_of_an_alias() {
    let (stage, [m1, m2]) = split_stage().await;
    let id = kept_id(&stage, &m2, "m2").await;
    for key in 0..16 {
        let answer = stage.post(RESPONSES, &next("split", &id)).await;
        assert_eq!((answer.status, answer.worker()), (200, m2.id), "{}", answer.text());
        let key = format!("session-{key}");
        let headers = [("x-session-key", key.as_str())];
        let answer = stage.post_with(RESPONSES, &headers, &next("split", &id)).await;
        assert_eq!((answer.status, answer.worker()), (200, m2.id), "{}", answer.text());
    }
    assert!(m2.bodies().iter().all(|body| body["model"] == "m2"));
    let (worker, asked) = (m2.id, m1.count() + m2.count());
    for (model, wanted) in [
        ("m1", format!("response {id} is kept by worker {worker}, which serves m2, not m1")),
        (
            "first",
            format!(
                "response {id} is kept by worker {worker}, which serves m2, and none of the models of \
                 alias \"first\" (m1)"
            ),
        ),
    ] {
        let answer = stage.post(RESPONSES, &next(model, &id)).await;
        let error = &answer.json()["error"];
        assert_eq!((answer.status, &error["param"]), (404, &json!("previous_response_id")));
        assert_eq!(error["message"], wanted);
    }
    assert_eq!(m1.count() + m2.count(), asked);
    stage.until_idle().await;
}

#[tokio::test]
async fn a_response_that_an_engine_has_lost_is_named() {
    let (stage, [_, m2]) = split_stage().await;
    m2.answers(404, json!({ "error": {"message": "Response with id 'x' not found."} }));
    for id in [format!("resp_1{}", "x".repeat(1_000)), "resp_1".to_owned()] {
        let answer = stage.post(RESPONSES, &next("m2", &id)).await;
        let error = &answer.json()["error"];
        assert_eq!((answer.status, &error["param"]), (404, &json!("previous_response_id")));
        let shown: String = id.chars().take(100).collect();
        let wanted = format!("Previous response with id '{shown}' not found: worker {}", m2.id);
        assert!(error["message"].as_str().unwrap().starts_with(&wanted), "{error}");
        assert!(answer.text().len() < 400, "{error}");
    }
    stage.until_idle().await;
}

#[tokio::test]
async fn an_unhealthy_keeper_is_told_by_its_response() {
    let stage = Stage::new(|_| ());
    let engines = [stage.engine().await, stage.engine().await];
    let id = kept_id(&stage, &engines[0], "m").await;
    let worker = engines[0].id;
    engines[0].health(500);
    engines[0].closes();
    // Its connection breaks: it is in doubt, and the check that follows fails.
    assert_eq!(stage.post(RESPONSES, &next("m", &id)).await.status, 502);
    stage.until_healthy(worker, false).await;
    let answer = stage.post(RESPONSES, &next("m", &id)).await;
    let error = &answer.json()["error"];
    assert_eq!((answer.status, &error["param"]), (503, &json!("previous_response_id")));
    let wanted = format!("worker {worker}, which keeps response {id}, is unhealthy: ");
    assert!(error["message"].as_str().unwrap().starts_with(&wanted), "{error}");
    assert_eq!(answer.header("retry-after"), Some("1"));
    assert_eq!(engines[1].count(), 0);
    stage.until_idle().await;
}

#[tokio::test]
async fn an_alias_of_models_that_nobody_serves_is_told_so() {
    let aliases = ["mix=other", "part=other,m", "g=m"].map(str::to_owned).to_vec();
    let stage = Stage::new(|options| options.own.model_alias = aliases);
    let _engine = stage.engine().await;
    let served = "served models are g, m, part";
    let answer = stage.ask(&json!({ "model": "mix", "prompt": "x" })).await;
    let told = format!("alias \"mix\" stands for \"other\", which no worker serves; {served}");
    assert_eq!((answer.status, &answer.json()["error"]["message"]), (404, &json!(told)));
    let answer = stage.ask(&json!({ "model": "nobody", "prompt": "x" })).await;
    let told = format!("the model \"nobody\" is not served; {served}");
    assert_eq!((answer.status, &answer.json()["error"]["message"]), (404, &json!(told)));
    let models = stage.get("/v1/models").await;
    let ids: Vec<_> = models["data"].as_array().unwrap().iter().map(|card| &card["id"]).collect();
    assert_eq!(ids, ["m", "g", "part"]);
    for card in models["data"].as_array().unwrap() {
        let id = card["id"].as_str().unwrap();
        assert_eq!(
            (stage.get(&format!("/v1/models/{id}")).await, &card["root"]),
            (card.clone(), &json!("m"))
        );
    }
    let mix = stage.get("/v1/models/mix").await;
    assert_eq!(
        (&mix["error"]["code"], mix["error"]["message"].as_str()),
        (
            &json!(404),
            Some(
                format!("alias \"mix\" stands for \"other\", which no worker serves; {served}")
                    .as_str()
            )
        )
    );
    let health = stage.get("/health").await;
    for alias in ["mix", "part"] {
        let warning = format!("alias {alias}: no worker serves its model other");
        assert!(health["warnings"].as_array().unwrap().contains(&json!(warning)), "{health}");
    }
    assert!(!health.to_string().contains("alias g"), "{health}");
}

#[tokio::test]
async fn a_tokenizer_of_a_model_that_nobody_serves_is_told() {
    let folder = folder();
    let named = ["m", "nope"].map(|model| format!("{model}={}", folder.display()));
    let stage = Stage::new(|options| options.own.tokenizer = named.to_vec());
    let _engine = stage.engine().await;
    let health = stage.get("/health").await;
    let about: Vec<_> = health["causes"].as_array().unwrap().iter().collect();
    let codes: Vec<_> = about.iter().map(|one| &one["code"]).collect();
    assert_eq!(codes, ["tokenizer_not_used"], "{health}");
    let wanted = "--tokenizer nope=...: no worker serves a model of that name";
    assert_eq!(about[0]["message"], wanted);
}

#[tokio::test]
async fn an_alias_that_shadows_a_model_has_one_card() {
    let aliases = ["m=m,other", "a=other"].map(str::to_owned).to_vec();
    let stage = Stage::new(|options| options.own.model_alias = aliases);
    let _engine = stage.add(Engine::start(&["a"]).await, json!({})).await;
    let models = stage.get("/v1/models").await;
    // Requests for `a` go to a model without workers, whatever the engine calls its adapter.
    let ids: Vec<_> = models["data"].as_array().unwrap().iter().map(|card| &card["id"]).collect();
    assert_eq!(ids, ["m"]);
    assert_eq!(stage.get("/v1/models/m").await, models["data"][0]);
    assert_eq!(stage.get("/v1/models/a").await["error"]["code"], 404);
}
