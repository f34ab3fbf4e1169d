//! Workers of discovery as the frontend takes them, and what stands in for them in this process.
#![allow(clippy::unwrap_used)]

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use axum::body::to_bytes;
use axum::extract::State;
use axum::http::{HeaderMap, Uri};
use bytes::BytesMut;
use kvflash_core::catalog::{Catalog, Command};
use kvflash_core::clock::ManualClock;
use kvflash_core::error::{Error, Result};
use kvflash_core::select::Overlap;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Semaphore;

use super::plane::{Kind, encode_frame, take_frame};
use crate::frontend::engine::EngineNotes;
use crate::frontend::engine_spec::EngineSpec;
use crate::frontend::{FrontendApp, FrontendOptions, admin, scrape};
use crate::gateway::api::Row;
use crate::gateway::call::Head;
use crate::gateway::send::forward;
use crate::metrics::{CauseLabel, OutcomeLabel};
use crate::{Caller, FrontendSettings, RemoteIndexerOptions};

/// A frontend, the catalog that it subscribes with, and the runtime that its tasks need.
struct Frontend {
    app: FrontendApp,
    catalog: Arc<Catalog>,
    runtime: Runtime,
}

impl Frontend {
    fn new(options: FrontendOptions) -> Self {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let catalog = Arc::new(Catalog::default());
        let clock = Arc::new(ManualClock::default());
        let app = {
            let _guard = runtime.enter();
            FrontendApp::new(options, Arc::clone(&catalog), clock).unwrap()
        };
        Self { app, catalog, runtime }
    }

    /// Discovery announces worker 7 of model `m`, with two ranks that publish at these addresses.
    fn put(&self, endpoints: [&str; 2]) {
        let _guard = self.runtime.enter();
        let worker = json!({
            "id": 7, "plane": {"kind": "tcp", "address": "127.0.0.1:9"}, "endpoint": "n/c/e",
            "card": {"model_name": "m", "model_input": "text", "dp_size": 2},
            "events": {"0": {"endpoint": endpoints[0]}, "1": {"endpoint": endpoints[1]}},
        });
        assert_eq!(self.app.put_worker(&worker.to_string()).unwrap(), 7);
    }

    /// Discovery announces worker `id` of model `m`, with so many ranks.
    fn put_ranks(&self, id: u64, dp_size: u32) -> Result<u64> {
        let _guard = self.runtime.enter();
        let worker = json!({
            "id": id, "plane": {"kind": "tcp", "address": "127.0.0.1:9"}, "endpoint": "n/c/e",
            "card": {"model_name": "m", "model_input": "text", "dp_size": dp_size},
        });
        self.app.put_worker(&worker.to_string())
    }

    /// What GET /health warns of.
    fn warnings(&self) -> String {
        let answer = admin::health(State(Arc::clone(&self.app.app)));
        let body = self
            .runtime
            .block_on(async { to_bytes(answer.await.into_body(), usize::MAX).await.unwrap() });
        serde_json::from_slice::<Value>(&body).unwrap()["warnings"].to_string()
    }

    /// The sockets that it has been told to subscribe to.
    fn subscribed(&self) -> Vec<String> {
        let orders = std::iter::from_fn(|| self.catalog.commands.next(Some(Duration::ZERO)));
        let endpoint = |order| match order {
            Command::Subscribe { endpoint, .. } => Some(endpoint),
            _ => None,
        };
        orders.filter_map(endpoint).collect()
    }
}

fn remote() -> RemoteIndexerOptions {
    let (url, deadline) = ("http://127.0.0.1:9".to_owned(), Duration::from_millis(50));
    RemoteIndexerOptions { url, deadline }
}

const FIRST: [&str; 2] = ["tcp://h:1", "tcp://h:2"];
const LATER: [&str; 2] = ["tcp://h:1", "tcp://h:3"];

#[test]
fn sockets_of_discovery_are_subscribed_to() {
    let frontend = Frontend::new(FrontendOptions::default());
    frontend.put(FIRST);
    assert_eq!(frontend.subscribed(), FIRST);
    frontend.put(LATER);
    assert_eq!(frontend.subscribed(), LATER[1..]);
    assert_eq!(frontend.catalog.publishers().len(), 2);
}

