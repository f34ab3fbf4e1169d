"""The discovery interface: keys with values, some bound to the life of their process."""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import ClassVar

from kvflash.errors import ClosedError, InvalidArgumentError

KEY_BYTES_MAX = 200
VALUE_BYTES_MAX = 1024 * 1024
# Keys in memory or in a folder; etcd has a limit of its own.
KEYS_MAX = 65_536
LEASE_TTL_S = 10.0


@dataclass(frozen=True)
class Put:
    """A key now has this value."""

    key: str
    value: bytes


@dataclass(frozen=True)
class Delete:
    """A key was deleted."""

    key: str


@dataclass(frozen=True)
class Synced:
    """All keys that existed when the watch began have been reported; sent once."""


Event = Put | Delete | Synced


class Lease:
    """A lease: its keys are deleted when the process that holds it dies.

    Attributes:
        id: Its number, 63 bits, never 0.
        lost: Set when the lease ends without being revoked: its keys are deleted.
    """

    def __init__(self, lease_id: int, on_revoke: Callable[[Lease], Awaitable[None]]) -> None:
        self.id = lease_id
        self.lost = asyncio.Event()
        self._on_revoke = on_revoke

    async def revoke(self) -> None:
        """End the lease and delete its keys. Further calls do nothing."""
        await self._on_revoke(self)


class Watch(AsyncIterator[Event], AbstractAsyncContextManager["Watch"]):
    """Changes to the keys of a prefix, as an async iterator.

    It yields a :class:`Put` for every existing key, then one :class:`Synced`, then changes. After a
    reconnect, which is automatic, it yields only differences.

    A slow reader misses intermediate changes, never the latest one: at most one event waits per
    key, so the number of keys bounds the backlog.
    """

    def __init__(self, prefix: str, on_close: Callable[[Watch], None]) -> None:
        self.prefix = prefix
        self._on_close = on_close
        self._known: dict[str, bytes] = {}
        self._waiting: OrderedDict[str, bytes | None] = OrderedDict()
        self._is_synced = False
        self._is_sync_told = False
        self._is_closed = False
        self._news = asyncio.Event()

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
            self._news.clear()
            await self._news.wait()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop watching; a waiting reader ends."""
        if not self._is_closed:
            self._is_closed = True
            self._news.set()
            self._on_close(self)

    # For backends:

    def change(self, key: str, value: bytes | None) -> None:
        """Report a change, if the value differs; None for a deleted key."""
        if self._known.get(key) == value:
            return
        if value is None:
            del self._known[key]
        else:
            self._known[key] = value
        # It replaces the last change; a key created and deleted meanwhile is reported as deleted.
        self._waiting.pop(key, None)
        self._waiting[key] = value
        self._news.set()

    def replace(self, state: dict[str, bytes]) -> None:
        """Report differences between the known state and this one; the first call syncs."""
        for key in [key for key in self._known if key not in state]:
            self.change(key, None)
        for key, value in state.items():
            self.change(key, value)
        if not self._is_synced:
            self._is_synced = True
            self._news.set()


class Discovery(ABC):
    """Keys and values by which processes find each other.

    Keys are strings of at most KEY_BYTES_MAX bytes, values bytes of at most VALUE_BYTES_MAX. All
    methods raise TransportError when the store can't be reached and ClosedError after close().

    Attributes:
        is_local: It reaches only processes on this machine.
        show_outage: Takes the reason why the store can't be reached, and an empty string when it
            can be reached again.
    """

    is_local: ClassVar[bool] = True
    show_outage: Callable[[str], None] = staticmethod(lambda _reason: None)
    # Living leases and open watches; a backend keeps here what it needs for each.
    _leases: Collection[Lease]
    _watches: Collection[Watch]
    _is_closed = False

    @abstractmethod
    async def lease(self, ttl_s: float = LEASE_TTL_S, *, lease_id: int | None = None) -> Lease:
        """Create a lease, kept alive in the background until it is revoked.

        Args:
            ttl_s: How long its keys outlive the process at most; ignored by backends that detect
                the end of a process by themselves.
            lease_id: Number of a lost lease, to reuse it.
        """

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> None:
        """Set a key; with a lease, for as long as the lease lives."""
        await self._checked_set(key, value, lease, is_new=False)

    async def create(self, key: str, value: bytes, lease: Lease | None = None) -> bool:
        """Set a key if it does not exist; False if it does. Of concurrent callers one gets True."""
        return await self._checked_set(key, value, lease, is_new=True)

    @abstractmethod
    async def delete(self, key: str) -> bool:
        """Delete a key; False if it did not exist."""

    @abstractmethod
    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        """All keys with this prefix, with their values."""

    @abstractmethod
    def watch(self, prefix: str) -> Watch:
        """Watch the keys with this prefix; needs a running event loop."""

    async def close(self) -> None:
        """Revoke this object's leases and end its watches."""
        self._is_closed = True
        for watch in list(self._watches):
            await watch.aclose()
        for lease in list(self._leases):
            await lease.revoke()

    @abstractmethod
    def twin(self) -> Discovery:
        """Open the same keys for another event loop; the result is closed separately."""

    # For backends:

    @abstractmethod
    async def _set(self, key: str, value: bytes, lease_id: int, *, is_new: bool) -> bool:
        """Set a key, 0 for no lease; with ``is_new`` only if it does not exist, else False."""

    async def _checked_set(
        self, key: str, value: bytes, lease: Lease | None, *, is_new: bool
    ) -> bool:
        self._check_open()
        check_key(key)
        if len(value) > VALUE_BYTES_MAX:
            raise InvalidArgumentError(
                f"value may have at most {VALUE_BYTES_MAX} bytes, got {len(value)}"
            )
        if lease is not None and lease not in self._leases:
            raise InvalidArgumentError(
                f"lease {lease.id} has expired or belongs to another discovery"
            )
        return await self._set(key, value, 0 if lease is None else lease.id, is_new=is_new)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the discovery is closed")


def new_lease_id() -> int:
    """A random number of 63 bits that is not 0."""
    return secrets.randbelow(2**63 - 1) + 1


def check_key(key: str) -> None:
    """Refuse an empty key, and one that is too long."""
    size = len(key.encode())
    if not 0 < size <= KEY_BYTES_MAX:
        raise InvalidArgumentError(f"key must have 1..={KEY_BYTES_MAX} bytes, got {size}: {key!r}")
