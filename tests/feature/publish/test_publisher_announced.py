"""Publishers and discovery: who is found, who is gone; reading events in Python."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import weakref

import pytest

from kvflash import RadixTree, compute_block_hash_for_seq
from kvflash.discovery import MemoryDiscovery
from kvflash.errors import ConflictError, InvalidArgumentError, TransportError
from kvflash.publisher import (
    KvEventPublisher,
    ZmqKvEventListener,
    ZmqKvEventPublisher,
    ZmqKvEventPublisherConfig,
)
from kvflash.runtime import DistributedRuntime
from support_publisher import SIZE, store, tokens_of


async def announced(runtime):
    """Entries of events in discovery: key and value."""
    found = await runtime.discovery.get_prefix("v1/events/")
    return {key: json.loads(value) for key, value in found.items()}


async def wait_for_announced(runtime, keys):
    async def look():
        async with runtime.discovery.watch("v1/events/") as watch:
            async for _ in watch:
                if set(found := await announced(runtime)) == set(keys):
                    return found
        raise AssertionError("the watch ended")

    return await asyncio.wait_for(look(), 30)


def test_it_announces_itself_until_shutdown(publisher):
    async def engine():
        async with DistributedRuntime(discovery="mem") as runtime:
            component = runtime.namespace("test").component("backend")
            mine = publisher(component)
            other = publisher(component, worker_id=9, dp_rank=2)
            keys = [
                f"v1/events/test/backend/{runtime.instance_id}/0",
                "v1/events/test/backend/9/2",
            ]
            found = await wait_for_announced(runtime, keys)
            assert found[keys[0]] == {
                "kind": "zmq",
                "endpoint": mine.endpoint,
                "replay_endpoint": mine.replay_endpoint,
                "block_size": SIZE,
            }
            assert found[keys[1]]["endpoint"] == other.endpoint
            with pytest.raises(ConflictError, match="of rank 0 of 'backend' here: shut it down"):
                publisher(component)
            assert await announced(runtime) == found
            mine.shutdown()
            await wait_for_announced(runtime, keys[1:])
            # At once, before its announcement was made.
            publisher(component).shutdown()
            await wait_for_announced(runtime, keys[1:])
            del other
            return runtime

    asyncio.run(engine())


@pytest.mark.parametrize(
    ("host", "own", "announced_host"),
    [
        ("0.0.0.0", "10.1.2.3", "10.1.2.3"),
        ("*", "engine-7", "engine-7"),
        ("::", "fd00::7", "[fd00::7]"),
        ("[::]", "fd00::7", "[fd00::7]"),
        ("0.0.0.0", "0.0.0.0", "127.0.0.1"),
        ("127.0.0.1", "10.1.2.3", "127.0.0.1"),
        # An address of a gateway, which this machine does not have.
        (None, "10.1.2.3", "10.1.2.3"),
    ],
)
def test_a_publisher_on_all_interfaces_announces_the_host_of_its_runtime(
    publisher, host, own, announced_host
):
    async def engine():
        async with DistributedRuntime(discovery="mem", host=own) as runtime:
            component = runtime.namespace("test").component("backend")
            made = publisher(component, host=host)
            key = f"v1/events/test/backend/{runtime.instance_id}/0"
            found = (await wait_for_announced(runtime, [key]))[key]
            for name in ("endpoint", "replay_endpoint"):
                assert found[name] == getattr(made, name)
                assert found[name].rpartition(":")[0] == f"tcp://{announced_host}"

    asyncio.run(engine())


def test_a_publisher_that_nobody_holds_withdraws():
    async def engine():
        async with DistributedRuntime(discovery="mem") as runtime:
            component = runtime.namespace("test").component("backend")
            made = KvEventPublisher(component, kv_block_size=SIZE)
            gone = weakref.ref(made)
            del made
            gc.collect()
            assert gone() is None
            await wait_for_announced(runtime, [])

    asyncio.run(engine())


def test_a_thread_names_the_loop_and_waits_for_the_announcement(publisher):
    async def engine():
        loop = asyncio.get_running_loop()
        async with DistributedRuntime(discovery="mem") as runtime:
            component = runtime.namespace("test").component("backend")
            with pytest.raises(InvalidArgumentError, match="loop must be the runtime's event loop"):
                await asyncio.to_thread(publisher, component)
            made = await asyncio.to_thread(publisher, component, loop=loop)
            assert len(await announced(runtime)) == 1
            await asyncio.to_thread(made.shutdown)
            assert await announced(runtime) == {}

    asyncio.run(engine())


def test_an_announcement_that_takes_too_long_leaves_no_key(publisher, monkeypatch):
    class Slow(MemoryDiscovery):
        def __init__(self):
            super().__init__(is_shared=False)
            self.goes_on = asyncio.Event()

        async def put(self, *args):
            await self.goes_on.wait()
            await super().put(*args)

    async def engine():
        loop = asyncio.get_running_loop()
        slow = Slow()
        async with DistributedRuntime(slow) as runtime:
            component = runtime.namespace("test").component("backend")
            with monkeypatch.context() as patched:
                patched.setattr("kvflash.publisher.announce._WAIT_S_MAX", 0.1)
                with pytest.raises(TransportError, match="discovery did not answer within"):
                    await asyncio.to_thread(publisher, component, loop=loop)
            slow.goes_on.set()
            # The runtime puts one key after the other, so the first is done with by then.
            other = await asyncio.to_thread(publisher, component, dp_rank=1, loop=loop)
            (found,) = (await announced(runtime)).values()
            assert found["endpoint"] == other.endpoint
            again = await asyncio.to_thread(publisher, component, loop=loop)
            assert len(await announced(runtime)) == 2
            for each in (other, again):
                await asyncio.to_thread(each.shutdown)

    asyncio.run(engine())


def test_a_fork_withdraws_nothing(publisher, monkeypatch):
    async def engine():
        loop = asyncio.get_running_loop()
        async with DistributedRuntime(discovery="mem") as runtime:
            component = runtime.namespace("test").component("backend")
            made = await asyncio.to_thread(publisher, component, loop=loop)
            found = await announced(runtime)
            assert len(found) == 1
            own = os.getpid()
            monkeypatch.setattr(os, "getpid", lambda: own + 1)
            await asyncio.to_thread(made.shutdown)
            assert await announced(runtime) == found
            made._source.close()

    asyncio.run(engine())


def test_a_withdrawal_without_an_answer_is_logged_with_its_reason(publisher, monkeypatch, caplog):
    class Stuck(MemoryDiscovery):
        def __init__(self):
            super().__init__(is_shared=False)
            self.goes_on = asyncio.Event()

        async def delete(self, *args):
            await self.goes_on.wait()
            await super().delete(*args)

    async def engine():
        loop = asyncio.get_running_loop()
        stuck = Stuck()
        async with DistributedRuntime(stuck) as runtime:
            component = runtime.namespace("test").component("backend")
            made = await asyncio.to_thread(publisher, component, loop=loop)
            monkeypatch.setattr("kvflash.publisher.announce._WAIT_S_MAX", 0.1)
            await asyncio.to_thread(made.shutdown)
            stuck.goes_on.set()

    asyncio.run(engine())
    assert (
        "can't withdraw the announcement of events: discovery did not answer within 0.1 s"
        in caplog.text
    )


def test_a_publisher_may_end_after_its_runtime(publisher, caplog):
    async def engine():
        loop = asyncio.get_running_loop()
        async with DistributedRuntime(discovery="mem") as runtime:
            component = runtime.namespace("test").component("backend")
            made = [
                await asyncio.to_thread(publisher, component, dp_rank=r, loop=loop) for r in (0, 1)
            ]
        await asyncio.to_thread(made[0].shutdown)
        made[1].shutdown()

    asyncio.run(engine())
    assert caplog.text == ""


def test_a_relay_announces_the_engine_and_binds_nothing(publisher):
    async def engine():
        async with DistributedRuntime(discovery="mem") as runtime:
            component = runtime.namespace("test").component("backend")
            # In the order that callers know.
            config = ZmqKvEventPublisherConfig(
                0, SIZE, "tcp://10.0.0.7:5557", "", zmq_replay_endpoint="tcp://10.0.0.7:5657"
            )
            made = ZmqKvEventPublisher(component, config)
            key = f"v1/events/test/backend/{runtime.instance_id}/0"
            found = (await wait_for_announced(runtime, [key]))[key]
            assert found["endpoint"] == "tcp://10.0.0.7:5557"
            assert found["replay_endpoint"] == "tcp://10.0.0.7:5657"
            with pytest.raises(ConflictError, match=r"publish_cleared: this publisher relays tcp"):
                made.publish_cleared()
            assert made.flush()
            made.shutdown()

    asyncio.run(engine())


def test_a_listener_tells_what_an_index_of_python_takes(publisher):
    async def tool():
        made = publisher(dp_rank=1)
        listening = ZmqKvEventListener(made.endpoint, "", SIZE)
        try:
            # Until the subscription is there.
            events = asyncio.ensure_future(listening.get_events())
            while not events.done():
                made.publish_cleared()
                await asyncio.wait({events}, timeout=0.01)
            store(made, [1, -2], tokens_of(0, 2), cache_salt="tenant-a")
            made.publish_removed([-2])
            tree = RadixTree()
            told = []
            while not told or "removed" not in told[-1]:
                told += await listening.get_events()
            for event in told:
                tree.apply_event(5, event.encode())
            hashes = compute_block_hash_for_seq(tokens_of(0, 2), SIZE, cache_salt="tenant-a")
            assert tree.find_matches(hashes).scores == {(5, 1): 1}
        finally:
            listening.close()

    asyncio.run(tool())