#[test]
fn sockets_of_discovery_are_left_alone_where_events_are_not_used() {
    let set = |edit: fn(&mut FrontendOptions)| {
        let mut options = FrontendOptions::default();
        edit(&mut options);
        options
    };
    for (mode, options) in [
        ("--no-kv-events", set(|options| options.routing.selector.overlap = Overlap::Predictions)),
        ("--use-remote-indexer", set(|options| options.routing.remote_indexer = Some(remote()))),
        (
            "overlap weight 0",
            set(|options| options.routing.selector.router.overlap_score_weight = 0.0),
        ),
        (
            "credit 0",
            set(|options| options.routing.selector.router.scale.overlap_score_credit = 0.0),
        ),
        (
            "--load-aware",
            set(|options| {
                options.routing.selector.overlap = Overlap::Predictions;
                options.routing.selector.router.scale.overlap_score_credit = 0.0;
            }),
        ),
    ] {
        let frontend = Frontend::new(options);
        frontend.put(FIRST);
        frontend.put(LATER);
        assert!(frontend.subscribed().is_empty(), "{mode}");
        assert!(frontend.catalog.publishers().is_empty(), "{mode}");
    }
}

/// A health check says nothing about its card and its events.
#[test]
fn faults_of_a_card_and_of_events_stay_until_they_are_mended() {
    let frontend = Frontend::new(FrontendOptions::default());
    // A check of its health neither fails nor succeeds meanwhile.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap().to_string();
    let put = |id: u64, endpoint: &str| {
        let _guard = frontend.runtime.enter();
        let worker = json!({
            "id": id, "plane": {"kind": "tcp", "address": address}, "endpoint": "n/c/e",
            "card": {
                "model_name": "m", "model_input": "text",
                "reasoning_parser": (id == 7).then_some("nonsense"),
            },
            "events": {"0": {"endpoint": endpoint}},
        });
        frontend.app.put_worker(&worker.to_string()).unwrap();
    };
    put(7, "tcp://h:1");
    put(8, "http://h:1");
    let fleet = &frontend.app.app.fleet;
    let told =
        || (frontend.warnings().contains("nonsense"), frontend.warnings().contains("events: "));
    assert_eq!(told(), (true, true), "{}", frontend.warnings());
    for engine in fleet.engines() {
        engine.failed("it does not answer");
        assert!(frontend.warnings().contains("does not answer"));
        engine.recovered();
    }
    assert_eq!(told(), (true, true), "{}", frontend.warnings());
    put(8, "tcp://h:2");
    assert_eq!(told(), (true, false), "{}", frontend.warnings());
}

#[test]
fn a_worker_whose_ranks_do_not_fit_is_refused_and_comes_when_others_left() {
    let mut options = FrontendOptions::default();
    options.routing.selector.overlap = Overlap::Predictions;
    let frontend = Frontend::new(options);
    // 63 of 1,024 ranks, and one of 1,000: 23 are left of 65,535.
    for id in 1..=63 {
        frontend.put_ranks(id, 1_024).unwrap();
    }
    frontend.put_ranks(64, 1_000).unwrap();
    assert_eq!(frontend.warnings(), "[]");
    let error = frontend.put_ranks(165, 24).unwrap_err();
    assert!(matches!(error, Error::Overloaded(_)), "{error:?}");
    let wanted = "a router supports at most 65535 data-parallel ranks";
    assert!(error.to_string().contains(wanted), "{error}");
    let warnings = frontend.warnings();
    let wanted = format!("worker 165 in discovery is not accepted: {wanted}");
    assert!(warnings.contains(&wanted) && warnings.contains("got 65536"), "{warnings}");
    let fleet = &frontend.app.app.fleet;
    assert!(fleet.engine(165).is_none());
    assert_eq!(fleet.pools()[0].selector.loads().len(), 65_512, "the others are served");
    // So is an engine at an address, before anybody asks what it serves.
    let spec: EngineSpec = "http://127.0.0.1:9,dp=24".parse().unwrap();
    assert!(matches!(fleet.add(spec.clone()), Err(Error::Overloaded(_))));
    frontend.put_ranks(66, 23).unwrap();
    frontend.app.remove_worker(64).unwrap();
    frontend.put_ranks(165, 24).unwrap();
    let engine = fleet.add(spec).unwrap();
    let models = vec![("m".to_owned(), None)];
    fleet.learned(&engine, EngineNotes { models, ..EngineNotes::default() }).unwrap();
    assert_eq!(frontend.warnings(), "[]");
    // One of discovery with the id of an engine at an address is refused, and leaves without it.
    assert!(matches!(frontend.put_ranks(engine.id, 1), Err(Error::Conflict(_))));
    assert_ne!(frontend.warnings(), "[]");
    frontend.app.remove_worker(engine.id).unwrap();
    assert!(fleet.engine(engine.id).is_some());
    assert_eq!(frontend.warnings(), "[]");
}

