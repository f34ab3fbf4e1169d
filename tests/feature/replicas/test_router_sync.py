"""Standalone routers of the same workers count each other's reservations."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from servers import EtcdServer, NatsServer
from service import Http, Process, until
from support_cluster import BLOCK, MODEL, REMOTE, Cluster, prompt

SYNC = "--router-replica-sync"
ENDPOINT = ("--endpoint", "ns.backend.generate")
#: Where routers find each other, and how they talk.
PLANES = ["file-zmq", "etcd-nats"]


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Of the discovery and the plane that a test's parameter names; else of a folder."""
    with ExitStack() as servers:
        env = {"KVFLASH_DISCOVERY": "file", "KVFLASH_DISCOVERY_DIR": str(tmp_path / "keys")}
        if getattr(request, "param", PLANES[0]) == "etcd-nats":
            made: list[NatsServer | EtcdServer] = []
            for kind in (NatsServer, EtcdServer):
                folder = tmp_path / kind.__name__
                folder.mkdir()
                made.append(servers.enter_context(closing(kind(folder))))
            env = {"KVFLASH_DISCOVERY": "etcd", "KVFLASH_EVENT_PLANE": "nats"}
            env |= {"NATS_SERVER": made[0].url, "ETCD_ENDPOINTS": made[1].url}
        with Cluster(env) as cluster:
            yield cluster


class Router:
    """A router process."""

    def __init__(self, cluster: Cluster, *flags: str) -> None:
        process = Process("kvflash.router", "--port", "0", *flags, env=cluster.env)
        self.process = cluster.open.enter_context(closing(process))
        self.http = cluster.open.enter_context(closing(Http(process.ready()["url"])))

    def workers(self) -> set[int]:
        return {worker["worker_id"] for worker in self.http.get("/workers")}

    def register(self, *worker_ids: int, host: str = "gpu", model: str = MODEL) -> None:
        for worker_id in worker_ids:
            body = {"worker_id": worker_id, "model_name": model, "block_size": BLOCK}
            self.http.post("/workers", {**body, "url": f"http://{host}-{worker_id}"}, expect=201)

    def reserve(self, name: str, family: int, **more: Any) -> int:
        body = {"model_name": MODEL, "token_ids": prompt(family), "request_id": name, **more}
        return int(self.http.post("/reserve", body)["worker_id"])

    def free(self, name: str) -> None:
        assert self.http.post("/free", {"request_id": name})["freed"]

    def loads(self, model: str = MODEL) -> dict[int, tuple[int, int, int]]:
        """Requests, and blocks and tokens to prefill with one more of a single token, by worker."""
        answer = self.http.post("/potential_loads", {"model_name": model, "isl_tokens": 1})
        return {
            load["worker_id"]: (
                load["active_requests"],
                load["potential_decode_blocks"],
                load["potential_prefill_tokens"],
            )
            for load in answer["loads"]
        }

    def requests(self, model: str = MODEL) -> int:
        return sum(requests for requests, _, _ in self.loads(model).values())

    def metric(self, name: str) -> float:
        status, text, _ = self.http.call("GET", "/metrics")
        assert status == 200
        lines = [line.split() for line in text.decode().splitlines()]
        return sum(float(line[1]) for line in lines if line[0] == name)

    def hears(self, peers: int) -> bool:
        return self.metric("kvflash_sync_peers") == peers


def meet(*routers: Router) -> None:
    for router in routers:
        until(lambda router=router: router.hears(len(routers) - 1), "the others to be heard")


@pytest.mark.parametrize("cluster", PLANES, indirect=True)
def test_a_reservation_at_one_counts_at_the_other_and_at_a_late_one_until_it_is_freed(
    cluster: Cluster,
) -> None:
    workers = cluster.workers()
    one, two = Router(cluster, SYNC, *ENDPOINT), Router(cluster, SYNC, *ENDPOINT)
    for router in (one, two):
        until(lambda router=router: router.workers() == set(workers.ids), "the workers")
    meet(one, two)
    idle = one.loads()
    assert [requests for requests, _, _ in idle.values()] == [0, 0]
    busy = one.reserve("a", 1)
    until(lambda: two.loads() == one.loads(), "the other's reservation")
    assert two.loads()[busy] == (1, idle[busy][1] + 8, idle[busy][2] + 8 * BLOCK + 1)
    one.http.post("/prefill_complete", {"request_id": "a"})
    until(lambda: two.loads()[busy] == (1, idle[busy][1] + 8, idle[busy][2]), "its first token")
    # It counts in decisions, and names are each router's own.
    free = two.reserve("a", 2)
    assert {busy, free} == set(workers.ids)
    until(lambda: one.requests() == 2, "the answer")

    late = Router(cluster, SYNC, *ENDPOINT)
    until(lambda: late.workers() == set(workers.ids), "the workers")
    until(lambda: late.loads() == one.loads(), "the late one to hear of both")
    until(lambda: late.metric(REMOTE) == 2, "the figure to follow")
    one.free("a")
    until(lambda: two.requests() == late.requests() == 1, "the first one to be gone")
    assert two.loads()[busy] == idle[busy]
    two.free("a")
    for router in (one, late):
        until(lambda router=router: router.loads() == idle, "nothing to be left")


