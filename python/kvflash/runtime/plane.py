"""The interfaces of a request plane, for servers and clients, and the planes by name."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AsyncExitStack
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

from kvflash.address import netloc
from kvflash.errors import ClosedError, ConfigError, DecodeError, TransportError
from kvflash.runtime.frame import Failure, Kind, Request, unpack
from kvflash.runtime.limits import RuntimeLimits
from kvflash.runtime.settings import PLANES, listen_address

if TYPE_CHECKING:
    from kvflash.runtime.serving import Serving

# The transport that launchers announce for their engines.
OPENAI = "openai"
BACKLOG = 4_096
# Instances that may hang up on a request: it may be what ended them.
LOSSES_MAX = 2


class FailedError(Exception):
    """An Error frame arrived; used only between a plane and its stream."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.code, failure.message)
        self.failure = failure


class GoneError(ConnectionAbortedError):
    """The client that would receive the answer is gone."""


class Reply(Protocol):
    """One answer, item by item."""

    async def receive(self) -> bytes | None:
        """The next item as msgpack; None at the end.

        Raises FailedError if the worker reports an error, TransportError if it can't be reached or
        hangs up, and DecodeError if it sends something that is not a frame.
        """

    def close(self) -> None:
        """Close; if the handler still runs, it is notified. Call it in the event loop's thread."""


def item_in(kind: int, payload: bytes, sender: str) -> bytes | None:
    """The item in a frame of an answer, None at the end; raises as :meth:`Reply.receive`."""
    if kind == Kind.DATA:
        return payload
    if kind == Kind.END:
        return None
    if kind == Kind.ERROR:
        raise FailedError(Failure.parse(unpack(payload)))
    raise DecodeError(f"{sender}: frame of kind {kind} is not an answer")


class PlaneServer(ABC):
    """Brings requests to a runtime's endpoints.

    ``host`` is the address at which others reach this process; ``port`` 0 picks a free one.
    """

    def __init__(self, serving: Serving, *, host: str, port: int) -> None:
        self._serving = serving
        self._limits = serving.limits
        self._host = netloc(host)
        self._wanted_port, self._bind = port, listen_address(host)
        self._listener: asyncio.Server

    @abstractmethod
    async def start(self) -> None:
        """Listen, or connect to the broker; a failure is a ConfigError or TransportError."""

    @abstractmethod
    async def open(self, endpoint: str) -> dict[str, Any]:
        """Accept requests for an endpoint; returns how its instance is announced."""

    @abstractmethod
    async def close(self) -> None:
        """Stop listening and close what is left."""

    async def _listen(self, make: Callable[[], asyncio.BaseProtocol]) -> str:
        """Listen with protocols of ``make``; returns host and port at which others connect."""
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(
                make, self._bind, self._wanted_port, backlog=BACKLOG
            )
        except OSError as error:
            where = f"{self._bind}:{self._wanted_port}"
            raise ConfigError(f"can't listen on {where}: {error.strerror or error}") from error
        return f"{self._host}:{self._listener.sockets[0].getsockname()[1]}"


class PlaneClient(ABC):
    """Sends requests to instances with one kind of transport."""

    def __init__(self, limits: RuntimeLimits) -> None:
        self.limits = limits
        #: Answers that are not closed; a client adds each that it returns.
        self.replies: WeakSet[Reply] = WeakSet()
        self._is_closed = False

    @abstractmethod
    async def ask(self, transport: dict[str, Any], request: Request) -> Reply:
        """Send a request.

        Raises TransportError if the instance can't be reached, InvalidArgumentError if the request
        is too large or can't be encoded, and ClosedError if the client is closed meanwhile.
        """

    async def close(self) -> None:
        """Close all connections; unfinished answers end with an error."""
        self._is_closed = True
        for reply in list(self.replies):
            reply.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the runtime is closed")


def make_server(plane: str, serving: Serving, *, host: str, port: int) -> PlaneServer:
    """Create a server, not started yet; ConfigError if its plane is not installed."""
    make = import_module(f"kvflash.runtime.{plane}").make_server
    server: PlaneServer = make(serving, host=host, port=port)
    return server


def make_client(plane: str, limits: RuntimeLimits) -> PlaneClient:
    """Create a client; ConfigError if its plane is unknown or its dependencies are missing."""
    if plane not in (*PLANES, OPENAI):
        raise ConfigError(f"request plane must be one of {', '.join(PLANES)}, got {plane!r}")
    client: PlaneClient = import_module(f"kvflash.runtime.{plane}").make_client(limits)
    return client


class PlaneClients:
    """Clients by kind of transport, each created on first use."""

    def __init__(self, limits: RuntimeLimits) -> None:
        self._limits = limits
        self._by_kind: dict[str, PlaneClient] = {}
        self._is_closed = False

    def of(self, transport: dict[str, Any]) -> PlaneClient:
        """The client for a transport; a TransportError says that none can be created."""
        if self._is_closed:
            # Nothing would close what it opens.
            raise ClosedError("the runtime is closed")
        kind = str(transport.get("kind"))
        if kind not in self._by_kind:
            try:
                self._by_kind[kind] = make_client(kind, self._limits)
            except ConfigError as error:
                raise TransportError(str(error)) from error
        return self._by_kind[kind]

    async def close(self) -> None:
        """Close all of them, even if one fails to."""
        self._is_closed = True
        async with AsyncExitStack() as closing:
            for client in self._by_kind.values():
                closing.push_async_callback(client.close)
