"""Calls to the frontend's core while workers come, change and go, with a slow core."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvflash.discovery import open_discovery
from kvflash.errors import ConfigError, NotFoundError, OverloadedError
from kvflash.roster import feed
from kvflash.roster.watch import DiscoveryWatch
from service import DEADLINE_S, until

KEY = "tests/backend/generate/7"
CARD = {"model_name": "m", "model_type": ["chat"], "dp_size": 2}
EVENTS = {"endpoint": "tcp://10.0.0.7:5557", "replay_endpoint": "tcp://10.0.0.7:5657"}


class SlowFleet:
    """Records its calls; adding a worker waits for the gate."""

    watch: DiscoveryWatch
    cluster: Recorder
    warnings: list[list[str]]

    def __init__(self) -> None:
        self.workers: dict[int, str] = {}
        self.states: list[str] = []
        self.removed: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.calls = 0
        self.room = 8

    def put_worker(self, worker: str) -> int:
        self.calls += 1
        assert self.gate.wait(DEADLINE_S)
        number = int(json.loads(worker)["id"])
        if number not in self.workers and len(self.workers) >= self.room:
            raise OverloadedError(f"no room at call {self.calls}")
        self.workers[number] = worker
        return number

    def add_worker(self, spec: str) -> int:
        self.calls += 1
        assert 7 not in self.workers
        if self.room == 0:
            raise OverloadedError(f"no room at call {self.calls}")
        self.workers[7] = spec
        return 7

    def set_worker_state(self, instance_id: int, state: str) -> None:
        assert instance_id in self.workers
        if state == "unknown":
            raise ConfigError(f"no state {state}")
        self.states.append(state)

    def remove_worker(self, instance_id: int) -> None:
        self.removed.append(instance_id)
        if self.workers.pop(instance_id, None) is None:
            raise NotFoundError(f"no worker {instance_id}")

    def report_load(self, report: str) -> None:
        raise AssertionError(report)


class Recorder:
    """Records which workers other routers' requests are counted at."""

    is_alone = True

    def __init__(self) -> None:
        self.joined: list[int] = []
        self.left: list[int] = []
        self.components: set[Any] = set()

    def present(self, components: set[Any]) -> None:
        self.components = components

    def worker_joined(self, _component: Any, instance_id: int) -> None:
        self.joined.append(instance_id)

    def worker_left(self, _component: Any, instance_id: int) -> None:
        self.left.append(instance_id)

    def before_worker(self, *_told: Any) -> None:
        pass

    only = check_events = before_worker


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[SlowFleet]:
    monkeypatch.setenv("KVFLASH_DISCOVERY_DIR", str(tmp_path / "discovery"))
    made = SlowFleet()
    made.warnings, made.cluster = [], Recorder()
    made.watch = DiscoveryWatch(
        made,
        open_discovery("file"),
        cluster=made.cluster,
        show_warnings=made.warnings.append,
    )
    made.watch.start()
    yield made
    made.gate.set()
    made.watch.stop()


def test_an_outage_of_discovery_is_a_warning_until_its_end(
    fleet: SlowFleet, tmp_path: Path
) -> None:
    folder = tmp_path / "discovery"
    # A folder can't be read as a key; one call makes it, however often the watch looks meanwhile.
    unreadable = folder / "keys" / "unreadable"
    unreadable.mkdir()
    until(lambda: fleet.warnings, "the outage")
    (warning,) = fleet.warnings[-1]
    assert str(folder) in warning
    assert warning.endswith("workers found before stay, and changes are not seen")
    unreadable.rmdir()
    until(lambda: not fleet.warnings[-1], "its end")


def told(steps: Callable[[Any], Any]) -> None:
    """Change discovery, step by step."""

    async def work() -> None:
        discovery = open_discovery("file")
        await steps(discovery)
        await discovery.close()

    asyncio.run(asyncio.wait_for(work(), 60))


