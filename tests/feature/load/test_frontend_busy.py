"""Busy workers, the reasons of decisions, and routing without events, over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service import Engine, until
from support_frontend import COMPLETIONS, Answer, Call, Frontend, Mocker, ask

VECTORS = Path(__file__).parents[2] / "vectors" / "select_cases.json"
THRESHOLD = "/busy_threshold"


def prompt(seed: int, tokens: int = 80, **more: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": [seed * 1_000 + n for n in range(tokens)], **more}


@pytest.fixture(scope="module")
def mocker() -> Iterator[Mocker]:
    with Mocker("--speedup-ratio", "100", workers=2) as mocker:
        yield mocker


def predicted(frontend: Frontend) -> float:
    name = "kvflash_index_predicted_blocks"
    return sum(value for key, value in frontend.metrics().items() if key.startswith(name))


def fleet(mocker: Mocker, *flags: str) -> Frontend:
    workers = [part for n in range(2) for part in ("--worker", mocker.spec(n))]
    frontend = Frontend("--health-interval", "0.2", *workers, *flags)
    frontend.wait_healthy(1, 2)
    return frontend


def test_thresholds_are_read_set_and_unset_as_recorded(mocker: Mocker) -> None:
    cases = [c for c in json.loads(VECTORS.read_text()) if c["area"] == "busy-http"]
    assert len(cases) == 10
    flags = ("--busy-threshold", "0.9", "--active-prefill-tokens-threshold", "1000")
    with fleet(mocker, *flags) as frontend:
        for case in cases:
            request = case["input"]["request"]
            body = request.get("json")
            if body and body["model"] != "unknown":
                body = {**body, "model": "m"}
            method = "POST" if "POST" in request else "GET"
            status, answer, _ = frontend.http.call(method, THRESHOLD, body)
            expected = case["expected"]
            assert status == expected["status"], (case["id"], answer)
            wanted = {**expected.get("body_contains", {}), **expected.get("body", {})}
            for name, value in wanted.items():
                if name == "thresholds":
                    assert [one["model"] for one in answer["thresholds"]] == ["m"]
                elif name.startswith("thresholds["):
                    assert answer["thresholds"][0][name.rpartition(".")[2]] == value
                elif name != "model":
                    assert answer[name] == value, case["id"]
        names = [f"active_{kind}_threshold" for kind in ("decode_blocks", "prefill_tokens")]
        status, answer, _ = frontend.http.call(
            "POST", THRESHOLD, {"model": "m", names[0]: None, names[1]: 7}
        )
        assert (status, answer[names[0]], answer[names[1]]) == (200, None, 7)


@pytest.mark.parametrize(
    ("body", "kind", "status", "text"),
    [
        (b'{"model": "m", "active_prefill_tokens_threshold": -1}', None, 422, "whole number"),
        (b'{"model": "m", "active_decode_blocks_threshold": "x"}', None, 422, "a number or null"),
        (b'{"model": "m", "decode": 0.5}', None, 422, "unknown field"),
        (b"[]", None, 422, "object"),
        (b"{}", None, 422, "model must be a string, got nothing"),
        (b'{"model": "nobody", "active_decode_blocks_threshold": 0.5}', None, 404, "discovered"),
        (
            b'{"model": "m", "active_decode_blocks_threshold": 1.5}',
            None,
            400,
            "active_decode_blocks_threshold must be between 0.0 and 1.0, got 1.5",
        ),
        (b'{"model"', None, 400, "not JSON"),
        (b'{"model": "m"}', "text/plain", 415, "application/json"),
    ],
)
def test_wrong_thresholds_are_refused(
    mocker: Mocker, body: bytes, kind: str | None, status: int, text: str
) -> None:
    with fleet(mocker) as frontend:
        answer = ask(frontend.url, THRESHOLD, body, {"Content-Type": kind} if kind else None)
        assert (answer.status, text in answer.json["error"]) == (status, True), answer.json
        assert frontend.http.get(THRESHOLD) == {"thresholds": []}


@pytest.mark.parametrize("mode", ["kv", "round-robin", "random"])
def test_busy_workers_get_nothing_and_none_left_is_503(mode: str) -> None:
    """The engine's own metrics tell that it is full; the other one takes all until it is, too."""
    flags = ("--num-gpu-blocks", "64", "--speedup-ratio", "0.05")
    limit = ("--router-mode", mode, "--active-decode-blocks-threshold", "0.4")
    with Mocker(*flags, workers=2) as slow, fleet(slow, *limit) as front:

        def occupy(worker: int, *seeds: int) -> list[Call]:
            url = slow.workers[worker - 1]["url"]
            bodies = [prompt(seed, 320, max_tokens=500, stream=True) for seed in seeds]
            calls = [Call(url, COMPLETIONS, body) for body in bodies]
            name = f'kvflash_worker_busy{{worker="{worker}"}}'
            until(lambda: front.metric(name) == 1, f"worker {worker} to be busy")
            return calls

        def short(seed: int) -> Answer:
            return ask(front.url, COMPLETIONS, prompt(seed, 17, max_tokens=1))

        calls = occupy(1, 1, 2)
        for seed in range(3, 8):
            answer = short(seed)
            assert (answer.status, answer.worker) == (200, 2)
        calls += occupy(2, 8, 9)
        refused = short(10)
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        message = refused.json["error"]["message"]
        assert "Service temporarily unavailable: all 2 workers" in message
        assert "active_decode_blocks_threshold=0.4" in message
        assert front.metric('kvflash_refused_requests_total{cause="all_busy"}') == 1
        for call in calls:
            call.hang_up()
        until(lambda: short(11).status == 200, "a worker to have room")


