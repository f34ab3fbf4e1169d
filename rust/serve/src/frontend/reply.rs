//! The head of an answer: who gave it, and what the client may send back.

use std::sync::Arc;

use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::response::Response;
use bytes::Bytes;
use hyper::body::Incoming;
use kvflash_core::ids::Worker;
use kvflash_core::select::Reservation;

use super::super::Reject;
use super::app::{App, InFlight};
use super::attempt::Head;
use super::client::{SESSION_HEADER, session_id_of};
use super::disagg::Handoff;
use super::engine::Engine;
use super::evidence::Expectation;
use super::plan::Choice;
use super::relay::Relay;
use super::runtime::answer::Answer;
use super::runtime::call::{self, Ask};

pub(super) static WORKER_HEADER: HeaderName = HeaderName::from_static("x-kvflash-worker");
pub(super) static PREFILL_HEADER: HeaderName = HeaderName::from_static("x-kvflash-prefill-worker");
pub(super) static OVERLAP_HEADER: HeaderName = HeaderName::from_static("x-kvflash-overlap-blocks");

/// Say which worker answers; where sessions stay with workers, also in the form that brings the
/// client back to it.
fn name_worker(app: &App, headers: &mut HeaderMap, engine: &Engine, worker: Worker) {
    let session = app.keeps_sessions.then(|| session_id_of(engine, worker.dp_rank));
    let session_header = HeaderName::from_static(SESSION_HEADER);
    for (name, value) in [(&WORKER_HEADER, Some(worker.to_string())), (&session_header, session)] {
        if let Some(Ok(value)) = value.map(HeaderValue::try_from) {
            headers.insert(name.clone(), value);
        }
    }
}

/// A runtime worker's answer that has begun, as the client wants it.
#[allow(clippy::too_many_arguments)]
pub(super) async fn answer(
    app: &Arc<App>,
    choice: Choice,
    ask: Ask,
    handoff: Handoff,
    opened: call::Opened,
    overlap_blocks: u64,
    in_flight: InFlight,
    expected: Option<Expectation>,
) -> Result<Response, Reject> {
    let (engine, worker) = (Arc::clone(&choice.engine), choice.booking.worker());
    let prefiller = handoff.worker().map(|worker| worker.to_string());
    let is_stream = ask.generation.as_ref().is_some_and(|generation| generation.is_stream);
    let answer = Answer::new(app, choice.booking, ask, handoff, opened, in_flight, expected)?;
    let mut response = if is_stream { answer.stream() } else { answer.whole().await? };
    let headers = response.headers_mut();
    name_worker(app, headers, &engine, worker);
    if let Some(Ok(value)) = prefiller.map(HeaderValue::try_from) {
        headers.insert(PREFILL_HEADER.clone(), value);
    }
    headers.insert(OVERLAP_HEADER.clone(), overlap_blocks.into());
    Ok(response)
}

#[allow(clippy::too_many_arguments)]
pub(super) fn relay(
    app: &Arc<App>,
    engine: Arc<Engine>,
    booking: Reservation,
    overlap_blocks: u64,
    head: Head,
    first: Option<Bytes>,
    upstream: Incoming,
    prompt_tokens: Option<u64>,
    in_flight: InFlight,
    expected: Option<Expectation>,
) -> Response {
    let worker = booking.worker();
    let relay = Relay::new(
        Arc::clone(app),
        Arc::clone(&engine),
        upstream,
        first,
        booking,
        head.is_event_stream,
        prompt_tokens,
        in_flight,
        expected,
    );
    let mut response = Response::new(Body::new(relay));
    *response.status_mut() = head.status;
    *response.headers_mut() = head.headers;
    let headers = response.headers_mut();
    if head.is_event_stream {
        // A stream that breaks ends with an event more than its engine announced.
        headers.remove(header::CONTENT_LENGTH);
    }
    name_worker(app, headers, &engine, worker);
    headers.insert(OVERLAP_HEADER.clone(), overlap_blocks.into());
    response
}
