"""One stream of event batches: numbered from 0, published, and kept for those who missed some.

What is to be sent is decided in :class:`kvflash._core.EventOutbox`, which takes events from any
thread, with or without an event loop. The sockets belong to a thread of the stream's own.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import zmq

from kvflash._core import EventOutbox
from kvflash.errors import ClosedError, ConfigError
from kvflash.transport.zmq_socket import netloc

__all__ = ["EventOutbox", "EventStream", "Sender", "reachable"]

logger = logging.getLogger(__name__)

# Batches queued for a slow subscriber; beyond that ZMQ drops them, and the subscriber sees a gap.
_PUB_QUEUE_BATCHES = 100_000
# Room in the replay socket beside a whole ring: what one turn of a replay brings.
_REPLAY_BURST_BATCHES = 256
# Sockets that are closed may still hand over what they have for this long.
_LINGER_MS = 500
_CLOSE_S_MAX = 10.0
_FOREIGN = (errno.ENODEV, errno.EADDRNOTAVAIL, errno.EINVAL)


class Sender(ABC):
    """A thread that sends what an outbox hands over, and answers those who ask for it again.

    Args:
        outbox: What takes events.
        router: Where others ask, if they can.
        head: Frames between a client's name and the number of a replayed batch.

    Attributes:
        outbox: What takes events.
    """

    kind: str
    endpoint: str
    replay_endpoint: str | None = None

    def __init__(
        self,
        outbox: EventOutbox,
        router: zmq.Socket[bytes] | None = None,
        head: Sequence[bytes] = (),
    ) -> None:
        self.outbox = outbox
        self._router, self._head = router, head
        self._thread = threading.Thread(target=self._run, name="kvflash-events", daemon=True)
        self._thread.start()

    def put(self, events: Sequence[bytes]) -> None:
        """Queue encoded events, which stay together; they go out within the tick.

        Raises:
            ClosedError: It is closed, or belongs to the process that this one was forked from.
        """
        self.outbox.put(list(events))

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until everything that was put before is sent; False if that took longer."""
        return self.outbox.flush(timeout_s)

    def close(self) -> bool:
        """Send what is queued and end; False, and without effect, in a fork."""
        try:
            self.outbox.close()
        except ClosedError:
            return False
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S_MAX)
        return True

    def stats(self) -> dict[str, int]:
        """Counters and gauges; units are in the names."""
        return self.outbox.stats()

    @abstractmethod
    def _send(self, number: int, payload: bytes) -> None:
        """Send a batch, in the thread."""

    def _ended(self) -> None:
        self.outbox.end()

    def _run(self) -> None:
        poller, outbox, router = zmq.Poller(), self.outbox, self._router
        for source in (outbox.fileno(), router):
            if source is not None:
                poller.register(source, zmq.POLLIN)
        try:
            while not outbox.is_over():
                ready = dict(poller.poll(outbox.wait_ms()))
                if router is not None:
                    self._serve(router, router in ready)
                # One in a turn, so that replays have theirs.
                if (batch := outbox.take()) is not None:
                    self._send(*batch)
        except Exception:
            logger.exception("the event publisher failed and publishes nothing from now on")
        finally:
            self._ended()

    def _serve(self, router: zmq.Socket[bytes], is_asked: bool) -> None:
        if is_asked and not self.outbox.ask(frames := router.recv_multipart()):
            logger.warning("dropped a malformed replay request of %d frames", len(frames))
        for client, number, payload in self.outbox.replies():
            # A client that left is no error, and must not end the service for the others.
            with contextlib.suppress(zmq.ZMQError):
                parts = [client, b"", *self._head, number, payload]
                router.send_multipart(parts, zmq.NOBLOCK)


class EventStream(Sender):
    """Event batches of one publisher on a ZMQ PUB socket, with a ROUTER socket that replays them.

    Consistency: events are published in the order in which `put` took them; those of one call stay
        together. Numbers are consecutive from 0.
    Cost: a call copies nothing and waits only while more than `pending_bytes_max` are queued.
    """

    kind = "zmq"

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        replay_port: int | None = 0,
        topic: str = "kv-events",
        dp_rank: int = 0,
        tick_ms: float = 1.0,
        ring_batches: int = 10_000,
        ring_bytes: int = 64 << 20,
        pending_bytes_max: int = 16 << 20,
        block_size: int = 1,
        shape: str = "own",
        fields: tuple[str, str, str] = ("host", "port", "replay_port"),
    ) -> None:
        """Bind both sockets and start the thread.

        Args:
            host: Interface to bind to; a wildcard (0.0.0.0, ::, *) for all.
            port: Port of the PUB socket; 0 takes a free one.
            replay_port: Port of the ROUTER socket; 0 takes a free one, None is for no replay.
            topic: First frame of every message.
            dp_rank: Data parallel rank in every batch.
            tick_ms: How long the first event of a batch waits for more.
            ring_batches: Batches kept for replay.
            ring_bytes: Memory that they may take; the oldest go first.
            pending_bytes_max: Encoded events that may wait for the thread; beyond it `put` waits.
            block_size: Tokens of a block that the outbox is told of.
            shape: Of events, see :class:`kvflash._core.EventOutbox`.
            fields: What the host and the ports are called in errors.

        Raises:
            ConfigError: A port is taken, or the host is not this machine's.
        """
        outbox = EventOutbox(
            block_size,
            shape=shape,
            dp_rank=dp_rank,
            tick_s=tick_ms / 1000,
            ring_batches=ring_batches,
            ring_bytes=ring_bytes,
            pending_bytes_max=pending_bytes_max,
        )
        self._topic = topic.encode()
        self._context: zmq.Context[Any] = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        router = None if replay_port is None else self._context.socket(zmq.ROUTER)
        self._sockets = [socket for socket in (self._pub, router) if socket is not None]
        try:
            self._pub.set_hwm(_PUB_QUEUE_BATCHES)
            self.endpoint = _bind(self._pub, host, port, (fields[0], fields[1]))
            if router is not None:
                # A whole replay; a client that does not read loses the rest and asks again.
                router.set_hwm(ring_batches + _REPLAY_BURST_BATCHES)
                bound = _bind(router, host, replay_port or 0, (fields[0], fields[2]))
                self.replay_endpoint = bound
        except ConfigError:
            self._close_sockets()
            raise
        # Engines of that age replay without the topic.
        super().__init__(outbox, router, [] if shape == "positional" else [self._topic])

    def _send(self, number: int, payload: bytes) -> None:
        self._pub.send_multipart([self._topic, number.to_bytes(8, "big"), payload])

    def _ended(self) -> None:
        super()._ended()
        self._close_sockets()

    def _close_sockets(self) -> None:
        for socket in self._sockets:
            socket.close(_LINGER_MS)
        self._context.term()


def _bind(socket: zmq.Socket[Any], host: str, port: int, fields: tuple[str, str]) -> str:
    """Bind and return the URL to connect to."""
    host = host.strip("[]")
    try:
        socket.bind(f"tcp://{netloc(socket, host)}:{port}")
    except zmq.ZMQError as error:
        name, value = (fields[0], host) if error.errno in _FOREIGN else (fields[1], port)
        raise ConfigError(f"{name}: can't bind {value} on {host}: {error.strerror}") from error
    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    return f"tcp://{reachable(host)}:{bound}"


def reachable(host: str) -> str:
    """Host part of a URL to an interface; a wildcard becomes the loopback address."""
    host = {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
