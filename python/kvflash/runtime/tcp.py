"""The tcp request plane: a connection carries one request at a time; closing it cancels that."""

from __future__ import annotations

import asyncio
import functools
import time
from typing import Any
from weakref import WeakSet

from kvflash.errors import (
    ClosedError,
    DecodeError,
    OverloadedError,
    TransportError,
)
from kvflash.runtime.connection import Connection
from kvflash.runtime.frame import REFUSALS, Failure, Kind, Request, frame, unpack
from kvflash.runtime.limits import RuntimeLimits
from kvflash.runtime.plane import GoneError, PlaneClient, PlaneServer, item_in
from kvflash.runtime.serving import Serving

_PONG = frame(Kind.PONG)


class TcpServer(PlaneServer):
    """Serves a runtime's endpoints on one port; see :class:`PlaneServer`."""

    def __init__(self, serving: Serving, *, host: str, port: int) -> None:
        super().__init__(serving, host=host, port=port)
        self._tasks: dict[Connection, asyncio.Task[None]] = {}
        # Until they are lost, also those that only send their rest.
        self._connections: WeakSet[Connection] = WeakSet()
        self.address = ""

    async def start(self) -> None:
        self.address = await self._listen(lambda: Connection(self._limits, self._accept))

    async def open(self, endpoint: str) -> dict[str, Any]:
        return {"kind": "tcp", "address": self.address}

    async def close(self) -> None:
        self._listener.close()
        tasks = list(self._tasks.values())
        for connection, task in list(self._tasks.items()):
            connection.close()
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        try:
            await asyncio.wait_for(self._listener.wait_closed(), self._limits.cancel_grace_s)
        except asyncio.TimeoutError:
            # From Python 3.12 on it waits for all connections, and some clients never read.
            for connection in list(self._connections):
                connection.abort()
            await self._listener.wait_closed()

    def _accept(self, connection: Connection) -> None:
        self._connections.add(connection)
        if len(self._tasks) >= self._limits.connections_max:
            error = OverloadedError(f"{self._limits.connections_max} connections, the maximum")
            connection.write(Failure.of(error, retry=True).pack())
            connection.close()
            return
        task = asyncio.get_running_loop().create_task(self._serve(connection))
        self._tasks[connection] = task
        task.add_done_callback(lambda _: self._tasks.pop(connection, None))

    async def _serve(self, connection: Connection) -> None:
        try:
            while await self._serve_one(connection):
                pass
        except (TransportError, ConnectionError):
            # The client closed it, between two requests or during one.
            return
        finally:
            connection.close()

    async def _serve_one(self, connection: Connection) -> bool:
        """Answer one frame; False if the connection can't be reused."""
        loop = asyncio.get_running_loop()
        idle = loop.call_later(self._limits.server_idle_s_max, connection.close)
        try:
            kind, payload = await connection.receive()
        except DecodeError as error:
            connection.write(Failure("invalid", str(error)).pack())
            return False
        finally:
            idle.cancel()
        if kind == Kind.PING:
            if not await self._serving.is_there(payload):
                return False
            connection.write(_PONG)
            return True
        if kind != Kind.REQUEST:
            connection.write(Failure("invalid", f"frame of kind {kind} is not a request").pack())
            return False
        try:
            request = Request.parse(unpack(payload))
            running = self._serving.begin(request, connection.send)
        except REFUSALS as error:
            await connection.send(Failure.refusing(error).pack())
            return True
        connection.on_lost = running.abandon
        if connection.is_lost:
            running.abandon()
        await asyncio.wait({running.task})
        connection.on_lost = None
        return not connection.is_lost


