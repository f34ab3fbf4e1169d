//! Handles a request from its admission up to the head of its answer; `relay` and `answer` continue
//! from there.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::Response;
use kvflash_core::error::Error;
use kvflash_core::ids::Worker;
use kvflash_core::select::{Selection, Usage};
use serde_json::json;

use super::answer::answer;
use super::api::{Api, Row, Weight};
use super::backend::worker::Prefill;
use super::backend::worker::{self, Handoff, Opened};
use super::book::{Expectation, Tries};
use super::call::{Head, names_model};
use super::client::{SESSION_HEADER, session_id_of};
use super::plan::{Part, Plan};
use super::relay::{Delivery, relay};
use super::turn::Turn;
use crate::Reject;
use crate::body::{self, Received, discard};
use crate::frontend::app::App;
use crate::frontend::engine::Engine;
use crate::tenant::limit::Running;
use crate::tenant::pass::{self, REQUEST_ID_HEADER};

static WORKER_HEADER: HeaderName = HeaderName::from_static("x-kvflash-worker");
static PREFILL_HEADER: HeaderName = HeaderName::from_static("x-kvflash-prefill-worker");
static CLIENT_REQUEST_ID_HEADER: HeaderName = HeaderName::from_static("x-client-request-id");
static OVERLAP_HEADER: HeaderName = HeaderName::from_static("x-kvflash-overlap-blocks");

/// Answers a request, and counts it.
pub(crate) async fn forward(app: Arc<App>, row: &'static Row, head: Head, body: Body) -> Response {
    let started = Instant::now();
    let request_id = head.request_id();
    let id = HeaderValue::try_from(&request_id);
    let (caller, client_id) = (head.caller.clone(), head.client_request_id());
    let mut waiting = Waiting { app: Arc::clone(&app), is_over: false };
    let answered = respond(&app, row, head, request_id, body, &mut waiting).await;
    waiting.is_over = true;
    let mut response = answered.unwrap_or_else(|reject| row.form.refuse(reject));
    if let Ok(id) = id {
        response.headers_mut().insert(REQUEST_ID_HEADER.clone(), id);
    }
    if let Some(id) = client_id {
        response.headers_mut().insert(CLIENT_REQUEST_ID_HEADER.clone(), id);
    }
    if let Some(key) = caller.client() {
        app.meters.tell(key, response.headers_mut());
    }
    app.common.count(row.path.into(), &response, started);
    response
}

/// Admits a request, parses and plans it, waits for its client's turn, and sends it to a worker.
async fn respond(
    app: &Arc<App>,
    row: &'static Row,
    head: Head,
    request_id: String,
    mut body: Body,
    waiting: &mut Waiting,
) -> Result<Response, Reject> {
    // Before its body is read: a client's limits delay only that client.
    let running = match head.caller.client().map(|key| app.meters.begin(key)).transpose() {
        Ok(running) => running,
        Err(reject) => {
            app.refused("client_limit");
            discard(&mut body).await;
            return Err(reject);
        }
    };
    let (mut in_flight, received) = admit(app, row, &head.headers, body).await?;
    let Received { bytes, turn, rest, counted } = received;
    in_flight.running = running;
    let began = Instant::now();
    let plan = Plan::make(app, Some(row), head, request_id, bytes, counted, rest).await;
    let plan = plan.inspect_err(|reject| match reject.status {
        StatusCode::SERVICE_UNAVAILABLE => app.refused("no_worker"),
        // Counted where the cores were found to be busy.
        StatusCode::TOO_MANY_REQUESTS => {}
        _ => app.refused("invalid"),
    })?;
    app.metrics.route_seconds.observe(began.elapsed().as_secs_f64());
    // It was neither too long nor invalid: the next large body may be read.
    drop(turn);
    let prefill = Prefill::of(app, &plan).await.inspect_err(|reject| {
        let is_whole = reject.status == StatusCode::NOT_IMPLEMENTED;
        app.refused(if is_whole { "no_prefill" } else { "invalid" });
    })?;
    if plan.call.nvext.is_query() {
        return tell_workers(&plan, &prefill).await;
    }
    // The workers that compute the prompt.
    let computed = prefill.plan().unwrap_or(&plan);
    let has_token_limit = plan.call.head.caller.key().is_some_and(|key| key.tpm.is_some());
    if let Some(running) = in_flight.running.as_ref().filter(|_| has_token_limit) {
        running.charge(computed.uncached_tokens()).inspect_err(|_| app.refused("client_limit"))?;
    }
    // Stored responses take no turn: they generate nothing, and a cancellation frees a turn.
    let room = plan.route.pool.waiting.as_ref().filter(|_| !row.names_response());
    if let Some(room) = room {
        let client = plan.call.head.client(plan.request.user.as_deref(), &room.options.identity);
        let workers = plan.route.pool.serving();
        let waited = Instant::now();
        let cost = computed.cost(room.options.queue.cached_share);
        let turn = room.turn(client.as_name(), cost, plan.urgency.turn(), workers).await;
        app.metrics.turn_seconds.observe(waited.elapsed().as_secs_f64());
        in_flight.turn = Some(turn.map_err(|(cause, reject)| {
            app.refused(cause);
            reject
        })?);
    }
    send(app, &Arc::new(plan), &Arc::new(in_flight), prefill, waiting, began).await
}