@pytest.mark.parametrize("cluster", PLANES, indirect=True)
def test_the_reservations_of_a_killed_router_go_with_its_lease(cluster: Cluster) -> None:
    workers = cluster.workers()
    one, two = Router(cluster, SYNC, *ENDPOINT), Router(cluster, SYNC, *ENDPOINT)
    for router in (one, two):
        until(lambda router=router: router.workers() == set(workers.ids), "the workers")
    meet(one, two)
    one.reserve("a", 1)
    two.reserve("b", 2)
    until(lambda: two.requests() == 2, "the other's reservation")
    one.process.kill()
    until(lambda: two.requests() == 1, "the dead router's load to go")
    assert two.http.post("/touch", {"request_id": "b"}) == {"status": "ok"}


@pytest.mark.parametrize("cluster", PLANES, indirect=True)
def test_workers_that_gateways_register_alike_are_the_same(cluster: Cluster) -> None:
    one, two = Router(cluster, SYNC), Router(cluster, SYNC)
    for router in (one, two):
        router.register(1, 2)
    # Requests sent before their worker is shared are shared later, if still active.
    one.reserve("z", 9)
    busy = one.reserve("a", 1)
    one.http.post("/prefill_complete", {"request_id": "a"})
    one.free("z")
    until(lambda: two.requests() == 1, "the other's reservation")
    until(lambda: two.loads() == one.loads(), "its first token")
    assert two.reserve("b", 2) != busy
    until(lambda: one.requests() == 2, "the answer")

    # One that comes late counts what was sent there before.
    for router in (one, two):
        router.register(3)
    assert one.reserve("c", 3, worker_id=3) == 3
    late = Router(cluster, SYNC)
    late.register(2, 3)
    until(lambda: late.requests() == 2, "those of its workers")
    late.register(1)
    until(lambda: late.loads() == one.loads(), "those of the worker that came last")

    # A worker that comes again has nothing of before at its own router, all of the others'.
    assert two.http.call("DELETE", f"/workers/{busy}")[0] == 200
    two.register(busy)
    until(lambda: two.loads()[busy] == one.loads()[busy], "what the other has sent there")
    for router, name in ((one, "a"), (two, "b"), (one, "c")):
        router.http.post("/free", {"request_id": name})
    for router in (one, two, late):
        until(lambda router=router: router.requests() == 0, "nothing to be left")


def test_the_reservations_of_a_killed_router_go_from_registered_workers_too(
    cluster: Cluster,
) -> None:
    flags = (SYNC, "--worker", "http://gpu-1:8000", "--worker", "http://gpu-2:8000")
    flags = (*flags, "--model-name", MODEL, "--router-block-size", str(BLOCK))
    one, two = Router(cluster, *flags), Router(cluster, *flags)
    one.reserve("a", 1)
    two.reserve("b", 2)
    until(lambda: two.requests() == one.requests() == 2, "each other's reservations")
    one.process.kill()
    until(lambda: two.requests() == 1, "the dead router's load to go")


def test_other_workers_under_the_same_numbers_are_others(cluster: Cluster) -> None:
    one, same, host, model = (Router(cluster, SYNC) for _ in range(4))
    shy = Router(cluster)
    for router in (one, same, shy):
        router.register(1)
    host.register(1, host="other")
    model.register(1, model="other")
    meet(one, same, host, model)
    one.reserve("a", 1)
    until(lambda: same.requests() == 1, "the other's reservation")
    assert (host.requests(), model.requests("other"), shy.requests()) == (0, 0, 0)


def test_sharing_over_nats_says_what_it_needs(tmp_path: Path) -> None:
    env = {"KVFLASH_DISCOVERY_DIR": str(tmp_path), "NATS_SERVER": "nats://127.0.0.1:9"}
    process = Process("kvflash.router", "--port", "0", SYNC, "--event-plane", "nats", env=env)
    with closing(process):
        assert process.popen.wait(30) == 2
        until(lambda: process.errors, "what it says")
    assert any("nats-server -js" in line for line in process.errors), os.linesep.join(
        process.errors
    )
