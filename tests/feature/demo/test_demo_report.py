"""The demo's figures of one run."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from demo.record import ArmRun, Record
from demo.report import figures, reuse_over_time, stage_tokens
from kvflash.percentile import percentile


def record(place: int, *, cached: int = 0, ttft_ms: float = 10.0, worker: str = "1:0") -> Record:
    return Record(
        conversation=place,
        turn=0,
        request=f"prompt {place}",
        worker=worker,
        start_s=float(place),
        end_s=place + 0.5,
        ttft_ms=ttft_ms,
        prompt_tokens=100,
        cached_tokens=cached,
    )


def failed(place: int) -> Record:
    return replace(record(place), ttft_ms=None, prompt_tokens=0, error="status 502")


def arm(mode: str, records: list[Record], *, planned: int | None = None) -> ArmRun:
    return ArmRun(
        mode=mode,
        seed=1,
        records=records,
        planned_requests=len(records) if planned is None else planned,
        worker_count=2,
        wall_s=3.0,
        stage_tokens={"input": 200.0, "available": 90.0, "selected": 80.0, "delivered": 70.0},
    )


@pytest.mark.parametrize(
    ("percent", "wanted"), [(1, 1), (50, 50), (50.1, 51), (99, 99), (99.1, 100), (100, 100)]
)
def test_a_percentile_is_the_nearest_rank(percent: float, wanted: int) -> None:
    samples = list(range(1, 101))
    random.Random(3).shuffle(samples)
    assert percentile(samples, percent) == wanted


def test_percentiles_of_few_samples() -> None:
    assert percentile([], 50) is None
    assert percentile([7.0], 50) == percentile([7.0], 99) == 7.0
    assert percentile([1.0, 2.0], 50) == 1.0


def test_figures_count_what_was_answered() -> None:
    records = [
        record(0, cached=0, ttft_ms=30.0, worker="1:0"),
        record(1, cached=80, ttft_ms=10.0, worker="1:0"),
        record(2, cached=40, ttft_ms=20.0, worker="2:0"),
        failed(3),
    ]
    column = figures(arm("kv", records, planned=6))
    assert (column.requests, column.failures) == (3, 3)
    assert (column.prompt_tokens, column.reused_tokens, column.computed_tokens) == (300, 120, 180)
    assert column.reuse_percent == pytest.approx(40.0)
    assert (column.ttft_ms_p50, column.ttft_ms_max) == (20.0, 30.0)
    assert column.requests_by_worker == {"1:0": 2, "2:0": 1}
    assert column.busiest_ratio == pytest.approx(2 / 1.5)
    assert (column.available_tokens, column.selected_tokens) == (90, 80)
    assert column.delivered_tokens == 70


def test_idle_workers_count_in_the_mean() -> None:
    assert figures(arm("kv", [record(0), record(1)])).busiest_ratio == pytest.approx(2.0)


def test_a_maximum_is_not_called_p99() -> None:
    many = [record(place, ttft_ms=float(place)) for place in range(100)]
    assert figures(arm("kv", many)).ttft_ms_p99 == 98.0
    assert figures(arm("kv", many[1:])).ttft_ms_p99 is None


def test_round_robin_expects_nothing() -> None:
    column = figures(arm("round-robin", [record(0)]))
    assert (column.available_tokens, column.selected_tokens) == (None, None)
    assert column.delivered_tokens == 70


def test_an_arm_without_answers_has_figures() -> None:
    column = figures(arm("kv", [failed(0)]))
    assert (column.requests, column.failures) == (0, 1)
    assert column.reuse_percent == column.busiest_ratio == 0
    assert column.ttft_ms_p50 is column.ttft_ms_max is None


def test_reuse_over_time_looks_back_on_a_window() -> None:
    records = [record(0), failed(1), record(2, cached=100), record(3, cached=50)]
    times_s, percents = reuse_over_time(records, window=2)
    assert times_s == [0.5, 2.5, 3.5]
    assert percents == pytest.approx([0.0, 50.0, 75.0])


def test_stage_tokens_out_of_metrics() -> None:
    text = (
        "# TYPE kvflash_tokens counter\n"
        'kvflash_tokens_total{stage="selected"} 1760\n'
        'kvflash_tokens_total{stage="delivered"} 1.5e3\n'
        "kvflash_usage_reports_total 3\n"
    )
    assert stage_tokens(text) == {"selected": 1760.0, "delivered": 1500.0}
