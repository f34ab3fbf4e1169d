"""Writes a publisher's batches to a stream, in order and each once."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping

from kvflash.background import Background
from kvflash.errors import ClosedError, ConfigError, InvalidArgumentError, KvflashError
from kvflash.outage import Outage
from kvflash.servers import NatsSettings
from kvflash.transport.jetstream import JetStreamLog
from kvflash.transport.nats_connection import connect

logger = logging.getLogger(__name__)

_RETRY_S = 0.1
_RETRY_S_MAX = 2.0


class JetStreamWriter:
    """Writes batches to a component's stream, in the background and in order.

    A batch without an acknowledgement is sent again under the same key, without limit, and stored
    once. A batch above the server's limit is dropped and counted, as is the oldest when more than
    waiting_bytes_max wait; readers see a gap. ``headers`` and ``key`` take a batch's number.
    """

    def __init__(
        self,
        stream: str,
        *,
        headers: Callable[[int], Mapping[str, str]],
        key: Callable[[int], str],
        settings: NatsSettings | None = None,
        waiting_bytes_max: int = 64 * 1024 * 1024,
    ) -> None:
        self._stream = stream
        self._headers, self._key = headers, key
        self._settings = settings or NatsSettings.from_env()
        self._waiting_bytes_max = waiting_bytes_max
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._waiting_bytes = 0
        self._is_closed = False
        self._news = asyncio.Event()
        self.counts = {"stored_batches": 0, "dropped_batches": 0, "errors": 0}
        self._background = Background(
            f"the writer of stream {stream}, which loses its events,",
            self._write,
            is_cancelled=False,
        )
        self._background.start()

    def put(self, sequence: int, payload: bytes) -> None:
        """Queue a batch, from any thread, in the order of the numbers; ClosedError once closed."""
        with self._changed:
            if self._is_closed:
                raise ClosedError("the writer is closed")
            self._waiting.append((sequence, payload))
            self._waiting_bytes += len(payload)
            # The first one may be in flight.
            while self._waiting_bytes > self._waiting_bytes_max and len(self._waiting) > 2:
                dropped = self._waiting[1]
                del self._waiting[1]
                self._waiting_bytes -= len(dropped[1])
                self.counts["dropped_batches"] += 1
        self._background.call_soon(self._news.set)

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until all queued batches are stored; False if that took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Store queued batches within ``timeout_s``, and close."""
        self.flush(timeout_s)
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
        self._background.call_soon(self._news.set)
        self._background.stop()

    async def _write(self) -> None:
        self._background.ready()
        log: JetStreamLog | None = None
        client = None
        pause_s, outage = _RETRY_S, Outage(logger, "events are stored again")
        try:
            while True:
                # Before the look, so that it does not hide a batch that is queued after it.
                self._news.clear()
                with self._changed:
                    batch = self._waiting[0] if self._waiting else None
                if batch is None:
                    if self._is_closed:
                        return
                    await self._news.wait()
                    continue
                try:
                    if client is None:
                        client = await connect(self._settings, name="kvflash-publisher")
                    if log is None:
                        log = JetStreamLog(client, self._stream, self._settings)
                        await log.ensure()
                    sequence, payload = batch
                    await log.append(self._headers(sequence), payload, key=self._key(sequence))
                    became = "stored_batches"
                except InvalidArgumentError as error:
                    logger.error("a batch of events is lost: %s", error)
                    became = "dropped_batches"
                except (KvflashError, OSError) as error:
                    if self._is_closed:
                        return
                    self.counts["errors"] += 1
                    outage.lasts(
                        f"events are not stored: {error}; trying again "
                        f"(NATS_SERVER: {self._settings.where})",
                        kind=isinstance(error, ConfigError),
                    )
                    # The stream may have been deleted; then it is created again.
                    log = None
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _RETRY_S_MAX)
                    continue
                pause_s = _RETRY_S
                outage.ends()
                with self._changed:
                    self._waiting.popleft()
                    self._waiting_bytes -= len(payload)
                    self.counts[became] += 1
                    self._changed.notify_all()
        finally:
            with self._changed:
                self._is_closed = True
                self._waiting.clear()
                self._changed.notify_all()
            if client is not None:
                await client.close()
