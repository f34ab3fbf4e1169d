"""Transports of events: receivers that obey the catalog, and logs that replicas share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

__all__ = [
    "Blobs",
    "Dispatch",
    "Log",
    "LogState",
    "Message",
    "Order",
    "Pointer",
    "Reader",
    "Receiver",
    "SilentReceiver",
]

#: What ``Catalog.next_order`` returns: kind, publisher, endpoint, replay endpoint.
Order = tuple[str, int, str, str | None]


class Receiver(Protocol):
    """Feeds a catalog: takes its orders and hands it the frames."""

    def start(self) -> None:
        """Receive in the background."""

    def obey(self, order: Order) -> None:
        """Carry out an order; returns at once."""

    def stop(self) -> None:
        """Close everything; blocks until done."""


class SilentReceiver:
    """A :class:`Receiver` of endpoints whose events come by another way."""

    def start(self) -> None:
        """See :meth:`Receiver.start`."""

    def obey(self, order: Order) -> None:
        """See :meth:`Receiver.obey`."""

    def stop(self) -> None:
        """See :meth:`Receiver.stop`."""


class Dispatch:
    """Several receivers as one: an order goes to the one whose scheme its endpoint has.

    Args:
        default: Takes what no scheme names.
        by_scheme: Receivers by scheme, such as ``nats``.
    """

    def __init__(self, default: Receiver, by_scheme: Mapping[str, Receiver]) -> None:
        self._default = default
        self._by_scheme = dict(by_scheme)
        self._of: dict[int, Receiver] = {}

    def start(self) -> None:
        """See :meth:`Receiver.start`."""
        for receiver in (self._default, *self._by_scheme.values()):
            receiver.start()

    def obey(self, order: Order) -> None:
        """See :meth:`Receiver.obey`."""
        kind, publisher, endpoint, _ = order
        if kind in ("subscribe", "hold"):
            scheme = endpoint.partition("://")[0]
            self._of[publisher] = self._by_scheme.get(scheme, self._default)
        receiver = self._of.get(publisher, self._default)
        if kind == "unsubscribe":
            self._of.pop(publisher, None)
        receiver.obey(order)

    def stop(self) -> None:
        """See :meth:`Receiver.stop`."""
        for receiver in (*self._by_scheme.values(), self._default):
            receiver.stop()


@dataclass(frozen=True)
class Message:
    """One message of a log.

    Attributes:
        sequence: Its number in the log, from 1 and without holes, but for messages that were
            deleted one by one or lost by the server; purging makes none in between.
        headers: Whose it is; values as text.
        payload: Opaque bytes.
    """

    sequence: int
    headers: Mapping[str, str]
    payload: bytes


@dataclass(frozen=True)
class LogState:
    """Where a log begins and ends.

    Attributes:
        incarnation: Another one when the log was deleted and made again.
        first: Number of the first message that is there; last + 1 when there is none.
        last: Number of the last message that was ever written; 0 before the first.
    """

    incarnation: str
    first: int
    last: int

    @property
    def messages(self) -> int:
        """Messages that are there."""
        return self.last - self.first + 1


class Reader(Protocol):
    """A durable reader of a log: what it acknowledged is known to others as its floor."""

    async def fetch(self, timeout_s: float) -> Sequence[Message]:
        """The next messages, in order; empty after ``timeout_s``. Some may be missing or repeated.

        Raises:
            TransportError: The reader or its log is gone, or the server can't be reached.
        """

    async def ack(self, sequence: int) -> None:
        """Everything up to this message was applied."""

    async def close(self) -> None:
        """Read no more. The floor stays."""


class Log(Protocol):
    """A stream of messages that a server keeps, numbered in the order in which it stored them.

    All methods raise TransportError when the server can't be reached.
    """

    async def ensure(self) -> None:
        """Make the log if it is not there."""

    async def state(self) -> LogState:
        """Where it begins and ends."""

    async def append(self, headers: Mapping[str, str], payload: bytes, *, key: str) -> int:
        """Store a message; the same ``key`` again stores nothing. Returns its number.

        Raises:
            InvalidArgumentError: It is larger than the server ever takes.
        """

    async def open_reader(self, name: str, start: int) -> Reader:
        """A reader from message ``start`` on; takes the place of one of this name."""

    async def floors(self) -> dict[str, int]:
        """Readers by name, with the last message that each has acknowledged."""

    async def drop_reader(self, name: str) -> None:
        """Delete a reader; no error if there is none."""

    async def age_s(self, sequence: int) -> float | None:
        """How long ago a message was stored; None when it is not there."""

    async def purge(self, last: int) -> None:
        """Delete all messages up to ``last``."""


@dataclass(frozen=True)
class Pointer:
    """Which snapshot counts.

    Attributes:
        sequence: The snapshot covers the log up to this message.
        incarnation: Of the log that it covers.
        blob: Name of the snapshot; None: whoever starts here starts empty.
        digest: SHA-256 of the snapshot, hexadecimal.
        token: Grows with every flip.
        taken_s: When it was flipped, seconds since the epoch.
    """

    sequence: int
    incarnation: str
    blob: str | None
    digest: str = ""
    token: int = 0
    taken_s: float = field(default=0.0)


class Blobs(Protocol):
    """Where snapshots are, and which one counts.

    All methods raise TransportError when the server can't be reached.
    """

    async def ensure(self) -> None:
        """Make the store if it is not there."""

    async def put(self, name: str, chunks: Iterable[bytes]) -> str:
        """Store a blob. ``chunks`` is read in a thread. Returns its SHA-256 in hexadecimal."""

    def read(self, name: str) -> AsyncIterator[bytes]:
        """Its chunks, in order.

        Raises:
            NotFoundError: There is none of this name, or it is cut.
        """

    async def names(self) -> list[str]:
        """All blobs."""

    async def delete(self, name: str) -> None:
        """Delete a blob; no error if there is none."""

    async def pointer(self) -> tuple[Pointer | None, int]:
        """The pointer and its revision, which is 0 when there is no pointer yet."""

    async def flip(self, pointer: Pointer, revision: int) -> bool:
        """Set the pointer if its revision is still this one; False if it is not."""
