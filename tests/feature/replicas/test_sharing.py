"""Bookings that are made while a router is still looking for its replicas."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvflash._core import Router
from kvflash.cluster_flags import ClusterFlags
from kvflash.discovery import (
    FileDiscovery,
    Lease,
    MemoryDiscovery,
    announcer,
    etcd,
    open_discovery,
)
from kvflash.discovery.base import Discovery
from kvflash.errors import TransportError
from kvflash.routing import sync_service
from kvflash.routing.cluster import Cluster
from kvflash.routing.sharing import Sharing
from kvflash.routing.sync_service import ReplicaSyncService
from kvflash.transport import zmq_socket
from kvflash.transport.channel import ZmqChannel
from service import DEADLINE_S, until
from wire import Wire

COMPONENT = ("ns", "backend")


def test_what_is_booked_before_it_is_connected_is_told_when_it_is(tmp_path) -> None:
    """Requests that come before discovery has answered are shared like all others."""
    is_there = threading.Event()

    def discovery() -> Discovery:
        assert is_there.wait(30)
        return open_discovery("file", folder=tmp_path)

    router = Router()
    sharing = Sharing(router.bookings, open_discovery=discovery)

    def post(path: str, **body: Any) -> None:
        router.call("POST", path, json.dumps({"model_name": "m", **body}).encode())

    def book(name: str) -> None:
        post("/reserve", isl_tokens=100, request_id=name)

    post("/workers", worker_id=7, block_size=4)
    book("before it looks")
    sharing.worker_joined(COMPONENT, 7)
    try:
        sharing.start()
        until(lambda: router.bookings.stats()["waiting"] == 0, "the booking to be taken")
        book("while it looks")
        is_there.set()
        until(lambda: sharing.stats()["sent_events_total"] == 2, "both to be told")
    finally:
        is_there.set()
        sharing.stop()


class WithoutEndpoint(ZmqChannel):
    """A channel over a server, as of NATS: it announces no endpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.endpoint = None


async def hear(one: ZmqChannel, other: ZmqChannel) -> asyncio.Task[None]:
    """Open one, which goes on hearing what the other sends."""
    heard = asyncio.Event()
    await one.open(lambda _: heard.set())
    hearing = asyncio.create_task(one.hear())
    while not heard.is_set():
        await other.send(b"a message")
        await asyncio.sleep(0.01)
    return hearing


def test_a_router_with_a_malformed_endpoint_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        one, other = ZmqChannel(), ZmqChannel()
        assert other.endpoint is not None
        try:
            one.follow({"tcp://nowhere"})
            one.follow({"tcp://nowhere", other.endpoint})
            assert caplog.text.count("can't connect to the router at tcp://nowhere") == 1
            hearing = await hear(one, other)
            hearing.cancel()
            one.follow(set())
        finally:
            await one.close()
            await other.close()

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))


def test_a_connection_to_a_router_that_is_silently_dead_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zmq_socket, "_HEARTBEAT_MS", 50)

    async def scenario() -> None:
        one, other = ZmqChannel(), ZmqChannel()
        wire = Wire(str(other.endpoint).removeprefix("tcp://"))
        try:
            one.follow({f"tcp://{wire.address}"})
            hearing = await hear(one, other)
            wire.freeze()
            await asyncio.to_thread(until, lambda: wire.accepted > 1, "another connection")
            hearing.cancel()
        finally:
            await one.close()
            await other.close()
            wire.close()

    asyncio.run(scenario())


def test_routers_on_other_planes_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def over(channel: type[ZmqChannel], _discovery: Discovery) -> ZmqChannel:
        return channel()

    routers = [
        ReplicaSyncService(
            *COMPONENT,
            Router().bookings,
            open_discovery=lambda: open_discovery("file", folder=tmp_path),
            open_channel=partial(over, channel),
        )
        for channel in (ZmqChannel, ZmqChannel, WithoutEndpoint)
    ]
    try:
        for router in routers:
            router.start()
        until(lambda: caplog.text.count("but this one uses zmq") == 2, "both to warn")
        until(lambda: "over zmq, but this one uses nats" in caplog.text, "the third to warn")
        told = "replica sync: 1 router(s) of ns/backend share load over nats, but this one uses zmq"
        assert told in caplog.text
    finally:
        for router in routers:
            router.stop()
    assert caplog.text.count("but this one uses") == 3


def test_events_do_not_wait_while_no_peer_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_service, "_CONNECT_S", 0.01)

    def away() -> Discovery:
        raise TransportError("it is away")

    sharing = Sharing(Router().bookings, open_discovery=away)
    sharing.worker_joined(COMPONENT, 7)
    (service,) = sharing._services.values()
    try:
        service.sync._tell("r", (7, 0), "Free")
        until(lambda: not service.sync._outbox, "the event to be dropped")
        assert service.sync.counts["dropped_events"] == 1
    finally:
        service.stop()


class Full(FileDiscovery):
    """Grants leases, and accepts no key until there is room."""

    attempts, has_room = 0, False

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> None:
        self.attempts += 1
        if not self.has_room:
            raise TransportError("there is no room")
        await super().put(key, value, lease)


