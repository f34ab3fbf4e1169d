"""Receives events over NATS Core of any number of components, and those of sockets."""

import re
from functools import partial

from kvflash._core import Catalog
from kvflash.transport import names
from kvflash.transport.base import Order, Receiver
from kvflash.transport.nats_core import NatsCoreReceiver

_SUBJECT = re.compile(r"namespace\.([^./]+)\.component\.([^./]+)\.kv-events")


class NatsComponentsReceiver:
    """A :class:`Receiver` of events at a broker, beside one of sockets for all other endpoints.

    Endpoints ``nats://SUBJECT/INSTANCE/RANK`` have a connection per component. Events at
    ``jetstream://`` arrive in another way, without a subscription.
    """

    def __init__(self, catalog: Catalog, sockets: Receiver) -> None:
        self._catalog, self._sockets = catalog, sockets
        self._components: dict[str, NatsCoreReceiver] = {}
        # By publisher; None takes no orders.
        self._of: dict[int, Receiver | None] = {}

    def start(self) -> None:
        """It connects on the first endpoint of a component."""
        self._sockets.start()

    def obey(self, order: Order) -> None:
        """One thread makes all calls, and they end before the stop."""
        kind, publisher, endpoint, _ = order
        if kind in ("subscribe", "hold"):
            self._of[publisher] = self._receiver(publisher, endpoint)
        receiver = self._of.get(publisher, self._sockets)
        if kind == "unsubscribe":
            self._of.pop(publisher, None)
        if receiver is not None:
            receiver.obey(order)

    def stop(self) -> None:
        for receiver in (*self._components.values(), self._sockets):
            receiver.stop()

    def _receiver(self, publisher: int, endpoint: str) -> Receiver | None:
        scheme, _, rest = endpoint.partition("://")
        if scheme != "nats":
            return None if scheme == "jetstream" else self._sockets
        subject = rest.partition("/")[0]
        found = _SUBJECT.fullmatch(subject)
        if found is None:
            message = f"endpoint must be nats://subject/instance/rank, got {endpoint!r}"
            self._catalog.set_status(publisher, "failed", message)
            return None
        if subject not in self._components:
            subject_of = partial(names.query_subject, found[1], found[2])
            receiver = NatsCoreReceiver(self._catalog, subject, subject_of)
            receiver.start()
            self._components[subject] = receiver
        return self._components[subject]
