"""A worker's load reports, over the runtime."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvflash import DistributedRuntime, ForwardPassMetrics, KvStats, SpecDecodeStats, WorkerStats
from kvflash.errors import ConflictError, InvalidArgumentError, OverloadedError, TransportError
from kvflash.publisher import WorkerMetricsPublisher


def watched(check):
    """Run a check with a publisher that is served and a client of its endpoint."""

    async def run():
        async with DistributedRuntime(discovery="mem") as runtime:
            component = runtime.namespace("test").component("backend")
            metrics = WorkerMetricsPublisher()
            await metrics.create_endpoint(component)
            client = component.endpoint("load_metrics").client()
            assert await client.wait_for_instances(10) == [runtime.instance_id]
            await asyncio.wait_for(check(metrics, client), 30)

    asyncio.run(run())


def test_first_what_is_then_what_changes():
    async def check(metrics, client):
        metrics.publish(0, 10, kv_total_blocks=100)
        metrics.publish(1, active_decode_blocks=5)
        stream = await client.random({})
        first = [await anext(stream), await anext(stream)]
        assert first == [
            {"dp_rank": 0, "active_decode_blocks": 10, "kv_total_blocks": 100},
            {"dp_rank": 1, "active_decode_blocks": 5},
        ]
        # The same again is no change.
        metrics.publish(0, 10)
        metrics.publish(1, 6, active_prefill_tokens=0)
        changed = {"dp_rank": 1, "active_decode_blocks": 6, "active_prefill_tokens": 0}
        assert await anext(stream) == changed
        once = [item async for item in await client.random({"once": True})]
        assert once == [first[0], changed]
        await stream.aclose()

    watched(check)


def test_a_thread_may_publish_and_the_last_load_always_comes():
    async def check(metrics, client):
        stream = await client.random({})

        def work():
            for blocks in range(2000):
                metrics.publish(0, blocks)

        thread = threading.Thread(target=work)
        thread.start()
        seen = []
        async for item in stream:
            seen.append(item["active_decode_blocks"])
            if seen[-1] == 1999:
                break
        thread.join()
        assert seen == sorted(set(seen))

    watched(check)


def test_older_engines_hand_over_all_they_know():
    async def check(metrics, client):
        metrics.publish(
            ForwardPassMetrics(
                worker_stats=WorkerStats(data_parallel_rank=2, request_active_slots=3),
                kv_stats=KvStats(kv_active_blocks=7, kv_total_blocks=50),
            )
        )
        (item,) = [item async for item in await client.random({"once": True})]
        assert item == {"dp_rank": 2, "kv_used_blocks": 7, "kv_total_blocks": 50}

    watched(check)


def test_older_engines_may_pass_their_metrics_by_position():
    async def check(metrics, client):
        stats = SpecDecodeStats(4, 10, 40, 20, [10, 6, 3, 1])
        metrics.publish(
            ForwardPassMetrics(WorkerStats(3, 256, 1, 2), KvStats(7, 50, 0.14, 0.5), stats)
        )
        (item,) = [item async for item in await client.random({"once": True})]
        assert item == {"dp_rank": 2, "kv_used_blocks": 7, "kv_total_blocks": 50}

    watched(check)


def test_it_is_announced_or_says_why_not(monkeypatch):
    async def run():
        async with DistributedRuntime(discovery="mem") as runtime:
            component = runtime.namespace("test").component("backend")
            await WorkerMetricsPublisher().create_endpoint(component)
            keys = await runtime.discovery.get_prefix("v1/instances/test/backend/load_metrics/")
            assert list(keys) == [f"v1/instances/test/backend/load_metrics/{runtime.instance_id}"]
            with pytest.raises(ConflictError):
                await WorkerMetricsPublisher().create_endpoint(component)
        monkeypatch.setenv("ETCD_ENDPOINTS", "http://127.0.0.1:1")
        async with DistributedRuntime(discovery="etcd") as runtime:
            component = runtime.namespace("test").component("backend")
            with pytest.raises(TransportError, match="etcd can't be reached"):
                await WorkerMetricsPublisher().create_endpoint(component)

    asyncio.run(asyncio.wait_for(run(), 30))


def test_misuse_is_named():
    metrics = WorkerMetricsPublisher()
    with pytest.raises(InvalidArgumentError, match=r"active_decode_blocks must be in 0\.\..*-1"):
        metrics.publish(0, -1)
    with pytest.raises(InvalidArgumentError, match="dp_rank must be in"):
        metrics.publish(-1, 1)
    with pytest.raises(OverloadedError, match="1024 ranks"):
        for rank in range(1025):
            metrics.publish(rank, 1)
