//! Clients with keys: their limits, what of their requests reaches an engine, and tenants that share no cache.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use kvflash_core::fair::LineOrder;
use kvflash_core::policy::Policy;
use kvflash_core::select::{QueueOptions, QueueThreshold};
use kvflash_serve::frontend::{FairnessOptions, FrontendOptions, Identity};
use kvflash_serve::{Key, Pass, Role};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

use super::disagg::prefiller;
use super::engine::Engine;
use super::stage::{Answer, BLOCK, Stage, prompt, until, with};

const RESPONSES: &str = "/v1/responses";
const TURNS_WAITING: &str = "turns_waiting{model=\"m\"}";

fn key(id: &str) -> Key {
    Key::new(id, Role::Client)
}

fn kv() -> Stage {
    Stage::new(|options| options.routing.policies.active = Arc::new(Policy::Kv))
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
async fn a_prompt_that_is_prefilled_elsewhere_is_charged_as_that_worker_computes_it() {
    let stage = kv();
    let (decode, _prefill) = (stage.engine().await, prefiller(&stage).await);
    // It fetched the blocks of the prompt.
    let usage = json!({ "prompt_tokens": 161, "completion_tokens": 1,
                        "prompt_tokens_details": { "cached_tokens": 160 } });
    decode.answers(200, json!({ "choices": [], "usage": usage }));
    let client = Key { tpm: Some(1_000), ..key("a") };
    // Of the second prompt, the prefill worker holds ten blocks.
    for (tokens, remaining) in [(0..161, 839), (0..161, 838), (500..661, 677)] {
        let answer = stage.ask_as(&client, &[], &prompt(tokens)).await;
        assert_eq!((answer.status, left(&answer, "tokens")), (200, remaining));
        stage.until_idle().await;
    }
    let charged = "client_uncached_prompt_tokens_total{client=\"a\"}";
    assert_eq!(stage.metric(charged).await, 323.0);
}

#[tokio::test]
async fn a_prefill_without_a_worker_to_decode_costs_nothing() {
    let stage = kv();
    let (decode, prefill) = (stage.engine().await, prefiller(&stage).await);
    decode.health(500);
    stage.until_healthy(decode.id, false).await;
    let client = Key { tpm: Some(1_000), ..key("a") };
    let answer = stage.ask_as(&client, &[], &prompt(0..161)).await;
    assert_eq!((answer.status, prefill.count()), (503, 1));
    let charged = "client_uncached_prompt_tokens_total{client=\"a\"}";
    assert_eq!(stage.metric(charged).await, 0.0);
}

#[tokio::test]
async fn a_client_that_leaves_pays_for_what_its_worker_computes() {
    let stage = kv();
    let mut engine = stage.engine().await.by_hand();
    let client = Key { tpm: Some(200), ..key("a") };
    let gone = stage.send_as(&client, &[], prompt(0..161));
    let asked = engine.next().await;
    gone.abort();
    asked.gone().await;
    stage.until_idle().await;
    let next = stage.send_as(&client, &[], prompt(500..530));
    engine.next().await.done().await;
    assert_eq!(left(&next.await.unwrap(), "tokens"), 9, "200 - 161 - 30");
    // A worker that fails computes for nothing.
    let failing = stage.send_as(&client, &[], prompt(800..830));
    drop(engine.next().await);
    assert_eq!(failing.await.unwrap().status, 502);
    let charged = "client_uncached_prompt_tokens_total{client=\"a\"}";
    assert_eq!(stage.metric(charged).await, 191.0);
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
    for n in 1..8 {
        asking.push(hog(n));
        stage.until_metric(TURNS_WAITING, f64::from(n)).await;
    }
    let victim = [("user", "fresh-3"), ("accept-language", "victim")];
    asking.push(stage.send_as(&key("victim"), &victim, prompt(100..140)));
    stage.until_metric(TURNS_WAITING, 8.0).await;
    let mut served = Vec::new();
    for _ in 0..9 {
        let asked = engine.next().await;
        assert!(!asked.headers.contains_key("user"));
        served.push(asked.headers["accept-language"].clone());
        asked.done().await;
    }
    assert!(served.iter().position(|who| who == "victim").unwrap() <= 2, "{served:?}");
    for one in asking {
        assert_eq!(one.await.unwrap().status, 200);
    }
}

#[tokio::test]
async fn a_client_that_leaves_has_had_its_turn() {
    let stage = Stage::new(|options| {
        let (queue, weights, identity) = Default::default();
        options.fairness = Some(FairnessOptions { queue, max_running: 1, weights, identity });
    });
    let mut engine = stage.engine().await.by_hand();
    let ask = |who: &'static str, n: u32| {
        stage.send_as(&key(who), &[("accept-language", who)], prompt(n..n + 40))
    };
    let first = ask("first", 0);
    let held = engine.next().await;
    let (mut leaving, mut patient) = (VecDeque::new(), Vec::new());
    for n in 1..7 {
        leaving.push_back(ask("leaving", n * 100));
        stage.until_metric(TURNS_WAITING, f64::from(2 * n - 1)).await;
        patient.push(ask("patient", n * 100 + 50));
        stage.until_metric(TURNS_WAITING, f64::from(2 * n)).await;
    }
    held.done().await;
    assert_eq!(first.await.unwrap().status, 200);
    let mut served = Vec::new();
    for _ in 0..12 {
        let asked = engine.next().await;
        served.push(asked.headers["accept-language"].clone());
        match served.last().unwrap() == "leaving" {
            true => {
                leaving.pop_front().unwrap().abort();
                asked.gone().await;
            }
            false => asked.done().await,
        }
    }
    let turns = served[..6].iter().filter(|who| *who == "patient").count();
    assert!((2..=4).contains(&turns), "{served:?}");
    for one in patient {
        assert_eq!(one.await.unwrap().status, 200);
    }
}

