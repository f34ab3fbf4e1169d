"""A worker that loses its lease and comes back under its old number, with all that it holds."""

from __future__ import annotations

import base64
import json
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from servers import EtcdServer, NatsServer
from service import Http, Process, until
from support_cluster import MODEL, Cluster, Workers, overlap, prompt, wait_known

NATS = ("--event-plane", "nats")
FAMILIES = range(1, 5)
#: Events in the stream, and from indexes of the workers' own.
KINDS = pytest.mark.parametrize("kind", [(), ("--enable-local-indexer",)], ids=["stream", "index"])


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    folder = tmp_path / "etcd"
    folder.mkdir()
    with closing(EtcdServer(folder)) as made:
        yield made


@pytest.fixture
def cluster(etcd: EtcdServer, tmp_path: Path) -> Iterator[Cluster]:
    folder = tmp_path / "nats"
    folder.mkdir()
    with ExitStack() as stack:
        nats = stack.enter_context(closing(NatsServer(folder)))
        env = {"KVFLASH_DISCOVERY": "etcd", "ETCD_ENDPOINTS": etcd.url, "NATS_SERVER": nats.url}
        yield stack.enter_context(Cluster(env))


def ask_etcd(etcd: EtcdServer, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(f"{etcd.url}/v3/{path}", json.dumps(fields).encode())
    with urllib.request.urlopen(request, timeout=10) as answer:
        return dict(json.loads(answer.read()))


def end_lease(etcd: EtcdServer, worker: int) -> None:
    """Act like a lasting partition between a worker and etcd."""
    key, end = "v1/instances/ns/backend/generate/", "v1/instances/ns/backend/generate0"
    span = {"key": key, "range_end": end}
    rows = ask_etcd(
        etcd, "kv/range", {k: base64.b64encode(v.encode()).decode() for k, v in span.items()}
    )["kvs"]
    (lease,) = [
        row["lease"] for row in rows if base64.b64decode(row["key"]).decode() == f"{key}{worker}"
    ]
    ask_etcd(etcd, "lease/revoke", {"ID": lease})


def load_adapter(etcd: EtcdServer, worker: int) -> None:
    """Act like a worker that registers its model again, with an adapter."""
    name = base64.b64encode(f"v1/models/ns/backend/generate/{worker}".encode()).decode()
    (row,) = ask_etcd(etcd, "kv/range", {"key": name})["kvs"]
    card = json.loads(base64.b64decode(row["value"]))
    card["lora_names"] = ["adapter"]
    value = base64.b64encode(json.dumps(card).encode()).decode()
    ask_etcd(etcd, "kv/put", {"key": name, "value": value, "ignore_lease": True})


class Router:
    """A standalone router of the workers."""

    def __init__(self, cluster: Cluster) -> None:
        flags = ("--endpoint", "ns.backend.generate", "--router-predicted-ttl-secs", "0", *NATS)
        process = Process("kvflash.router", "--port", "0", *flags, env=cluster.env)
        self.process = cluster.open.enter_context(closing(process))
        self.http = cluster.open.enter_context(closing(Http(process.ready()["url"])))

    def workers(self) -> set[int]:
        return {worker["worker_id"] for worker in self.http.get("/workers")}

    def known(self, *families: int) -> list[int]:
        asked = ({"model_name": MODEL, "token_ids": prompt(family)} for family in families)
        return [int(self.http.post("/select", one)["overlap_blocks"]) for one in asked]


def leave_and_return(etcd: EtcdServer, workers: Workers, router: Router, *more: Any) -> None:
    """A process of one worker stands still, is taken for dead by everybody, and goes on."""
    (worker,) = workers.ids
    workers.process.popen.send_signal(signal.SIGSTOP)
    try:
        end_lease(etcd, worker)
        until(lambda: not router.workers(), "the router to take it for gone")
        for frontend in more:
            until(lambda frontend=frontend: not frontend.workers(), "the frontend to take it so")
    finally:
        workers.process.popen.send_signal(signal.SIGCONT)
    until(lambda: router.workers() == {worker}, "it to be back")
    for frontend in more:
        frontend.wait_healthy(worker)


@KINDS
def test_routers_know_what_a_worker_holds_that_was_taken_for_dead(
    etcd: EtcdServer, cluster: Cluster, kind: tuple[str, ...]
) -> None:
    workers = cluster.workers(*NATS, *kind, count=1)
    frontend, router = cluster.frontend(workers, *NATS), Router(cluster)
    until(lambda: router.workers() == set(workers.ids), "the worker")
    for family in FAMILIES:
        assert overlap(frontend, family) == 0
    held = [8] * len(FAMILIES)
    until(lambda: router.known(*FAMILIES) == held, "what the frontend sent")
    for _ in range(2):
        leave_and_return(etcd, workers, router, frontend)
        until(lambda: router.known(*FAMILIES) == held, "the router to know it again")
        for family in FAMILIES:
            wait_known(frontend, family)
    # And it is followed as before.
    assert overlap(frontend, 5) == 0
    until(lambda: router.known(5) == [8], "what came later")
    wait_known(frontend, 5)


@KINDS
def test_a_frontend_knows_what_a_worker_holds_that_changes_its_card(
    etcd: EtcdServer, cluster: Cluster, kind: tuple[str, ...]
) -> None:
    workers = cluster.workers(*NATS, *kind, count=1)
    frontend = cluster.frontend(workers, *NATS)
    for family in FAMILIES:
        assert overlap(frontend, family) == 0
        wait_known(frontend, family)
    load_adapter(etcd, *workers.ids)
    until(
        lambda: any("adapter" in one["serves"] for one in frontend.workers().values()),
        "the adapter",
    )
    for family in FAMILIES:
        wait_known(frontend, family)
