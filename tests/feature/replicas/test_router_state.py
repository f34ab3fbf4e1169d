"""The standalone router over NATS: what the workers' stream tells, it and its replicas know."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvflash import ConfigError, DistributedRuntime
from kvflash.router import RouterService
from kvflash.transport.names import stream_name
from ports import free_port
from servers import NatsServer
from service import Http, Process, until
from support_cluster import MODEL, Cluster, overlap, prompt

NATS = ("--event-plane", "nats")
FAMILIES = range(1, 9)


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path)
    yield server
    server.close()


@pytest.fixture
def cluster(nats: NatsServer, tmp_path: Path) -> Iterator[Cluster]:
    env = {
        "KVFLASH_DISCOVERY": "file",
        "KVFLASH_DISCOVERY_DIR": str(tmp_path / "keys"),
        "NATS_SERVER": nats.url,
    }
    with Cluster(env) as made:
        yield made


class Router:
    """A router process of the workers' endpoint."""

    def __init__(self, cluster: Cluster, *flags: str) -> None:
        endpoint = ("--endpoint", "ns.backend.generate", "--router-predicted-ttl-secs", "0")
        self.process = cluster.open.enter_context(
            closing(Process("kvflash.router", "--port", "0", *endpoint, *flags, env=cluster.env))
        )
        self.http = cluster.open.enter_context(closing(Http(self.process.ready()["url"])))

    def known(self, family: int, **more: Any) -> int:
        body = {"model_name": MODEL, "token_ids": prompt(family), **more}
        return int(self.http.post("/select", body)["overlap_blocks"])

    def workers(self) -> set[int]:
        return {worker["worker_id"] for worker in self.http.get("/workers")}

    def knows_all(self) -> bool:
        return [self.known(family) for family in FAMILIES] == [8] * len(FAMILIES)


@pytest.fixture
def router(cluster: Cluster) -> Callable[..., Router]:
    return lambda *flags: Router(cluster, *NATS, *flags)


def test_routers_share_a_stream_and_its_snapshots_with_frontends(
    cluster: Cluster, router: Callable[..., Router]
) -> None:
    workers = cluster.workers(*NATS)
    one = router("--router-snapshot-threshold", "2")
    until(lambda: one.workers() == set(workers.ids), "the workers")
    frontend = cluster.frontend(workers, *NATS, "--router-snapshot-threshold", "None")
    for family in FAMILIES:
        assert overlap(frontend, family) == 0
    until(one.knows_all, "what the frontend sent")
    stream = 'component="ns.backend"'
    until(
        lambda: frontend.metric(f"kvflash_state_applied_sequence{{{stream}}}") >= len(FAMILIES),
        "the stream",
    )
    # Its snapshot, and the purge that goes with it, leave nothing out.
    until(lambda: has_snapshot(cluster), "a snapshot")
    for gone in (one.process, frontend.process):
        gone.kill()
    two = router()
    until(lambda: two.workers() == set(workers.ids), "the workers")
    assert two.knows_all()
    late = cluster.frontend(workers, *NATS)
    assert [overlap(late, family) for family in FAMILIES] == [8] * len(FAMILIES)


def has_snapshot(cluster: Cluster) -> bool:
    async def look() -> bool:
        import nats  # noqa: PLC0415
        import nats.js.errors  # noqa: PLC0415

        client = await nats.connect(cluster.env["NATS_SERVER"])
        try:
            bucket = await client.jetstream().object_store(
                "namespace-ns-component-backend-radix-bucket"
            )
            return bool(await bucket.list())
        except nats.js.errors.NotFoundError:
            return False
        finally:
            await client.close()

    return asyncio.run(look())


