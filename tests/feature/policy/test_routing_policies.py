"""Policies that remember, in a frontend before engines and mockers."""

from __future__ import annotations

import base64
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from service import Process, until
from support_frontend import (
    CHAT,
    COMPLETIONS,
    Call,
    Exchange,
    FakeEngine,
    Frontend,
    FrontendProcess,
    Mocker,
    answer_json,
    ask,
    engines,
    prompt_of,
)

OTHERS = (
    "prefix-cache",
    "vtc-basic",
    "least-request",
    "least-kv-cache",
    "least-gpu-cache",
    "least-latency",
    "least-busy-time",
    "least-utilization",
    "throughput",
    "session-affinity",
    "prefix-cache:2,least-request:1",
)


@pytest.fixture(scope="module")
def silent() -> Iterator[Mocker]:
    """Three workers; their events are not received."""
    with Mocker("--speedup-ratio", "1000", workers=3) as mocker:
        yield mocker


def specs(mocker: Mocker, *, events: bool = False) -> list[str]:
    """Flags that name all workers of a mocker, with or without their events."""
    flags = []
    for at, worker in enumerate(mocker.workers):
        flags += ["--worker", mocker.spec(at) if events else worker["url"]]
    return flags


def chat(*turns: str, user: str | None = None) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": turn} for at, turn in enumerate(turns)]
    return {"model": "m", "messages": messages, "max_tokens": 2, **({"user": user} if user else {})}


@pytest.mark.parametrize("policy", OTHERS)
def test_every_policy_serves_and_says_its_name(policy: str, silent: Mocker) -> None:
    with Frontend("--router-mode", policy, *specs(silent)) as frontend:
        frontend.wait_healthy(1, 2, 3)
        for n in range(6):
            body = chat(f"{n} " * 100, user="somebody")
            assert ask(frontend.url, CHAT, body).status == 200
        assert frontend.http.get("/health")["router_policy"] == policy
        assert frontend.explain(chat("hello"))["policy"] == policy
        info = f'kvflash_policy_info{{policy="{policy}",profile="document"}}'
        assert frontend.metric(info) == 1
        frontend.wait_idle()


def test_unknown_policies_are_refused_with_those_that_are_known() -> None:
    for flags in (("--router-mode", "prefix-cach:2,kv"), ("--shadow-policy", "fastest")):
        process = Process("kvflash.frontend", "--port", "0", *flags)
        try:
            assert process.popen.wait(30) == 2
        finally:
            process.close()
        errors = "".join(process.errors)
        assert flags[0] in errors and "session-affinity" in errors, errors


def test_variables_of_both_names_are_read_and_shown() -> None:
    env = {
        "AIBRIX_ROUTING_ALGORITHM": "prefix-cache",
        "AIBRIX_PREFIX_CACHE_BLOCK_SIZE": "32",
        "KVFLASH_PREFIX_CACHE_BLOCK_SIZE": "64",
        "AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR": "0",
    }
    with FrontendProcess(env=env) as frontend:
        assert frontend.http.call("GET", "/health")[1]["router_policy"] == "prefix-cache"
        metrics = frontend.metrics()
        for name, source, value in (
            ("PREFIX_CACHE_BLOCK_SIZE", "KVFLASH_PREFIX_CACHE_BLOCK_SIZE", "64"),
            (
                "PREFIX_CACHE_STANDARD_DEVIATION_FACTOR",
                "AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR",
                "0",
            ),
            ("PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT", "default", "16"),
        ):
            labels = f'{{name="{name}",source="{source}",value="{value}"}}'
            assert metrics[f"kvflash_policy_setting_info{labels}"] == 1
    with FrontendProcess("--policy-profile", "aibrix-compat", env=env) as frontend:
        name = "PREFIX_CACHE_STANDARD_DEVIATION_FACTOR"
        labels = f'{{name="{name}",source="default",value="1"}}'
        assert frontend.metric(f"kvflash_policy_setting_info{labels}") == 1


