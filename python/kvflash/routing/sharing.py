"""Shares this process's bookings with replicas, and counts the replicas' bookings here."""

import logging
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from kvflash._core import Bookings
from kvflash.discovery import Discovery
from kvflash.roster.core import Component
from kvflash.routing.replica_sync import ReplicaSync
from kvflash.routing.sync_service import ReplicaSyncService
from kvflash.runtime.settings import host_address, own_address
from kvflash.servers import NatsSettings
from kvflash.transport import names
from kvflash.transport.channel import Channel, ZmqChannel

logger = logging.getLogger(__name__)

_TAKE_S = 0.2

# Active requests that wait until their worker is shared; above this limit they are not shared.
_UNTOLD_MAX = 100_000

_Tiding = tuple[Any, ...]


class Sharing:
    """Drives one :class:`ReplicaSyncService` for each component with known workers.

    ``open_discovery`` opens a discovery in the event loop that uses it; ``event_plane`` is ``nats``
    or ``zmq``, which needs no server.
    """

    def __init__(
        self,
        bookings: Bookings,
        *,
        open_discovery: Callable[[], Discovery],
        event_plane: str = "zmq",
    ) -> None:
        self._bookings = bookings
        self._open_discovery, self._event_plane = open_discovery, event_plane
        self._lock = threading.Lock()
        self._services: dict[Component, ReplicaSyncService] = {}
        # Where each worker is shared, and under which number; and the reverse of these numbers.
        self._shared: dict[int, tuple[ReplicaSync, int]] = {}
        self._local_of: dict[int, int] = {}
        # Per active request, so that its end is sent to where its start was sent.
        self._told_to: dict[str, ReplicaSync] = {}
        # Requests whose worker is not shared yet: sent once it is, if they are still active.
        self._untold: dict[str, list[_Tiding]] = {}
        self._has_joined = False
        self._untold_dropped = 0
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvflash-sharing", daemon=True)
        # From here on, so that bookings made before the connection are sent after it.
        bookings.turn_on()

    def start(self) -> None:
        """Start sharing, beginning with the bookings made since this object was created."""
        self._thread.start()

    def stop(self) -> None:
        """Leave: other routers drop this process's load at once. Blocks until done."""
        self._is_stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            services = list(self._services.values())
        # Side by side: while discovery does not answer, each needs seconds.
        for service in services:
            service.stop_soon()
        for service in services:
            service.stop()

    def worker_joined(
        self, component: Component, instance_id: int, shared_id: int | None = None
    ) -> None:
        """Share a worker that the core has registered; the first one of a component connects.

        ``shared_id`` is its number between routers, if that differs.
        """
        shared_id = instance_id if shared_id is None else shared_id
        with self._lock:
            if self._is_stopped.is_set():
                return
            service = self._services.get(component)
            if service is None:
                service = self._services[component] = ReplicaSyncService(
                    *component,
                    self._bookings,
                    local_of=self._local_of,
                    open_discovery=self._open_discovery,
                    open_channel=partial(self._open_channel, component),
                )
                service.start()
            self._shared[instance_id] = service.sync, shared_id
            self._local_of[shared_id] = instance_id
        service.sync.worker_joined(shared_id)
        self._has_joined = True

    def worker_left(self, instance_id: int) -> None:
        """Stop sharing a worker that is no longer registered."""
        if (shared := self._shared.pop(instance_id, None)) is not None:
            self._local_of.pop(shared[1], None)

    def stats(self) -> dict[str, int]:
        """Counters of all components together; names include units."""
        with self._lock:
            services = list(self._services.values())
        counts = Counter(peers=0, bookings_dropped_total=self._untold_dropped)
        for service in services:
            counts["peers"] += len(service.sync.digests()) - 1
            counts.update({f"{name}_total": n for name, n in service.sync.counts.items()})
        counts.update({f"bookings_{name}": n for name, n in self._bookings.stats().items()})
        return counts

    async def _open_channel(self, component: Component, discovery: Discovery) -> Channel:
        if self._event_plane == "zmq":
            host = host_address(is_local=discovery.is_local)
            return ZmqChannel(host, own_address(host))
        # The NATS client need not be installed if no broker is used.
        from kvflash.transport.nats_channel import NatsChannel  # noqa: PLC0415
        from kvflash.transport.nats_connection import connect  # noqa: PLC0415

        client = await connect(NatsSettings.from_env(), name="kvflash-sync")
        return NatsChannel(client, names.replica_sync_subject(*component))

    def _run(self) -> None:
        while not self._is_stopped.is_set():
            fresh = self._bookings.take(_TAKE_S)
            if self._has_joined:
                self._has_joined = False
                held, self._untold = self._untold, {}
                fresh[:0] = [tiding for tidings in held.values() for tiding in tidings]
            for tiding in fresh:
                try:
                    self._tell(tiding)
                except Exception:
                    logger.exception("replica sync: a booking was not shared")

    def _tell(self, tiding: _Tiding) -> None:
        kind, name, *booking = tiding
        if kind == "add":
            (instance_id, dp_rank), hashes, isl, overlap = booking
            if (shared := self._shared.get(instance_id)) is not None:
                sync, shared_id = shared
                self._told_to[name] = sync
                sync.add(name, (shared_id, dp_rank), hashes, isl, overlap)
            elif len(self._untold) < _UNTOLD_MAX:
                self._untold[name] = [tiding]
            else:
                self._untold_dropped += 1
        elif name in self._untold:
            if kind == "free":
                del self._untold[name]
            else:
                self._untold[name].append(tiding)
        elif kind == "prefilled" and name in self._told_to:
            self._told_to[name].mark_prefill_completed(name)
        elif kind == "free" and name in self._told_to:
            self._told_to.pop(name).free(name)
