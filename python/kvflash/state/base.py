"""Interfaces that this room's protocols need: members, a lock, time, storage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from kvflash.transport.base import Message

__all__ = ["Clock", "Grant", "Lock", "Roster", "Sink", "SystemClock"]


class Clock(Protocol):
    """Time."""

    def now_s(self) -> float:
        """Seconds since the epoch."""

    async def sleep(self, seconds: float) -> None:
        """Wait."""


class SystemClock:
    """The machine's time."""

    def now_s(self) -> float:
        """See :meth:`Clock.now_s`."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """See :meth:`Clock.sleep`."""
        await asyncio.sleep(seconds)


class Grant(Protocol):
    """A held lock, valid as long as its lease lives."""

    @property
    def is_lost(self) -> bool:
        """Whether its lease has ended, so that another process may hold the lock."""

    async def release(self) -> None:
        """Release the lock; without effect when it is lost."""


class Lock(Protocol):
    """A lock with at most one holder at a time, as far as leases guarantee it."""

    async def acquire(self) -> Grant | None:
        """Take the lock; None if it is taken."""


class Roster(Protocol):
    """The list of live routers."""

    async def join(self, name: str) -> None:
        """Add this router until its process ends or leaves; repeated after a lost lease."""

    async def leave(self) -> None:
        """Remove this router."""

    async def members(self) -> set[str]:
        """The listed routers."""


class Sink(Protocol):
    """Receives a log's messages."""

    def apply(self, messages: Sequence[Message]) -> None:
        """Apply messages in order; repeating them changes nothing."""

    def clear(self) -> None:
        """Discard everything."""

    def snapshot(self) -> Iterator[bytes]:
        """The state in chunks: at least what was applied before the first chunk is requested."""

    def restore(self, snapshot: bytes) -> list[str]:
        """Replace the state by a snapshot. Returns why parts were left out.

        Raises:
            DecodeError: It is not a snapshot.
        """
