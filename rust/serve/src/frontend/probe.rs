//! Health checks, and the discovery of what an engine serves and of its load.

use std::sync::Arc;
use std::time::Duration;

use kvflash_core::error::Result;
use kvflash_core::ids::Worker;
use kvflash_core::policy::EngineMetrics;
use kvflash_core::select::Report;
use kvflash_core::text::model_folder;
use serde::Deserialize;
use tokio::time::Instant;

use super::app::App;
use super::engine::{Engine, EngineNotes, Pool};
use super::engine_spec::EngineSpec;
use super::inspect::inspect;
use super::proxy::{AttemptError, Upstream};
use super::{parity, server_info};
use crate::gateway::ids::ask_once;

/// The served models are queried again once in this many checks.
const CHECKS_PER_LEARNING: u32 = 15;

/// Pause after the first failed check. A starting engine is checked more often than a healthy one,
/// but not forever, because many of thousands may be down.
const FIRST_PAUSE: Duration = Duration::from_millis(250);

/// Longer version strings are ignored.
const MAX_VERSION_BYTES: usize = 128;

/// Adds an engine, and monitors it. Must be called within a tokio runtime.
///
/// # Errors
/// As [`Fleet::add`](super::fleet::Fleet::add).
pub(super) fn add(app: &Arc<App>, spec: EngineSpec) -> Result<Arc<Engine>> {
    let text = spec.tokenizer.as_deref().and_then(|named| {
        let folder = model_folder(named);
        let text = folder.and_then(|at| app.tokenizers.open(&at, app.options.tokenizer_cache));
        // It may exist only on the worker's machine.
        text.inspect_err(|error| {
            tracing::warn!(url = spec.url, "its card's tokenizer: {error}");
        })
        .ok()
    });
    let engine = app.fleet.add(spec)?;
    if let Some(text) = text {
        // It is new, so the cell is empty.
        let _ = engine.text.set(text);
    }
    tokio::spawn(watch(Arc::clone(app), Arc::clone(&engine)));
    Ok(engine)
}

/// Checks `engine` until it is removed or the service stops, and while requests wait for its first
/// byte also after that, so that a frozen engine holds none of them.
async fn watch(app: Arc<App>, engine: Arc<Engine>) {
    let shutdown = app.options.http.shutdown();
    let interval = app.options.health_interval;
    let timeout = interval.max(Duration::from_secs(1));
    // Adapters come and go while an engine runs, and it may restart between two checks.
    let learn_interval = interval * CHECKS_PER_LEARNING;
    let mut learned = None::<Instant>;
    let mut missed = 0_u32;
    // Why its models could not be read the last time, so that a lasting fault is logged once.
    let mut unread = None::<String>;
    while engine.is_waited_for() || !(engine.is_removed() || shutdown.is_stopped()) {
        // Clients may cause 404 as often as they like.
        let stands = if engine.take_unknown() { FIRST_PAUSE } else { learn_interval };
        let is_known = engine.is_healthy() && learned.is_some_and(|at| at.elapsed() < stands);
        match check(&app.upstream, &engine, timeout).await {
            // It closes its port before it ends, and still answers what it has.
            Err(failed) if failed.is_closed && engine.is_removed() => {}
            Err(failed) => engine.check_failed(&failed.message, failed.status),
            Ok(()) if is_known || engine.is_removed() => {}
            Ok(()) => match learn(&app, &engine).await {
                // It serves and has reported its models before: an update can wait.
                Err(AttemptError { message: why, .. }) if engine.is_healthy() => {
                    if unread.as_ref() != Some(&why) {
                        tracing::warn!(
                            worker = engine.id,
                            url = engine.base,
                            why,
                            "could not read the worker's models again"
                        );
                    }
                    unread = Some(why);
                }
                Err(failed) => engine.check_failed(&failed.message, failed.status),
                Ok(notes) => {
                    unread = None;
                    if learned.is_none() {
                        warn_without_events(&app, &engine, &notes);
                    }
                    learned = Some(Instant::now());
                    if has_other_ranks(&app, &engine, &notes) {
                        continue;
                    }
                    let outcome = app.fleet.learned(&engine, notes);
                    if engine.is_removed() {
                        continue;
                    }
                    let known = engine.notes.lock().last_error.clone();
                    if let Err(error) = &outcome
                        && known.as_ref() != Some(&error.to_string())
                    {
                        tracing::error!(worker = engine.id, url = engine.base, %error, "the worker does not \
                                                                                        match its model");
                    }
                    // An engine that does not fit the index still serves: only its overlap does not
                    // count.
                    let serves = app.fleet.pool_of(engine.id).is_some();
                    if serves && engine.recovered() {
                        tracing::info!(worker = engine.id, url = engine.base, "worker is healthy");
                    }
                    match outcome {
                        Ok(()) => {}
                        // It no longer serves its model, and no other model accepts it.
                        Err(error) if !serves && engine.is_healthy() => {
                            engine.failed(&error.to_string());
                        }
                        Err(error) => drop(engine.notes.lock().fail(error, None)),
                    }
                    inspect(&app, &engine).await;
                    parity::compare_if_due(&app, &engine);
                    ask_once(&app, &engine);
                }
            },
        }
        if engine.is_healthy()
            && let Some(pool) = watched(&app, &engine)
            && let Ok((200, body)) = app.upstream.get(&engine.spec, "/metrics", timeout).await
        {
            let text = String::from_utf8_lossy(&body);
            read_load(&pool, &engine, &text);
        }
        missed = if engine.is_healthy() { 0 } else { missed.saturating_add(1) };
        tokio::select! {
            () = tokio::time::sleep(pause(missed, interval)) => {}
            // A request has just failed there: check again soon, but not in a tight loop.
            () = engine.doubt.notified(), if engine.is_healthy() => {}
            () = shutdown.wait(), if !shutdown.is_stopped() => {}
        }
    }
}

