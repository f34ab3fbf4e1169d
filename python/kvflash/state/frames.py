"""Applies a log's messages to a catalog, and makes snapshots of it."""

from __future__ import annotations

import json
import logging
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from kvflash._core import Catalog
from kvflash.errors import DecodeError, KvflashError, TransportError
from kvflash.transport.base import Message, frame, take_batches
from kvflash.transport.origin import Origin, parse_headers

logger = logging.getLogger(__name__)

_KIND = "Kvflash-Kind"
_RESET = "reset"
_MAGIC = b"kvfstate"
# Departed workers are remembered, so that late messages do not bring them back.
_GONE_MAX = 65_536
# How long their blocks are kept, in case they were only disconnected.
_AWAY_S_MAX = 600.0
_COUNTS = (
    *("messages", "undecodable", "refused", "of_gone_workers", "of_earlier_lives"),
    *("lost_batches", "resets"),
)


def reset_headers() -> dict[str, str]:
    """Headers of a message that makes every replica discard everything before it."""
    return {_KIND: _RESET}


def _joined(one: Iterable[bytes], other: Iterable[bytes]) -> Iterator[bytes]:
    """Join two dumps: each begins and ends with a marker, in separate chunks."""
    last: bytes | None = None
    for chunk in one:
        if last is not None:
            yield last
        last = chunk
    yield from islice(other, 1, None)


