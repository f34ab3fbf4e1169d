"""What a discovery is: keys with values, some of them only as long as their process lives."""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Protocol

from kvflash.errors import ClosedError, InvalidArgumentError

__all__ = [
    "KEY_BYTES_MAX",
    "LEASE_TTL_S",
    "VALUE_BYTES_MAX",
    "Delete",
    "Discovery",
    "Event",
    "Lease",
    "Put",
    "Synced",
    "Watch",
    "check_key",
    "check_open",
    "check_value",
    "new_lease_id",
]

KEY_BYTES_MAX = 200
VALUE_BYTES_MAX = 1024 * 1024
LEASE_TTL_S = 10.0


@dataclass(frozen=True)
class Put:
    """A key has this value now."""

    key: str
    value: bytes


@dataclass(frozen=True)
class Delete:
    """A key is gone."""

    key: str


@dataclass(frozen=True)
class Synced:
    """Everything that was there when the watch began has been told; comes once."""


Event = Put | Delete | Synced


class Lease(Protocol):
    """A sign of life: keys put with it vanish when the process that holds it dies."""

    @property
    def id(self) -> int:
        """Its number, 63 bits, never 0."""

    @property
    def lost(self) -> asyncio.Event:
        """Set when the lease ended without being revoked: its keys are gone."""

    async def revoke(self) -> None:
        """End it and delete its keys. A second call does nothing."""


class Watch:
    """What happens to the keys of a prefix, in an async iterator.

    First a :class:`Put` for every key that is there, then one :class:`Synced`, then changes. It
    reconnects by itself, and then tells only what differs.

    A reader that is slow misses changes that were undone or overtaken meanwhile, never the last
    one: at most one event waits for each key, so that what waits is bounded by the keys there are.
    """

    def __init__(self, on_close: Callable[[Watch], None] | None = None) -> None:
        self._on_close = on_close
        self._known: dict[str, bytes] = {}
        self._waiting: OrderedDict[str, bytes | None] = OrderedDict()
        self._is_synced = False
        self._is_sync_told = False
        self._failure: BaseException | None = None
        self._is_closed = False
        self._news = asyncio.Event()

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> Event:
        while True:
            if self._is_closed:
                raise StopAsyncIteration
            if self._waiting:
                key, value = self._waiting.popitem(last=False)
                return Delete(key) if value is None else Put(key, value)
            if self._is_synced and not self._is_sync_told:
                self._is_sync_told = True
                return Synced()
            if self._failure is not None:
                raise self._failure
            self._news.clear()
            await self._news.wait()

    async def __aenter__(self) -> Watch:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop watching; a reader that waits ends."""
        if not self._is_closed:
            self._is_closed = True
            self._news.set()
            if self._on_close is not None:
                self._on_close(self)

    # For backends:

    def change(self, key: str, value: bytes | None) -> None:
        """Tell a change, unless it is none; None for a key that is gone."""
        if self._known.get(key) == value:
            return
        if value is None:
            del self._known[key]
        else:
            self._known[key] = value
        # Told at the place of its last change. A key that came and went in between is told as gone.
        self._waiting.pop(key, None)
        self._waiting[key] = value
        self._news.set()

    def replace(self, state: dict[str, bytes]) -> None:
        """Tell what differs between the state that is known and this one; the first one syncs."""
        for key in [key for key in self._known if key not in state]:
            self.change(key, None)
        for key, value in state.items():
            self.change(key, value)
        if not self._is_synced:
            self._is_synced = True
            self._news.set()

    def fail(self, error: BaseException) -> None:
        """End the watch with an error, after what waits."""
        self._failure = error
        self._news.set()


class Discovery(ABC):
    """Keys and values that processes find each other by.

    Keys are text of at most KEY_BYTES_MAX bytes, values bytes of at most VALUE_BYTES_MAX. All
    methods raise TransportError when the store can't be reached and ClosedError after close().

    Attributes:
        is_local: Only processes of this machine can be found.
    """

    is_local: ClassVar[bool] = True

    @abstractmethod
    async def lease(self, ttl_s: float = LEASE_TTL_S, *, lease_id: int | None = None) -> Lease:
        """A new lease, kept alive in the background until it is revoked.

        Args:
            ttl_s: How long its keys outlive the process at most; backends that notice the end of
                a process by themselves ignore it.
            lease_id: The number of a lease that was lost, to have it again.
        """

    @abstractmethod
    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> None:
        """Set a key, for as long as the lease lives."""

    @abstractmethod
    async def create(self, key: str, value: bytes, lease: Lease | None = None) -> bool:
        """Set a key if it is not there; False if it is. Of many callers one gets True."""

    @abstractmethod
    async def delete(self, key: str) -> bool:
        """Delete a key; False if it was not there."""

    @abstractmethod
    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        """All keys that begin so, with their values."""

    @abstractmethod
    def watch(self, prefix: str) -> Watch:
        """Watch the keys that begin so; needs a running event loop."""

    @abstractmethod
    async def close(self) -> None:
        """Revoke the leases that this object gave out and end its watches."""

    @abstractmethod
    def twin(self) -> Discovery:
        """Another one of the same keys, for another event loop; it is closed on its own."""


def new_lease_id() -> int:
    """A random number of 63 bits that is not 0."""
    return secrets.randbelow(2**63 - 1) + 1


def check_key(key: str) -> None:
    """Refuse a key that a backend could not hold.

    Raises:
        InvalidArgumentError: It is empty or too long.
    """
    size = len(key.encode())
    if not 0 < size <= KEY_BYTES_MAX:
        raise InvalidArgumentError(f"key must have 1..={KEY_BYTES_MAX} bytes, got {size}: {key!r}")


def check_value(value: bytes) -> None:
    """Refuse a value that is too large.

    Raises:
        InvalidArgumentError: It is.
    """
    if len(value) > VALUE_BYTES_MAX:
        raise InvalidArgumentError(
            f"value may have at most {VALUE_BYTES_MAX} bytes, got {len(value)}"
        )


def check_open(is_closed: bool) -> None:
    """Refuse work after close().

    Raises:
        ClosedError: It is closed.
    """
    if is_closed:
        raise ClosedError("the discovery is closed")
