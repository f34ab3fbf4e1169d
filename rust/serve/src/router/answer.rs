//! Responses of GET /workers, /health and /ready.

use std::collections::HashMap;

use kvflash_core::catalog::{ListenerStatus, Report, Trust};
use kvflash_core::fleet::WorkerState;
use kvflash_core::ids::{InstanceId, Worker};
use kvflash_core::load::WorkerLoad;
use serde::Serialize;
use serde_json::{Value, json};

use super::app::App;
use super::fleet::{Member, Pool};

/// One entry of GET /workers.
#[derive(Debug, Serialize)]
pub(super) struct WorkerEntry {
    worker_id: InstanceId,
    model_name: String,
    tenant_id: String,
    url: Option<String>,
    dp_size: u32,
    block_size: Option<u32>,
    /// Whether it takes new requests.
    state: WorkerState,
    /// Booked and unfinished requests.
    in_flight: u64,
    /// Whether all of its ranks are above a threshold: it gets no requests.
    is_busy: bool,
    /// Blocks held, all ranks and tiers.
    blocks: usize,
    ranks: Vec<RankEntry>,
}

#[derive(Debug, Serialize)]
struct RankEntry {
    dp_rank: u32,
    /// Blocks held, all tiers.
    blocks: usize,
    active_blocks: u64,
    active_prefill_tokens: u64,
    active_requests: u32,
    reported: Value,
    listener: Option<Listener>,
}

#[derive(Debug, Serialize)]
struct Listener {
    endpoint: String,
    replay_endpoint: Option<String>,
    status: ListenerStatus,
    trust: Trust,
    last_error: Option<String>,
    last_sequence: Option<u64>,
    last_event_age_ms: Option<u64>,
}

impl Listener {
    fn of(report: Report) -> Self {
        let Report { view, trust, .. } = report;
        Self {
            endpoint: view.endpoint,
            replay_endpoint: view.replay_endpoint,
            status: view.status,
            trust,
            last_error: view.last_error,
            last_sequence: view.last_sequence,
            last_event_age_ms: view.last_event_age_ms,
        }
    }
}

/// All workers, optionally of one model, by model, tenant and id.
pub(super) fn worker_entries(app: &App, model_name: Option<&str>) -> Vec<WorkerEntry> {
    let mut entries = Vec::new();
    for pool in app.fleet.fitting(model_name, None) {
        let reports = app.catalog.reports(|model| model.key == pool.key);
        let mut reports: HashMap<Worker, Report> =
            reports.into_iter().map(|report| (report.view.worker, report)).collect();
        let loads = pool.selector.loads();
        let busy = pool.selector.busy.busy(loads.iter().copied());
        for member in pool.members().all() {
            let is_busy = busy.binary_search(&member.id).is_ok();
            entries.push(entry(&pool, member, is_busy, &loads, &mut reports));
        }
    }
    entries
}

/// The entry of one worker.
pub(super) fn worker_entry(app: &App, pool: &Pool, member: &Member) -> WorkerEntry {
    // A worker belongs to one pool.
    let reports = app.catalog.reports_of(member.id);
    let mut reports = reports.into_iter().map(|report| (report.view.worker, report)).collect();
    let loads = pool.selector.loads();
    let busy = pool.selector.busy.busy(loads.iter().copied());
    entry(pool, member, busy.binary_search(&member.id).is_ok(), &loads, &mut reports)
}