/// Warns of a worker with an unknown event socket: its cache earns no credit.
fn warn_without_events(app: &App, engine: &Engine, notes: &EngineNotes) {
    let is_told = engine.spec.events.is_some() || engine.member.is_some();
    if app.routes_by_events() && !is_told && notes.server.is_none() {
        tracing::warn!(
            worker = engine.id,
            url = engine.base,
            "given without events=: its cache is unknown and earns no credit; add events=tcp://HOST:PORT, the \
             endpoint in the engine's --kv-events-config, or start with --no-kv-events"
        );
    }
}

/// Applies what an engine's server reports about its events. If it has additional ranks, it is
/// registered again with them; returns true, and another task checks it.
fn has_other_ranks(app: &Arc<App>, engine: &Engine, notes: &EngineNotes) -> bool {
    let Some(server) = &notes.server else { return false };
    let (id, note) = (engine.id, &server.note);
    if engine.spec.dp_size == 1 && server.dp_size > 1 && !server.events.is_empty() {
        if let Err(error) = app.fleet.check_room(server.dp_size - 1, engine.spec.registrant) {
            engine.notes.lock().fail(format!("{note}: {error}"), None);
            return false;
        }
        tracing::warn!(
            worker = id,
            url = engine.base,
            "{note}: registering the worker again with all ranks"
        );
        let (dp_size, instance_id) = (server.dp_size, Some(id));
        let spec = EngineSpec { dp_size, instance_id, ..engine.spec.clone() };
        let state = app.fleet.state_of(id);
        // It may have been removed by hand meanwhile.
        let left = app.fleet.remove(id);
        let again = left.and_then(|_| add(app, spec));
        // More ranks do not bring it back into service.
        if let Err(error) = again.and_then(|_| app.fleet.set_state(id, state)) {
            tracing::error!(worker = id, url = engine.base, %error, "could not register the worker again");
        }
        return true;
    }
    let before = engine.notes.lock().server.as_ref().map(|server| server.note.clone());
    if before.as_ref() != Some(note) {
        let outcome = if server.events.is_empty() {
            "its cache is unknown and earns no credit"
        } else {
            "used"
        };
        tracing::warn!(worker = id, url = engine.base, "given without events=: {note}; {outcome}");
    }
    if app.fleet.events_of(id) != server.events
        && let Err(error) = app.fleet.change_events(id, server.events.clone())
    {
        tracing::error!(worker = id, url = engine.base, %error, "cannot subscribe to its events");
    }
    false
}

/// Time to the next check after this many failed ones in a row: doubled each time, up to the
/// `interval` of healthy engines.
fn pause(missed: u32, interval: Duration) -> Duration {
    match missed.checked_sub(1) {
        Some(before) => FIRST_PAUSE.saturating_mul(1 << before.min(30)).min(interval),
        None => interval,
    }
}

async fn check(
    upstream: &Upstream,
    engine: &Engine,
    timeout: Duration,
) -> Result<(), AttemptError> {
    let (status, _) = upstream.get(&engine.spec, "/health", timeout).await?;
    let hint = match status {
        200 => return Ok(()),
        508 => ": the worker is this frontend itself, or forwards requests to it",
        _ => "",
    };
    Err(AttemptError::answered(status, format!("GET /health answered {status}{hint}")))
}

