"""Calls to a core when many workers of KvPushRouter come, change and go at once."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvflash.discovery import MemoryDiscovery
from kvflash.errors import TransportError
from kvflash.roster.core import Replicas
from kvflash.roster.keys import WorkerKeys
from kvflash.routing.workers import Workers
from service import DEADLINE_S

NUMBERS = range(1, 41)


class Core:
    """Counts what it is asked, and notes who is there."""

    uses_events = True
    is_caught_up = True
    block_size = 4

    def __init__(self) -> None:
        self.put_total = 0
        self.workers: dict[int, dict[str, Any]] = {}
        self.left: set[int] = set()

    def put_worker(self, text: str) -> int:
        self.put_total += 1
        worker = json.loads(text)
        number: int = worker["id"]
        self.workers[number] = worker
        self.left.discard(number)
        return number

    def remove_worker(self, number: int) -> None:
        # Replicas learn of a departure first.
        assert number in self.left
        del self.workers[number]


class Alone(Replicas):
    """No other router; notes who left."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        self._core = core

    def worker_left(self, _component: tuple[str, str], worker: int) -> None:
        self._core.left.add(worker)


async def eventually(check: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not check():
        assert time.monotonic() < end, f"waited for {what}"
        await asyncio.sleep(0.01)


def test_each_worker_that_came_or_went_is_told_once() -> None:
    async def work() -> None:
        discovery, core = MemoryDiscovery(is_shared=False), Core()
        cluster: Any = Alone(core)

        async def put(key: str, value: dict[str, Any]) -> None:
            await discovery.put(f"v1/{key}", json.dumps(value).encode())

        async def announce(numbers: range) -> None:
            for number in numbers:
                await put(f"events/ns/backend/{number}/0", {"endpoint": "tcp://127.0.0.1:1"})
                await put(f"instances/ns/backend/generate/{number}", {"transport": {}})
                await put(f"models/ns/backend/generate/{number}", {"total_kv_blocks": 100})

        async def leave(numbers: range) -> None:
            for number in numbers:
                await discovery.delete(f"v1/models/ns/backend/generate/{number}")
                await discovery.delete(f"v1/instances/ns/backend/generate/{number}")
                await discovery.delete(f"v1/events/ns/backend/{number}/0")

        made: Any = core
        workers = Workers(
            made,
            discovery,
            "ns/backend/generate",
            cluster,
            serve=lambda _model: (made, cluster),
            min_workers=0,
        )
        await announce(NUMBERS)
        workers.start()
        await workers.synced(DEADLINE_S)
        assert workers.ids == list(NUMBERS)
        assert core.put_total == 40
        # Only changes are passed on.
        await put("models/ns/backend/generate/7", {"total_kv_blocks": 200})
        await eventually(lambda: core.put_total == 41, "the card to be told")
        assert core.workers[7]["card"]["total_kv_blocks"] == 200
        await leave(NUMBERS[:30])
        await eventually(lambda: workers.ids == list(NUMBERS[30:]), "the rest")
        assert list(core.workers) == list(NUMBERS[30:])
        # The core forgot all of them.
        await announce(NUMBERS[:30])
        await eventually(lambda: workers.ids == list(NUMBERS), "all of them")
        assert core.put_total == 41 + 30
        assert all(worker["events"] for worker in core.workers.values())
        await workers.close()
        await discovery.close()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_core_that_could_not_be_made_is_made_with_the_next_worker() -> None:
    async def work() -> None:
        discovery, core = MemoryDiscovery(is_shared=False), Core()
        cluster: Any = Alone(core)
        cluster.is_nats = True
        made: Any = core
        asked: list[tuple[str, str] | None] = []

        def serve(model: tuple[str, str] | None) -> tuple[Any, Any]:
            asked.append(model)
            if len(asked) == 1:
                raise TransportError("no socket for the queue")
            return made, cluster

        async def announce(number: int) -> None:
            path = f"ns/backend/generate/{number}"
            await discovery.put(f"v1/models/{path}", b'{"model_name": "m"}')
            await discovery.put(f"v1/instances/{path}", b'{"transport": {}}')

        workers = Workers(
            made, discovery, "ns/backend/generate", cluster, serve=serve, min_workers=0
        )
        await announce(1)
        workers.start()
        await workers.synced(DEADLINE_S)
        assert workers.ids == []
        await announce(2)
        await eventually(lambda: workers.ids == [1, 2], "the workers")
        assert asked == [("m", "default")] * 2
        await workers.close()
        await discovery.close()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_over_nats_a_worker_without_a_model_card_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        discovery, core = MemoryDiscovery(is_shared=False), Core()
        cluster: Any = Alone(core)
        cluster.is_nats = True
        made: Any = core
        path = "ns/backend/generate"
        workers = Workers(
            made, discovery, path, cluster, serve=lambda _model: (made, cluster), min_workers=0
        )
        await discovery.put(f"v1/instances/{path}/1", b'{"transport": {}}')
        workers.start()
        await workers.synced(DEADLINE_S)
        assert (workers.ids, len(caplog.records)) == ([], 1)
        await discovery.put(f"v1/models/{path}/2", b'{"model_name": "m"}')
        await discovery.put(f"v1/instances/{path}/2", b'{"transport": {}}')
        await eventually(lambda: workers.ids == [2], "the worker with a card")
        await discovery.put(f"v1/models/{path}/1", b'{"model_name": "m"}')
        await eventually(lambda: workers.ids == [1, 2], "the other one's card")
        # It withdraws the card as it ends.
        await discovery.delete(f"v1/models/{path}/1")
        await eventually(lambda: workers.ids == [2], "its end")
        await workers.close()
        await discovery.close()

    asyncio.run(asyncio.wait_for(work(), 60))
    (said,) = caplog.records
    assert said.getMessage().startswith("worker 1 gets no requests until it calls register_llm: ")


def test_requests_go_on_while_the_state_is_not_ready_for_another_worker() -> None:
    async def work() -> None:
        discovery, core = MemoryDiscovery(is_shared=False), Core()
        gate, waiting = threading.Event(), threading.Event()

        class Slow(Alone):
            is_nats, is_alone = True, False

            def before_worker(self, _component: Any, worker: int, _events: Any) -> None:
                if worker == 2:
                    waiting.set()
                    assert gate.wait(2 * DEADLINE_S)

        cluster: Any = Slow(core)
        made: Any = core
        workers = Workers(
            made,
            discovery,
            "ns/backend/generate",
            cluster,
            serve=lambda _model: (made, cluster),
            min_workers=0,
        )

        async def announce(number: int) -> None:
            path = f"ns/backend/generate/{number}"
            await discovery.put(f"v1/models/{path}", b'{"model_name": "m"}')
            await discovery.put(f"v1/instances/{path}", b'{"transport": {}}')

        await announce(1)
        workers.start()
        await workers.synced(DEADLINE_S)
        await announce(2)
        await eventually(waiting.is_set, "the second one")
        asked = asyncio.create_task(workers.synced(DEADLINE_S))
        try:
            await eventually(asked.done, "a request")
            assert workers.ids == [1]
        finally:
            gate.set()
        await eventually(lambda: workers.ids == [1, 2], "both")
        await workers.close()
        await discovery.close()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_what_fails_once_is_settled_with_the_next_change(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        discovery, seen = MemoryDiscovery(is_shared=False), list[list[int]]()

        async def settle() -> None:
            seen.append([worker for _, worker in keys.instances])
            if len(seen) == 1:
                raise RuntimeError("it fails")

        keys = WorkerKeys(discovery, "ns/backend/generate", settle)
        keys.start()
        await keys.synced(DEADLINE_S)
        assert seen == [[]]
        await discovery.put("v1/instances/ns/backend/generate/1", b'{"transport": {}}')
        await discovery.put("v1/instances/ns/backend/other/2", b'{"transport": {}}')
        await eventually(lambda: len(seen) == 2, "the workers")
        assert seen[1] == [1, 2]
        assert set(keys.instances) == {("ns/backend/generate", 1), ("ns/backend/other", 2)}
        await keys.close()
        await discovery.close()

    asyncio.run(asyncio.wait_for(work(), 60))
    (said,) = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert said.getMessage() == "workers of ns/backend/generate"


def test_events_change_the_instances_of_their_worker_and_pass_over_no_other() -> None:
    class Unsearchable(dict[Any, Any]):
        def __iter__(self) -> Any:
            raise AssertionError("all instances were searched for those of one worker")

    keys = WorkerKeys(MemoryDiscovery(is_shared=False), "", settle=asyncio.sleep)  # type: ignore[arg-type]
    keys.instances = Unsearchable()
    for path in ("ns/backend/generate", "ns/backend/load", "ns/other/generate"):
        for number in (1, 2):
            keys._take(f"v1/instances/{path}/{number}", b'{"transport": {}}')
    keys._take("v1/instances/ns/backend/load/2", None)
    keys.take_changed()
    events = b'{"endpoint": "tcp://a:1"}'
    backend, load = "ns/backend/generate", "ns/backend/load"
    for number, changed in ((2, [(backend, 2)]), (1, [(backend, 1), (load, 1)])):
        for value, count in ((events, 1), (None, 0)):
            keys._take(f"v1/events/ns/backend/{number}/0", value)
            assert keys.take_changed() == changed
            assert len(keys.events) == count


def test_who_waits_for_the_first_workers_ends_when_they_are_followed_no_more() -> None:
    async def work() -> None:
        discovery, has_begun = MemoryDiscovery(is_shared=False), asyncio.Event()

        async def settle() -> None:
            has_begun.set()
            await asyncio.Event().wait()

        keys = WorkerKeys(discovery, "ns/backend/generate", settle)
        keys.start()
        waiting = asyncio.create_task(keys.synced(DEADLINE_S))
        await has_begun.wait()
        assert not waiting.done()
        await keys.close()
        await waiting
        await discovery.close()

    asyncio.run(asyncio.wait_for(work(), 60))
