"""Requests that wait in an event loop until a worker has room to prefill them."""

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from kvflash._core import Decider, RouterBooking
from kvflash.errors import ClosedError

# Calls kept for requests that are not registered yet: at most one per model, since one request of a
# model tries at a time. The rest is of requests that have left.
EARLY_CALLS_MAX = 4_096


class WaitingLine:
    """A queue for requests that wait for a worker with room; the core decides their order.

    ``is_slow`` says that a decision may block on another service, so that threads make it.
    """

    def __init__(self, decider: Decider, timeout_s: float, *, is_slow: bool = False) -> None:
        self._decider = decider
        self._timeout_s = timeout_s
        self._is_slow = is_slow
        self._waiting: dict[int, asyncio.Future[None]] = {}
        # A thread may queue a request that is called before this loop hears of it.
        self._early_calls: OrderedDict[int, None] = OrderedDict()
        self._watched: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    async def book(
        self, token_ids: Sequence[int], options: dict[str, Any], *, request_id: str
    ) -> RouterBooking:
        """Book a request, at once or when there is room.

        A cancelled request leaves the queue, with nothing booked. Raises OverloadedError if the
        queue is full, AllBusyError if there is no room in time, ClosedError, and the core's errors.
        """
        enter = functools.partial(self._decider.enter, token_ids, options, request_id=request_id)
        # A booking made after its caller has gone is freed with its object.
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
                if self._is_closed or entered.number in self._early_calls:
                    self._early_calls.pop(entered.number, None)
                    called.set_result(None)
                # A completed future is not awaited: a request called in time gets its attempt.
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
            if not self._waiting and self._watched is not None:
                self._watched.remove_reader(self._decider.wake_fd)
                self._watched = None

    def close(self) -> None:
        """Remove all waiting requests, each with a ClosedError."""
        self._is_closed = True
        for called in self._waiting.values():
            if not called.done():
                called.set_result(None)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._watched is None:
            loop.add_reader(self._decider.wake_fd, self._call)
            self._watched = loop

    def _call(self) -> None:
        for number in self._decider.called():
            called = self._waiting.get(number)
            if called is None:
                self._early_calls[number] = None
                if len(self._early_calls) > EARLY_CALLS_MAX:
                    self._early_calls.popitem(last=False)
            elif not called.done():
                called.set_result(None)
