"""Events over NATS: into the component's stream, or from the worker's local index."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvflash._core import EventOutbox
from kvflash.background import Background
from kvflash.errors import ClosedError, InvalidArgumentError, KvflashError
from kvflash.outage import Outage
from kvflash.publisher.stream import Sender
from kvflash.runtime import Component
from kvflash.servers import NatsSettings, needing_nats
from kvflash.transport import names
from kvflash.transport.origin import Origin

if TYPE_CHECKING:
    from kvflash.transport.jetstream import JetStreamLog
    from kvflash.transport.nats_core import NatsCorePublisher

logger = logging.getLogger(__name__)

#: The warning of workers with this flag whose events go over ZMQ.
UNUSED_LOCAL_INDEXER = (
    "--enable-local-indexer has no effect without --event-plane nats: routers hear of events from "
    "the engine's own sockets and ask its replay for what they missed"
)

_POLL_S = 0.05
_UNNAMED_S = 10.0
_RETRY_S = 0.1
_RETRY_S_MAX = 2.0
_CLOSE_S_MAX = 5.0
# Batches that wait for the model's name or the server; above this limit the oldest are dropped.
_WAITING_BYTES_MAX = 64 * 1024 * 1024
# A batch is closed at this size in bytes, or at the server's limit if that is smaller.
_BATCH_BYTES_MAX = 512 * 1024
# Message overhead besides the events: the headers, with the model's name.
_HEAD_BYTES_MAX = 16 * 1024


class _Epochs:
    """Start times of engines in nanoseconds; they grow even if the clock is set back.

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


