"""The demo's verdict."""

from __future__ import annotations

import json

from test_demo_report import arm, failed, record

from kvflash.demo.summary import judge, notes, to_json


def test_the_verdict() -> None:
    less = arm("round-robin", [record(0, ttft_ms=40.0), record(1, cached=20, ttft_ms=40.0)])
    more = arm("kv", [record(0), record(1, cached=80)])
    verdict = judge(less, more)
    assert verdict.is_good
    assert verdict.sentences == (
        "Same 2 requests, 10 % -> 40 % of the prompt tokens reused: the engines computed 33 % "
        "fewer of them.",
        "Median time to first token 40 -> 10 ms (4.0x).",
    )
    for before, after, wanted in (
        (more, less, "kv did NOT reuse more than round-robin: 20 against 80"),
        (more, more, "kv did NOT reuse more"),
        (less, arm("kv", [record(0), failed(1)]), "1 requests failed or could not be sent in kv"),
        (less, arm("kv", [record(0), record(2, cached=80)]), "did not get the same requests"),
    ):
        verdict = judge(before, after)
        assert not verdict.is_good
        assert any(wanted in sentence for sentence in verdict.sentences), verdict


def test_the_result_is_json() -> None:
    runs = [arm("round-robin", [record(0)]), arm("kv", [record(0, cached=50)])]
    result = json.loads(json.dumps(to_json(runs, judge(*runs), {"seed": 1})))
    assert result["settings"] == {"seed": 1}
    assert result["modes"]["kv"]["reused_tokens"] == 50
    assert result["are_requests_identical"]
    assert result["is_good"]


def test_notes_name_the_limits() -> None:
    text = " ".join(notes(shared_tokens=78_000, cache_tokens=48_000, speedup_ratio=1))
    assert all(part in text for part in ("mocks", "78,000", "48,000", "in real time", "Not shown"))
    faster = " ".join(notes(shared_tokens=1, cache_tokens=1, speedup_ratio=2.5))
    assert "2.5 times as fast as modelled" in faster