class TcpClient(PlaneClient):
    """Calls instances, over connections that are kept between requests."""

    def __init__(self, limits: RuntimeLimits) -> None:
        super().__init__(limits)
        # By address, with the time of their last use, in its order.
        self._idle: dict[str, dict[Connection, float]] = {}

    async def ask(self, transport: dict[str, Any], request: Request) -> TcpReply:
        data = request.pack(self.limits.frame_bytes_max)
        address = transport["address"]
        kept = self._take(address)
        if kept is not None:
            kept.write(data)
            reply = TcpReply(self, address, kept, resend=data)
        else:
            connection = await self.connect(address)
            await _write(connection, data, address)
            reply = TcpReply(self, address, connection, resend=None)
        self.replies.add(reply)
        return reply

    async def close(self) -> None:
        await super().close()
        for kept in self._idle.values():
            for connection in kept:
                connection.close()

    async def connect(self, address: str) -> Connection:
        """Open a connection within connect_timeout_s, or raise TransportError or ClosedError."""
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            _, connection = await asyncio.wait_for(
                loop.create_connection(
                    lambda: Connection(self.limits), host.strip("[]"), int(port)
                ),
                self.limits.connect_timeout_s,
            )
        except asyncio.TimeoutError as error:
            raise TransportError(
                f"{address} can't be reached within {self.limits.connect_timeout_s:g} s"
            ) from error
        except (OSError, ValueError) as error:
            raise TransportError(f"{address} can't be reached: {error}") from error
        if self._is_closed:
            # The close knew nothing of this connection.
            connection.abort()
        self._check_open()
        return connection

    def keep(self, address: str, connection: Connection) -> None:
        """Take back a connection after its answer has ended."""
        kept = self._idle.get(address, {})
        if (
            self._is_closed
            or connection.is_lost
            or connection.has_frames
            or len(kept) >= self.limits.idle_connections_max
        ):
            connection.close()
            return
        kept[connection] = time.monotonic()
        connection.on_lost = functools.partial(self._forget, address, connection)
        self._idle[address] = kept

    def _forget(self, address: str, connection: Connection) -> None:
        connection.on_lost = None
        kept = self._idle[address]
        del kept[connection]
        if not kept:
            del self._idle[address]

    def _take(self, address: str) -> Connection | None:
        """The most recently used connection, unless it is too old."""
        oldest = time.monotonic() - self.limits.client_idle_s_max
        while kept := self._idle.get(address):
            connection = next(iter(kept))
            is_old = kept[connection] < oldest
            if not is_old:
                connection = next(reversed(kept))
            self._forget(address, connection)
            if not is_old and not connection.has_frames:
                return connection
            connection.close()
        return None


class TcpReply:
    """An answer on its way."""

    def __init__(
        self, client: TcpClient, address: str, connection: Connection, *, resend: bytes | None
    ) -> None:
        self._client = client
        self._address = address
        self._connection: Connection | None = connection
        # Kept for one retry on a kept connection: the server may have just closed it.
        self._data = resend

    async def receive(self) -> bytes | None:
        try:
            kind, payload = await self._next()
        except TransportError as error:
            raise TransportError(f"{self._address}: {error}", was_sent=True) from error
        except DecodeError as error:
            raise DecodeError(f"{self._address}: {error}") from error
        self._data = None
        if kind in (Kind.END, Kind.ERROR):
            connection, self._connection = self._connection, None
            # Without one it was closed meanwhile.
            if connection is not None:
                self._client.keep(self._address, connection)
        return item_in(kind, payload, self._address)

    def close(self) -> None:
        connection, self._connection, self._data = self._connection, None, None
        if connection is not None:
            connection.abort()

    async def _next(self) -> tuple[int, bytes]:
        connection = self._connection
        if connection is None:
            raise ClosedError("the stream is closed")
        try:
            return await connection.receive()
        except TransportError:
            if self._data is None or connection.is_amid:
                raise
        data, self._data = self._data, None
        connection.abort()
        try:
            fresh = await self._client.connect(self._address)
        except TransportError as error:
            # It may have read the request before it went.
            raise TransportError(f"the worker died with the request: {error}") from error
        if self._connection is None:
            fresh.abort()
            raise ClosedError("the stream was closed meanwhile")
        self._connection = fresh
        await _write(fresh, data, self._address)
        return await fresh.receive()


async def _write(connection: Connection, data: bytes, address: str) -> None:
    try:
        await connection.send(data)
    except GoneError as error:
        raise TransportError(f"{address}: {error}") from error
    except asyncio.CancelledError:
        connection.abort()
        raise


make_server, make_client = TcpServer, TcpClient
