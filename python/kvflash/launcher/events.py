"""Where an engine's events are announced: its own sockets, or NATS, to which they are relayed."""

import asyncio
import logging

from kvflash.cluster_flags import unused_server
from kvflash.errors import ConfigError
from kvflash.launcher.command import EventPorts
from kvflash.launcher.options import LauncherOptions
from kvflash.publisher.brokered import UNUSED_LOCAL_INDEXER
from kvflash.publisher.kv_events import KvEventPublisher
from kvflash.runtime import Component
from kvflash.servers import NatsSettings, needing_nats

logger = logging.getLogger(__name__)

# The engine is a child of this process.
_ENGINE_HOST = "127.0.0.1"


class EngineEvents:
    """The events of one engine's ranks; without ``ports`` it publishes none."""

    def __init__(
        self, options: LauncherOptions, ports: EventPorts | None, ranks: int, component: Component
    ) -> None:
        self._options, self._ports, self._ranks = options, ports, ranks
        self._component = component
        # One for each rank, in order.
        self._publishers: list[KvEventPublisher] = []

    async def check(self) -> None:
        """Check the server that is needed before an engine spends minutes loading."""
        is_nats = self._options.event_plane == "nats"
        if self._options.enable_local_indexer and not is_nats:
            logger.warning("%s", UNUSED_LOCAL_INDEXER)
        if self._ports is None:
            return
        if not is_nats:
            for text in unused_server("--event-plane nats"):
                logger.warning("%s", text)
            return
        with needing_nats("--event-plane nats"):
            from kvflash.transport.nats_connection import check_server  # noqa: PLC0415
        await asyncio.to_thread(check_server, NatsSettings.from_env())

    async def announce(self, block_size: int | None) -> list[str]:
        """Announce the events of every rank; with NATS start their relays. May be called again.

        Returns one location per rank. Raises ConfigError if the block size is unknown, and
        TransportError if NATS or discovery can't be reached.
        """
        if self._ports is None:
            return []
        if block_size is None:
            raise ConfigError(
                "the engine does not report its block size: set it with the engine's own flag"
            )
        options, runtime = self._options, self._component.runtime
        # A relay runs on the engine's machine.
        host = _ENGINE_HOST if options.event_plane == "nats" else runtime.host
        ranks = list(enumerate(self._ports.endpoints(host, self._ranks)))
        for rank, (events, replay) in ranks[len(self._publishers) :]:
            publisher = await asyncio.to_thread(
                KvEventPublisher,
                self._component,
                kv_block_size=block_size,
                dp_rank=rank,
                enable_local_indexer=options.enable_local_indexer,
                zmq_endpoint=events,
                zmq_replay_endpoint=replay,
                loop=asyncio.get_running_loop(),
                event_plane=options.event_plane,
            )
            self._publishers.append(publisher)
        return [publisher.endpoint for publisher in self._publishers]

    async def close(self) -> None:
        """Relay the remaining events, and stop."""
        await asyncio.gather(*(asyncio.to_thread(one.shutdown) for one in self._publishers))
