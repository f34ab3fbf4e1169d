//! A request to a worker and the stream of its items, whichever plane carries it: frames of a length, a kind and a
//! payload, over TCP, or as the body of an HTTP answer.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use axum::http::{Request, StatusCode, header};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use serde::{Deserialize, Serialize};

use super::super::proxy::{Upstream, held};
use super::spec::{PlaneSpec, WorkerSpec};
use super::tcp::{TcpItems, TcpPlane};

/// Largest frame: what follows its length.
const MAX_FRAME_BYTES: usize = 32 * 1024 * 1024;

/// Bytes of a frame's length and kind.
const HEAD_BYTES: usize = 5;

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    Request = 1,
    Data = 2,
    End = 3,
    Error = 4,
    Ping = 5,
    Pong = 6,
}

impl Kind {
    fn of(byte: u8) -> Option<Self> {
        [Self::Request, Self::Data, Self::End, Self::Error, Self::Ping, Self::Pong]
            .into_iter()
            .find(|kind| *kind as u8 == byte)
    }
}

/// One frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Frame {
    pub kind: Kind,
    pub payload: Bytes,
}

/// A frame as it travels.
///
/// # Errors
/// A payload beyond the limit, in words.
pub(super) fn encode_frame(kind: Kind, payload: &[u8]) -> Result<Bytes, String> {
    let bytes = payload.len() + 1;
    if bytes > MAX_FRAME_BYTES {
        return Err(format!("a frame of {bytes} bytes exceeds the limit of {MAX_FRAME_BYTES}"));
    }
    let mut out = BytesMut::with_capacity(HEAD_BYTES + payload.len());
    out.put_u32(bytes as u32);
    out.put_u8(kind as u8);
    out.put_slice(payload);
    Ok(out.freeze())
}

/// Does it begin with a complete frame, or with what is none?
pub(super) fn is_complete(received: &BytesMut) -> bool {
    received.first_chunk::<4>().is_some_and(|head| {
        let bytes = u32::from_be_bytes(*head) as usize;
        bytes > MAX_FRAME_BYTES || received.len() >= 4 + bytes
    })
}

/// Take the first frame out of what has been received; `None` while it is not complete.
///
/// # Errors
/// `Protocol` with `who` sent what is no frame; nothing behind it can be read.
pub(super) fn take_frame(
    received: &mut BytesMut,
    who: impl fmt::Display,
) -> Result<Option<Frame>, PlaneError> {
    let wrong = |why: String| {
        PlaneError::new(Cause::Protocol, format!("{who} sent an invalid frame: {why}"))
    };
    let Some(head) = received.first_chunk::<4>() else { return Ok(None) };
    let bytes = u32::from_be_bytes(*head) as usize;
    if !(1..=MAX_FRAME_BYTES).contains(&bytes) {
        let why = format!("a frame's length must be in 1..={MAX_FRAME_BYTES}, got {bytes}");
        return Err(wrong(why));
    }
    // Told from the fifth byte, before the rest is waited for.
    let Some(byte) = received.get(4).copied() else { return Ok(None) };
    let kind = Kind::of(byte).ok_or_else(|| wrong(format!("unknown kind of frame: {byte}")))?;
    if received.len() < 4 + bytes {
        // No more than the limit, and only as the bytes come: a length alone reserves nothing.
        return Ok(None);
    }
    received.advance(HEAD_BYTES);
    Ok(Some(Frame { kind, payload: received.split_to(bytes - 1).freeze() }))
}

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
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ErrorFrame {
    pub code: String,
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
            Self::Web(items) => is_complete(&items.received),
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

/// The longest error body that is read.
const MAX_ERROR_BYTES: usize = 1024 * 1024;

/// The way to one worker's endpoint.
#[derive(Debug)]
pub(crate) struct WebPlane {
    target: String,
    upstream: Upstream,
}

impl WebPlane {
    pub fn new(url: &str, endpoint: &str, upstream: Upstream) -> Self {
        let target = format!("{}/{endpoint}", url.trim_end_matches('/'));
        Self { target, upstream }
    }

    /// Send a request; returns at the answer's head.
    pub async fn call(
        &self,
        id: &str,
        instance_id: u64,
        body: Vec<u8>,
    ) -> Result<WebItems, PlaneError> {
        if body.len() > MAX_FRAME_BYTES {
            let message =
                format!("a request of {} bytes exceeds the limit of {MAX_FRAME_BYTES}", body.len());
            return Err(PlaneError::new(Cause::TooLarge, message));
        }
        let request = Request::post(&self.target)
            .header(header::CONTENT_TYPE, "application/msgpack")
            .header("x-kvflash-instance", instance_id)
            .header("x-kvflash-request-id", id)
            .body(held(body))
            .map_err(|error| PlaneError::new(Cause::Protocol, error.to_string()))?;
        let response = self.upstream.send(request).await.map_err(|error| {
            let cause = if error.cause == "connect" { Cause::Connect } else { Cause::Broken };
            PlaneError::new(cause, format!("{}: {}", self.target, error.message))
        })?;
        let (head, body) = response.into_parts();
        if head.status == StatusCode::OK {
            return Ok(WebItems { body, received: BytesMut::new() });
        }
        let collected = Limited::new(body, MAX_ERROR_BYTES).collect().await;
        let bytes = collected.map(|whole| whole.to_bytes()).unwrap_or_default();
        // A proxy in between has words of its own: then the status must do.
        let mut error: ErrorFrame = serde_json::from_slice(&bytes).unwrap_or_default();
        if error.code.is_empty() {
            error.code = match head.status.as_u16() {
                404 => "not_found",
                429 | 503 => "overloaded",
                400 | 413 | 422 => "invalid",
                _ => "internal",
            }
            .to_owned();
        }
        if error.message.is_empty() {
            error.message = format!("{} answered {}", self.target, head.status.as_u16());
        }
        Err(error.into())
    }

    /// Checks that the server answers anything. An open port proves nothing: the kernel accepts
    /// connections for a process that hangs.
    pub async fn ping(&self) -> Result<(), PlaneError> {
        let told = |why: &str| format!("no answer from {}: {why}", self.target);
        let cannot = |why: String| PlaneError::new(Cause::Connect, told(&why));
        let request = Request::get(&self.target).body(held(Bytes::new()));
        let request = request.map_err(|error| cannot(error.to_string()))?;
        match tokio::time::timeout(PING_TIME, self.upstream.send(request)).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(cannot(error.message)),
            Err(_) => {
                Err(PlaneError::new(Cause::Silent, told(&format!("none within {PING_TIME:?}"))))
            }
        }
    }
}

/// The frames of one answer.
#[derive(Debug)]
pub(crate) struct WebItems {
    body: Incoming,
    received: BytesMut,
}

impl WebItems {
    /// The next frame. May be dropped while it waits: what came is kept.
    async fn frame(&mut self) -> Result<Frame, PlaneError> {
        loop {
            if let Some(frame) = take_frame(&mut self.received, "a worker")? {
                return Ok(frame);
            }
            let chunk: Bytes = match self.body.frame().await {
                Some(Ok(frame)) => frame.into_data().unwrap_or_default(),
                Some(Err(error)) => {
                    return Err(PlaneError::new(Cause::Broken, format!("answer broke: {error}")));
                }
                None => {
                    let message = "the answer ended without its last frame";
                    return Err(PlaneError::new(Cause::Broken, message));
                }
            };
            self.received.extend_from_slice(&chunk);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
