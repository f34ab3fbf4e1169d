"""What a runtime leaves behind when it is shut down."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import pytest

from kvflash import ClosedError, DistributedRuntime, TransportError
from kvflash.discovery import Lease, MemoryDiscovery
from kvflash.discovery.announcer import Announcer
from kvflash.runtime import distributed, nats, tcp
from kvflash.runtime.frame import Request
from kvflash.runtime.limits import RuntimeLimits
from kvflash.runtime.plane import PlaneClients, PlaneServer
from kvflash.runtime.serving import Serving
from support_runtime import eventually, run

ENDPOINT = "t.workers.run"


class Gated(MemoryDiscovery):
    """Grants a lease when its gate is open."""

    def __init__(self) -> None:
        super().__init__(is_shared=False)
        self.is_asked, self.gate = asyncio.Event(), asyncio.Event()
        self.asked = 0

    async def lease(self, *args: Any, **options: Any) -> Lease:
        self.asked += 1
        self.is_asked.set()
        await self.gate.wait()
        return await super().lease(*args, **options)


class Server(PlaneServer):
    """Starts when its gate is open, and fails to close if it is told to."""

    def __init__(self, *, is_open: bool, fails: bool = False) -> None:
        self.is_asked, self.gate = asyncio.Event(), asyncio.Event()
        self.fails, self.is_closed = fails, False
        if is_open:
            self.gate.set()

    async def start(self) -> None:
        self.is_asked.set()
        await self.gate.wait()

    async def open(self, endpoint: str) -> dict[str, Any]:
        return {"kind": "tcp", "address": "127.0.0.1:1"}

    async def close(self) -> None:
        self.is_closed = True
        if self.fails:
            raise RuntimeError("it does not close")


async def handle(_request: Any) -> AsyncIterator[int]:
    yield 1


def test_what_fails_to_close_leaves_nothing_else_open(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    async def scenario() -> None:
        server = Server(is_open=True, fails=True)
        monkeypatch.setattr(distributed, "make_server", lambda *_, **__: server)
        runtime = DistributedRuntime("mem")
        client = runtime.endpoint(ENDPOINT).client()
        assert client.instance_ids() == []
        await runtime.server()
        for name, part in (("planes", runtime.planes), ("discovery", runtime.discovery)):

            async def close(name: str = name, close: Any = part.close) -> None:
                closed.append(name)
                await close()

            monkeypatch.setattr(part, "close", close)
        await runtime.close()
        assert server.is_closed
        with pytest.raises(ClosedError):
            client.instance_ids()
        with pytest.raises(ClosedError):
            await runtime.server()

    run(scenario())
    assert closed == ["planes", "discovery"]


def test_a_plane_that_fails_to_close_leaves_no_other_open() -> None:
    async def scenario() -> None:
        planes = PlaneClients(RuntimeLimits())
        planes._by_kind = {"a": Server(is_open=True, fails=True), "b": Server(is_open=True)}
        with pytest.raises(RuntimeError, match="it does not close"):
            await planes.close()
        assert all(plane.is_closed for plane in planes._by_kind.values())

    run(scenario())


@pytest.mark.parametrize("waits", [False, True])
def test_a_server_that_starts_during_the_shutdown_is_closed(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serving until the shutdown is over by then; starting to serve has failed."""

    async def scenario() -> None:
        server = Server(is_open=False)
        monkeypatch.setattr(distributed, "make_server", lambda *_, **__: server)
        runtime = DistributedRuntime("mem")
        endpoint = runtime.endpoint(ENDPOINT)
        work = endpoint.serve_endpoint(handle) if waits else runtime.start_serving(endpoint, handle)
        serving = asyncio.create_task(work)
        await server.is_asked.wait()
        await runtime.close()
        server.gate.set()
        if waits:
            assert await serving is None
        else:
            with pytest.raises(ClosedError):
                await serving
        assert server.is_closed

    run(scenario())


