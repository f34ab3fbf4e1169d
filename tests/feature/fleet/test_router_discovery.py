"""The router's workers as discovery has them, where it is away, wrong, or has more than fit."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvflash import DistributedRuntime
from kvflash.discovery import FileDiscovery, MemoryDiscovery
from kvflash.errors import ConfigError, NotFoundError, OverloadedError, TransportError
from kvflash.roster import feed
from kvflash.roster.core import Component, Replicas
from kvflash.router import RouterService, endpoint, workers
from kvflash.router.workers import DiscoveredWorkers
from service import DEADLINE_S, until

INSTANCE = {"transport": {"kind": "tcp", "address": "127.0.0.1:1"}}


class Alone(Replicas):
    """No other router: nothing is shared, and events come as they are announced."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_total = 0
        self.here: set[int] = set()
        # Those whose events in the component's stream count.
        self.instances: set[int] = set()

    def instance_joined(self, _component: Component, instance_id: int) -> None:
        self.instances.add(instance_id)

    def only(self, component_ids: dict[Component, set[int]]) -> None:
        self.instances &= component_ids["ns", "backend"]

    def worker_joined(
        self, _component: Component, instance_id: int, _shared_id: int | None = None
    ) -> None:
        self.here.add(instance_id)

    def worker_left(self, _component: Component, instance_id: int) -> None:
        self.here.discard(instance_id)

    def events(self, events: dict[int, Any]) -> dict[str, Any]:
        self.asked_total += 1
        return super().events(events)


class Registry:
    """Takes workers while there is room."""

    def __init__(self) -> None:
        self.room = 100
        self.workers: dict[int, dict[str, Any]] = {}
        self.refused_total = 0
        self.put_total = 0
        self.states: list[tuple[int, str]] = []
        self.warnings: list[str] = []
        self.found: DiscoveredWorkers
        self.cluster = Alone()

    def put_worker(self, text: str) -> int:
        worker = json.loads(text)
        number: int = worker["id"]
        if len(self.workers) >= self.room and number not in self.workers:
            self.refused_total += 1
            raise OverloadedError("no room")
        self.workers[number] = worker
        self.put_total += 1
        return number

    def remove_worker(self, worker_id: int) -> None:
        if self.workers.pop(worker_id, None) is None:
            raise NotFoundError("no such worker")

    def set_worker_state(self, worker_id: int, state: str) -> None:
        assert worker_id in self.workers
        self.states.append((worker_id, state))
        if state == "unknown":
            raise ConfigError("no such state")

    def set_warnings(self, warnings: list[str]) -> None:
        self.warnings = warnings


