"""Receives events over NATS Core of any number of components, and those of sockets."""

import contextlib
import logging
import queue
import re
import threading

from kvflash._core import Catalog
from kvflash.errors import KvflashError
from kvflash.outage import Outage
from kvflash.transport import names
from kvflash.transport.base import Order, Receiver
from kvflash.transport.nats_core import NatsCoreReceiver

logger = logging.getLogger(__name__)

_RETRY_S = 2.0
# Four for each publisher in a catalog; above it the catalog's own thread waits.
_ORDERS_MAX = 4 * 65_536
_SUBJECT = re.compile(r"namespace\.([^./]+)\.component\.([^./]+)\.kv-events")


class NatsComponentsReceiver:
    """A :class:`Receiver` of events at a broker, beside one of sockets for all other endpoints.

    Endpoints ``nats://SUBJECT/INSTANCE/RANK`` have a connection per component. Events at
    ``jetstream://`` arrive in another way, without a subscription.
    """

    def __init__(self, catalog: Catalog, sockets: Receiver) -> None:
        self._catalog, self._sockets = catalog, sockets
        self._schemes: dict[int, str] = {}
        self._orders: queue.Queue[Order | None] = queue.Queue(_ORDERS_MAX)
        self._receivers: dict[str, NatsCoreReceiver] = {}
        self._of: dict[int, NatsCoreReceiver] = {}
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvflash-nats", daemon=True)

    def start(self) -> None:
        """See :meth:`Receiver.start`. It connects on the first endpoint of a component."""
        self._sockets.start()
        self._thread.start()

    def obey(self, order: Order) -> None:
        """See :meth:`Receiver.obey`."""
        kind, publisher, endpoint, _ = order
        if kind in ("subscribe", "hold"):
            self._schemes[publisher] = endpoint.partition("://")[0]
        scheme = self._schemes.get(publisher)
        if kind == "unsubscribe":
            self._schemes.pop(publisher, None)
        if scheme == "nats":
            self._orders.put(order)
        elif scheme != "jetstream":
            self._sockets.obey(order)

    def stop(self) -> None:
        """See :meth:`Receiver.stop`."""
        self._is_stopped.set()
        # A full queue wakes the thread as well.
        with contextlib.suppress(queue.Full):
            self._orders.put_nowait(None)
        if self._thread.is_alive():
            self._thread.join()
        for receiver in (*self._receivers.values(), self._sockets):
            receiver.stop()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None and not self._is_stopped.is_set():
            kind, publisher, endpoint, _ = order
            if kind in ("subscribe", "hold"):
                receiver = self._receiver(publisher, endpoint)
                if receiver is not None:
                    self._of[publisher] = receiver
                    receiver.obey(order)
            elif publisher in self._of:
                self._of[publisher].obey(order)
                if kind == "unsubscribe":
                    del self._of[publisher]

    def _receiver(self, publisher: int, endpoint: str) -> NatsCoreReceiver | None:
        subject = endpoint.removeprefix("nats://").partition("/")[0]
        found = _SUBJECT.fullmatch(subject)
        if found is None:
            message = f"endpoint must be nats://subject/instance/rank, got {endpoint!r}"
            self._catalog.set_status(publisher, "failed", message)
            return None
        component = (found[1], found[2])
        outage = Outage(logger, f"events of {subject}: NATS answers")
        while subject not in self._receivers and not self._is_stopped.is_set():
            receiver = NatsCoreReceiver(
                self._catalog,
                subject,
                lambda instance_id, rank: names.query_subject(*component, instance_id, rank),
            )
            try:
                receiver.start()
                self._receivers[subject] = receiver
                outage.ends()
            except KvflashError as error:
                outage.lasts(f"events of {subject}: {error}; trying again")
                self._catalog.set_status(publisher, "pending", str(error))
                self._is_stopped.wait(_RETRY_S)
        return self._receivers.get(subject)