#[tokio::test]
async fn a_client_that_leaves_before_any_output_has_had_none() {
    let stage = Stage::new(|options| {
        let (queue, weights, identity) = Default::default();
        options.fairness = Some(FairnessOptions { queue, max_running: 1, weights, identity });
    });
    let mut engine = stage.engine().await.by_hand();
    let waiting = async |count: f64| stage.until_metric(TURNS_WAITING, count).await;
    let ask = |who: &str| {
        let body = json!({ "model": "m", "input": "hello", "stream": true });
        stage.post_beside(&key(who), RESPONSES, &[("accept-language", who)], body)
    };
    let leaves = ask("early");
    let mut asked = engine.next().await;
    let mut asking = Vec::new();
    for (count, who) in [(1.0, "patient"), (2.0, "patient"), (3.0, "early")] {
        asking.push(ask(who));
        waiting(count).await;
    }
    // An engine sends these before it computes anything.
    let opening = event_of_response("created") + &event_of_response("in_progress").repeat(60);
    asked.begin().await;
    asked.write(&opening).await;
    stage.until_metric("requests_total{endpoint=\"/v1/responses\",status=\"200\"}", 1.0).await;
    leaves.abort();
    asked.gone().await;
    let mut served = Vec::new();
    for _ in 0..3 {
        let mut asked = engine.next().await;
        served.push(asked.headers["accept-language"].clone());
        asked.begin().await;
        asked.write(&event_of_response("output_text.delta").repeat(20)).await;
        asked.close().await;
    }
    // Twenty tokens are more than none.
    assert_eq!(served, ["patient", "early", "patient"]);
    for one in asking {
        assert_eq!(one.await.unwrap().status, 200);
    }
}

fn event_of_response(name: &str) -> String {
    format!("event: response.{name}\ndata: {{\"n\": 1}}\n\n")
}

/// Fields and headers that control an engine.
fn controls() -> (Value, Vec<(&'static str, &'static str)>) {
    let fields = json!({
        "kv_transfer_params": { "remote_host": "10.0.0.9", "remote_block_ids": [1] },
        "bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 2, "data_parallel_rank": 1,
        "priority": -9, "chat_template": "{{ x }}", "nvext": { "backend_instance_id": 2 },
        "request_id": "theirs", "rid": "theirs",
    });
    let headers = vec![
        ("x-data-parallel-rank", "3"),
        ("x-gateway-destination-endpoint", "10.0.0.9:1"),
        ("x-dynamo-request-priority", "9"),
        ("x-request-id", "theirs"),
        ("cookie", "c"),
    ];
    (fields, headers)
}

