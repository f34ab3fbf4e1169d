//! What every request passes before the app: the limit of connections, the lock, and the net that catches panics.

use std::any::Any;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;

use axum::body::Body;
use axum::http::header::CONNECTION;
use axum::http::{HeaderValue, Request, Response, StatusCode};
use futures_util::FutureExt;
use futures_util::future::{CatchUnwind, Either, Map};
use hyper::body::Incoming;
use hyper::service::Service;
use prometheus_client::metrics::counter::Counter;

use super::lock::{Admitted, Lock, Refusal, Verdict};
use super::{Reject, body, reserve};

/// Lets requests in, or not, and answers 500 where the service panics: that is a fault of ours, and it ends one
/// request. A connection beyond the limit gets answers to probes only.
pub(super) struct Guarded<S> {
    pub service: Arc<S>,
    pub lock: Lock,
    pub peer: SocketAddr,
    /// The DNS names of the certificate that the client has shown.
    pub certified: Vec<String>,
    pub panics: Counter,
    /// The limit of connections, for one beyond it.
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
        if let Some(limit) = self.beyond.filter(|_| !reserve::is_probe(request.uri().path())) {
            return Either::Right(reserve::refuse(request, limit).map(Ok).boxed());
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

/// The answer to a request that is not let in, once its body is read away.
async fn refuse(
    lock: Lock,
    mut request: Request<Incoming>,
    peer: SocketAddr,
    refusal: Refusal,
) -> Response<Body> {
    body::discard(request.body_mut()).await;
    lock.refuse(&request, peer, refusal)
}

type Answering<F> = Map<
    CatchUnwind<AssertUnwindSafe<F>>,
    Box<dyn FnOnce(Caught<Response<Body>>) -> Outcome + Send>,
>;

/// The service's answer to a request that was let in, or 500.
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
            // What was read of the request's body is not known.
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            Ok(response)
        });
        if let Ok(response) = &mut outcome {
            exit.leave(response);
        }
        outcome
    };
    // Nothing that a panic may have left half done is used again: state that outlives a request is
    // under locks of parking_lot, which have no poison, and changes by calls that do not panic midway.
    AssertUnwindSafe(service.call(request)).catch_unwind().map(Box::new(answer))
}

type Caught<T> = Result<Result<T, Infallible>, Box<dyn Any + Send>>;