@pytest.mark.parametrize("waits", [False, True])
def test_a_broker_that_the_shutdown_leaves_is_no_failure(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was to be subscribed to an endpoint just then."""

    async def scenario() -> None:
        server = Server(is_open=True)
        is_opening, is_closed = asyncio.Event(), asyncio.Event()

        async def open_late(_endpoint: str) -> dict[str, Any]:
            is_opening.set()
            await is_closed.wait()
            raise TransportError("NATS: connection closed")

        monkeypatch.setattr(server, "open", open_late)
        monkeypatch.setattr(distributed, "make_server", lambda *_, **__: server)
        runtime = DistributedRuntime("mem")
        endpoint = runtime.endpoint(ENDPOINT)
        work = endpoint.serve_endpoint(handle) if waits else runtime.start_serving(endpoint, handle)
        serving = asyncio.create_task(work)
        await is_opening.wait()
        await runtime.close()
        is_closed.set()
        if waits:
            assert await serving is None
        else:
            with pytest.raises(ClosedError, match="the runtime is shut down"):
                await serving

    run(scenario())


@pytest.mark.parametrize("has_task", [True, False])
def test_a_client_that_does_not_read_keeps_no_server_open(has_task: bool) -> None:
    """As with Python 3.12 and later, the listener is closed once all connections are."""

    async def scenario() -> None:
        limits = RuntimeLimits(cancel_grace_s=0.05)
        server = tcp.make_server(Serving(1, limits), host="127.0.0.1", port=0)
        await server.start()
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port))):

            async def is_connected() -> bool:
                return len(server._tasks) == 1

            await eventually(is_connected, "the connection")
            (connection,) = server._tasks
            connection.write(b"x" * 32 * 1024 * 1024)
            if not has_task:
                connection.close()
                server._tasks.popitem()[1].cancel()

            async def wait_closed() -> None:
                async def is_lost() -> bool:
                    return connection.is_lost

                await eventually(is_lost, "the connection to end")

            closing = Mock(wraps=server._listener, wait_closed=wait_closed)
            server._listener = closing
            await asyncio.wait_for(server.close(), 10)
            closing.close.assert_called_once_with()

    run(scenario())


@pytest.mark.parametrize("is_late", [False, True])
def test_a_lease_that_is_granted_during_the_shutdown_is_revoked(is_late: bool) -> None:
    async def scenario() -> None:
        discovery = Gated()
        announcer = Announcer(discovery, "it")
        announcing = asyncio.create_task(announcer.announce("a", b"1"))
        await discovery.is_asked.wait()
        closing = asyncio.create_task(announcer.close(0.01 if is_late else 30.0))
        if is_late:
            await closing
        discovery.gate.set()
        with pytest.raises(ClosedError, match="it is no longer announced"):
            await announcing
        await closing
        assert not discovery._leases
        assert await discovery.get_prefix("") == {}

    run(scenario())


def test_a_lease_that_is_granted_after_its_caller_is_cancelled_is_kept_and_revoked() -> None:
    """It may be granted although nothing waits for it, and would outlive its process."""

    async def scenario() -> None:
        discovery = Gated()
        announcer = Announcer(discovery, "it")
        asking = asyncio.create_task(announcer.lease())
        await discovery.is_asked.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        discovery.gate.set()
        # The same one.
        await announcer.announce("a", b"1")
        assert discovery.asked == len(discovery._leases) == 1
        await announcer.close()
        assert not discovery._leases

    run(scenario())


def test_an_announcement_that_loses_its_lease_to_the_shutdown_says_so() -> None:
    class Late(MemoryDiscovery):
        """Takes a key late."""

        def __init__(self) -> None:
            super().__init__(is_shared=False)
            self.is_asked, self.gate = asyncio.Event(), asyncio.Event()

        async def put(self, key: str, value: bytes, lease: Lease | None = None) -> None:
            self.is_asked.set()
            await self.gate.wait()
            await super().put(key, value, lease)

    async def scenario() -> None:
        discovery = Late()
        runtime = DistributedRuntime(discovery)
        announcing = asyncio.create_task(runtime.announce("a", 1))
        await discovery.is_asked.wait()
        await runtime.close()
        discovery.gate.set()
        with pytest.raises(ClosedError, match="is no longer announced"):
            await announcing
        assert await discovery.get_prefix("") == {}

    run(scenario())


def test_a_runtime_that_is_shut_down_asks_for_no_lease() -> None:
    async def scenario() -> None:
        discovery = Gated()
        discovery.gate.set()
        runtime = DistributedRuntime(discovery)
        await runtime.close()
        with pytest.raises(ClosedError, match="the runtime is shut down"):
            await runtime.endpoint(ENDPOINT).serve_endpoint(handle)
        assert not discovery.is_asked.is_set()

    run(scenario())


@pytest.mark.parametrize("has_lease", [False, True])
def test_a_closed_announcer_has_no_lease(has_lease: bool) -> None:
    async def scenario() -> None:
        discovery = Gated()
        discovery.gate.set()
        announcer = Announcer(discovery, "it")
        if has_lease:
            await announcer.announce("a", b"1")
            discovery.is_asked.clear()
        await announcer.close()
        for asking in (announcer.lease(), announcer.announce("a", b"2")):
            with pytest.raises(ClosedError, match="it is no longer announced"):
                await asking
        assert not discovery.is_asked.is_set()
        assert await discovery.get_prefix("") == {}

    run(scenario())


class Connection:
    """A connection to a broker; it can be told to break before it subscribes."""

    def __init__(self, *, breaks: bool) -> None:
        self.breaks, self.is_closed = breaks, False

    async def subscribe(self, _subject: str, **_options: Any) -> None:
        if self.breaks:
            raise nats.NatsError("it broke")

    async def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("breaks", [False, True])
def test_a_connection_to_the_broker_that_can_not_be_used_is_closed(
    breaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        connection = Connection(breaks=breaks)
        is_asked, gate = asyncio.Event(), asyncio.Event()

        async def connect() -> Any:
            is_asked.set()
            await gate.wait()
            return connection

        monkeypatch.setattr(nats, "connect", connect)
        client = nats.NatsClient(RuntimeLimits())
        where = {"kind": "nats", "subject": "s"}
        asking = asyncio.create_task(client.ask(where, Request("r", "t/w/run", 1, None)))
        await is_asked.wait()
        if not breaks:
            await client.close()
        gate.set()
        with pytest.raises(TransportError if breaks else ClosedError):
            await asking
        assert connection.is_closed

    run(scenario())
