"""The metrics of one worker, under vLLM's names or `mocker:`."""

from kvflash.mocker.config import MockerConfig
from kvflash.mocker.scheduler import Scheduler

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(scheduler: Scheduler, config: MockerConfig, started_s: float) -> str:
    """All metrics of one worker as Prometheus text 0.0.4; ``started_s`` is Unix time."""
    totals = scheduler.counters
    labels = f'{{engine="{config.data_parallel_rank}",model_name="{_escape(config.model_name)}"}}'
    info = (
        f'{{block_size="{config.block_size}",num_gpu_blocks="{config.num_gpu_blocks}",'
        f'enable_prefix_caching="{config.enable_prefix_caching}"}}'
    )
    samples: tuple[tuple[str, str, object], ...] = (
        ("vllm:num_requests_running", "Requests that hold blocks.", scheduler.running_count),
        ("vllm:num_requests_waiting", "Requests in the queue.", scheduler.waiting_count),
        ("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", scheduler.kv_usage),
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
        ("process_start_time_seconds", "Start of the process, Unix time.", f"{started_s:.3f}"),
        ("vllm:cache_config_info", "Shape of the KV cache.", 1),
    )
    special = {"process_start_time_seconds": "", "vllm:cache_config_info": info}
    lines: list[str] = []
    for name, help_text, value in samples:
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
        lines.append(f"{name}{special.get(name, labels)} {value}")
    return "\n".join(lines) + "\n"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