def test_why_tells_the_decision_and_what_came_of_it(mocker: Mocker) -> None:
    with fleet(mocker) as frontend:
        body = prompt(21, max_tokens=2)
        first = ask(frontend.url, COMPLETIONS, body, {"x-request-id": "one"})
        assert first.headers["x-request-id"] == "one"
        until(lambda: 5 in frontend.overlaps(body).values(), "the events")
        second = ask(frontend.url, COMPLETIONS, body)
        name = second.headers["x-request-id"]
        assert len(name) == 32
        whys = [frontend.http.get(f"/why/{one}") for one in ("one", name)]
        assert [why["request_id"] for why in whys] == ["one", name]
        (before,), (after,) = (why["decisions"] for why in whys)
        assert before["model"] == "m"
        assert before["worker"] == after["worker"] == first.headers["x-kvflash-worker"]
        assert (before["overlap_blocks"], after["overlap_blocks"]) == (0, 5)
        assert (before["outcome"], after["cached_tokens"]) == ("complete", second.cached_tokens)
        assert 0 <= before["first_token_ms"] <= before["ended_ms"] <= before["age_ms"]
        candidates = {one["worker"]: one for one in after["candidates"]}
        assert set(candidates) == {"1:0", "2:0"}
        chosen = candidates[after["worker"]]
        assert (chosen["device_blocks"], chosen["host_blocks"], chosen["is_busy"]) == (5, 5, False)
        assert chosen["now"]["trust"]["state"] == "exact"
        assert "trust" not in chosen
        assert chosen["formula"].startswith(f"{after['worker']}: ")
        assert "more blocks cached than" in after["because"]
        costs = sorted(one["cost"] for one in candidates.values())
        assert after["margin"] == costs[1] - costs[0]
        status, answer, _ = frontend.http.call("GET", "/why/nobody")
        assert (status, "no decision is stored" in answer["error"]["message"]) == (404, True)
        assert frontend.metric("kvflash_decision_journal_bytes") > 0
        assert frontend.metric("kvflash_decision_journal_records") == 2


def test_without_room_no_decision_is_kept(mocker: Mocker) -> None:
    with fleet(mocker, "--decision-journal", "0") as frontend:
        ask(frontend.url, COMPLETIONS, prompt(31, max_tokens=1), {"x-request-id": "gone"})
        assert frontend.http.call("GET", "/why/gone")[0] == 404


def test_without_events_what_was_sent_somewhere_is_believed_there(mocker: Mocker) -> None:
    with fleet(mocker, "--no-kv-events", "--router-ttl", "3600") as frontend:
        assert all(not worker["listeners"] for worker in frontend.workers().values())
        homes = {}
        for n in range(41, 47):
            body = prompt(n, max_tokens=1)
            homes[n] = ask(frontend.url, COMPLETIONS, body).worker
            frontend.wait_idle()
            assert sorted(frontend.overlaps(body, "predicted_blocks").values()) == [0, 5]
        assert len(set(homes.values())) == 2
        for n, home in homes.items():
            answer = ask(frontend.url, COMPLETIONS, prompt(n, max_tokens=1))
            assert (answer.worker, answer.overlap_blocks) == (home, 4)
        assert predicted(frontend) == 30
    limits = ("--router-max-tree-size", "10", "--router-prune-target-ratio", "0.5")
    with fleet(mocker, "--no-kv-events", *limits) as frontend:
        for n in range(51, 54):
            ask(frontend.url, COMPLETIONS, prompt(n, max_tokens=1))
        until(lambda: predicted(frontend) == 5, "all but the last ones to be forgotten")
        kept = [
            max(frontend.overlaps(prompt(n), "predicted_blocks").values()) for n in range(51, 54)
        ]
        assert kept == [0, 0, 5]


def test_a_prompt_in_a_row_goes_to_one_worker_before_its_events(mocker: Mocker) -> None:
    """Events are believed as ever; until they come, what was just sent there counts."""
    engines = [Engine() for _ in mocker.workers]
    # Event sockets on which nothing ever comes: whatever is known was predicted.
    workers = [
        part
        for one, engine in zip(mocker.workers, engines, strict=True)
        for part in ("--worker", f"{one['url']},events={engine.endpoint}")
    ]
    try:
        with Frontend(*workers) as frontend:
            frontend.wait_healthy(1, 2)
            for n in range(61, 73):
                body = prompt(n, max_tokens=1)
                answers = [ask(frontend.url, COMPLETIONS, body) for _ in range(2)]
                assert answers[0].worker == answers[1].worker
                assert [answer.overlap_blocks for answer in answers] == [0, 0], "held is told"
        with Frontend(*workers, "--router-predicted-ttl-secs", "None") as frontend:
            frontend.wait_healthy(1, 2)
            ask(frontend.url, COMPLETIONS, prompt(80, max_tokens=1))
            assert predicted(frontend) == 0
    finally:
        for engine in engines:
            engine.close()


def test_without_weight_no_events_are_listened_to(mocker: Mocker) -> None:
    with fleet(mocker, "--kv-overlap-score-weight", "0") as frontend:
        assert all(not worker["listeners"] for worker in frontend.workers().values())
        answer = ask(frontend.url, COMPLETIONS, prompt(91, max_tokens=1))
        assert (answer.status, answer.overlap_blocks) == (200, 0)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--busy-threshold", "1.1"),
        ("--active-prefill-tokens-threshold", "-1"),
        ("--active-prefill-tokens-threshold-frac", "nan"),
        ("--router-prune-target-ratio", "2"),
        ("--router-max-tree-size", "0"),
        ("--router-ttl", "-1"),
    ],
)
def test_flags_out_of_range_are_refused_by_name(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        Frontend(flag, value)
    assert re.search(rf"argument .*{flag}.*must be a", capsys.readouterr().err)
