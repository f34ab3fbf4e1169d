//! Scrapes of a router with many workers.
#![allow(clippy::unwrap_used)]

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use axum::Extension;
use axum::body::{Body, to_bytes};
use axum::extract::State;
use axum::http::{Request, StatusCode};
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use kvflash_core::catalog::Catalog;
use kvflash_core::clock::ManualClock;
use kvflash_core::error::Error;
use kvflash_core::fleet::WorkerState;
use kvflash_core::select::{Ask, Pin, Prompt};
use serde_json::json;
use tokio::runtime::Builder;

use super::answer::worker_entries;
use super::routes::metrics;
use super::{RouterApp, RouterOptions};
use crate::{Face, Http, HttpSettings, Peer, Reject};

/// Whatever takes longer does not come.
const DEADLINE: Duration = Duration::from_secs(30);

fn router(workers: usize) -> RouterApp {
    let catalog = Arc::new(Catalog::default());
    let clock = Arc::new(ManualClock::default());
    let router = RouterApp::new(RouterOptions::default(), catalog, clock).unwrap();
    for id in 1..=workers {
        let new = serde_json::from_value(json!({ "worker_id": id, "model_name": "m" })).unwrap();
        router.app.fleet.add(new).unwrap();
    }
    router
}

#[test]
fn scrapes_at_once_tell_of_every_worker() {
    const WORKERS: usize = 300;
    const ROUNDS: usize = 40;
    let app = router(WORKERS).app;
    let runtime = Builder::new_multi_thread().worker_threads(4).build().unwrap();
    let scrapes: Vec<_> = (0..4)
        .map(|_| {
            let app = Arc::clone(&app);
            runtime.spawn(async move {
                for _ in 0..ROUNDS {
                    let answer = metrics(State(Arc::clone(&app))).await;
                    let bytes = to_bytes(answer.into_body(), usize::MAX).await.unwrap();
                    let text = String::from_utf8(bytes.to_vec()).unwrap();
                    for name in ["active_blocks", "active_prefill_tokens", "active_requests"] {
                        let head = format!("kvflash_worker_{name}{{");
                        let rows = text.lines().filter(|line| line.starts_with(&head)).count();
                        assert_eq!(rows, WORKERS, "{name}");
                    }
                    let row = "\nkvflash_router_workers{model=\"m\",tenant=\"default\"} 300\n";
                    assert!(text.contains(row));
                }
            })
        })
        .collect();
    for scrape in scrapes {
        runtime.block_on(scrape).unwrap();
    }
}

#[tokio::test]
async fn it_is_live_without_workers() {
    let (catalog, clock) = (Arc::new(Catalog::default()), Arc::new(ManualClock::default()));
    let router = RouterApp::new(RouterOptions::default(), catalog, clock).unwrap().router();
    let request = Request::get("/live").body(Body::empty()).unwrap();
    let answer = TowerToHyperService::new(router).call(request).await.unwrap();
    assert_eq!(answer.status(), StatusCode::OK);
}

#[test]
fn a_worker_whose_ranks_do_not_fit_is_refused() {
    let app = router(0).app;
    let add = |id: u64, dp_size: u32| {
        let new = json!({ "worker_id": id, "model_name": "m", "dp_size": dp_size });
        app.fleet.add(serde_json::from_value(new).unwrap()).map(|_| ())
    };
    // 63 of 1,024 ranks, and one of 1,000: 23 are left of 65,535.
    (1..=63).try_for_each(|id| add(id, 1_024)).unwrap();
    add(64, 1_000).unwrap();
    let error = add(65, 24).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("at most 65535 data-parallel ranks") && text.contains("got 65536"),
        "{text}"
    );
    assert_eq!(Reject::from(error).status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(app.fleet.counts(), (64, 64));
    add(66, 23).unwrap();
    app.fleet.remove(64).unwrap();
    add(65, 24).unwrap();
}

#[test]
fn a_block_size_lasts_as_long_as_a_worker_that_knows_it() {
    let app = router(0).app;
    let add = |id: u64, more: serde_json::Value| {
        let mut new = json!({ "worker_id": id, "model_name": "m" });
        new.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        app.fleet.add(serde_json::from_value(new).unwrap()).map(|(pool, _)| pool)
    };
    let pool = add(1, json!({ "block_size": 16 })).unwrap();
    add(2, json!({ "endpoint": "tcp://127.0.0.1:9" })).unwrap();
    app.fleet.remove(2).unwrap();
    assert_eq!(pool.index().block_size(), Some(16), "the last worker with events has left");
    assert!(add(2, json!({ "block_size": 32 })).is_err());
    app.fleet.remove(1).unwrap();
    let pool = add(2, json!({ "block_size": 32 })).unwrap();
    assert_eq!(pool.index().block_size(), Some(32));
}

