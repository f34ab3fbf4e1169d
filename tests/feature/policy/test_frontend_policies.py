"""Routing by policies, adapters, salts and bursts."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from service import until
from support_frontend import (
    COMPLETIONS,
    Answer,
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

POLICIES = ("kv", "round-robin", "random", "least-loaded", "power-of-two")


class Gate:
    """Engines that answer on request."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def whole(self, exchange: Exchange) -> bool:
        self.open.wait(30)
        return answer_json(exchange)

    def stream(self, exchange: Exchange) -> None:
        exchange.open_stream()
        exchange.chunk(b"data: {}\n\n")
        self.open.wait(30)
        exchange.chunk(b"data: [DONE]\n\n")
        exchange.chunk(b"")


# -- what shares a prefix and what does not


@pytest.fixture(scope="module")
def adapted() -> Iterator[Frontend]:
    """Two engines with two adapters each."""
    flags = ("--speedup-ratio", "1000", "--lora-adapters", "sql", "poet")
    with Mocker(*flags, workers=2) as mocker:
        specs = ("--worker", mocker.spec(0), "--worker", mocker.spec(1))
        with Frontend(*specs) as frontend:
            frontend.wait_healthy(1, 2)
            yield frontend


def test_adapters_and_salts_share_nothing(adapted: Frontend) -> None:
    cards = adapted.http.get("/v1/models")["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [
        ("m", None),
        ("poet", "m"),
        ("sql", "m"),
    ]
    kinds: list[dict[str, Any]] = [
        {"model": "m"},
        {"model": "sql"},
        {"model": "poet"},
        {"model": "m", "cache_salt": "a"},
        {"model": "m", "cache_salt": "b"},
        {"model": "sql", "cache_salt": "a"},
    ]
    same = {"prompt": list(range(100)), "max_tokens": 2}
    homes = []
    for kind in kinds:
        body = {**same, **kind}
        assert set(adapted.overlaps(body).values()) == {0}, kind
        first = ask(adapted.url, COMPLETIONS, body)
        assert (first.status, first.overlap_blocks, first.cached_tokens) == (200, 0, 0), kind
        homes.append(first.worker)
        until(
            lambda body=body: sorted(adapted.overlaps(body).values()) == [0, 6],
            f"the events of {kind}",
        )
    for kind, home in zip(kinds, homes, strict=True):
        answer = ask(adapted.url, COMPLETIONS, {**same, **kind})
        assert answer.worker == home
        assert (answer.overlap_blocks, answer.cached_tokens) == (6, 96), kind
    assert len(set(homes)) == 2


# -- policies


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_and_says_its_name(policy: str) -> None:
    fakes = [FakeEngine("p"), FakeEngine("p")]
    with Frontend("--router-mode", policy) as frontend, engines(frontend, *fakes):
        assert frontend.http.get("/health")["router_policy"].replace("_", "-") == policy
        bodies = [prompt_of("p", prompt=[n, *range(50)]) for n in range(30)]
        with ThreadPoolExecutor(10) as pool:
            answers = list(pool.map(lambda body: ask(frontend.url, COMPLETIONS, body), bodies))
        assert {answer.status for answer in answers} == {200}
        assert sum(len(fake.received) for fake in fakes) == 30
        assert all(fake.received for fake in fakes)
        assert frontend.explain(prompt_of("p"))["policy"].replace("_", "-") == policy
        frontend.wait_idle()


def test_round_robin_is_even_under_concurrency() -> None:
    fakes = [FakeEngine("rr") for _ in range(3)]
    with Frontend("--router-mode", "round-robin") as frontend, engines(frontend, *fakes):
        with ThreadPoolExecutor(20) as pool:
            futures = [
                pool.submit(ask, frontend.url, COMPLETIONS, prompt_of("rr")) for _ in range(60)
            ]
            assert {future.result().status for future in futures} == {200}
        assert [len(fake.received) for fake in fakes] == [20, 20, 20]


def busy_then_idle(policy: str, kind: str) -> tuple[int, int]:
    """Requests that a busy and an idle worker get, of six sent one after the other."""
    gate = Gate()
    busy = FakeEngine("ll", gate.stream if kind == "decoding" else gate.whole)
    idle = FakeEngine("ll")
    with Frontend("--router-mode", policy) as frontend, engines(frontend, busy):
        # Prompts of their own: the blocks of a shared one would be free for the next request.
        bodies = [
            {"model": "ll", "prompt": list(range(n, n + 64))} for n in range(1000, 5000, 1000)
        ]
        calls = [Call(frontend.url, COMPLETIONS, body) for body in bodies]
        until(lambda: len(busy.received) == 4, "the load")
        if kind == "decoding":
            for call in calls:
                assert call.read_event() == b"data: {}\n"
        with engines(frontend, idle):
            busy.answer = answer_json
            for n in range(6):
                assert ask(frontend.url, COMPLETIONS, prompt_of("ll", n=n)).status == 200
            counts = len(busy.received) - 4, len(idle.received)
            gate.open.set()
            for call in calls:
                assert call.finish().status == 200
            frontend.wait_idle()
    return counts


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        ("kv", "prefilling"),
        ("kv", "decoding"),
        ("least-loaded", "prefilling"),
        ("least-loaded", "decoding"),
        ("power-of-two", "prefilling"),
    ],
)
def test_busy_worker_is_avoided(policy: str, kind: str) -> None:
    assert busy_then_idle(policy, kind) == (0, 6)