def test_a_router_that_cannot_be_announced_keeps_one_lease(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def channel(_discovery: Discovery) -> ZmqChannel:
        return ZmqChannel()

    monkeypatch.setattr(announcer, "PAUSE_S", (0.01, 0.01))
    full = Full(tmp_path)
    router = ReplicaSyncService(
        *COMPONENT, Router().bookings, open_discovery=lambda: full, open_channel=channel
    )
    router.start()
    try:
        until(lambda: full.attempts > 2, "further attempts")
        assert len(full._leases) == 1
        assert caplog.text.count("there is no room") == 1
        key = f"v1/replica_sync/ns/backend/{router.sync.router_id}"
        told = f"the announcements of the router of replica sync in ns/backend: {key}: there is"
        assert told in caplog.text
        full.has_room = True
        until(lambda: router.sync._listed == {router.sync.router_id}, "it to be listed")
        assert len(full._leases) == 1
    finally:
        router.stop()


def test_a_router_behind_a_gateway_announces_the_address_that_others_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No interface of this machine has this address.
    monkeypatch.setenv("KVFLASH_HOST", "198.51.100.7")
    sharing = Sharing(
        Router().bookings, open_discovery=lambda: open_discovery("file", folder=tmp_path)
    )

    async def announced() -> list[str]:
        discovery = open_discovery("file", folder=tmp_path)
        values = (await discovery.get_prefix("v1/replica_sync/ns/backend/")).values()
        await discovery.close()
        return [json.loads(value)["endpoint"] for value in values]

    try:
        sharing.worker_joined(COMPONENT, 7)
        found = until(lambda: asyncio.run(announced()), "the announcement")
        assert found[0].startswith("tcp://198.51.100.7:")
    finally:
        sharing.stop()


def test_sharing_is_retried_after_any_error(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_service, "_CONNECT_S", 0.0)
    errors = [RuntimeError("unforeseen"), TransportError("it is away")]

    def discovery() -> Discovery:
        if errors:
            raise errors.pop()
        return MemoryDiscovery(is_shared=False)

    flags = ClusterFlags(router_replica_sync=True)
    made = Cluster(Router(), flags, open_discovery=discovery)
    with caplog.at_level(logging.DEBUG, sync_service.__name__):
        # Of a component with several workers one line is logged.
        for instance_id in (7, 8, 9):
            made.worker_joined(COMPONENT, instance_id)
        try:
            until(lambda: "requests of other routers are counted" in caplog.text, "the end")
        finally:
            made.stop()
    told = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.getMessage().split(": ")[2] for record in told] == [
        "it is away; trying again",
        "unforeseen; trying again",
    ]
    traces = [record for record in caplog.records if record.exc_info]
    assert {record.levelno for record in traces} == {logging.DEBUG}
    assert "RuntimeError: unforeseen" in caplog.text


def test_stopping_waits_briefly_for_a_discovery_that_hangs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No longer than etcd's discovery waits when it is closed.
    assert sync_service._LEAVE_TIMEOUT_S <= etcd.REVOKE_TIMEOUT_S
    monkeypatch.setattr(sync_service, "_LEAVE_TIMEOUT_S", 0.01)

    class Hanging(MemoryDiscovery):
        async def _revoke(self, lease: Lease) -> None:
            if self._leases.pop(lease, None) is not None:
                await asyncio.Event().wait()

    sharing = Sharing(Router().bookings, open_discovery=lambda: Hanging(is_shared=False))
    sharing.worker_joined(COMPONENT, 7)
    (service,) = sharing._services.values()
    try:
        until(lambda: service.sync._listed == {service.sync.router_id}, "it to be listed")
    finally:
        sharing.stop()
    told = [record.getMessage() for record in caplog.records if "lease" in record.getMessage()]
    assert told == [
        "the router of replica sync in ns/backend could not withdraw its lease within 0.01 s "
        "(TimeoutError); the lease will expire by itself"
    ]


def test_components_are_left_side_by_side(caplog: pytest.LogCaptureFixture) -> None:
    places = [COMPONENT, ("ns", "other")]
    leaving, are_all = list[Lease](), asyncio.Event()

    class Waiting(MemoryDiscovery):
        """Revokes a lease once all components want to."""

        async def _revoke(self, lease: Lease) -> None:
            if lease in self._leases:
                leaving.append(lease)
                if len(leaving) == len(places):
                    are_all.set()
                await are_all.wait()
            await super()._revoke(lease)

    sharing = Sharing(Router().bookings, open_discovery=lambda: Waiting(is_shared=False))
    try:
        for number, place in enumerate(places):
            sharing.worker_joined(place, number)
        services = [service.sync for service in sharing._services.values()]
        until(lambda: all(sync._listed == {sync.router_id} for sync in services), "the listing")
    finally:
        sharing.stop()
    assert len(leaving) == len(places)
    assert "could not withdraw" not in caplog.text
    sharing.stop()


def test_stopping_does_not_wait_for_servers_that_are_away() -> None:
    def discovery() -> Discovery:
        raise TransportError("it is away")

    sharing = Sharing(Router().bookings, open_discovery=discovery)
    sharing.start()
    sharing.worker_joined(COMPONENT, 7)
    (service,) = sharing._services.values()
    stopping = threading.Thread(target=sharing.stop)
    stopping.start()
    # Well before the next attempt to connect.
    stopping.join(sync_service._CONNECT_S / 2)
    assert not stopping.is_alive()
    assert service.ending.is_set()
