"""Requests that wait until a worker has room to prefill them, in an event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Any

from kvflash._core import Decider, RouterBooking
from kvflash.errors import ClosedError

__all__ = ["WaitingLine"]


class WaitingLine:
    """Where requests wait for a worker with room; who is next is the core's business.

    Args:
        decider: Books requests, or has them wait where there is a queue threshold.
        timeout_s: Time for which one waits.
        is_slow: Whether a decision may wait for somebody else, so that threads make it.
    """

    def __init__(self, decider: Decider, timeout_s: float, *, is_slow: bool = False) -> None:
        self._decider = decider
        self._timeout_s = timeout_s
        self._is_slow = is_slow
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._watched: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    async def book(
        self, token_ids: Sequence[int], options: dict[str, Any], *, request_id: str
    ) -> RouterBooking:
        """Book a request, at once or when there is room.

        Whoever is cancelled has left the line, with nothing booked.

        Raises:
            OverloadedError: Too many wait.
            AllBusyError: There was no room in time, or all workers are busy.
            ClosedError: The line was closed.
            KvflashError: What else the core says, also while it waits.
        """
        enter = functools.partial(self._decider.enter, token_ids, options, request_id=request_id)
        # A booking that is made when nobody waits for it any more goes with its object.
        entered = await asyncio.to_thread(enter) if self._is_slow else enter()
        if isinstance(entered, RouterBooking):
            return entered
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        try:
            while True:
                called = loop.create_future()
                self._waiting[entered.number] = called
                self._watch(loop)
                # A future that is done is not waited for: who was called in time has its try.
                done, _ = await asyncio.wait([called], timeout=max(0.0, deadline - loop.time()))
                if not done:
                    raise entered.expire()
                if self._is_closed:
                    raise ClosedError("the router was closed while a request waited")
                booking = entered.try_again()
                if booking is not None:
                    return booking
        finally:
            entered.leave()
            self._waiting.pop(entered.number, None)
            if not self._waiting:
                self._unwatch()

    def close(self) -> None:
        """Have all that wait leave, with a ClosedError."""
        self._is_closed = True
        for called in self._waiting.values():
            if not called.done():
                called.set_result(None)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._watched is None:
            loop.add_reader(self._decider.wake_fd, self._call)
            self._watched = loop

    def _unwatch(self) -> None:
        if self._watched is not None:
            self._watched.remove_reader(self._decider.wake_fd)
            self._watched = None

    def _call(self) -> None:
        for number in self._decider.called():
            called = self._waiting.get(number)
            if called is not None and not called.done():
                called.set_result(None)
