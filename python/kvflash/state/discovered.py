"""Roster and lock as keys of a discovery, deleted when their process ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Mapping
from typing import Protocol

from kvflash.errors import ConfigError, KvflashError, TransportError

__all__ = ["DiscoveredLock", "DiscoveredRoster", "Keys"]


class Lease(Protocol):
    """See ``kvflash.discovery.Lease``."""

    @property
    def lost(self) -> asyncio.Event:
        """Set when it ends without being revoked."""

    async def revoke(self) -> None:
        """End it and delete its keys."""


class Keys(Protocol):
    """The part of ``kvflash.discovery.Discovery`` that this module needs."""

    async def lease(self, ttl_s: float = 10.0) -> Lease:
        """Create a lease that is kept alive."""

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> None:
        """Set a key."""

    async def create(self, key: str, value: bytes, lease: Lease | None = None) -> bool:
        """Set a key if it does not exist."""

    async def delete(self, key: str) -> bool:
        """Delete a key."""

    async def get_prefix(self, prefix: str) -> Mapping[str, bytes]:
        """Keys with this prefix."""


class _Leased:
    """A lease that is created on first use, and again after it is lost."""

    def __init__(self, keys: Keys, ttl_s: float) -> None:
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
    """Routers under ``v1/routers/{namespace}/{component}/``; see :class:`Roster`.

    Args:
        keys: The discovery.
        namespace: Namespace of the component.
        component: Component of the followed events.
        value: Data published about a member, such as its address.
        ttl_s: How long a dead member is listed at most.
    """

    def __init__(
        self,
        keys: Keys,
        namespace: str,
        component: str,
        *,
        value: Mapping[str, object] | None = None,
        ttl_s: float = 10.0,
    ) -> None:
        self._keys = keys
        self._prefix = f"v1/routers/{namespace}/{component}/"
        self._value = json.dumps(dict(value or {})).encode()
        self._lease = _Leased(keys, ttl_s)

    async def join(self, name: str) -> None:
        """See :meth:`Roster.join`."""
        lease = await self._lease.get()
        try:
            await self._keys.put(self._prefix + name, self._value, lease)
        except (TransportError, ConfigError):
            raise
        except KvflashError:
            # The store ended the lease before we learned of it.
            self._lease.drop()
            await self._keys.put(self._prefix + name, self._value, await self._lease.get())

    async def leave(self) -> None:
        """See :meth:`Roster.leave`."""
        await self._lease.end()

    async def members(self) -> set[str]:
        """See :meth:`Roster.members`."""
        found = await self._keys.get_prefix(self._prefix)
        return {key[len(self._prefix) :] for key in found}

    async def told(self) -> dict[str, dict[str, object]]:
        """The data published by every member."""
        found = await self._keys.get_prefix(self._prefix)
        told: dict[str, dict[str, object]] = {}
        for key, value in found.items():
            with contextlib.suppress(ValueError, TypeError):
                told[key[len(self._prefix) :]] = dict(json.loads(value))
        return told


class DiscoveredLock:
    """A key with its own lease; see :class:`kvflash.state.base.Lock`.

    Args:
        keys: The discovery.
        key: Its name.
        ttl_s: How long it stays locked after its holder's death, at most.
    """

    def __init__(self, keys: Keys, key: str, *, ttl_s: float = 10.0) -> None:
        self._keys = keys
        self._key = key
        self._ttl_s = ttl_s

    async def acquire(self) -> DiscoveredGrant | None:
        """See :meth:`Lock.acquire`."""
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
    """See :class:`kvflash.state.base.Grant`."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    @property
    def is_lost(self) -> bool:
        """See :attr:`Grant.is_lost`."""
        return self._lease.lost.is_set()

    async def release(self) -> None:
        """See :meth:`Grant.release`."""
        # If the revocation is lost, the lease expires by itself.
        with contextlib.suppress(KvflashError):
            await self._lease.revoke()
