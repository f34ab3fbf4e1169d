"""Carries event batches out: a ZMQ PUB socket, and a ROUTER socket that replays missed ones."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice

import zmq
import zmq.asyncio

from kvflash.mocker.config import EventEra, PortChoice
from kvflash.mocker.events import Event, encode_batch
from kvflash.publisher.brokered import BrokerOutlet

logger = logging.getLogger(__name__)

# Ends a replay: sequence number -1.
END_SEQUENCE = (-1).to_bytes(8, "big", signed=True)
# Batches queued for a slow subscriber; beyond that ZMQ drops them, and the subscriber sees a gap.
PUB_QUEUE_BATCHES = 100_000
# A socket that is closed may still hand over what it has for this long.
LINGER_MS = 500
# A replay lets others run after this many batches.
REPLAY_BURST_BATCHES = 256


class EventPublisher:
    """Numbers event batches from 0, publishes them and keeps the last ones for replay."""

    kind = "zmq"

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
    ) -> None:
        """Bind the sockets.

        Args:
            host: Interface to bind to.
            events_port: Port of the PUB socket, or "auto".
            replay_port: Port of the ROUTER socket, "auto", or 0 for none.
            topic: First frame of every message.
            era: Wire shape.
            replay_buffer: Batches kept for replay.
            dp_rank: Data parallel rank in every batch.

        Raises:
            OSError: A port is taken or the host is not ours.
        """
        self._topic = topic.encode()
        self._era = era
        self._dp_rank = dp_rank
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=replay_buffer)
        self._next_sequence = 0
        self._context = zmq.asyncio.Context()
        self._router: zmq.asyncio.Socket | None = None
        self._replaying: asyncio.Task[None] | None = None
        self.replay_url: str | None = None
        try:
            # Publishing never waits, so this one is a plain socket.
            self._pub = zmq.Context(shadow=self._context.underlying).socket(zmq.PUB)
            self._pub.set_hwm(PUB_QUEUE_BATCHES)
            self.events_url = _bind(self._pub, host, events_port, "--zmq-events-port")
            if replay_port != 0:
                self._router = self._context.socket(zmq.ROUTER)
                # Room for one whole replay per client; a client that does not read loses the rest.
                self._router.set_hwm(replay_buffer + REPLAY_BURST_BATCHES)
                self.replay_url = _bind(self._router, host, replay_port, "--zmq-replay-port")
        except OSError:
            self._close_sockets(0)
            raise

    @property
    def next_sequence(self) -> int:
        """Sequence number of the next batch, which is the number of batches so far."""
        return self._next_sequence

    def start(self) -> None:
        """Begin to answer replay requests; needs a running event loop."""
        if self._router is not None:
            self._replaying = asyncio.create_task(self._serve_replay(self._router))

    def publish(self, events: Sequence[Event]) -> None:
        """Send one batch; without effect for no events.

        Never waits: a subscriber that does not keep up loses batches and sees a gap.
        """
        if not events:
            return
        payload = encode_batch(
            events, timestamp_s=time.time(), dp_rank=self._dp_rank, era=self._era
        )
        sequence = self._next_sequence
        # First into the buffer: a number that was seen can always be asked for.
        self._ring.append((sequence, payload))
        self._next_sequence += 1
        self._pub.send_multipart([self._topic, sequence.to_bytes(8, "big"), payload])

    async def close(self) -> None:
        """Stop replaying and close the sockets."""
        if self._replaying is not None:
            self._replaying.cancel()
            await asyncio.gather(self._replaying, return_exceptions=True)
        self._close_sockets(LINGER_MS)
        # Waits for up to the linger time, so not in the event loop.
        await asyncio.to_thread(self._context.term)

    def _close_sockets(self, linger_ms: int) -> None:
        self._pub.close(linger_ms)
        if self._router is not None:
            self._router.close(linger_ms)

    async def _serve_replay(self, router: zmq.asyncio.Socket) -> None:
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 3 or frames[1] != b"" or len(frames[2]) != 8:
                logger.warning("dropped a malformed replay request of %d frames", len(frames))
                continue
            try:
                await self._replay(router, frames[0], int.from_bytes(frames[2], "big"))
            except zmq.ZMQError as error:
                # A client that left must not end the service for the others.
                logger.warning("replay was cut short: %s", error)

    async def _replay(self, router: zmq.asyncio.Socket, client: bytes, start: int) -> None:
        oldest = self._ring[0][0] if self._ring else self._next_sequence
        # A copy: batches published meanwhile reach the client by the PUB socket.
        skipped = min(max(0, start - oldest), len(self._ring))
        batches = list(islice(self._ring, skipped, None))
        header = [client, b""] if self._era == "positional" else [client, b"", self._topic]
        for sent, (sequence, payload) in enumerate(batches):
            await router.send_multipart([*header, sequence.to_bytes(8, "big"), payload])
            if sent % REPLAY_BURST_BATCHES == 0:
                await asyncio.sleep(0)
        await router.send_multipart([*header, END_SEQUENCE, b""])


class BrokerPublisher:
    """The same over NATS; what is stored there needs no replay."""

    replay_url: str | None = None

    def __init__(self, outlet: BrokerOutlet, *, era: EventEra, dp_rank: int) -> None:
        """Publish to an outlet, in a wire shape and with a rank in every batch."""
        self._outlet, self._era, self._dp_rank = outlet, era, dp_rank
        self.kind = outlet.kind
        self.events_url = outlet.endpoint

    @property
    def next_sequence(self) -> int:
        """Sequence number of the next batch, which is the number of batches so far."""
        return self._outlet.next_sequence

    def start(self) -> None:
        """Nothing is to be begun."""

    def publish(self, events: Sequence[Event]) -> None:
        """Send one batch; without effect for no events."""
        if events:
            self._outlet.put(
                encode_batch(events, timestamp_s=time.time(), dp_rank=self._dp_rank, era=self._era)
            )

    async def close(self) -> None:
        """Store what waits, and end."""
        await asyncio.to_thread(self._outlet.close)


def _bind(
    socket: zmq.Socket[bytes] | zmq.asyncio.Socket, host: str, port: PortChoice, flag: str
) -> str:
    """Bind and return the URL to connect to."""
    is_ipv6 = ":" in host
    socket.setsockopt(zmq.IPV6, int(is_ipv6))
    netloc = f"[{host}]" if is_ipv6 else host
    try:
        socket.bind(f"tcp://{netloc}:{0 if port == 'auto' else port}")
    except zmq.ZMQError as error:
        where = f"{flag} {port} on {host}"
        if error.errno in (errno.ENODEV, errno.EADDRNOTAVAIL, errno.EINVAL):
            where += (
                " (--host, or KVFLASH_HOST with --endpoint, must be an address of this machine)"
            )
        raise OSError(error.errno, f"{where}: {error.strerror}") from error
    endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return f"tcp://{reachable(host)}:{endpoint.rpartition(':')[2]}"


def reachable(host: str) -> str:
    """Host part of a URL to an interface; a wildcard becomes the loopback address."""
    host = {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
