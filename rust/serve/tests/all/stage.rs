//! A frontend in this process, its engines, and time that a test moves on.

use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, Method, Request};
use bytes::Bytes;
use futures_util::stream;
use http_body_util::BodyExt;
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use kvflash_core::catalog::Catalog;
use kvflash_core::clock::ManualClock;
use kvflash_core::policy::Policy;
use kvflash_core::select::Overlap;
use kvflash_serve::frontend::{FrontendApp, FrontendOptions};
use kvflash_serve::{Caller, Key, Peer, Shutdown};
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::task::JoinHandle;

use super::engine::Engine;

/// Whatever takes longer does not come.
pub const DEADLINE: Duration = Duration::from_secs(30);
pub const BLOCK: u32 = 16;
const COMPLETIONS: &str = "/v1/completions";

/// A frontend that routes by round robin and expects workers to hold what they were sent.
pub struct Stage {
    app: FrontendApp,
    router: Router,
    clock: Arc<ManualClock>,
    shutdown: Shutdown,
}

/// An answer that was read to its end.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Bytes,
    /// The body was cut off.
    pub is_broken: bool,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    /// Instance id of the worker that answered.
    pub fn worker(&self) -> u64 {
        let worker = self.header("x-kvflash-worker").unwrap();
        worker.split(':').next().unwrap().parse().unwrap()
    }

    /// Blocks of the prompt that it was expected to hold.
    pub fn overlap(&self) -> u64 {
        self.header("x-kvflash-overlap-blocks").unwrap().parse().unwrap()
    }
}

/// A piece of an upload, or the end of its client.
pub type Part = Result<Vec<u8>, std::io::Error>;

/// A completion of these tokens for the model `m`.
pub fn prompt(tokens: Range<u32>) -> Value {
    json!({ "model": "m", "prompt": tokens.collect::<Vec<_>>() })
}

/// The same with more fields.
pub fn with(mut body: Value, more: Value) -> Value {
    let Value::Object(more) = more else { panic!("fields are an object") };
    body.as_object_mut().unwrap().extend(more);
    body
}

/// Until it is true; tasks of the frontend and of engines run meanwhile.
pub async fn until(what: &str, mut check: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + DEADLINE;
    while !check().await {
        assert!(Instant::now() < end, "waited for {what}");
        tokio::task::yield_now().await;
    }
}

impl Stage {
    pub fn new(change: impl FnOnce(&mut FrontendOptions)) -> Self {
        let mut options = FrontendOptions::default();
        options.routing.selector.overlap = Overlap::Predictions;
        options.routing.policies.active = Arc::new(Policy::RoundRobin);
        change(&mut options);
        let (clock, shutdown) = (Arc::new(ManualClock::default()), options.http.shutdown().clone());
        let app = FrontendApp::new(options, Arc::new(Catalog::default()), clock.clone()).unwrap();
        app.restore().unwrap();
        Self { router: app.router(), app, clock, shutdown }
    }

    /// An engine that serves `m`, healthy.
    pub async fn engine(&self) -> Engine {
        self.add(Engine::start(&[]).await, json!({})).await
    }

    /// The same with fields of its registration.
    pub async fn add(&self, mut engine: Engine, fields: Value) -> Engine {
        let body = with(json!({ "url": engine.url }), fields);
        let answer = self.call(Method::POST, "/workers", &[], Some(&body)).await;
        assert_eq!(answer.status, 201, "{}", answer.text());
        engine.id = answer.json()["id"].as_u64().unwrap();
        self.until_healthy(engine.id, true).await;
        engine
    }

    pub async fn until_healthy(&self, id: u64, is_healthy: bool) {
        until("a worker's health", async || {
            let workers = self.get("/workers").await;
            let worker = workers.as_array().unwrap().iter().find(|one| one["id"] == id).unwrap();
            worker["healthy"] == is_healthy
        })
        .await;
    }

    pub async fn call(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Option<&Value>,
    ) -> Answer {
        call(self.router.clone(), method, path, headers, body).await
    }

