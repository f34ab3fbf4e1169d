"""What event transports have in common: orders, batches for a catalog, messages of a log."""

import math
import resource
from collections.abc import Mapping
from dataclasses import dataclass

from kvflash._core import Catalog

#: Returned by ``Catalog.next_order``: kind, publisher, endpoint, replay endpoint.
Order = tuple[str, int, str, str | None]


def most_streams() -> int:
    """Maximum of streams in this process, with three open files each and some left for others."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        limit = 1 << 20
    return max(limit // 4, limit // 3 - 1_000)


def frame(sequence: int, payload: bytes) -> list[bytes]:
    """A batch as a catalog takes it."""
    return [sequence.to_bytes(8, "big"), payload]


def take_batches(catalog: Catalog, publisher: int, frames: list[list[bytes]]) -> int:
    """Pass batches to a catalog in order; those missing in between are lost. Returns how many."""
    lost = 0
    while frames:
        # Passed as replayed: an earlier number is then a duplicate, never a restart.
        consumed, outcome, first, last = catalog.take(publisher, frames, replayed=True)
        if outcome != "gap":
            break
        lost += last - first + 1
        catalog.give_up(publisher, last + 1)
        frames = frames[consumed:]
    return lost


@dataclass(frozen=True)
class Message:
    """One message of a log.

    Sequences start at 1 and have no holes, except for messages that were deleted one by one or lost
    by the server; purging makes none. The headers identify the publisher.
    """

    sequence: int
    headers: Mapping[str, str]
    payload: bytes


@dataclass(frozen=True)
class LogState:
    """Bounds of a log.

    The first message of an empty log is last + 1; before the first message ever, last is 0. The
    incarnation changes when the log is deleted and created again.
    """

    incarnation: str
    first: int
    last: int
    #: How long it keeps messages.
    max_age_s: float = math.inf
    #: Share of its own limits, of bytes or messages, that is used: at 1 it drops the oldest.
    fill: float = 0.0

    @property
    def messages(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True)
class Pointer:
    """Identifies the current snapshot."""

    #: The snapshot covers the log of this incarnation up to this message.
    sequence: int
    incarnation: str
    #: Name of the snapshot; None: there is none, and readers start empty.
    blob: str | None
    #: SHA-256 of the snapshot, hexadecimal.
    digest: str = ""
    #: Grows with every change of the pointer, which happened at ``taken_s``.
    token: int = 0
    taken_s: float = 0.0

    def covers(self, incarnation: str) -> int:
        """The last message of this log that the snapshot covers; 0: none."""
        return self.sequence if self.incarnation == incarnation else 0