#[tokio::test]
async fn fields_that_control_an_engine_reach_it_only_where_a_key_allows_them() {
    let stage = kv();
    let mut engine = stage.engine().await.by_hand();
    // The frontend's own questions for tokens.
    engine.renders(|_| None);
    let (fields, headers) = controls();
    let bodies = [
        (
            "/v1/chat/completions",
            json!({ "model": "m", "messages": [{"role": "user", "content": "x"}] }),
        ),
        ("/v1/completions", prompt(0..40)),
        ("/v1/responses", json!({ "model": "m", "input": "x" })),
        ("/v1/messages", json!({ "model": "m", "messages": [], "max_tokens": 1 })),
        (
            "/inference/v1/generate",
            json!({ "model": "m", "token_ids": [1, 2], "sampling_params": {} }),
        ),
        ("/generate", json!({ "model": "m", "input_ids": [1, 2] })),
        ("/v1/embeddings", json!({ "model": "m", "input": "x" })),
    ];
    for (path, body) in bodies {
        let asking =
            stage.post_beside(&key("a"), path, &headers, with(body.clone(), fields.clone()));
        let asked = engine.next().await;
        let mut seen = asked.body.clone();
        let id = seen.as_object_mut().unwrap().remove("request_id");
        // The frontend's own question, where it has no tokens.
        seen.as_object_mut().unwrap().remove("return_token_ids");
        // Responses get a name of the frontend's, so that the next turn finds its worker.
        assert!(id.is_none_or(|id| id.as_str().unwrap().starts_with("resp_")), "{path}");
        assert_eq!(seen, body, "{path}");
        let header = |name: &str| asked.headers.get(name).map(String::as_str);
        for name in ["x-data-parallel-rank", "x-gateway-destination-endpoint", "cookie"] {
            assert_eq!(header(name), None, "{path}: {name}");
        }
        let ours = header("x-request-id").unwrap().to_owned();
        assert!(ours.starts_with("kvf-"), "{path}: {ours}");
        asked.done().await;
        let answer = asking.await.unwrap();
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        assert_eq!(answer.header("x-request-id"), Some(&*ours));
        assert_eq!(answer.header("x-client-request-id"), Some("theirs"));
        for name in ["x-kvflash-worker", "x-kvflash-overlap-blocks"] {
            assert_eq!(answer.header(name), None, "{path}: {name}");
        }
    }
    let metrics = stage.scrape().await;
    for (kind, count) in [("kv_transfer_params", 7), ("bootstrap", 21), ("request_id", 14)] {
        let row = format!("kvflash_dropped_fields_total{{kind=\"{kind}\"}} {count}\n");
        assert!(metrics.contains(&row), "{row}");
    }
    // Two that are allowed, and a client without a key.
    let allow = vec![Pass::KvTransferParams, Pass::DataParallelRank];
    let some = Key { allow, ..key("b") };
    let body = with(prompt(0..40), fields.clone());
    let asking = stage.post_beside(&some, "/v1/completions", &headers, body.clone());
    let asked = engine.next().await;
    assert_eq!(asked.body["kv_transfer_params"], fields["kv_transfer_params"]);
    assert_eq!(asked.body["data_parallel_rank"], 1);
    assert_eq!(asked.body.get("bootstrap_host"), None);
    asked.done().await;
    asking.await.unwrap();
    let mut plain = body;
    plain.as_object_mut().unwrap().remove("nvext");
    let asking = stage.send_with(&headers, plain.clone());
    let asked = engine.next().await;
    assert_eq!(asked.body, plain, "without keys it passes as it came");
    assert_eq!(asked.headers["x-request-id"], "theirs");
    asked.done().await;
    assert!(asking.await.unwrap().header("x-kvflash-worker").is_some());
}

#[tokio::test]
async fn a_key_may_be_told_of_overlaps() {
    let stage = Stage::new(|options| {
        options.routing.policies.active = Arc::new(Policy::Kv);
        options.own.expose_overlap = true;
    });
    let _engine = stage.engine().await;
    let answer = stage.ask_as(&key("a"), &[], &prompt(0..40)).await;
    assert_eq!((answer.status, answer.overlap()), (200, 0));
}

/// A frontend with a secret for salts.
fn isolating() -> Stage {
    isolating_with(|_| ())
}

fn isolating_with(change: impl FnOnce(&mut FrontendOptions)) -> Stage {
    let path = std::env::temp_dir().join(format!("kvflash-salts-{}", std::process::id()));
    let mut file = std::fs::File::create(&path).unwrap();
    file.write_all(b"0123456789abcdef").unwrap();
    Stage::new(|options| {
        options.routing.policies.active = Arc::new(Policy::Kv);
        options.own.expose_overlap = true;
        options.own.salt_secret_file = Some(path);
        options.own.health_interval = Duration::from_millis(20);
        change(options);
    })
}

