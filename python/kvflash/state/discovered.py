"""Roster and lock as keys of a discovery, deleted when their process ends."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from kvflash.errors import InvalidArgumentError, KvflashError

if TYPE_CHECKING:
    from kvflash.discovery import Discovery, Lease

# Members publish nothing besides their name.
_VALUE = b"{}"


class DiscoveredRoster:
    """The list of live routers, under ``v1/routers/{namespace}/{component}/``.

    A dead member is listed for ``ttl_s`` at most.
    """

    def __init__(
        self, keys: Discovery, namespace: str, component: str, *, ttl_s: float = 10.0
    ) -> None:
        self._keys, self._ttl_s = keys, ttl_s
        self._prefix = f"v1/routers/{namespace}/{component}/"
        self._lease: Lease | None = None

    async def join(self, name: str) -> None:
        """Add this router until its process ends or leaves; repeated after a lost lease."""
        try:
            await self._put(name)
        except InvalidArgumentError:
            # The store ended the lease before we learned of it.
            self._lease = None
            await self._put(name)

    async def _put(self, name: str) -> None:
        if self._lease is None or self._lease.lost.is_set():
            self._lease = await self._keys.lease(self._ttl_s)
        await self._keys.put(self._prefix + name, _VALUE, self._lease)

    async def leave(self) -> None:
        """Remove this router."""
        if self._lease is not None:
            lease, self._lease = self._lease, None
            await lease.revoke()

    async def members(self) -> set[str]:
        """The listed routers."""
        found = await self._keys.get_prefix(self._prefix)
        return {key[len(self._prefix) :] for key in found}


class DiscoveredLock:
    """A key with its own lease: at most one holder at a time, as far as leases guarantee it.

    After its holder's death it stays locked for ``ttl_s`` at most.
    """

    def __init__(self, keys: Discovery, key: str, *, ttl_s: float = 10.0) -> None:
        self._keys, self._key, self._ttl_s = keys, key, ttl_s

    @contextlib.asynccontextmanager
    async def hold(self) -> AsyncIterator[Lease | None]:
        """Hold the lock, as long as the lease lives; None if another has it."""
        lease = await self._keys.lease(self._ttl_s)
        try:
            is_ours = await self._keys.create(self._key, secrets.token_bytes(8), lease)
            yield lease if is_ours else None
        finally:
            # If the revocation is lost, the lease expires by itself.
            with contextlib.suppress(KvflashError):
                await lease.revoke()
