"""Requests that a thread queues, as with a remote indexer: calls that arrive early are kept."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvflash import ClosedError, KvRouterConfig
from kvflash.routing.line import WaitingLine
from service import DEADLINE_S
from support_found import join
from support_push_router import run

IDS = list(range(100, 116))


class HeldDecider:
    """A decider that returns a place in the queue only when the test says so."""

    def __init__(self, decider: Any) -> None:
        self._decider, self.wake_fd = decider, decider.wake_fd
        self._loop = asyncio.get_running_loop()
        self.has_queued, self.has_called = asyncio.Event(), asyncio.Event()
        self.may_return = threading.Event()
        self.may_return.set()

    def enter(self, *args: Any, **options: Any) -> Any:
        entered = self._decider.enter(*args, **options)
        self._loop.call_soon_threadsafe(self.has_queued.set)
        assert self.may_return.wait(DEADLINE_S)
        return entered

    def called(self) -> list[int]:
        numbers = self._decider.called()
        if numbers:
            self.has_called.set()
        return numbers


class Room:
    """A worker that takes a batch of one prompt, and has one to prefill."""

    def __init__(self) -> None:
        config = KvRouterConfig(router_queue_threshold=0.5, router_predicted_ttl_secs=None)
        self.core = config.make_core(16)
        join(self.core, [1], max_num_batched_tokens=len(IDS))
        self.booked = self.core.decider.enter([0, *IDS[1:]], request_id="first")
        self.decider = HeldDecider(self.core.decider)
        self.line = WaitingLine(self.decider, DEADLINE_S, is_slow=True)  # type: ignore[arg-type]

    def ask(self, name: str, **options: Any) -> asyncio.Task[Any]:
        self.decider.has_queued.clear()
        self.decider.has_called.clear()
        booking = self.line.book(IDS, options, request_id=name)
        return asyncio.get_running_loop().create_task(booking)

    async def queue(self, name: str, **options: Any) -> asyncio.Task[Any]:
        """A request that waits, after its first attempt has found no room."""
        task = self.ask(name, **options)
        await soon(self.decider.has_called)
        return task


async def soon(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), DEADLINE_S)


@asynccontextmanager
async def held() -> AsyncIterator[tuple[Room, asyncio.Task[Any], asyncio.Task[Any]]]:
    """One request waits; the thread of an urgent one has queued it and does not return."""
    room = Room()
    waiting = await room.queue("waiting")
    room.decider.may_return.clear()
    urgent = room.ask("urgent", strict_priority=1)
    try:
        await soon(room.decider.has_queued)
        yield room, waiting, urgent
    finally:
        room.decider.may_return.set()


def test_a_call_before_the_thread_returns_is_kept() -> None:
    async def work() -> None:
        async with held() as (room, waiting, urgent):
            await soon(room.decider.has_called)
            room.booked.free()
            room.decider.may_return.set()
            booking = await asyncio.wait_for(urgent, DEADLINE_S)
            assert not waiting.done()
            booking.free()
            (await asyncio.wait_for(waiting, DEADLINE_S)).free()
            assert room.core.queue_stats()["placed_total"] == 2

    run(work())


def test_closing_before_the_thread_returns_ends_the_wait() -> None:
    async def work() -> None:
        async with held() as (room, waiting, urgent):
            room.line.close()
            room.decider.may_return.set()
            for task in (waiting, urgent):
                with pytest.raises(ClosedError):
                    await asyncio.wait_for(task, DEADLINE_S)

    run(work())
