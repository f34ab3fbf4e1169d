"""--router-session-affinity-ttl-secs: a session goes on where it was, under any policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from service import Process, until
from support_frontend import CHAT, COMPLETIONS, Answer, Call, Frontend, Mocker, ask

FLAG = "--router-session-affinity-ttl-secs"
TURN = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def silent() -> Iterator[Mocker]:
    """Three workers; their events are not received."""
    with Mocker("--speedup-ratio", "1000", workers=3) as mocker:
        yield mocker


def specs(mocker: Mocker) -> list[str]:
    return [part for worker in mocker.workers for part in ("--worker", worker["url"])]


def turn(frontend: Frontend, key: str, path: str = CHAT, **headers: str) -> Answer:
    more = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = ask(frontend.url, path, TURN, {"x-session-key": key, **more})
    assert answer.status == 200, answer
    return answer


def reason(frontend: Frontend, answer: Answer) -> str:
    (decision,) = frontend.http.get(f"/why/{answer.headers['x-request-id']}")["decisions"]
    return str(decision["reason"])


def requests(frontend: Frontend) -> list[float]:
    name = "kvflash_session_affinity_requests_total"
    return [frontend.metric(f'{name}{{outcome="{one}"}}') for one in ("begun", "kept", "moved")]


@pytest.mark.parametrize("mode", ["kv", "round-robin", "random", "least-request"])
def test_a_session_stays_and_others_go_where_the_mode_says(mode: str, silent: Mocker) -> None:
    with Frontend("--router-mode", mode, FLAG, "60", *specs(silent)) as frontend:
        frontend.wait_healthy(1, 2, 3)
        homes = {key: turn(frontend, key) for key in map(str, range(8))}
        for key, first in homes.items():
            assert reason(frontend, first) != "session_affinity"
            for _ in range(3):
                again = turn(frontend, key)
                assert again.worker == first.worker
                assert reason(frontend, again) == "session_affinity"
        asked: dict[str, Any] = turn(frontend, "0", "/explain").json
        assert asked["reason"] == "session_affinity" and asked["policy"] == mode.replace(
            "round-robin", "round_robin"
        )
        assert asked["worker"] == f"{homes['0'].worker}:0"
        assert requests(frontend) == [8, 24, 0]
        assert frontend.metric("kvflash_session_affinity_sessions") == 8
        # Prompts alone make no session.
        for _ in range(4):
            answer = ask(frontend.url, CHAT, TURN)
            assert reason(frontend, answer) != "session_affinity"
        refused = ask(frontend.url, CHAT, TURN, {"x-session-key": "k" * 257})
        assert refused.status == 400 and b"at most 256 bytes, got 257" in refused.body


def test_an_id_that_is_no_address_is_a_key(silent: Mocker) -> None:
    """Base64 or not: only that of ``host:port`` is what an earlier answer told."""
    with Frontend("--router-mode", "round-robin", FLAG, "60", *specs(silent)) as frontend:
        frontend.wait_healthy(1, 2, 3)
        for name, workers in (
            ("chat-17", 1),
            ("Y29udmVyc2F0aW9uLTE=", 1),  # conversation-1
            ("YWJj", 1),
            ("MTAuOTkuOTkuOTk6ODAwMA==", 3),  # 10.99.99.99:8000, an unknown worker
        ):
            answers = [ask(frontend.url, CHAT, TURN, {"x-session-id": name}) for _ in range(6)]
            assert len({answer.worker for answer in answers}) == workers, name


def test_without_the_flag_a_key_means_nothing_to_the_mode(silent: Mocker) -> None:
    with Frontend("--router-mode", "round-robin", *specs(silent)) as frontend:
        frontend.wait_healthy(1, 2, 3)
        assert {turn(frontend, "a").worker for _ in range(6)} == {1, 2, 3}
        assert not [name for name in frontend.metrics() if "session_affinity" in name]


def test_a_session_moves_for_good_when_its_worker_dies() -> None:
    mockers = [Mocker("--speedup-ratio", "1000") for _ in range(3)]
    try:
        workers = [part for mocker in mockers for part in ("--worker", mocker.url)]
        flags = ("--router-mode", "kv", FLAG, "60", "--health-interval", "0.1")
        with Frontend(*flags, *workers) as frontend:
            frontend.wait_healthy(1, 2, 3)
            home = turn(frontend, "a").worker
            mockers[home - 1].kill()
            frontend.wait_unhealthy(home)
            second = turn(frontend, "a").worker
            assert second != home
            mockers[home - 1].restart()
            frontend.wait_healthy(home)
            for _ in range(4):
                assert turn(frontend, "a").worker == second
            assert requests(frontend) == [1, 4, 1]
    finally:
        for mocker in mockers:
            mocker.close()


def test_a_busy_worker_loses_its_sessions() -> None:
    with Mocker("--speedup-ratio", "1", workers=2) as mocker:
        flags = ("--router-mode", "kv", FLAG, "60", "--active-prefill-tokens-threshold", "3000")
        with Frontend(*flags, *specs(mocker)) as frontend:
            frontend.wait_healthy(1, 2)
            home = turn(frontend, "a").worker
            frontend.wait_idle()
            # Its own long turn goes there, too, and is what makes it busy.
            long = {"model": "m", "prompt": list(range(100_000)), "max_tokens": 2, "stream": True}
            call = Call(frontend.url, COMPLETIONS, long, {"x-session-key": "a"})
            try:

                def is_busy() -> bool:
                    found = frontend.explain(TURN)["candidates"]
                    return [one["worker"] for one in found if one["is_busy"]] == [f"{home}:0"]

                until(is_busy, "the session's worker to be busy")
                moved = turn(frontend, "a")
                assert moved.worker != home
                assert reason(frontend, moved) != "session_affinity"
            finally:
                call.hang_up()
            frontend.wait_idle()
            back = turn(frontend, "a")
            assert (back.worker, reason(frontend, back)) == (moved.worker, "session_affinity")


@pytest.mark.parametrize("value", ["0", "31536001", "-1", "soon"])
@pytest.mark.parametrize("service", ["kvflash.frontend", "kvflash.router"])
def test_a_time_out_of_range_is_refused(service: str, value: str) -> None:
    for flags, env, told in (
        ([f"{FLAG}={value}"], {}, FLAG),
        ([], {"DYN_ROUTER_SESSION_AFFINITY_TTL_SECS": value}, "SESSION_AFFINITY_TTL_SECS"),
    ):
        process = Process(service, "--port", "0", *flags, env=env)
        try:
            assert process.popen.wait(30) == 2
        finally:
            process.close()
        errors = "".join(process.errors)
        assert told in errors, errors
        assert f"must be a whole number in 1..=31536000, got '{value}'" in errors, errors
