//! Reads an engine's own metrics for the policies.

use kvflash_core::ids::Worker;
use kvflash_core::policy::EngineMetrics;

use super::busy::label;
use super::engine::{Engine, Pool};

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

fn of_rank(metrics: &str, dp_rank: u32) -> EngineMetrics {
    let value = |names: &[&str]| {
        metrics
            .lines()
            .filter(|line| {
                let rest = names.iter().find_map(|name| line.strip_prefix(name));
                rest.is_some_and(|rest| rest.starts_with(['{', ' ']))
            })
            .find(|line| label::<u32>(line, "engine").unwrap_or(0) == dp_rank)
            .and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .filter(|value| value.is_finite() && *value >= 0.0)
    };
    let mean = |name: &str| {
        let count = value(&[&format!("{name}_count")]).filter(|count| *count > 0.0)?;
        Some(value(&[&format!("{name}_sum")])? / count)
    };
    EngineMetrics {
        running_requests: value(&["vllm:num_requests_running"]),
        gpu_kv_usage: value(&["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"]),
        cpu_kv_usage: value(&["vllm:cpu_cache_usage_perc"]),
        queue_s: mean("vllm:request_queue_time_seconds"),
        mean_prefill_s: mean("vllm:request_prefill_time_seconds"),
        mean_decode_s: mean("vllm:request_decode_time_seconds"),
        avg_prompt_tokens: mean("vllm:request_prompt_tokens"),
        avg_generation_tokens: mean("vllm:request_generation_tokens"),
        ..EngineMetrics::default()
    }
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
