//! The request plane over HTTP: the same frames as the body of an answer.

use axum::http::{Request, StatusCode, header};
use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;

use super::super::proxy::{Upstream, held};
use super::frames::{self, Frame, MAX_FRAME_BYTES};
use super::plane::{Cause, ErrorFrame, PING_TIME, PlaneError};

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
        let said: Option<ErrorFrame> = serde_json::from_slice(&bytes).ok();
        let mut error = said.unwrap_or(ErrorFrame { code: String::new(), message: String::new() });
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
    pub(super) received: BytesMut,
}

impl WebItems {
    /// The next frame. May be dropped while it waits: what came is kept.
    pub(super) async fn frame(&mut self) -> Result<Frame, PlaneError> {
        loop {
            match frames::take(&mut self.received) {
                Ok(Some(frame)) => return Ok(frame),
                Ok(None) => {}
                Err(why) => {
                    let message = format!("a worker sent an invalid frame: {why}");
                    return Err(PlaneError::new(Cause::Protocol, message));
                }
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
