"""Relays an engine's own socket into NATS: its batches unchanged, in its order."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import zmq

from kvflash.errors import InvalidArgumentError, KvflashError
from kvflash.publisher.brokered import BrokerOutlet
from kvflash.transport.zmq_socket import dial, explain, open_replay, subscribe

logger = logging.getLogger(__name__)

_POLL_MS = 100
_PAUSE_S = 1.0
_REPLAY_MS = 5_000
_QUEUE_MESSAGES = 100_000
# Batches received as a replay, which the socket may deliver again.
_REPLAYED_MAX = 10_000
_END = b"\xff" * 8


class Relay:
    """Reads an engine's batches and hands them to an outlet; requests the ones that it missed.

    A sequence number that repeats with other content means that the engine restarted; that goes
    unnoticed if the engine's numbers are already beyond those of its life before. Batches that can
    no longer be had are skipped in the numbering, so that routers see the gap.
    """

    #: Routers find the relayed batches at the broker.
    replay_endpoint: str | None = None

    def __init__(
        self, outlet: BrokerOutlet, endpoint: str, replay_endpoint: str | None, topic: str
    ) -> None:
        self._outlet = outlet
        self.kind, self.endpoint = outlet.kind, outlet.endpoint
        self._replay_endpoint = replay_endpoint
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        subscribe(self._socket, queue_messages=_QUEUE_MESSAGES, topic=topic.encode())
        try:
            dial(self._socket, endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            outlet.close()
            raise InvalidArgumentError(
                f"zmq_endpoint must look like tcp://host:port, got {endpoint!r}: {error}"
            ) from error
        self._expected: int | None = None
        self._replayed: OrderedDict[int, int] = OrderedDict()
        self._counts = {"relayed_batches_total": 0, "missed_batches_total": 0, "restarts_total": 0}
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvflash-relay", daemon=True)
        self._thread.start()

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until every batch read so far is stored; False if that took longer."""
        return self._outlet.flush(timeout_s)

    def stats(self) -> dict[str, int]:
        """Counters and gauges; names include units."""
        return {**self._counts, **self._outlet.stats()}

    def close(self) -> None:
        """Stop reading, send queued batches, close; further calls do nothing."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        self._thread.join()
        self._context.destroy(0)
        self._outlet.close()

    def _run(self) -> None:
        # Fetch what was published before. An engine that is not up yet is asked at its first batch.
        work: Callable[[], None] = partial(self._catch_up, 0, None)
        while not self._is_closed.is_set():
            try:
                work()
            except Exception:
                logger.exception("relaying the engine's events failed; going on")
                self._is_closed.wait(_PAUSE_S)
            work = self._read

    def _read(self) -> None:
        if not self._socket.poll(_POLL_MS):
            return
        frames = self._socket.recv_multipart()
        if len(frames) >= 2 and len(frames[-2]) == 8:
            self._take(int.from_bytes(frames[-2], "big"), frames[-1])
        else:
            logger.warning("the engine sent a message that is not a batch; skipped")

    def _take(self, number: int, payload: bytes) -> None:
        if self._expected is not None and number < self._expected:
            if self._replayed.get(number) == hash(payload):
                return
            self._counts["restarts_total"] += 1
            self._outlet.restart()
            self._expected = None
            self._replayed.clear()
        if self._expected is None or number > self._expected:
            self._catch_up(self._expected or 0, number)
        self._put(number, payload)

    def _catch_up(self, first: int, end: int | None) -> None:
        """Fetch the batches from ``first`` up to ``end``, or all of them."""
        for number, payload in self._replay(first):
            if end is not None and number >= end:
                break
            if number >= (self._expected or 0):
                self._put(number, payload)
                self._replayed[number] = hash(payload)
                while len(self._replayed) > _REPLAYED_MAX:
                    self._replayed.popitem(last=False)

    def _put(self, number: int, payload: bytes) -> None:
        missed = 0 if self._expected is None else number - self._expected
        if missed:
            self._counts["missed_batches_total"] += missed
            self._outlet.skip(missed)
        try:
            self._outlet.put(payload)
            self._counts["relayed_batches_total"] += 1
        except KvflashError as error:
            logger.error("a batch is lost: %s", error)
        self._expected = number + 1

    def _replay(self, first: int) -> Iterator[tuple[int, bytes]]:
        if self._replay_endpoint is None:
            return
        try:
            socket = open_replay(self._context, self._replay_endpoint, first)
        except zmq.ZMQError as error:
            text = "can't request missed batches at %s: %s"
            logger.warning(text, self._replay_endpoint, explain(error))
            return
        try:
            waited_ms = 0
            while not self._is_closed.is_set() and waited_ms < _REPLAY_MS:
                if not socket.poll(_POLL_MS):
                    waited_ms += _POLL_MS
                    continue
                waited_ms = 0
                frames = socket.recv_multipart()
                if len(frames) < 2 or len(frames[-2]) != 8 or frames[-2] == _END:
                    return
                yield int.from_bytes(frames[-2], "big"), frames[-1]
        finally:
            socket.close(0)
