"""Instances on a plane that the core does not speak, and workers' own words of their load."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvflash import DistributedRuntime, RuntimeLimits
from kvflash.errors import NotFoundError, TransportError
from kvflash.roster import loads as loading
from kvflash.roster.bridge import Bridge
from kvflash.roster.loads import LoadReader
from kvflash.runtime.frame import Request, unpack
from kvflash.runtime.plane import FailedError
from kvflash.runtime.tcp import TcpClient

LIMITS = RuntimeLimits()
PATH = "tests/backend/generate"


async def generate(request: dict[str, Any]) -> Any:
    for number in range(request["n"]):
        yield {"number": number, "dp_rank": 0}
    if request.get("fails"):
        raise NotFoundError("no such adapter")


async def served(runtime: DistributedRuntime) -> dict[str, Any]:
    """Serve, and how the instance is announced."""
    endpoint = runtime.endpoint(PATH)
    task = asyncio.create_task(endpoint.serve_endpoint(generate))
    runtime.__dict__["_test_task"] = task
    client = endpoint.client()
    await client.wait_for_instances(10)
    (value,) = (await runtime.discovery.get_prefix("v1/instances/")).values()
    return dict(json.loads(value)["transport"])


def test_a_bridge_passes_items_and_errors_on(monkeypatch: pytest.MonkeyPatch) -> None:
    # The plane behind the bridge is tcp under another name.
    monkeypatch.setattr(
        "kvflash.runtime.plane.make_client", lambda _kind, limits: TcpClient(limits)
    )

    async def run() -> None:
        async with DistributedRuntime(discovery="mem") as runtime:
            transport = await served(runtime)
            bridge, client = Bridge(LIMITS), TcpClient(LIMITS)
            assert await bridge.open(PATH, runtime.instance_id, transport) is transport
            other = {**transport, "kind": "other"}
            near = await bridge.open(PATH, runtime.instance_id, other)
            assert near["kind"] == "tcp" and near["address"] != transport["address"]

            async def ask(payload: dict[str, Any]) -> list[Any]:
                request = Request("r", PATH, runtime.instance_id, payload)
                reply = await client.ask(near, request)
                items = []
                while (item := await reply.receive()) is not None:
                    items.append(unpack(item)["number"])
                return items

            assert await ask({"n": 3}) == [0, 1, 2]
            with pytest.raises(FailedError, match="no such adapter") as failed:
                await ask({"n": 1, "fails": True})
            assert failed.value.failure.code == "not_found"
            bridge.forget(PATH, runtime.instance_id)
            with pytest.raises((FailedError, TransportError), match="not bridged"):
                await ask({"n": 1})
            await client.close()
            await bridge.close()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_loads_are_read_as_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "PAUSE_S", 0.0)
    # The first stream has an item that JSON can't hold; the reader opens another one.
    items = [{"kv_used_blocks": b"7"}, {"dp_rank": 0, "kv_used_blocks": 7}]

    async def run() -> None:
        async with DistributedRuntime(discovery="mem") as runtime:
            endpoint = runtime.endpoint("tests/backend/load_metrics")

            async def loads(_request: Any) -> Any:
                yield items.pop(0)
                await asyncio.Event().wait()

            task = asyncio.create_task(endpoint.serve_endpoint(loads))
            await endpoint.client().wait_for_instances(10)
            (value,) = (await runtime.discovery.get_prefix("v1/instances/")).values()
            told: asyncio.Queue[str] = asyncio.Queue()
            bridge = Bridge(LIMITS)
            reader = LoadReader(told.put_nowait, bridge.clients)
            path = "tests/backend/load_metrics"
            reader.follow(path, runtime.instance_id, json.loads(value)["transport"])
            report = json.loads(await told.get())
            assert report == {"id": runtime.instance_id, "dp_rank": 0, "kv_used_blocks": 7}
            await reader.close()
            await bridge.close()
            task.cancel()

    asyncio.run(asyncio.wait_for(run(), 30))
