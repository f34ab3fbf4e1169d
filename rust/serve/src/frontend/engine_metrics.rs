//! Reads an engine's own metrics: for the policies, and for the busy thresholds.

use std::sync::Arc;

use kvflash_core::ids::Worker;
use kvflash_core::policy::EngineMetrics;
use kvflash_core::select::Report;

use super::app::App;
use super::engine::{Engine, Pool};

/// The share of its blocks that an engine uses, under the names of old and new versions.
const KV_USAGE: [&str; 2] = ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"];

/// Reports the metrics of each of an engine's ranks to the policies. Metrics without a rank label
/// count for the first rank.
///
/// # Source
/// vLLM's names; means are over the engine's lifetime.
pub(crate) fn read(pool: &Pool, engine: &Engine, metrics: &str) {
    for dp_rank in 0..engine.spec.dp_size {
        pool.selector.engines.report(Worker::new(engine.id, dp_rank), of_rank(metrics, dp_rank));
    }
}

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
        let usage = value(metrics, dp_rank, &KV_USAGE).filter(|usage| *usage <= 1.0);
        let mut infos = metrics.lines().filter(|line| line.starts_with("vllm:cache_config_info{"));
        let blocks = |line: &str| label::<u64>(line, "num_gpu_blocks").filter(|total| *total > 0);
        let of_rank = infos.clone().find(|line| is_of(line, dp_rank));
        let total = of_rank.or_else(|| infos.next()).and_then(blocks);
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

#[cfg(test)]
mod tests {
    use super::*;

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