class CatalogSink:
    """Applies a log's messages to a catalog, and creates and restores snapshots.

    Messages register their workers. Applying a message again changes nothing; messages from an
    earlier life of a publisher are dropped.

    A worker that leaves may only be disconnected: its blocks are set aside, follow the log, are
    part of snapshots, and count again when the worker is back. After ten minutes they are
    discarded. Its workers register endpoints that begin with ``scheme``.

    Consistency: safe to use from many threads; one applies at a time.
    """

    def __init__(self, catalog: Catalog, scheme: str = "jetstream://log") -> None:
        self._catalog = catalog
        self._scheme = scheme
        self._lock = threading.RLock()
        self._publishers: dict[tuple[int, int], _Publisher] = {}
        self._epochs: dict[tuple[int, int], int] = {}
        self._gone: OrderedDict[int, None] = OrderedDict()
        # Recently departed workers: their blocks, and until when these are kept.
        self._beside = Catalog()
        self._away: OrderedDict[int, float] = OrderedDict()
        self._moves = 0
        self.counts = dict.fromkeys(_COUNTS, 0)

    def apply(self, messages: Sequence[Message]) -> None:
        """Apply messages in order; invalid ones are counted and dropped."""
        with self._lock:
            self._forget_away()
            run: list[list[bytes]] = []
            run_of: _Publisher | None = None
            for message in messages:
                self.counts["messages"] += 1
                is_reset = message.headers.get(_KIND) == _RESET
                placed = None if is_reset else self._place(message)
                if placed is None or placed[0] != run_of:
                    self._take(run_of, run)
                    run, run_of = [], None if placed is None else placed[0]
                if is_reset:
                    self.counts["resets"] += 1
                    self.clear()
                elif placed is not None:
                    publisher, origin, sequence = placed
                    if origin.epoch != self._epochs.get(origin.worker):
                        self._take(run_of, run)
                        run = []
                        position = publisher.catalog.position(publisher.number)
                        # Registered again after a long absence, it has the position that it left.
                        has_position = position is not None and position[1] is not None
                        if has_position or origin.worker in self._epochs:
                            publisher.catalog.restarted(publisher.number)
                        self._epochs[origin.worker] = origin.epoch
                    run.append(frame(sequence, message.payload))
            self._take(run_of, run)

    def clear(self) -> None:
        """Discard all blocks and stream positions; workers stay registered."""
        with self._lock:
            for catalog in (self._catalog, self._beside):
                for instance_id, dp_rank in catalog.workers():
                    catalog.forget(instance_id, dp_rank)
            self._epochs.clear()

    def leave(self, instance_id: int) -> None:
        """A worker has left: its blocks no longer count. To call before the core forgets them."""
        with self._lock:
            if instance_id not in self._gone:
                self._set_beside(instance_id)
            self._gone[instance_id] = None
            self._gone.move_to_end(instance_id)
            if len(self._gone) > _GONE_MAX:
                self._forget(self._gone.popitem(last=False)[0])
            self._forget_away()

    def join(self, instance_id: int) -> None:
        """A worker has joined: its blocks and messages count."""
        with self._lock:
            self._forget_away()
            self._gone.pop(instance_id, None)
            if self._away.pop(instance_id, None) is not None:
                self._moves += 1
                self._drop_publishers(instance_id)
                self._move(instance_id, self._beside, self._catalog)

    def workers(self) -> list[tuple[int, int]]:
        """Present workers that the log has mentioned, as (instance id, dp rank)."""
        with self._lock:
            told = self._epochs.keys() | self._publishers.keys()
            return sorted(worker for worker in told if worker[0] not in self._gone)

    def away(self) -> int:
        """Number of departed workers with known blocks."""
        with self._lock:
            return len(self._away)

    def snapshot(self) -> Iterator[bytes]:
        """The state in chunks; concurrent changes may or may not be included.

        Raises TransportError if a worker joined or left meanwhile and may be missing.
        """
        with self._lock:
            # Before the dump: a life that begins in between is covered by its later messages.
            epochs = [[*worker, epoch] for worker, epoch in self._epochs.items()]
            dumps, moves = (self._catalog.dump(), self._beside.dump()), self._moves
        head = json.dumps({"version": 1, "epochs": epochs}).encode()
        yield _MAGIC + struct.pack("<Q", len(head)) + head
        yield from _joined(*dumps)
        if self._moves != moves:
            raise TransportError("a worker joined or left while the snapshot was taken")

    def restore(self, snapshot: bytes) -> list[str]:
        """Replace the state by a snapshot; returns why parts were left out, if any were."""
        size = int.from_bytes(snapshot[8:16], "little")
        if snapshot[:8] != _MAGIC or 16 + size > len(snapshot):
            raise DecodeError("the snapshot begins with the wrong bytes")
        try:
            epochs = json.loads(snapshot[16 : 16 + size])["epochs"]
            known = {(int(i), int(rank)): int(epoch) for i, rank, epoch in epochs}
        except (ValueError, TypeError, KeyError) as error:
            raise DecodeError(f"the snapshot's header is invalid: {error}") from None
        with self._lock:
            self.clear()
            _, _, reasons = self._catalog.restore(bytes(memoryview(snapshot)[16 + size :]))
            self._epochs = known
            for worker in known:
                # The snapshot may have it in another index than it is registered in.
                self._publishers.pop(worker, None)
            for instance_id in {worker[0] for worker in self._catalog.workers()}:
                if instance_id in self._gone:
                    self._set_beside(instance_id)
                    # A life that began while the snapshot was taken is only in its blocks.
                    self._catalog.expel(instance_id)
            return reasons

    def _set_beside(self, instance_id: int) -> None:
        """Set aside a departed worker's blocks: they do not count and are kept for a while."""
        told = self._epochs.keys() | self._publishers.keys()
        if all(worker[0] != instance_id for worker in told):
            # Its events arrive another way, if at all; the process that registered it manages it.
            return
        self._moves += 1
        self._beside.expel(instance_id)
        self._drop_publishers(instance_id)
        if self._move(instance_id, self._catalog, self._beside):
            self._away[instance_id] = time.monotonic() + _AWAY_S_MAX
            self._away.move_to_end(instance_id)
        else:
            self._forget(instance_id)

    def _move(self, instance_id: int, source: Catalog, target: Catalog) -> bool:
        """Move a worker's blocks. On an error they are lost, and it returns False."""
        try:
            restored, _, reasons = target.restore(b"".join(source.dump(instance_id)))
            reason: object = reasons[0] if reasons and not restored else None
        except KvflashError as error:
            reason = error
        finally:
            source.expel(instance_id)
        if reason is not None:
            logger.warning("dropped the blocks of worker %d: %s", instance_id, reason)
        return reason is None

    def _drop_publishers(self, instance_id: int) -> None:
        """Drop its publishers; its next message registers it again."""
        for worker in [worker for worker in self._publishers if worker[0] == instance_id]:
            del self._publishers[worker]

    def _forget_away(self) -> None:
        now_s = time.monotonic()
        while self._away and next(iter(self._away.values())) <= now_s:
            self._forget(next(iter(self._away)))

    def _forget(self, instance_id: int) -> None:
        if self._away.pop(instance_id, None) is not None:
            self._moves += 1
        self._beside.expel(instance_id)
        # Messages that came while it was away have registered it beside.
        self._drop_publishers(instance_id)
        for worker in [worker for worker in self._epochs if worker[0] == instance_id]:
            del self._epochs[worker]

    def _place(self, message: Message) -> tuple[_Publisher, Origin, int] | None:
        """A message's publisher, registered if needed; None if the message is dropped."""
        try:
            origin, sequence = parse_headers(message.headers)
        except DecodeError as error:
            self._drop("undecodable", message, error)
            return None
        catalog, worker = self._catalog, origin.worker
        if origin.instance_id in self._gone:
            self.counts["of_gone_workers"] += 1
            if origin.instance_id not in self._away:
                return None
            catalog = self._beside
        if origin.epoch < self._epochs.get(worker, 0):
            self.counts["of_earlier_lives"] += 1
            return None
        key = (origin.model_name, origin.tenant_id, origin.block_size)
        publisher = self._publishers.get(worker)
        if publisher is not None and publisher.catalog.position(publisher.number) is None:
            publisher = None
        if publisher is None or publisher.key != key:
            if publisher is not None or origin.epoch > self._epochs.get(worker, origin.epoch):
                # It may hold blocks in another index, where no event would remove them.
                catalog.expel(*worker)
            try:
                # The same from every process.
                endpoint = f"{self._scheme}/{origin.instance_id}/{origin.dp_rank}"
                number = origin.register(catalog, endpoint)
            except KvflashError as error:
                self._drop("refused", message, error)
                return None
            publisher = self._publishers[worker] = _Publisher(catalog, number, key)
            catalog.set_status(number, "active")
        return publisher, origin, sequence

    def _take(self, publisher: _Publisher | None, frames: list[list[bytes]]) -> None:
        if publisher is not None:
            # The log has lost the missing ones, or never had them.
            lost = take_batches(publisher.catalog, publisher.number, frames)
            self.counts["lost_batches"] += lost

    def _drop(self, kind: str, message: Message, reason: KvflashError) -> None:
        self.counts[kind] += 1
        if self.counts[kind] & (self.counts[kind] - 1) == 0:
            # Log the first, the second, the fourth ...: a broken publisher must not flood the log.
            text, count = "message %d is dropped (%s, %d so far): %s", self.counts[kind]
            logger.warning(text, message.sequence, kind, count, reason)


class _Publisher(NamedTuple):
    catalog: Catalog
    number: int
    #: Model, tenant and block size.
    key: tuple[str, str, int]
