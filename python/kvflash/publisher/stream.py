"""One stream of event batches: numbered from 0, published, and kept for replay."""

import contextlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import zmq

from kvflash._core import EventOutbox
from kvflash.address import reachable, unbindable
from kvflash.errors import ClosedError, ConfigError
from kvflash.transport.zmq_socket import bindable

__all__ = ["EventOutbox", "EventStream", "Sender"]

logger = logging.getLogger(__name__)

# Batches queued for a slow subscriber; beyond that ZMQ drops them and the subscriber sees a gap.
_PUB_QUEUE_BATCHES = 100_000
# Room in the replay socket besides a whole ring: one turn of a replay.
_REPLAY_BURST_BATCHES = 256
# How long closed sockets may still send what they hold.
_LINGER_MS = 500
_CLOSE_S_MAX = 10.0


class Sender(ABC):
    """A thread that sends an outbox's batches, and replays them to clients of ``router``.

    ``head`` goes between a client's identity and the number of a replayed batch.
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

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until everything queued before is sent; False if that took longer."""
        return self.outbox.flush(timeout_s)

    def close(self) -> bool:
        """Send queued events and close; False, and without effect, in a fork."""
        try:
            self.outbox.close()
        except ClosedError:
            return False
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S_MAX)
        return True

    def stats(self) -> dict[str, int]:
        """Counters and gauges; names include units."""
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
                # One batch per turn, so that replays get theirs.
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
            # A client that disconnected is not an error and must not stop the service for others.
            with contextlib.suppress(zmq.ZMQError):
                parts = [client, b"", *self._head, number, payload]
                router.send_multipart(parts, zmq.NOBLOCK)


class EventStream(Sender):
    """Event batches of one publisher on a ZMQ PUB socket, with a ROUTER socket for replays.

    Events are published in the order in which the outbox took them; those of one call stay
    together. Sequence numbers are consecutive from 0. A call copies nothing and waits only while
    more than `pending_bytes_max` are queued.
    """

    kind = "zmq"

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        own_host: str | None = None,
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
        """Bind both sockets and start the thread; ConfigError if an address can't be bound.

        ``host`` may be a wildcard: the endpoints then have ``own_host``, under which others reach
        this machine, or the loopback address. A port of 0 picks a free one, and a replay_port of
        None disables the replay. ``topic`` is the first frame of every message, and dp_rank is in
        every batch. The first event of a batch waits for more during ``tick_ms``. The ring keeps
        batches for replay, the newest up to both of its limits. ``shape`` is the format of events,
        see :class:`kvflash._core.EventOutbox`, and ``fields`` are the names of the host and ports
        in errors.
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
        try:
            self._pub.set_hwm(_PUB_QUEUE_BATCHES)
            own = f"tcp://{reachable(host.strip('[]'), own_host)}"
            bound = _bind(self._pub, host, port, (fields[0], fields[1]))
            self.endpoint = f"{own}:{bound}"
            if router is not None:
                # A whole replay; a client that does not read loses the rest and asks again.
                router.set_hwm(ring_batches + _REPLAY_BURST_BATCHES)
                bound = _bind(router, host, replay_port or 0, (fields[0], fields[2]))
                self.replay_endpoint = f"{own}:{bound}"
        except ConfigError:
            self._context.destroy(_LINGER_MS)
            raise
        # Engines that send this request omit the topic in replays.
        super().__init__(outbox, router, [] if shape == "positional" else [self._topic])

    def _send(self, number: int, payload: bytes) -> None:
        self._pub.send_multipart([self._topic, number.to_bytes(8, "big"), payload])

    def _ended(self) -> None:
        super()._ended()
        self._context.destroy(_LINGER_MS)


def _bind(socket: zmq.Socket[Any], host: str, port: int, fields: tuple[str, str]) -> str:
    """Bind, and return the port."""
    host = host.strip("[]")
    try:
        socket.bind(f"tcp://{bindable(socket, host)}:{port}")
    except zmq.ZMQError as error:
        fault = OSError(error.errno, error.strerror)
        raise unbindable(fields, host, port, fault) from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
