//! Operators' endpoints about workers: which there are, added and removed, in service or not.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use kvflash_core::catalog::Publisher;
use kvflash_core::error::Error;
use kvflash_core::fleet::WorkerState;
use kvflash_core::ids::{InstanceId, Worker};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::app::App;
use super::engine::Engine;
use super::engine_spec::{EngineSpec, MAX_RANKS, WorkerKey, is_prefill};
use super::probe;
use crate::indexer::form::parse_json;
use crate::lock::Subject;
use crate::worker_state::{Patch, PathText, worker_id, worker_key};
use crate::{Peer, Reject};

/// The entry of `engine` in `GET /workers`, with these publishers and this number of requests.
fn entry(app: &App, engine: &Engine, publishers: &[Arc<Publisher>], in_flight: u64) -> Value {
    let notes = engine.notes.lock().clone();
    let pool = app.fleet.pool_of(engine.id);
    let listeners: Vec<Value> = publishers
        .iter()
        .map(|publisher| {
            let view = publisher.view();
            json!({
                "dp_rank": view.worker.dp_rank,
                "endpoint": view.endpoint,
                "replay_endpoint": view.replay_endpoint,
                "status": view.status,
                "last_error": view.last_error,
                "last_sequence": view.last_sequence,
                "last_event_age_ms": view.last_event_age_ms,
                "events": view.counts,
            })
        })
        .collect();
    let blocks: usize = (0..engine.spec.dp_size)
        .filter_map(|rank| Some(pool.as_ref()?.index().index.blocks(Worker::new(engine.id, rank))))
        .sum();
    json!({
        "id": engine.id,
        "url": engine.base,
        "healthy": engine.is_healthy(),
        "state": app.fleet.state_of(engine.id),
        "in_flight": in_flight,
        "last_error": notes.error(),
        "last_status": notes.last_status,
        "model": pool.as_ref().map(|pool| &pool.name),
        "serves": notes.models.iter().map(|(name, _)| name).collect::<Vec<_>>(),
        "role": if engine.spec.is_prefill { "prefill" } else { "decode" },
        "loads": engine.member.as_ref().map(|member| json!(*member.loads.lock())),
        "dp_size": engine.spec.dp_size,
        "block_size": pool.as_ref().and_then(|pool| pool.index().block_size()),
        "engine_block_size": notes.block_size,
        "capacity_blocks": notes.capacity_blocks,
        "blocks": blocks,
        "token_ids": engine.ids.lock().view(),
        "tells_token_ids": engine.tells_ids(),
        "requests": engine.requests.load(Ordering::Relaxed),
        "failures": engine.failures.load(Ordering::Relaxed),
        "listeners": listeners,
    })
}

/// GET /workers
pub(super) async fn workers(State(app): State<Arc<App>>) -> Response {
    app.aside.make(|| tell_workers(&app)).await
}