#[test]
fn a_request_for_a_model_without_a_decode_worker_is_told_why_one_is_not_accepted() {
    let frontend = Frontend::new(FrontendOptions::default());
    let put = |id: u64, model_type: &[&str]| {
        let _guard = frontend.runtime.enter();
        let worker = json!({
            "id": id, "plane": {"kind": "tcp", "address": "127.0.0.1:9"}, "endpoint": "n/c/e",
            "card": {"model_name": "m", "model_type": model_type},
        });
        frontend.app.put_worker(&worker.to_string())
    };
    let refusal = || match frontend.app.app.fleet.route("m") {
        Err(error @ Error::NoWorker(_)) => error.to_string(),
        _ => panic!("no worker decodes"),
    };
    put(7, &["chat"]).unwrap_err();
    let why = "; worker 7 in discovery is not accepted: its card names no tokenizer folder";
    assert!(refusal().contains(why), "{}", refusal());
    put(8, &["prefill"]).unwrap();
    let both = format!("add a decode worker{why}");
    assert!(refusal().contains(&both), "{}", refusal());
    frontend.app.remove_worker(7).unwrap();
    assert!(refusal().ends_with("add a decode worker"), "{}", refusal());
}

#[test]
fn a_request_that_gets_no_core_to_be_tokenized_is_counted() {
    let own = FrontendSettings {
        tokenize_timeout: Duration::from_millis(1),
        ..FrontendSettings::default()
    };
    let frontend = Frontend::new(FrontendOptions { own, ..FrontendOptions::default() });
    let folder = format!("{}/../../tests/vectors/tiny-llama", env!("CARGO_MANIFEST_DIR"));
    {
        let _guard = frontend.runtime.enter();
        let worker = json!({
            "id": 7, "plane": {"kind": "tcp", "address": "127.0.0.1:9"}, "endpoint": "n/c/e",
            "card": {"model_name": "m", "tokenizer": folder},
        });
        frontend.app.put_worker(&worker.to_string()).unwrap();
    }
    let app = &frontend.app.app;
    let (begun, has_begun) = mpsc::channel();
    let gate = Arc::new(Mutex::new(()));
    let held = gate.lock();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let jobs: Vec<_> = (0..cores)
        .map(|_| {
            let (app, gate, begun) = (Arc::clone(app), Arc::clone(&gate), begun.clone());
            let job = move || {
                begun.send(()).unwrap();
                drop(gate.lock());
            };
            frontend.runtime.spawn(async move { app.compute.run("a".into(), 1, job).await })
        })
        .collect();
    jobs.iter().for_each(|_| has_begun.recv_timeout(Duration::from_secs(30)).unwrap());
    let row = Row::of("/v1/completions").unwrap();
    let (uri, headers) = (Uri::from_static(row.path), HeaderMap::new());
    let head = Head { uri, headers, address: None, caller: Caller::default() };
    let body = json!({ "model": "m", "prompt": "word ".repeat(20_000) }).to_string();
    let answer = forward(Arc::clone(app), row, head, body.into());
    let status = frontend.runtime.block_on(answer).status();
    let refused = app.metrics.refused.get_or_create(&CauseLabel { cause: "tokenizer" }).get();
    assert_eq!((status.as_u16(), refused), (429, 1));
    drop(held);
    for job in jobs {
        frontend.runtime.block_on(job).unwrap().unwrap();
    }
}

/// A worker on this machine, which answers requests with these frames in order; its address. One
/// that prefills answers when the other one has a request, which `decodes` counts.
fn fake_worker(
    runtime: &Runtime,
    answers: Vec<Vec<(Kind, Vec<u8>)>>,
    is_prefill: bool,
    decodes: Arc<Semaphore>,
) -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    runtime.spawn(async move {
        let listener = TcpListener::from_std(listener).unwrap();
        let (mut answers, mut open) = (answers.into_iter(), Vec::new());
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut received = BytesMut::new();
            let frame = loop {
                if let Some(frame) = take_frame(&mut received, "w").unwrap() {
                    break frame;
                }
                assert_ne!(stream.read_buf(&mut received).await.unwrap(), 0);
            };
            let answer = match frame.kind {
                Kind::Ping => vec![(Kind::Pong, Vec::new())],
                _ if is_prefill => {
                    decodes.acquire().await.unwrap().forget();
                    answers.next().unwrap()
                }
                _ => {
                    decodes.add_permits(1);
                    answers.next().unwrap()
                }
            };
            for (kind, payload) in answer {
                stream.write_all(&encode_frame(kind, &payload).unwrap()).await.unwrap();
            }
            open.push(stream);
        }
    });
    address
}

