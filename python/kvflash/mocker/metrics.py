"""The state of an engine as Prometheus text, under vLLM's names (and `mocker:` for its own)."""

from __future__ import annotations

import time
from collections.abc import Mapping

from kvflash.mocker.config import MockerConfig
from kvflash.mocker.scheduler import Scheduler

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Approximate start time of this process: the module is imported first.
_STARTED_S = time.time()


def render(scheduler: Scheduler, config: MockerConfig) -> str:
    """Render all metrics of one worker.

    Args:
        scheduler: Its scheduler.
        config: Its options.

    Returns:
        Prometheus text exposition format 0.0.4.
    """
    totals = scheduler.counters
    gauges = (
        ("vllm:num_requests_running", "Requests that hold blocks.", scheduler.running_count),
        ("vllm:num_requests_waiting", "Requests in the queue.", scheduler.waiting_count),
        ("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", scheduler.kv_usage),
    )
    counters = (
        ("vllm:prefix_cache_queries_total", "Prompt tokens looked up.", totals.prompt_tokens),
        ("vllm:prefix_cache_hits_total", "Prompt tokens found cached.", totals.cached_tokens),
        ("vllm:prompt_tokens_total", "Prompt tokens of admitted requests.", totals.prompt_tokens),
        ("vllm:generation_tokens_total", "Output tokens generated.", totals.generation_tokens),
        ("vllm:num_preemptions_total", "Preempted requests.", totals.preemptions),
        ("mocker:requests_finished_total", "Complete answers.", totals.finished_requests),
        (
            "mocker:requests_aborted_total",
            "Requests that ended because their client left.",
            totals.aborted_requests,
        ),
        ("mocker:requests_rejected_total", "Refused: queue full.", totals.rejected_requests),
    )
    labels = _labels({"engine": str(config.data_parallel_rank), "model_name": config.model_name})
    lines: list[str] = []
    for kind, samples in (("gauge", gauges), ("counter", counters)):
        for name, help_text, value in samples:
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
            lines.append(f"{name}{labels} {value}")
    info = _labels(
        {
            "block_size": str(config.block_size),
            "num_gpu_blocks": str(config.num_gpu_blocks),
            "enable_prefix_caching": str(config.enable_prefix_caching),
        }
    )
    name = "process_start_time_seconds"
    lines += [f"# HELP {name} Start of the process, Unix time.", f"# TYPE {name} gauge"]
    lines.append(f"{name} {_STARTED_S:.3f}")
    name = "vllm:cache_config_info"
    lines += [f"# HELP {name} Shape of the KV cache.", f"# TYPE {name} gauge", f"{name}{info} 1"]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items()) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