class BrokerOutlet:
    """Numbers batches and sends them to NATS, in the background and in order.

    They wait until ``served`` returns the model that they belong to; None means that it is unknown.
    Then they go to the component's stream: a batch without an acknowledgement is sent again under
    the same key, without limit, and stored once. With has_local_index they go over NATS Core, from
    an index that routers query for batches they missed. A batch above the server's limit is
    dropped, as is the oldest when too many wait; readers see a gap.

    It raises a TransportError or ConfigError if NATS does not answer, refuses the login, or its
    client is not installed.
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
        with needing_nats("event_plane nats"):
            from kvflash.transport.nats_connection import connect  # noqa: PLC0415
        self._instance_id, self.dp_rank, self.block_size = instance_id, dp_rank, block_size
        self._served, self._has_local_index = served, has_local_index
        self._settings = settings or NatsSettings.from_env()
        self._epoch = _EPOCHS.next()
        self.kind = "nats" if has_local_index else "jetstream"
        place = names.event_subject if has_local_index else names.stream_name
        self._place = place(component.namespace.name, component.name)
        self.endpoint = f"{self.kind}://{self._place}/{instance_id}/{dp_rank}"
        self._changed = threading.Condition()
        # Epoch, number and content of batches.
        self._waiting: deque[tuple[int, int, bytes]] = deque()
        self._waiting_bytes = 0
        self._next_sequence = 0
        self._counts = {"batches_total": 0, "dropped_batches_total": 0, "errors_total": 0}
        if not has_local_index:
            self._counts["stored_batches_total"] = 0
        self._is_named = False
        # Ended: nothing is sent any more, whatever the reason.
        self._is_closed = self._has_ended = False
        self._news = asyncio.Event()
        #: The server is sure to accept batches of this size in bytes.
        self.batch_bytes_max = _BATCH_BYTES_MAX
        self._connect = connect
        self._background = Background(
            f"sending events to {self._place}, which loses them,", self._serve, is_cancelled=False
        )
        self._background.start_and_wait()

    def put(self, payload: bytes) -> None:
        """Send an encoded batch; returns at once. ClosedError once the outlet is closed."""
        with self._changed:
            if self._is_closed or self._has_ended:
                raise ClosedError("the publisher is shut down")
            self._waiting.append((self._epoch, self._next_sequence, payload))
            self._next_sequence += 1
            self._counts["batches_total"] += 1
            self._waiting_bytes += len(payload)
            # The first one may be in flight.
            while self._waiting_bytes > _WAITING_BYTES_MAX and len(self._waiting) > 2:
                self._waiting_bytes -= len(self._waiting[1][2])
                del self._waiting[1]
                self._counts["dropped_batches_total"] += 1
        self._background.call_soon(self._news.set)

    def skip(self, batches: int) -> None:
        """Skip sequence numbers of lost batches, so that readers see a gap."""
        with self._changed:
            self._next_sequence += batches
            self._counts["batches_total"] += batches

    def restart(self) -> None:
        """Number from 0 again, for an engine that has restarted: readers begin anew."""
        with self._changed:
            self._epoch, self._next_sequence = _EPOCHS.next(), 0

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until all batches are stored (with a local index: sent); False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def close(self) -> None:
        """Send queued batches, for a few seconds at most, and close."""
        if self._is_closed:
            return
        if self._is_named:
            self.flush(_CLOSE_S_MAX)
        with self._changed:
            self._is_closed = True
        self._background.call_soon(self._news.set)
        self._background.stop()

    def stats(self) -> dict[str, int]:
        """Counters; units are in the names."""
        return {"waiting_bytes": self._waiting_bytes, **self._counts}

    # -- everything below runs in the background

    async def _serve(self) -> None:
        client = await self._connect(self._settings, name="kvflash-publisher")
        limit = client.max_payload - _HEAD_BYTES_MAX
        self.batch_bytes_max = max(1, min(_BATCH_BYTES_MAX, limit))
        self._background.ready()
        try:
            served = await self._model()
            if served is not None:
                await self._send_all(client, partial(self._origin, served))
        except KvflashError as error:
            logger.error("events are not sent: %s", error)
        finally:
            with self._changed:
                self._has_ended = True
                self._waiting.clear()
                self._waiting_bytes = 0
                self._changed.notify_all()
            await client.close()

    async def _model(self) -> Served | None:
        """The model, as soon as it is known; None if the outlet is closed before."""
        since, has_warned = time.monotonic(), False
        while (served := self._served()) is None and not self._is_closed:
            if not has_warned and time.monotonic() - since > _UNNAMED_S:
                has_warned = True
                logger.warning(
                    "events wait for register_llm(), which names their model; or set the "
                    "publisher's model_name"
                )
            await asyncio.sleep(_POLL_S)
        self._is_named = served is not None
        return served

    def _origin(self, served: Served, epoch: int) -> Origin:
        return Origin(
            instance_id=self._instance_id,
            dp_rank=self.dp_rank,
            epoch=epoch,
            model_name=served.model_name,
            block_size=self.block_size,
            tenant_id="prefill" if served.is_prefill else "default",
        )

    def _destination(self, client: Any, origin: Origin) -> NatsCorePublisher | JetStreamLog:
        if self._has_local_index:
            from kvflash.transport.local_index import LocalIndex  # noqa: PLC0415
            from kvflash.transport.nats_core import NatsCorePublisher  # noqa: PLC0415

            return NatsCorePublisher(client, self._place, LocalIndex(origin))
        from kvflash.transport.jetstream import JetStreamLog  # noqa: PLC0415

        return JetStreamLog(client, self._place, self._settings)

    async def _send_all(self, client: Any, origin_of: Callable[[int], Origin]) -> None:
        destination = self._destination(client, origin_of(self._epoch))
        is_open, pause_s, outage = False, _RETRY_S, Outage(logger, "events are stored again")
        while True:
            try:
                if not is_open:
                    await destination.ensure()
                    is_open = True
                batch = await self._next()
                if batch is None:
                    return
                epoch, sequence, payload = batch
                try:
                    await destination.send(origin_of(epoch), sequence, payload)
                except InvalidArgumentError as error:
                    logger.error("a batch of events is lost: %s", error)
                    self._counts["dropped_batches_total"] += 1
                else:
                    if not self._has_local_index:
                        self._counts["stored_batches_total"] += 1
            except KvflashError as error:
                if self._is_closed:
                    return
                self._counts["errors_total"] += 1
                outage.lasts(
                    f"events are not stored: {error}; trying again "
                    f"(NATS_SERVER: {self._settings.where})"
                )
                # The stream may have been deleted; then it is created again.
                is_open = False
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _RETRY_S_MAX)
                continue
            pause_s = _RETRY_S
            outage.ends()
            with self._changed:
                self._waiting_bytes -= len(self._waiting.popleft()[2])
                self._changed.notify_all()

    async def _next(self) -> tuple[int, int, bytes] | None:
        """The oldest waiting batch, as soon as there is one; None once closed."""
        while not self._waiting and not self._is_closed:
            await self._news.wait()
            self._news.clear()
        return self._waiting[0] if self._waiting else None


class BrokerStream(Sender):
    """Sends encoded events in batches to an outlet; over NATS what EventStream is over ZMQ."""

    def __init__(self, outlet: BrokerOutlet, *, tick_ms: float, shape: str = "own") -> None:
        self._outlet = outlet
        self.kind, self.endpoint = outlet.kind, outlet.endpoint
        # The server or the worker's index keeps batches for replay, so no ring is needed here.
        outbox = EventOutbox(
            outlet.block_size,
            shape=shape,
            dp_rank=outlet.dp_rank,
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
