"""This process's endpoints, and the requests that the request planes bring to them."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from kvflash.errors import (
    ClosedError,
    ConflictError,
    InvalidArgumentError,
    KvflashError,
    NotFoundError,
    OverloadedError,
    WorkerError,
)
from kvflash.runtime.context import Context
from kvflash.runtime.frame import Failure, Kind, Request, frame, pack
from kvflash.runtime.limits import RuntimeLimits
from kvflash.runtime.plane import GoneError

logger = logging.getLogger(__name__)

# An async generator function, or a coroutine function that returns one item or an async iterator;
# called with the request, and with the context if it takes two arguments.
Handler = Callable[..., Any]
# Takes a frame; waits while the reader is slow; raises GoneError if the client is gone.
Send = Callable[[bytes], Awaitable[None]]

_END = frame(Kind.END)
# A handler that never waits yields to others after this many items.
ITEMS_PER_TURN = 64


class Served:
    """An endpoint that this process serves."""

    def __init__(
        self, name: str, handler: Handler, *, requests_max: int, is_graceful: bool
    ) -> None:
        self.name = name
        self.requests_max = requests_max
        self.is_graceful = is_graceful
        self.is_draining = False
        self.running: set[Running] = set()
        self.counts = {"requests_total": 0, "refused_total": 0, "failed_total": 0}
        #: Takes the request's payload and its context.
        self.call: Handler = (
            handler if _takes_context(handler) else lambda payload, _: handler(payload)
        )

    async def drain(self, timeout_s: float, grace_s: float) -> None:
        """Accept no further requests and wait for running ones, up to a time limit."""
        self.is_draining = True
        if self.is_graceful and self.running:
            await asyncio.wait({run.task for run in self.running}, timeout=timeout_s)
        if not self.running:
            return
        logger.warning("%s: %d streams are cut off", self.name, len(self.running))
        limit = f" after {timeout_s:g} s of draining" if self.is_graceful else ""
        failure = Failure("draining", f"the worker ended{limit} during this stream")
        for run in self.running:
            run.end(failure)
        await asyncio.wait({run.task for run in self.running}, timeout=grace_s + 1.0)


class Serving:
    """Endpoints by name."""

    def __init__(self, instance_id: int, limits: RuntimeLimits) -> None:
        self.instance_id = instance_id
        self.limits = limits
        self.endpoints: dict[str, Served] = {}

    def add(
        self, name: str, handler: Handler, *, requests_max: int | None, is_graceful: bool
    ) -> Served:
        """Serve an endpoint.

        Raises ConflictError if it is already served, and InvalidArgumentError if the handler can't
        take a request or the limit is below 1.
        """
        if name in self.endpoints:
            raise ConflictError(f"endpoint {name} is already served")
        limit = self.limits.requests_max if requests_max is None else requests_max
        if limit < 1:
            raise InvalidArgumentError(f"max_concurrent_requests must be at least 1, got {limit}")
        self.endpoints[name] = Served(name, handler, requests_max=limit, is_graceful=is_graceful)
        return self.endpoints[name]

    async def is_there(self, ping: bytes) -> bool:
        """Whether the target of a ping is alive: true if it names this process."""
        return True

    def begin(self, request: Request, send: Send) -> Running:
        """Run a request; pass its frames up to End or Error to ``send``.

        It raises NotFoundError if the request is for another instance or endpoint, ClosedError
        while the endpoint drains, and OverloadedError at the endpoint's limit.
        """
        if request.instance_id != self.instance_id:
            raise NotFoundError(
                f"instance {request.instance_id} is not here; this is {self.instance_id}"
            )
        served = self.endpoints.get(request.endpoint)
        if served is None:
            raise NotFoundError(f"endpoint {request.endpoint} is not served here")
        if served.is_draining:
            raise ClosedError(f"endpoint {request.endpoint} is draining")
        if len(served.running) >= served.requests_max:
            served.counts["refused_total"] += 1
            raise OverloadedError(
                f"endpoint {request.endpoint} serves {served.requests_max} requests, its maximum "
                "(max_concurrent_requests)"
            )
        return Running(served, request, send, self.limits)


class Running:
    """A running request; its task ends with the handler, whichever way."""

    def __init__(self, served: Served, request: Request, send: Send, limits: RuntimeLimits) -> None:
        self.context = Context(request.id)
        self._served = served
        self._send = send
        self._limits = limits
        self._failure: Failure | None = None
        self._is_abandoned = False
        self._timers: list[asyncio.TimerHandle] = []
        self._loop = asyncio.get_running_loop()
        served.running.add(self)
        served.counts["requests_total"] += 1
        self.task = self._loop.create_task(self._run(request))
        self.task.add_done_callback(self._ended)
        if request.deadline_ms is not None:
            late = Failure("deadline", f"not done within {request.deadline_ms} ms")
            self._after(request.deadline_ms / 1e3, lambda: self.end(late))

    def abandon(self) -> None:
        """The client is gone: notify the handler, and cancel it if it does not end by itself."""
        self._is_abandoned = True
        self.end(Failure("cancelled", "the client is gone"))

    def end(self, failure: Failure) -> None:
        """End the request with this failure, after up to cancel_grace_s for the handler."""
        if self._failure is None and not self.task.done():
            self._failure = failure
            self.context.stop_generating()
            self._after(self._limits.cancel_grace_s, self._kill)

    def _kill(self) -> None:
        self.context.kill()
        self.task.cancel()

    def _after(self, delay_s: float, call: Callable[[], None]) -> None:
        self._timers.append(self._loop.call_later(delay_s, call))

    def _ended(self, _task: asyncio.Task[None]) -> None:
        self._served.running.discard(self)
        for timer in self._timers:
            timer.cancel()

    async def _run(self, request: Request) -> None:
        try:
            last = await self._answer(request.payload)
            if not self._is_abandoned:
                await self._send(last)
        except GoneError:
            # The client is gone, so no one is left to receive this.
            self._is_abandoned = True

    async def _answer(self, payload: Any) -> bytes:
        """Send the items; return the final frame."""
        context, bytes_max = self.context, self._limits.frame_bytes_max
        items: AsyncIterator[Any] | None = None
        try:
            items = await _items(self._served.call(payload, context))
            count = 0
            async for item in items:
                if self._failure is not None:
                    break
                await self._send(_data(item, bytes_max))
                count += 1
                if count % ITEMS_PER_TURN == 0:
                    await asyncio.sleep(0)
        except asyncio.CancelledError:
            self._failure = self._failure or Failure("cancelled", "the worker cancelled it")
        except GoneError:
            raise
        except Exception as error:
            self._served.counts["failed_total"] += 1
            # Errors of this package were raised on purpose.
            is_known = isinstance(error, KvflashError)
            logger.warning(
                "%s: request %.200r failed: %.4096r",
                self._served.name,
                context.id(),
                error,
                exc_info=not is_known,
            )
            self._failure = self._failure or Failure.of(error)
        finally:
            await _close(items)
        return _END if self._failure is None else self._failure.pack()


def _data(item: Any, bytes_max: int) -> bytes:
    """An item's frame; a bad item is the handler's fault, not the request's."""
    try:
        return frame(Kind.DATA, pack(item, "item"), bytes_max, "item")
    except InvalidArgumentError as error:
        raise WorkerError("internal", str(error)) from error


async def _items(result: Any) -> AsyncIterator[Any]:
    if inspect.isawaitable(result):
        result = await result
    if hasattr(result, "__aiter__"):
        return aiter(result)

    async def one() -> AsyncIterator[Any]:
        yield result

    return one()


async def _close(items: AsyncIterator[Any] | None) -> None:
    close = getattr(items, "aclose", None)
    if close is not None:
        try:
            await close()
        except Exception:
            logger.warning("a handler failed while it was closed", exc_info=True)


def _takes_context(handler: Handler) -> bool:
    """Whether the handler wants the context besides the request; refuses one that fits neither."""
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"handler must be a function, got {handler!r}") from error

    def takes(count: int) -> bool:
        try:
            signature.bind(*range(count))
        except TypeError:
            return False
        return True

    if takes(2) and ("context" in signature.parameters or not takes(1)):
        return True
    if takes(1):
        return False
    raise InvalidArgumentError(
        f"handler must take (request) or (request, context), got {handler!r} with {signature}"
    )
