"""The contract of all transports from a worker to a router: sockets, a stream, a local index."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvflash import (
    DistributedRuntime,
    KvPushRouter,
    KvRouterConfig,
    ModelInput,
    ModelType,
    register_llm,
)
from kvflash.publisher import KvEventPublisher
from servers import NatsServer
from support_runtime import eventually, run

SIZE = 4
# The transport to routers, and whether workers keep a local index.
WAYS = {"zmq": ("zmq", False), "jetstream": ("nats", False), "nats": ("nats", True)}
_NAMES = count()
Held = dict[int, list[int]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    yield server
    server.close()


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    plane, _ = WAYS[request.param]
    monkeypatch.setenv("KVFLASH_EVENT_PLANE", plane)
    monkeypatch.setenv("KVFLASH_DISCOVERY", "file")
    monkeypatch.setenv("KVFLASH_DISCOVERY_DIR", str(tmp_path / "keys"))
    if plane == "nats":
        monkeypatch.setenv("NATS_SERVER", request.getfixturevalue("server").url)
    return str(request.param)


class Stage:
    """Workers and routers of one component, each with a runtime of its own."""

    def __init__(self, way: str, name: str, open_: AsyncExitStack) -> None:
        self._has_index = WAYS[way][1]
        self._path = f"{name}.backend.generate"
        self._open = open_

    async def worker(self) -> Worker:
        return await Worker(self._path, self._has_index, self._open).start()

    async def router(self) -> KvPushRouter:
        runtime = await self._open.enter_async_context(DistributedRuntime.detached())
        config = KvRouterConfig(router_predicted_ttl_secs=0.0)
        router = KvPushRouter(runtime.endpoint(self._path), SIZE, config)
        return await self._open.enter_async_context(router)


class Worker:
    """Serves nothing; publishes the blocks that a test requests."""

    def __init__(self, path: str, has_index: bool, open_: AsyncExitStack) -> None:
        self._path, self._has_index, self._open = path, has_index, open_

    async def start(self) -> Worker:
        self.runtime = await self._open.enter_async_context(DistributedRuntime.detached())
        self.id = self.runtime.instance_id
        endpoint = self.runtime.endpoint(self._path)
        await register_llm(
            ModelInput.Tokens, ModelType.Chat, endpoint, model_name="m", kv_cache_block_size=SIZE
        )
        self._serving = asyncio.create_task(endpoint.serve_endpoint(self._handle))
        self._open.push_async_callback(self.leave)
        self.publish()
        return self

    async def _handle(self, request: Any) -> AsyncIterator[Any]:
        yield request

    def publish(self) -> None:
        """Begin to publish, as an engine that starts."""
        component = self.runtime.endpoint(self._path).component
        self.publisher = KvEventPublisher(
            component, kv_block_size=SIZE, enable_local_indexer=self._has_index
        )

    def store(self, names: list[int], parent: int | None = None) -> None:
        """Blocks with tokens that follow from their names."""
        tokens = [name * 100 + at for name in names for at in range(SIZE)]
        self.publisher.publish_stored(tokens, [SIZE] * len(names), names, parent)

    async def leave(self) -> None:
        await asyncio.to_thread(self.publisher.shutdown)
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        await self.runtime.close()


async def held(router: KvPushRouter) -> Held:
    """The router's knowledge: names of blocks by worker, ascending."""
    found: Held = {}
    for event in json.loads(await router.dump_events()):
        for block in event["event"]["data"]["stored"]["blocks"]:
            found.setdefault(event["worker_id"], []).append(block["block_hash"])
    return {worker: sorted(names) for worker, names in found.items()}


async def wait_held(router: KvPushRouter, wanted: Held) -> None:
    async def check() -> bool:
        return await held(router) == wanted

    await eventually(check, f"{wanted} to be held")


@asynccontextmanager
async def staged(way: str, name: str) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as open_:
        yield Stage(way, name, open_)


@pytest.fixture
def play(way: str, request: pytest.FixtureRequest) -> Callable[..., None]:
    """Run a scenario on a stage with a namespace of its own."""

    def make(scenario: Callable[[Stage], Any]) -> None:
        async def work() -> None:
            async with staged(way, f"t{next(_NAMES)}") as stage:
                await scenario(stage)

        run(work())

    return make


def test_stored_removed_and_cleared_arrive_in_order(play: Callable[..., None]) -> None:
    async def scenario(stage: Stage) -> None:
        router, worker = await stage.router(), await stage.worker()
        worker.store([1, 2])
        worker.store([3], parent=2)
        await wait_held(router, {worker.id: [1, 2, 3]})
        worker.publisher.publish_removed([3])
        worker.store([4], parent=2)
        await wait_held(router, {worker.id: [1, 2, 4]})
        # Many at once, each of which needs the one before.
        for name in range(10, 300):
            worker.store([name], parent=name - 1 if name > 10 else None)
        await wait_held(router, {worker.id: [1, 2, 4, *range(10, 300)]})
        worker.publisher.publish_cleared()
        worker.store([5])
        await wait_held(router, {worker.id: [5]})

    play(scenario)


def test_workers_hold_what_is_theirs_and_take_it_along(play: Callable[..., None]) -> None:
    async def scenario(stage: Stage) -> None:
        router = await stage.router()
        one, two = await stage.worker(), await stage.worker()
        one.store([1, 2])
        two.store([1])
        await wait_held(router, {one.id: [1, 2], two.id: [1]})
        await one.leave()
        await wait_held(router, {two.id: [1]})
        two.store([7])
        await wait_held(router, {two.id: [1, 7]})

    play(scenario)


def test_a_late_router_knows_what_was_before_it_and_follows(play: Callable[..., None]) -> None:
    async def scenario(stage: Stage) -> None:
        worker = await stage.worker()
        worker.store([1, 2])
        worker.publisher.publish_removed([2])
        early = await stage.router()
        await wait_held(early, {worker.id: [1]})
        late = await stage.router()
        await wait_held(late, {worker.id: [1]})
        worker.store([3], parent=1)
        for router in (early, late):
            await wait_held(router, {worker.id: [1, 3]})

    play(scenario)


def test_another_life_of_a_publisher_begins_empty(play: Callable[..., None]) -> None:
    async def scenario(stage: Stage) -> None:
        router, worker = await stage.router(), await stage.worker()
        worker.store([1, 2])
        await wait_held(router, {worker.id: [1, 2]})
        await asyncio.to_thread(worker.publisher.shutdown)
        worker.publish()
        worker.store([3])
        await wait_held(router, {worker.id: [3]})

    play(scenario)