#[derive(Deserialize)]
struct ModelList {
    data: Vec<ModelCard>,
}

#[derive(Deserialize)]
struct Version {
    version: String,
}

#[derive(Deserialize)]
struct ModelCard {
    id: String,
    parent: Option<String>,
    max_model_len: Option<u64>,
}

async fn learn(app: &App, engine: &Engine) -> Result<EngineNotes, AttemptError> {
    let upstream = &app.upstream;
    let timeout = Duration::from_secs(5);
    let get = |path| upstream.get(&engine.spec, path, timeout);
    let (status, body) = get("/v1/models").await?;
    if status != 200 {
        return Err(AttemptError::answered(status, format!("GET /v1/models answered {status}")));
    }
    let list: ModelList = serde_json::from_slice(&body).map_err(|error| {
        AttemptError::new("status", format!("GET /v1/models: not a model list: {error}"), true)
    })?;
    let mut notes = EngineNotes {
        max_model_len: list.data.first().and_then(|card| card.max_model_len),
        models: list.data.into_iter().map(|card| (card.id, card.parent)).collect(),
        ..EngineNotes::default()
    };
    // Not every engine has metrics; its events also contain the block size.
    if let Ok((200, body)) = get("/metrics").await {
        let text = String::from_utf8_lossy(&body);
        let info = text.lines().find(|line| line.starts_with("vllm:cache_config_info{"));
        notes.block_size = info.and_then(|line| label(line, "block_size"));
        notes.started_s = text
            .lines()
            .find_map(|line| line.strip_prefix("process_start_time_seconds "))
            .and_then(|value| value.trim().parse().ok());
        notes.capacity_blocks = info.and_then(|line| label(line, "num_gpu_blocks"));
    }
    if !app.tokenizers.loaded().is_empty() || app.salts.is_some() {
        notes.version = match get("/version").await {
            Ok((200, body)) => {
                let answer = serde_json::from_slice::<Version>(&body).ok();
                let version = answer.map(|answer| answer.version);
                version.filter(|version| version.len() <= MAX_VERSION_BYTES)
            }
            _ => {
                let before = engine.notes.lock();
                // Without its start, a restart shows only where it fails checks.
                let can_tell = notes.started_s.is_some() || engine.is_healthy();
                let is_same = can_tell && before.started_s == notes.started_s;
                before.version.clone().filter(|_| is_same)
            }
        };
    }
    if app.uses_events && engine.spec.events.is_none() {
        notes.server = server_info::ask(upstream, engine, timeout).await;
    }
    let told = notes.server.as_ref().and_then(|server| server.block_size);
    notes.block_size = notes.block_size.filter(|size| *size > 0).or(told);
    Ok(notes)
}

/// The share of its blocks that an engine uses, under the names of old and new versions.
const KV_USAGE: [&str; 2] = ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"];

fn is_of(line: &str, dp_rank: u32) -> bool {
    label::<u32>(line, "engine").unwrap_or(0) == dp_rank
}

/// The value of the first metric of a rank with one of these names.
fn value(metrics: &str, dp_rank: u32, names: &[&str]) -> Option<f64> {
    metrics
        .lines()
        .filter(|line| {
            let rest = names.iter().find_map(|name| line.strip_prefix(name));
            rest.is_some_and(|rest| rest.starts_with(['{', ' ']))
        })
        .find(|line| is_of(line, dp_rank))
        .and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
        .filter(|value| value.is_finite() && *value >= 0.0)
}

/// The metrics of one rank, for the policies.
///
/// # Source
/// vLLM's names; means are over the engine's lifetime.
fn of_rank(metrics: &str, dp_rank: u32) -> EngineMetrics {
    let value = |names: &[&str]| value(metrics, dp_rank, names);
    let mean = |name: &str| {
        let count = value(&[&format!("{name}_count")]).filter(|count| *count > 0.0)?;
        Some(value(&[&format!("{name}_sum")])? / count)
    };
    EngineMetrics {
        running_requests: value(&["vllm:num_requests_running"]),
        gpu_kv_usage: value(&KV_USAGE),
        cpu_kv_usage: value(&["vllm:cpu_cache_usage_perc"]),
        queue_s: mean("vllm:request_queue_time_seconds"),
        mean_prefill_s: mean("vllm:request_prefill_time_seconds"),
        mean_decode_s: mean("vllm:request_decode_time_seconds"),
        avg_prompt_tokens: mean("vllm:request_prompt_tokens"),
        avg_generation_tokens: mean("vllm:request_generation_tokens"),
        ..EngineMetrics::default()
    }
}

