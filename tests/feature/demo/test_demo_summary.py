"""The demo's means, its table, its verdict, and the table in README."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from demo.args import parse_args
from demo.record import ArmRun, Record
from demo.report import MODES
from demo.summary import HEADLINES, Spread, judge, markdown, notes, summarize, to_json

README = Path(__file__).parents[3] / "README.md"


def run(mode: str, seed: int, *, cached: int, ttft_ms: float, error: str | None = None) -> ArmRun:
    """A run of 100 requests, so that there is a p99."""
    records = [
        Record(
            conversation=place,
            turn=0,
            request=f"prompt {place} of seed {seed}",
            worker="1:0",
            start_s=0.0,
            end_s=1.0,
            ttft_ms=None if error else ttft_ms,
            prompt_tokens=0 if error else 100,
            cached_tokens=0 if error else cached,
            error=error,
        )
        for place in range(100)
    ]
    return ArmRun(
        mode=mode,
        seed=seed,
        records=records,
        planned_requests=100,
        worker_count=4,
        wall_s=3.0,
    )


def runs(auto_ttft_ms: float = 20.0, auto_cached: int = 90) -> list[ArmRun]:
    """Two seeds of each mode, the second before the first."""
    return [
        one
        for seed in (2, 1)
        for one in (
            run("round-robin", seed, cached=40 + seed, ttft_ms=100.0 + seed),
            run("kv", seed, cached=70, ttft_ms=40.0),
            run("auto", seed, cached=auto_cached, ttft_ms=auto_ttft_ms),
        )
    ]


def test_a_spread_reaches_to_the_farthest_seed() -> None:
    several = [run("kv", seed, cached=cached, ttft_ms=9.0) for seed, cached in enumerate((1, 2, 6))]
    (modes,) = summarize(several).values()
    assert modes.over_seeds(lambda one: one.reuse_percent) == Spread(3.0, 3.0)
    assert modes.over_seeds(lambda one: one.available_tokens) is None
    (single,) = summarize(several[:1]).values()
    assert single.over_seeds(lambda one: one.reuse_percent) == Spread(1.0, None)
    assert Spread(1234.56, 7.89).text(1) == "1,234.6 ± 7.9"
    assert Spread(1234.56, None).text() == "1,235"


def test_modes_and_seeds_come_in_order() -> None:
    modes = summarize(runs())
    assert list(modes) == list(MODES)
    assert all([one.seed for one in found.by_seed] == [1, 2] for found in modes.values())


def test_the_verdict_compares_auto_with_round_robin() -> None:
    verdict = judge(runs())
    assert verdict.is_good
    assert verdict.sentences == (
        "auto reused 90.0 ± 0.0 % of the prompt tokens, round-robin 41.5 ± 0.5 %: the engines "
        "computed 83 % fewer of them.",
        "Time to first token p50 (ms): 102 ± 0 -> 20 ± 0 (5.1x).",
        "Time to first token p99 (ms): 102 ± 0 -> 20 ± 0 (5.1x).",
    )


def test_where_auto_is_not_the_best_is_said() -> None:
    sentences = judge(runs(auto_ttft_ms=50.0, auto_cached=60)).sentences
    assert sentences[-3:] == (
        "auto is not the best in prompt tokens reused (%): kv has 70.0 ± 0.0, auto 60.0 ± 0.0.",
        "auto is not the best in time to first token p50 (ms): kv has 40 ± 0, auto 50 ± 0.",
        "auto is not the best in time to first token p99 (ms): kv has 40 ± 0, auto 50 ± 0.",
    )


@pytest.mark.parametrize(
    ("others", "wanted"),
    [
        (
            [run("auto", seed, cached=1, ttft_ms=9.0) for seed in (1, 2)],
            "auto did NOT reuse more than round-robin: 200 against 8,300",
        ),
        (
            [run("kv", seed, cached=70, ttft_ms=9.0, error="502") for seed in (1, 2)],
            "200 requests failed or could not be sent in kv",
        ),
        (
            [run("kv", seed, cached=70, ttft_ms=9.0) for seed in (1, 7)],
            "did not get the same requests",
        ),
    ],
)
def test_what_spoils_the_comparison_is_said(others: list[ArmRun], wanted: str) -> None:
    kept = [one for one in runs() if one.mode != others[0].mode]
    verdict = judge([*kept, *others])
    assert not verdict.is_good
    assert any(wanted in sentence for sentence in verdict.sentences), verdict


def test_the_result_is_json() -> None:
    result = json.loads(json.dumps(to_json(runs(), judge(runs()), {"seed": 1})))
    assert result["settings"] == {"seed": 1}
    assert [one["reused_tokens"] for one in result["modes"]["round-robin"]["seeds"]] == [4100, 4200]
    reused = result["modes"]["round-robin"]["mean"]["prompt tokens reused (%)"]
    assert reused == {"mean": 41.5, "off": 0.5}
    assert result["are_requests_identical"]
    assert result["is_good"]


def test_notes_name_the_limits() -> None:
    text = " ".join(notes(seeds=3, shared_tokens=78_000, cache_tokens=48_000, speedup_ratio=1))
    parts = ("means of 3 seeds", "mocks", "78,000", "48,000", "in real time", "Not shown")
    assert all(part in text for part in parts)
    faster = " ".join(notes(seeds=1, shared_tokens=1, cache_tokens=1, speedup_ratio=2.5))
    assert "2.5 times as fast as modelled" in faster
    assert "no spread" in faster


def test_the_table_is_markdown() -> None:
    assert markdown(summarize(runs())).splitlines() == [
        "| | " + " | ".join(headline.title for headline in HEADLINES) + " |",
        "| --- | --- | --- | --- |",
        "| round-robin | 41.5 ± 0.5 | 102 ± 0 | 102 ± 0 |",
        "| kv | 70.0 ± 0.0 | 40 ± 0 | 40 ± 0 |",
        "| auto | 90.0 ± 0.0 | 20 ± 0 | 20 ± 0 |",
    ]


def test_the_first_table_of_the_readme_is_the_demos() -> None:
    text = README.read_text()
    (shown,) = re.findall(r"<!-- begin demo -->\n(.*?)<!-- end demo -->", text, re.DOTALL)
    assert text.index(shown) == text.index("\n|") + 1, "it is the first one"
    lines, made = shown.splitlines(), markdown(summarize(runs())).splitlines()
    assert lines[:2] == made[:2]
    assert [line.split(" | ")[0] for line in lines] == [line.split(" | ")[0] for line in made]
    for line in lines[2:]:
        for headline, cell in zip(HEADLINES, line.strip("| ").split(" | ")[1:], strict=True):
            number = r"[\d,]+" + (rf"\.\d{{{headline.digits}}}" if headline.digits else "")
            assert re.fullmatch(f"{number} ± {number}", cell), cell
    args = parse_args([])
    told = text[: text.index(shown)]
    requests = args.conversations * args.turns
    for part in (f"{args.workers} mock engines", f"{requests} requests", f"{args.seeds} seeds"):
        assert part in told, part
