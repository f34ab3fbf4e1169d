"""Frontends' cache state survives them: in JetStream, and in the workers' local indexes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ports import free_port
from servers import EtcdServer, NatsServer
from service import Process, until
from support_cluster import MODEL, Cluster, body, overlap, wait_known

NATS = ("--event-plane", "nats")
LABEL = 'component="ns.backend"'


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[NatsServer, EtcdServer]]:
    folders = [tmp_path / "nats", tmp_path / "etcd"]
    for folder in folders:
        folder.mkdir()
    nats = NatsServer(folders[0])
    try:
        etcd = EtcdServer(folders[1])
        yield nats, etcd
        etcd.close()
    finally:
        nats.close()


@pytest.fixture
def cluster(servers: tuple[NatsServer, EtcdServer]) -> Iterator[Cluster]:
    nats, etcd = servers
    env = {"KVFLASH_DISCOVERY": "etcd", "ETCD_ENDPOINTS": etcd.url, "NATS_SERVER": nats.url}
    with Cluster(env) as made:
        yield made


def test_a_third_frontend_knows_every_prefix_after_two_were_killed(cluster: Cluster) -> None:
    workers = cluster.workers(*NATS)
    flags = (*NATS, "--router-replica-sync", "--router-snapshot-threshold", "5")
    one, two = cluster.frontend(workers, *flags), cluster.frontend(workers, *flags)
    for family in range(1, 13):
        assert overlap(one if family % 2 else two, family) == 0, "nobody has seen it"
    for frontend in (one, two):
        for family in range(1, 13):
            wait_known(frontend, family)
    until(
        lambda: (
            one.metric(f"kvflash_state_snapshots_total{{{LABEL}}}")
            + two.metric(f"kvflash_state_snapshots_total{{{LABEL}}}")
        ),
        "a snapshot",
    )
    for frontend in (one, two):
        frontend.process.kill()
    third = cluster.frontend(workers, *flags)
    # Its first requests: it knows only the snapshot and the stream.
    assert [overlap(third, family) for family in range(1, 13)] == [8] * 12
    # Figures are updated twice a second.
    until(lambda: third.metric(f"kvflash_state_is_complete{{{LABEL}}}") == 1, "the figures")
    assert third.metric(f"kvflash_state_restores_total{{{LABEL}}}") == 1
    assert third.metric(f"kvflash_state_lost_messages_total{{{LABEL}}}") == 0


def test_what_is_known_outlives_a_restart_of_all_but_the_workers(
    cluster: Cluster, servers: tuple[NatsServer, EtcdServer]
) -> None:
    workers = cluster.workers(*NATS)
    one = cluster.frontend(workers, *NATS)
    for family in range(1, 5):
        assert overlap(one, family) == 0
        wait_known(one, family)
    one.process.terminate()
    for server in servers:
        server.kill()
        server.start()
    again = cluster.frontend(workers, *NATS)
    assert [overlap(again, family) for family in range(1, 5)] == [8] * 4
    # And what comes from now on is known as well.
    assert overlap(again, 5) == 0
    wait_known(again, 5)

    def warnings() -> list[str]:
        return list(again.http.get("/health")["warnings"])

    assert warnings() == []
    servers[0].kill()
    until(lambda: "NATS (NATS_SERVER) can't be reached" in str(warnings()), "the warning")
    servers[0].start()
    until(lambda: warnings() == [], "the warning's end")


def test_a_worker_that_left_is_forgotten_by_those_who_come_later_too(cluster: Cluster) -> None:
    gone, stays = cluster.workers(*NATS, count=1), cluster.workers(*NATS, count=1)
    one = cluster.frontend(gone, *NATS)
    one.wait_healthy(*stays.ids)
    holder = {}
    for family in range(1, 7):
        overlap(one, family)
        wait_known(one, family)
        held = one.overlaps(body(family))
        holder[family] = max(held, key=lambda worker, held=held: held[worker])
    assert set(holder.values()) == {gone.ids[0], stays.ids[0]}
    gone.process.kill()
    until(lambda: gone.ids[0] not in one.workers(), "the worker to be gone", deadline_s=40)
    publishers = 'kvflash_index_workers{model="m",tenant="default"}'
    until(lambda: one.metric(publishers) == 1, "its events to be let go")
    late = cluster.frontend(stays, *NATS)
    wanted = 8 * list(holder.values()).count(stays.ids[0])
    for frontend in (one, late):
        assert frontend.metric('kvflash_index_blocks{model="m",tenant="default"}') == wanted
        for family, worker in holder.items():
            known = 8 if worker == stays.ids[0] else 0
            assert frontend.overlaps(body(family)) == {stays.ids[0]: known}


def test_states_are_reset_at_all_replicas(cluster: Cluster) -> None:
    workers = cluster.workers(*NATS)
    one = cluster.frontend(workers, *NATS)
    overlap(one, 1)
    wait_known(one, 1)
    two = cluster.frontend(workers, *NATS, "--router-reset-states")
    assert overlap(two, 1) == 0
    until(lambda: one.metric(f"kvflash_state_resets_total{{{LABEL}}}") == 1, "the other to notice")


def test_an_index_of_the_workers_own_tells_a_new_frontend_all(cluster: Cluster) -> None:
    workers = cluster.workers(*NATS, "--enable-local-indexer")
    one = cluster.frontend(workers, *NATS)
    for family in range(1, 5):
        assert overlap(one, family) == 0
        wait_known(one, family)
    one.process.kill()
    two = cluster.frontend(workers, *NATS)
    for family in range(1, 5):
        wait_known(two, family)
    assert [overlap(two, family) for family in range(1, 5)] == [8] * 4


def test_a_server_that_is_missing_is_named_with_what_to_do(tmp_path: Path) -> None:
    env = {
        "KVFLASH_DISCOVERY_DIR": str(tmp_path),
        "NATS_SERVER": f"nats://127.0.0.1:{free_port()}",
    }
    for module, flags in (
        ("kvflash.frontend", ("--port", "0", "--discovery", "file")),
        ("kvflash.mocker", ("--endpoint", "ns.backend.generate", "--model-name", MODEL)),
    ):
        process = Process(module, *flags, *NATS, env=env)
        try:
            assert process.popen.wait(30) != 0
            until(lambda process=process: process.errors, "what it says")
        finally:
            process.close()
        said = [line for line in process.errors if "nats-server -js" in line]
        assert len(said) == 1, process.errors
        assert "NATS_SERVER" in said[0] and "--event-plane zmq" in said[0]
        assert not any("Traceback" in line for line in process.errors)


def test_a_frontend_on_sockets_says_what_a_worker_in_a_stream_needs(cluster: Cluster) -> None:
    workers = cluster.workers(*NATS, count=1)
    one = cluster.frontend(workers)
    assert overlap(one, 1) == 0
    until(
        lambda: any("start the router with --event-plane nats" in e for e in one.process.errors),
        "the hint",
    )


def test_health_tells_of_events_in_a_stream_only_what_is_wrong(cluster: Cluster) -> None:
    workers = cluster.workers(*NATS, count=1)
    (worker,) = workers.ids
    # It has stored nothing yet, and need not have. It announces its events once it is registered.
    listening, deaf = cluster.frontend(workers, *NATS).http, cluster.frontend(workers).http
    until(lambda: listening.get("/health")["warnings"] == [], "the events' announcement")
    said = f"worker {worker}: its events are at jetstream://"
    until(lambda: said in str(deaf.get("/health")["warnings"]), "the warning")
    (lost,) = deaf.get("/health")["warnings"]
    assert lost.startswith(said), lost
    assert "which needs --event-plane nats on this frontend" in lost
