"""Small messages to all members of a group: the interface, and ZMQ without a broker."""

import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

import zmq
import zmq.asyncio

from kvflash.address import netloc
from kvflash.errors import TransportError
from kvflash.transport.zmq_socket import MESSAGE_BYTES_MAX, bindable, dial, subscribe

logger = logging.getLogger(__name__)

_QUEUE_MESSAGES = 10_000


class Channel(Protocol):
    """Sends to all other members without waiting for them, and receives their messages."""

    #: Where other members must connect; None if they need not.
    endpoint: str | None

    async def open(self, on_message: Callable[[bytes], None]) -> None:
        """Start receiving."""

    async def send(self, data: bytes) -> None:
        """Send a message; raises TransportError if that fails."""

    def follow(self, endpoints: set[str]) -> None:
        """Set the endpoints of the other members."""

    async def close(self) -> None:
        """Stop receiving."""


class ZmqChannel:
    """A PUB socket, with a SUB socket connected to all other members; see :class:`Channel`.

    ``host`` is the address at which others reach this process, ``bind`` the one to listen on, if
    that differs. Raises TransportError if it can't listen there.
    """

    endpoint: str | None

    def __init__(self, host: str = "127.0.0.1", bind: str | None = None) -> None:
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._sub = self._context.socket(zmq.SUB)
        self._pub.set_hwm(_QUEUE_MESSAGES)
        self._pub.setsockopt(zmq.LINGER, 0)
        self._pub.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        subscribe(self._sub, queue_messages=_QUEUE_MESSAGES)
        address = f"tcp://{bindable(self._pub, bind or host)}"
        try:
            port = self._pub.bind_to_random_port(address)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise TransportError(f"can't listen on {address}: {error.strerror}") from error
        self.endpoint = f"tcp://{netloc(host)}:{port}"
        self._followed: set[str] = set()
        self._is_closed = False

    async def open(self, on_message: Callable[[bytes], None]) -> None:
        """Messages arrive while :meth:`hear` runs."""
        self._on_message = on_message

    async def hear(self) -> None:
        while not self._is_closed:
            self._on_message(await self._sub.recv())

    async def send(self, data: bytes) -> None:
        """A receiver that is too slow loses the message."""
        await self._pub.send(data)

    def follow(self, endpoints: set[str]) -> None:
        wanted = endpoints - {self.endpoint}
        for endpoint in self._followed - wanted:
            with contextlib.suppress(zmq.ZMQError):
                self._sub.disconnect(endpoint)
        for endpoint in wanted - self._followed:
            try:
                dial(self._sub, endpoint)
            except zmq.ZMQError as error:
                # libzmq checks the form only and connects later, so another attempt would fail too.
                logger.warning("can't connect to the router at %s: %s", endpoint, error)
        self._followed = wanted

    async def close(self) -> None:
        self._is_closed = True
        self._context.destroy(0)