fn tell_workers(app: &App) -> Response {
    let mut publishers: HashMap<_, Vec<_>> = HashMap::new();
    for publisher in app.catalog.publishers() {
        publishers.entry(publisher.worker.instance_id).or_default().push(publisher);
    }
    let pools = app.fleet.pools();
    let in_flight: HashMap<_, _> = pools.iter().flat_map(|pool| pool.in_flight()).collect();
    let entry = |engine: &Arc<Engine>| {
        let publishers = publishers.get(&engine.id).map_or(&[][..], Vec::as_slice);
        entry(app, engine, publishers, in_flight.get(&engine.id).copied().unwrap_or(0))
    };
    let entries: Vec<Value> = app.fleet.engines().iter().map(entry).collect();
    Json(entries).into_response()
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NewWorker {
    url: String,
    events: Option<String>,
    replay: Option<String>,
    id: Option<InstanceId>,
    dp_size: Option<u32>,
    role: Option<String>,
    #[serde(default)]
    state: WorkerState,
    /// The key that the worker demands of the frontend; by default it is sent none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    api_key: Option<String>,
}

impl NewWorker {
    /// Checks that its addresses are allowed.
    ///
    /// # Errors
    /// 403, naming the field, the address and the flag.
    async fn check_places(&self, app: &App) -> Result<(), Reject> {
        let allow = &app.options.http.worker_allow;
        allow.check_url("url", &self.url).await?;
        for (field, address) in [("events", &self.events), ("replay", &self.replay)] {
            if let Some(address) = address {
                allow.check_socket(field, address).await?;
            }
        }
        Ok(())
    }

    pub fn register(
        self,
        app: &Arc<App>,
        registrant: Option<IpAddr>,
    ) -> Result<Arc<Engine>, Reject> {
        let role = self.role.as_deref().map(is_prefill).transpose();
        let bad = |error: Error| Reject::bad_request(error.to_string());
        let spec = EngineSpec {
            url: self.url.clone(),
            events: self.events.clone(),
            replay: self.replay.clone(),
            instance_id: self.id,
            dp_size: self.dp_size.unwrap_or(1),
            is_prefill: role.map_err(bad)? == Some(true),
            tokenizer: None,
            registrant,
            key: WorkerKey::of(self.api_key.as_deref()).map_err(bad)?,
        };
        if self.id == Some(0) {
            return Err(Reject::bad_request("id must be 1 or greater, got 0"));
        }
        if !(1..=MAX_RANKS).contains(&spec.dp_size) {
            let message = format!("dp_size must be in 1..={MAX_RANKS}, got {}", spec.dp_size);
            return Err(Reject::bad_request(message));
        }
        let mut change = app.registrations.change();
        let engine = probe::add(app, spec).map_err(|error| match error {
            Error::Config(message) => Reject::bad_request(message),
            other => other.into(),
        })?;
        app.fleet.set_state(engine.id, self.state)?;
        change.put(&worker_key(engine.id), &Self { id: Some(engine.id), ..self });
        Ok(engine)
    }
}

/// POST /workers {url, events?, replay?, id?, dp_size?, role?, state?, api_key?}
pub(super) async fn add_worker(
    State(app): State<Arc<App>>,
    peer: Option<Extension<Peer>>,
    body: Body,
) -> Result<Response, Reject> {
    let body = app.intake.control(body).await?;
    let new: NewWorker = parse_json(&body)
        .map_err(|error| Reject::bad_request(format!("invalid worker: {error}")))?;
    let registrant = peer.map(|Extension(Peer(address))| address.ip());
    new.check_places(&app).await?;
    let engine = new.register(&app, registrant)?;
    let entry = Json(entry(&app, &engine, &[], 0));
    let response = (StatusCode::CREATED, entry).into_response();
    Ok(Subject::mark(response, engine.id, &engine.base))
}

/// DELETE /workers/{id}
pub(super) async fn remove_worker(
    State(app): State<Arc<App>>,
    id: PathText,
) -> Result<Json<Value>, Reject> {
    let id = worker_id(id)?;
    let mut change = app.registrations.change();
    app.fleet.remove(id)?;
    change.remove(&worker_key(id));
    Ok(Json(json!({ "status": "ok", "id": id })))
}

/// The entry of one worker in `GET /workers`.
fn entry_of(app: &App, engine: &Engine) -> Value {
    let mut publishers = app.catalog.publishers();
    publishers.retain(|publisher| publisher.worker.instance_id == engine.id);
    let pool = app.fleet.pool_of(engine.id);
    let count = pool.and_then(|pool| pool.in_flight().get(&engine.id).copied());
    entry(app, engine, &publishers, count.unwrap_or(0))
}

/// GET /workers/{id}
pub(super) async fn tell_worker(
    State(app): State<Arc<App>>,
    id: PathText,
) -> Result<Json<Value>, Reject> {
    Ok(Json(entry_of(&app, &*app.fleet.known(worker_id(id)?)?)))
}

/// PATCH /workers/{id} {state}
pub(super) async fn change_worker(
    State(app): State<Arc<App>>,
    id: PathText,
    body: Body,
) -> Result<Json<Value>, Reject> {
    // Read the body first: an unread body ends the connection.
    let Patch { state } = Patch::parse(&app.intake.control(body).await?)?;
    let id = worker_id(id)?;
    let mut change = app.registrations.change();
    let engine = app.fleet.set_state(id, state)?;
    change.amend(&worker_key(id), "state", state);
    drop(change);
    Ok(Json(entry_of(&app, &engine)))
}
