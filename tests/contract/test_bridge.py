"""The bridge: who speaks tcp only asks workers of every plane, and notices nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from support_runtime import WorkerProcess, eventually, known, run, status

from kvflash import (
    DistributedRuntime,
    KvflashError,
    NotFoundError,
    RuntimeLimits,
    TransportError,
    WorkerError,
)
from kvflash.runtime.bridge import Bridge
from kvflash.runtime.client import Client
from kvflash.runtime.instances import Instance

Environment = Callable[..., dict[str, str]]
Start = Callable[..., WorkerProcess]

CALM = {"cancel_grace_s": 0.1}
# What a plane without connections needs to notice a silence, for the one that waits for it.
QUICK = {**CALM, "peer_silence_s": 3.0}


class Bridged:
    """A runtime with a bridge, and one that only knows the bridge's address."""

    def __init__(self, **options: float) -> None:
        limits = RuntimeLimits(**options)
        self.runtime = DistributedRuntime(limits=limits)
        self.asker = DistributedRuntime(limits=limits)
        self.bridge = Bridge(self.runtime)

    async def __aenter__(self) -> Bridged:
        await self.bridge.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.asker.close()
        await self.bridge.close()
        await self.runtime.close()

    async def through(self, *workers: WorkerProcess) -> Client:
        """A client for which all instances are at the bridge."""
        client = await known(self.asker, *workers)
        transport = {"kind": "tcp", "address": self.bridge.address}
        instances = client._instances
        instances.by_id = {number: Instance(number, transport) for number in instances.by_id}
        return client


async def ask(client: Client, request: Any, instance_id: int) -> list[Any]:
    return [item async for item in await client.direct(request, instance_id)]


def test_requests_pass_the_bridge_both_ways(
    plane: str, environment: Environment, start_worker: Start
) -> None:
    env = environment("file", plane)

    async def scenario() -> None:
        async with Bridged(**CALM) as bridged:
            workers = [start_worker(env, **CALM) for _ in range(2)]
            client = await bridged.through(*workers)
            for worker in workers:
                number = worker.instance_id
                items = await ask(client, {"do": "count", "n": 100}, number)
                assert [item["number"] for item in items] == list(range(100))
                assert {item["worker"] for item in items} == {str(number)}
                with pytest.raises(WorkerError, match="internal: ValueError: out of ink"):
                    await ask(client, {"do": "fail", "n": 2}, number)
            big = {"do": "echo", "pad": b"x" * 3_000_000}
            assert await ask(client, big, workers[0].instance_id) == [big]
            client._instances.by_id[5] = Instance(5, client._instances.by_id[number].transport)
            with pytest.raises(NotFoundError, match="has no instance 5"):
                await ask(client, {"do": "echo"}, 5)

    run(scenario())


def test_cancelling_and_dying_pass_the_bridge(
    plane: str, environment: Environment, start_worker: Start
) -> None:
    env = environment("file", plane)

    async def scenario() -> None:
        async with Bridged(**QUICK) as bridged:
            worker = start_worker(env, **QUICK)
            client, number = await bridged.through(worker), worker.instance_id
            stream = await client.direct({"do": "wait", "n": 1}, number)
            assert (await anext(stream))["number"] == 0
            await stream.aclose()

            async def is_freed() -> bool:
                seen = await status(bridged.runtime, number)
                return seen["began"] == seen["ended"] == 1

            await eventually(is_freed, "the handler to be freed")
            stream = await client.direct({"do": "wait", "n": 1}, number)
            assert (await anext(stream))["number"] == 0
            worker.kill()
            with pytest.raises(TransportError):
                await anext(stream)
            with pytest.raises(KvflashError):
                await ask(client, {"do": "echo"}, number)

    run(scenario())


def test_a_slow_reader_behind_the_bridge_stops_the_handler(
    plane: str, environment: Environment, start_worker: Start
) -> None:
    env = environment("file", plane)

    async def scenario() -> None:
        async with Bridged(**CALM) as bridged:
            worker = start_worker(env, **CALM)
            client = await bridged.through(worker)
            many, size = 3_500, 10_000
            request = {"do": "count", "n": many, "bytes": size}
            stream = await client.direct(request, worker.instance_id)
            before = -1
            while before != (now := (await status(bridged.runtime, worker.instance_id))["yielded"]):
                before = now
                await asyncio.sleep(0.3)
            assert now < many
            assert [item["number"] async for item in stream] == list(range(many))

    run(scenario())