/// The pool of `engine`, if its load is needed.
fn watched(app: &App, engine: &Engine) -> Option<Arc<Pool>> {
    let pools = app.fleet.pools();
    pools.into_iter().find(|pool| {
        let is_wanted = pool.selector.busy.is_any_set() || pool.selector.needs_facts();
        is_wanted && pool.members().get(engine.id).is_some()
    })
}

/// Reports the load of each rank, from an engine's metrics, to the busy table, and its metrics to the policies.
///
/// Blocks in use are vLLM's reported share of its reported blocks. Metrics without a rank label
/// count for the first rank.
fn read_load(pool: &Pool, engine: &Engine, metrics: &str) {
    for dp_rank in 0..engine.spec.dp_size {
        let worker = Worker::new(engine.id, dp_rank);
        let usage = value(metrics, dp_rank, &KV_USAGE).filter(|usage| *usage <= 1.0);
        let mut infos = metrics.lines().filter(|line| line.starts_with("vllm:cache_config_info{"));
        let blocks = |line: &str| label::<u64>(line, "num_gpu_blocks").filter(|total| *total > 0);
        let own = infos.clone().find(|line| is_of(line, dp_rank));
        let total = own.or_else(|| infos.next()).and_then(blocks);
        let report = Report {
            kv_used_blocks: usage
                .zip(total)
                .map(|(share, total)| (share * total as f64).round() as u64),
            kv_total_blocks: total,
            ..Report::default()
        };
        pool.selector.busy.report(worker, &report);
        pool.selector.engines.report(worker, of_rank(metrics, dp_rank));
    }
}

/// The number in a Prometheus label, e.g. `block_size="16"`.
fn label<T: std::str::FromStr>(line: &str, name: &str) -> Option<T> {
    let quoted = format!("{name}=\"");
    line.match_indices(&quoted)
        .filter(|(at, _)| matches!(line[..*at].chars().next_back(), Some('{' | ',')))
        .find_map(|(at, _)| line[at + quoted.len()..].split('"').next()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_that_stay_away_are_asked_less_and_less_often() {
        let pauses = |interval_ms: u64| {
            let pause = |missed| pause(missed, Duration::from_millis(interval_ms)).as_millis();
            [0, 1, 2, 3, 4, 5, 32, 33, u32::MAX].map(pause)
        };
        assert_eq!(pauses(2_000), [2_000, 250, 500, 1_000, 2_000, 2_000, 2_000, 2_000, 2_000]);
        assert_eq!(pauses(100), [100; 9]);
        // An endless interval: doubled until it overflows.
        assert_eq!(pauses(u64::MAX)[6..], [250 << 30; 3]);
    }

    #[test]
    fn reads_the_label_of_exactly_that_name() {
        let line = r#"vllm:cache_config_info{user_block_size="8",block_size="32",num_gpu_blocks="None"} 1"#;
        assert_eq!(label::<u32>(line, "block_size"), Some(32));
        assert_eq!(label::<u64>(line, "num_gpu_blocks"), None);
    }

    #[test]
    fn reads_each_rank_and_means() {
        let text = "# HELP vllm:num_requests_running x\n\
            vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 3\n\
            vllm:num_requests_running{engine=\"1\",model_name=\"m\"} 5.0\n\
            vllm:num_requests_running_more{engine=\"1\"} 9\n\
            vllm:gpu_cache_usage_perc{model_name=\"m\"} 0.25\n\
            vllm:request_prompt_tokens_sum{model_name=\"m\"} 300\n\
            vllm:request_prompt_tokens_count{model_name=\"m\"} 4\n\
            vllm:request_queue_time_seconds_sum{model_name=\"m\"} 0\n\
            vllm:request_queue_time_seconds_count{model_name=\"m\"} 0\n";
        let first = of_rank(text, 0);
        assert_eq!((first.running_requests, first.gpu_kv_usage), (Some(3.0), Some(0.25)));
        assert_eq!((first.avg_prompt_tokens, first.queue_s), (Some(75.0), None));
        let second = of_rank(text, 1);
        assert_eq!((second.running_requests, second.gpu_kv_usage), (Some(5.0), None));
        assert_eq!(of_rank("", 0), EngineMetrics::default());
    }
}
