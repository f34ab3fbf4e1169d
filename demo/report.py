"""Computes the figures of a run from its records. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from demo.record import ArmRun, Record
from kvflash.percentile import percentile

__all__ = [
    "AUTO",
    "BASELINE",
    "MODES",
    "P99_SAMPLES_MIN",
    "REUSE_WINDOW_REQUESTS",
    "ArmFigures",
    "figures",
    "reuse_over_time",
    "stage_tokens",
]

BASELINE = "round-robin"
AUTO = "auto"
# In the order of the table.
MODES = (BASELINE, "kv", AUTO)

# With fewer samples the nearest rank of the 99th percentile is the maximum, so p99 is omitted.
P99_SAMPLES_MIN = 100
# Requests in the window of a point of the reuse curve.
REUSE_WINDOW_REQUESTS = 40

_STAGE = re.compile(r'^kvflash_tokens_total\{stage="(\w+)"\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class ArmFigures:
    """Figures of one mode for the workload of one seed.

    Attributes:
        mode: The router mode.
        seed: Seed of the workload.
        requests: Completely answered requests.
        failures: Failed requests, and those that could not be sent after them.
        prompt_tokens: Of the answered requests, as counted by the engines.
        reused_tokens: Prompt tokens found in the engines' caches, as the engines report.
        reuse_percent: 100 * reused / prompt.
        computed_tokens: Prompt tokens that had to be computed.
        ttft_ms_p50: Time to first token, median; None without samples.
        ttft_ms_p99: 99th percentile; None with fewer than P99_SAMPLES_MIN samples.
        ttft_ms_max: Maximum.
        wall_s: Duration of the arm.
        requests_by_worker: Answered requests of every worker with at least one.
        busiest_ratio: Requests of the busiest worker / mean of all workers; 1 is even.
        available_tokens: Tokens that the best worker held for each request, as seen by the router;
            None if the router does not look.
        selected_tokens: Tokens that the chosen worker held, as seen by the router; None as above.
        delivered_tokens: Reused tokens that the engines reported to the router.
    """

    mode: str
    seed: int
    requests: int
    failures: int
    prompt_tokens: int
    reused_tokens: int
    reuse_percent: float
    computed_tokens: int
    ttft_ms_p50: float | None
    ttft_ms_p99: float | None
    ttft_ms_max: float | None
    wall_s: float
    requests_by_worker: Mapping[str, int]
    busiest_ratio: float
    available_tokens: int | None
    selected_tokens: int | None
    delivered_tokens: int | None


def stage_tokens(metrics: str) -> dict[str, float]:
    """Tokens by stage, from the frontend's /metrics."""
    return {stage: float(value) for stage, value in _STAGE.findall(metrics)}


def figures(run: ArmRun) -> ArmFigures:
    """Compute the figures of a run."""
    answered = [record for record in run.records if record.error is None]
    prompt_tokens = sum(record.prompt_tokens for record in answered)
    reused_tokens = sum(record.cached_tokens for record in answered)
    ttft_ms = _ttft_ms(answered)
    by_worker = Counter(record.worker for record in answered)
    is_looking = run.mode != BASELINE

    def stage(name: str, *, is_known: bool) -> int | None:
        return int(run.stage_tokens[name]) if is_known and name in run.stage_tokens else None

    return ArmFigures(
        mode=run.mode,
        seed=run.seed,
        requests=len(answered),
        failures=run.planned_requests - len(answered),
        prompt_tokens=prompt_tokens,
        reused_tokens=reused_tokens,
        reuse_percent=100 * reused_tokens / prompt_tokens if prompt_tokens else 0.0,
        computed_tokens=prompt_tokens - reused_tokens,
        ttft_ms_p50=percentile(ttft_ms, 50),
        ttft_ms_p99=percentile(ttft_ms, 99) if len(ttft_ms) >= P99_SAMPLES_MIN else None,
        ttft_ms_max=max(ttft_ms, default=None),
        wall_s=run.wall_s,
        requests_by_worker=dict(sorted(by_worker.items())),
        busiest_ratio=(
            max(by_worker.values()) * run.worker_count / len(answered) if answered else 0.0
        ),
        available_tokens=stage("available", is_known=is_looking),
        selected_tokens=stage("selected", is_known=is_looking),
        delivered_tokens=stage("delivered", is_known=True),
    )


def reuse_over_time(
    records: Sequence[Record], window: int = REUSE_WINDOW_REQUESTS
) -> tuple[list[float], list[float]]:
    """Share of the prompts that was reused, answer by answer.

    Args:
        records: Records of one arm, in order of their ends.
        window: Answers in the window of a point; the first points have fewer.

    Returns:
        Times in seconds, and the percentage of prompt tokens reused in the window that ends there.
    """
    answered = [record for record in records if record.error is None]
    times_s: list[float] = []
    percents: list[float] = []
    for end in range(1, len(answered) + 1):
        seen = answered[max(0, end - window) : end]
        prompt_tokens = sum(record.prompt_tokens for record in seen)
        reused_tokens = sum(record.cached_tokens for record in seen)
        times_s.append(seen[-1].end_s)
        percents.append(100 * reused_tokens / prompt_tokens if prompt_tokens else 0.0)
    return times_s, percents


def _ttft_ms(records: Sequence[Record]) -> list[float]:
    return [record.ttft_ms for record in records if record.ttft_ms is not None]
