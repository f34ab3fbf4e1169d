"""Frontend, workers of the runtime and discovery as processes: found, asked, killed, drained."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from service import SUPPORT, Process, until
from support_frontend import CHAT, Call, FrontendProcess, ask

WORKER = SUPPORT / "double.py"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Say it"}], "max_tokens": 50}
STREAM = {**BODY, "stream": True}


class Fleet:
    """A frontend that watches a folder, and worker processes that announce themselves there."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.hold_dir = folder
        self.env = {"KVFLASH_DISCOVERY_DIR": str(folder / "discovery"), "HOLD_DIR": str(folder)}
        self.workers: dict[str, Process] = {}
        self.ids: dict[str, int] = {}
        self.frontend = FrontendProcess("--discovery", "file", *flags, env=self.env)

    def start(self, name: str, role: str = "decode", plane: str = "tcp") -> None:
        worker = Process(str(WORKER), "tokens", name, role, plane, env=self.env)
        self.workers[name] = worker
        self.ids[name] = int(worker.ready()["id"])
        self.frontend.wait_healthy(self.ids[name])

    def hold(self, name: str) -> None:
        (self.hold_dir / f"{name}.hold").touch()

    def release(self, name: str) -> None:
        (self.hold_dir / f"{name}.hold").unlink()

    def pin(self, name: str, body: dict[str, Any] = BODY) -> dict[str, Any]:
        return {**body, "nvext": {"backend_instance_id": self.ids[name]}}

    def wait_left(self, name: str) -> None:
        until(lambda: self.ids[name] not in self.frontend.workers(), f"{name} to be gone")

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()
        self.frontend.__exit__(None, None, None)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    fleets: list[Fleet] = []

    def make(*flags: str) -> Fleet:
        fleets.append(Fleet(tmp_path, *flags))
        return fleets[-1]

    yield make
    for made in fleets:
        made.close()


def said(answer: Any) -> str:
    assert answer.status == 200, answer.body
    return str(answer.json["choices"][0]["message"]["content"])


def test_without_workers_it_stays_and_says_what_it_waits_for(fleet: Callable[..., Fleet]) -> None:
    one = fleet("--namespace", "tests")
    answer = ask(one.frontend.url, CHAT, BODY)
    assert answer.status == 503
    assert "workers of namespace tests in discovery 'file'" in answer.json["error"]["message"]
    one.start("anna")
    assert said(ask(one.frontend.url, CHAT, BODY)) == "anna says hello to you"


def test_another_namespace_is_not_taken(fleet: Callable[..., Fleet], tmp_path: Path) -> None:
    one, other = fleet(), fleet("--namespace", "others")
    one.start("anna")
    assert other.frontend.workers() == {}


@pytest.mark.parametrize("plane", ["tcp", "http"])
def test_workers_come_answer_and_go(fleet: Callable[..., Fleet], plane: str) -> None:
    one = fleet()
    one.start("anna", plane=plane)
    one.start("bert", plane=plane)
    for name in ("anna", "bert"):
        assert said(ask(one.frontend.url, CHAT, one.pin(name))) == f"{name} says hello to you"
    one.workers["anna"].kill()
    answers = [ask(one.frontend.url, CHAT, BODY) for _ in range(5)]
    assert {said(answer) for answer in answers} == {"bert says hello to you"}
    one.wait_left("anna")
    one.frontend.wait_idle()


@pytest.mark.parametrize("plane", ["tcp", "http"])
def test_a_worker_killed_amid_its_stream_ends_it_with_an_error(
    fleet: Callable[..., Fleet], plane: str
) -> None:
    one = fleet()
    one.start("anna", plane=plane)
    one.hold("anna")
    call = Call(one.frontend.url, CHAT, STREAM)
    call.read_event()
    call.read_event()
    one.workers["anna"].kill()
    events = [json.loads(e[6:]) for e in call.finish().body.decode().split("\n\n") if e[6:7] == "{"]
    assert [("error" in event) for event in events].count(True) == 1
    one.frontend.wait_idle()
    assert one.frontend.metric('kvflash_answers_total{outcome="broken"}') == 1


def test_a_worker_that_is_told_to_end_finishes_its_streams(fleet: Callable[..., Fleet]) -> None:
    one = fleet()
    one.start("anna")
    one.start("bert")
    one.hold("anna")
    call = Call(one.frontend.url, CHAT, one.pin("anna", STREAM))
    call.read_event()
    call.read_event()
    one.workers["anna"].popen.send_signal(signal.SIGTERM)
    one.wait_left("anna")
    assert said(ask(one.frontend.url, CHAT, BODY)) == "bert says hello to you"
    one.release("anna")
    answer = call.finish()
    assert answer.body.endswith(b"data: [DONE]\n\n") and b"error" not in answer.body
    assert one.workers["anna"].popen.wait(30) == 0
    one.frontend.wait_idle()


def test_a_worker_that_stands_still_is_given_up(fleet: Callable[..., Fleet]) -> None:
    """Half open: its system answers, the process does not."""
    one = fleet("--first-byte-timeout", "3", "--stream-idle-timeout", "2")
    one.start("anna")
    one.start("bert")
    one.hold("anna")
    call = Call(one.frontend.url, CHAT, one.pin("anna", STREAM))
    call.read_event()
    call.read_event()
    one.workers["anna"].popen.send_signal(signal.SIGSTOP)
    assert b"--stream-idle-timeout" in call.finish().body
    for _ in range(3):
        assert said(ask(one.frontend.url, CHAT, BODY)) == "bert says hello to you"
    one.frontend.wait_idle()
    one.workers["anna"].popen.send_signal(signal.SIGCONT)
    one.release("anna")
    one.frontend.wait_healthy(one.ids["anna"])


def test_prefill_workers_are_found_and_their_death_survived(fleet: Callable[..., Fleet]) -> None:
    one = fleet()
    one.start("anna")
    one.start("pia", role="prefill")
    answer = ask(one.frontend.url, CHAT, BODY)
    assert said(answer) == "anna says hello to you"
    assert answer.headers["x-kvflash-prefill-worker"] == f"{one.ids['pia']}:0"
    assert answer.cached_tokens == answer.usage["prompt_tokens"]
    one.hold("pia")
    call = Call(one.frontend.url, CHAT, BODY)
    name = f'kvflash_worker_active_requests{{worker="{one.ids["pia"]}:0"}}'
    until(lambda: one.frontend.metric(name) == 1, "the prefill to run")
    one.workers["pia"].kill()
    answer = call.finish()
    assert said(answer) == "anna says hello to you"
    assert "x-kvflash-prefill-worker" not in answer.headers
    one.wait_left("pia")
    one.frontend.wait_idle()
