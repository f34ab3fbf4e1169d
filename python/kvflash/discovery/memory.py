"""Discovery within one process, shared by all of its runtimes and event loops."""

from __future__ import annotations

import asyncio
import threading
import weakref

from kvflash.discovery.base import KEYS_MAX, LEASE_TTL_S, Discovery, Lease, Watch, new_lease_id
from kvflash.errors import OverloadedError


class _Store:
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._keys: dict[str, tuple[bytes, int]] = {}
        self._watches: dict[Watch, asyncio.AbstractEventLoop] = {}

    def set(self, key: str, value: bytes, lease_id: int, *, is_new: bool) -> bool:
        with self._lock:
            if key in self._keys:
                if is_new:
                    return False
            elif len(self._keys) >= KEYS_MAX:
                raise OverloadedError(f"discovery in memory is full: {KEYS_MAX} keys")
            self._keys[key] = (value, lease_id)
            self._tell(key, value)
            return True

    def delete(self, key: str) -> bool:
        with self._lock:
            was_there = self._keys.pop(key, None) is not None
            if was_there:
                self._tell(key, None)
            return was_there

    def end(self, lease_id: int) -> None:
        with self._lock:
            for key in [key for key, (_, lease) in self._keys.items() if lease == lease_id]:
                self.delete(key)

    def with_prefix(self, prefix: str) -> dict[str, bytes]:
        with self._lock:
            return {key: value for key, (value, _) in self._keys.items() if key.startswith(prefix)}

    def follow(self, watch: Watch) -> None:
        """Report existing keys now, and changes in this event loop."""
        with self._lock:
            watch.replace(self.with_prefix(watch.prefix))
            self._watches[watch] = asyncio.get_running_loop()

    def forget(self, watch: Watch) -> None:
        with self._lock:
            self._watches.pop(watch, None)

    def _tell(self, key: str, value: bytes | None) -> None:
        for watch, loop in list(self._watches.items()):
            if key.startswith(watch.prefix):
                try:
                    loop.call_soon_threadsafe(watch.change, key, value)
                except RuntimeError:
                    # Its event loop is closed, so it has no reader any more.
                    del self._watches[watch]


_SHARED = _Store()


class MemoryDiscovery(Discovery):
    """Keys in this process's memory, at most KEYS_MAX, shared by all instances with is_shared."""

    def __init__(self, *, is_shared: bool = True) -> None:
        self._store = _SHARED if is_shared else _Store()
        # A runtime that is dropped without being closed deletes its keys.
        self._leases: weakref.WeakKeyDictionary[Lease, weakref.finalize[..., Lease]] = (
            weakref.WeakKeyDictionary()
        )
        self._watches: set[Watch] = set()

    def twin(self) -> MemoryDiscovery:
        twin = MemoryDiscovery()
        twin._store = self._store
        return twin

    async def lease(self, ttl_s: float = LEASE_TTL_S, *, lease_id: int | None = None) -> Lease:
        self._check_open()
        lease = Lease(lease_id or new_lease_id(), self._revoke)
        self._leases[lease] = weakref.finalize(lease, self._store.end, lease.id)
        return lease

    async def delete(self, key: str) -> bool:
        self._check_open()
        return self._store.delete(key)

    async def get_prefix(self, prefix: str) -> dict[str, bytes]:
        self._check_open()
        return self._store.with_prefix(prefix)

    def watch(self, prefix: str) -> Watch:
        self._check_open()
        watch = Watch(prefix, self._forget)
        self._store.follow(watch)
        self._watches.add(watch)
        return watch

    async def _set(self, key: str, value: bytes, lease_id: int, *, is_new: bool) -> bool:
        return self._store.set(key, value, lease_id, is_new=is_new)

    async def _revoke(self, lease: Lease) -> None:
        end = self._leases.pop(lease, None)
        if end is not None:
            end()

    def _forget(self, watch: Watch) -> None:
        self._watches.discard(watch)
        self._store.forget(watch)
