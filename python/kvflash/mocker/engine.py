"""The asyncio loop that drives the scheduler in time and delivers tokens to their requests.

The curves of the modelled time are those of NVIDIA Dynamo's mocker, fitted to a real GPU. Here a
decode step also grows with its batch, so that spreading load over workers pays off as on real
hardware.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvflash.errors import ClosedError
from kvflash.mocker.config import MockerConfig
from kvflash.mocker.scheduler import Pass, Request, Scheduler

if TYPE_CHECKING:
    from kvflash.publisher.stream import EventOutbox

logger = logging.getLogger(__name__)

# The resolution of event loop timers; shorter steps are accumulated and slept in one.
TIMER_RESOLUTION_S = 0.001
# Limit of the delay that a late engine may catch up; more would turn a stall into a burst.
CATCH_UP_S_MAX = 0.02
# Milliseconds per token squared, per token, and per pass.
PREFILL_MS = (4.209989e-07, 1.518344e-02, 16.50142)
# Milliseconds per cache usage squared, per usage (0..1), and per pass.
DECODE_MS = (-25.74, 54.01, 5.74)
DECODE_MS_MIN = 1.0
# Each further request of a batch adds 0.5 % to its decode step: 256 requests take 2.3 times as long
# as one, so batching still raises throughput more than a hundredfold.
BATCH_COST = 0.005


def prefill_ms(new_tokens: int) -> float:
    """Time to compute the prompt tokens of a pass that are not cached."""
    if new_tokens == 0:
        return 0.0
    square, linear, constant = PREFILL_MS
    return square * new_tokens * new_tokens + linear * new_tokens + constant


def decode_ms(kv_usage: float) -> float:
    """Time of a decode step of one request, at this share of the KV cache; above 1 counts as 1."""
    usage = min(1.0, kv_usage)
    square, linear, constant = DECODE_MS
    return max(DECODE_MS_MIN, square * usage * usage + linear * usage + constant)


def decode_step_ms(kv_usage: float, batch_size: int) -> float:
    """Time of a decode step of a whole batch; 0 for an empty one."""
    if batch_size == 0:
        return 0.0
    return decode_ms(kv_usage) * (1.0 + BATCH_COST * (batch_size - 1))


def pass_ms(new_tokens: int, batch_size: int, kv_usage: float) -> float:
    """Time of a whole pass: its prefill, then its decode step."""
    return prefill_ms(new_tokens) + decode_step_ms(kv_usage, batch_size)


class Waiter:
    """Wakes the coroutine that waits for the tokens of its requests."""

    def __init__(self, *, is_streaming: bool) -> None:
        self._is_streaming = is_streaming  # Wake it for every token, not only for the last ones.
        self._error: ClosedError | None = None
        self._changed = asyncio.Event()

    async def wait(self) -> None:
        """Wait for news since the last call; ClosedError if the engine stopped."""
        await self._changed.wait()
        self._changed.clear()
        if self._error is not None:
            raise self._error

    def notify(self, request: Request) -> None:
        if self._is_streaming or request.is_finished:
            self._changed.set()

    def fail(self, error: ClosedError) -> None:
        self._error = error
        self._changed.set()


class Engine:
    """A scheduler and its clock."""

    def __init__(self, config: MockerConfig, outbox: EventOutbox | None) -> None:
        self._config = config
        self.scheduler = Scheduler(config, outbox)
        self._waiters: dict[Request, Waiter] = {}
        self._wake = asyncio.Event()
        self._due_s = 0.0
        self._error: ClosedError | None = None
        # Called after each pass, for load reports.
        self.on_pass: Callable[[Scheduler], None] | None = None

    @property
    def is_alive(self) -> bool:
        return self._error is None

    def submit(self, request: Request, waiter: Waiter) -> None:
        """Accept a request.

        Raises OverloadedError if too many requests wait, InvalidArgumentError for an empty or too
        long request, and ClosedError once the engine has stopped.
        """
        if self._error is not None:
            raise self._error
        self.scheduler.add(request)
        self._waiters[request] = waiter
        self._wake.set()

    def abort(self, request: Request) -> None:
        """End a request early and free its blocks; without effect if it has ended."""
        if self._waiters.pop(request, None) is not None:
            self.scheduler.abort(request)

    async def run(self) -> None:
        """Work until cancelled; then every waiter fails with ClosedError."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                planned = self.scheduler.schedule()
                if planned is None:
                    self._wake.clear()
                    await self._wake.wait()
                    self._due_s = max(self._due_s, loop.time())
                    continue
                await self._pace(planned)
                self._finish(planned)
        except Exception as error:
            logger.exception("the engine loop failed")
            self._stop(ClosedError(f"the engine failed: {error!r}"))
        finally:
            self._stop(ClosedError("the engine was stopped"))

    async def _pace(self, planned: Pass) -> None:
        modelled_ms = pass_ms(planned.prefill_tokens, planned.decode_count, planned.kv_usage)
        now_s = asyncio.get_running_loop().time()
        self._due_s = max(self._due_s, now_s - CATCH_UP_S_MAX)
        self._due_s += modelled_ms / 1000 / self._config.speedup_ratio
        delay_s = self._due_s - now_s
        # Even a step too short to sleep yields once, so that requests and aborts can come in.
        await asyncio.sleep(delay_s if delay_s >= TIMER_RESOLUTION_S else 0)

    def _finish(self, planned: Pass) -> None:
        # Its events are sent before its tokens: a client with the answer can rely on its blocks
        # having been published.
        for request in self.scheduler.complete(planned):
            self._waiters[request].notify(request)
            if request.is_finished:
                del self._waiters[request]
        if self.on_pass is not None:
            self.on_pass(self.scheduler)

    def _stop(self, error: ClosedError) -> None:
        if self._error is not None:
            return
        self._error = error
        for waiter in self._waiters.values():
            waiter.fail(error)
        self._waiters.clear()
