//! Stages before the app for every request: connection limit, authorization, and catching panics.

use std::any::Any;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::header::CONNECTION;
use axum::http::{HeaderValue, Request, Response, StatusCode};
use futures_util::FutureExt;
use futures_util::future::{CatchUnwind, Either, Map};
use hyper::body::Incoming;
use hyper::service::Service;
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use tokio::task::AbortHandle;

use super::Reject;
use super::body::discard;
use super::lock::{Admitted, Lock, Refusal, Verdict};

/// Admits or refuses requests, and answers 500 if the service panics, which ends only that request.
/// A connection beyond the limit only gets answers to probes.
pub(super) struct Guarded<S> {
    pub service: Arc<S>,
    pub lock: Lock,
    pub peer: SocketAddr,
    /// The DNS names in the client's certificate.
    pub certified: Vec<String>,
    pub panics: Counter,
    /// The connection limit, for a connection beyond it.
    pub beyond: Option<usize>,
}

type Outcome = Result<Response<Body>, Infallible>;

impl<S> Service<Request<Incoming>> for Guarded<S>
where
    S: Service<Request<Incoming>, Response = Response<Body>, Error = Infallible, Future: Send>
        + Send
        + Sync
        + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Either<Answering<S::Future>, Pin<Box<dyn Future<Output = Outcome> + Send>>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        if let Some(limit) = self.beyond.filter(|_| !is_probe(request.uri().path())) {
            return Either::Right(refuse_beyond(request, limit).map(Ok).boxed());
        }
        let (panics, peer) = (self.panics.clone(), self.peer);
        match self.lock.look(&request, peer, &self.certified) {
            Verdict::Open(admitted) => {
                Either::Left(answering(&*self.service, panics, request, admitted))
            }
            Verdict::Answered(answer) => Either::Right(std::future::ready(Ok(answer)).boxed()),
            Verdict::Refused(refusal) => {
                let lock = self.lock.clone();
                Either::Right(refuse(lock, request, peer, refusal).map(Ok).boxed())
            }
            Verdict::Slow(key) => {
                let (lock, service) = (self.lock.clone(), Arc::clone(&self.service));
                Either::Right(Box::pin(async move {
                    match lock.compare(&request, peer, key).await {
                        Ok(admitted) => answering(&*service, panics, request, admitted).await,
                        Err(refusal) => Ok(refuse(lock, request, peer, refusal).await),
                    }
                }))
            }
        }
    }
}

/// The response to a refused request, after its body was discarded.
async fn refuse(
    lock: Lock,
    mut request: Request<Incoming>,
    peer: SocketAddr,
    refusal: Refusal,
) -> Response<Body> {
    discard(request.body_mut()).await;
    lock.refuse(&request, peer, refusal)
}

type Answering<F> = Map<
    CatchUnwind<AssertUnwindSafe<F>>,
    Box<dyn FnOnce(Caught<Response<Body>>) -> Outcome + Send>,
>;

/// The service's response to an admitted request, or 500.
fn answering<S>(
    service: &S,
    panics: Counter,
    mut request: Request<Incoming>,
    admitted: Admitted,
) -> Answering<S::Future>
where
    S: Service<Request<Incoming>, Response = Response<Body>, Error = Infallible, Future: Send>,
{
    let exit = admitted.enter(&mut request);
    let answer = move |outcome: Caught<Response<Body>>| {
        let mut outcome = outcome.unwrap_or_else(|_| {
            panics.inc();
            let what = "kvflash failed on this request; please report it with the lines of its log";
            let mut response = Reject::new(StatusCode::INTERNAL_SERVER_ERROR, what).openai();
            // It is unknown how much of the request's body was read.
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            Ok(response)
        });
        if let Ok(response) = &mut outcome {
            exit.leave(response);
        }
        outcome
    };
    // State that a panic may have left incomplete is not reused: state that outlives a request is
    // protected by parking_lot locks, which do not poison, and changes in calls that do not panic
    // midway.
    AssertUnwindSafe(service.call(request)).catch_unwind().map(Box::new(answer))
}

type Caught<T> = Result<Result<T, Infallible>, Box<dyn Any + Send>>;

/// Connections beyond `--max-connections`. Another one ends the oldest: a probe sends its request
/// right after connecting, so connections that send nothing do not block it.
const PLACES: usize = 64;

/// Lifetime of such a connection, which serves a single request.
pub(super) const RESERVED_TIME: Duration = Duration::from_secs(5);

/// Paths that it may request.
const PROBES: [&str; 4] = ["/live", "/ready", "/health", "/metrics"];

/// The reserved connections, oldest first.
#[derive(Debug, Default)]
pub(super) struct Reserve {
    open: Mutex<VecDeque<AbortHandle>>,
}

impl Reserve {
    /// Adds a connection; above the limit the oldest is closed.
    pub fn add(&self, connection: AbortHandle) {
        let mut open = self.open.lock();
        open.retain(|one| !one.is_finished());
        if open.len() >= PLACES
            && let Some(oldest) = open.pop_front()
        {
            oldest.abort();
        }
        open.push_back(connection);
    }
}

/// Whether a reserved connection may request this path.
fn is_probe(path: &str) -> bool {
    PROBES.contains(&path)
}

/// The response to all other requests of such a connection, after the body was discarded.
async fn refuse_beyond(request: Request<Incoming>, max_connections: usize) -> Response<Body> {
    discard(&mut request.into_body()).await;
    let what = format!(
        "{max_connections} connections are open, the limit (--max-connections): only probes are answered, \
         try again"
    );
    Reject { retry_after_s: Some(1), ..Reject::new(StatusCode::SERVICE_UNAVAILABLE, what) }.openai()
}