/// Sends the request to one worker after the other, until one of them answers. Where one breaks off
/// a whole answer, another one begins it again.
async fn send(
    app: &Arc<App>,
    plan: &Arc<Plan>,
    in_flight: &Arc<InFlight>,
    mut prefill: Prefill,
    waiting: &mut Waiting,
    began: Instant,
) -> Result<Response, Reject> {
    let mut tries = Tries::new(app, Arc::clone(plan));
    let mut handoff = Handoff::Alone;
    // No worker has begun to answer yet.
    let mut is_first = true;
    while tries.may_go_on() {
        if !prefill.is_idle() && !matches!(handoff, Handoff::Done { .. }) {
            // A concurrent prefill that has begun is useless for another worker, and would be load to the next prefill.
            handoff.end().await;
            if !tries.is_empty() && !tries.has_untried() {
                // Nothing would decode what is prefilled now.
                break;
            }
            handoff =
                Box::pin(prefill.hand_off(app, |computed| in_flight.charge(computed))).await?;
            tries.is_decode_only = !handoff.is_alone();
        }
        let choice = match tries.next().await {
            Ok(choice) => choice,
            Err(error) => {
                in_flight.charge(None);
                return Err(tries.refusal(Some(error)));
            }
        };
        let engine = Arc::clone(&choice.engine);
        in_flight.charge(Some(match handoff.is_alone() {
            true => plan.uncached_at(&choice.selection),
            false => prefill.uncached_tokens,
        }));
        let opened = {
            let open = pin!(worker::open(app, plan, &choice, &handoff));
            choice.watched(open).await
        };
        let opened = match opened {
            Ok(opened) => opened,
            Err(failed) => {
                in_flight.charge(None);
                tries.failed(&engine, failed.clone())?;
                prefill.decode_failed(handoff.worker(), failed)?;
                continue;
            }
        };
        tries.answered();
        // From here on the answer counts a client that leaves.
        waiting.is_over = true;
        let has_output = opened.has_output(plan.call.row.form);
        if is_first && has_output {
            app.metrics.first_byte_seconds.observe(began.elapsed().as_secs_f64());
        }
        let (worker, selection) = (choice.booking.worker(), choice.selection);
        let (prefiller, is_alone) = (handoff.worker(), handoff.is_alone());
        let mut expected = None;
        if opened.is_success() {
            if has_output {
                choice.booking.first_token();
            }
            if is_first {
                plan.count(app, &selection);
            }
            // An answer after other workers were tried, or with a prefill elsewhere, is no evidence.
            if plan.call.reuses_prefix && tries.is_first() && is_alone {
                expected = Expectation::of(app, plan, selection);
            }
        } else {
            in_flight.charge(None);
        }
        is_first = false;
        let (in_flight_too, awaited) = (Arc::clone(in_flight), (!has_output).then_some(began));
        let delivery = Delivery::new(app, plan, choice, in_flight_too, expected, is_alone, awaited);
        let answered = match opened {
            Opened::OpenAi(opened) => Ok(relay(delivery, plan.call.row, opened)),
            Opened::Plane(opened) => {
                let handoff = std::mem::replace(&mut handoff, Handoff::Alone);
                Box::pin(answer(delivery, plan, handoff, opened)).await
            }
        };
        match answered {
            Ok(mut response) => {
                tell(app, plan, &mut response, &engine, worker, prefiller, selection);
                return Ok(response);
            }
            Err(failed) => {
                in_flight.charge(None);
                // What was prefilled for the worker is gone with it.
                tries.failed(&engine, failed.clone())?;
                prefill.decode_failed(prefiller, failed)?;
                // The client waits for another worker.
                waiting.is_over = false;
            }
        }
    }
    Err(tries.refusal(None))
}

/// Names the answering worker and the blocks found there in the response, to clients that may know
/// them; with session affinity also the worker in the form that returns the client to it.
fn tell(
    app: &App,
    plan: &Plan,
    response: &mut Response,
    engine: &Engine,
    worker: Worker,
    prefiller: Option<Worker>,
    selection: Selection,
) {
    let is_client = plan.call.head.caller.client().is_some();
    if is_client {
        pass::clean_answer(response.headers_mut());
    }
    let is_shown = !is_client || app.options.expose_overlap;
    let overlap = plan.request.prompt.reusable_blocks(selection.overlap_blocks);
    let session = app.keeps_sessions.then(|| session_id_of(engine, worker.dp_rank));
    for (name, value) in [
        (&WORKER_HEADER, is_shown.then(|| worker.to_string())),
        (&PREFILL_HEADER, prefiller.filter(|_| is_shown).map(|worker| worker.to_string())),
        (&OVERLAP_HEADER, is_shown.then(|| overlap.to_string())),
        (&SESSION_HEADER, session),
    ] {
        if let Some(Ok(value)) = value.map(HeaderValue::try_from) {
            response.headers_mut().insert(name.clone(), value);
        }
    }
}

