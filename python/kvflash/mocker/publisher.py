"""Carries event batches out: over the sockets of a publisher, or over NATS."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvflash.mocker.config import EventEra, PortChoice
from kvflash.mocker.events import Event, put
from kvflash.publisher.brokered import BrokerOutlet, BrokerStream
from kvflash.publisher.stream import EventStream, reachable

__all__ = ["BrokerPublisher", "EventPublisher", "reachable"]

_FIELDS = ("--host, or KVFLASH_HOST with --endpoint", "--zmq-events-port", "--zmq-replay-port")
# A pass says itself when its batch is complete.
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
        """Bind the sockets, and answer replay requests from now on.

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
            ConfigError: A port is taken or the host is not ours.
        """
        self._stream = EventStream(
            host=host,
            port=0 if events_port == "auto" else events_port,
            replay_port=0 if replay_port == "auto" else replay_port or None,
            topic=topic,
            dp_rank=dp_rank,
            tick_ms=_TICK_MS,
            ring_batches=replay_buffer,
            # As engines, which count batches only.
            ring_bytes=1 << 40,
            block_size=block_size,
            shape=era,
            fields=_FIELDS,
        )

    @property
    def kind(self) -> str:
        """Of what is announced."""
        return self._stream.kind

    @property
    def events_url(self) -> str:
        """Where the events are."""
        return self._stream.endpoint

    @property
    def replay_url(self) -> str | None:
        """Where they are replayed."""
        return self._stream.replay_endpoint

    def publish(self, events: Sequence[Event]) -> None:
        """Send one batch; without effect for no events.

        Never waits: a subscriber that does not keep up loses batches and sees a gap.
        """
        if events:
            put(self._stream.outbox, events)

    async def close(self) -> None:
        """Send what waits, and end."""
        # It waits for the thread, so not in the event loop.
        await asyncio.to_thread(self._stream.close)


class BrokerPublisher(EventPublisher):
    """The same over NATS; what is stored there needs no replay."""

    def __init__(self, outlet: BrokerOutlet, *, era: EventEra, dp_rank: int) -> None:
        """Publish to an outlet, in a wire shape and with a rank in every batch."""
        self._stream = BrokerStream(outlet, dp_rank=dp_rank, tick_ms=_TICK_MS, shape=era)
