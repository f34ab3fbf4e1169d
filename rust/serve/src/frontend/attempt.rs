//! One attempt at an OpenAI engine, up to the first byte of its answer.

use std::sync::atomic::Ordering;

use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use bytes::Bytes;
use http_body::Body as _;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use kvflash_core::select::{Outcome, Reservation};

use super::super::Reject;
use super::app::App;
use super::engine::Engine;
use super::metrics::CauseLabel;
use super::plan::Choice;
use super::proxy::{client_headers, upstream_request};

/// Counts the client that leaves before its answer begins: its request is dropped wherever it waits.
pub(super) struct Waiting<'a> {
    app: &'a App,
    is_over: bool,
}

impl<'a> Waiting<'a> {
    pub fn new(app: &'a App) -> Self {
        Self { app, is_over: false }
    }

    /// From here on somebody else counts.
    pub fn over(&mut self) {
        self.is_over = true;
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            self.app.metrics.clients_gone.inc();
        }
    }
}

/// Wait for a worker that was booked; where the client leaves meanwhile, the journal says so.
pub(super) async fn watched<T>(booking: &Reservation, attempt: impl Future<Output = T>) -> T {
    struct Watch<'a>(Option<&'a Reservation>);
    impl Drop for Watch<'_> {
        fn drop(&mut self) {
            if let Some(booking) = self.0 {
                booking.ended(Outcome::ClientGone);
            }
        }
    }
    let mut watch = Watch(Some(booking));
    let outcome = attempt.await;
    watch.0 = None;
    outcome
}

/// An attempt that ended before the first byte.
#[derive(Debug)]
pub(super) struct Failed {
    pub cause: &'static str,
    pub message: String,
    /// What the client gets when no other worker does better.
    pub status: StatusCode,
    pub is_engine_at_fault: bool,
    /// The request itself is wrong: no other worker would do better.
    pub is_final: bool,
}

impl Failed {
    /// A failure that says nothing of the engine.
    pub fn new(cause: &'static str, message: impl Into<String>, status: StatusCode) -> Self {
        let message = message.into();
        Self { cause, message, status, is_engine_at_fault: false, is_final: false }
    }

    /// It is the engine's.
    pub fn fault(self) -> Self {
        Self { is_engine_at_fault: true, ..self }
    }

    /// Count it, and put the engine in doubt where it is at fault.
    pub fn note(&self, app: &App, engine: &Engine, attempt: usize) {
        let cause = self.cause;
        app.metrics.attempts_failed.get_or_create(&CauseLabel { cause }).inc();
        if self.is_engine_at_fault {
            engine.failed(&self.message);
        }
        let why = &self.message;
        tracing::warn!(
            worker = engine.id,
            cause,
            why,
            attempt,
            "attempt failed before the first byte; trying another worker"
        );
    }
}

impl From<Failed> for Reject {
    fn from(failed: Failed) -> Self {
        Self::new(failed.status, failed.message)
    }
}

/// The head of an engine's answer.
pub(super) struct Head {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub is_event_stream: bool,
}

/// Send a request to an OpenAI engine and wait for the first byte of its answer.
pub(super) async fn attempt(
    app: &App,
    choice: &Choice,
    uri: &Uri,
    headers: &HeaderMap,
    body: &Bytes,
) -> std::result::Result<(Head, Option<Bytes>, Incoming), Failed> {
    let engine = &choice.engine;
    engine.requests.fetch_add(1, Ordering::Relaxed);
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    let target = format!("{}{path}", engine.base).parse::<Uri>().map_err(|error| Failed {
        cause: "bad_target",
        message: error.to_string(),
        status: StatusCode::BAD_GATEWAY,
        is_engine_at_fault: false,
        is_final: false,
    })?;
    let rank = (engine.spec.dp_size > 1).then(|| choice.booking.worker().dp_rank);
    let request = upstream_request(&Method::POST, target, headers, rank, body.clone());
    let to_first_byte = async {
        let response = app.upstream.send(request).await.map_err(|error| Failed {
            cause: error.cause,
            message: error.message,
            status: StatusCode::BAD_GATEWAY,
            is_engine_at_fault: true,
            is_final: false,
        })?;
        let (parts, mut upstream) = response.into_parts();
        if parts.status == StatusCode::SERVICE_UNAVAILABLE {
            return Err(Failed {
                cause: "unavailable",
                message: format!("worker {} answered 503", engine.id),
                status: StatusCode::SERVICE_UNAVAILABLE,
                is_engine_at_fault: false,
                is_final: false,
            });
        }
        // Nothing has reached the client yet: until the first chunk is here, another worker can still do it.
        let mut first = None;
        while first.is_none() && !upstream.is_end_stream() {
            match upstream.frame().await {
                Some(Ok(frame)) => first = frame.into_data().ok().filter(|data| !data.is_empty()),
                Some(Err(error)) => {
                    return Err(Failed {
                        cause: "no_first_byte",
                        message: format!("worker {} broke off its answer: {error}", engine.id),
                        status: StatusCode::BAD_GATEWAY,
                        is_engine_at_fault: true,
                        is_final: false,
                    });
                }
                // No engine completes a prompt with nothing: it died behind its head.
                None if parts.status == StatusCode::OK => {
                    return Err(Failed {
                        cause: "no_first_byte",
                        message: format!("worker {} answered 200 without a body", engine.id),
                        status: StatusCode::BAD_GATEWAY,
                        is_engine_at_fault: true,
                        is_final: false,
                    });
                }
                None => break,
            }
        }
        // One that is compressed has no lines to be seen, and nothing can be said inside it.
        let is_event_stream = !parts.headers.contains_key(header::CONTENT_ENCODING)
            && parts
                .headers
                .get(header::CONTENT_TYPE)
                .is_some_and(|value| value.as_bytes().starts_with(b"text/event-stream"));
        let head =
            Head { status: parts.status, headers: client_headers(parts.headers), is_event_stream };
        Ok((head, first, upstream))
    };
    let timeout = app.options.first_byte_timeout;
    tokio::time::timeout(timeout, to_first_byte).await.unwrap_or_else(|_| {
        Err(Failed {
            cause: "timeout",
            message: format!(
                "worker {} sent no byte within {} s (--first-byte-timeout)",
                engine.id,
                timeout.as_secs_f64()
            ),
            status: StatusCode::GATEWAY_TIMEOUT,
            is_engine_at_fault: false,
            is_final: false,
        })
    })
}