async def eventually(check: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not check():
        assert time.monotonic() < end, f"waited for {what}"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def followed() -> AsyncIterator[tuple[Registry, MemoryDiscovery]]:
    registry, discovery = Registry(), MemoryDiscovery(is_shared=False)
    core: Any = registry
    found = DiscoveredWorkers(
        core, discovery, "ns/backend/generate", registry.cluster, model_name="m"
    )
    registry.found = found
    found.start()
    yield registry, discovery
    assert not any(task.done() for task in found._keys._tasks)
    await found.close()
    await discovery.close()


async def put(discovery: MemoryDiscovery, key: str, value: Any) -> None:
    await discovery.put(f"v1/{key}", json.dumps(value).encode())


def test_one_bad_key_hides_no_worker(caplog: pytest.LogCaptureFixture) -> None:
    bad = [
        ("instances/ns/backend/generate/1", {"transport": None}),
        ("instances/ns/backend/generate/2", {"transport": "127.0.0.1:1"}),
        ("instances/ns/backend/generate/3", {"transport": {"address": 7}}),
        ("instances/ns/backend/generate/x", INSTANCE),
        ("instances/ns/backend/generate/99999999999999999999", INSTANCE),
        ("models/ns/backend/generate/9", {"dp_size": "2"}),
        ("models/ns/backend/generate/9", {"model_name": ["m"]}),
        ("models/ns/backend/generate/9", ["m"]),
        ("events/ns/backend/9/0", {"endpoint": 5}),
        ("events/ns/backend/9/-1", {"endpoint": "tcp://127.0.0.1:1"}),
        ("events/ns/backend/9", {"endpoint": "tcp://127.0.0.1:1"}),
    ]

    async def work() -> None:
        async with followed() as (registry, discovery):
            for key, value in bad:
                await put(discovery, key, value)
            await discovery.put("v1/models/ns/backend/generate/8", b"[" * 100_000)
            await put(discovery, "instances/ns/backend/generate/9", INSTANCE)
            await eventually(lambda: set(registry.workers) == {9}, "the good one")

    asyncio.run(asyncio.wait_for(work(), 60))
    said = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    assert all(any(f"v1/{key}: " in line for line in said) for key, _ in bad), said


def test_a_state_in_discovery_is_told_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "AGAIN_S", 3_600.0)

    async def work() -> None:
        async with followed() as (registry, discovery):

            async def told(state: str | None, *states: str) -> None:
                await put(discovery, "instances/ns/backend/generate/1", INSTANCE | {"state": state})
                wanted = [(1, state) for state in states]
                await eventually(lambda: registry.states == wanted, f"the states {states}")

            await told("unknown", "unknown")
            await told("draining", "unknown", "draining")
            # The core keeps the state of a worker that changes its card.
            await put(discovery, "models/ns/backend/generate/1", {"model_name": "m", "dp_size": 2})
            await eventually(lambda: registry.put_total == 2, "the card")
            await told(None, "unknown", "draining", "active")

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_draining_worker_joins_as_that() -> None:
    async def work() -> None:
        async with followed() as (registry, discovery):
            instance = INSTANCE | {"state": "draining"}
            await put(discovery, "instances/ns/backend/generate/1", instance)
            await eventually(lambda: registry.workers, "the worker")
            assert registry.workers[1]["state"] == "draining"

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_worker_whose_change_is_refused_is_out_until_it_is_accepted() -> None:
    async def work() -> None:
        async with followed() as (registry, discovery):
            key = "models/ns/backend/generate/1"
            await put(discovery, key, {"model_name": "x"})
            instance = INSTANCE | {"state": "draining"}
            await put(discovery, "instances/ns/backend/generate/1", instance)
            await eventually(lambda: registry.found.ids == [1], "the worker")
            # The core lets a worker go before it takes it as a different one.
            registry.room = 0
            del registry.workers[1]
            await put(discovery, key, {"model_name": "x", "dp_size": 2})
            await eventually(lambda: registry.warnings, "the refusal")
            assert (registry.found.ids, registry.cluster.here) == ([], set())
            registry.room = 1
            await put(discovery, key, {"model_name": "x", "dp_size": 4})
            await eventually(lambda: registry.found.ids == [1], "its return")
            assert registry.cluster.here == {1}
            assert registry.workers[1]["state"] == "draining"

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_worker_of_another_endpoint_that_is_back_counts_for_the_component() -> None:
    async def work() -> None:
        async with followed() as (registry, discovery):
            here = registry.cluster.instances
            await put(discovery, "instances/ns/backend/other/2", INSTANCE)
            await eventually(lambda: here == {2}, "the other endpoint's")
            await discovery.delete("v1/instances/ns/backend/other/2")
            # The list of a component without it makes it one that has left.
            await put(discovery, "instances/ns/backend/generate/1", INSTANCE)
            await eventually(lambda: registry.cluster.here == {1}, "the worker")
            assert here == set()
            await put(discovery, "instances/ns/backend/other/2", INSTANCE)
            await eventually(lambda: here == {2}, "its return")
            assert registry.found.ids == [1]

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_block_size_comes_from_the_workers_own_events() -> None:
    async def work() -> None:
        async with followed() as (registry, discovery):
            where = {"endpoint": "tcp://127.0.0.1:1", "block_size": 64}
            await put(discovery, "events/ns/backend/1/0", where)
            await put(discovery, "events/ns/backend/2/0", {**where, "block_size": 16})
            for number in (1, 2, 3):
                await put(discovery, f"instances/ns/backend/generate/{number}", INSTANCE)

            def sizes() -> dict[int, int | None]:
                cards = {number: worker["card"] for number, worker in registry.workers.items()}
                return {number: card["kv_cache_block_size"] for number, card in cards.items()}

            await eventually(lambda: sizes() == {1: 64, 2: 16, 3: None}, "the workers")

    asyncio.run(asyncio.wait_for(work(), 60))


