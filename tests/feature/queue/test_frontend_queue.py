"""Requests wait until a worker has room to prefill, before engines that answer when told to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from test_fairness import Turnstile

from service import Process, until
from support_frontend import COMPLETIONS, Call, Exchange, FakeEngine, Frontend, ask, engines

LENGTH = 40


@contextmanager
def one_engine(*flags: str) -> Iterator[tuple[Frontend, Turnstile]]:
    """An engine for one prompt at a time: a request that comes during a prefill waits."""
    turnstile = Turnstile()
    common = ("--router-queue-threshold", "0.5", "--router-queue-batched-tokens", "20")
    with Frontend(*common, *flags) as frontend, engines(frontend, FakeEngine("m", turnstile)):
        try:
            yield frontend, turnstile
        finally:
            turnstile.let(1_000)


def body(length: int = LENGTH, **hints: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": list(range(length)), "nvext": {"agent_hints": hints}}


def pending(frontend: Frontend) -> tuple[float, float]:
    """Requests that wait, and tokens of their prompts."""
    names = ("requests", "isl_tokens")
    requests, tokens = (
        frontend.metric(f'kvflash_queue_pending_{name}{{model="m",tenant="default"}}')
        for name in names
    )
    return requests, tokens


def queued(frontend: Frontend, outcome: str) -> float:
    return frontend.metric(
        f'kvflash_queued_total{{model="m",tenant="default",outcome="{outcome}"}}'
    )


class Sender:
    """Sends requests one after the other: the first one runs, the others wait."""

    def __init__(self, frontend: Frontend, turnstile: Turnstile) -> None:
        self.frontend = frontend
        self.turnstile = turnstile
        self.calls: list[Call] = []

    def send(
        self, name: str, request: dict[str, Any], headers: dict[str, str] | None = None
    ) -> Call:
        before = len(self.turnstile.users) + pending(self.frontend)[0]
        call = Call(self.frontend.url, COMPLETIONS, request, {"user": name, **(headers or {})})
        self.calls.append(call)
        until(
            lambda: len(self.turnstile.users) + pending(self.frontend)[0] == before + 1,
            f"request {name} to wait or to be with the engine",
        )
        return call

    def finish(self) -> list[int]:
        """Let them through one by one; returns the status of all."""
        for _ in self.calls:
            seen = len(self.turnstile.users)
            self.turnstile.let(1)
            if pending(self.frontend)[0]:
                until(
                    lambda seen=seen: len(self.turnstile.users) > seen,
                    "the next request to be with the engine",
                )
        return [call.finish().status for call in self.calls]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("fcfs", "acdb"), ("lcfs", "adcb"), ("wspt", "acdb")],
)
def test_those_that_wait_go_in_the_order_of_the_policy(policy: str, expected: str) -> None:
    with one_engine("--router-queue-policy", policy) as (frontend, turnstile):
        sender = Sender(frontend, turnstile)
        sender.send("a", body())
        # b is long and has no urgency; c came before d and is shorter.
        length = {"fcfs": 40, "lcfs": 40, "wspt": 80}[policy]
        last = {} if policy == "wspt" else {"x-dynamo-request-priority": "1000"}
        sender.send("b", body(length))
        sender.send("c", body(41), last)
        sender.send("d", body(42), last)
        assert pending(frontend) == (3, length + 41 + 42)
        assert sender.finish() == [200] * 4
        assert "".join(turnstile.users) == expected
        assert pending(frontend) == (0, 0)
        assert queued(frontend, "placed") == 3
        assert frontend.metric("kvflash_queue_wait_seconds_count") == 4
        frontend.wait_idle()


def test_a_strict_priority_goes_before_all_lower_ones() -> None:
    with one_engine() as (frontend, turnstile):
        sender = Sender(frontend, turnstile)
        sender.send("a", body())
        sender.send("b", body(priority=1_000_000))
        sender.send("c", body(strict_priority=1))
        sender.send("d", body(), {"x-dynamo-request-strict-priority": "2"})
        assert sender.finish() == [200] * 4
        assert "".join(turnstile.users) == "adcb"


def test_a_full_queue_and_a_long_wait_are_refused() -> None:
    flags = ("--router-queue-limit", "1", "--router-queue-timeout", "3")
    with one_engine(*flags) as (frontend, turnstile):
        sender = Sender(frontend, turnstile)
        sender.send("a", body())
        sender.send("b", body())
        full = ask(frontend.url, COMPLETIONS, body())
        assert full.status == 429 and full.headers["retry-after"] == "1"
        assert b"router_queue_limit" in full.body
        late = sender.calls[1].finish()
        assert late.status == 503 and late.headers["retry-after"] == "1"
        assert b"3 s (router_queue_timeout)" in late.body
        assert (queued(frontend, "refused"), queued(frontend, "expired")) == (1, 1)
        turnstile.let(1)
        assert sender.calls[0].finish().status == 200
        frontend.wait_idle()


def test_who_hangs_up_leaves_and_a_new_worker_takes_the_next() -> None:
    with one_engine() as (frontend, turnstile):
        sender = Sender(frontend, turnstile)
        sender.send("a", body())
        sender.send("b", body()).hang_up()
        until(lambda: queued(frontend, "left") == 1, "the one that hung up to leave")
        sender.send("c", body())
        sender.send("d", body())
        other = Turnstile()
        with engines(frontend, FakeEngine("m", other)):
            until(lambda: other.users == ["c"], "the new worker to have the first that waited")
            other.let(9)
            turnstile.let(9)
            assert [sender.calls[n].finish().status for n in (0, 2, 3)] == [200] * 3


def test_without_a_threshold_nobody_waits_and_a_prompt_is_prefilled_at_its_first_byte() -> None:
    turnstile = Turnstile()
    with Frontend() as frontend, engines(frontend, FakeEngine("m", turnstile)):
        calls = [Call(frontend.url, COMPLETIONS, body(), {"user": "u"}) for _ in range(5)]
        until(lambda: len(turnstile.users) == 5, "all of them to be with the engine")
        turnstile.let(5)
        assert {call.finish().status for call in calls} == {200}

    through = threading.Event()

    def begins(exchange: Exchange) -> bool:
        """Its first token comes at once, its last one later."""
        exchange.open_stream()
        exchange.chunk(b'data: {"choices": []}\n\n')
        assert through.wait(30)
        exchange.chunk(b"data: [DONE]\n\n")
        exchange.chunk(b"")
        return True

    flags = ("--router-queue-threshold", "0", "--router-queue-timeout", "10")
    with Frontend(*flags) as frontend, engines(frontend, FakeEngine("m", begins)):
        request = {**body(), "stream": True}
        first = Call(frontend.url, COMPLETIONS, request)
        assert first.read_event()
        second = Call(frontend.url, COMPLETIONS, request)
        assert second.read_event()
        through.set()
        assert (first.finish().status, second.finish().status) == (200, 200)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--router-queue-threshold", "-1"), "--router-queue-threshold"),
        (("--router-queue-policy", "lifo"), "fcfs"),
        (("--router-queue-limit", "0"), "--router-queue-limit"),
    ],
)
def test_bad_flags_are_refused(flags: tuple[str, ...], message: str) -> None:
    process = Process("kvflash.frontend", "--port", "0", *flags)
    try:
        assert process.popen.wait(30) == 2
    finally:
        process.close()
    assert message in "".join(process.errors)
