"""Small messages from one to all of a group: the protocol, and ZMQ without a broker."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

import zmq
import zmq.asyncio

from kvflash.transport.zmq_socket import dial, netloc

__all__ = ["Channel", "ZmqChannel"]

logger = logging.getLogger(__name__)

_MESSAGE_BYTES_MAX = 16 * 1024 * 1024
_QUEUE_MESSAGES = 10_000


class Channel(Protocol):
    """Sends to all others of a group, without waiting for them, and hears what they send.

    Attributes:
        endpoint: Where others have to connect to; None where they need not.
    """

    endpoint: str | None

    async def open(self, on_message: Callable[[bytes], None]) -> None:
        """Hear from now on."""

    async def send(self, data: bytes) -> None:
        """Send; raises TransportError when it can't."""

    def follow(self, endpoints: set[str]) -> None:
        """Who is there now."""

    async def close(self) -> None:
        """Hear no more."""


class ZmqChannel:
    """A PUB socket of one's own, and a SUB socket at everybody else's; see :class:`Channel`.

    Args:
        host: Address that others reach this process at.
    """

    endpoint: str | None

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._sub = self._context.socket(zmq.SUB)
        for socket in (self._pub, self._sub):
            socket.set_hwm(_QUEUE_MESSAGES)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, _MESSAGE_BYTES_MAX)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        address = f"tcp://{netloc(self._pub, host)}"
        self.endpoint = f"{address}:{self._pub.bind_to_random_port(address)}"
        self._followed: set[str] = set()
        self._is_closed = False

    async def open(self, on_message: Callable[[bytes], None]) -> None:
        """See :meth:`Channel.open`: it hears while :meth:`hear` runs."""
        self._on_message = on_message

    async def hear(self) -> None:
        """Hand over what comes, until cancelled."""
        while not self._is_closed:
            self._on_message(await self._sub.recv())

    async def send(self, data: bytes) -> None:
        """See :meth:`Channel.send`: whoever is too slow loses it."""
        await self._pub.send(data)

    def follow(self, endpoints: set[str]) -> None:
        """See :meth:`Channel.follow`."""
        wanted = endpoints - {self.endpoint}
        for endpoint in self._followed - wanted:
            with contextlib.suppress(zmq.ZMQError):
                self._sub.disconnect(endpoint)
        for endpoint in wanted - self._followed:
            try:
                dial(self._sub, endpoint)
            except zmq.ZMQError as error:
                logger.warning("can't connect to the router at %s: %s", endpoint, error)
        self._followed = wanted

    async def close(self) -> None:
        """See :meth:`Channel.close`."""
        self._is_closed = True
        self._pub.close(0)
        self._sub.close(0)
        self._context.term()