/// A prefill that runs beside its decode has one outcome.
#[test]
fn a_prefill_beside_its_decode_is_counted_once() {
    let text = || vec![(Kind::Data, rmp_serde::to_vec("a").unwrap()), (Kind::End, Vec::new())];
    let error = rmp_serde::to_vec_named(&json!({ "code": "internal", "message": "no" })).unwrap();
    for (prefill, decode, expected) in [
        (text(), vec![text()], [1, 0, 0]),
        // The first attempt to decode waits for a prefill that fails.
        (vec![(Kind::Error, error)], vec![Vec::new(), text()], [0, 1, 1]),
    ] {
        let frontend = Frontend::new(FrontendOptions::default());
        let decodes = Arc::new(Semaphore::new(0));
        let put = |id: u64, answers, model_type: &str| {
            let is_prefill = model_type == "prefill";
            let decodes = Arc::clone(&decodes);
            let address = fake_worker(&frontend.runtime, answers, is_prefill, decodes);
            let _guard = frontend.runtime.enter();
            let worker = json!({
                "id": id, "plane": {"kind": "tcp", "address": address}, "endpoint": "n/c/e",
                "card": {
                    "model_name": "m", "model_input": "text", "model_type": [model_type],
                    "bootstrap": {"host": "127.0.0.1", "port": 9},
                },
            });
            frontend.app.put_worker(&worker.to_string()).unwrap();
        };
        put(7, decode, "completions");
        put(8, vec![prefill], "prefill");
        let app = &frontend.app.app;
        let row = Row::of("/v1/completions").unwrap();
        let (uri, headers) = (Uri::from_static(row.path), HeaderMap::new());
        let head = Head { uri, headers, address: None, caller: Caller::default() };
        let body = json!({ "model": "m", "prompt": "hello" }).to_string();
        let counted = frontend.runtime.block_on(async {
            let answer = forward(Arc::clone(app), row, head, body.into()).await;
            assert_eq!(answer.status().as_u16(), 200);
            to_bytes(answer.into_body(), usize::MAX).await.unwrap();
            let count =
                |outcome| app.metrics.prefills.get_or_create(&OutcomeLabel { outcome }).get();
            let counts = || ["handed_off", "failed", "fallback"].map(count);
            let end = Instant::now() + Duration::from_secs(30);
            while counts() != expected && Instant::now() < end {
                tokio::task::yield_now().await;
            }
            counts()
        });
        assert_eq!(counted, expected);
    }
}

/// Of one that discovery has taken away, too: its lease ends before anybody knows why.
#[test]
fn requests_do_not_wait_for_a_worker_that_is_frozen() {
    // The system takes connections for it, and nothing answers them.
    let frozen = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = frozen.local_addr().unwrap().to_string();
    let own = FrontendSettings {
        health_interval: Duration::from_millis(10),
        ..FrontendSettings::default()
    };
    let frontend = Frontend::new(FrontendOptions { own, ..FrontendOptions::default() });
    let put = |id: u64, address: &str| {
        let _guard = frontend.runtime.enter();
        let worker = json!({
            "id": id, "plane": {"kind": "tcp", "address": address}, "endpoint": "n/c/e",
            "card": {"model_name": "m", "model_input": "text"},
        });
        frontend.app.put_worker(&worker.to_string()).unwrap();
    };
    put(7, &address);
    put(8, &address);
    // Its port is closed: it ends when it has answered what it has.
    put(9, "127.0.0.1:9");
    let engines = frontend.app.app.fleet.engines();
    let engine = |id: u64| engines.iter().find(|engine| engine.id == id).unwrap();
    frontend.runtime.block_on(async {
        let first_byte = std::future::pending::<()>;
        let (there, gone, ending) = (engine(7), engine(8), engine(9));
        let mut ends = std::pin::pin!(ending.while_well(first_byte()));
        tokio::select! {
            biased;
            _ = &mut ends => panic!("nobody waits for an answer that may come"),
            () = tokio::task::yield_now() => {}
        }
        let waits =
            async { tokio::join!(there.while_well(first_byte()), gone.while_well(first_byte())) };
        let removed = async {
            frontend.app.remove_worker(8).unwrap();
            frontend.app.remove_worker(9).unwrap();
        };
        tokio::select! {
            ((one, two), ()) = async { tokio::join!(waits, removed) } => {
                assert_eq!((one, two), (None, None));
            }
            _ = &mut ends => panic!("nobody waits for an answer that may come"),
            () = tokio::time::sleep(Duration::from_secs(30)) => panic!("they wait still"),
        }
        assert!(!there.is_healthy());
    });
}

