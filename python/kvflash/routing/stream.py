"""A request on its way to a worker, and its answer on the way back."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from kvflash._core import RouterBooking
from kvflash.errors import (
    DrainingError,
    KvflashError,
    NotFoundError,
    NoWorkerError,
    OverloadedError,
    TransportError,
)
from kvflash.routing.line import WaitingLine
from kvflash.runtime import Client, Stream
from kvflash.runtime.plane import LOSSES_MAX

logger = logging.getLogger(__name__)

ATTEMPTS_MAX = 5
# No prompt or answer has more.
TOKENS_MAX = 2**32 - 1

# Nothing has arrived yet, so another worker may succeed.
RETRIED = (TransportError, NotFoundError, OverloadedError, DrainingError)


class Sender:
    """Chooses a worker for a request, books the request there and sends it.

    A request that fails before its first item is sent to another worker, unless it was pinned; at
    most ATTEMPTS_MAX workers are tried, and none after LOSSES_MAX have hung up on it: it may be
    what ends them. After the first item it is never sent again.
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
        attempt = _Attempt(self, request, options, name)
        booking, stream = await attempt.next()
        return RoutedStream(attempt, booking, stream)


class _Attempt:
    """One request on its way from worker to worker."""

    def __init__(
        self, sender: Sender, request: Mapping[str, Any], options: dict[str, Any], name: str
    ) -> None:
        self._sender, self._request, self._options, self._name = sender, request, options, name
        self._left = 1 if options.get("worker_id") is not None else ATTEMPTS_MAX
        self._tried: set[int] = set()
        self._losses = 0

    async def next(self, failed: KvflashError | None = None) -> tuple[RouterBooking, Stream]:
        """Book and send the request at the next worker; raise ``failed`` if no worker is left."""
        while True:
            self._losses += isinstance(failed, TransportError) and failed.was_sent
            if failed is not None and (self._left == 0 or self._losses >= LOSSES_MAX):
                raise failed
            try:
                booking = await self._book()
            except (NoWorkerError, NotFoundError):
                if failed is None:
                    raise
                # No other worker is left, so report the original failure.
                raise failed from None
            self._tried.add(booking.worker_id)
            self._left -= 1
            request = {
                **self._request,
                "dp_rank": booking.dp_rank,
                "estimated_prefix_hit_num_blocks": booking.overlap_blocks,
            }
            try:
                return booking, await self._sender.client.direct(
                    request, booking.worker_id, request_id=self._name
                )
            except RETRIED as error:
                booking.free()
                failed = error
                logger.info("worker %d: %s", booking.worker_id, error)
            except BaseException:
                booking.free()
                raise

    async def _book(self) -> RouterBooking:
        """Book at an untried worker; at a suspect only if no other may take the request.

        A failed worker has freed its load and would otherwise look the cheapest.
        """
        suspects = self._sender.client.suspects()
        if self._options.get("worker_id") is not None or not (self._tried or suspects):
            return await self._book_with(self._options)
        allowed = self._options.get("allowed_worker_ids")
        ids = self._sender.worker_ids() if allowed is None else allowed
        left = [i for i in ids if i not in self._tried]
        best = [i for i in left if i not in suspects]
        if best and best != left:
            # The others may be draining.
            with contextlib.suppress(NoWorkerError):
                return await self._book_with(self._options | {"allowed_worker_ids": best})
        return await self._book_with(self._options | {"allowed_worker_ids": left})

    async def _book_with(self, options: dict[str, Any]) -> RouterBooking:
        return await self._sender.line.book(
            self._request["token_ids"], options, request_id=self._name
        )


class RoutedStream:
    """The items of one answer, as an async iterator that raises the answer's errors.

    Its load is freed at the end of the answer: after the last item, an error, :meth:`aclose`, a
    cancelled reader, or when the stream is garbage-collected. A request that fails before its first
    item is sent to another worker, unless it was pinned.
    """

    def __init__(self, attempt: _Attempt, booking: RouterBooking, stream: Stream) -> None:
        self._attempt, self._booking, self._stream = attempt, booking, stream
        self._is_started = False
        self._is_ended = False
        self._is_prefilled = False
        self._generated = 0

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

    def __aiter__(self) -> RoutedStream:
        return self

    async def __anext__(self) -> Any:
        if self._is_ended:
            raise StopAsyncIteration
        try:
            item = await self._receive()
            self._is_started = True
            self._note(item)
        except StopAsyncIteration:
            self._end(is_complete=True)
            raise
        except BaseException:
            self._end(is_complete=False)
            raise
        return item

    async def _receive(self) -> Any:
        while True:
            try:
                return await self._stream.__anext__()
            except RETRIED as failed:
                if self._is_started:
                    raise
                self._booking.free()
                self._booking, self._stream = await self._attempt.next(failed)

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

    async def __aenter__(self) -> RoutedStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _count(value: object) -> int | None:
    """A worker's count of tokens, limited to what is plausible; None for anything else."""
    return min(value, TOKENS_MAX) if isinstance(value, int) and value >= 0 else None