    pub async fn get(&self, path: &str) -> Value {
        self.call(Method::GET, path, &[], None).await.json()
    }

    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        self.call(Method::POST, path, &[], Some(body)).await
    }

    pub async fn patch(&self, path: &str, body: &Value) -> Answer {
        self.call(Method::PATCH, path, &[], Some(body)).await
    }

    pub async fn remove(&self, id: u64) {
        let answer = self.call(Method::DELETE, &format!("/workers/{id}"), &[], None).await;
        assert_eq!(answer.status, 200);
    }

    /// A request beside the test.
    pub fn send_to(&self, path: &str, body: Value) -> JoinHandle<Answer> {
        let (router, path) = (self.router.clone(), path.to_owned());
        tokio::spawn(async move { call(router, Method::POST, &path, &[], Some(&body)).await })
    }

    /// A request without a body, beside the test.
    pub fn beside(&self, method: Method, path: &str) -> JoinHandle<Answer> {
        let (router, path) = (self.router.clone(), path.to_owned());
        tokio::spawn(async move { call(router, method, &path, &[], None).await })
    }

    /// An upload.
    pub async fn upload(&self, path: &str, kind: &str, body: Vec<u8>) -> Answer {
        self.upload_beside(path, kind, body).await.unwrap()
    }

    /// A request of bytes beside the test.
    pub fn upload_beside(&self, path: &str, kind: &str, body: Vec<u8>) -> JoinHandle<Answer> {
        let (router, path, kind) = (self.router.clone(), path.to_owned(), kind.to_owned());
        tokio::spawn(async move {
            let headers = [("content-type", kind.as_str())];
            call_with(router, Method::POST, &path, &headers, body.into()).await
        })
    }

    /// An upload of what is sent to the channel, until that is closed.
    pub fn upload_slowly(
        &self,
        path: &str,
        kind: &str,
    ) -> (UnboundedSender<Part>, JoinHandle<Answer>) {
        let (sender, receiver) = unbounded_channel::<Part>();
        let parts = stream::unfold(receiver, |mut receiver| async {
            receiver.recv().await.map(|part| (part, receiver))
        });
        let (router, path, kind) = (self.router.clone(), path.to_owned(), kind.to_owned());
        let answer = tokio::spawn(async move {
            let headers = [("content-type", kind.as_str())];
            call_with(router, Method::POST, &path, &headers, Body::from_stream(parts)).await
        });
        (sender, answer)
    }

    pub async fn post_with(&self, path: &str, headers: &[(&str, &str)], body: &Value) -> Answer {
        self.call(Method::POST, path, headers, Some(body)).await
    }

    /// A completion, to the end of its answer.
    pub async fn ask(&self, body: &Value) -> Answer {
        self.call(Method::POST, COMPLETIONS, &[], Some(body)).await
    }

    pub async fn ask_with(&self, headers: &[(&str, &str)], body: &Value) -> Answer {
        self.call(Method::POST, COMPLETIONS, headers, Some(body)).await
    }

    /// The same in a task of its own; aborting it is like a client that leaves.
    pub fn send(&self, user: &str, body: Value) -> JoinHandle<Answer> {
        let (router, user) = (self.router.clone(), user.to_owned());
        tokio::spawn(async move {
            call(router, Method::POST, COMPLETIONS, &[("user", &user)], Some(&body)).await
        })
    }

    /// A completion with these headers, beside the test.
    pub fn send_with(&self, headers: &[(&str, &str)], body: Value) -> JoinHandle<Answer> {
        let headers: Vec<(String, String)> =
            headers.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        let router = self.router.clone();
        tokio::spawn(async move {
            let headers: Vec<(&str, &str)> =
                headers.iter().map(|(name, value)| (&**name, &**value)).collect();
            call(router, Method::POST, COMPLETIONS, &headers, Some(&body)).await
        })
    }

    /// A completion from an address, beside the test.
    pub fn send_from(
        &self,
        address: &str,
        headers: &[(&str, &str)],
        body: Value,
    ) -> JoinHandle<Answer> {
        let peer = Peer(SocketAddr::new(address.parse().unwrap(), 4_711));
        let mut request = Request::builder().method(Method::POST).uri(COMPLETIONS);
        request = request.extension(peer).header("content-type", "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Body::from(body.to_string())).unwrap();
        tokio::spawn(answer_to(self.router.clone(), request))
    }

    /// A request of the owner of a key.
    pub async fn post_as(
        &self,
        key: &Key,
        path: &str,
        headers: &[(&str, &str)],
        body: &Value,
    ) -> Answer {
        self.post_beside(key, path, headers, body.clone()).await.unwrap()
    }

    /// A completion of the owner of a key.
    pub async fn ask_as(&self, key: &Key, headers: &[(&str, &str)], body: &Value) -> Answer {
        self.post_as(key, COMPLETIONS, headers, body).await
    }

    /// The same beside the test.
    pub fn send_as(&self, key: &Key, headers: &[(&str, &str)], body: Value) -> JoinHandle<Answer> {
        self.post_beside(key, COMPLETIONS, headers, body)
    }

    /// A request of the owner of a key, beside the test.
    pub fn post_beside(
        &self,
        key: &Key,
        path: &str,
        headers: &[(&str, &str)],
        body: Value,
    ) -> JoinHandle<Answer> {
        let caller = Caller::Known(Arc::new(key.clone()));
        let mut request = Request::builder().method(Method::POST).uri(path).extension(caller);
        request = request.header("content-type", "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Body::from(body.to_string())).unwrap();
        tokio::spawn(answer_to(self.router.clone(), request))
    }

    /// A completion with this body, beside the test.
    pub fn send_raw(&self, body: Body) -> JoinHandle<Answer> {
        let router = self.router.clone();
        tokio::spawn(async move { call_with(router, Method::POST, COMPLETIONS, &[], body).await })
    }

    /// All metrics.
    pub async fn scrape(&self) -> String {
        self.call(Method::GET, "/metrics", &[], None).await.text().to_owned()
    }

    /// The value of a metric, its name without the prefix; 0 where it is not told.
    pub async fn metric(&self, name: &str) -> f64 {
        let answer = self.call(Method::GET, "/metrics", &[], None).await;
        let head = format!("kvflash_{name} ");
        let value = answer.text().lines().find_map(|line| line.strip_prefix(&head));
        value.map_or(0.0, |value| value.parse().unwrap())
    }

    pub async fn until_metric(&self, name: &str, value: f64) {
        let mut seen = f64::NAN;
        until(&format!("{name} to be {value}"), async || {
            seen = self.metric(name).await;
            (seen - value).abs() < 1e-9
        })
        .await;
    }

    /// Nothing is booked and nothing in flight any more.
    pub async fn until_idle(&self) {
        until("the load to be freed", async || {
            let answer = self.call(Method::GET, "/metrics", &[], None).await;
            let names = ["kvflash_worker_active_requests", "kvflash_requests_in_flight"];
            let is_load = |line: &&str| names.iter().any(|name| line.starts_with(name));
            answer.text().lines().filter(is_load).all(|line| line.ends_with(" 0"))
        })
        .await;
    }

    /// The process stops, and answers what it has.
    pub fn stop(&self) {
        self.shutdown.stop();
    }

    /// The process stops: it was announced, and the time for answers is over.
    pub fn cut_off(&self) {
        self.shutdown.announce();
        self.shutdown.cut_off();
    }

    /// Free bookings without activity, as the process does every second.
    pub fn expire(&self) {
        self.app.expire();
    }

    /// Move all clocks on.
    pub async fn skip(&self, time: Duration) {
        self.clock.advance(time.as_millis() as u64);
        tokio::time::pause();
        tokio::time::advance(time).await;
        tokio::time::resume();
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.shutdown.stop();
    }
}

async fn call(
    router: Router,
    method: Method,
    path: &str,
    headers: &[(&str, &str)],
    body: Option<&Value>,
) -> Answer {
    let body = body.map_or_else(Body::empty, |body| Body::from(body.to_string()));
    call_with(router, method, path, headers, body).await
}

async fn call_with(
    router: Router,
    method: Method,
    path: &str,
    headers: &[(&str, &str)],
    body: Body,
) -> Answer {
    let mut request = Request::builder().method(method).uri(path);
    if !headers.iter().any(|(name, _)| *name == "content-type") {
        request = request.header("content-type", "application/json");
    }
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    answer_to(router, request.body(body).unwrap()).await
}

async fn answer_to(router: Router, request: Request<Body>) -> Answer {
    let response = TowerToHyperService::new(router).call(request).await.unwrap();
    let (head, mut rest) = response.into_parts();
    let (mut body, mut is_broken) = (Vec::new(), false);
    while let Some(frame) = rest.frame().await {
        match frame.map(|frame| frame.into_data()) {
            Ok(Ok(data)) => body.extend_from_slice(&data),
            Ok(Err(_trailers)) => {}
            Err(_) => {
                is_broken = true;
                break;
            }
        }
    }
    Answer { status: head.status.as_u16(), headers: head.headers, body: body.into(), is_broken }
}
