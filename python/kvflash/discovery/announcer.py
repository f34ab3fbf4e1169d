"""Keeps a process's keys in discovery, whatever happens to its lease or to the store."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from kvflash.background import cancel
from kvflash.discovery.base import LEASE_TTL_S, Discovery, Lease
from kvflash.errors import ClosedError, KvflashError
from kvflash.outage import Outage

logger = logging.getLogger(__name__)

# Pauses between two attempts: the first, and the longest.
PAUSE_S = (0.1, 5.0)
# An unresponsive discovery must not keep a process from ending.
LEAVE_TIMEOUT_S = 5.0


class Announcer:
    """Announces keys under one lease until they are withdrawn, or it is closed.

    After a lost lease it announces all of them again under a new one. ``what`` names in log lines
    what they announce, and ``lease_id`` is the number of each lease; default: random. It belongs to
    one event loop.
    """

    def __init__(
        self,
        discovery: Discovery,
        what: str,
        *,
        lease_id: int | None = None,
        ttl_s: float = LEASE_TTL_S,
    ) -> None:
        self._discovery, self._what = discovery, what
        self._lease_id, self._ttl_s = lease_id, ttl_s
        #: Announced keys, the oldest first.
        self.keys: dict[str, bytes] = {}
        # Keys, announced or withdrawn, that discovery may have otherwise.
        self._unsettled: set[str] = set()
        self._lease: Lease | None = None
        self._lease_lost = asyncio.Event()
        # Not cancelled with its callers: discovery may grant a lease that they no longer wait for.
        self._granting: asyncio.Task[Lease] | None = None
        # Held while a key is put or deleted, so that the last call wins.
        self._changing = asyncio.Lock()
        self._keeper: asyncio.Task[None] | None = None
        self._settler: asyncio.Task[None] | None = None
        self._is_closed = False

    async def announce(self, key: str, value: bytes) -> None:
        """Put a key; if the lease has just been lost, the new lease puts it.

        Raises TransportError if discovery can't be reached; the key then is what it was before. A
        ClosedError says that it is closed before or meanwhile.
        """
        lease = await self.lease()
        before = self.keys.get(key)
        # First, so that a new lease puts it, and a withdrawal knows of it.
        self.keys[key] = value
        self._unsettled.add(key)
        try:
            await self._settle(key)
        except BaseException as error:
            self._settle_later()
            if isinstance(error, KvflashError) and lease.lost.is_set():
                return
            if self.keys.get(key) is value:
                # Discovery may have taken it all the same.
                self._unsettled.add(key)
                if before is None:
                    del self.keys[key]
                else:
                    self.keys[key] = before
            if isinstance(error, KvflashError):
                # Its lease may be gone already, which would be the wrong reason.
                self._check_open(error)
            raise

    def announce_soon(self, key: str, value: bytes) -> None:
        """Put a key in the background, as soon as discovery can be reached."""
        self.keys[key] = value
        self._unsettled.add(key)
        self._settle_later()

    async def withdraw(self, key: str) -> None:
        """Delete an announced key; after a TransportError the background retries the deletion."""
        if self.keys.pop(key, None) is not None:
            self._unsettled.add(key)
        try:
            await self._settle(key)
        except BaseException:
            self._settle_later()
            raise

    async def lease(self) -> Lease:
        """The lease, granted by the first call; ClosedError if it is closed before or meanwhile."""
        self._check_open()
        return self._lease or await self._grant()

    async def close(self, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        """Delete all keys, within ``timeout_s``; if that fails, they end with the lease."""
        self._is_closed = True
        try:
            await asyncio.wait_for(self._leave(), timeout_s)
        except (KvflashError, OSError, asyncio.TimeoutError) as error:
            # A TimeoutError has no text.
            why = str(error) or type(error).__name__
            text = (
                "%s could not withdraw its lease within %g s (%s); the lease will expire by itself"
            )
            logger.warning(text, self._what, timeout_s, why)

    async def _leave(self) -> None:
        # First, so that neither of them puts a key or asks for a lease after this.
        await cancel([task for task in (self._keeper, self._settler) if task is not None])
        if self._granting is not None:
            # It revokes the lease itself, as long as discovery is open.
            await asyncio.wait({self._granting})
        if self._lease is not None:
            await self._lease.revoke()

    async def _grant(self) -> Lease:
        """A new lease, the one that is asked for already if there is one."""
        granting = self._granting
        if granting is None:
            granting = self._granting = asyncio.get_running_loop().create_task(self._ask())
            granting.add_done_callback(self._granted)
        await asyncio.wait({granting})
        return granting.result()

    async def _ask(self) -> Lease:
        try:
            lease = await self._discovery.lease(self._ttl_s, lease_id=self._lease_id)
            if self._is_closed:
                # It was closed meanwhile and knows nothing of this lease.
                await lease.revoke()
        except KvflashError as error:
            self._check_open(error)
            raise
        self._check_open()
        self._lease = lease
        self._keeper = asyncio.get_running_loop().create_task(self._keep(lease))
        return lease

    def _granted(self, granting: asyncio.Task[Lease]) -> None:
        self._granting = None
        if not granting.cancelled():
            # Its callers may all be cancelled; asyncio would then log its failure.
            granting.exception()

    def _check_open(self, cause: KvflashError | None = None) -> None:
        if self._is_closed:
            raise ClosedError(f"{self._what} is no longer announced") from cause

    async def _keep(self, lease: Lease) -> None:
        """Announce everything again after the lease is lost."""
        await lease.lost.wait()
        logger.warning("%s lost its lease and is announced again", self._what)
        self._unsettled.update(self.keys)
        self._lease_lost.set()
        self._settle_later()

    async def _settle(self, key: str) -> None:
        """Put or delete a key that discovery may have otherwise."""
        async with self._changing:
            if key not in self._unsettled:
                return
            # First, so that what changes meanwhile is settled after this.
            self._unsettled.discard(key)
            try:
                if key in self.keys:
                    await self._discovery.put(key, self.keys[key], self._lease)
                else:
                    await self._discovery.delete(key)
            except BaseException:
                self._unsettled.add(key)
                raise

    def _settle_later(self) -> None:
        if not self._is_closed and (self._settler is None or self._settler.done()):
            self._settler = asyncio.get_running_loop().create_task(self._settle_all())

    async def _settle_all(self) -> None:
        """Settle keys until none is left, under a new lease if the last one is lost."""
        pause_s, pause_s_max = PAUSE_S
        outage = Outage(logger, f"the announcements of {self._what} are up to date")
        while self._unsettled:
            self._lease_lost.clear()
            failure = await self._try_all()
            if self._is_closed:
                return
            if failure is not None:
                where, error = failure
                why = (isinstance(error, KvflashError) and str(error)) or repr(error)
                text = f"can't update the announcements of {self._what}: {where}{why}"
                outage.fails(f"{text}; trying again", error)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._lease_lost.wait(), pause_s)
                pause_s = min(pause_s * 2, pause_s_max)
        outage.ends()

    async def _try_all(self) -> tuple[str, Exception] | None:
        """Try to settle each key once; returns which one was not settled, and why.

        It raises nothing: a worker without announcements would get no requests.
        """
        try:
            lease = await self.lease()
            # An attempt that failed after the new lease was granted keeps it.
            if lease.lost.is_set():
                await self._grant()
        except Exception as error:
            return "", error
        failure: tuple[str, Exception] | None = None
        # In the order of their announcement: a model card precedes its instance.
        for key in [*self.keys, *(self._unsettled - self.keys.keys())]:
            try:
                await self._settle(key)
            except Exception as error:
                failure = f"{key}: ", error
                # One key that can't be deleted keeps no other.
                if key in self.keys:
                    break
        return failure
