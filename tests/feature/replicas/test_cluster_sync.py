"""Frontends that share workers count each other's requests: over ZMQ without any server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from service import Process, until
from support_cluster import BLOCK, REMOTE, Cluster, active_blocks, body, hold
from support_frontend import FrontendProcess, Mocker

SYNC = "--router-replica-sync"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    env = {"KVFLASH_DISCOVERY": "file", "KVFLASH_DISCOVERY_DIR": str(tmp_path / "keys")}
    with Cluster(env) as made:
        yield made


def test_load_of_one_is_seen_by_the_other_and_by_a_late_one_and_goes_when_it_ends(
    cluster: Cluster,
) -> None:
    workers = cluster.workers()
    one, two = cluster.frontend(workers, SYNC), cluster.frontend(workers, SYNC)
    streams = [hold(one, family) for family in (1, 2, 3)]
    busy = streams[0].response.headers["x-kvflash-worker"]
    until(lambda: two.metric(REMOTE) == 3, "the other's requests")
    assert active_blocks(two) == active_blocks(one) == 3 * 8
    # Three requests on two workers: the next one goes to the one that has fewer.
    load = {one["worker"]: one["active_requests"] for one in two.explain(body(9))["candidates"]}
    assert sorted(load.values()) == [1, 2], busy
    assert two.explain(body(9))["worker"] == min(load, key=lambda name: load[name])
    assert two.metric("kvflash_worker_busy") == 0

    late = cluster.frontend(workers, SYNC)
    until(lambda: late.metric(REMOTE) == 3, "the late one to hear of them")
    assert active_blocks(late) == 3 * 8
    candidates = late.explain(body(9))["candidates"]
    # Its own prompt at each: those of the others are prefilled.
    assert sum(one["prefill_tokens"] for one in candidates) == 2 * (8 * BLOCK + 1)

    for stream in streams:
        stream.hang_up()
    for frontend in (one, two, late):
        until(lambda frontend=frontend: active_blocks(frontend) == 0, "the load to be gone")
        # Told twice a second.
        until(lambda frontend=frontend: frontend.metric(REMOTE) == 0, "the figure to follow")


def test_the_load_of_a_killed_router_goes_at_once(cluster: Cluster) -> None:
    workers = cluster.workers()
    one, two = cluster.frontend(workers, SYNC), cluster.frontend(workers, SYNC)
    stream, own = hold(one, 1), hold(two, 2)
    until(lambda: active_blocks(two) == 16, "the other's request")
    one.process.kill()
    until(lambda: active_blocks(two) == 8, "the dead router's load to go")
    for call in (stream, own):
        call.hang_up()
    until(lambda: active_blocks(two) == 0, "the rest to go")


def test_without_the_flag_routers_know_their_own_load_only(cluster: Cluster) -> None:
    workers = cluster.workers()
    one, two, shy = (
        cluster.frontend(workers, SYNC),
        cluster.frontend(workers, SYNC),
        cluster.frontend(workers),
    )
    stream = hold(one, 1)
    until(lambda: active_blocks(two) == 8, "the other's request")
    assert active_blocks(shy) == 0
    stream.hang_up()


def test_frontends_with_the_same_workers_from_flags_share_their_requests(tmp_path: Path) -> None:
    env = {"KVFLASH_DISCOVERY_DIR": str(tmp_path / "keys")}
    flags = ("--discovery", "file", SYNC)
    with ExitStack() as open_:
        start = open_.enter_context
        first, second, third = (start(Mocker("--speedup-ratio", "10")) for _ in range(3))
        same = [f for mocker in (first, second) for f in ("--worker", mocker.spec())]
        others = [f for mocker in (first, third) for f in ("--worker", mocker.spec())]
        one, two, stranger = (
            start(FrontendProcess(*flags, *workers, env=env)) for workers in (same, same, others)
        )
        for frontend in (one, two, stranger):
            frontend.wait_healthy(1, 2)
        stream = hold(one, 1)
        until(lambda: two.metric(REMOTE) == 1, "the other's request")
        assert active_blocks(two) == active_blocks(one) > 0
        # Its worker 2 is another one.
        assert stranger.metric(REMOTE) == 0
        stream.hang_up()
        until(lambda: active_blocks(two) == 0, "the load to be gone")


def test_without_discovery_one_line_says_what_replicas_need(tmp_path: Path) -> None:
    with closing(Process("kvflash.frontend", "--worker", "http://127.0.0.1:9", SYNC)) as process:
        assert process.popen.wait(30) == 2
        needs = "--router-replica-sync needs --discovery: replicas find each"
        # The engine that does not answer may be logged behind it.
        until(lambda: any(needs in line for line in process.errors), "what it needs")
