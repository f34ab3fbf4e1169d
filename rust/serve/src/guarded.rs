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

use super::lock::{Caller, Lock, Refusal, Verdict, admit};
use super::{Reject, body, reserve};

/// Lets requests in, or not, and answers 500 where the service panics: that is a fault of ours, and it ends one
/// request. A connection beyond the limit gets answers to probes only.
pub(super) struct Guarded<S> {
    pub service: Arc<S>,
    pub lock: Lock,
    pub peer: SocketAddr,
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
        let panics = self.panics.clone();
        match self.lock.look(&request, self.peer) {
            Verdict::Open(caller) => {
                Either::Left(answering(&*self.service, panics, request, caller))
            }
            Verdict::Refused(refusal) => {
                let lock = self.lock.clone();
                Either::Right(refuse(lock, request, refusal).map(Ok).boxed())
            }
            Verdict::Slow(presented) => {
                let (lock, service) = (self.lock.clone(), Arc::clone(&self.service));
                Either::Right(Box::pin(async move {
                    match lock.compare(&request, presented).await {
                        Ok(caller) => answering(&*service, panics, request, caller).await,
                        Err(refusal) => Ok(refuse(lock, request, refusal).await),
                    }
                }))
            }
        }
    }
}

/// The answer to a request that is not let in, once its body is read away.
async fn refuse(lock: Lock, request: Request<Incoming>, refusal: Refusal) -> Response<Body> {
    let (head, mut body) = request.into_parts();
    body::discard(&mut body).await;
    lock.refuse(head.uri.path(), refusal)
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
    caller: Caller,
) -> Answering<S::Future>
where
    S: Service<Request<Incoming>, Response = Response<Body>, Error = Infallible, Future: Send>,
{
    admit(&mut request, caller);
    let answer = move |outcome: Caught<Response<Body>>| {
        outcome.unwrap_or_else(|_| {
            panics.inc();
            let what = "kvflash failed on this request; its log says where: please report it";
            let mut response = Reject::new(StatusCode::INTERNAL_SERVER_ERROR, what).openai();
            // What was read of the request's body is not known.
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
            Ok(response)
        })
    };
    // Nothing that a panic may have left half done is used again: state that outlives a request is
    // under locks of parking_lot, which have no poison, and changes by calls that do not panic midway.
    AssertUnwindSafe(service.call(request)).catch_unwind().map(Box::new(answer))
}

type Caught<T> = Result<Result<T, Infallible>, Box<dyn Any + Send>>;
