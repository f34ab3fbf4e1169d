"""What the protocols of this room need of the world: members, a lock, time, a place for state."""

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
    """A lock that is held, for as long as its lease lives."""

    @property
    def is_lost(self) -> bool:
        """Its lease ended: somebody else may hold it."""

    async def release(self) -> None:
        """Give it back; without effect when it is lost."""


class Lock(Protocol):
    """At most one holder at a time, as far as leases can say."""

    async def acquire(self) -> Grant | None:
        """Take it; None when somebody has it."""


class Roster(Protocol):
    """Which routers are alive."""

    async def join(self, name: str) -> None:
        """Be listed from now on, until the process ends or leaves; again after a lost lease."""

    async def leave(self) -> None:
        """Be listed no more."""

    async def members(self) -> set[str]:
        """Who is listed."""


class Sink(Protocol):
    """What a log's messages are applied to."""

    def apply(self, messages: Sequence[Message]) -> None:
        """Apply messages in order; again changes nothing."""

    def clear(self) -> None:
        """Forget everything."""

    def snapshot(self) -> Iterator[bytes]:
        """Everything, in chunks: at least what was applied before the first one is asked for."""

    def restore(self, snapshot: bytes) -> list[str]:
        """Hold what a snapshot says and nothing else. Returns why parts were left out.

        Raises:
            DecodeError: It is no snapshot.
        """
