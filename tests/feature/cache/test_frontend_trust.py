"""Engines that contradict their events: detected, reported, and trusted again once correct."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvflash.doctor.app import main as doctor
from ports import free_port
from service import until
from support_frontend import (
    COMPLETIONS,
    FakeEngine,
    FrontendProcess,
    Mocker,
    ask,
)
from support_tokens import TINY_LLAMA

BLOCK = 16
FAST = ("--speedup-ratio", "1000")
#: Tokens of a turn of a conversation.
TURN = 6 * BLOCK
TURNS = 3


def health(frontend: FrontendProcess) -> dict[str, Any]:
    return dict(frontend.http.call("GET", "/health")[1])


def trust(frontend: FrontendProcess) -> dict[str, float]:
    return {worker: known["trust"] for worker, known in health(frontend)["reuse"].items()}


def complete(frontend: FrontendProcess, prompt: list[int]) -> str:
    """Ask for a completion; gives the worker that answered."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    answer = ask(frontend.url, COMPLETIONS, body)
    assert answer.status == 200, answer
    return answer.headers["x-kvflash-worker"]


class Chat:
    """Conversations of three turns; each turn waits for the events of the one before."""

    def __init__(self, frontend: FrontendProcess) -> None:
        self._frontend = frontend
        self._begun = 0
        self.answers: dict[str, int] = {"1:0": 0, "2:0": 0}

    def talk(self) -> None:
        self._begun += 1
        first = 1_000 * self._begun
        for turn in range(1, TURNS + 1):
            prompt = [(first + at) % 30_000 for at in range(turn * TURN + 1)]
            self.answers[complete(self._frontend, prompt)] += 1
            body = {"model": "m", "prompt": prompt}
            blocks = turn * TURN // BLOCK
            until(
                lambda body=body, blocks=blocks: blocks in self._frontend.overlaps(body).values(),
                "the events of a turn",
            )


def crossed(one: Mocker, other: Mocker) -> str:
    """The engine `one`, with the event sockets of `other`."""
    spec = other.workers[0]
    return f"{one.url},events={spec['events']},replay={spec['replay']}"


def exchange_sockets(one: Mocker, other: Mocker) -> None:
    """Start both again, each one with the event sockets of the other."""
    ports = []
    for mocker in (one, other):
        worker = mocker.workers[0]
        ports.append([str(urlsplit(worker[key]).port) for key in ("url", "events", "replay")])
        mocker.close()
    for mocker, own, theirs in ((one, ports[0], ports[1]), (other, ports[1], ports[0])):
        flags = ("--port", "--zmq-events-port", "--zmq-replay-port")
        values = (own[0], theirs[1], theirs[2])
        mocker._start(*(part for pair in zip(flags, values, strict=True) for part in pair))


