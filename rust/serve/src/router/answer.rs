//! Responses of GET /workers, /health and /ready.

use std::collections::HashMap;

use kvflash_core::catalog::Report;
use kvflash_core::fleet::WorkerState;
use kvflash_core::ids::Worker;
use kvflash_core::policy::EngineMetrics;
use kvflash_core::select;
use serde::Serialize;
use serde_json::{Value, json};

use super::app::App;
use super::fleet::{Member, Pool};
use crate::cause::{Topic, Unready, Warning};

/// What a rank reports of itself.
#[derive(Serialize)]
struct Reported {
    #[serde(flatten)]
    load: select::Report,
    #[serde(flatten)]
    engine: EngineMetrics,
}

/// All workers, optionally of one model, by model, tenant and id.
pub(super) fn worker_entries(app: &App, model_name: Option<&str>) -> Vec<Value> {
    let of_pool = |pool: &Pool| {
        let reports = app.catalog.reports(|model| model.key == pool.key);
        entries(pool, pool.members().all().map(|member| &**member), reports)
    };
    app.fleet.fitting(model_name, None).iter().flat_map(|pool| of_pool(pool)).collect()
}

/// The entry of one worker.
pub(super) fn worker_entry(app: &App, pool: &Pool, member: &Member) -> Value {
    // A worker belongs to one pool.
    let reports = app.catalog.reports_of(member.id);
    entries(pool, [member].into_iter(), reports).pop().unwrap_or_default()
}

/// Entries of GET /workers.
fn entries<'a>(
    pool: &Pool,
    members: impl Iterator<Item = &'a Member>,
    reports: Vec<Report>,
) -> Vec<Value> {
    let (selector, model) = (&pool.selector, pool.selector.model());
    let reports: HashMap<Worker, Report> =
        reports.into_iter().map(|report| (report.view.worker, report)).collect();
    let (loads, engines) = (selector.loads(), selector.engines.all());
    let busy = selector.busy.busy(loads.iter().copied());
    let listener = |Report { view, trust, .. }: &Report| {
        json!({
            "endpoint": view.endpoint,
            "replay_endpoint": view.replay_endpoint,
            "status": view.status,
            "trust": trust,
            "last_error": view.last_error,
            "last_sequence": view.last_sequence,
            "last_event_age_ms": view.last_event_age_ms,
        })
    };
    let rank = |worker: Worker| {
        // Ascending by worker.
        let place = loads.binary_search_by_key(&worker, |load| load.worker).ok();
        let load = place.map(|place| loads[place].active).unwrap_or_default();
        let reported = selector.busy.reported(worker).unwrap_or_default();
        let engine = engines.get(&worker).copied().unwrap_or_default();
        let (blocks, requests) = (model.index.blocks(worker), load.requests);
        let entry = json!({
            "dp_rank": worker.dp_rank,
            "blocks": blocks,
            "active_blocks": load.blocks,
            "active_prefill_tokens": load.prefill_tokens,
            "active_requests": requests,
            "reported": Reported { load: reported, engine },
            "listener": reports.get(&worker).map(listener),
        });
        (entry, blocks, u64::from(requests))
    };
    let entry = |member: &Member| {
        let ranks: Vec<_> = member.ranks().map(rank).collect();
        let is_draining = selector.draining.has(member.id);
        json!({
            "worker_id": member.id,
            "model_name": pool.key.model_name,
            "tenant_id": pool.key.tenant_id,
            "url": member.url,
            "dp_size": member.dp_size,
            "block_size": model.block_size(),
            // Whether it takes new requests.
            "state": if is_draining { WorkerState::Draining } else { WorkerState::Active },
            // Booked and unfinished requests.
            "in_flight": ranks.iter().map(|(.., requests)| requests).sum::<u64>(),
            // Whether all of its ranks are above a threshold: it gets no requests.
            "is_busy": busy.binary_search(&member.id).is_ok(),
            // Blocks held, all ranks and tiers.
            "blocks": ranks.iter().map(|(_, blocks, _)| blocks).sum::<usize>(),
            "ranks": ranks.iter().map(|(entry, ..)| entry).collect::<Vec<_>>(),
        })
    };
    members.map(entry).collect()
}

/// Whether enough workers have registered, with the numbers and what is missing.
pub(super) fn readiness(app: &App) -> (bool, Value) {
    let (workers, registered_total) = app.fleet.counts();
    let wanted = app.options.routing.min_initial_workers;
    // Ready once is ready forever: departures are reported by /health.
    let is_stopping = app.options.http.shutdown().is_announced();
    let why = match app.started() {
        _ if is_stopping => Some((Unready::Stopping, "the router is shutting down".to_owned())),
        Err(error) => Some((Unready::Starting, error.to_string())),
        Ok(()) => None,
    };
    let is_ready = why.is_none();
    let (code, reason) = why.unzip();
    let answer = json!({
        "ready": is_ready,
        "code": code,
        "reason": reason,
        "stopping": is_stopping,
        "workers": workers,
        "registered_total": registered_total,
        "min_initial_workers": wanted,
    });
    (is_ready, answer)
}

/// The state of the service: it runs, and what is wrong.
pub(super) fn health(app: &App) -> Value {
    let (workers, _) = app.fleet.counts();
    let pools = app.fleet.pools();
    let reservations: usize = pools.iter().map(|pool| pool.selector.reserved()).sum();
    let warnings = warnings(app);
    json!({
        "status": if workers == 0 { "no_workers" } else { "ok" },
        "workers": workers,
        "draining_workers": app.fleet.draining(),
        "models": pools.len(),
        "reservations": reservations,
        "router_policy": app.options.routing.policy_name(),
        "warnings": Warning::texts(&warnings),
        "causes": warnings,
    })
}

/// Causes of silently failing prefix matching.
pub(super) fn warnings(app: &App) -> Vec<Warning> {
    let App { options, catalog, registrations, outside_warnings, remote, .. } = app;
    let (routing, http) = (&options.routing, &options.http);
    let mut warnings =
        Warning::common(outside_warnings, registrations, routing, http, remote.as_ref());
    for pool in app.fleet.pools() {
        if pool.selector.block_size() == 0 {
            let message = format!(
                "model={} tenant={}: the block size is unknown, so prompts are routed by load alone; register \
                 workers with block_size, or set --router-block-size",
                pool.key.model_name, pool.key.tenant_id
            );
            warnings.push(Warning::new(Topic::BlockSizeUnknown, message));
        }
    }
    if routing.uses_events() {
        for Report { view, trust, .. } in catalog.reports(|_| true) {
            let of = |reason| Warning::of_trust(view.worker, reason);
            warnings.extend(trust.reasons.iter().map(of));
        }
    }
    warnings
}
