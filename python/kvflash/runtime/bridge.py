"""From tcp to the other request planes: for who speaks tcp only.

A server on this machine takes requests of the tcp plane, looks up the instance that they name, and
asks it in its own way. Items pass as they are, neither read nor copied into others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvflash.errors import (
    ClosedError,
    DecodeError,
    InvalidArgumentError,
    KvflashError,
    NotFoundError,
    OverloadedError,
    TransportError,
)
from kvflash.runtime.distributed import DistributedRuntime
from kvflash.runtime.frame import Failure, Kind, Request, frame
from kvflash.runtime.plane import FailedError, GoneError, Reply
from kvflash.runtime.tcp import TcpServer

__all__ = ["Bridge"]

HOST = "127.0.0.1"
SYNC_TIMEOUT_S = 10.0
# Endpoints that may be asked for; each is watched from then on.
ENDPOINTS_MAX = 4_096

_END = frame(Kind.END)


class Bridge:
    """A tcp server that forwards to instances of every plane.

    Args:
        runtime: Whose discovery and connections it uses. Close the bridge first.
        port: Port to listen on, of this machine only; 0 picks a free one.

    Attributes:
        address: ``host:port`` once it has started.
    """

    def __init__(self, runtime: DistributedRuntime, *, port: int = 0) -> None:
        self.limits = runtime.limits
        self.address = ""
        self._runtime = runtime
        self._endpoints: set[str] = set()
        self._running: set[_Forwarded] = set()
        self._server = TcpServer(self, host=HOST, port=port, bind=HOST)

    async def start(self) -> str:
        """Listen; returns the address.

        Raises:
            ConfigError: The port can't be bound.
        """
        await self._server.start()
        self.address = self._server.address
        return self.address

    async def close(self) -> None:
        """Stop listening; answers that are on their way are dropped."""
        for forwarded in list(self._running):
            forwarded.abandon()
        if self._running:
            await asyncio.wait({forwarded.task for forwarded in self._running})
        await self._server.close()

    async def is_there(self, ping: bytes) -> bool:
        """A ping asks for the bridge: instances have their own signs of life."""
        return True

    def begin(self, request: Request, send: Callable[[bytes], Awaitable[None]]) -> _Forwarded:
        """Forward a request.

        Raises:
            InvalidArgumentError: The endpoint is no name.
            OverloadedError: Too many requests or endpoints.
        """
        endpoint = self._runtime.endpoint(request.endpoint)
        if endpoint.path not in self._endpoints and len(self._endpoints) >= ENDPOINTS_MAX:
            raise OverloadedError(f"the bridge follows {ENDPOINTS_MAX} endpoints, all it may")
        if len(self._running) >= self.limits.requests_max:
            raise OverloadedError(
                f"the bridge forwards {self.limits.requests_max} requests, as many as it may"
            )
        self._endpoints.add(endpoint.path)
        forwarded = _Forwarded(self._runtime, request, send)
        self._running.add(forwarded)
        forwarded.task.add_done_callback(lambda _: self._running.discard(forwarded))
        return forwarded


class _Forwarded:
    """A request on its way."""

    def __init__(
        self,
        runtime: DistributedRuntime,
        request: Request,
        send: Callable[[bytes], Awaitable[None]],
    ) -> None:
        self._runtime = runtime
        self._send = send
        self._reply: Reply | None = None
        self.task = asyncio.get_running_loop().create_task(self._run(request))

    def abandon(self) -> None:
        """The client is gone."""
        self.task.cancel()

    async def _run(self, request: Request) -> None:
        try:
            await self._send(await self._forward(request))
        except (GoneError, asyncio.CancelledError):
            # Nobody is left to tell.
            return
        finally:
            if self._reply is not None:
                self._reply.close()

    async def _forward(self, request: Request) -> bytes:
        """Pass the items on; the frame to end with."""
        is_started, bytes_max = False, self._runtime.limits.frame_bytes_max
        try:
            self._reply = await self._ask(request)
            while (item := await self._reply.receive()) is not None:
                await self._send(frame(Kind.DATA, item, bytes_max))
                is_started = True
        except FailedError as failed:
            return failed.failure.pack()
        except (NotFoundError, ClosedError, InvalidArgumentError) as error:
            is_asked = isinstance(error, InvalidArgumentError) or is_started
            return Failure.of(error, retry=not is_asked).pack()
        except (TransportError, DecodeError) as error:
            return Failure("unreachable", str(error), retry=not is_started).pack()
        except KvflashError as error:
            return Failure.of(error).pack()
        return _END

    async def _ask(self, request: Request) -> Reply:
        instances = self._runtime.instances(request.endpoint)
        await instances.synced(SYNC_TIMEOUT_S)
        found = instances.by_id.get(request.instance_id)
        if found is None:
            raise NotFoundError(f"{request.endpoint} has no instance {request.instance_id}")
        plane = await self._runtime.plane_client(str(found.transport.get("kind")))
        return await plane.ask(found.transport, request)
