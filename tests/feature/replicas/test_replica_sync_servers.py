"""Replica sync on real networks: NATS Core with etcd, and ZMQ without any server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvflash._core import RouterCore
from kvflash.discovery import open_discovery
from kvflash.routing.replica_sync import ReplicaSync
from kvflash.routing.sync_service import ReplicaSyncService
from kvflash.servers import NatsSettings
from kvflash.transport import names
from kvflash.transport.channel import ZmqChannel
from kvflash.transport.nats_channel import NatsChannel
from kvflash.transport.nats_connection import connect
from servers import EtcdServer, NatsServer
from service import VECTORS, needs_ipv6, until
from support_found import join

LONGEST_HASH = (1 << 64) - 1


class Load:
    """Active requests of other routers."""

    def __init__(self) -> None:
        self.requests: dict[tuple[int, str], tuple[tuple[int, int], bool]] = {}

    def remote_add(  # noqa: PLR0917 - called with positions by the core
        self,
        router_id: int,
        request_id: str,
        worker: tuple[int, int],
        hashes: Sequence[int] | None,
        isl: int,
        overlap: int,
    ) -> None:
        self.requests[router_id, request_id] = (worker, False)

    def remote_prefilled(self, router_id: int, request_id: str) -> None:
        worker, _ = self.requests[router_id, request_id]
        self.requests[router_id, request_id] = (worker, True)

    def remote_free(self, router_id: int, request_id: str) -> None:
        del self.requests[router_id, request_id]

    def remote_drop_router(self, router_id: int) -> None:
        for key in [key for key in self.requests if key[0] == router_id]:
            del self.requests[key]

    def remote_heard(self, router_id: int) -> None:
        pass


@pytest.fixture(params=["nats", "127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def router(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[ReplicaSyncService, Load]]]:
    """Start routers that find each other."""
    started: list[ReplicaSyncService] = []
    nats_server = etcd = None
    if request.param == "nats":
        nats_server, etcd = NatsServer(tmp_path), EtcdServer(tmp_path)
        monkeypatch.setenv("ETCD_ENDPOINTS", etcd.url)

    def discovery() -> Any:
        return open_discovery("file" if etcd is None else "etcd", folder=tmp_path / "keys")

    async def channel(_discovery: Any) -> Any:
        if nats_server is None:
            return ZmqChannel(request.param)
        client = await connect(NatsSettings(servers=(nats_server.url,)), name="test")
        return NatsChannel(client, names.replica_sync_subject("ns", "backend"))

    def start() -> tuple[ReplicaSyncService, Load]:
        load = Load()
        service = ReplicaSyncService(
            "ns", "backend", load, open_discovery=discovery, open_channel=channel
        )
        service.start()
        started.append(service)
        return service, load

    yield start
    for service in started:
        service.stop()
    for server in (nats_server, etcd):
        if server is not None:
            server.close()


def test_two_routers_converge_a_late_one_catches_up_and_a_dead_one_is_dropped(router) -> None:
    (one, load_one), (two, load_two) = router(), router()
    one.sync.add("a", (1, 0), [1, 2], 32, 1)
    two.sync.add("b", (2, 0), None, 16, 0)
    one.sync.mark_prefill_completed("a")
    a, b = (one.sync.router_id, "a"), (two.sync.router_id, "b")
    until(lambda: load_two.requests == {a: ((1, 0), True)}, "the first router's request")
    until(lambda: load_one.requests == {b: ((2, 0), False)}, "the second router's request")
    three, load_three = router()
    wanted = {a: ((1, 0), True), b: ((2, 0), False)}
    until(lambda: load_three.requests == wanted, "the late router to catch up")
    until(lambda: one.sync.digests() == two.sync.digests() == three.sync.digests(), "digests")
    one.sync.free("a")
    until(lambda: load_two.requests == {} and load_three.requests == {b: wanted[b]}, "the end")
    two.stop()
    until(lambda: load_one.requests == load_three.requests == {}, "the dead router's load to go")


def test_a_late_router_takes_a_state_that_no_single_message_could_hold(router) -> None:
    one, _ = router()
    for at in range(150):
        one.sync.add(f"r{at}", (1, 0), [LONGEST_HASH] * 512, 8_192, 0)
    # Longer than a prompt of a million tokens.
    one.sync.add("longest", (1, 0), [LONGEST_HASH] * 70_000, 1_120_000, 0)
    two, load_two = router()
    until(lambda: len(load_two.requests) == 151, "the whole state")
    until(lambda: one.sync.digests() == two.sync.digests(), "digests")


def test_what_no_channel_takes_keeps_nothing_else_back(
    router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvflash.routing.replica_sync.HASHES_MAX", 60_000)
    (one, _), (two, load_two) = router(), router()
    # What is sent before the other listens would be in the state only, which is too long, too.
    until(lambda: len(one.sync.digests()) == len(two.sync.digests()) == 2, "both to be heard")
    one.sync.add("too long for NATS", (1, 0), [LONGEST_HASH] * 60_000, 960_000, 0)
    one.sync.add("behind it", (1, 0), [1], 16, 0)
    until(lambda: (one.sync.router_id, "behind it") in load_two.requests, "the one behind it")


def test_what_nobody_thought_of_does_not_end_it(router) -> None:
    (one, _), (two, load) = router(), router()
    add, failures = load.remote_add, [OSError("no space left on device")]

    def fail_once(*args: Any) -> None:
        if failures:
            raise failures.pop()
        add(*args)

    load.remote_add = fail_once
    until(lambda: len(one.sync.digests()) == len(two.sync.digests()) == 2, "both to be heard")
    one.sync.add("a", (1, 0), None, 16, 0)
    until(lambda: not failures, "the failure")
    one.sync.add("b", (1, 0), None, 16, 0)
    until(lambda: (one.sync.router_id, "b") in load.requests, "the next one")


def test_a_router_that_is_never_listed_is_dropped_in_a_quiet_fleet(
    router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvflash.routing.replica_sync._UNLISTED_S", 0.3)
    (one, load), (two, _) = router(), router()
    until(lambda: len(one.sync.digests()) == 2, "the other router")
    stranger = ReplicaSync(7, Load())
    stranger.add("r", (1, 0), None, 4, 0)
    for data in stranger.outgoing(0.0):
        one.sync.received(data, time.monotonic())
    assert (7, "r") in load.requests
    until(lambda: not load.requests, "the router to be dropped")
    assert 7 not in one.sync.digests()
    until(lambda: set(one.sync.digests()) == {one.sync.router_id, two.sync.router_id}, "the rest")


def test_messages_of_routers_beyond_the_limit_are_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvflash.routing.replica_sync.ROUTERS_MAX", 2)
    load = Load()
    router = ReplicaSync(1, load)
    for router_id in (2, 3, 4, 5):
        other = ReplicaSync(router_id, Load())
        other.add("r", (7, 0), None, 40, 1)
        for data in other.outgoing(0.0):
            router.received(data, 0.0)
    assert set(load.requests) == {(2, "r"), (3, "r")}
    # Of two routers: the request for states, the event and the digest.
    assert router.counts["ignored_messages"] == 6
    assert caplog.text.count("router 4 is ignored") == 1
    assert len(caplog.records) == 1


def test_events_have_the_published_form() -> None:
    case = json.loads((VECTORS / "replica_sync_cases.json").read_text())[0]
    events = case["input"]["events"]
    load = Load()
    other = ReplicaSync(1, load)
    for event in events[:1]:
        other.received(json.dumps(event).encode(), 0.0)
    assert load.requests == {(9, "r"): ((1, 0), False)}
    for event in events[1:]:
        other.received(json.dumps(event).encode(), 0.0)
    assert load.requests == {}
    assert case["expected"] == {"own_router_id_ignored": True}
    own = ReplicaSync(9, load)
    own.received(json.dumps(events[0]).encode(), 0.0)
    assert load.requests == {}
    own.add("r", (1, 0), [1, 2], 32, 1)
    own.mark_prefill_completed("r")
    own.free("r")
    sent = [json.loads(data) for data in own.outgoing(0.0)]
    told = [{k: v for k, v in one.items() if k != "sequence"} for one in sent if "worker" in one]
    published = [{**event, "lora_name": None} for event in events]
    assert told == published
    assert own.counts["malformed"] == 0
    own.received(b"[]", 0.0)
    own.received(b'{"router_id": 1, "data": {"State": 7}, "sequence": 1}', 0.0)
    assert own.counts["malformed"] == 2


def test_requests_at_a_worker_that_comes_later_count_once_it_is_there() -> None:
    core = RouterCore(block_size=16)
    router = ReplicaSync(1, core.bookings)
    other = ReplicaSync(2, Load())
    other.add("early", (7, 0), [1, 2], 40, 1)
    other.mark_prefill_completed("early")
    other.add("late", (7, 0), None, 40, 1)
    for data in other.outgoing(0.0):
        router.received(data, 0.0)
    assert core.totals()["requests"] == 0
    assert core.bookings.stats()["remote_requests"] == 0
    join(core, [7])
    router.worker_joined(8)
    assert core.totals()["requests"] == 0
    router.worker_joined(7)
    totals = core.totals()
    assert (totals["requests"], totals["blocks"], totals["prefill_tokens"]) == (2, 2, 24)
    router.worker_joined(7)
    assert core.totals() == totals
    other.free("early")
    for data in other.outgoing(0.0):
        router.received(data, 0.0)
    assert core.totals()["requests"] == 1
    router.listed({2}, 0.0)
    router.listed(set(), 0.0)
    assert core.totals()["requests"] == 0