/// A DELETE, which may come at any moment of the POST, always has the last word.
#[test]
fn a_worker_that_was_removed_does_not_come_back_with_a_restart() {
    const ROUNDS: usize = 100;
    let name = format!("kvflash-removed-{}.jsonl", std::process::id());
    let path = std::env::temp_dir().join(name);
    let settings = HttpSettings { state_file: Some(path.clone()), ..HttpSettings::default() };
    let http = Http::of(settings, Face::Control).unwrap();
    let options = RouterOptions { http, ..RouterOptions::default() };
    let (catalog, clock) = (Arc::new(Catalog::default()), Arc::new(ManualClock::default()));
    let router = RouterApp::new(options, catalog, clock).unwrap();
    router.restore().unwrap();
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let ask = |method: &str, path: &str, body: &str| {
        let peer = Extension(Peer("127.0.0.1:1".parse().unwrap()));
        let service = TowerToHyperService::new(router.router().layer(peer));
        let request = Request::builder().method(method).uri(path);
        let request = request.body(Body::from(body.to_owned())).unwrap();
        runtime.spawn(async move { service.call(request).await.unwrap().status() })
    };
    let deadline = Instant::now() + DEADLINE;
    for _ in 0..ROUNDS {
        let add = ask("POST", "/workers", r#"{"worker_id": 1, "model_name": "m"}"#);
        while runtime.block_on(ask("DELETE", "/workers/1", "")).unwrap() != StatusCode::OK {
            assert!(deadline > Instant::now(), "it was not added");
        }
        assert_eq!(runtime.block_on(add).unwrap(), StatusCode::CREATED);
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text.lines().last(), Some(r#"{"remove":"worker/1"}"#));
    }
    let _ = std::fs::remove_file(path);
}

#[test]
fn a_draining_worker_is_registered_and_not_chosen() {
    let app = router(2).app;
    let draining = |ids: &[u64]| {
        let entries = serde_json::to_value(worker_entries(&app, None)).unwrap();
        let states = entries.as_array().unwrap().iter();
        let draining = states.filter(|entry| entry["state"] == "draining");
        let found: Vec<u64> = draining.map(|entry| entry["worker_id"].as_u64().unwrap()).collect();
        assert_eq!(found, ids);
    };
    app.fleet.set_state(2, WorkerState::Draining).unwrap();
    draining(&[2]);
    let pool = app.fleet.pool_of(2).unwrap();
    let prompt = Prompt::unknown(8);
    for _ in 0..4 {
        let pin = Some(Pin { instance_id: 2, dp_rank: None });
        let selection = pool.selector.query(&Ask { pin, ..Ask::new(&prompt) }).unwrap();
        assert_eq!(selection.worker.instance_id, 1);
    }
    // A registration from the file includes the state, too.
    let kept = json!({ "worker_id": 3, "model_name": "m", "state": "draining" });
    app.fleet.add(serde_json::from_value(kept).unwrap()).unwrap();
    draining(&[2, 3]);
    app.fleet.set_state(2, WorkerState::Active).unwrap();
    draining(&[3]);
    assert!(app.fleet.set_state(9, WorkerState::Active).is_err());
}

#[test]
fn a_scrape_holds_up_no_connection() {
    let app = router(1).app;
    let runtime = Builder::new_multi_thread().worker_threads(1).build().unwrap();
    let held = app.common.more.write();
    let (begun, has_begun) = mpsc::channel();
    let scraped = Arc::clone(&app);
    let scrape = runtime.spawn(async move {
        // No await before the answer: the only thread is in it.
        begun.send(()).unwrap();
        metrics(State(scraped)).await.status().as_u16()
    });
    has_begun.recv_timeout(DEADLINE).unwrap();
    let (served, is_served) = mpsc::channel();
    let other = runtime.spawn(async move { served.send(()).unwrap() });
    let outcome = is_served.recv_timeout(DEADLINE);
    assert!(!scrape.is_finished(), "it did not wait for what is held");
    drop(held);
    assert_eq!(runtime.block_on(scrape).unwrap(), 200);
    runtime.block_on(other).unwrap();
    outcome.expect("the only serving thread was held up");
}

#[test]
fn a_worker_of_discovery_is_put_in_its_place() {
    let router = router(1);
    let app = &router.app;
    let put = |id: u64, card: serde_json::Value, port: u16| {
        let events = json!({"0": {"endpoint": format!("tcp://h:{port}")}});
        let plane = json!({"kind": "tcp", "address": "nowhere:1"});
        let spec = json!({"id": id, "plane": plane, "endpoint": "n/c/e", "url": "h:7", "card": card,
            "events": events, "state": "draining"});
        router.put_worker(&spec.to_string())
    };
    let card = json!({"model_name": "m", "kv_cache_block_size": 16, "total_kv_blocks": 0});
    assert_eq!(put(7, card.clone(), 1).unwrap(), 7);
    let (pool, member) = app.fleet.known(7).unwrap();
    assert_eq!((member.url.as_deref(), member.joined), (Some("h:7"), 1));
    assert!(pool.selector.draining.has(7));
    let sockets = || {
        let publishers = app.catalog.publishers();
        publishers.iter().map(|one| one.view().endpoint).collect::<Vec<_>>()
    };
    // With other events it is the same worker, with another card a new one, in its state.
    router.set_worker_state(7, "active").unwrap();
    put(7, card, 2).unwrap();
    assert_eq!((app.fleet.known(7).unwrap().1.joined, sockets()), (1, vec!["tcp://h:2".into()]));
    put(7, json!({"model_name": "m", "dp_size": 2}), 2).unwrap();
    assert_eq!(app.fleet.known(7).unwrap().1.joined, 2);
    assert!(!pool.selector.draining.has(7));
    // A gateway's worker stays as it is.
    let refused = put(1, json!({"model_name": "m"}), 3).unwrap_err();
    assert!(matches!(refused, Error::Conflict(_)), "{refused}");
    assert!(matches!(router.remove_worker(1), Err(Error::NotFound(_))));
    assert!(app.fleet.known(1).is_ok());
    router.remove_worker(7).unwrap();
    assert!(matches!(router.remove_worker(7), Err(Error::NotFound(_))));
    // The name counts once there are several models.
    assert!(router.find(Some("x"), None).is_ok());
    put(8, json!({"model_name": "n"}), 4).unwrap();
    assert!(matches!(router.find(Some("x"), None), Err(Error::NotFound(_))));
}