fn entry(
    pool: &Pool,
    member: &Member,
    is_busy: bool,
    loads: &[WorkerLoad],
    reports: &mut HashMap<Worker, Report>,
) -> WorkerEntry {
    let index = &pool.selector.model().index;
    let engines = pool.selector.engines.all();
    let rank = |worker: Worker| {
        // Ascending by worker.
        let place = loads.binary_search_by_key(&worker, |load| load.worker).ok();
        let load = place.map(|place| loads[place]);
        let reported = pool.selector.busy.reported(worker).unwrap_or_default();
        let engine = engines.get(&worker).copied().unwrap_or_default();
        RankEntry {
            dp_rank: worker.dp_rank,
            blocks: index.blocks(worker),
            active_blocks: load.map_or(0, |load| load.blocks),
            active_prefill_tokens: load.map_or(0, |load| load.prefill_tokens),
            active_requests: load.map_or(0, |load| load.requests),
            reported: json!({
                "kv_used_blocks": reported.kv_used_blocks,
                "active_decode_blocks": reported.active_decode_blocks,
                "active_prefill_tokens": reported.active_prefill_tokens,
                "kv_total_blocks": reported.kv_total_blocks,
                "max_num_batched_tokens": reported.max_num_batched_tokens,
                "running_requests": engine.running_requests,
                "gpu_kv_usage": engine.gpu_kv_usage,
                "cpu_kv_usage": engine.cpu_kv_usage,
                "queue_s": engine.queue_s,
                "mean_prefill_s": engine.mean_prefill_s,
                "mean_decode_s": engine.mean_decode_s,
                "avg_prompt_tokens": engine.avg_prompt_tokens,
                "avg_generation_tokens": engine.avg_generation_tokens,
                "busy_ratio": engine.busy_ratio,
                "utilization": engine.utilization,
            }),
            listener: None,
        }
    };
    let mut ranks: Vec<RankEntry> = member.ranks().map(rank).collect();
    for (rank, worker) in ranks.iter_mut().zip(member.ranks()) {
        rank.listener = reports.remove(&worker).map(Listener::of);
    }
    WorkerEntry {
        worker_id: member.id,
        model_name: pool.key.model_name.clone(),
        tenant_id: pool.key.tenant_id.clone(),
        url: member.url.clone(),
        dp_size: member.dp_size,
        block_size: pool.selector.model().block_size(),
        state: match pool.selector.draining.has(member.id) {
            true => WorkerState::Draining,
            false => WorkerState::Active,
        },
        in_flight: ranks.iter().map(|rank| u64::from(rank.active_requests)).sum(),
        is_busy,
        blocks: ranks.iter().map(|rank| rank.blocks).sum(),
        ranks,
    }
}

/// Whether enough workers have registered, with the numbers.
pub(super) fn readiness(app: &App) -> (bool, Value) {
    let (workers, registered_total) = app.fleet.counts();
    let wanted = app.options.routing.min_initial_workers;
    // Ready once is ready forever: departures are reported by /health.
    let is_stopping = app.options.http.shutdown().is_announced();
    let is_ready = app.started().is_ok() && !is_stopping;
    let answer = json!({
        "ready": is_ready,
        "stopping": is_stopping,
        "workers": workers,
        "registered_total": registered_total,
        "min_initial_workers": wanted,
    });
    (is_ready, answer)
}

/// The state of the service: it runs, and causes of silently failing prefix matching.
pub(super) fn health(app: &App) -> Value {
    let (workers, _) = app.fleet.counts();
    let pools = app.fleet.pools();
    let reservations: usize = pools.iter().map(|pool| pool.selector.reserved()).sum();
    let mut warnings = app.outside_warnings.read().clone();
    warnings.extend(app.registrations.trouble());
    warnings.extend(app.options.routing.policies.desk().and_then(|desk| desk.trouble()));
    warnings.extend(app.options.http.lock().troubles());
    for pool in &pools {
        if pool.selector.block_size() == 0 {
            warnings.push(format!(
                "model={} tenant={}: the block size is unknown, so prompts are routed by load alone; register \
                 workers with block_size, or set --router-block-size",
                pool.key.model_name, pool.key.tenant_id
            ));
        }
    }
    if app.options.routing.uses_events() {
        for report in app.catalog.reports(|_| true) {
            for reason in &report.trust.reasons {
                warnings.push(format!("worker {}: {}", report.view.worker, reason.message));
            }
        }
    }
    json!({
        "status": if workers == 0 { "no_workers" } else { "ok" },
        "workers": workers,
        "draining_workers": app.fleet.draining(),
        "models": pools.len(),
        "reservations": reservations,
        "router_policy": app.options.routing.policy_name(),
        "warnings": warnings,
    })
}
