"""The router on the request plane: workers of an endpoint, found through discovery."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest

from kvflash import (
    ClosedError,
    ConfigError,
    DistributedRuntime,
    InvalidArgumentError,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    TransportError,
    WorkerError,
    register_llm,
)
from kvflash.discovery import open_discovery
from kvflash.router import RouterService, endpoint
from kvflash.router.endpoint import EndpointRouter
from service import DEADLINE_S, Engine, batch, stored
from support_openai_engine import Engine as OpenAiEngine
from support_openai_engine import chunk
from support_router import IDS, SIZE, load

ENDPOINT = "ns.backend.generate"
LOCAL = {"host": "127.0.0.1", "port": 0, "threads": 2, "seed": 1}


@pytest.fixture
def router(monkeypatch, tmp_path):
    """Makes routers of the endpoint, in a discovery of the test's own."""
    monkeypatch.setenv("KVFLASH_DISCOVERY", "file")
    monkeypatch.setenv("KVFLASH_DISCOVERY_DIR", str(tmp_path))
    made = RouterService(**LOCAL, endpoint=ENDPOINT).start()
    yield made
    made.stop()


async def eventually(check, what):
    async def checked():
        return check()

    return await eventually_in(checked, what)


async def eventually_in(check, what):
    end = time.monotonic() + DEADLINE_S
    while not (answer := await check()):
        assert time.monotonic() < end, f"waited for {what}"
        await asyncio.sleep(0.01)
    return answer


class Worker:
    """Serves the endpoint from a runtime of its own; says what it was asked."""

    def __init__(self, *, tokens=3, error=None, engine=None):
        self.asked: list[dict] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self._tokens, self._error, self._engine = tokens, error, engine

    async def start(self):
        self.runtime = DistributedRuntime.detached()
        self.id = self.runtime.instance_id
        endpoint = self.runtime.endpoint(ENDPOINT)
        if self._engine is not None:
            events = {
                "kind": "zmq",
                "endpoint": self._engine.endpoint,
                "replay_endpoint": self._engine.replay_endpoint,
                "block_size": SIZE,
            }
            await self.runtime.announce(f"v1/events/ns/backend/{self.id}/0", events)
        config = ModelRuntimeConfig(total_kv_blocks=100)
        await register_llm(
            ModelInput.Tokens,
            ModelType.Chat,
            endpoint,
            model_name="m",
            kv_cache_block_size=SIZE,
            runtime_config=config,
        )
        self._task = asyncio.create_task(endpoint.serve_endpoint(self._handle))
        return self

    async def _handle(self, request):
        self.asked.append(request)
        for number in range(self._tokens):
            yield {"token_ids": [number]}
            await self.gate.wait()
            if self._error is not None:
                raise self._error

    async def close(self):
        await self.runtime.close()
        await self._task


def workers(router):
    return router.call("GET", "/workers")


def run(work):
    asyncio.run(asyncio.wait_for(work, 90))


class Loads:
    """The router's load, asked without HTTP."""

    def __init__(self, router):
        self._router = router

    def get(self, path):
        return self._router.call("GET", path)


def test_requests_go_to_the_worker_that_holds_the_prompt_and_items_come_back(router):
    async def work():
        engine = Engine()
        first, second = await Worker().start(), await Worker(engine=engine).start()
        await eventually(lambda: len(workers(router)) == 2, "both workers")
        await asyncio.to_thread(engine.wait_for_subscriber)
        engine.publish(batch(stored([1, 2, 3, 4], IDS, block_size=SIZE)))

        def blocks():
            return {w["worker_id"]: w["blocks"] for w in workers(router)}[second.id]

        await eventually(lambda: blocks() == 4, "the stored blocks")
        async with DistributedRuntime.detached() as runtime:
            best = await runtime.endpoint("ns.router.best_worker_id").client()
            await best.wait_for_instances(30)
            assert [item async for item in await best.random(IDS)] == [second.id]
            allowed = {"token_ids": IDS, "allowed_worker_ids": [first.id]}
            assert [item async for item in await best.random(allowed)] == [first.id]
            assert load(Loads(router), second.id) == (0, 0, 0)
            wrong = (
                ({"mm": [{"identifier": "", "offset": 0, "length": 1}]}, r"mm\[0\]"),
                ({"embeds": ["xy"]}, r"embeds\[0\]"),
                ({"dp_rank": 1}, "dp_rank 1 needs worker_id: add it, or leave dp_rank out"),
            )
            for keys, text in wrong:
                with pytest.raises(InvalidArgumentError, match=text):
                    stream = await best.random({"token_ids": IDS, **keys})
                    await anext(aiter(stream))
            client = await runtime.endpoint("ns.router.generate").client()
            await client.wait_for_instances(30)
            second.gate.clear()
            stream = await client.random({"model": "any", "token_ids": IDS, "top": 1})
            assert await anext(aiter(stream)) == {"token_ids": [0]}
            # Booked, and prefilled with the first token.
            await eventually(
                lambda: load(Loads(router), second.id) == (1, 4, 0), "the prefilled request"
            )
            second.gate.set()
            assert [item["token_ids"] async for item in stream] == [[1], [2]]
            await eventually(lambda: load(Loads(router), second.id)[0] == 0, "its end")
            (asked,) = second.asked
            assert asked["estimated_prefix_hit_num_blocks"] == 4
            assert (asked["dp_rank"], asked["top"], asked["token_ids"]) == (0, 1, IDS)
            # Another one on demand.
            pinned = {"token_ids": IDS, "worker_id": first.id, "backend_instance_id": None}
            assert len([item async for item in await client.random(pinned)]) == 3
            assert len(first.asked) == 1
        await first.close()
        await eventually(lambda: len(workers(router)) == 1, "the worker that left to be forgotten")
        await second.close()
        engine.close()

    run(work())


