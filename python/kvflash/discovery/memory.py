"""Discovery within one process, shared by all of its runtimes and event loops."""

from __future__ import annotations

import asyncio
import threading
import weakref
from dataclasses import dataclass, field

from kvflash.discovery.base import (
    LEASE_TTL_S,
    Discovery,
    Lease,
    Watch,
    check_key,
    check_open,
    check_value,
    new_lease_id,
)
from kvflash.errors import InvalidArgumentError, OverloadedError

KEYS_MAX = 65_536


@dataclass
class _Store:
    lock: threading.RLock = field(default_factory=threading.RLock)
    keys: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    leases: set[int] = field(default_factory=set)
    watches: dict[Watch, tuple[str, asyncio.AbstractEventLoop]] = field(default_factory=dict)

    def set(self, key: str, value: bytes, lease_id: int, *, is_new: bool) -> bool:
        check_key(key)
        check_value(value)
        with self.lock:
            if lease_id and lease_id not in self.leases:
                raise InvalidArgumentError(f"lease {lease_id} has expired")
            if key in self.keys:
                if is_new:
                    return False
            elif len(self.keys) >= KEYS_MAX:
                raise OverloadedError(f"discovery in memory is full: {KEYS_MAX} keys")
            self.keys[key] = (value, lease_id)
            self._tell(key, value)
            return True

    def delete(self, key: str) -> bool:
        with self.lock:
            was_there = self.keys.pop(key, None) is not None
            if was_there:
                self._tell(key, None)
            return was_there

    def end(self, lease_id: int) -> None:
        with self.lock:
            self.leases.discard(lease_id)
            for key in [key for key, (_, lease) in self.keys.items() if lease == lease_id]:
                self.delete(key)

    def with_prefix(self, prefix: str) -> dict[str, bytes]:
        with self.lock:
            return {key: value for key, (value, _) in self.keys.items() if key.startswith(prefix)}

    def _tell(self, key: str, value: bytes | None) -> None:
        for watch, (prefix, loop) in list(self.watches.items()):
            if key.startswith(prefix):
                try:
                    loop.call_soon_threadsafe(watch.change, key, value)
                except RuntimeError:
                    # Its event loop is closed, so it has no reader any more.
                    del self.watches[watch]


_SHARED = _Store()


class _MemoryLease:
    def __init__(self, store: _Store, lease_id: int) -> None:
        self.id = lease_id
        self.lost = asyncio.Event()
        # A runtime that is dropped without being closed deletes its keys.
        self._end = weakref.finalize(self, store.end, lease_id)

    async def revoke(self) -> None:
        self._end()


class MemoryDiscovery(Discovery):
    """Keys in this process's memory, at most KEYS_MAX, shared by all instances with is_shared."""

    def __init__(self, *, is_shared: bool = True) -> None:
        self._store = _SHARED if is_shared else _Store()
        self._leases: list[weakref.ref[_MemoryLease]] = []
        self._watches: list[Watch] = []
        self._is_closed = False

    def twin(self) -> MemoryDiscovery:
        twin = MemoryDiscovery()
        twin._store = self._store
        return twin

    async def lease(self, ttl_s: float = LEASE_TTL_S, *, lease_id: int | None = None) -> Lease:
        check_open(self._is_closed)
        lease = _MemoryLease(self._store, lease_id or new_lease_id())
        with self._store.lock:
            self._store.leases.add(lease.id)
        self._leases = [held for held in self._leases if held() is not None]
        self._leases.append(weakref.ref(lease))
        return lease

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> None:
        check_open(self._is_closed)
        self._store.set(key, value, 0 if lease is None else lease.id, is_new=False)

    async def create(self, key: str, value: bytes, lease: Lease | None = None) -> bool:
        check_open(self._is_closed)
        return self._store.set(key, value, 0 if lease is None else lease.id, is_new=True)

    async def delete(self, key: str) -> bool:
        check_open(self._is_closed)
        return self._store.delete(key)

    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        check_open(self._is_closed)
        return self._store.with_prefix(prefix)

    def watch(self, prefix: str) -> Watch:
        check_open(self._is_closed)
        watch = Watch(self._forget)
        loop = asyncio.get_running_loop()
        with self._store.lock:
            watch.replace(self._store.with_prefix(prefix))
            self._store.watches[watch] = (prefix, loop)
        self._watches.append(watch)
        return watch

    async def close(self) -> None:
        self._is_closed = True
        for watch in list(self._watches):
            await watch.aclose()
        for held in self._leases:
            lease = held()
            if lease is not None:
                await lease.revoke()

    def _forget(self, watch: Watch) -> None:
        self._watches.remove(watch)
        with self._store.lock:
            self._store.watches.pop(watch, None)
