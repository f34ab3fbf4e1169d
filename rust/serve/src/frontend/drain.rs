//! A single worker: its state, and whether it takes new requests.

use std::collections::HashMap;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use kvflash_core::ids::InstanceId;
use serde_json::Value;

use super::admin::{entry, key};
use super::app::App;
use super::engine::Engine;
use crate::Reject;
use crate::worker_state::{Patch, worker_id};

/// Booked and unfinished requests per worker.
pub(super) fn in_flight(app: &App) -> HashMap<InstanceId, u64> {
    let mut counts = HashMap::new();
    for pool in app.fleet.pools() {
        pool.count_in_flight(&mut counts);
    }
    counts
}

/// The entry of one worker in `GET /workers`.
pub(super) fn entry_of(app: &App, engine: &Engine) -> Value {
    let mut publishers = app.catalog.publishers();
    publishers.retain(|publisher| publisher.worker.instance_id == engine.id);
    let mut counts = HashMap::new();
    app.fleet.pool_of(engine.id).inspect(|pool| pool.count_in_flight(&mut counts));
    entry(app, engine, &publishers, counts.get(&engine.id).copied().unwrap_or(0))
}

/// GET /workers/{id}
pub(super) async fn tell_worker(
    State(app): State<Arc<App>>,
    id: Result<Path<String>, PathRejection>,
) -> Response {
    let found = worker_id(id).and_then(|id| Ok(app.fleet.known(id)?));
    found.map_or_else(Reject::openai, |engine| Json(entry_of(&app, &engine)).into_response())
}

/// PATCH /workers/{id} {state}
pub(super) async fn change_worker(
    State(app): State<Arc<App>>,
    id: Result<Path<String>, PathRejection>,
    body: Body,
) -> Response {
    let changed = async {
        let id = worker_id(id)?;
        let Patch { state } = Patch::parse(&app.intake.control(body).await?)?;
        let engine = app.fleet.set_state(id, state)?;
        app.registrations.amend(&key(id), "state", state);
        Ok(Json(entry_of(&app, &engine)).into_response())
    };
    changed.await.unwrap_or_else(Reject::openai)
}
