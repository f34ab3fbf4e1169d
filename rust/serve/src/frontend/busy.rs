//! Busy thresholds: read and changed at run time.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use kvflash_core::ids::Worker;
use kvflash_core::select::Report;

use super::super::busy::{Change, list};
use super::app::App;
use super::engine::{Engine, Pool};

/// GET /busy_threshold: the current thresholds, by model.
pub(super) async fn thresholds(State(app): State<Arc<App>>) -> Response {
    let pools = app.fleet.pools();
    let tables = pools.iter().map(|pool| (pool.name.as_str(), &pool.selector.busy));
    Json(list(tables)).into_response()
}

/// POST /busy_threshold {model, thresholds...}: an absent field is kept, an explicit null removes
/// it; a request without thresholds only reads them.
pub(super) async fn change(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let changed = async {
        Change::check_type(&headers)?;
        let change = Change::parse(&app.intake.control(body).await?)?;
        let route = app.fleet.route(&change.model).ok().flatten();
        change.apply(route.iter().map(|route| &route.pool.selector.busy))
    };
    match changed.await {
        Ok(value) => Json(value).into_response(),
        Err(reject) => reject.plain(),
    }
}

/// The pool of `engine`, if its load is needed.
pub(super) fn watched(app: &App, engine: &Engine) -> Option<Arc<Pool>> {
    let pools = app.fleet.pools();
    pools.into_iter().find(|pool| {
        let is_wanted = pool.selector.busy.is_any_set() || pool.selector.needs_facts();
        is_wanted && pool.members().get(engine.id).is_some()
    })
}

/// Reports the load of each rank, from an engine's metrics, to the busy table.
///
/// Blocks in use are vLLM's reported share of its reported blocks. Metrics without a rank label
/// count for the first rank.
pub(super) fn read_load(pool: &Pool, engine: &Engine, metrics: &str) {
    for dp_rank in 0..engine.spec.dp_size {
        let of_rank = |line: &&str| label::<u32>(line, "engine").unwrap_or(0) == dp_rank;
        let lines = metrics.lines().filter(|line| line.starts_with("vllm:"));
        let usage = lines
            .clone()
            .filter(|line| {
                ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"].iter().any(|name| {
                    line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']))
                })
            })
            .find(of_rank)
            .and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .filter(|usage| (0.0..=1.0).contains(usage));
        let mut infos = lines.filter(|line| line.starts_with("vllm:cache_config_info{"));
        let blocks = |line: &str| label::<u64>(line, "num_gpu_blocks").filter(|total| *total > 0);
        let total = infos.clone().find(of_rank).or_else(|| infos.next()).and_then(blocks);
        let report = Report {
            kv_used_blocks: usage
                .zip(total)
                .map(|(share, total)| (share * total as f64).round() as u64),
            kv_total_blocks: total,
            ..Report::default()
        };
        pool.selector.busy.report(Worker::new(engine.id, dp_rank), &report);
    }
}

/// The number in a Prometheus label, e.g. `block_size="16"`.
pub(super) fn label<T: std::str::FromStr>(line: &str, name: &str) -> Option<T> {
    let quoted = format!("{name}=\"");
    line.match_indices(&quoted)
        .filter(|(at, _)| matches!(line[..*at].chars().next_back(), Some('{' | ',')))
        .find_map(|(at, _)| line[at + quoted.len()..].split('"').next()?.parse().ok())
}
