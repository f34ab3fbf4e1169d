"""A worker's own index with its last batches, and the answers to queries about it.

A query is msgpack ``{"start": int | None, "end": int | None}``, both inclusive. An answer has
several parts, each ``{"kind", "part", "parts", ...}``, small enough for any broker:

- ``events``: ``batches`` [[number, payload], ...]
- ``dump``: ``data``, a piece of the catalog's dump, and ``last``, the last batch included
- ``too_new``: ``start``, ``end``, ``newest``; the worker has not reached ``start``
- ``invalid_range``: ``start``, ``end``
- ``error``: ``message``

Each part has the publisher's ``epoch``.
"""

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgpack  # type: ignore[import-untyped,unused-ignore]

from kvflash._core import Catalog
from kvflash.errors import DecodeError
from kvflash.transport.base import frame, take_batches
from kvflash.transport.origin import Origin

_PART_BYTES = 256 * 1024
RING_BATCHES = 1_024
RING_BYTES = 64 * 1024 * 1024


def question(start: int | None = None, end: int | None = None) -> bytes:
    """Query batches ``start..=end``; without a start, everything."""
    return bytes(msgpack.packb({"start": start, "end": end}))


@dataclass(frozen=True)
class Answer:
    """An answer of a worker."""

    kind: str
    epoch: int = 0
    batches: list[tuple[int, bytes]] = field(default_factory=list)
    #: For a dump: input of ``Catalog.restore``, with batches up to ``last``, None before the first.
    data: bytes = b""
    last: int | None = None
    newest: int | None = None
    start: int | None = None
    end: int | None = None
    message: str | None = None


def join(parts: list[dict[str, Any]]) -> Answer:
    """Join the parts of an answer; DecodeError if they do not form one."""
    try:
        parts = sorted(parts, key=lambda part: int(part["part"]))
        head = parts[0]
        return Answer(
            str(head["kind"]),
            int(head["epoch"]),
            # A view, as bytes(n) of a number would be n zeros.
            [(int(n), bytes(memoryview(p))) for part in parts for n, p in part.get("batches", [])],
            b"".join(part.get("data", b"") for part in parts),
            **{name: head.get(name) for name in ("last", "newest", "start", "end", "message")},
        )
    except (IndexError, KeyError, ValueError, TypeError, OverflowError) as error:
        raise DecodeError(f"an answer of a worker's index is invalid: {error!r}") from None


class LocalIndex:
    """Index of one publisher, with its last batches in their sent form.

    The oldest of these are dropped above ring_batches or ring_bytes. Used by one thread.
    """

    def __init__(
        self, origin: Origin, *, ring_batches: int = RING_BATCHES, ring_bytes: int = RING_BYTES
    ) -> None:
        self.origin, self.epoch = origin, origin.epoch
        self._catalog = Catalog(max_blocks=0)
        self._publisher = origin.register(self._catalog, "inproc://own")
        self._ring: deque[tuple[int, bytes]] = deque()
        self._ring_bytes = 0
        self._limits = (ring_batches, ring_bytes)

    def record(self, sequence: int, payload: bytes) -> None:
        """Record a numbered batch; call before it is sent."""
        take_batches(self._catalog, self._publisher, [frame(sequence, payload)])
        self._ring.append((sequence, payload))
        self._ring_bytes += len(payload)
        while len(self._ring) > self._limits[0] or (
            self._ring_bytes > self._limits[1] and len(self._ring) > 1
        ):
            self._ring_bytes -= len(self._ring.popleft()[1])

    def answer(self, start: int | None = None, end: int | None = None) -> Answer:
        """Batches ``start..=end`` if they are still kept, else a dump."""
        if start is not None and end is not None and end < start:
            return Answer("invalid_range", self.epoch, start=start, end=end)
        if start is None or not self._ring:
            return self._dump()
        oldest, newest = self._ring[0][0], self._ring[-1][0]
        if start > newest:
            return Answer("too_new", self.epoch, start=start, end=end, newest=newest)
        if start < oldest:
            return self._dump()
        stop = newest if end is None else min(end, newest)
        # Numbers grow, but not by one where a relay has skipped lost batches.
        first, behind = (bisect_left(self._ring, (number,)) for number in (start, stop + 1))
        found = islice(self._ring, first, behind)
        return Answer("events", self.epoch, batches=list(found))

    def respond(self, request: bytes) -> list[bytes]:
        """Encode the answer to an arbitrary query as parts."""
        try:
            asked = msgpack.unpackb(request)
            start, end = asked.get("start"), asked.get("end")
            for bound in (start, end):
                if bound is not None and (not isinstance(bound, int) or not 0 <= bound < 1 << 64):
                    raise ValueError(f"start and end are numbers of 64 bits, got {bound!r}")
            answer = self.answer(start, end)
        except Exception as error:
            answer = Answer("error", self.epoch, message=str(error) or type(error).__name__)
        return _parts(answer)

    def _dump(self) -> Answer:
        position = self._catalog.position(self._publisher)
        last = None if position is None else position[1]
        return Answer("dump", self.epoch, data=b"".join(self._catalog.dump()), last=last)


def _parts(answer: Answer) -> list[bytes]:
    head = {name: value for name, value in vars(answer).items() if value is not None}
    del head["batches"], head["data"]
    bodies: list[dict[str, Any]] = [
        {"data": answer.data[at : at + _PART_BYTES]}
        for at in range(0, len(answer.data), _PART_BYTES)
    ]
    size = _PART_BYTES
    for batch in answer.batches:
        if size + len(batch[1]) > _PART_BYTES:
            bodies.append({"batches": []})
            size = 0
        bodies[-1]["batches"].append(batch)
        size += len(batch[1])
    bodies = bodies or [{}]
    return [
        bytes(msgpack.packb({**head, **body, "part": at, "parts": len(bodies)}))
        for at, body in enumerate(bodies)
    ]
