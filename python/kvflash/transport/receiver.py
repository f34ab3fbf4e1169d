"""Receives the events of all workers; opens sockets, or connects to a broker, when asked to."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvflash._core import Catalog
from kvflash.transport import names
from kvflash.transport.base import most_streams

if TYPE_CHECKING:
    from kvflash.transport.base import Order
    from kvflash.transport.nats_core import NatsCoreReceiver
    from kvflash.transport.zmq import ZmqReceiver

    Receiver = NatsCoreReceiver | ZmqReceiver

logger = logging.getLogger(__name__)

TICK_S = 0.5


class Feed:
    """A thread that gives a catalog's orders to receivers, opened when they are needed.

    With has_broker, endpoints ``nats://SUBJECT/INSTANCE/RANK`` have a connection per component, and
    events at ``jetstream://`` arrive in another way; all other endpoints are sockets. It starts and
    stops once; it ends with :meth:`stop`, or with the process. ``tick`` is called twice a second.
    """

    def __init__(
        self,
        catalog: Catalog,
        *,
        has_broker: bool = False,
        tick: Callable[[], None] | None = None,
    ) -> None:
        self._catalog, self._has_broker, self._tick = catalog, has_broker, tick
        # By subject of the component; "" is the receiver with sockets.
        self._receivers: dict[str, Receiver] = {}
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="kvflash-orders", daemon=True)

    def start(self) -> None:
        self._catalog.limit_sockets(most_streams())
        self._thread.start()
        # A thread that returns from the core after the interpreter has ended would abort it.
        atexit.register(self.stop)

    def stop(self) -> None:
        """Stop; blocks briefly until done."""
        if self._is_stopped:
            return
        self._is_stopped = True
        atexit.unregister(self.stop)
        self._catalog.close_orders()
        if self._thread.is_alive():
            self._thread.join()
        for receiver in self._receivers.values():
            receiver.stop()

    def _run(self) -> None:
        due_s = 0.0
        while not self._is_stopped:
            order = self._catalog.next_order(
                None if self._tick is None else due_s - time.monotonic()
            )
            if order is not None:
                self._obey_safely(order)
            if self._tick is not None and time.monotonic() >= due_s:
                due_s = time.monotonic() + TICK_S
                self._tick()

    def _obey_safely(self, order: Order) -> None:
        try:
            self._obey(order)
        except Exception as error:
            # The orders of other workers go on.
            logger.exception("the receiver of events failed to %s %s", order[0], order[2])
            self._catalog.set_status(order[1], "failed", str(error))

    def _obey(self, order: Order) -> None:
        kind, publisher, endpoint, _ = order
        if kind in ("subscribe", "hold"):
            receiver = self._receiver(publisher, endpoint)
            if receiver is not None:
                receiver.obey(order)
            return
        # Those that do not know the publisher ignore it.
        for receiver in self._receivers.values():
            receiver.obey(order)

    def _receiver(self, publisher: int, endpoint: str) -> Receiver | None:
        subject = ""
        if self._has_broker and endpoint.startswith("jetstream://"):
            return None
        if self._has_broker and endpoint.startswith("nats://"):
            place = names.parse_endpoint(endpoint)
            if place is None:
                message = f"endpoint must be nats://subject/instance/rank, got {endpoint!r}"
                self._catalog.set_status(publisher, "failed", message)
                return None
            subject = place[0]
        if subject not in self._receivers:
            receiver = self._make(subject)
            receiver.start()
            self._receivers[subject] = receiver
        return self._receivers[subject]

    def _make(self, subject: str) -> Receiver:
        # Each is imported on first use, so that services without it start faster.
        if subject:
            from kvflash.transport.nats_core import NatsCoreReceiver  # noqa: PLC0415

            return NatsCoreReceiver(self._catalog, subject)
        from kvflash.transport.zmq import ZmqReceiver  # noqa: PLC0415

        return ZmqReceiver(self._catalog)
