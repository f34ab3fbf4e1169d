"""Instances of an endpoint as its clients see them."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvflash import ClosedError, DistributedRuntime
from kvflash.discovery import Delete, MemoryDiscovery, Watch
from kvflash.errors import DecodeError
from kvflash.runtime.instances import Instances
from kvflash.runtime.worker_key import key_kind
from support_runtime import eventually, run

PREFIX = "v1/instances/a/b/c/"
GOOD = json.dumps({"instance_id": 7, "transport": {"kind": "tcp", "address": "127.0.0.1:1"}})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("6", b"[]"),
        ("6", b"5"),
        ("6", b"\xff"),
        ("6", b"[" * 100_000),
        ("6", b'{"transport": 5}'),
        ("6", b'{"transport": {"kind": "tcp", "address": ["127.0.0.1:1"]}}'),
        ("x", GOOD.encode()),
    ],
)
def test_a_malformed_key_hides_no_other_instance(
    key: str, value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        discovery = MemoryDiscovery(is_shared=False)
        async with DistributedRuntime(discovery) as runtime:
            client = runtime.endpoint("a.b.c").client()
            await discovery.put(f"{PREFIX}{key}", value)
            await discovery.put(f"{PREFIX}7", GOOD.encode())
            assert await client.wait_for_instances(30) == [7]
            await discovery.delete(f"{PREFIX}{key}")
            await discovery.put(f"{PREFIX}8", GOOD.encode())

            async def are_both_there() -> bool:
                return client.instance_ids() == [7, 8]

            await eventually(are_both_there, "the later instance")
        await discovery.close()

    run(scenario())
    assert f"discovery key {PREFIX + key!r}: " in caplog.text


def test_thousands_of_digits_name_no_worker() -> None:
    """etcd takes longer keys from others than this package does."""
    with pytest.raises(DecodeError, match="does not end with numbers"):
        key_kind(f"{PREFIX}{'9' * 5_000}")
    # Nor does its end stop those who follow the instances.
    instances = Instances(MemoryDiscovery(is_shared=False), PREFIX)
    instances._apply(Delete(f"{PREFIX}{'9' * 5_000}"))
    assert not instances.by_id


def test_whoever_waits_for_instances_learns_of_the_close() -> None:
    class Silent(MemoryDiscovery):
        def watch(self, prefix: str) -> Watch:
            return Watch(prefix, lambda _watch: None)

    async def scenario() -> None:
        runtime = DistributedRuntime(Silent(is_shared=False))
        client = runtime.endpoint("a.b.c").client()
        works = (client.wait_for_instances(), client.random(1))
        waiting = [asyncio.create_task(work) for work in works]
        await asyncio.sleep(0)
        await runtime.close()
        for task in waiting:
            with pytest.raises(ClosedError, match="the runtime is closed"):
                await asyncio.wait_for(task, 5)

    run(scenario())


def test_a_discovery_that_was_closed_is_said_at_once() -> None:
    async def scenario() -> None:
        discovery = MemoryDiscovery(is_shared=False)
        async with DistributedRuntime(discovery) as runtime:
            await discovery.close()
            with pytest.raises(ClosedError, match="the discovery is closed"):
                await runtime.endpoint("a.b.c").client().random(1)

    run(scenario())
