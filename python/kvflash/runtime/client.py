"""The client of an endpoint's instances."""

from __future__ import annotations

import asyncio
import logging
import numbers
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from kvflash.errors import (
    ClosedError,
    DeadlineError,
    DecodeError,
    InvalidArgumentError,
    KvflashError,
    NotFoundError,
    NoWorkerError,
    OverloadedError,
    TransportError,
)
from kvflash.runtime.frame import Request, unpack
from kvflash.runtime.instances import Instances
from kvflash.runtime.plane import LOSSES_MAX, FailedError, Reply

if TYPE_CHECKING:
    from kvflash.runtime.component import Endpoint

logger = logging.getLogger(__name__)

SYNC_TIMEOUT_S = 10.0
# Thirty years. A longer time limit counts as no limit: a request has 64 bits for its milliseconds.
ENDLESS_S = 1e9

#: Picks the next instance, by its number, and the handler's argument; those in the set have failed
#: already. A NoWorkerError or NotFoundError says that no other is left.
Pick = Callable[[set[int]], Awaitable[tuple[int, Any]]]


class Client:
    """Sends requests to the instances of an endpoint.

    It may be awaited, which waits until discovery has answered, or used directly. Every request
    returns a :class:`Stream` of items once it is sent.

    A request that fails before its first item, because no handler has seen it or its connection
    broke, is sent to another instance (except by `direct`), at most attempts_max times. If two
    instances hang up on it, it is not sent to a third one: it may be what ends them. After the
    first item it is never sent again.
    """

    def __init__(self, endpoint: Endpoint, instances: Instances) -> None:
        self.endpoint = endpoint
        self._instances = instances
        self._turn = random.randrange(1 << 16)

    def __await__(self) -> Generator[Any, None, Client]:
        yield from self._instances.synced(SYNC_TIMEOUT_S).__await__()
        return self

    def instance_ids(self) -> list[int]:
        """Numbers of the instances known now, sorted. Empty before discovery has answered."""
        self._instances.start()
        return sorted(self._instances.by_id)

    def suspects(self) -> set[int]:
        """Numbers of instances that failed recently; ``random`` skips them."""
        return self._instances.suspects()

    async def wait_for_instances(self, timeout_s: float | None = None) -> list[int]:
        """Wait for at least one instance; returns the numbers of all.

        Raises:
            DeadlineError: No instance appeared within ``timeout_s``.
            ClosedError: The runtime is closed, before or meanwhile.
        """
        limit_s = _limit_s(timeout_s)
        self._instances.start()

        async def any_instance() -> None:
            while not self._instances.by_id:
                await self._instances.changed()

        try:
            await asyncio.wait_for(any_instance(), limit_s)
        except asyncio.TimeoutError:
            raise DeadlineError(
                f"no instance of {self.endpoint.path} within {limit_s:g} s"
            ) from None
        return self.instance_ids()

    async def random(
        self, request: Any, *, request_id: str | None = None, timeout_s: float | None = None
    ) -> Stream:
        """Ask any instance.

        Args:
            request: The handler's argument: anything that msgpack can encode.
            request_id: The request's name; default: random.
            timeout_s: Time limit for the whole answer.

        Raises:
            NoWorkerError: There are no instances.
            TransportError: None of the instances that were tried can be reached.
            InvalidArgumentError: The request is too large or can't be encoded, or timeout_s is
                not a number.
        """

        async def pick(tried: set[int]) -> tuple[int, Any]:
            return random.choice(self._candidates(tried)), request

        return await self.send(pick, request_id=request_id, timeout_s=timeout_s)

    #: The same as :meth:`random`.
    generate = random

    async def round_robin(
        self, request: Any, *, request_id: str | None = None, timeout_s: float | None = None
    ) -> Stream:
        """Ask the next instance in the order of their numbers; see :meth:`random`."""

        async def pick(tried: set[int]) -> tuple[int, Any]:
            found = self._candidates(tried)
            self._turn += 1
            return found[self._turn % len(found)], request

        return await self.send(pick, request_id=request_id, timeout_s=timeout_s)

    async def direct(
        self,
        request: Any,
        instance_id: int,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Stream:
        """Ask this instance only; see :meth:`random`.

        Raises:
            NotFoundError: The instance is not present.
        """

        async def pick(tried: set[int]) -> tuple[int, Any]:
            if tried:
                raise NoWorkerError(f"instance {instance_id} was already tried")
            return instance_id, request

        return await self.send(pick, request_id=request_id, timeout_s=timeout_s)

    async def send(
        self,
        pick: Pick,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
        retried: tuple[type[KvflashError], ...] = (),
    ) -> Stream:
        """Ask the instances that ``pick`` chooses, one after the other; see :meth:`random`.

        After one of the errors ``retried`` before the first item, another instance is asked even if
        the handler itself raised it.
        """
        limit_s = _limit_s(timeout_s)
        await self._instances.synced(SYNC_TIMEOUT_S)
        stream = Stream(self, pick, request_id or secrets.token_hex(16), limit_s, retried)
        await stream._open()
        return stream

    def _candidates(self, tried: set[int]) -> list[int]:
        found = self._instances.candidates(without=tried)
        if not found:
            raise NoWorkerError(f"{self.endpoint.path} has no instance")
        return [instance.id for instance in found]


class Stream(AsyncIterator[Any], AbstractAsyncContextManager["Stream"]):
    """The items of one answer, as an async iterator that raises the answer's errors.

    It closes at its end, on :meth:`aclose`, when its reader is cancelled, and when it is
    garbage-collected. If the handler still runs, it is notified.

    Attributes:
        request_id: The request's name.
        instance_id: The instance that answers.
    """

    def __init__(
        self,
        client: Client,
        pick: Pick,
        request_id: str,
        limit_s: float | None,
        retried: tuple[type[KvflashError], ...],
    ) -> None:
        self.request_id = request_id
        self.instance_id = 0
        self._endpoint, self._instances = client.endpoint, client._instances
        # It has the request, so it is dropped once that can't be sent again.
        self._pick: Pick | None = pick
        self._retried = retried
        self._end = None if limit_s is None else time.monotonic() + limit_s
        self._tried: set[int] = set()
        self._attempts = self._losses = 0
        self._reply: Reply | None = None
        self._is_started = False
        self._is_ended = False
        self._is_cancelled = False
        self._loop = asyncio.get_running_loop()

    async def __anext__(self) -> Any:
        if self._is_ended:
            if self._is_cancelled:
                raise ClosedError("the stream was closed when reading it was cancelled")
            raise StopAsyncIteration
        try:
            return await self._receive()
        except BaseException as error:
            self._is_cancelled = isinstance(error, asyncio.CancelledError)
            self._close()
            raise

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._is_ended and self._reply is not None and not self._loop.is_closed():
            # The garbage collector may run in any thread.
            self._loop.call_soon_threadsafe(self._reply.close)

    async def aclose(self) -> None:
        """Close it; if the handler still runs, it is notified."""
        self._close()

    def _close(self) -> None:
        self._is_ended = True
        self._pick = None
        self._close_reply()

    def _close_reply(self) -> None:
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.close()

    async def _receive(self) -> Any:
        """The next item; StopAsyncIteration at the end."""
        while True:
            assert self._reply is not None
            try:
                packed = await self._in_time(self._reply.receive())
            except (FailedError, TransportError) as failed:
                await self._open(self._give_up(failed))
            else:
                if packed is None:
                    raise StopAsyncIteration
                self._is_started, self._pick = True, None
                return unpack(packed)

    async def _open(self, failure: KvflashError | None = None) -> None:
        """Send the request to an untried instance; raises if none is left, ``failure`` if given.

        The failure is not kept: its traceback leads back to this stream, and to the request.
        """
        runtime = self._endpoint.runtime
        while True:
            assert self._pick is not None
            try:
                self.instance_id, payload = await self._pick(self._tried)
                self._check_open()
            except (NoWorkerError, NotFoundError):
                if failure is None:
                    raise
                # No other instance is left, so report the last failure.
                raise failure from None
            self._tried.add(self.instance_id)
            self._attempts += 1
            instance = self._instances.by_id.get(self.instance_id)
            if instance is None:
                path = self._endpoint.path
                missing = NotFoundError(f"{path} has no instance {self.instance_id}")
                failure = self._give_up(missing)
                continue
            left_s = self._left_s()
            request = Request(
                self.request_id,
                self._endpoint.path,
                instance.id,
                payload,
                None if left_s is None else max(1, int(left_s * 1e3)),
            )
            try:
                plane = runtime.planes.of(instance.transport)
                reply = await self._in_time(plane.ask(instance.transport, request))
            except FailedError as failed:
                failure = self._give_up(failed)
            except (TransportError, DecodeError, KeyError) as broken:
                failure = self._give_up(TransportError(f"instance {instance.id}: {broken}"))
            else:
                self._reply = reply
                self._check_open()
                return

    def _check_open(self) -> None:
        """Raise ClosedError if another task has closed it while this one waited."""
        if self._is_ended:
            self._close_reply()
            raise ClosedError("the stream was closed while it was read")

    def _give_up(self, failed: FailedError | KvflashError) -> KvflashError:
        """Leave an instance that failed; return the error, or raise it if this was the last try."""
        self._check_open()
        limits, is_own = self._endpoint.runtime.limits, False
        if isinstance(failed, FailedError):
            error, is_own = failed.failure.error(), not failed.failure.retry
            if is_own and (self._is_started or not isinstance(error, self._retried)):
                raise error from None
        else:
            error = failed
        # Neither a handler's own error nor a full instance says anything about the next request.
        if not (is_own or isinstance(error, OverloadedError)):
            self._instances.suspect(self.instance_id, limits.suspect_s)
        self._close_reply()
        if self._is_started:
            raise TransportError(
                f"instance {self.instance_id} closed the connection during its answer: {error}"
            ) from error
        self._losses += isinstance(error, TransportError) and error.was_sent
        if self._attempts >= limits.attempts_max or self._losses >= LOSSES_MAX:
            raise error
        # The text may be the worker's own.
        text = "instance %d of %s: %.4096r"
        logger.info(text, self.instance_id, self._endpoint.path, str(error))
        return error

    def _left_s(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    async def _in_time(self, work: Any) -> Any:
        """Wait for work; DeadlineError if it takes longer than the time limit."""
        left_s = self._left_s()
        if left_s is None:
            return await work
        try:
            return await asyncio.wait_for(work, left_s)
        except asyncio.TimeoutError as error:
            raise DeadlineError(f"request {self.request_id}: its timeout expired") from error


def _limit_s(timeout_s: Any) -> float | None:
    """A caller's time limit, None if it is endless; InvalidArgumentError if it is no number."""
    if timeout_s is None:
        return None
    is_number = isinstance(timeout_s, numbers.Real)
    # No float holds the largest integers, and NaN is on neither side.
    if is_number and timeout_s > ENDLESS_S:
        return None
    if is_number and timeout_s <= ENDLESS_S:
        return float(max(timeout_s, 0))
    raise InvalidArgumentError(
        f"timeout_s must be a number of seconds, or None for no limit, got {timeout_s!r}"
    )
