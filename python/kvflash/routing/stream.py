"""A request on its way to a worker, and its answer on the way back."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from kvflash._core import RouterBooking
from kvflash.errors import (
    DrainingError,
    NotFoundError,
    NoWorkerError,
    OverloadedError,
    TransportError,
)
from kvflash.routing.line import WaitingLine
from kvflash.runtime import Client, Stream

# No prompt or answer has more.
TOKENS_MAX = 2**32 - 1

# Errors of a handler before its first item, after which another worker may succeed.
RETRIED = (TransportError, NotFoundError, OverloadedError, DrainingError)


class Sender:
    """Chooses a worker for a request, books the request there and sends it.

    A request that fails before its first item is sent to another worker, unless it was pinned; for
    the limits see :class:`kvflash.runtime.Client`. After the first item it is never sent again.
    """

    def __init__(
        self, line: WaitingLine, client: Client, worker_ids: Callable[[], Collection[int]]
    ) -> None:
        self.line, self.client, self.worker_ids = line, client, worker_ids

    async def send(
        self, request: Mapping[str, Any], options: dict[str, Any], name: str
    ) -> RoutedStream:
        """Send a request and return its answer.

        The worker receives ``request``, and its rank and the expected overlap; ``options`` are
        those of ``RouterCore``; ``name`` is for the worker and the journal. Raises the errors of
        :meth:`WaitingLine.book`, and TransportError if no worker that was tried can be reached.
        """
        booker = _Booker(self, options, name)
        # Only the client has the request, and drops it with the first item.
        pick = partial(booker.next, request)
        try:
            stream = await self.client.send(pick, request_id=name, retried=RETRIED)
        except BaseException:
            booker.free()
            raise
        return RoutedStream(booker, stream)


class _Booker:
    """Books one request at a worker, and at the next one if that fails."""

    def __init__(self, sender: Sender, options: dict[str, Any], name: str) -> None:
        self._sender, self._options, self._name = sender, options, name
        self._is_pinned = options.get("worker_id") is not None
        #: The latest one.
        self.booking: RouterBooking | None = None

    async def next(self, request: Mapping[str, Any], tried: set[int]) -> tuple[int, Any]:
        """Book at an untried worker; return its number and what to send there."""
        self.free()
        booking = self.booking = await self._book(request["token_ids"], tried)
        return booking.worker_id, {
            **request,
            "dp_rank": booking.dp_rank,
            "estimated_prefix_hit_num_blocks": booking.overlap_blocks,
        }

    def free(self) -> None:
        if self.booking is not None:
            self.booking.free()

    async def _book(self, token_ids: Sequence[int], tried: set[int]) -> RouterBooking:
        """Book at an untried worker; at a suspect only if no other may take the request.

        A failed worker has freed its load and would otherwise look the cheapest.
        """
        if self._is_pinned and tried:
            raise NoWorkerError("the request was pinned to a worker that failed")
        book = partial(self._sender.line.book, token_ids, request_id=self._name)
        options, suspects = self._options, self._sender.client.suspects()
        if self._is_pinned or not (tried or suspects):
            return await book(options)
        allowed = options.get("allowed_worker_ids")
        ids = self._sender.worker_ids() if allowed is None else allowed
        try:
            left = [i for i in ids if i not in tried]
        except TypeError:
            # Not a list of numbers: the core refuses it, and says so.
            return await book(options)
        best = [i for i in left if i not in suspects]
        if best and best != left:
            # The others may be draining.
            with contextlib.suppress(NoWorkerError):
                return await book(options | {"allowed_worker_ids": best})
        return await book(options | {"allowed_worker_ids": left})


class RoutedStream(AsyncIterator[Any], contextlib.AbstractAsyncContextManager["RoutedStream"]):
    """The items of one answer, as an async iterator that raises the answer's errors.

    Its load is freed at the end of the answer: after the last item, an error, :meth:`aclose`, a
    cancelled reader, or when the stream is garbage-collected. A request that fails before its first
    item is sent to another worker, unless it was pinned.
    """

    def __init__(self, booker: _Booker, stream: Stream) -> None:
        self._booker, self._stream = booker, stream
        self._is_ended = False
        self._is_prefilled = False
        self._generated = 0

    @property
    def _booking(self) -> RouterBooking:
        assert self._booker.booking is not None
        return self._booker.booking

    @property
    def worker_id(self) -> int:
        """The worker that answers."""
        return self._booking.worker_id

    @property
    def dp_rank(self) -> int:
        """The rank of the worker that answers."""
        return self._booking.dp_rank

    @property
    def overlap_blocks(self) -> int:
        """Leading blocks of the prompt that the worker held."""
        return self._booking.overlap_blocks

    async def __anext__(self) -> Any:
        if self._is_ended:
            raise StopAsyncIteration
        try:
            item = await anext(self._stream)
            self._note(item)
        except StopAsyncIteration:
            self._end(is_complete=True)
            raise
        except BaseException:
            await self.aclose()
            raise
        return item

    def _note(self, item: Any) -> None:
        self._booking.touch()
        if not isinstance(item, dict):
            return
        tokens = item.get("token_ids")
        if (tokens or item.get("text")) and not self._is_prefilled:
            # Some engines report no tokens.
            self._is_prefilled = True
            self._booking.first_token()
        if tokens:
            self._generated += len(tokens)
        usage = item.get("completion_usage")
        if isinstance(usage, dict):
            details = usage.get("prompt_tokens_details")
            cached = _count(details.get("cached_tokens") if isinstance(details, dict) else None)
            if cached is not None:
                self._booking.cached(cached)
                self._booking.used(cached_tokens=cached)
            self._generated = max(self._generated, _count(usage.get("completion_tokens")) or 0)
            if (prompt := _count(usage.get("prompt_tokens"))) is not None:
                self._booking.used(input_tokens=prompt)
        self._booking.generated(self._generated)

    def _end(self, *, is_complete: bool) -> None:
        self._is_ended = True
        self._booking.used(output_tokens=self._generated)
        self._booking.free(is_complete=is_complete)

    async def aclose(self) -> None:
        """Close it: the worker is notified, the load is freed."""
        self._end(is_complete=False)
        await self._stream.aclose()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _count(value: object) -> int | None:
    """A worker's count of tokens, limited to what is plausible; None for anything else."""
    return min(value, TOKENS_MAX) if isinstance(value, int) and value >= 0 else None