def test_prefix_cache_keeps_conversations_together_without_events(silent: Mocker) -> None:
    with Frontend("--router-mode", "prefix-cache", *specs(silent)) as frontend:
        frontend.wait_healthy(1, 2, 3)
        homes = {}
        turns = {talk: [f"{talk} says " * 40] for talk in range(9)}
        for talk, said in turns.items():
            homes[talk] = ask(frontend.url, CHAT, chat(*said)).worker
        # No worker is busy: chance alone spreads nine conversations over three workers.
        assert len(set(homes.values())) > 1
        for _ in range(3):
            for talk, said in turns.items():
                said += ["yes " * 40, "and then " * 40]
                assert ask(frontend.url, CHAT, chat(*said)).worker == homes[talk]
        metric = 'kvflash_prefix_cache_selection_total{selection="prefix_match"}'
        assert frontend.metric(metric) == 27
        decision = frontend.explain(chat(*turns[0]))
        assert (decision["reason"], decision["score"]) == ("prefix_match", 100)


def test_prefix_cache_spreads_when_its_worker_is_too_busy() -> None:
    gate = threading.Event()

    def wait(exchange: Exchange) -> bool:
        gate.wait(30)
        return answer_json(exchange)

    fakes = [FakeEngine("m", wait) for _ in range(2)]
    env = {"KVFLASH_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT": "2"}
    with (
        FrontendProcess("--router-mode", "prefix-cache", env=env) as frontend,
        engines(frontend, *fakes),
    ):
        body = {"model": "m", "prompt": "the same " * 100}
        calls = []
        for n in range(1, 9):
            calls.append(Call(frontend.url, COMPLETIONS, body))
            until(lambda n=n: sum(len(fake.received) for fake in fakes) == n, "the request")
        # By the fourth the imbalance is above two: it goes to the other one, and both hold it.
        assert sorted(len(fake.received) for fake in fakes) == [4, 4]
        gate.set()
        assert {call.finish().status for call in calls} == {200}
        assert frontend.metric("kvflash_prefix_cache_load_imbalance_total") >= 1


def test_prefix_cache_believes_events_where_there_are_any() -> None:
    flags = ("--router-mode", "prefix-cache", "--router-predicted-ttl-secs", "0")
    with Mocker("--speedup-ratio", "1000", workers=2) as mocker:
        body = {"model": "m", "prompt": list(range(1000, 1320)), "max_tokens": 2}
        # It was there before this frontend was: only events can tell.
        with Frontend(*flags, *specs(mocker, events=True)) as frontend:
            frontend.wait_healthy(1, 2)
            home = ask(frontend.url, COMPLETIONS, body).worker
            until(lambda: frontend.overlaps(body)[home] == 20, "the prompt's events")
            decision = frontend.explain(body)
            assert (decision["reason"], decision["score"]) == ("prefix_match", 100)
            # The table knows nothing of it: it was not asked.
            assert frontend.metric("kvflash_prefix_cache_blocks") == 0
            assert ask(frontend.url, COMPLETIONS, body).worker == home


@pytest.mark.parametrize("profile", ["document", "aibrix-compat"])
def test_vtc_basic_sends_clients_by_their_share(profile: str, silent: Mocker) -> None:
    flags = ("--router-mode", "vtc-basic", "--policy-profile", profile)
    with Frontend(*flags, *specs(silent)) as frontend:
        frontend.wait_healthy(1, 2, 3)
        body = chat("word " * 2000, user="heavy")
        first = ask(frontend.url, CHAT, body).worker
        homes = {ask(frontend.url, CHAT, body).worker for _ in range(6)}
        if profile == "document":
            # Its share of all tokens is 1: the last worker is its place.
            assert homes == {3}
            light = ask(frontend.url, CHAT, chat("hi"), headers={"user": "light"}).worker
            assert light == 1
            until(
                lambda: frontend.metric("kvflash_vtc_corrected_requests_total") == 8,
                "what was used to be told",
            )
        else:
            # A single client stands in the middle of lowest and highest: the second worker.
            assert (first, homes) == (1, {2})
            assert frontend.metric("kvflash_vtc_corrected_requests_total") == 0
        assert frontend.metric("kvflash_vtc_clients") >= 1