/// `query_instance_id`: returns the workers that would take the request now, and its tokens, as a
/// stream; nothing is sent or booked.
///
/// # Errors
/// 503 if no worker can take it.
async fn tell_workers(plan: &Plan, prefill: &Prefill) -> Result<Response, Reject> {
    let is_decode_only = prefill.query(None).await?.is_some();
    let part = Part { is_decode_only, ..Part::default() };
    let Selection { worker: decode, seed, .. } = plan.query(part, None).await?;
    // One seed draws both. Without a prefill worker the decode worker does both.
    let prefiller = prefill.query(Some(seed)).await?.unwrap_or(decode);
    let (id, object) = match plan.call.api() {
        Api::Chat => (format!("chatcmpl-{}", plan.call.request_id), "chat.completion.chunk"),
        _ => (format!("cmpl-{}", plan.call.request_id), "text_completion"),
    };
    let event = json!({
        "id": id,
        "object": object,
        "created": 0,
        "model": plan.model,
        "choices": [],
        "nvext": {
            "worker_id": {
                "prefill_worker_id": prefiller.instance_id,
                "prefill_dp_rank": prefiller.dp_rank,
                "decode_worker_id": decode.instance_id,
                "decode_dp_rank": decode.dp_rank,
            },
            "seed": seed,
            "token_ids": plan.tokens.as_ref().map(|tokens| tokens.as_slice()),
        },
    });
    let mut response = Response::new(Body::from(format!("data: {event}\n\ndata: [DONE]\n\n")));
    let kind = HeaderValue::from_static("text/event-stream");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    Ok(response)
}

/// A request's slot among those in flight, freed when dropped.
pub(crate) struct InFlight {
    app: Arc<App>,
    /// Its turn, with fair queueing.
    pub turn: Option<Turn>,
    /// Its client's limits, if it has a key.
    pub running: Option<Running>,
}

impl InFlight {
    /// Records usage so far, at the end of an answer.
    pub fn used(&self, usage: Usage) {
        if let Some(turn) = &self.turn {
            turn.used(usage);
        }
        if let Some(running) = &self.running {
            running.used(usage);
        }
    }

    /// Sets the number of tokens generated so far.
    pub fn generated(&self, tokens: u64) {
        if let Some(turn) = &self.turn {
            turn.generated(tokens);
        }
    }

    /// A worker gets the request, and computes this many tokens of the prompt, even if the client
    /// leaves; `None` if it failed or refused: the request costs nothing unless another one answers.
    pub fn charge(&self, computed_tokens: Option<u64>) {
        if let Some(running) = &self.running {
            match computed_tokens {
                Some(tokens) => running.computes(tokens),
                None => running.spare(),
            }
        }
        if let Some(turn) = &self.turn {
            turn.charges(computed_tokens.is_some());
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let limit = self.app.options.max_concurrent_requests;
        if self.app.in_flight.fetch_sub(1, Ordering::Relaxed) >= limit {
            let mut full = self.app.full.lock();
            // Another request may have taken the slot meanwhile.
            if self.app.in_flight() < limit {
                full.end();
            }
        }
    }
}

/// Reads a request's body, then takes a slot among those in flight, so that slow uploads occupy
/// none; of a large upload only its beginning. The body of a refused request is read and discarded:
/// otherwise a client that is still sending might see a connection reset instead of the response.
///
/// # Errors
/// 503 while the start gate waits for workers; 429 at the limit; those of the body.
async fn admit(
    app: &Arc<App>,
    row: &Row,
    headers: &HeaderMap,
    mut body: Body,
) -> Result<(InFlight, Received), Reject> {
    let limit = app.options.max_concurrent_requests;
    let full = || {
        let what = format!(
            "the limit of requests in flight is reached: {limit} (--max-concurrent-requests)"
        );
        (Error::Overloaded(what), "concurrency")
    };
    let started = app.started().map_err(|error| (error, "no_worker"));
    let begun = started.and_then(|()| if app.in_flight() < limit { Ok(()) } else { Err(full()) });
    if let Err((error, cause)) = begun {
        app.refused(cause);
        body::discard(&mut body).await;
        return Err(error.into());
    }
    let received = match row.weight {
        Weight::Sound => {
            app.uploads.beginning(body, |beginning| names_model(headers, beginning)).await?
        }
        Weight::Text | Weight::Nothing => app.intake.whole(body).await?,
    };
    let before = app.in_flight.fetch_add(1, Ordering::Relaxed);
    if before < limit {
        if before + 1 == limit {
            app.full.lock().begin();
        }
        return Ok((InFlight { app: Arc::clone(app), turn: None, running: None }, received));
    }
    app.in_flight.fetch_sub(1, Ordering::Relaxed);
    let (error, cause) = full();
    app.refused(cause);
    Err(error.into())
}

/// Counts a client that leaves before its answer begins, which drops its request wherever it waits.
struct Waiting {
    app: Arc<App>,
    /// The answer counts it from now on.
    is_over: bool,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if !self.is_over {
            self.app.metrics.clients_gone.inc();
        }
    }
}
