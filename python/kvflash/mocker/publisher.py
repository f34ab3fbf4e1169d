"""Sends event batches: over the sockets of a publisher, or over NATS."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvflash.mocker.config import EventEra, PortChoice
from kvflash.mocker.events import Event, put
from kvflash.publisher.stream import EventStream

if TYPE_CHECKING:
    from kvflash.publisher.brokered import BrokerOutlet, BrokerStream

__all__ = ["BrokerPublisher", "EventPublisher"]

_FIELDS = ("--host, or KVFLASH_HOST with --endpoint", "--zmq-events-port", "--zmq-replay-port")
# Each pass closes its batch explicitly.
_TICK_MS = 1_000.0


class EventPublisher:
    """Numbers event batches from 0, publishes them and keeps the last ones for replay."""

    _stream: EventStream | BrokerStream

    def __init__(
        self,
        *,
        host: str,
        events_port: PortChoice,
        replay_port: PortChoice,
        topic: str,
        era: EventEra,
        replay_buffer: int,
        dp_rank: int,
        block_size: int,
    ) -> None:
        """Bind the sockets, and start answering replay requests.

        Args:
            host: Interface to bind to.
            events_port: Port of the PUB socket, or "auto".
            replay_port: Port of the ROUTER socket, "auto", or 0 for none.
            topic: First frame of every message.
            era: Wire shape.
            replay_buffer: Batches kept for replay.
            dp_rank: Data parallel rank in every batch.
            block_size: Tokens in a block.

        Raises:
            ConfigError: A port is taken or the host is not local.
        """
        self._stream = EventStream(
            host=host,
            port=0 if events_port == "auto" else events_port,
            replay_port=0 if replay_port == "auto" else replay_port or None,
            topic=topic,
            dp_rank=dp_rank,
            tick_ms=_TICK_MS,
            ring_batches=replay_buffer,
            # Like engines, which only limit batches.
            ring_bytes=1 << 40,
            block_size=block_size,
            shape=era,
            fields=_FIELDS,
        )

    @property
    def kind(self) -> str:
        """The announced kind."""
        return self._stream.kind

    @property
    def events_url(self) -> str:
        """Where the events are published."""
        return self._stream.endpoint

    @property
    def replay_url(self) -> str | None:
        """Where they are replayed."""
        return self._stream.replay_endpoint

    def publish(self, events: Sequence[Event]) -> None:
        """Send one batch; without events, do nothing.

        Never waits: a subscriber that is too slow loses batches and sees a gap.
        """
        if events:
            put(self._stream.outbox, events)

    async def close(self) -> None:
        """Send queued batches, and close."""
        # It waits for its thread, so it must not run in the event loop.
        await asyncio.to_thread(self._stream.close)


class BrokerPublisher(EventPublisher):
    """Publishes over NATS instead; batches stored there need no replay."""

    def __init__(self, outlet: BrokerOutlet, *, era: EventEra, dp_rank: int) -> None:
        """Publish to an outlet, with a wire shape and a rank for every batch."""
        # Here, so that publishers with sockets need not wait for the runtime.
        from kvflash.publisher.brokered import BrokerStream  # noqa: PLC0415

        self._stream = BrokerStream(outlet, dp_rank=dp_rank, tick_ms=_TICK_MS, shape=era)
