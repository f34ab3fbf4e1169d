"""ZMQ sockets that are opened, and ZMQ loaded, with the first order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvflash._core import Catalog
from kvflash.transport.options import most_streams

if TYPE_CHECKING:
    from kvflash.transport.base import Order, Receiver


class LateReceiver:
    """A :class:`ZmqReceiver` for services whose workers may have no events.

    One thread makes all calls of :meth:`obey`, and they end before :meth:`stop`.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._receiver: Receiver | None = None

    def start(self) -> None:
        self._catalog.limit_sockets(most_streams())

    def obey(self, order: Order) -> None:
        """The first call returns once the sockets are open."""
        if self._receiver is None:
            from kvflash.transport.zmq import ZmqReceiver  # noqa: PLC0415

            self._receiver = ZmqReceiver(self._catalog)
            self._receiver.start()
        self._receiver.obey(order)

    def stop(self) -> None:
        if self._receiver is not None:
            self._receiver.stop()