def test_requests_through_it_count_at_once_and_go_where_their_prefix_is(
    cluster: Cluster, router: Callable[..., Router], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.workers(*NATS)
    one = router()
    until(lambda: len(one.workers()) == 2, "the workers")
    send_all(cluster, monkeypatch)
    until(one.knows_all, "what it sent")


def send_all(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of each family, through a router."""
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)

    async def work() -> None:
        async with DistributedRuntime.detached() as runtime:
            client = runtime.endpoint("ns.router.generate").client()
            await client.wait_for_instances()
            for family in FAMILIES:
                request = {"token_ids": prompt(family), "stop_conditions": {"max_tokens": 1}}
                assert [item async for item in await client.generate({"model": MODEL, **request})]

    asyncio.run(asyncio.wait_for(work(), 60))


@pytest.mark.parametrize("kind", [(), ("--enable-local-indexer",)], ids=["stream", "index"])
def test_workers_that_only_prefill_earn_credit(
    cluster: Cluster,
    router: Callable[..., Router],
    monkeypatch: pytest.MonkeyPatch,
    kind: tuple[str, ...],
) -> None:
    workers = cluster.workers(*NATS, *kind, "--is-prefill-worker")
    one = router()
    until(lambda: one.workers() == set(workers.ids), "the workers")
    send_all(cluster, monkeypatch)
    until(one.knows_all, "what it sent")
    late = router()
    until(lambda: late.workers() == set(workers.ids), "the workers")
    until(late.knows_all, "what was sent before")
    assert {one["tenant_id"] for one in late.http.get("/workers")} == {"prefill"}
    # A request without a model is not theirs if there are other models.
    decode = cluster.workers(*NATS, *kind, count=1)
    for made in (one, late):
        until(lambda made=made: made.workers() == {*workers.ids, *decode.ids}, "all workers")
    choice = late.http.post("/select", {"model_name": MODEL, "token_ids": prompt(1)})
    assert (choice["worker_id"], choice["overlap_blocks"]) == (decode.ids[0], 0)
    send_all(cluster, monkeypatch)
    until(lambda: late.knows_all() and one.knows_all(), "what the other holds now")
    assert holders(late, "default") == set(decode.ids)
    assert late.known(1, tenant_id="prefill") == 8


def test_a_worker_that_left_is_forgotten(cluster: Cluster, router: Callable[..., Router]) -> None:
    gone, stays = cluster.workers(*NATS, count=1), cluster.workers(*NATS, count=1)
    frontend = cluster.frontend(stays, *NATS)
    frontend.wait_healthy(*gone.ids)
    one = router()
    until(lambda: one.workers() == {*gone.ids, *stays.ids}, "both workers")
    for family in FAMILIES:
        overlap(frontend, family)
    until(one.knows_all, "what the frontend sent")
    assert holders(one) == {*gone.ids, *stays.ids}
    gone.process.kill()
    for made in (one, router()):
        until(lambda made=made: made.workers() == set(stays.ids), "one to be gone")
        until(lambda made=made: holders(made) == set(stays.ids), "its blocks to be gone")


def holders(router: Router, tenant: str | None = None) -> set[int]:
    """Workers that are known to hold something."""
    return {
        worker["worker_id"]
        for worker in router.http.get("/workers")
        if worker["blocks"] and tenant in (None, worker["tenant_id"])
    }


def test_an_index_of_the_workers_own_tells_a_new_router_all(
    cluster: Cluster, router: Callable[..., Router]
) -> None:
    workers = cluster.workers(*NATS, "--enable-local-indexer")
    frontend = cluster.frontend(workers, *NATS)
    for family in FAMILIES:
        overlap(frontend, family)
    one = router()
    until(lambda: one.workers() == set(workers.ids), "the workers")
    until(one.knows_all, "the workers' dumps")


@pytest.mark.parametrize("off", [("--no-kv-events",), ("--kv-overlap-score-weight", "0")], ids=str)
def test_without_events_nothing_reads_the_stream(
    cluster: Cluster, router: Callable[..., Router], off: tuple[str, ...]
) -> None:
    workers = cluster.workers(*NATS)
    frontend = cluster.frontend(workers, *NATS, *off)
    for family in FAMILIES:
        assert overlap(frontend, family) == 0
    one = router(*off)
    until(lambda: one.workers() == set(workers.ids), "the workers")
    assert {one.known(family) for family in FAMILIES} == {0}
    assert consumers(cluster) == []
    # Without events and replicas, no server is needed either.
    cluster.env["NATS_SERVER"] = f"nats://127.0.0.1:{free_port()}"
    router(*off)
    assert overlap(cluster.frontend(workers, *NATS, *off), 1) == 0


def consumers(cluster: Cluster) -> list[str]:
    """The readers of the component's stream."""

    async def look() -> list[str]:
        import nats  # noqa: PLC0415

        client = await nats.connect(cluster.env["NATS_SERVER"])
        try:
            found = await client.jetstream().consumers_info(stream_name("ns", "backend"))
            return [one.name for one in found]
        finally:
            await client.close()

    return asyncio.run(look())


def test_what_is_missing_is_named(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="--event-plane nats needs --endpoint"):
        RouterService(event_plane="nats")
    flags = ("--port", "0", "--endpoint", "ns.backend.generate", *NATS)
    env = {**cluster.env, "NATS_SERVER": f"nats://127.0.0.1:{free_port()}"}
    with closing(Process("kvflash.router", *flags, env=env)) as process:
        assert process.popen.wait(30) == 2
        until(lambda: process.errors, "what it says")
    assert [line for line in process.errors if "nats-server -js" in line and "NATS_SERVER" in line]
    assert not any("Traceback" in line for line in process.errors)


def test_on_sockets_it_says_what_a_worker_in_a_stream_needs(cluster: Cluster) -> None:
    workers = cluster.workers(*NATS, count=1)
    one = Router(cluster)
    until(lambda: one.workers() == set(workers.ids), "the worker")
    until(
        lambda: any("start the router with --event-plane nats" in e for e in one.process.errors),
        "the hint",
    )
