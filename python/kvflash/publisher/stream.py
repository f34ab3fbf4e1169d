"""One stream of event batches: numbered from 0, published, and kept for those who missed some.

The sockets belong to a thread of the stream's own. Others hand it encoded events, from any thread,
with or without an event loop.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import zmq

from kvflash.errors import ClosedError, ConfigError
from kvflash.publisher.wire import encode_batch
from kvflash.transport.zmq_socket import netloc

__all__ = ["EventStream"]

logger = logging.getLogger(__name__)

_END_OF_REPLAY = b"\xff" * 8
# Batches queued for a slow subscriber; beyond that ZMQ drops them, and the subscriber sees a gap.
_PUB_QUEUE_BATCHES = 100_000
# A batch is closed at this many events or bytes; receivers take 65,536 and 16 MiB.
_BATCH_EVENTS_MAX = 1_024
_BATCH_BYTES_MAX = 1 << 20
_EVENT_BYTES_MAX = 8 << 20
# Of each replay this many batches are sent before others get their turn.
_REPLAY_BURST_BATCHES = 256
# Replays under way at a time; requests beyond that are dropped, their senders ask again.
_REPLAYS_MAX = 64
# Sockets that are closed may still hand over what they have for this long.
_LINGER_MS = 500
_CLOSE_S_MAX = 10.0


class EventStream:
    """Event batches of one publisher on a ZMQ PUB socket, with a ROUTER socket that replays them.

    Consistency: events are published in the order in which `put` took them; those of one call stay
        together. Numbers are consecutive from 0.
    Cost: a call copies nothing and waits only while more than `pending_bytes_max` are queued.

    Attributes:
        event_bytes_max: What a single event should not exceed.
    """

    event_bytes_max = _EVENT_BYTES_MAX

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        replay_port: int = 0,
        topic: str = "kv-events",
        dp_rank: int = 0,
        tick_ms: float = 1.0,
        ring_batches: int = 10_000,
        ring_bytes: int = 64 << 20,
        pending_bytes_max: int = 16 << 20,
    ) -> None:
        """Bind both sockets and start the thread.

        Args:
            host: Interface to bind to; a wildcard (0.0.0.0, ::, *) for all.
            port: Port of the PUB socket; 0 takes a free one.
            replay_port: Port of the ROUTER socket; 0 takes a free one.
            topic: First frame of every message.
            dp_rank: Data parallel rank in every batch.
            tick_ms: How long the first event of a batch waits for more.
            ring_batches: Batches kept for replay.
            ring_bytes: Memory that they may take; the oldest go first.
            pending_bytes_max: Encoded events that may wait for the thread; beyond it `put` waits.

        Raises:
            ConfigError: A port is taken, or the host is not this machine's.
        """
        self._topic = topic.encode()
        self._dp_rank = dp_rank
        self._tick_s = tick_ms / 1000
        self._pending_bytes_max = pending_bytes_max
        self._ring_batches, self._ring_bytes_max = ring_batches, ring_bytes
        # Shared with callers, under the lock of `_changed`.
        self._changed = threading.Condition()
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0
        self._taken = self._sent = 0
        self._is_awake = False
        self._is_closing = False
        self._process = os.getpid()
        # The thread's own; others read single values.
        self._ring: deque[tuple[int, bytes]] = deque()
        self._ring_bytes = 0
        self._next_sequence = 0
        self._replays: dict[bytes, Iterator[tuple[int, bytes]]] = {}
        self._replays_total = self._replays_refused_total = 0
        self._context: zmq.Context[Any] = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        try:
            self._pub.set_hwm(_PUB_QUEUE_BATCHES)
            # Room for a whole replay; a client that does not read loses the rest and asks again.
            self._router.set_hwm(ring_batches + _REPLAY_BURST_BATCHES)
            self.endpoint = _bind(self._pub, host, port, "port")
            self.replay_endpoint = _bind(self._router, host, replay_port, "replay_port")
        except ConfigError:
            self._close_sockets()
            raise
        self._wake_reader, self._wake_writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name="kvflash-events", daemon=True)
        self._thread.start()

    def put(self, events: Sequence[bytes]) -> None:
        """Queue encoded events; they go out within the tick.

        Raises:
            ClosedError: The stream is closed, or belongs to the process that this one was forked
                from.
        """
        if self._process != os.getpid():
            raise ClosedError("the publisher belongs to the process that created it, not to a fork")
        with self._changed:
            while self._pending_bytes > self._pending_bytes_max and not self._is_closing:
                self._changed.wait()
            if self._is_closing:
                raise ClosedError("the publisher is shut down")
            self._pending.extend(events)
            self._pending_bytes += sum(map(len, events))
            self._taken += len(events)
            self._wake()

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until everything that was put before is handed to ZMQ.

        Returns:
            False if that took longer than the timeout.
        """
        with self._changed:
            wanted = self._taken
            return self._changed.wait_for(lambda: self._sent >= wanted, timeout_s)

    def close(self) -> None:
        """Send what is queued and close the sockets; without effect the second time."""
        if self._process != os.getpid():
            return
        with self._changed:
            if not self._is_closing:
                self._is_closing = True
                self._changed.notify_all()
                self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S_MAX)

    def stats(self) -> dict[str, int]:
        """Counters and gauges of the stream; units are in the names."""
        with self._changed:
            return {
                "events_total": self._taken,
                "batches_total": self._next_sequence,
                "pending_events": self._taken - self._sent,
                "pending_bytes": self._pending_bytes,
                "ring_batches": len(self._ring),
                "ring_bytes": self._ring_bytes,
                "replays_total": self._replays_total,
                "replays_refused_total": self._replays_refused_total,
            }

    def _wake(self) -> None:
        """Tell the thread, once; the lock is held, so that the pipe is open."""
        if not self._is_awake:
            self._is_awake = True
            os.write(self._wake_writer, b"\0")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_reader, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        due: float | None = None
        try:
            while True:
                ready = dict(poller.poll(self._wait_ms(due)))
                if self._wake_reader in ready:
                    os.read(self._wake_reader, 1)
                    due = time.monotonic() + self._tick_s
                if self._router in ready:
                    self._accept_replay()
                self._go_on_replaying()
                is_closing = self._is_closing
                if due is not None and (
                    is_closing
                    or time.monotonic() >= due
                    or self._pending_bytes >= _BATCH_BYTES_MAX
                    or len(self._pending) >= _BATCH_EVENTS_MAX
                ):
                    due = due if self._send_batch() else None
                if is_closing and due is None:
                    return
        except Exception:
            logger.exception("the event publisher failed; it publishes nothing any more")
        finally:
            self._end()

    def _wait_ms(self, due: float | None) -> int | None:
        if self._replays:
            return 0
        # Rounded up: zero would mean not to wait at all.
        return None if due is None else math.ceil(max(0.0, due - time.monotonic()) * 1000)

    def _send_batch(self) -> bool:
        """Publish one batch.

        Returns:
            Whether more is queued. If not, the next `put` wakes the thread.
        """
        events: list[bytes] = []
        size = 0
        with self._changed:
            while self._pending and len(events) < _BATCH_EVENTS_MAX:
                if events and size + len(self._pending[0]) > _BATCH_BYTES_MAX:
                    break
                events.append(self._pending.popleft())
                size += len(events[-1])
            self._pending_bytes -= size
            if not self._pending:
                self._is_awake = False
            has_more = bool(self._pending)
        if events:
            payload = encode_batch(events, timestamp_s=time.time(), dp_rank=self._dp_rank)
            sequence = self._next_sequence
            # First into the ring: a number that was seen can always be asked for.
            self._keep(sequence, payload)
            self._pub.send_multipart([self._topic, sequence.to_bytes(8, "big"), payload])
        with self._changed:
            self._sent += len(events)
            self._changed.notify_all()
        return has_more

    def _keep(self, sequence: int, payload: bytes) -> None:
        self._ring.append((sequence, payload))
        self._ring_bytes += len(payload)
        self._next_sequence = sequence + 1
        while len(self._ring) > self._ring_batches or (
            self._ring_bytes > self._ring_bytes_max and len(self._ring) > 1
        ):
            self._ring_bytes -= len(self._ring.popleft()[1])

    def _accept_replay(self) -> None:
        frames = self._router.recv_multipart()
        if len(frames) != 3 or frames[1] != b"" or len(frames[2]) != 8:
            logger.warning("dropped a malformed replay request of %d frames", len(frames))
            return
        client, start = frames[0], int.from_bytes(frames[2], "big")
        if client not in self._replays and len(self._replays) >= _REPLAYS_MAX:
            self._replays_refused_total += 1
            return
        self._replays_total += 1
        oldest = self._ring[0][0] if self._ring else self._next_sequence
        skipped = min(max(0, start - oldest), len(self._ring))
        # A copy: batches published meanwhile reach the client by the PUB socket.
        self._replays[client] = iter(list(islice(self._ring, skipped, None)))

    def _go_on_replaying(self) -> None:
        for client, batches in list(self._replays.items()):
            sent = 0
            for sequence, payload in islice(batches, _REPLAY_BURST_BATCHES):
                self._answer(client, sequence.to_bytes(8, "big"), payload)
                sent += 1
            if sent < _REPLAY_BURST_BATCHES:
                del self._replays[client]
                self._answer(client, _END_OF_REPLAY, b"")

    def _answer(self, client: bytes, sequence: bytes, payload: bytes) -> None:
        # A client that left is no error, and must not end the service for the others.
        with contextlib.suppress(zmq.ZMQError):
            frames = [client, b"", self._topic, sequence, payload]
            self._router.send_multipart(frames, zmq.NOBLOCK)

    def _end(self) -> None:
        with self._changed:
            self._is_closing = True
            self._pending.clear()
            self._pending_bytes = 0
            self._sent = self._taken
            # Nobody writes to the pipe from here on.
            self._is_awake = True
            self._changed.notify_all()
            os.close(self._wake_reader)
            os.close(self._wake_writer)
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._pub.close(_LINGER_MS)
        self._router.close(_LINGER_MS)
        self._context.term()


def _bind(socket: zmq.Socket[Any], host: str, port: int, field: str) -> str:
    """Bind and return the URL to connect to."""
    host = host.strip("[]")
    address = netloc(socket, host)
    try:
        socket.bind(f"tcp://{address}:{port}")
    except zmq.ZMQError as error:
        is_foreign = error.errno in (errno.ENODEV, errno.EADDRNOTAVAIL)
        name, value = ("host", host) if is_foreign else (field, port)
        raise ConfigError(f"{name}: can't bind {value} on {host}: {error.strerror}") from error
    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    # A wildcard is no address to connect to.
    reachable = {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "::": "[::1]"}.get(host, address)
    return f"tcp://{reachable}:{bound}"