@pytest.mark.parametrize("again_s", [3_600.0, 0.02])
def test_who_was_refused_is_taken_when_there_is_room(
    again_s: float, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "AGAIN_S", again_s)

    async def work() -> None:
        async with followed() as (registry, discovery):
            registry.room = 1
            for number in (1, 2):
                await put(discovery, f"instances/ns/backend/generate/{number}", INSTANCE)
            if again_s > 60:
                await eventually(lambda: registry.warnings, "the second one")
                refused = "worker 2 found in discovery is refused: no room"
                assert registry.warnings == [refused]
                await discovery.delete("v1/instances/ns/backend/generate/1")
            else:
                await eventually(lambda: registry.refused_total > 2, "further attempts")
                registry.room = 2
            await eventually(lambda: 2 in registry.workers, "the second one to be taken")
            await eventually(lambda: not registry.warnings, "/health to be content")

    asyncio.run(asyncio.wait_for(work(), 60))
    said = "worker 2 at ns/backend/generate: no room; trying again"
    logged = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    assert logged == [said]


NUMBERS = range(1, 41)
SOCKET = {"endpoint": "tcp://127.0.0.1:1", "block_size": 4}


def test_a_fleet_that_comes_and_goes_at_once_is_gone_through_once() -> None:
    async def work() -> None:
        async with followed() as (registry, discovery):
            await registry.found.synced(DEADLINE_S)
            for number in NUMBERS:
                await put(discovery, f"events/ns/backend/{number}/0", SOCKET)
                await put(discovery, f"models/ns/backend/generate/{number}", {"model_name": "x"})
                await put(discovery, f"instances/ns/backend/generate/{number}", INSTANCE)
            await eventually(lambda: len(registry.workers) == len(NUMBERS), "the fleet")
            assert registry.cluster.asked_total == len(NUMBERS)
            for number in NUMBERS[:30]:
                await discovery.delete(f"v1/events/ns/backend/{number}/0")
                await discovery.delete(f"v1/models/ns/backend/generate/{number}")
            for number in NUMBERS[:30]:
                await discovery.delete(f"v1/instances/ns/backend/generate/{number}")
            await eventually(lambda: set(registry.workers) == set(NUMBERS[30:]), "the rest")
            assert registry.put_total == len(NUMBERS)

    asyncio.run(asyncio.wait_for(work(), 60))


def names(registry: Registry) -> dict[int, str]:
    """The workers' models."""
    return {number: worker["card"]["model_name"] for number, worker in registry.workers.items()}


async def two_with_cards(registry: Registry, discovery: MemoryDiscovery) -> None:
    """Workers 1 and 2, of the model x."""
    for number in (1, 2):
        await put(discovery, f"models/ns/backend/generate/{number}", {"model_name": "x"})
        await put(discovery, f"instances/ns/backend/generate/{number}", INSTANCE)
    await eventually(lambda: len(registry.workers) == 2, "the workers")


