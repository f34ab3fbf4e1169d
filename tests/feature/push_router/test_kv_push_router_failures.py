"""KvPushRouter where workers refuse, can't be reached, or leave and come back."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvflash import (
    ClosedError,
    DrainingError,
    InvalidArgumentError,
    KvPushRouter,
    KvRouterConfig,
    NoWorkerError,
    TransportError,
)
from kvflash.routing.cluster import Cluster
from support_push_router import PATH, TOKENS, Stage, Worker, eventually, is_idle, known, run


def drain(worker: Worker) -> None:
    """Have it refuse what comes while discovery still has it."""
    worker.runtime._serving.endpoints[PATH.replace(".", "/")].is_draining = True


def test_a_worker_that_drains_is_passed_over_for_the_others() -> None:
    async def work() -> None:
        async with Stage() as stage:
            leaving, other = [await stage.worker() for _ in range(2)]
            router = await stage.router(2)
            leaving.hold(TOKENS)
            await known(router, TOKENS, leaving, 4)
            drain(leaving)
            for suspects in (set(), {leaving.id}):
                # It holds the prompt, and is asked first: once.
                assert router._client.suspects() == suspects
                stream = await router.generate(TOKENS)
                assert len([item async for item in stream]) == 4
                assert stream.worker_id == other.id
            assert router._client.suspects() == {leaving.id}
            with pytest.raises(DrainingError, match="is draining"):
                _ = [item async for item in await router.generate(TOKENS, worker_id=leaving.id)]
            with pytest.raises(DrainingError):
                only = await router.generate(TOKENS, allowed_worker_ids=[leaving.id])
                _ = [item async for item in only]
            assert is_idle(router)

    run(work())


def test_an_item_that_cannot_be_counted_frees_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    async def handle(_worker: Worker, _request: object) -> AsyncIterator[dict[str, int]]:
        yield {"token_ids": 5}
        await asyncio.Event().wait()

    monkeypatch.setattr(Worker, "handle", handle)

    async def work() -> None:
        async with Stage() as stage:
            worker = await stage.worker()
            router = await stage.router(1)
            stream = await router.generate(TOKENS)
            with pytest.raises(TypeError):
                await anext(stream)
            assert is_idle(router)

            async def is_idle_too() -> bool:
                return worker.runtime.stats()[PATH.replace(".", "/")]["running"] == 0

            # The stream is not garbage yet.
            await eventually(is_idle_too, "the worker to end the request")
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    run(work())


def test_counts_that_no_answer_has_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = {"prompt_tokens": 2**64 - 1, "completion_tokens": 2**64 - 1}
    usage |= {"prompt_tokens_details": {"cached_tokens": 2**64 - 1}}

    async def handle(_worker: Worker, _request: object) -> AsyncIterator[dict[str, Any]]:
        yield {"token_ids": [1], "completion_usage": usage}

    monkeypatch.setattr(Worker, "handle", handle)

    async def work() -> None:
        async with Stage() as stage:
            await stage.worker()
            router = await stage.router(1)
            assert len([item async for item in await router.generate(TOKENS)]) == 1
            assert is_idle(router)
            samples = {name: value for name, _, _, value in router._core.policy_samples()}
            assert 200 < samples["auto_answer_tokens"] < 2**32

    run(work())


def test_what_went_wrong_is_raised_when_nobody_else_is_allowed() -> None:
    async def work() -> None:
        async with Stage() as stage:
            await stage.worker()
            # The socket is bound without listening.
            with socket.socket() as silent:
                silent.bind(("127.0.0.1", 0))
                address = f"127.0.0.1:{silent.getsockname()[1]}"
                instance = {"instance_id": 7, "transport": {"kind": "tcp", "address": address}}
                key = f"v1/instances/{PATH.replace('.', '/')}/7"
                await stage.runtime().announce(key, instance)
                router = await stage.router(2, use_kv_events=False)
                with pytest.raises(TransportError, match="instance 7"):
                    await router.generate(TOKENS, allowed_worker_ids=[7])
                with pytest.raises(NoWorkerError):
                    await router.generate(TOKENS, allowed_worker_ids=[8])
                assert router._client.suspects() == {7}
                for wrong in (5, [[5]]):
                    with pytest.raises(InvalidArgumentError, match="allowed_worker_ids must be"):
                        await router.generate(TOKENS, allowed_worker_ids=wrong)
                assert is_idle(router)

    run(work())


def test_a_suspect_is_asked_if_all_others_are_draining() -> None:
    async def work() -> None:
        async with Stage() as stage:
            draining, suspect = [await stage.worker() for _ in range(2)]
            router = await stage.router(2)
            _ = [item async for item in await router.generate(TOKENS)]
            router._client._instances.suspect(suspect.id, 60.0)
            assert (await router.generate(TOKENS)).worker_id == draining.id
            key = f"v1/instances/{PATH.replace('.', '/')}/{draining.id}"
            (value,) = (await stage.discovery.get_prefix(key)).values()
            instance = json.loads(value) | {"state": "draining"}
            await stage.discovery.put(key, json.dumps(instance).encode())

            async def is_draining() -> bool:
                return router._workers._states == {draining.id: "draining"}

            await eventually(is_draining, "its state")
            assert (await router.generate(TOKENS)).worker_id == suspect.id
            # It was put without the worker's lease.
            await stage.discovery.delete(key)

    run(work())


def test_a_router_that_is_closed_while_it_starts_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        async with Stage() as stage:
            # A server that takes connections and says nothing.
            with socket.create_server(("127.0.0.1", 0)) as silent:
                silent.setblocking(False)
                address = f"nats://127.0.0.1:{silent.getsockname()[1]}"
                monkeypatch.setenv("NATS_SERVER", address)
                config = KvRouterConfig(durable_kv_events=True)
                router = KvPushRouter(stage.runtime().endpoint(PATH), 4, config)
                asked = asyncio.create_task(router.best_worker(TOKENS))
                loop = asyncio.get_running_loop()
                connection, _ = await loop.sock_accept(silent)
                await asyncio.wait_for(router.aclose(), 30)
                with pytest.raises(ClosedError, match="while it started"):
                    await asked
                connection.close()
            assert router._workers._keys._tasks == []
            with pytest.raises(ClosedError):
                await router.best_worker(TOKENS)

    run(work())


def test_a_router_that_fails_to_start_stops_what_it_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: Cluster) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Cluster, "start", fail)

    async def work() -> None:
        before = set(threading.enumerate())
        async with Stage() as stage:
            router = KvPushRouter(stage.runtime().endpoint(PATH), 4)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                await router.best_worker(TOKENS)
            names = {thread.name for thread in set(threading.enumerate()) - before}
            assert "kvflash-orders" not in names
            await router.aclose()

    run(work())


def test_a_worker_that_comes_back_is_credited_with_what_it_still_holds() -> None:
    async def work() -> None:
        async with Stage() as stage:
            worker = await stage.worker()
            router = await stage.router(1)
            worker.hold(TOKENS)
            await known(router, TOKENS, worker, 4)
            key = f"v1/instances/{PATH.replace('.', '/')}/{worker.id}"
            (value,) = (await stage.discovery.get_prefix(key)).values()
            await stage.discovery.delete(key)

            async def is_gone() -> bool:
                return await router.get_potential_loads(TOKENS) == []

            await eventually(is_gone, "the worker to leave")
            await stage.discovery.put(key, value)
            await known(router, TOKENS, worker, 4)
            worker.hold([*TOKENS, *range(8)])
            await known(router, [*TOKENS, *range(8)], worker, 6)
            # It was put without the worker's lease.
            await stage.discovery.delete(key)

    run(work())
