"""What a request plane is, for those who serve and those who ask."""

from __future__ import annotations

from typing import Any, Protocol

from kvflash.errors import KvflashError
from kvflash.runtime.frame import Failure, Request

__all__ = ["FailedError", "GoneError", "PlaneClient", "PlaneServer", "Reply"]


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
        """Close all connections."""
