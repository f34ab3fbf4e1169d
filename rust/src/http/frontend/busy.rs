//! Thresholds from which on workers are busy: read and changed while requests run.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::super::Reject;
use super::app::App;
use super::engine::Engine;
use super::fleet::Pool;
use crate::ids::Worker;
use crate::select::{Report, Thresholds};

const DECODE: &str = "active_decode_blocks_threshold";
const PREFILL: &str = "active_prefill_tokens_threshold";
const PREFILL_FRAC: &str = "active_prefill_tokens_threshold_frac";

fn answer(model: &str, thresholds: &Thresholds) -> Value {
    json!({
        "model": model,
        DECODE: thresholds.active_decode_blocks,
        PREFILL: thresholds.active_prefill_tokens,
        PREFILL_FRAC: thresholds.active_prefill_tokens_frac,
    })
}

/// GET /busy_threshold: those in force, model by model.
pub(super) async fn list(State(app): State<Arc<App>>) -> Response {
    let pools = app.fleet.pools();
    let thresholds: Vec<Value> =
        pools.iter().map(|pool| answer(&pool.name, &pool.selector.busy.thresholds())).collect();
    Json(json!({ "thresholds": thresholds })).into_response()
}

/// POST /busy_threshold {model, thresholds...}: a field that is absent stays, an explicit null unsets;
/// no threshold at all only asks.
pub(super) async fn change(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let changed = async {
        let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        if !kind.is_some_and(|kind| kind.to_ascii_lowercase().starts_with("application/json")) {
            let message = format!("the content type must be application/json, got {kind:?}");
            return Err(Reject::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
        }
        let body = app.read_body(body).await?;
        let fields: Value = serde_json::from_slice(&body)
            .map_err(|error| Reject::bad_request(format!("the body is not JSON: {error}")))?;
        apply(&app, &fields)
    };
    match changed.await {
        Ok(value) => Json(value).into_response(),
        Err(reject) => reject.plain(),
    }
}

fn apply(app: &App, fields: &Value) -> Result<Value, Reject> {
    let unprocessable = |message: String| Reject::new(StatusCode::UNPROCESSABLE_ENTITY, message);
    let Value::Object(fields) = fields else {
        return Err(unprocessable("the body must be an object with the field model".to_owned()));
    };
    let known = ["model", DECODE, PREFILL, PREFILL_FRAC];
    if let Some(name) = fields.keys().find(|name| !known.contains(&name.as_str())) {
        let message = format!("unknown field {name:?}; known are {}", known.join(", "));
        return Err(unprocessable(message));
    }
    let model = match fields.get("model") {
        Some(Value::String(model)) => model.as_str(),
        other => {
            let got = other.map_or("nothing".to_owned(), Value::to_string);
            return Err(unprocessable(format!("model must be a text, got {got}")));
        }
    };
    let is_change = fields.len() > 1;
    let Ok(route) = app.fleet.route(model) else {
        if is_change {
            let message = format!(
                "Model '{model}' not found. Thresholds can only be set for discovered models."
            );
            return Err(Reject::new(StatusCode::NOT_FOUND, message));
        }
        return Ok(answer(model, &Thresholds::default()));
    };
    let busy = &route.pool.selector.busy;
    let mut thresholds = busy.thresholds();
    merge(fields, DECODE, "a number", Value::as_f64, &mut thresholds.active_decode_blocks)
        .and_then(|()| {
            let wanted = "a whole number of at least 0";
            merge(fields, PREFILL, wanted, Value::as_u64, &mut thresholds.active_prefill_tokens)
        })
        .and_then(|()| {
            let slot = &mut thresholds.active_prefill_tokens_frac;
            merge(fields, PREFILL_FRAC, "a number", Value::as_f64, slot)
        })
        .map_err(unprocessable)?;
    if is_change {
        busy.set_thresholds(thresholds)?;
        tracing::info!(model, %thresholds, "busy thresholds changed");
    }
    Ok(answer(model, &thresholds))
}

fn merge<T>(
    fields: &Map<String, Value>,
    name: &str,
    wanted: &str,
    read: impl Fn(&Value) -> Option<T>,
    slot: &mut Option<T>,
) -> Result<(), String> {
    match fields.get(name) {
        None => {}
        Some(Value::Null) => *slot = None,
        Some(value) => match read(value) {
            Some(value) => *slot = Some(value),
            None => return Err(format!("{name} must be {wanted} or null, got {value}")),
        },
    }
    Ok(())
}

/// The pool of `engine`, where its load is worth asking for.
pub(super) fn watched(app: &App, engine: &Engine) -> Option<Arc<Pool>> {
    let pools = app.fleet.pools();
    pools
        .into_iter()
        .find(|pool| pool.selector.busy.is_any_set() && pool.members().get(engine.id).is_some())
}

/// Tell the busy table what an engine's metrics say of each of its ranks.
///
/// Blocks in use are the share that vLLM publishes of the blocks that it says it has. A rank that is not
/// told apart stands for the first one.
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
