"""A publisher's batches as messages of a log, and from there into a catalog."""

from __future__ import annotations

import json
import logging
import struct
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvflash._core import Catalog
from kvflash.errors import DecodeError, KvflashError
from kvflash.transport.base import Message

__all__ = ["CatalogSink", "Origin", "event_headers", "event_key", "reset_headers"]

logger = logging.getLogger(__name__)

_PUBLISHER = "Kvflash-Publisher"
_SEQUENCE = "Kvflash-Sequence"
_INDEX = "Kvflash-Index"
_KIND = "Kvflash-Kind"
_RESET = "reset"
_U64_MAX = (1 << 64) - 1
_MAGIC = b"kvfstate"
# Workers that left are remembered, so that their last messages do not bring them back.
_GONE_MAX = 65_536
# What can't be understood is kept for questions: the last ones.
_ASIDE_MAX = 16


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Who publishes, as every message says it.

    Attributes:
        instance_id: The engine instance.
        dp_rank: Its data parallel rank.
        epoch: Grows with every start of the publisher: nanoseconds since the epoch at its start.
        model_name: The index that the events are for.
        block_size: Tokens in a block.
        tenant_id: The index's tenant.
    """

    instance_id: int
    dp_rank: int
    epoch: int
    model_name: str
    block_size: int
    tenant_id: str = "default"


def event_headers(origin: Origin, sequence: int) -> dict[str, str]:
    """The headers of one batch."""
    index = [origin.model_name, origin.tenant_id, origin.block_size]
    return {
        _PUBLISHER: f"{origin.instance_id}/{origin.dp_rank}/{origin.epoch}",
        _SEQUENCE: str(sequence),
        # ASCII only, whatever the model is called.
        _INDEX: json.dumps(index),
    }


def event_key(origin: Origin, sequence: int) -> str:
    """Names a batch, so that it is stored once however often it is sent."""
    return f"{origin.instance_id}-{origin.dp_rank}-{origin.epoch}-{sequence}"


def reset_headers() -> dict[str, str]:
    """Of a message that makes every replica forget everything before it."""
    return {_KIND: _RESET}


def _number(text: str, name: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 20 and int(text) <= _U64_MAX:
        return int(text)
    raise DecodeError(f"{name} must be a 64-bit number, got {text!r}")


def _parse(headers: Mapping[str, str]) -> tuple[Origin, int]:
    """Whose message it is, and its number.

    Raises:
        DecodeError: Names the header.
    """
    for name in (_PUBLISHER, _SEQUENCE, _INDEX):
        if name not in headers:
            raise DecodeError(f"header {name} is missing")
    who = headers[_PUBLISHER].split("/")
    if len(who) != 3:
        raise DecodeError(f"{_PUBLISHER} must be instance/rank/epoch, got {headers[_PUBLISHER]!r}")
    instance_id, dp_rank, epoch = (_number(part, _PUBLISHER) for part in who)
    try:
        model_name, tenant_id, block_size = json.loads(headers[_INDEX])
    except (ValueError, TypeError):
        raise DecodeError(
            f"{_INDEX} must be a JSON array of three, got {headers[_INDEX]!r}"
        ) from None
    is_fit = isinstance(model_name, str) and isinstance(tenant_id, str)
    if not is_fit or not isinstance(block_size, int) or not 0 < block_size < 1 << 32:
        raise DecodeError(f"{_INDEX} must be model, tenant, block size, got {headers[_INDEX]!r}")
    if dp_rank >= 1 << 32:
        raise DecodeError(f"{_PUBLISHER}: rank {dp_rank} is above 4294967295")
    origin = Origin(
        instance_id=instance_id,
        dp_rank=dp_rank,
        epoch=epoch,
        model_name=model_name,
        tenant_id=tenant_id,
        block_size=block_size,
    )
    return origin, _number(headers[_SEQUENCE], _SEQUENCE)


class CatalogSink:
    """Applies a log's messages to a catalog, and makes and restores snapshots of it.

    Workers register themselves by their messages. Applying a message again changes nothing; those
    of an earlier life of a publisher are dropped.

    Args:
        catalog: What it feeds.
        scheme: Of the endpoints under which its workers register.

    Consistency: safe to use from many threads; one applies at a time.
    """

    def __init__(self, catalog: Catalog, scheme: str = "jetstream://log") -> None:
        self._catalog = catalog
        self._scheme = scheme
        self._lock = threading.RLock()
        self._publishers: dict[tuple[int, int], int] = {}
        self._epochs: dict[tuple[int, int], int] = {}
        self._gone: OrderedDict[int, None] = OrderedDict()
        self.aside: deque[tuple[int, str]] = deque(maxlen=_ASIDE_MAX)
        self.counts = {
            "messages": 0,
            "undecodable": 0,
            "refused": 0,
            "of_gone_workers": 0,
            "of_earlier_lives": 0,
            "lost_batches": 0,
            "resets": 0,
        }

    def endpoint(self, instance_id: int, dp_rank: int) -> str:
        """Under which a worker registers: whoever registers it first, the other finds it."""
        return f"{self._scheme}/{instance_id}/{dp_rank}"

    def apply(self, messages: Sequence[Message]) -> None:
        """Apply messages in their order; what can't be understood is counted and set aside."""
        with self._lock:
            run: list[list[bytes]] = []
            run_of: int | None = None
            for message in messages:
                self.counts["messages"] += 1
                publisher, frame = self._place(message)
                if publisher != run_of or publisher is None:
                    self._take(run_of, run)
                    run, run_of = [], publisher
                if message.headers.get(_KIND) == _RESET:
                    self.counts["resets"] += 1
                    self.clear()
                elif publisher is not None:
                    if frame.epoch != self._epochs.get((frame.instance_id, frame.dp_rank)):
                        self._take(run_of, run)
                        run = []
                        self._start_life(publisher, frame)
                    run.append([frame.sequence, message.payload])
            self._take(run_of, run)

    def clear(self) -> None:
        """Forget all blocks and places; workers stay registered."""
        with self._lock:
            for instance_id, dp_rank in self._catalog.workers():
                self._catalog.forget(instance_id, dp_rank)
            self._epochs.clear()

    def leave(self, instance_id: int) -> None:
        """A worker is gone: its blocks go, and its messages that are still to come are dropped."""
        with self._lock:
            for worker in [worker for worker in self._publishers if worker[0] == instance_id]:
                del self._publishers[worker]
                self._epochs.pop(worker, None)
            self._catalog.expel(instance_id)
            self._gone[instance_id] = None
            self._gone.move_to_end(instance_id)
            if len(self._gone) > _GONE_MAX:
                self._gone.popitem(last=False)

    def join(self, instance_id: int) -> None:
        """A worker is there: its messages count."""
        with self._lock:
            self._gone.pop(instance_id, None)

    def workers(self) -> list[tuple[int, int]]:
        """All workers that hold a place, (instance id, dp rank)."""
        return self._catalog.workers()

    def snapshot(self) -> Iterator[bytes]:
        """Everything held, in chunks; what is applied meanwhile may be in it or not."""
        with self._lock:
            # Before the dump: a life that begins in between is told by its messages again.
            epochs = [[*worker, epoch] for worker, epoch in self._epochs.items()]
            dump = self._catalog.dump()
        head = json.dumps({"version": 1, "epochs": epochs}).encode()
        yield _MAGIC + struct.pack("<Q", len(head)) + head
        yield from dump

    def restore(self, snapshot: bytes) -> list[str]:
        """Hold what a snapshot says, and nothing else.

        Returns:
            Why parts were left out; empty when it is complete.

        Raises:
            DecodeError: It is no snapshot.
        """
        size = int.from_bytes(snapshot[8:16], "little")
        if snapshot[:8] != _MAGIC or 16 + size > len(snapshot):
            raise DecodeError("the snapshot begins with other bytes")
        try:
            epochs = json.loads(snapshot[16 : 16 + size])["epochs"]
            known = {(int(i), int(rank)): int(epoch) for i, rank, epoch in epochs}
        except (ValueError, TypeError, KeyError) as error:
            raise DecodeError(f"the snapshot's head is none: {error}") from None
        with self._lock:
            self.clear()
            _, _, reasons = self._catalog.restore(bytes(memoryview(snapshot)[16 + size :]))
            self._epochs = known
            for instance_id in {worker[0] for worker in self._catalog.workers()}:
                if instance_id in self._gone:
                    self._catalog.expel(instance_id)
            return reasons

    def _place(self, message: Message) -> tuple[int | None, _Frame]:
        """The publisher of a message, registered if need be; None when the message is dropped."""
        if message.headers.get(_KIND) == _RESET:
            return None, _NO_FRAME
        try:
            origin, sequence = _parse(message.headers)
        except DecodeError as error:
            self._set_aside("undecodable", message, str(error))
            return None, _NO_FRAME
        if origin.instance_id in self._gone:
            self.counts["of_gone_workers"] += 1
            return None, _NO_FRAME
        worker = (origin.instance_id, origin.dp_rank)
        if origin.epoch < self._epochs.get(worker, 0):
            self.counts["of_earlier_lives"] += 1
            return None, _NO_FRAME
        publisher = self._publishers.get(worker)
        if publisher is None or self._catalog.position(publisher) is None:
            try:
                publisher = self._catalog.register(
                    origin.instance_id,
                    self.endpoint(*worker),
                    model_name=origin.model_name,
                    tenant_id=origin.tenant_id,
                    block_size=origin.block_size,
                    dp_rank=origin.dp_rank,
                )
            except KvflashError as error:
                self._set_aside("refused", message, str(error))
                return None, _NO_FRAME
            self._publishers[worker] = publisher
            self._catalog.set_status(publisher, "active")
        number = sequence.to_bytes(8, "big")
        return publisher, _Frame(*worker, origin.epoch, number)

    def _start_life(self, publisher: int, frame: _Frame) -> None:
        worker = (frame.instance_id, frame.dp_rank)
        if worker in self._epochs:
            self._catalog.restarted(publisher)
        self._epochs[worker] = frame.epoch

    def _take(self, publisher: int | None, frames: list[list[bytes]]) -> None:
        while publisher is not None and frames:
            # As sent again: whatever came before is a duplicate, never a restart.
            consumed, outcome, first, last = self._catalog.take(publisher, frames, replayed=True)
            if outcome != "gap":
                return
            # The log has it no more, or never had it.
            self.counts["lost_batches"] += last - first + 1
            self._catalog.give_up(publisher, last + 1)
            frames = frames[consumed:]

    def _set_aside(self, kind: str, message: Message, reason: str) -> None:
        self.counts[kind] += 1
        self.aside.append((message.sequence, reason))
        if self.counts[kind] & (self.counts[kind] - 1) == 0:
            # The first, the second, the fourth ...: a broken publisher must not fill the log.
            logger.warning(
                "message %d is set aside (%s, %d so far): %s",
                message.sequence,
                kind,
                self.counts[kind],
                reason,
            )


@dataclass(frozen=True)
class _Frame:
    instance_id: int
    dp_rank: int
    epoch: int
    sequence: bytes


_NO_FRAME = _Frame(0, 0, 0, b"")
