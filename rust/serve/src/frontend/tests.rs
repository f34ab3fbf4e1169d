//! Operators' requests to a frontend with many workers, and the cost of workers that only repeat
//! their lists of models.
#![allow(clippy::unwrap_used)]

use std::sync::{Arc, mpsc};
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use kvflash_core::catalog::{Catalog, ListenerStatus};
use kvflash_core::clock::ManualClock;
use kvflash_core::error::Error;
use kvflash_core::fair::{LineOrder, Wish};
use kvflash_core::hash::engine::NameKeys;
use kvflash_core::ids::Worker;
use kvflash_core::policy::Policy;
use kvflash_core::repair::Feed;
use kvflash_core::select::{Ask, Pin, QueueOptions, QueueThreshold};
use tokio::runtime::{Builder, Runtime};

use super::app::App;
use super::engine::Engine;
use super::engine::EngineNotes;
use super::{FrontendApp, FrontendOptions, admin, scrape, workers};
use crate::Caller;
use crate::body::Received;
use crate::gateway::book::Expectation;
use crate::gateway::call::Head;
use crate::gateway::plan::Plan;

/// Whatever takes longer does not come.
const DEADLINE: Duration = Duration::from_secs(30);

/// A frontend with engines, numbered from 1, that serve `m`; without health checks.
fn frontend(engines: usize) -> (Arc<App>, Vec<Arc<Engine>>) {
    let threshold = QueueThreshold { batches: 1.0, batched_tokens: 1 };
    let max_wait = Duration::from_secs(60);
    let queue = QueueOptions { threshold, order: LineOrder::Fcfs, limit: 8, max_wait };
    let mut options = FrontendOptions::default();
    options.routing.policies.active = Arc::new(Policy::RoundRobin);
    options.routing.queue = Some(queue);
    let clock = Arc::new(ManualClock::default());
    let catalog = Arc::new(Catalog::default());
    let made = FrontendApp::new(options, catalog, clock).unwrap();
    let add = |at: usize| {
        let spec = format!("http://127.0.0.1:{}", 10_000 + at).parse().unwrap();
        let engine = made.app.fleet.add(spec).unwrap();
        made.app.fleet.learned(&engine, serving(&[])).unwrap();
        engine.recovered();
        engine
    };
    let engines = (0..engines).map(add).collect();
    (Arc::clone(&made.app), engines)
}

/// The model list of an engine that serves `m` and these adapters.
fn serving(adapters: &[&str]) -> EngineNotes {
    let adapters = adapters.iter().map(|name| ((*name).to_owned(), Some("m".to_owned())));
    let models = std::iter::once(("m".to_owned(), None)).chain(adapters).collect();
    EngineNotes { models, ..EngineNotes::default() }
}

fn runtime(threads: usize) -> Runtime {
    Builder::new_multi_thread().worker_threads(threads).enable_all().build().unwrap()
}

#[test]
fn scrapes_at_once_tell_of_every_worker() {
    const WORKERS: usize = 300;
    const ROUNDS: usize = 40;
    let (app, _) = frontend(WORKERS);
    let runtime = runtime(4);
    // One request waits and one has left: told once in every answer.
    let line = app.fleet.pools()[0].queue.clone().unwrap();
    let enter = || {
        let book = || Err::<(), _>(Error::MustWait("full".to_owned()));
        line.enter(&Wish::default(), 7, || 0, Arc::new(|| ()), book).unwrap()
    };
    let waits = enter();
    drop(enter());
    let scrapes: Vec<_> = (0..4)
        .map(|_| {
            let app = Arc::clone(&app);
            runtime.spawn(async move {
                for _ in 0..ROUNDS {
                    let answer = scrape::metrics(State(Arc::clone(&app))).await;
                    let bytes = to_bytes(answer.into_body(), usize::MAX).await.unwrap();
                    let text = String::from_utf8(bytes.to_vec()).unwrap();
                    let rows = |name: &str| {
                        let head = format!("kvflash_worker_{name}{{");
                        text.lines().filter(|line| line.starts_with(&head)).count()
                    };
                    for name in ["healthy", "requests_sent", "busy", "active_blocks"] {
                        assert_eq!(rows(name), WORKERS, "{name}");
                    }
                    for row in [
                        "queued_total{model=\"m\",tenant=\"default\",outcome=\"left\"} 1",
                        "queue_pending_requests{model=\"m\",tenant=\"default\"} 1",
                        "queue_pending_isl_tokens{model=\"m\",tenant=\"default\"} 7",
                    ] {
                        assert!(text.contains(&format!("\nkvflash_{row}\n")), "{row}");
                    }
                }
            })
        })
        .collect();
    for scrape in scrapes {
        runtime.block_on(scrape).unwrap();
    }
    drop(waits);
}