# -- bursts


def test_cold_burst_with_one_prefix_is_spread() -> None:
    gate = Gate()
    fakes = [FakeEngine("burst", gate.whole) for _ in range(3)]
    prefix = list(range(64 * 16))
    with Frontend() as frontend, engines(frontend, *fakes):
        with ThreadPoolExecutor(60) as pool:
            futures = [
                pool.submit(
                    ask, frontend.url, COMPLETIONS, {"model": "burst", "prompt": [*prefix, n]}
                )
                for n in range(60)
            ]
            until(lambda: sum(len(fake.received) for fake in fakes) == 60, "the burst")
            gate.open.set()
            assert {future.result().status for future in futures} == {200}
        assert sorted(len(fake.received) for fake in fakes) == [20, 20, 20]
        frontend.wait_idle()


def test_warm_burst_overflows_to_idle_workers() -> None:
    with Mocker("--speedup-ratio", "0.2", workers=3) as mocker:
        specs = [part for n in range(3) for part in ("--worker", mocker.spec(n))]
        with Frontend(*specs) as frontend:
            frontend.wait_healthy(1, 2, 3)
            prefix = list(range(8 * 16))
            warm = {"model": "m", "prompt": prefix, "max_tokens": 1}
            home = ask(frontend.url, COMPLETIONS, warm).worker
            until(lambda: frontend.overlaps(warm)[home] == 8, "the prefix to be known")

            def one(n: int) -> Answer:
                suffix = list(range(1000 * n, 1000 * n + 17))
                body = {"model": "m", "prompt": [*prefix, *suffix], "max_tokens": 40}
                return ask(frontend.url, COMPLETIONS, body)

            with ThreadPoolExecutor(60) as pool:
                answers = list(pool.map(one, range(1, 61)))
            assert {answer.status for answer in answers} == {200}
            counts = Counter(answer.worker for answer in answers)
            assert len(counts) == 3
            # The one that holds the prefix earns more of the burst, and not all of it.
            assert counts[home] == max(counts.values())
            assert counts[home] <= 45
            first = [answer for answer in answers if answer.worker == home]
            assert all(answer.cached_tokens == 128 for answer in first)
            frontend.wait_idle()


FORMULA = re.compile(
    r"Formula for worker_(\d+): (\d+\.\d) = 1\.0 \* (\d+\.\d) \+ (\d+\.\d) "
    r"\(cached_blocks: (\d+)\)$"
)


def test_decisions_are_logged_with_the_cost_of_every_worker_when_asked_for() -> None:
    with Mocker(workers=2) as mocker:
        workers = [part for n in range(2) for part in ("--worker", mocker.spec(n))]
        told: dict[int, list[tuple[str, ...]]] = {}
        for first, flags in ((0, []), (1_000, ["--log-decisions"])):
            mode = ("--router-mode", "kv", "--log-level", "info")
            with FrontendProcess(*workers, *mode, *flags) as frontend:
                frontend.wait_healthy(1, 2)
                prompt = list(range(first, first + 40))
                body = {"model": "m", "prompt": prompt, "max_tokens": 1}
                assert ask(frontend.url, COMPLETIONS, body).status == 200
            # It has ended, and its log with it.
            lines = frontend.process.errors
            found = [FORMULA.search(line.strip()) for line in lines]
            told[first] = sorted(line.groups() for line in found if line)
            assert sum("routed" in line for line in lines) == len(flags)
        # 40 tokens to prefill are two blocks and a half, two of which are whole.
        cost = ("4.5", "2.5", "2.0", "0")
        assert told == {0: [], 1_000: [("1", *cost), ("2", *cost)]}


def test_variables_without_effect_are_named_at_the_start() -> None:
    env = {
        "AIBRIX_ROUTING_ALGORITHM": "prefix-cache,vtc-basic",
        "AIBRIX_PREFIX_CACHE_BLOCK_SIZE": "64",
        "AIBRIX_ROUTER_VTC_TOKEN_TRACKER_MIN_TOKENS": "10",
        "KVFLASH_ROUTER_VTC_TOKEN_TRACKER_MAX_TOKENS": "20",
        "AIBRIX_PREFIX_CACHE_BLOCK_NUMBER": "1000",
    }
    with FrontendProcess("--log-level", "warn", env=env) as frontend:
        lines = frontend.process.errors
        until(lambda: sum("has no effect" in line for line in lines) == 3, "three warnings")
        for name in list(env)[1:4]:
            (line,) = (line for line in lines if f"{name} has no effect" in line)
            assert "WARN" in line
    del env["AIBRIX_ROUTING_ALGORITHM"]
    with FrontendProcess("--log-level", "warn", env=env) as frontend:
        lines = frontend.process.errors
        until(lambda: sum("has no effect" in line for line in lines) == 4, "four warnings")
        told = "AIBRIX_PREFIX_CACHE_BLOCK_NUMBER has no effect without AIBRIX_ROUTING_ALGORITHM="
        assert any(f"{told}prefix-cache" in line for line in lines)
    env["AIBRIX_ROUTING_ALGORITHM"] = "prefix-cache,vtc-basic"
    env["AIBRIX_POLICY_PROFILE"] = "aibrix-compat"
    env["AIBRIX_PREFIX_CACHE_KV_EVENT_SYNC_ENABLED"] = "false"
    with FrontendProcess("--log-level", "warn", env=env) as frontend:
        pass
    assert not [line for line in frontend.process.errors if "has no effect" in line]