/// Random requests of isolated tenants, each with salts of its own, and of clients that are not: overlaps are those of
/// a twin that only ever looks at requests of the same tenant and salt.
#[tokio::test]
async fn no_match_ever_crosses_isolated_tenants() {
    let stage = isolating();
    let engine = stage.engine().await;
    let mut rng = SmallRng::seed_from_u64(7);
    let mut asked: Vec<((usize, usize), Vec<u32>)> = Vec::new();
    let clients = [
        Key { is_isolated: true, ..key("a") },
        Key { is_isolated: true, ..key("b") },
        Key { is_isolated: true, tenant: "b".to_owned(), ..key("b2") },
        key("plain"),
    ];
    let salts = [None, Some("x"), Some("b"), Some("b2")];
    let mut matches = 0;
    for _ in 0..120 {
        let (client, salt) = (rng.random_range(0..clients.len()), rng.random_range(0..salts.len()));
        // Of two keys of a tenant, one identity.
        let identity = (if client == 2 { 1 } else { client }, salt);
        let blocks: Vec<u32> =
            (0..rng.random_range(1..5)).map(|_| rng.random_range(0..2)).collect();
        let mut tokens: Vec<u32> =
            blocks.iter().flat_map(|block| block * 100..block * 100 + BLOCK).collect();
        tokens.push(9);
        let mut body = json!({ "model": "m", "prompt": tokens });
        if let Some(salt) = salts[salt] {
            body["cache_salt"] = json!(salt);
        }
        let common = |other: &[u32]| blocks.iter().zip(other).take_while(|(a, b)| a == b).count();
        let same = asked.iter().filter(|(other, _)| *other == identity);
        let wanted = same.map(|(_, other)| common(other)).max().unwrap_or(0) as u64;
        let explained = stage.post_as(&clients[client], "/explain", &[], &body).await.json();
        assert_eq!(explained["overlap_blocks"], wanted, "/explain of {identity:?}");
        let answer = stage.ask_as(&clients[client], &[], &body).await;
        assert_eq!((answer.status, answer.overlap()), (200, wanted), "{identity:?}");
        matches += wanted;
        // The engine separates them by its input.
        let seen = engine.bodies().last().unwrap()["cache_salt"].clone();
        match clients[client].is_isolated {
            true => assert_eq!(seen.as_str().unwrap().len(), 64),
            false => assert_eq!(seen, body["cache_salt"]),
        }
        asked.push((identity, blocks));
        stage.until_idle().await;
    }
    assert!(matches > 50, "{matches} blocks matched at all");
    let told: std::collections::HashMap<String, usize> =
        engine.bodies().iter().fold(Default::default(), |mut counts, body| {
            *counts.entry(body["cache_salt"].to_string()).or_default() += 1;
            counts
        });
    assert_eq!(told.len(), 3 * salts.len(), "as many salts as identities");
}

#[tokio::test]
async fn an_isolated_tenant_is_refused_where_engines_take_no_salt() {
    let stage = isolating();
    let engine = stage.engine().await;
    let client = Key { is_isolated: true, ..key("a") };
    for (path, body) in [
        ("/v1/rerank", json!({ "model": "m", "query": "x", "documents": ["y"] })),
        ("/v1/embeddings", json!({ "model": "m", "input": "x" })),
    ] {
        let answer = stage.post_as(&client, path, &[], &body).await;
        assert_eq!(answer.status, 403, "{path}");
        assert!(answer.text().contains("no cache_salt"), "{}", answer.text());
    }
    assert_eq!(engine.count(), 0);
}

/// vLLM before 0.32 and SGLang ignore the salt of Anthropic's Messages.
#[tokio::test]
async fn messages_of_an_isolated_tenant_go_only_to_engines_that_read_their_salt() {
    let stage = isolating();
    let client = Key { is_isolated: true, ..key("a") };
    let path = "/v1/messages";
    let said = json!({ "role": "user", "content": "hi" });
    let body = json!({ "model": "m", "max_tokens": 1, "messages": [said] });
    let mut ignorant = Vec::new();
    for version in [json!({ "version": "0.31.2" }), json!({})] {
        let engine = Engine::start(&[]).await;
        engine.tells("/version", version);
        ignorant.push(stage.add(engine, json!({})).await);
        let answer = stage.post_as(&client, path, &[], &body).await;
        assert_eq!(answer.status, 403, "{}", answer.text());
        assert!(answer.text().contains("vLLM 0.32 or newer"), "{}", answer.text());
    }
    assert_eq!(stage.post_as(&key("b"), path, &[], &body).await.status, 200);
    let engine = Engine::start(&[]).await;
    engine.tells("/version", json!({ "version": "0.32.0rc1+cpu" }));
    let engine = stage.add(engine, json!({})).await;
    for _ in 0..6 {
        let answer = stage.post_as(&client, path, &[], &body).await;
        assert_eq!((answer.status, answer.worker()), (200, engine.id));
    }
    assert_eq!(engine.bodies()[0]["cache_salt"].as_str().unwrap().len(), 64);
    assert_eq!(ignorant.iter().map(Engine::count).sum::<usize>(), 1, "the other tenant's");
    // Their chats are salted everywhere.
    let chats = "/v1/chat/completions";
    assert_eq!(stage.post_as(&client, chats, &[], &body).await.status, 200);
    // It still runs as the version that it told.
    engine.tells_no_more("/version");
    engine.answers(500, json!({}));
    let asks = || engine.paths().iter().filter(|path| *path == "/version").count();
    until("two more learnings", async || asks() >= 2).await;
    engine.answers(200, json!({}));
    let answer = stage.post_as(&client, path, &[], &body).await;
    assert_eq!((answer.status, answer.worker()), (200, engine.id));
    engine.health(500);
    stage.until_healthy(engine.id, false).await;
    let answer = stage.post_as(&client, path, &[], &body).await;
    assert_eq!(answer.status, 503, "{}", answer.text());
    let told = "3 registered, 2 healthy, of which 2 do not read cache_salt in /v1/messages";
    assert!(answer.text().contains(told), "{}", answer.text());
}

