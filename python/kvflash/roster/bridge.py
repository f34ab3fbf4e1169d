"""Workers on a plane that the core does not support, reached through a port of this process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any

from kvflash.errors import DecodeError, KvflashError, NotFoundError
from kvflash.runtime.context import Context
from kvflash.runtime.frame import Request, unpack
from kvflash.runtime.limits import RuntimeLimits
from kvflash.runtime.plane import FailedError, PlaneClient, PlaneClients
from kvflash.runtime.serving import Running, Send, Served, Serving
from kvflash.runtime.tcp import TcpServer

# No endpoint has this name: a worker that refuses it is alive, and the ping costs nothing else.
NO_ENDPOINT = ""
# The core gives up a ping after this time.
PING_TIMEOUT_S = 2.0


class Bridge(Serving):
    """A tcp plane on the loopback interface that forwards requests to another plane.

    It starts with the first instance that needs it, in that event loop.

    Attributes:
        clients: Those of the planes behind it.
    """

    def __init__(self, limits: RuntimeLimits) -> None:
        super().__init__(0, limits)
        # By endpoint and instance.
        self._targets: dict[tuple[str, int], tuple[Served, PlaneClient, dict[str, Any]]] = {}
        self.clients = PlaneClients(limits)
        self._server: TcpServer | None = None

    async def is_there(self, ping: bytes) -> bool:
        """Ask the instance itself, since the bridge says nothing about it."""
        try:
            whom = unpack(ping)
            _, client, transport = self._targets[whom["endpoint"], whom["instance_id"]]
        except (DecodeError, LookupError, TypeError):
            return False
        request = Request("ping", NO_ENDPOINT, whom["instance_id"], None)
        try:
            with closing(await client.ask(transport, request)) as reply:
                await asyncio.wait_for(reply.receive(), PING_TIMEOUT_S)
        except FailedError:
            return True
        except (KvflashError, OSError, asyncio.TimeoutError):
            return False
        return True

    def begin(self, request: Request, send: Send) -> Running:
        """Forward a request; NotFoundError if the instance is not bridged, or no longer."""
        target = self._targets.get((request.endpoint, request.instance_id))
        if target is None:
            raise NotFoundError(f"instance {request.instance_id} is not bridged here")
        return Running(target[0], request, send, self.limits)

    async def open(
        self, endpoint: str, instance_id: int, transport: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the transport through which the core reaches an instance."""
        if transport.get("kind") in ("tcp", "http"):
            return transport
        client = self.clients.of(transport)
        if self._server is None:
            server = TcpServer(self, host="127.0.0.1", port=0)
            await server.start()
            self._server = server

        async def forward(payload: Any, context: Context) -> AsyncIterator[Any]:
            request = Request(context.id(), endpoint, instance_id, payload)
            with closing(await client.ask(transport, request)) as reply:
                try:
                    while (item := await reply.receive()) is not None:
                        yield unpack(item)
                except FailedError as error:
                    if error.failure.retry and error.failure.code == "unreachable":
                        # The request did not reach the worker: the core may try another one.
                        raise NotFoundError(error.failure.message) from error
                    raise error.failure.error() from error

        served = Served(endpoint, forward, requests_max=self.limits.requests_max, is_graceful=False)
        self._targets[endpoint, instance_id] = (served, client, transport)
        return {"kind": "tcp", "address": self._server.address}

    def forget(self, endpoint: str, instance_id: int) -> None:
        """Remove an instance; its running requests go on."""
        self._targets.pop((endpoint, instance_id), None)

    async def close(self) -> None:
        """Close all clients and the server."""
        if self._server is not None:
            await self._server.close()
        await self.clients.close()
