"""Interfaces of event transports: receivers that obey the catalog, and logs shared by replicas."""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

#: Returned by ``Catalog.next_order``: kind, publisher, endpoint, replay endpoint.
Order = tuple[str, int, str, str | None]


class Receiver(Protocol):
    """Feeds a catalog: takes its orders and delivers frames."""

    def start(self) -> None:
        """Receive in the background."""

    def obey(self, order: Order) -> None:
        """Carry out an order; returns at once."""

    def stop(self) -> None:
        """Close everything; blocks until done."""


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

    @property
    def messages(self) -> int:
        return self.last - self.first + 1


class Reader(Protocol):
    """A durable reader of a log: others see its last acknowledged message as its floor."""

    async def fetch(self, timeout_s: float) -> Sequence[Message]:
        """The next messages in order; empty after ``timeout_s``. Some may be missing or repeated.

        Raises TransportError if the reader or its log is gone, or the server can't be reached.
        """

    async def ack(self, sequence: int) -> None:
        """Acknowledge all messages up to this one."""

    async def close(self) -> None:
        """Stop reading. The floor stays."""


class Log(Protocol):
    """A stream of messages on a server, numbered in the order of storage.

    All methods raise TransportError when the server can't be reached.
    """

    async def ensure(self) -> None:
        """Create the log if it does not exist."""

    async def state(self) -> LogState:
        """The log's bounds."""

    async def append(self, headers: Mapping[str, str], payload: bytes, *, key: str) -> int:
        """Store a message, once for each ``key``; returns its number.

        Raises InvalidArgumentError if it is larger than the server accepts.
        """

    async def open_reader(self, name: str, start: int) -> Reader:
        """Create a reader from message ``start`` on; replaces a reader of the same name."""

    async def floors(self) -> dict[str, int]:
        """Last acknowledged message of each reader, by name."""

    async def drop_reader(self, name: str) -> None:
        """Delete a reader; no error if it does not exist."""

    async def age_s(self, sequence: int) -> float | None:
        """Age of a message; None if it does not exist."""

    async def purge(self, last: int) -> None:
        """Delete all messages up to ``last``."""


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


class Blobs(Protocol):
    """Storage of snapshots and of the pointer to the current one.

    All methods raise TransportError when the server can't be reached.
    """

    async def ensure(self) -> None:
        """Create the store if it does not exist."""

    async def put(self, name: str, chunks: Iterable[bytes]) -> str:
        """Store a blob. ``chunks`` is read in a thread. Returns its SHA-256 in hexadecimal."""

    def read(self, name: str) -> AsyncIterator[bytes]:
        """Its chunks, in order; NotFoundError if there is no such blob or it is truncated."""

    async def names(self) -> list[str]:
        """Names of all blobs, also of those whose upload did not end."""

    async def delete(self, name: str) -> None:
        """Delete a blob; no error if it does not exist."""

    async def pointer(self) -> tuple[Pointer | None, int]:
        """The pointer and its revision, which is 0 if there never was a pointer."""

    async def flip(self, pointer: Pointer, revision: int) -> bool:
        """Set the pointer if its revision is unchanged; False otherwise."""