#[tokio::test]
async fn a_tenant_that_waits_for_engines_that_read_its_salt_holds_up_no_other() {
    let stage = isolating_with(|options| {
        let threshold = QueueThreshold { batches: 1.0, batched_tokens: 1_000 };
        let (order, limit, max_wait) = (LineOrder::Fcfs, 10, Duration::from_secs(60));
        options.routing.queue = Some(QueueOptions { threshold, order, limit, max_wait });
    });
    let [old, new] = [Engine::start(&[]).await, Engine::start(&[]).await];
    for (engine, version) in [(&old, "0.31.2"), (&new, "0.32.0")] {
        engine.tells("/version", json!({ "version": version }));
        engine.renders(|_| None);
    }
    let old = stage.add(old, json!({})).await;
    let mut new = stage.add(new, json!({})).await.by_hand();
    let client = Key { is_isolated: true, ..key("a") };
    let said = json!({ "role": "user", "content": "word ".repeat(4_000) });
    let body = json!({ "model": "m", "max_tokens": 1, "messages": [said] });
    let message = || stage.post_beside(&client, "/v1/messages", &[], body.clone());
    let first = message();
    let asked = new.next().await;
    let second = message();
    stage.until_metric("queue_pending_requests{model=\"m\",tenant=\"default\"}", 1.0).await;
    let other = stage.ask_as(&key("b"), &[], &prompt(0..40)).await;
    assert_eq!((other.status, other.worker()), (200, old.id));
    asked.done().await;
    new.next().await.done().await;
    for one in [first, second] {
        assert_eq!(one.await.unwrap().status, 200);
    }
}

#[tokio::test]
async fn a_kept_response_is_continued_by_its_tenant_alone() {
    let stage = kv();
    let engine = stage.engine().await;
    let path = "/v1/responses";
    let owner = Key { tenant: "red".to_owned(), ..key("a") };
    let mate = Key { tenant: "red".to_owned(), ..key("b") };
    let other = Key { tenant: "blue".to_owned(), ..key("c") };
    let next = |id: &str| json!({ "model": "m", "input": "x", "previous_response_id": id });
    let started = stage.post_as(&owner, path, &[], &json!({ "model": "m", "input": "x" })).await;
    assert_eq!(started.status, 200, "{}", started.text());
    let id = engine.bodies()[0]["request_id"].as_str().unwrap().to_owned();
    for key in [&owner, &mate, &Key::new("root", Role::Admin)] {
        let answer = stage.post_as(key, path, &[], &next(&id)).await;
        assert_eq!(answer.status, 200, "{}: {}", key.id, answer.text());
    }
    let asked = engine.count();
    let unmarked = "resp_1".to_owned();
    let misplaced = id.replace("_kt", "_ku");
    for id in [&id, &unmarked, &misplaced] {
        let answer = stage.post_as(&other, path, &[], &next(id)).await;
        let error = &answer.json()["error"];
        assert_eq!((answer.status, &error["param"]), (404, &json!("previous_response_id")));
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("tenant \"blue\" has no such response"), "{message}");
        let cancel = format!("{path}/{id}/cancel");
        let answer = stage.post_as(&other, &cancel, &[], &json!({})).await;
        let error = &answer.json()["error"];
        assert_eq!((answer.status, &error["param"]), (404, &json!("response_id")));
    }
    // A client's own name for a response never reaches an engine, so it names none later on.
    assert_eq!(stage.post_as(&owner, path, &[], &next(&unmarked)).await.status, 404);
    assert_eq!(engine.count(), asked);
    stage.until_idle().await;
}
