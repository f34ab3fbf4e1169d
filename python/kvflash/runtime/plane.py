"""What a request plane is, for those who serve and those who ask."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from kvflash.errors import KvflashError
from kvflash.runtime.frame import Failure, Request
from kvflash.runtime.limits import RuntimeLimits

__all__ = ["Begins", "FailedError", "GoneError", "PlaneClient", "PlaneServer", "Reply", "Runs"]


class FailedError(Exception):
    """An Error frame came; only between a plane and the stream that reads from it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.code, failure.message)
        self.failure = failure

    def error(self) -> KvflashError:
        """What the user sees."""
        return self.failure.error()


class GoneError(ConnectionAbortedError):
    """The client that an answer is for is gone."""


class Reply(Protocol):
    """One answer, item by item."""

    async def receive(self) -> bytes | None:
        """The next item as msgpack; None at the end.

        Raises:
            FailedError: The worker said so.
            TransportError: It can't be reached or hung up.
            DecodeError: It sends what is no frame.
        """

    def close(self) -> None:
        """Let go; the handler is told if it still runs. From the event loop's thread."""


class Runs(Protocol):
    """A request that runs."""

    @property
    def task(self) -> asyncio.Task[None]:
        """Ends when everything is sent."""

    def abandon(self) -> None:
        """The client is gone."""


class Begins(Protocol):
    """Who runs requests: the runtime's endpoints, or a bridge to others."""

    @property
    def limits(self) -> RuntimeLimits:
        """What a connection may hold."""

    async def is_there(self, ping: bytes) -> bool:
        """Whether the instance that a ping's payload names lives."""

    def begin(self, request: Request, send: Callable[[bytes], Awaitable[None]]) -> Runs:
        """Run a request; its frames up to End or Error go to ``send``.

        That waits while the reader is slow, and raises GoneError when there is none.

        Raises:
            NotFoundError: Not served here, or meant for another instance.
            ClosedError: The process is about to end.
            OverloadedError: It serves as many as it may.
            InvalidArgumentError: The endpoint is no name.
        """


class PlaneServer(Protocol):
    """Brings requests to a :class:`kvflash.runtime.serving.Serving`."""

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: The address can't be bound or the broker is not installed.
            TransportError: The broker can't be reached.
        """

    async def open(self, endpoint: str) -> dict[str, Any]:
        """Take requests for an endpoint; how its instance is announced."""

    async def close(self) -> None:
        """Stop listening and drop what is left."""


class PlaneClient(Protocol):
    """Sends requests to instances of one kind of transport."""

    async def ask(self, transport: dict[str, Any], request: Request) -> Reply:
        """Send a request.

        Raises:
            TransportError: The instance can't be reached.
            InvalidArgumentError: The request is too large or can't be written.
        """

    async def close(self) -> None:
        """Close all connections; answers that are on their way end with an error."""