def session_id(url: str) -> str:
    return base64.b64encode(url.removeprefix("http://").encode()).decode()


def test_sessions_stay_and_move_when_their_worker_dies() -> None:
    flags = ("--router-mode", "session-affinity", "--health-interval", "0.1")
    mockers = [Mocker("--speedup-ratio", "1000") for _ in range(3)]
    try:
        workers = [part for mocker in mockers for part in ("--worker", mocker.url)]
        with Frontend(*flags, *workers) as frontend:
            frontend.wait_healthy(1, 2, 3)

            def home(**headers: str) -> tuple[int, str]:
                names = {name.replace("_", "-"): value for name, value in headers.items()}
                answer = ask(frontend.url, CHAT, chat("hello"), names)
                assert answer.status == 200
                return answer.worker, answer.headers["x-session-id"]

            homes = {key: home(x_session_key=key)[0] for key in map(str, range(12))}
            assert set(homes.values()) == {1, 2, 3}
            for key, worker in homes.items():
                assert home(x_session_key=key)[0] == worker
            # The client names the worker, and gets it back.
            for at, mocker in enumerate(mockers):
                told = session_id(mocker.url)
                assert home(x_session_id=told) == (at + 1, told)
            mockers[1].kill()
            frontend.wait_unhealthy(2)
            for key, worker in homes.items():
                moved = home(x_session_key=key)[0]
                assert moved == worker if worker != 2 else moved in (1, 3)
            worker, told = home(x_session_id=session_id(mockers[1].url))
            assert worker in (1, 3) and told == session_id(mockers[worker - 1].url)
            body = chat("hello")
            refused = ask(frontend.url, CHAT, body, {"x-session-key": "k" * 257})
            assert refused.status == 400 and b"at most 256 bytes, got 257" in refused.body
    finally:
        for mocker in mockers:
            mocker.close()


def test_engines_metrics_reach_the_policies() -> None:
    flags = ("--router-mode", "least-kv-cache", "--health-interval", "0.1")
    with contextlib.ExitStack() as stack:
        mocker = stack.enter_context(Mocker("--speedup-ratio", "1000", workers=2))
        with Frontend(*flags, *specs(mocker)) as frontend:
            frontend.wait_healthy(1, 2)
            # Blocks stay in a cache: what the first one holds counts against it.
            long = {"model": "m", "prompt": list(range(3000)), "max_tokens": 2}
            url = mocker.workers[0]["url"]
            calls = [Call(url, COMPLETIONS, {**long, "max_tokens": 50_000, "stream": True})]
            try:
                assert calls[0].read_event()

                def is_known() -> bool:
                    by_worker = {
                        one["worker"]: one["cost"] for one in frontend.explain(long)["candidates"]
                    }
                    return by_worker["1:0"] > by_worker["2:0"]

                until(is_known, "the first one's use to be known")
                for _ in range(4):
                    assert ask(frontend.url, COMPLETIONS, prompt_of("m")).worker == 2
            finally:
                for call in calls:
                    call.hang_up()


def test_shadows_are_counted_and_decide_nothing(silent: Mocker) -> None:
    shadows = ("--shadow-policy", "round-robin", "--shadow-policy", "prefix-cache")
    with Frontend("--router-mode", "round-robin", *shadows, *specs(silent)) as frontend:
        frontend.wait_healthy(1, 2, 3)
        body = chat("the same words " * 100)
        workers = [ask(frontend.url, CHAT, body).worker for _ in range(9)]
        assert sorted(workers) == [1, 1, 1, 2, 2, 2, 3, 3, 3]

        def counted(name: str, policy: str) -> float:
            return frontend.metric(f'kvflash_shadow_{name}_total{{policy="{policy}"}}')

        for policy in ("round_robin", "prefix-cache"):
            assert counted("decisions", policy) == 9
            assert counted("refused", policy) == 0
        assert counted("agreed", "round_robin") == 9
        assert counted("agreed", "prefix-cache") < 9