/// On a runtime with one serving thread: while `answer` waits for what `guard` holds, others are served.
fn hold_up<A, G>(runtime: &Runtime, answer: A, guard: G)
where
    A: Future<Output: IntoResponse> + Send + 'static,
{
    let (begun, has_begun) = mpsc::channel();
    let answer = runtime.spawn(async move {
        // No await before the answer: the thread that tells is in it.
        begun.send(()).unwrap();
        answer.await.into_response().status()
    });
    has_begun.recv_timeout(DEADLINE).unwrap();
    let (served, is_served) = mpsc::channel();
    let other = runtime.spawn(async move { served.send(()).unwrap() });
    let outcome = is_served.recv_timeout(DEADLINE);
    assert!(!answer.is_finished(), "it did not wait for what is held");
    drop(guard);
    assert_eq!(runtime.block_on(answer).unwrap(), StatusCode::OK);
    runtime.block_on(other).unwrap();
    outcome.expect("the only serving thread was held up");
}

#[test]
fn answers_of_every_worker_hold_up_no_connection() {
    let (app, engines) = frontend(2);
    app.fleet.learned(&engines[0], serving(&["a"])).unwrap();
    let (runtime, notes) = (runtime(1), &engines[0].notes);
    let state = || State(Arc::clone(&app));
    hold_up(&runtime, workers::workers(state()), notes.lock());
    hold_up(&runtime, admin::health(state()), notes.lock());
    hold_up(&runtime, admin::models(state()), notes.lock());
    // Each engine is asked for its adapters.
    let asked = Body::from(r#"{"model": "a", "prompt": "b"}"#);
    hold_up(
        &runtime,
        admin::explain(
            state(),
            Ok(Query(admin::Asked::default())),
            Caller::default(),
            HeaderMap::new(),
            asked,
        ),
        notes.lock(),
    );
    hold_up(&runtime, scrape::metrics(state()), app.common.more.write());
    // A scrape waits for another one without a thread.
    let first = runtime.spawn(scrape::metrics(state()));
    let held = app.common.more.write();
    hold_up(&runtime, scrape::metrics(state()), held);
    runtime.block_on(first).unwrap();
}

#[test]
fn an_engine_that_tells_again_what_it_serves_asks_no_other_one() {
    let (app, engines) = frontend(3);
    app.fleet.learned(&engines[2], serving(&["a"])).unwrap();
    // A request to the first engine waits for ever.
    let held = engines[0].notes.lock();
    let (told, is_told) = mpsc::channel();
    let last = (Arc::clone(&app), Arc::clone(&engines[2]));
    let learning = std::thread::spawn(move || {
        let (app, engine) = last;
        app.fleet.learned(&engine, serving(&["a"])).unwrap();
        app.fleet.learned(&engine, serving(&["b"])).unwrap();
        told.send(()).unwrap();
    });
    let outcome = is_told.recv_timeout(DEADLINE);
    drop(held);
    learning.join().unwrap();
    outcome.expect("it waited for another engine's notes");
    let names = || app.fleet.served().into_iter().map(|(name, _)| name).collect::<Vec<_>>();
    assert_eq!(names(), ["b", "m"]);
    app.fleet.learned(&engines[0], serving(&["b"])).unwrap();
    app.fleet.remove(engines[2].id).unwrap();
    assert_eq!(names(), ["b", "m"]);
    app.fleet.learned(&engines[0], serving(&[])).unwrap();
    assert_eq!(names(), ["m"]);
    app.fleet.remove(engines[0].id).unwrap();
    app.fleet.remove(engines[1].id).unwrap();
    assert!(names().is_empty());
}

#[test]
fn a_further_name_that_every_worker_has_restricts_no_request() {
    let (app, engines) = frontend(2);
    let runtime = runtime(1);
    let suits_all = || {
        let body = Bytes::from(r#"{"model": "a", "prompt": "b"}"#);
        let head = Head {
            uri: Uri::default(),
            headers: HeaderMap::new(),
            address: None,
            caller: Caller::default(),
        };
        let planned = async {
            let Received { bytes, counted, .. } = app.intake.whole(Body::from(body)).await?;
            Plan::make(&app, None, head, String::new(), bytes, counted, None).await
        };
        let plan = runtime.block_on(planned).map_err(|reject| reject.message).unwrap();
        plan.suits_all(&plan.route.pool.members())
    };
    app.fleet.learned(&engines[0], serving(&["a"])).unwrap();
    assert!(!suits_all());
    app.fleet.learned(&engines[1], serving(&["a"])).unwrap();
    assert!(suits_all());
}

#[test]
fn two_workers_do_not_share_an_event_socket() {
    let (app, _) = frontend(0);
    let add = |spec: &str| app.fleet.add(spec.parse().unwrap()).map(|engine| engine.id);
    assert_eq!(add("http://127.0.0.1:1,events=tcp://127.0.0.1:5557,dp=2").unwrap(), 1);
    let error = add("http://127.0.0.1:2,events=tcp://127.0.0.1:5558").unwrap_err();
    assert!(matches!(error, Error::Conflict(_)), "{error:?}");
    let wanted = "events: tcp://127.0.0.1:5558 is already the event socket of worker 1";
    assert!(error.to_string().starts_with(wanted), "{error}");
    // An engine may have a part of each kind, and a new process takes over the socket.
    add("http://127.0.0.1:2,events=tcp://127.0.0.1:5557,role=prefill").unwrap();
    app.fleet.remove(1).unwrap();
    add("http://127.0.0.1:3,events=tcp://127.0.0.1:5557").unwrap();
}

#[test]
fn a_body_of_another_api_needs_its_path_to_be_explained() {
    let (app, _) = frontend(1);
    let explain = |path: Option<&str>| {
        let asked = Query(admin::Asked { path: path.map(str::to_owned) });
        let body = Body::from(r#"{"model": "m", "input": "a"}"#);
        let (caller, headers) = (Caller::default(), HeaderMap::new());
        let answer = admin::explain(State(Arc::clone(&app)), Ok(asked), caller, headers, body);
        runtime(1).block_on(answer).map(drop).map_err(|reject| reject.message)
    };
    assert!(explain(None).unwrap_err().contains("add their path, as in ?path=/v1/responses"));
    explain(Some("/v1/responses")).unwrap();
    let refused = explain(Some("/v1/models")).unwrap_err();
    assert!(refused.starts_with("path: /explain does not support /v1/models; "), "{refused}");
}

#[test]
fn an_id_that_was_replaced_is_not_said_to_be_unrouted() {
    let (app, _) = frontend(1);
    let why = |bytes: usize| admin::tell_why(&app, &"i".repeat(bytes)).unwrap_err().message;
    assert!(why(256).contains("it was not routed here"));
    assert!(why(257).contains("kvflash replaced this longer one"));
}

/// A frontend that routes by events, with two workers.
fn by_events() -> Arc<App> {
    let clock = Arc::new(ManualClock::default());
    let options = FrontendOptions::default();
    let catalog = Arc::new(Catalog::default());
    let made = FrontendApp::new(options, catalog, clock).unwrap();
    for port in [10_000, 10_001] {
        let spec = format!("http://127.0.0.1:{port}").parse().unwrap();
        let engine = made.app.fleet.add(spec).unwrap();
        let notes = EngineNotes { block_size: Some(4), ..serving(&[]) };
        made.app.fleet.learned(&engine, notes).unwrap();
        engine.recovered();
    }
    Arc::clone(&made.app)
}

/// Worker 2 answers a new prompt and reports `cached` reused tokens.
fn answer(app: &App, at: u32, cached: Option<u64>) {
    let pool = app.fleet.pools().remove(0);
    let tokens: Vec<u32> = (at * 100..at * 100 + 41).collect();
    let prompt = Arc::new(pool.selector.prompt(&tokens, &NameKeys::default()));
    let pin = Some(Pin { instance_id: 2, dp_rank: None });
    let (_booking, selection) = pool.selector.select(&Ask { pin, ..Ask::new(&prompt) }).unwrap();
    let expected = Expectation { pool: Arc::clone(&pool), prompt, selection };
    expected.compare(app, Some(41), cached);
}

#[test]
fn a_worker_whose_reuse_its_events_do_not_mention_degrades_health() {
    let app = by_events();
    let runtime = runtime(1);
    let health = || {
        let answer = runtime.block_on(admin::health(State(Arc::clone(&app))));
        let bytes = runtime.block_on(to_bytes(answer.into_body(), usize::MAX)).unwrap();
        serde_json::from_slice::<serde_json::Value>(&bytes).unwrap()
    };
    let before = health();
    assert_eq!(before["status"], "healthy");
    assert_eq!(before["reuse"]["2:0"]["reported"], serde_json::Value::Null);
    assert_eq!(before["reuse"]["2:0"]["note"], "reuse is not reported yet");
    (0..20).for_each(|at| answer(&app, at, None));
    assert_eq!(health()["status"], "healthy");
    (0..20).for_each(|at| answer(&app, at, Some(40)));
    let after = health();
    assert_eq!(after["status"], "degraded");
    let reason = &after["reasons"][0];
    assert_eq!((&reason["code"], &reason["worker"]), (&"events_missing".into(), &"2:0".into()));
    assert!(reason["fix"].as_str().unwrap().contains("events=tcp://"), "{reason}");
    assert!(after["warnings"].to_string().contains("Is events= missing?"), "{after}");
    let reuse = &after["reuse"]["2:0"];
    let tokens = (&reuse["predicted_tokens"], &reuse["reported_tokens"], &reuse["reported"]);
    assert_eq!(tokens, (&0.into(), &800.into(), &true.into()));
    assert_eq!(after["reuse"]["1:0"]["trust"], 1.0);
    let scraped = runtime.block_on(scrape::metrics(State(Arc::clone(&app))));
    let text = runtime.block_on(to_bytes(scraped.into_body(), usize::MAX)).unwrap();
    let text = String::from_utf8(text.to_vec()).unwrap();
    for row in ["trust{worker=\"2:0\"} 0.0", "reported_tokens_total{worker=\"2:0\"} 800"] {
        assert!(text.contains(&format!("\nkvflash_worker_reuse_{row}\n")), "{row}: {text}");
    }
    // It leaves, and takes the evidence along.
    app.fleet.remove(2).unwrap();
    assert_eq!(
        (health()["status"].clone(), health()["reasons"].clone()),
        ("healthy".into(), serde_json::json!([]))
    );
}

#[test]
fn a_worker_that_may_hold_more_than_was_heard_of_is_named_everywhere() {
    let app = by_events();
    let runtime = runtime(1);
    let spec = "http://127.0.0.1:10002,events=tcp://127.0.0.1:10003".parse().unwrap();
    let engine = app.fleet.add(spec).unwrap();
    let notes = EngineNotes { block_size: Some(4), ..serving(&[]) };
    app.fleet.learned(&engine, notes).unwrap();
    engine.recovered();
    let json = |answer: Response| {
        let bytes = runtime.block_on(to_bytes(answer.into_body(), usize::MAX)).unwrap();
        serde_json::from_slice::<serde_json::Value>(&bytes).unwrap()
    };
    let text = |answer: Response| {
        let bytes = runtime.block_on(to_bytes(answer.into_body(), usize::MAX)).unwrap();
        String::from_utf8(bytes.to_vec()).unwrap()
    };
    let state = || State(Arc::clone(&app));
    let row = "\nkvflash_worker_index_incomplete{worker=\"3:0\"} 1\n";
    let health = json(runtime.block_on(admin::health(state())));
    assert_eq!(health["index_incomplete"]["3:0"]["code"], "no_events_yet");
    assert_eq!(health["index_incomplete"].as_object().unwrap().len(), 1, "{health}");
    // It is up, but without a connection to its socket its blocks never match.
    assert_eq!(health["status"], "degraded", "{health}");
    let ready = json(runtime.block_on(admin::ready(state())));
    assert_eq!(ready["index_incomplete"], serde_json::json!(["3:0"]));
    assert!(text(runtime.block_on(scrape::metrics(state()))).contains(row));

    let body = serde_json::json!({"model": "m", "prompt": [1, 2, 3, 4, 5], "max_tokens": 1});
    let explain = || {
        let body = Body::from(body.to_string());
        let asked = Query(admin::Asked::default());
        json(
            runtime
                .block_on(admin::explain(
                    state(),
                    Ok(asked),
                    Caller::default(),
                    HeaderMap::new(),
                    body,
                ))
                .unwrap(),
        )
    };
    let incomplete = |answer: &serde_json::Value| -> Vec<bool> {
        let candidates = answer["candidates"].as_array().unwrap_or_else(|| panic!("{answer}"));
        candidates.iter().map(|one| one.get("index_incomplete").is_some()).collect()
    };
    assert_eq!(incomplete(&explain()), [false, false, true]);

    // Its first batch is the first one that it published.
    let publisher = app.catalog.publishers().remove(0);
    publisher.set_status(ListenerStatus::Active, None);
    publisher.live(0, &[0x92, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0x90]);
    let health = json(runtime.block_on(admin::health(state())));
    assert_eq!(health["index_incomplete"], serde_json::json!({}));
    assert_eq!(health["status"], "healthy", "{health}");
    assert_eq!(incomplete(&explain()), [false, false, false]);
    assert!(!text(runtime.block_on(scrape::metrics(state()))).contains(row));
}

#[test]
fn an_engine_that_counted_another_prompt_says_nothing_of_its_events() {
    let app = by_events();
    let pool = app.fleet.pools().remove(0);
    let prompt = Arc::new(pool.selector.prompt(&[7; 41], &NameKeys::default()));
    let (booking, selection) = pool.selector.select(&Ask::new(&prompt)).unwrap();
    let worker: Worker = booking.worker();
    Expectation { pool: Arc::clone(&pool), prompt, selection }.compare(&app, Some(50), Some(40));
    assert!(!pool.selector.reuse.views().contains_key(&worker));
}
