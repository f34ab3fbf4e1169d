"""Attaches a catalog to a component's state as a replica."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvflash._core import Catalog
from kvflash.background import Background
from kvflash.servers import NatsSettings
from kvflash.state.discovered import DiscoveredLock, DiscoveredRoster
from kvflash.state.frames import CatalogSink
from kvflash.state.replica import Replica
from kvflash.state.snapshot import Snapshots
from kvflash.transport import names
from kvflash.transport.jetstream import JetStreamLog
from kvflash.transport.jetstream_blobs import JetStreamBlobs
from kvflash.transport.nats_connection import connect

if TYPE_CHECKING:
    from kvflash.discovery import Discovery

#: Opens the discovery, in the event loop that uses it.
OpenKeys = Callable[[], Awaitable["Discovery"]]


@dataclass(frozen=True, kw_only=True)
class StateOptions:
    """Options of a replica.

    Attributes:
        snapshot_threshold: Messages in the stream above which a snapshot is taken; None: never for
            that reason.
        is_resetting: First discard everything, here and at all replicas.
        is_strict: Take no more snapshots after a message was refused here, such as one from a
            worker with another block size: a replica with other settings may understand it.
        lease_ttl_s: How long a dead router counts as alive at most.
        settings: The NATS server; default: from the environment.
    """

    snapshot_threshold: int | None = 1_000_000
    is_resetting: bool = False
    is_strict: bool = False
    lease_ttl_s: float = 10.0
    settings: NatsSettings = field(default_factory=NatsSettings.from_env)


def attach(
    catalog: Catalog,
    namespace: str,
    component: str,
    *,
    open_keys: OpenKeys,
    options: StateOptions | None = None,
) -> StateService:
    """Keep a catalog up to date with the stream of a component's workers.

    Returns at once; :meth:`StateService.wait_ready` waits for the stream's existing content.

    Args:
        catalog: Catalog to fill.
        namespace: Namespace of the component.
        component: Component of the workers to follow.
        open_keys: Opens the discovery, in the loop that uses it; closed at the end.
        options: Options of the replica.

    Raises:
        TransportError: NATS does not answer; the message says what to start.
        ConfigError: NATS refuses the login.
    """
    return StateService(catalog, (namespace, component), open_keys, options or StateOptions())


class StateService(Background):
    """A replica in the background; created by :func:`attach`."""

    def __init__(
        self,
        catalog: Catalog,
        component: tuple[str, str],
        open_keys: OpenKeys,
        options: StateOptions,
    ) -> None:
        #: Its name in the stream and in discovery.
        self.name = f"router-{secrets.token_hex(8)}"
        self._component, self._stream = component, names.stream_name(*component)
        self.sink = CatalogSink(catalog, f"jetstream://{self._stream}")
        #: Discovery reports a worker that has joined, or left: its blocks go at once.
        self.worker_joined, self.worker_left = self.sink.join, self.sink.leave
        self._open_keys, self._options = open_keys, options
        # These are there once it is ready.
        self._replica: Replica
        self._snapshots: Snapshots
        #: Whether NATS is connected; otherwise no new events arrive.
        self.is_connected: Callable[[], bool]
        super().__init__(
            "the state service, which keeps the index up to date,", self._serve, is_cancelled=False
        )
        self.start_and_wait()

    def wait_ready(self, timeout_s: float = 60.0) -> bool:
        """Wait until the stream's initial content is applied; False if that took longer."""
        try:
            self.call(asyncio.wait_for(self._replica.wait_caught_up(), timeout_s))
        except (asyncio.TimeoutError, TimeoutError):
            return False
        return True

    def snapshot(self) -> str:
        """Take a snapshot now; returns the outcome."""
        return str(self.call(self._snapshots.take()).value)

    def keep_only(self, instance_ids: set[int]) -> None:
        """Discovery has listed all workers: drop all others."""
        for instance_id in {worker[0] for worker in self.sink.workers()} - instance_ids:
            self.sink.leave(instance_id)

    def stats(self) -> dict[str, int]:
        """Counters; names include units."""
        counts = {f"{name}_total": count for name, count in self.sink.counts.items()}
        counts["away_workers"] = self.sink.away()
        replica = dataclasses.asdict(self._replica.stats)
        counts["applied_sequence"] = replica.pop("applied")
        counts |= {name: int(value) for name, value in replica.items()}
        counts["is_connected"] = int(self.is_connected())
        return counts | dataclasses.asdict(self._snapshots.stats)

    @property
    def snapshot_failure(self) -> str:
        """Why no snapshot can be taken now; empty if none failed."""
        return self._snapshots.failure

    async def _serve(self) -> None:
        options, settings = self._options, self._options.settings
        client = await connect(settings, name=self.name)
        self.is_connected = lambda: bool(client.is_connected)
        keys: Discovery | None = None
        try:
            keys = await self._open_keys()
            where = self._component
            log = JetStreamLog(client, self._stream, settings)
            blobs = JetStreamBlobs(
                client, names.bucket_name(*where), names.pointer_bucket_name(*where), settings
            )
            roster = DiscoveredRoster(keys, *where, ttl_s=options.lease_ttl_s)
            lock = DiscoveredLock(
                keys, f"v1/locks/{where[0]}/{where[1]}/snapshot", ttl_s=options.lease_ttl_s
            )
            replica = Replica(self.name, log=log, blobs=blobs, roster=roster, sink=self.sink)
            snapshots = Snapshots(
                replica,
                lock=lock,
                threshold_messages=options.snapshot_threshold,
                # Messages are never deleted before a snapshot has them.
                age_s_max=settings.stream_max_age_s / 4,
                is_complete=lambda: not (options.is_strict and self.sink.counts["refused"]),
            )
            self._replica, self._snapshots = replica, snapshots
            if options.is_resetting:
                await snapshots.reset()
            try:
                await self.run_until_ending((replica.run(), snapshots.run()))
            finally:
                await replica.stop()
        finally:
            if keys is not None:
                await keys.close()
            with contextlib.suppress(Exception):
                await client.close()
