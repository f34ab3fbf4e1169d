//! A request to a worker and the stream of its items, whichever plane carries it.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::super::proxy::Upstream;
use super::frames::{self, Frame, Kind};
use super::spec::{PlaneSpec, WorkerSpec};
use super::tcp::{TcpItems, TcpPlane};
use super::web::{WebItems, WebPlane};

/// Time that a worker has to answer a ping.
pub(crate) const PING_TIME: Duration = Duration::from_secs(2);

/// Why a stream of items ended, or never began.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PlaneError {
    pub cause: Cause,
    pub message: String,
}

/// Whose fault it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Cause {
    /// There is no connection to the worker.
    Connect,
    /// A ping has no answer within its time.
    Silent,
    /// The connection broke before the end of the stream.
    Broken,
    /// What came is not the request plane's language.
    Protocol,
    /// The request is larger than a frame may be; nothing was sent.
    TooLarge,
    /// The worker says so itself: its code.
    Worker(String),
    /// The worker refuses the request, with this status of HTTP.
    Refused(u16),
    /// The prefill beside failed, so that the worker waits for nothing.
    Prefill,
}

impl PlaneError {
    pub fn new(cause: Cause, message: impl Into<String>) -> Self {
        Self { cause, message: message.into() }
    }

    /// The cause as a metric's label.
    pub fn label(&self) -> &'static str {
        match &self.cause {
            Cause::Connect => "connect",
            Cause::Silent => "timeout",
            Cause::Broken => "no_answer",
            Cause::Protocol => "protocol",
            Cause::TooLarge => "too_large",
            Cause::Prefill => "prefill_failed",
            Cause::Refused(429) => "overloaded",
            Cause::Refused(_) => "invalid",
            Cause::Worker(code) => match code.as_str() {
                "overloaded" => "overloaded",
                "draining" => "draining",
                "not_found" => "not_found",
                "cancelled" => "cancelled",
                "invalid" => "invalid",
                _ => "worker_error",
            },
        }
    }
}

/// The request frame's payload.
#[derive(Debug, Serialize)]
struct RequestFrame<'a, T> {
    id: &'a str,
    endpoint: &'a str,
    instance_id: u64,
    payload: &'a T,
}

/// The ping frame's payload: who is meant.
#[derive(Debug, Serialize)]
struct PingFrame<'a> {
    endpoint: &'a str,
    instance_id: u64,
}

fn encoded(value: Result<Vec<u8>, rmp_serde::encode::Error>) -> Result<Vec<u8>, PlaneError> {
    value.map_err(|error| PlaneError::new(Cause::Protocol, error.to_string()))
}

/// The error frame's payload; over HTTP the same as JSON.
#[derive(Debug, Deserialize)]
pub(crate) struct ErrorFrame {
    #[serde(default)]
    pub code: String,
    #[serde(default)]
    pub message: String,
}

impl From<ErrorFrame> for PlaneError {
    fn from(frame: ErrorFrame) -> Self {
        Self::new(Cause::Worker(frame.code), frame.message)
    }
}

/// The way to one worker.
#[derive(Debug)]
pub(crate) enum Plane {
    Tcp(Arc<TcpPlane>),
    Web(Box<WebPlane>),
}

impl Plane {
    pub fn new(spec: &WorkerSpec, connect_timeout: Duration, upstream: &Upstream) -> Self {
        match &spec.plane {
            PlaneSpec::Tcp { address } => {
                Self::Tcp(Arc::new(TcpPlane::new(address.clone(), connect_timeout)))
            }
            PlaneSpec::Http { url } => {
                Self::Web(Box::new(WebPlane::new(url, &spec.endpoint, upstream.clone())))
            }
        }
    }

    /// Send a request. Returns once it is on its way; the items are still to come.
    ///
    /// # Errors
    /// Nothing has been done by the worker, as far as can be known.
    pub async fn call(
        &self,
        id: &str,
        spec: &WorkerSpec,
        payload: &(impl Serialize + Sync),
    ) -> Result<Items, PlaneError> {
        match self {
            Self::Tcp(plane) => {
                let request =
                    RequestFrame { id, endpoint: &spec.endpoint, instance_id: spec.id, payload };
                let request = encoded(rmp_serde::to_vec_named(&request))?;
                Ok(Items::Tcp(plane.call(&request).await?))
            }
            Self::Web(plane) => {
                let body = encoded(rmp_serde::to_vec_named(payload))?;
                Ok(Items::Web(plane.call(id, spec.id, body).await?))
            }
        }
    }

    /// Does something live there?
    ///
    /// # Errors
    /// Why it does not.
    pub async fn ping(&self, spec: &WorkerSpec) -> Result<(), PlaneError> {
        match self {
            Self::Tcp(plane) => {
                let whom = PingFrame { endpoint: &spec.endpoint, instance_id: spec.id };
                plane.ping(&encoded(rmp_serde::to_vec_named(&whom))?).await
            }
            Self::Web(plane) => plane.ping().await,
        }
    }
}

/// The items of an answer. Dropping it before its end closes the connection, which is how the worker
/// learns that nobody wants the rest.
#[derive(Debug)]
pub(crate) enum Items {
    Tcp(TcpItems),
    Web(WebItems),
}

impl Items {
    /// Can the next item be had without waiting?
    pub fn is_ready(&self) -> bool {
        match self {
            Self::Tcp(items) => items.is_ready(),
            Self::Web(items) => frames::is_complete(&items.received),
        }
    }

    /// The next item's payload; `None` at the end.
    ///
    /// # Errors
    /// The stream is over, by a fault of the way or by the worker's own word.
    pub async fn next(&mut self) -> Result<Option<Bytes>, PlaneError> {
        let frame = match self {
            Self::Tcp(items) => items.frame().await?,
            Self::Web(items) => items.frame().await?,
        };
        let (outcome, is_in_step) = meaning(frame);
        if let Self::Tcp(items) = self
            && is_in_step
            && !matches!(outcome, Ok(Some(_)))
        {
            items.give_back();
        }
        outcome
    }
}

/// What a frame means for the stream, and whether the connection is still in step behind it.
fn meaning(frame: Frame) -> (Result<Option<Bytes>, PlaneError>, bool) {
    match frame.kind {
        Kind::Data => (Ok(Some(frame.payload)), true),
        Kind::End => (Ok(None), true),
        Kind::Error => match rmp_serde::from_slice::<ErrorFrame>(&frame.payload) {
            Ok(error) => (Err(error.into()), true),
            Err(error) => {
                let message = format!("unreadable error frame: {error}");
                (Err(PlaneError::new(Cause::Protocol, message)), false)
            }
        },
        other => {
            let message = format!("unexpected frame of kind {other:?}: items were expected");
            (Err(PlaneError::new(Cause::Protocol, message)), false)
        }
    }
}
