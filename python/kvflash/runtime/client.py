"""The client of an endpoint's instances."""

from __future__ import annotations

import asyncio
import numbers
import random
import secrets
import time
from collections.abc import Callable, Generator
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
from kvflash.runtime.instances import Instance, Instances
from kvflash.runtime.plane import LOSSES_MAX, FailedError, Reply

if TYPE_CHECKING:
    from kvflash.runtime.component import Endpoint

SYNC_TIMEOUT_S = 10.0

# Picks the next instance; those in the set have failed already.
Pick = Callable[[set[int]], Instance]


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
        """
        _check_timeout(timeout_s)
        self._instances.start()

        async def any_instance() -> None:
            while not self._instances.by_id:
                await self._instances.changed()

        try:
            await asyncio.wait_for(any_instance(), timeout_s)
        except asyncio.TimeoutError as error:
            raise DeadlineError(
                f"no instance of {self.endpoint.path} within {timeout_s:g} s"
            ) from error
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

        def pick(without: set[int]) -> Instance:
            return random.choice(self._candidates(without))

        return await self._send(pick, request, request_id, timeout_s)

    #: The same as :meth:`random`.
    generate = random

    async def round_robin(
        self, request: Any, *, request_id: str | None = None, timeout_s: float | None = None
    ) -> Stream:
        """Ask the next instance in the order of their numbers; see :meth:`random`."""

        def pick(without: set[int]) -> Instance:
            found = self._candidates(without)
            self._turn += 1
            return found[self._turn % len(found)]

        return await self._send(pick, request, request_id, timeout_s)

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

        def pick(without: set[int]) -> Instance:
            found = self._instances.by_id.get(instance_id)
            if found is None or without:
                raise NotFoundError(f"{self.endpoint.path} has no instance {instance_id}")
            return found

        return await self._send(pick, request, request_id, timeout_s)

    def _candidates(self, without: set[int]) -> list[Instance]:
        found = self._instances.candidates(without=without)
        if not found:
            raise NoWorkerError(f"{self.endpoint.path} has no instance")
        return found

    async def _send(
        self, pick: Pick, payload: Any, request_id: str | None, timeout_s: float | None
    ) -> Stream:
        _check_timeout(timeout_s)
        await self._instances.synced(SYNC_TIMEOUT_S)
        stream = Stream(self, pick, payload, request_id or secrets.token_hex(16), timeout_s)
        await stream._open(None)
        return stream


class Stream:
    """The items of one answer, as an async iterator that raises the answer's errors.

    It closes at its end, on :meth:`aclose`, when its reader is cancelled, and when it is
    garbage-collected. If the handler still runs, it is notified.

    Attributes:
        request_id: The request's name.
        instance_id: The instance that answers.
    """

    def __init__(
        self, client: Client, pick: Pick, payload: Any, request_id: str, timeout_s: float | None
    ) -> None:
        self.request_id = request_id
        self.instance_id = 0
        self._endpoint, self._instances = client.endpoint, client._instances
        self._pick, self._payload = pick, payload
        self._end = None if timeout_s is None else time.monotonic() + timeout_s
        self._tried: set[int] = set()
        self._losses = 0
        self._reply: Reply | None = None
        self._is_started = False
        self._is_ended = False
        self._is_cancelled = False
        self._loop = asyncio.get_running_loop()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        if self._is_ended:
            if self._is_cancelled:
                raise ClosedError("the stream was closed when reading it was cancelled")
            raise StopAsyncIteration
        try:
            item = await self._receive()
        except BaseException as error:
            self._is_cancelled = isinstance(error, asyncio.CancelledError)
            self._close()
            raise
        if item is None:
            self._close()
            raise StopAsyncIteration
        return item[0]

    async def __aenter__(self) -> Stream:
        return self

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
        self._payload = None
        self._close_reply()

    def _close_reply(self) -> None:
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.close()

    async def _receive(self) -> tuple[Any] | None:
        """The next item in a tuple, or None at the end."""
        while True:
            assert self._reply is not None
            try:
                packed = await self._in_time(self._reply.receive())
            except FailedError as failed:
                if not failed.failure.retry:
                    raise failed.failure.error() from None
                await self._open(failed.failure.error())
            except TransportError as error:
                await self._open(error)
            else:
                if packed is None:
                    return None
                # The request is resent only before the first item, so drop it now.
                self._is_started, self._payload = True, None
                return (unpack(packed),)

    async def _open(self, error: KvflashError | None) -> None:
        """Send the request to an untried instance; raises if none is left."""
        runtime = self._endpoint.runtime
        limits = runtime.limits
        while True:
            if error is not None:
                if not isinstance(error, OverloadedError):
                    # A full instance may have room a moment later.
                    self._instances.suspect(self.instance_id, limits.suspect_s)
                self._close_reply()
                if self._is_started:
                    raise TransportError(
                        f"instance {self.instance_id} closed the connection during its answer: "
                        f"{error}"
                    ) from error
                self._losses += isinstance(error, TransportError) and error.was_sent
                if len(self._tried) >= limits.attempts_max or self._losses >= LOSSES_MAX:
                    raise error
            try:
                instance = self._pick(self._tried)
            except (NoWorkerError, NotFoundError):
                if error is None:
                    raise
                raise error from None
            self._tried.add(instance.id)
            self.instance_id = instance.id
            left_s = self._left_s()
            request = Request(
                self.request_id,
                self._endpoint.path,
                instance.id,
                self._payload,
                None if left_s is None else max(1, int(left_s * 1e3)),
            )
            try:
                plane = runtime.planes.of(instance.transport)
                self._reply = await self._in_time(plane.ask(instance.transport, request))
                return
            except FailedError as failed:
                error = failed.failure.error()
                if not failed.failure.retry:
                    raise error from None
            except (TransportError, DecodeError, KeyError) as broken:
                error = TransportError(f"instance {instance.id}: {broken}")

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


def _check_timeout(timeout_s: Any) -> None:
    if timeout_s is not None and not isinstance(timeout_s, numbers.Real):
        raise InvalidArgumentError(
            f"timeout_s must be a number of seconds, or None for no limit, got {timeout_s!r}"
        )
