"""Roster and lock as keys of a discovery, deleted when their process ends."""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING

from kvflash.errors import ConfigError, KvflashError, TransportError

if TYPE_CHECKING:
    from kvflash.discovery import Discovery, Lease

# Members publish nothing besides their name.
_VALUE = b"{}"


class _Leased:
    """A lease that is created on first use, and again after it is lost."""

    def __init__(self, keys: Discovery, ttl_s: float) -> None:
        self._keys = keys
        self._ttl_s = ttl_s
        self._lease: Lease | None = None

    async def get(self) -> Lease:
        if self._lease is None or self._lease.lost.is_set():
            self._lease = await self._keys.lease(self._ttl_s)
        return self._lease

    def drop(self) -> None:
        self._lease = None

    async def end(self) -> None:
        if self._lease is not None:
            lease, self._lease = self._lease, None
            await lease.revoke()


class DiscoveredRoster:
    """The list of live routers, under ``v1/routers/{namespace}/{component}/``.

    Args:
        keys: The discovery.
        namespace: Namespace of the component.
        component: Component of the followed events.
        ttl_s: How long a dead member is listed at most.
    """

    def __init__(
        self, keys: Discovery, namespace: str, component: str, *, ttl_s: float = 10.0
    ) -> None:
        self._keys = keys
        self._prefix = f"v1/routers/{namespace}/{component}/"
        self._lease = _Leased(keys, ttl_s)

    async def join(self, name: str) -> None:
        """Add this router until its process ends or leaves; repeated after a lost lease."""
        lease = await self._lease.get()
        try:
            await self._keys.put(self._prefix + name, _VALUE, lease)
        except (TransportError, ConfigError):
            raise
        except KvflashError:
            # The store ended the lease before we learned of it.
            self._lease.drop()
            await self._keys.put(self._prefix + name, _VALUE, await self._lease.get())

    async def leave(self) -> None:
        """Remove this router."""
        await self._lease.end()

    async def members(self) -> set[str]:
        """The listed routers."""
        found = await self._keys.get_prefix(self._prefix)
        return {key[len(self._prefix) :] for key in found}


class DiscoveredLock:
    """A key with its own lease: at most one holder at a time, as far as leases guarantee it.

    Args:
        keys: The discovery.
        key: Its name.
        ttl_s: How long it stays locked after its holder's death, at most.
    """

    def __init__(self, keys: Discovery, key: str, *, ttl_s: float = 10.0) -> None:
        self._keys = keys
        self._key = key
        self._ttl_s = ttl_s

    async def acquire(self) -> DiscoveredGrant | None:
        """Take the lock; None if it is taken."""
        lease = await self._keys.lease(self._ttl_s)
        try:
            is_ours = await self._keys.create(self._key, secrets.token_bytes(8), lease)
        except KvflashError:
            with contextlib.suppress(KvflashError):
                await lease.revoke()
            raise
        if not is_ours:
            await lease.revoke()
            return None
        return DiscoveredGrant(lease)


class DiscoveredGrant:
    """A held lock, valid as long as its lease lives."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    @property
    def is_lost(self) -> bool:
        """Whether its lease has ended, so that another process may hold the lock."""
        return self._lease.lost.is_set()

    async def release(self) -> None:
        """Release the lock; without effect when it is lost."""
        # If the revocation is lost, the lease expires by itself.
        with contextlib.suppress(KvflashError):
            await self._lease.revoke()