def test_what_a_worker_raises_reaches_the_client_and_its_load_goes(router):
    async def work():
        worker = await Worker(error=ValueError("broken")).start()
        await eventually(lambda: workers(router), "the worker")
        async with DistributedRuntime.detached() as runtime:
            client = await runtime.endpoint("ns.router.generate").client()
            await client.wait_for_instances(30)
            stream = await client.random({"token_ids": IDS})
            assert await anext(aiter(stream)) == {"token_ids": [0]}
            with pytest.raises(WorkerError, match="broken"):
                await anext(aiter(stream))
            await eventually(lambda: load(Loads(router), worker.id) == (0, 0, 0), "no load")
            # A client that leaves gives its load back as well.
            worker.gate.clear()
            stream = await client.random({"token_ids": IDS})
            await anext(aiter(stream))
            assert load(Loads(router), worker.id)[0] == 1
            await stream.aclose()
            await eventually(lambda: load(Loads(router), worker.id) == (0, 0, 0), "no load")
        worker.gate.set()
        await worker.close()

    run(work())


def test_a_worker_that_drains_is_passed_over_for_the_others(router):
    async def work():
        first, second = await Worker().start(), await Worker().start()
        await eventually(lambda: len(workers(router)) == 2, "both workers")
        async with DistributedRuntime.detached() as runtime:
            client = await runtime.endpoint("ns.router.generate").client()
            await client.wait_for_instances(30)
            for worker in (first, second):
                worker.runtime._serving.endpoints["ns/backend/generate"].is_draining = True
                pinned = {"token_ids": IDS, "worker_id": worker.id}
                with pytest.raises(ClosedError, match="is draining"):
                    _ = [item async for item in await client.random(pinned)]
                if worker is first:
                    for _ in range(3):
                        stream = await client.random({"token_ids": IDS})
                        assert len([item async for item in stream]) == 3
                    assert len(second.asked) == 3
            # There is no other worker.
            with pytest.raises(ClosedError, match="is draining"):
                _ = [item async for item in await client.random({"token_ids": IDS})]
            assert load(Loads(router), first.id) == load(Loads(router), second.id) == (0, 0, 0)
        await first.close()
        await second.close()

    run(work())


def test_an_engine_that_speaks_openai_only_is_asked_as_a_worker_is(monkeypatch, tmp_path):
    monkeypatch.setenv("KVFLASH_DISCOVERY", "file")
    monkeypatch.setenv("KVFLASH_DISCOVERY_DIR", str(tmp_path))

    async def work(router):
        discovery = open_discovery()
        engine = OpenAiEngine()
        await engine.start(discovery)
        engine.events = [chunk("he"), chunk("llo", reason="stop")]
        await eventually(lambda: workers(router), "the engine")
        async with DistributedRuntime.detached() as runtime:
            client = await runtime.endpoint("dynamo.router.generate").client()
            await client.wait_for_instances(30)
            items = [item async for item in await client.random({"token_ids": IDS})]
            assert "".join(item["text"] for item in items) == "hello"
            await eventually(lambda: load(Loads(router), engine.id) == (0, 0, 0), "no load")
            engine.refusal = (400, {"error": {"message": "too long", "code": 400}})
            with pytest.raises(InvalidArgumentError, match="too long"):
                await anext(await client.random({"token_ids": IDS}))
        (asked, *_) = engine.asked
        assert asked[0]["prompt"] == IDS
        await engine.stop()
        await discovery.close()

    with RouterService(**LOCAL, endpoint="dynamo.backend.generate") as router:
        run(work(router))