def test_a_worker_whose_card_goes_first_comes_back_as_no_other_model() -> None:
    async def work() -> None:
        async with followed() as (registry, discovery):
            await two_with_cards(registry, discovery)
            await discovery.delete("v1/models/ns/backend/generate/1")
            # That one is told anew says that what came before it is settled.
            await put(discovery, "events/ns/backend/2/0", SOCKET)
            await eventually(lambda: registry.workers[2]["events"], "the other one's events")
            assert registry.put_total == 3
            assert names(registry) == {1: "x", 2: "x"}
            await discovery.delete("v1/instances/ns/backend/generate/1")
            await eventually(lambda: set(registry.workers) == {2}, "it to be gone")
            assert {number for _, number in registry.found._cards} == {2}

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_worker_whose_model_is_taken_back_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "CARD_S", 0.02)

    async def work() -> None:
        async with followed() as (registry, discovery):
            await two_with_cards(registry, discovery)
            await discovery.delete("v1/models/ns/backend/generate/1")
            await eventually(lambda: set(registry.workers) == {2}, "it to be let go")
            await put(discovery, "models/ns/backend/generate/1", {"model_name": "y"})
            await eventually(lambda: set(registry.workers) == {1, 2}, "it to be back")
            assert names(registry) == {1: "y", 2: "x"}

    asyncio.run(asyncio.wait_for(work(), 60))


@pytest.mark.parametrize("card_s", [3_600.0, 0.02])
def test_where_others_have_a_card_one_that_is_seen_before_its_own_is_waited_for(
    card_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "CARD_S", card_s)

    async def work() -> None:
        async with followed() as (registry, discovery):
            # If no worker has one, it is not waited for.
            await put(discovery, "instances/ns/backend/generate/1", INSTANCE)
            await eventually(lambda: set(registry.workers) == {1}, "one without")
            await put(discovery, "models/ns/backend/generate/2", {"model_name": "x"})
            for number in (3, 2):
                await put(discovery, f"instances/ns/backend/generate/{number}", INSTANCE)
            await eventually(lambda: 2 in registry.workers, "the one with a card")
            if card_s > 60:
                assert set(registry.workers) == {1, 2}
                await put(discovery, "models/ns/backend/generate/3", {"model_name": "x"})
            await eventually(lambda: 3 in registry.workers, "the one that waited")
            assert registry.put_total == 3
            assert names(registry) == {1: "m", 2: "x", 3: "x" if card_s > 60 else "m"}

    asyncio.run(asyncio.wait_for(work(), 60))


def test_discovery_that_is_away_at_the_start_is_waited_for(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_there = threading.Event()
    look = FileDiscovery._look

    def look_if_there(discovery: FileDiscovery) -> None:
        if not is_there.is_set():
            raise TransportError("it is away")
        look(discovery)

    monkeypatch.setattr(FileDiscovery, "_look", look_if_there)
    monkeypatch.setenv("KVFLASH_DISCOVERY", "file")
    monkeypatch.setenv("KVFLASH_DISCOVERY_DIR", str(tmp_path))
    monkeypatch.setattr(endpoint, "SYNC_TIMEOUT_S", 0.1)
    monkeypatch.setattr(endpoint, "PAUSE_S", 0.02)
    settings = {"host": "127.0.0.1", "port": 0, "threads": 1, "endpoint": "ns.backend.generate"}

    def waits() -> int:
        lines = [one.getMessage() for one in caplog.records]
        return sum(line.startswith("waiting for the workers: discovery") for line in lines)

    async def serve() -> None:
        async with DistributedRuntime.detached() as worker, DistributedRuntime.detached() as user:

            async def handle(_request: Any) -> AsyncIterator[str]:
                yield "here"

            served = worker.endpoint("ns.backend.generate").serve_endpoint(handle)
            task = asyncio.create_task(served)
            client = user.endpoint("ns.router.generate").client()
            await client.wait_for_instances(DEADLINE_S)
            await eventually(lambda: router.call("GET", "/workers"), "the worker")
            stream = await client.random({"token_ids": [1, 2, 3]})
            assert [item async for item in stream] == ["here"]
        await task

    with RouterService(**settings):
        until(lambda: waits() > 1, "the first one to wait")
    # It ends while it waits.
    caplog.clear()
    with RouterService(**settings) as router:
        until(waits, "the second one to wait")
        is_there.set()
        asyncio.run(asyncio.wait_for(serve(), 60))