def test_crossed_event_ports_are_found_cost_all_credit_and_recover(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Mocker(*FAST) as one, Mocker(*FAST) as other:
        flags = ("--worker", crossed(one, other), "--worker", crossed(other, one))
        # auto keeps conversations with the worker that recovers first; kv goes on asking both.
        with FrontendProcess(*flags, "--router-mode", "kv", "--log-level", "info") as frontend:
            frontend.wait_healthy(1, 2)
            chat = Chat(frontend)
            found: dict[str, int] = {}
            without: dict[str, int] = {}
            while len(without) < 2 and sum(chat.answers.values()) < 200:
                chat.talk()
                body = health(frontend)
                for reason in body["reasons"]:
                    found.setdefault(reason["worker"], chat.answers[reason["worker"]])
                    assert "event ports of two engines swapped" in reason["message"] or (
                        reason["code"] == "events_not_reused"
                    )
                    assert "events=" in reason["fix"]
                assert body["status"] == ("degraded" if body["reasons"] else "healthy")
                for worker, value in trust(frontend).items():
                    if value == 0.0:
                        without.setdefault(worker, chat.answers[worker])
            assert set(found) == set(without) == {"1:0", "2:0"}, (found, without, chat.answers)
            assert max(found.values()) <= 20, found
            assert max(without.values()) <= 50, without
            name = 'kvflash_worker_reuse_trust{worker="1:0"}'
            assert frontend.metric(name) == 0.0
            assert doctor([frontend.url]) == 1
            told = capsys.readouterr().out
            # Which half shows depends on who is sent what.
            assert "FAIL" in told and "Are the event ports of two engines swapped" in told, told

            exchange_sockets(one, other)
            frontend.wait_healthy(1, 2)
            for _ in range(200):
                if set(trust(frontend).values()) == {1.0} and not health(frontend)["reasons"]:
                    break
                chat.talk()
            assert (health(frontend)["status"], health(frontend)["reasons"]) == ("healthy", [])
            assert set(trust(frontend).values()) == {1.0}
        warnings = [line for line in frontend.process.errors if "swapped" in line]
        # Once a change: found by one direction first, then by both.
        assert 2 <= len(warnings) <= 4, warnings
        agreed = [line for line in frontend.process.errors if "agrees with its events" in line]
        assert len(agreed) == 2, agreed


def test_eviction_and_concurrency_alarm_nobody() -> None:
    flags = (*FAST, "--num-gpu-blocks", "160", "--max-num-seqs", "16")
    with Mocker(*flags) as one, Mocker(*flags) as other:
        workers = ("--worker", one.spec(), "--worker", other.spec())
        with FrontendProcess(*workers) as frontend:
            frontend.wait_healthy(1, 2)
            chance = random.Random(7)

            def prompt() -> list[int]:
                first = 1_000 * chance.randrange(24)
                length = BLOCK * chance.randrange(2, 24) + 1
                return [(first + at) % 30_000 for at in range(length)]

            with ThreadPoolExecutor(8) as pool:
                for _ in pool.map(
                    lambda body: complete(frontend, body), [prompt() for _ in range(800)]
                ):
                    pass
            body = health(frontend)
            assert (body["status"], body["reasons"]) == ("healthy", []), body
            for worker in ("1:0", "2:0"):
                known = body["reuse"][worker]
                assert known["reported"] is True and known["requests"] > 100, known
                assert known["trust"] > 0.7, known


def test_sockets_that_cannot_be_right_are_named_at_the_start() -> None:
    with Mocker(*FAST) as mocker:
        worker = mocker.workers[0]
        events, replay = worker["events"], worker["replay"]
        http = "tcp://" + urlsplit(mocker.url).netloc
        for spec, code in [
            (f"{mocker.url},events={replay},replay={events}", "events_and_replay_swapped"),
            (f"{mocker.url},events={replay}", "events_is_replay"),
            (f"{mocker.url},events={http}", "events_is_http"),
            (f"{mocker.url},events={events},replay={http}", "replay_is_http"),
            (f"{mocker.url},events={events},replay={events}", "replay_is_events"),
        ]:
            with FrontendProcess("--worker", spec, "--log-level", "warn") as frontend:
                until(lambda frontend=frontend: health(frontend)["reasons"], f"{code} to be found")
                body = health(frontend)
                (reason,) = body["reasons"]
                assert (body["status"], reason["code"]) == ("degraded", code)
                assert "=" in reason["fix"] or "swap" in reason["fix"]
            assert any(code in line for line in frontend.process.errors)


def test_a_tokenizer_of_another_model_is_named_at_the_start() -> None:
    with FakeEngine("m") as engine:
        flags = ("--worker", f"{engine.url},events=tcp://127.0.0.1:{free_port()}")
        with FrontendProcess(*flags, "--tokenizer", str(TINY_LLAMA)) as frontend:
            until(lambda: health(frontend)["reasons"], "the tokens to be compared")
            (reason,) = health(frontend)["reasons"]
            assert reason["code"] == "tokenizer_differs"
            assert "--tokenizer" in reason["fix"]


def test_v1_at_the_end_of_a_url_is_left_out_with_a_warning() -> None:
    with Mocker(*FAST) as mocker:
        url, _, rest = mocker.spec().partition(",")
        with FrontendProcess("--worker", f"{url}/v1,{rest}", "--log-level", "warn") as frontend:
            frontend.wait_healthy(1)
            assert frontend.workers()[1]["url"] == url
            complete(frontend, list(range(40)))
            status, body, _ = frontend.http.call("POST", "/workers", {"url": f"{url}/v1/"})
            assert status == 409, body
        (line,) = (line for line in frontend.process.errors if "Remove /v1 from it" in line)
        assert url in line
