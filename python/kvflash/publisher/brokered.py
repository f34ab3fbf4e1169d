"""Events over NATS: into the component's stream, or from the worker's local index."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

from kvflash._core import EventOutbox
from kvflash.errors import ClosedError, KvflashError
from kvflash.outage import Outage
from kvflash.publisher.stream import Sender
from kvflash.runtime import Component
from kvflash.servers import NatsSettings, missing_nats
from kvflash.transport import names

logger = logging.getLogger(__name__)

#: The warning of workers with this flag whose events go over ZMQ.
UNUSED_LOCAL_INDEXER = (
    "--enable-local-indexer has no effect without --event-plane nats: routers hear of events from "
    "the engine's own sockets and ask its replay for what they missed"
)

_POLL_S = 0.05
_UNNAMED_S = 10.0
_RETRY_S = 1.0
_CLOSE_S_MAX = 10.0
# Batches that wait for the model's name or the server; above this limit the oldest are dropped.
_WAITING_BYTES_MAX = 64 * 1024 * 1024
# A batch is closed at this size in bytes, or at the server's limit if that is smaller.
_BATCH_BYTES_MAX = 512 * 1024
# Message overhead besides the events: the headers, with the model's name.
_HEAD_BYTES_MAX = 16 * 1024


class _Epochs:
    """Start times of outlets in nanoseconds; they grow even if the clock is set back.

    Routers drop the batches of an earlier epoch than the worker's latest.
    """

    def __init__(self) -> None:
        self._last = 0
        self._lock = threading.Lock()

    def next(self) -> int:
        with self._lock:
            self._last = max(time.time_ns(), self._last + 1)
            return self._last


_EPOCHS = _Epochs()


@dataclass(frozen=True)
class Served:
    """The model that the events belong to, by the name that routers know."""

    model_name: str
    is_prefill: bool = False


class _Writer(Protocol):
    counts: dict[str, int]

    def put(self, sequence: int, payload: bytes) -> None: ...
    def flush(self, timeout_s: float) -> bool: ...
    def close(self) -> None: ...


class BrokerOutlet:
    """Numbers batches and hands them to NATS once the model that they belong to is known.

    ``served`` returns that model, or None while it is unknown. With has_local_index the outlet
    serves a local index over NATS Core instead of writing to the stream. It raises a TransportError
    or ConfigError if NATS does not answer, refuses the login, or its client is not installed.
    """

    def __init__(
        self,
        component: Component,
        *,
        instance_id: int,
        dp_rank: int,
        block_size: int,
        served: Callable[[], Served | None],
        has_local_index: bool = False,
        settings: NatsSettings | None = None,
    ) -> None:
        try:
            from kvflash.transport.nats_connection import check_server  # noqa: PLC0415
        except ImportError as error:
            raise missing_nats("event_plane nats", error) from None
        self._where = (component.namespace.name, component.name)
        self._instance_id, self._dp_rank, self.block_size = instance_id, dp_rank, block_size
        self._served, self._has_local_index = served, has_local_index
        self._settings = settings or NatsSettings.from_env()
        self._epoch = _EPOCHS.next()
        self.kind = "nats" if has_local_index else "jetstream"
        place = names.event_subject if has_local_index else names.stream_name
        self._place = place(*self._where)
        self.endpoint = f"{self.kind}://{self._place}/{instance_id}/{dp_rank}"
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._waiting_bytes = 0
        self._next_sequence = 0
        self._dropped = 0
        self._writer: _Writer | None = None
        self._is_closed = threading.Event()
        message_bytes_max = check_server(self._settings)
        # The server is sure to accept batches of this size.
        self.batch_bytes_max = max(1, min(_BATCH_BYTES_MAX, message_bytes_max - _HEAD_BYTES_MAX))
        self._thread = threading.Thread(target=self._open, name="kvflash-outlet", daemon=True)
        self._thread.start()

    def put(self, payload: bytes) -> None:
        """Send an encoded batch; returns at once. ClosedError once the outlet is closed."""
        with self._lock:
            if self._is_closed.is_set():
                raise ClosedError("the publisher is shut down")
            sequence, self._next_sequence = self._next_sequence, self._next_sequence + 1
            if self._writer is not None:
                self._writer.put(sequence, payload)
                return
            self._waiting.append((sequence, payload))
            self._waiting_bytes += len(payload)
            while self._waiting_bytes > _WAITING_BYTES_MAX and len(self._waiting) > 1:
                self._waiting_bytes -= len(self._waiting.popleft()[1])
                self._dropped += 1

    def skip(self, batches: int) -> None:
        """Skip sequence numbers of lost batches, so that readers see a gap."""
        with self._lock:
            self._next_sequence += batches

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until all batches are stored (with a local index: sent); False after the timeout."""
        end = time.monotonic() + timeout_s
        while self._writer is None and not self._is_closed.is_set():
            if time.monotonic() > end:
                return not self._waiting
            time.sleep(_POLL_S)
        return self._writer is None or self._writer.flush(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """Send queued batches, for a few seconds at most, and close."""
        with self._lock:
            if self._is_closed.is_set():
                return
            self._is_closed.set()
        self._thread.join(_CLOSE_S_MAX)
        if self._writer is not None:
            self._writer.close()

    def stats(self) -> dict[str, int]:
        """Counters; units are in the names."""
        counts = {
            "batches_total": self._next_sequence,
            "waiting_bytes": self._waiting_bytes,
            "dropped_batches_total": self._dropped,
        }
        for name, count in (self._writer.counts if self._writer else {}).items():
            counts[f"{name}_total"] = counts.get(f"{name}_total", 0) + count
        return counts

    def _open(self) -> None:
        since, has_warned = time.monotonic(), False
        while (served := self._served()) is None:
            if self._is_closed.wait(_POLL_S):
                return
            if not has_warned and time.monotonic() - since > _UNNAMED_S:
                has_warned = True
                logger.warning(
                    "events wait for register_llm(), which names their model; or set the "
                    "publisher's model_name"
                )
        outage = Outage(logger, "events are sent")
        while True:
            try:
                writer = self._make(served)
                break
            except KvflashError as error:
                outage.lasts(f"events are not sent: {error}; trying again")
                if self._is_closed.wait(_RETRY_S):
                    return
        outage.ends()
        with self._lock:
            for sequence, payload in self._waiting:
                writer.put(sequence, payload)
            self._waiting.clear()
            self._waiting_bytes = 0
            self._writer = writer

    def _make(self, served: Served) -> _Writer:
        from kvflash.state.frames import Origin, event_headers, event_key  # noqa: PLC0415

        origin = Origin(
            instance_id=self._instance_id,
            dp_rank=self._dp_rank,
            epoch=self._epoch,
            model_name=served.model_name,
            block_size=self.block_size,
            tenant_id="prefill" if served.is_prefill else "default",
        )
        headers = partial(event_headers, origin)
        if not self._has_local_index:
            from kvflash.transport.jetstream_writer import JetStreamWriter  # noqa: PLC0415

            return JetStreamWriter(
                self._place,
                headers=headers,
                key=partial(event_key, origin),
                settings=self._settings,
            )
        from kvflash.transport.local_index import LocalIndex  # noqa: PLC0415
        from kvflash.transport.nats_core import NatsCorePublisher  # noqa: PLC0415

        publisher = NatsCorePublisher(
            self._place,
            names.query_subject(*self._where, self._instance_id, self._dp_rank),
            LocalIndex(**asdict(origin)),
            headers=headers,
            settings=self._settings,
        )
        publisher.start()
        return publisher


class BrokerStream(Sender):
    """Sends encoded events in batches to an outlet; over NATS what EventStream is over ZMQ."""

    def __init__(
        self, outlet: BrokerOutlet, *, dp_rank: int, tick_ms: float, shape: str = "own"
    ) -> None:
        self._outlet = outlet
        self.kind, self.endpoint = outlet.kind, outlet.endpoint
        # The server or the worker's index keeps batches for replay, so no ring is needed here.
        outbox = EventOutbox(
            outlet.block_size,
            shape=shape,
            dp_rank=dp_rank,
            tick_s=tick_ms / 1000,
            event_bytes_max=outlet.batch_bytes_max,
            batch_bytes_max=outlet.batch_bytes_max,
            ring_batches=1,
            ring_bytes=1,
        )
        super().__init__(outbox)

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until everything queued before is stored; False if that took longer."""
        end = time.monotonic() + timeout_s
        return super().flush(timeout_s) and self._outlet.flush(max(0.0, end - time.monotonic()))

    def close(self) -> bool:
        """Send what is queued and end; see :meth:`Sender.close`."""
        is_ours = super().close()
        if is_ours:
            self._outlet.close()
        return is_ours

    def stats(self) -> dict[str, int]:
        """Counters and gauges; units are in the names."""
        return {**super().stats(), **self._outlet.stats()}

    def _send(self, number: int, payload: bytes) -> None:
        try:
            self._outlet.put(payload)
        except KvflashError as error:
            logger.error("batch %d of the events is lost: %s", number, error)


def served_of(cards: dict[str, Any]) -> Served | None:
    """The model in a process's model cards; None without one."""
    for card in cards.values():
        return Served(str(card["model_name"]), "prefill" in card.get("model_type", ()))
    return None
