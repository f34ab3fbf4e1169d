"""KvPushRouter over NATS: it knows what the workers' stream tells, and others do after it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvflash import DistributedRuntime, KvPushRouter, KvRouterConfig, TransportError
from kvflash.state.snapshot import Outcome
from ports import free_port
from servers import NatsServer
from service import until
from support_cluster import BLOCK, Cluster, overlap, prompt, wait_known

NATS = ("--event-plane", "nats")
FAMILIES = range(1, 9)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    nats = NatsServer(tmp_path)
    env = {
        "KVFLASH_DISCOVERY": "file",
        "KVFLASH_DISCOVERY_DIR": str(tmp_path / "keys"),
        "NATS_SERVER": nats.url,
    }
    for name, value in {**env, "KVFLASH_EVENT_PLANE": "nats"}.items():
        monkeypatch.setenv(name, value)
    try:
        with Cluster(env) as made:
            yield made
    finally:
        nats.close()


@asynccontextmanager
async def routing(block_size: int = BLOCK, **config: Any) -> AsyncIterator[KvPushRouter]:
    """A router with a runtime of its own, as another process has it."""
    async with DistributedRuntime.detached() as runtime:
        endpoint = runtime.endpoint("ns.backend.generate")
        settings = KvRouterConfig(router_predicted_ttl_secs=0.0, **config)
        async with KvPushRouter(endpoint, block_size, settings) as router:
            yield router


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 100))


async def send(router: KvPushRouter, family: int) -> None:
    """Have some worker hold a prompt."""
    stream = await router.generate(prompt(family), stop_conditions={"max_tokens": 1})
    assert [item async for item in stream]


async def known(router: KvPushRouter, family: int) -> int:
    """Blocks of a prompt that the best worker is known to hold."""
    return (await router.best_worker(prompt(family)))[2]


async def eventually(check: Callable[[], Coroutine[Any, Any, bool]], what: str) -> None:
    loop = asyncio.get_running_loop()
    # In a thread, as `until` waits without an event loop.
    await asyncio.to_thread(
        until, lambda: asyncio.run_coroutine_threadsafe(check(), loop).result(), what
    )


async def all_known(router: KvPushRouter, blocks: int = 8) -> bool:
    return [await known(router, family) for family in FAMILIES] == [blocks] * len(FAMILIES)


def test_a_third_router_knows_what_two_that_are_gone_knew(cluster: Cluster) -> None:
    cluster.workers(*NATS)

    async def work() -> None:
        settings = {"router_snapshot_threshold": 5, "router_replica_sync": True}
        async with routing(**settings) as one, routing(**settings) as two:
            for family in FAMILIES:
                await send(one if family % 2 else two, family)
            for router in (one, two):
                await eventually(lambda router=router: all_known(router), "all prompts")

            async def is_taken() -> bool:
                taken = (router.stats()["ns.backend"]["snapshots_total"] for router in (one, two))
                return sum(taken) > 0

            await eventually(is_taken, "a snapshot")
        async with routing() as third:
            # Its first question: it knows from the snapshot and the stream.
            assert await all_known(third)
            stats = third.stats()["ns.backend"]
            assert (stats["restores_total"], stats["is_complete"]) == (1, 1)
            assert stats["lost_messages_total"] == 0

    run(work())


def test_it_shares_snapshots_with_frontends(cluster: Cluster) -> None:
    workers = cluster.workers(*NATS)

    async def work() -> None:
        async with routing(router_snapshot_threshold=2) as router:
            for family in FAMILIES:
                await send(router, family)

            async def is_taken() -> bool:
                return bool(router.stats()["ns.backend"]["snapshots_total"])

            await eventually(is_taken, "a snapshot")

    run(work())
    frontend = cluster.frontend(workers, *NATS)
    assert [overlap(frontend, family) for family in FAMILIES] == [8] * len(FAMILIES)


def test_states_are_reset_at_all_replicas(cluster: Cluster) -> None:
    cluster.workers(*NATS)

    async def work() -> None:
        async with routing(durable_kv_events=True) as one:
            for family in FAMILIES:
                await send(one, family)
            await eventually(lambda: all_known(one), "all prompts")
            async with routing(router_reset_states=True) as two:
                assert await all_known(two, 0)
                await eventually(lambda: all_known(one, 0), "the other to forget")

    run(work())


def test_a_worker_that_left_is_forgotten(cluster: Cluster) -> None:
    gone, stays = cluster.workers(*NATS, count=1), cluster.workers(*NATS, count=1)

    async def work() -> None:
        async with routing() as one:
            # Both are there before anything is sent.
            await eventually(lambda: are_there(one, 2), "two workers")
            for family in FAMILIES:
                await send(one, family)
            await eventually(lambda: all_known(one), "all prompts")
            assert await holders(one) == {*gone.ids, *stays.ids}
            gone.process.kill()
            await eventually(lambda: are_there(one, 1), "one to be gone")
            async with routing() as late:
                await late.best_worker(prompt(1))
                for router in (one, late):
                    await eventually(lambda router=router: holds_only(router, stays.ids), "its own")

    async def are_there(router: KvPushRouter, count: int) -> bool:
        return len(await router.get_potential_loads(prompt(1))) == count

    async def holders(router: KvPushRouter) -> set[int]:
        return {event["worker_id"] for event in json.loads(await router.dump_events())}

    async def holds_only(router: KvPushRouter, ids: list[int]) -> bool:
        return await holders(router) == set(ids)

    run(work())


def test_one_with_other_blocks_takes_no_snapshot_for_the_others(cluster: Cluster) -> None:
    cluster.workers(*NATS)

    async def work() -> None:
        async with routing() as right:
            for family in FAMILIES:
                await send(right, family)
            await eventually(lambda: all_known(right), "all prompts")
        async with routing(BLOCK * 2, router_snapshot_threshold=1) as wrong:
            assert await known(wrong, 1) == 0
            assert wrong.stats()["ns.backend"]["refused_total"] > 0
            state = wrong._cluster._states["ns", "backend"]
            # It tries by itself, too, and holds the lock meanwhile.
            while (outcome := await asyncio.to_thread(state.snapshot)) == Outcome.HELD.value:
                pass
            assert outcome == Outcome.INCOMPLETE.value
        async with routing() as late:
            assert await all_known(late)

    run(work())


async def one_learns_and_another_is_told(what: str) -> None:
    """All prompts are sent through a router; one that comes behind it knows them, too."""
    async with routing() as one:
        for family in FAMILIES:
            await send(one, family)
        await eventually(lambda: all_known(one), "all prompts")
    async with routing() as two:
        await eventually(lambda: all_known(two), what)


def test_an_index_of_the_workers_own_tells_a_new_router_all(cluster: Cluster) -> None:
    cluster.workers(*NATS, "--enable-local-indexer")

    run(one_learns_and_another_is_told("the workers' dumps"))


@pytest.mark.parametrize("kind", [(), ("--enable-local-indexer",)], ids=["stream", "index"])
def test_workers_that_only_prefill_earn_credit(cluster: Cluster, kind: tuple[str, ...]) -> None:
    cluster.workers(*NATS, *kind, "--is-prefill-worker")

    run(one_learns_and_another_is_told("what was sent before"))


def test_without_the_server_one_line_says_what_to_start(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NATS_SERVER", f"nats://127.0.0.1:{free_port()}")

    async def work() -> None:
        async with routing() as router:
            for _ in range(2):
                with pytest.raises(TransportError, match=r"start one \(nats-server -js\)"):
                    await router.best_worker(prompt(1))

    run(work())


def test_on_sockets_it_says_what_a_worker_in_a_stream_needs(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVFLASH_EVENT_PLANE", "zmq")
    cluster.workers(*NATS, count=1)

    async def work() -> None:
        async with routing() as router:
            await send(router, 1)

    run(work())
    assert "start the router with KVFLASH_EVENT_PLANE=nats" in caplog.text


def test_frontends_know_what_was_sent_through_a_router(cluster: Cluster) -> None:
    workers = cluster.workers(*NATS)
    frontend = cluster.frontend(workers, *NATS)

    async def work() -> None:
        async with routing() as router:
            await send(router, 1)

    run(work())
    wait_known(frontend, 1)