/// The answers of two workers at one address to a completion of three tokens, and the frontend that asked them.
fn completed(answers: Vec<Vec<(Kind, Vec<u8>)>>, more: &Value) -> (String, Frontend) {
    let frontend = Frontend::new(FrontendOptions::default());
    let address = fake_worker(&frontend.runtime, answers, false, Arc::new(Semaphore::new(0)));
    for id in [7, 8] {
        let _guard = frontend.runtime.enter();
        let worker = json!({
            "id": id, "plane": {"kind": "tcp", "address": address}, "endpoint": "n/c/e",
            "card": {"model_name": "m", "model_input": "text"},
        });
        frontend.app.put_worker(&worker.to_string()).unwrap();
    }
    let row = Row::of("/v1/completions").unwrap();
    let (uri, headers) = (Uri::from_static(row.path), HeaderMap::new());
    let head = Head { uri, headers, address: None, caller: Caller::default() };
    let mut body = json!({ "model": "m", "prompt": [1, 2, 3] });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let app = &frontend.app.app;
    let text = frontend.runtime.block_on(async {
        let answer = forward(Arc::clone(app), row, head, body.to_string().into()).await;
        assert_eq!(answer.status().as_u16(), 200);
        to_bytes(answer.into_body(), usize::MAX).await.unwrap()
    });
    (String::from_utf8(text.to_vec()).unwrap(), frontend)
}

/// A worker's answer of these pieces.
fn pieces(pieces: &[Value]) -> Vec<(Kind, Vec<u8>)> {
    let data = pieces.iter().map(|piece| (Kind::Data, rmp_serde::to_vec_named(piece).unwrap()));
    data.chain([(Kind::End, Vec::new())]).collect()
}

#[test]
fn the_usage_of_a_worker_of_plain_text_is_what_is_known_here() {
    let answer = || vec![pieces(&[json!("a"), json!("b")])];
    let usage = r#""usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,"#;
    let wanted = json!({ "stream": true, "stream_options": { "include_usage": true } });
    for (more, is_told) in
        [(&json!({}), true), (&wanted, true), (&json!({ "stream": true }), false)]
    {
        let (text, _) = completed(answer(), more);
        let told: Value = serde_json::from_str(&text).unwrap_or_default();
        let is_found = text.contains(usage) || told["usage"]["total_tokens"] == 5;
        assert_eq!(is_found, is_told, "{more}: {text}");
    }
}

#[test]
fn an_answer_without_a_choice_is_not_complete() {
    let empty = pieces(&[json!({ "choices": [] })]);
    let (text, frontend) = completed(vec![empty, pieces(&[json!("b")])], &json!({}));
    assert!(text.contains(r#""text":"b""#), "{text}");
    let answers = &frontend.app.app.metrics.answers;
    let count = |outcome| answers.get_or_create(&OutcomeLabel { outcome }).get();
    assert_eq!(["complete", "broken", "client_gone"].map(count), [1, 1, 0]);
}

#[test]
fn a_request_that_is_sent_again_counts_once() {
    let error = rmp_serde::to_vec_named(&json!({ "code": "internal", "message": "no" })).unwrap();
    let mut broken = pieces(&[json!("a")]);
    broken[1] = (Kind::Error, error);
    let (text, frontend) = completed(vec![broken, pieces(&[json!("b")])], &json!({}));
    assert!(text.contains(r#""text":"b""#), "{text}");
    let app = &frontend.app.app;
    assert_eq!(app.metrics.input.get(), 3);
    let page = frontend.runtime.block_on(async {
        let answer = scrape::metrics(State(Arc::clone(app))).await;
        to_bytes(answer.into_body(), usize::MAX).await.unwrap()
    });
    let page = String::from_utf8(page.to_vec()).unwrap();
    assert!(page.contains("kvflash_first_byte_seconds_count 1\n"), "{page}");
}