def test_a_router_that_serves_its_index_is_found_as_an_indexer(monkeypatch, tmp_path):
    monkeypatch.setenv("KVFLASH_DISCOVERY_DIR", str(tmp_path))

    async def announced():
        discovery = open_discovery("file")
        found = await discovery.get_prefix("v1/indexers/")
        await discovery.close()
        return [json.loads(value) for value in found.values()]

    with RouterService(**LOCAL, endpoint=ENDPOINT, serve_indexer=True) as router:
        (indexer,) = asyncio.run(eventually_in(announced, "the announcement"))
        assert indexer == {"url": router.url, "namespace": "ns"}
    assert asyncio.run(announced()) == []


def test_a_router_whose_runtime_port_is_taken_does_not_start(monkeypatch, tmp_path):
    monkeypatch.setenv("KVFLASH_DISCOVERY", "file")
    monkeypatch.setenv("KVFLASH_DISCOVERY_DIR", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("KVFLASH_RUNTIME_PORT", str(port))
        made = RouterService(**LOCAL, endpoint=ENDPOINT)
        try:
            with pytest.raises(ConfigError, match=f"can't listen on 127.0.0.1:{port}"):
                made.start()
        finally:
            made.stop()


def test_a_place_that_is_refused_is_asked_for_again(monkeypatch, caplog):
    """Discovery may refuse the login for a while; the router follows its workers meanwhile."""
    monkeypatch.setattr(endpoint, "PAUSE_S", 0.0)
    answers = [ConfigError("refused"), TransportError("away"), OSError("gone"), None]

    async def work():
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    asyncio.run(EndpointRouter._patiently(work, "a place"))
    assert not answers
    assert caplog.messages == [f"waiting for a place: {w}" for w in ("refused", "away", "gone")]


@pytest.fixture
def queueing(monkeypatch, tmp_path):
    """A router that lets requests wait while the worker prefills."""
    monkeypatch.setenv("KVFLASH_DISCOVERY", "file")
    monkeypatch.setenv("KVFLASH_DISCOVERY_DIR", str(tmp_path))
    made = RouterService(**LOCAL, endpoint=ENDPOINT, router_queue_threshold=0.0).start()
    yield made
    made.stop()


def pending(router):
    body = {"token_ids": IDS, "model_name": "m"}
    return router.call("POST", "/potential_loads", body)["pending_count"]


def test_requests_wait_for_room_and_the_endpoint_goes_on(queueing):
    """Waiting requests block neither the event loop nor requests that free workers."""

    async def work():
        worker = await Worker().start()
        await eventually(lambda: workers(queueing), "the worker")
        queueing.call("POST", "/reserve", {"token_ids": IDS, "request_id": "first"})
        async with DistributedRuntime.detached() as runtime:
            client = await runtime.endpoint("ns.router.generate").client()
            await client.wait_for_instances(30)
            best = await runtime.endpoint("ns.router.best_worker_id").client()
            streams = []
            for count, wish in enumerate(({}, {"priority": 60}, {"strict_priority": 1}), 1):
                request = {"token_ids": [*IDS, count], **wish}
                streams.append(await client.random(request))
                await eventually(lambda count=count: pending(queueing) == count, f"{count}")
            # One that leaves has booked nothing once its turn is over.
            assert [item async for item in await best.random(IDS)] == [worker.id]
            await streams[1].aclose()
            queueing.call("POST", "/free", {"request_id": "first"})
            for stream in (streams[2], streams[0]):
                assert len([item async for item in stream]) == 3
            await eventually(lambda: pending(queueing) == 0, "nobody to wait")
            await eventually(lambda: load(Loads(queueing), worker.id) == (0, 0, 0), "no load")
            # The one that left may have been told too late to be kept from the worker.
            asked = [one["token_ids"][-1] for one in worker.asked]
            assert [number for number in asked if number != 2] == [3, 1]
        await worker.close()

    run(work())


def test_a_router_that_stops_leaves_nobody_waiting(queueing):
    async def work():
        worker = await Worker().start()
        await eventually(lambda: workers(queueing), "the worker")
        queueing.call("POST", "/reserve", {"token_ids": IDS, "request_id": "first"})
        body = {"token_ids": IDS, "request_id": "second"}
        waiting = asyncio.create_task(asyncio.to_thread(queueing.call, "POST", "/reserve", body))
        await eventually(lambda: pending(queueing) == 1, "it to wait")
        await asyncio.to_thread(queueing.stop)
        with pytest.raises(ClosedError):
            await waiting
        await worker.close()

    run(work())
