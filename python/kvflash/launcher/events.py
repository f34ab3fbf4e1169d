"""Where an engine's events are announced: its own sockets, or NATS, to which they are relayed."""

import asyncio
import logging

from kvflash.cluster_flags import unused_server
from kvflash.errors import ConfigError
from kvflash.launcher.command import EventPorts
from kvflash.launcher.options import LauncherOptions
from kvflash.publisher.announce import events_key, events_value
from kvflash.publisher.brokered import UNUSED_LOCAL_INDEXER, BrokerOutlet, Served
from kvflash.publisher.relay import Relay
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
        self._relays: dict[int, Relay] = {}

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

    async def announce(self, served: Served, block_size: int | None) -> list[str]:
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
        runtime, places = self._component.runtime, []
        for rank, (events, replay) in enumerate(self._ports.endpoints(runtime.host, self._ranks)):
            where = events_value("zmq", events, replay, block_size)
            if self._options.event_plane == "nats":
                relay = await asyncio.to_thread(self._relay, rank, served, block_size)
                where = events_value(relay.kind, relay.endpoint, None, block_size)
            await runtime.announce(events_key(self._component, runtime.instance_id, rank), where)
            places.append(where["endpoint"])
        return places

    async def close(self) -> None:
        """Relay the remaining events, and stop."""
        await asyncio.gather(*(asyncio.to_thread(relay.close) for relay in self._relays.values()))

    def _relay(self, rank: int, served: Served, block_size: int) -> Relay:
        if rank not in self._relays:
            assert self._ports is not None
            events, replay = self._ports.endpoints(_ENGINE_HOST, self._ranks)[rank]
            self._relays[rank] = Relay(
                BrokerOutlet(
                    self._component,
                    instance_id=self._component.runtime.instance_id,
                    dp_rank=rank,
                    block_size=block_size,
                    served=lambda: served,
                    has_local_index=self._options.enable_local_indexer,
                ),
                events,
                replay,
                # With a custom prefix the engine's topic is unknown.
                topic="",
            )
        return self._relays[rank]