def value(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()


def instance(kind: str, **where: str) -> bytes:
    return value({"instance_id": 7, "transport": {"kind": kind, **where}})


@pytest.mark.parametrize("kind", ["tcp", "openai"])
def test_requests_of_other_routers_count_at_each_worker_of_the_core(
    fleet: SlowFleet, kind: str
) -> None:
    """A changed worker is another one for the core, even if its state is refused."""
    where = {"address": "127.0.0.1:1"} if kind == "tcp" else {"url": "http://127.0.0.1:1"}
    fields = {"instance_id": 7, "transport": {"kind": kind, **where}}

    async def steps(discovery: Any) -> None:
        lease = await discovery.lease()
        await discovery.put(f"v1/models/{KEY}", value(CARD), lease)
        await discovery.put(f"v1/instances/{KEY}", value(fields | {"state": "unknown"}), lease)
        await asyncio.to_thread(until, lambda: fleet.cluster.joined == [7], "the worker")
        await discovery.put(f"v1/instances/{KEY}", value(fields), lease)
        await discovery.put(f"v1/models/{KEY}", value({**CARD, "dp_size": 4}), lease)
        await asyncio.to_thread(until, lambda: fleet.cluster.joined == [7, 7], "the change")

    told(steps)


@pytest.mark.parametrize("kind", ["tcp", "openai"])
def test_a_state_in_discovery_is_told_when_it_changes(fleet: SlowFleet, kind: str) -> None:
    where = {"address": "127.0.0.1:1"} if kind == "tcp" else {"url": "http://127.0.0.1:1"}
    fields = {"instance_id": 7, "transport": {"kind": kind, **where}}

    async def steps(discovery: Any) -> None:
        def wait(check: Callable[[], Any], what: str) -> Any:
            return asyncio.to_thread(until, check, what)

        lease = await discovery.lease()
        await discovery.put(f"v1/models/{KEY}", value(CARD), lease)
        draining = value(fields | {"state": "draining"})
        await discovery.put(f"v1/instances/{KEY}", draining, lease)
        await wait(lambda: fleet.states == ["draining"], "the state")
        # Other keys of the worker change: its state is not told again.
        await discovery.put("v1/events/tests/backend/7/0", value(EVENTS), lease)
        calls = 2 if kind == "openai" else 1
        await wait(lambda: fleet.calls >= calls, "the events")
        await discovery.put(f"v1/instances/{KEY}", value(fields), lease)
        await wait(lambda: fleet.states[-1] == "active", "the state's end")

    told(steps)
    assert fleet.states in (["draining", "active"], ["draining", "draining", "active"])


def test_a_worker_that_leaves_while_it_is_changed_is_gone(fleet: SlowFleet) -> None:
    async def steps(discovery: Any) -> None:
        def wait(check: Callable[[], Any], what: str) -> Any:
            return asyncio.to_thread(until, check, what)

        lease = await discovery.lease()
        await discovery.put(f"v1/models/{KEY}", value(CARD), lease)
        await discovery.put(f"v1/instances/{KEY}", instance("tcp", address="127.0.0.1:1"), lease)
        await wait(lambda: fleet.workers, "the worker")
        fleet.gate.clear()
        calls = fleet.calls
        await discovery.put("v1/events/tests/backend/7/0", value(EVENTS), lease)
        await wait(lambda: fleet.calls > calls, "its events")
        await lease.revoke()
        await wait(lambda: not fleet.watch._keys.instances, "its end to be seen")
        fleet.gate.set()
        await wait(lambda: not fleet.workers, "the worker to be gone")

    told(steps)


def test_engines_are_added_by_their_url(fleet: SlowFleet) -> None:
    spec = "http://10.0.0.7:8000,id=7,events=tcp://10.0.0.7:5557,replay=tcp://10.0.0.7:5657,dp=2"

    async def steps(discovery: Any) -> None:
        lease = await discovery.lease()
        await discovery.put("v1/events/tests/backend/7/0", value(EVENTS), lease)
        await discovery.put(f"v1/models/{KEY}", value(CARD), lease)
        url = "http://10.0.0.7:8000"
        await discovery.put(f"v1/instances/{KEY}", instance("openai", url=url), lease)
        await asyncio.to_thread(until, lambda: fleet.workers == {7: spec}, spec)
        card = {**CARD, "model_type": ["prefill"]}
        await discovery.put(f"v1/models/{KEY}", value(card), lease)
        changed = {7: spec + ",role=prefill"}
        await asyncio.to_thread(until, lambda: fleet.workers == changed, "the role")
        calls = fleet.calls
        await lease.revoke()
        await asyncio.to_thread(until, lambda: not fleet.workers, "the engine to be gone")
        # Its sockets went first, and it was not added without them before it left.
        await asyncio.to_thread(until, lambda: not fleet.watch._told, "that to be noted")
        assert fleet.calls == calls

    told(steps)


def test_an_engine_that_is_replaced_and_then_refused_is_gone(
    fleet: SlowFleet, caplog: pytest.LogCaptureFixture
) -> None:
    """The shared state keeps its blocks for when it is back; no entry of it is left here."""

    async def steps(discovery: Any) -> None:
        url = "http://10.0.0.7:8000"
        await discovery.put(f"v1/models/{KEY}", value(CARD))
        await discovery.put(f"v1/instances/{KEY}", instance("openai", url=url))
        await asyncio.to_thread(until, lambda: fleet.cluster.joined == [7], "the engine")
        fleet.room = 0
        await discovery.put(f"v1/models/{KEY}", value({**CARD, "dp_size": 4}))
        said = "this service refused all workers in discovery (1) and has none to use"
        await asyncio.to_thread(until, lambda: said in caplog.text, "the refusal")
        assert (fleet.cluster.left, fleet.removed, fleet.workers) == ([7], [7], {})
        fleet.room = 8
        await discovery.put(f"v1/models/{KEY}", value({**CARD, "dp_size": 8}))
        await asyncio.to_thread(until, lambda: fleet.cluster.joined == [7, 7], "its return")
        here = {("tests", "backend")}
        await asyncio.to_thread(until, lambda: fleet.cluster.components == here, "its component")
        await discovery.delete(f"v1/instances/{KEY}")
        await asyncio.to_thread(until, lambda: not fleet.cluster.components, "no component")

    told(steps)


async def join(discovery: Any, number: int) -> None:
    key = f"tests/backend/generate/{number}"
    await discovery.put(f"v1/models/{key}", value(CARD))
    await discovery.put(f"v1/instances/{key}", instance("tcp", address="127.0.0.1:1"))


def test_one_bad_key_hides_no_worker(fleet: SlowFleet, caplog: pytest.LogCaptureFixture) -> None:
    bad = {
        "v1/models/tests/backend/generate/6": {**CARD, "dp_size": "2"},
        "v1/models/tests/backend/7": CARD,
        "v1/instances/tests/backend/generate/1": {"transport": None},
        "v1/instances/tests/backend/generate/2": {"transport": "127.0.0.1:1"},
        "v1/instances/tests/backend/load_metrics/3": {"transport": {"address": 7}},
        "v1/instances/backend/7": {"transport": {}},
        "v1/instances/tests/backend/generate/x": {"transport": {}},
        "v1/events/tests/backend/7": EVENTS,
        "v1/events/tests/backend/7/0": {"endpoint": ["tcp://127.0.0.1:1"]},
    }

    async def steps(discovery: Any) -> None:
        for key, fields in bad.items():
            await discovery.put(key, value(fields))
        await discovery.put("v1/events/tests/backend/8/0", b"[" * 100_000)
        await join(discovery, 7)
        await asyncio.to_thread(until, lambda: fleet.workers, "the good one")
        for key in bad:
            await discovery.delete(key)
        await discovery.delete(f"v1/models/{KEY}")
        await asyncio.to_thread(until, lambda: not fleet.workers, "it to be gone")

    told(steps)
    said = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    assert all(any(line.startswith(f"discovery key {key}: ") for line in said) for key in bad), said
    assert not fleet.watch._refused


def test_who_was_refused_is_removed_from_the_core_too(fleet: SlowFleet) -> None:
    fleet.room = 0

    async def steps(discovery: Any) -> None:
        await join(discovery, 7)
        await asyncio.to_thread(until, lambda: fleet.watch._refused, "the refusal")
        await discovery.delete(f"v1/instances/{KEY}")
        await asyncio.to_thread(until, lambda: 7 in fleet.removed, "it to be removed")

    told(steps)


@pytest.fixture(params=[3_600.0, 0.02])
def again_s(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(feed, "AGAIN_S", request.param)
    return float(request.param)


def test_who_was_refused_is_taken_when_there_is_room(
    again_s: float, fleet: SlowFleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.room = 1

    async def steps(discovery: Any) -> None:
        await join(discovery, 7)
        await asyncio.to_thread(until, lambda: fleet.workers, "the first one")
        await join(discovery, 8)
        await asyncio.to_thread(until, lambda: fleet.watch._refused, "the second one")
        if again_s > 60:
            await discovery.delete(f"v1/instances/{KEY}")
        else:
            calls = fleet.calls
            await asyncio.to_thread(until, lambda: fleet.calls > calls + 1, "further attempts")
            fleet.room = 2
        await asyncio.to_thread(until, lambda: 8 in fleet.workers, "it to be taken")

    told(steps)
    said = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    # Once, though each refusal has another text.
    assert len(said) == 1
    assert said[0].startswith("worker 8 at tests/backend/generate: no room at call ")
