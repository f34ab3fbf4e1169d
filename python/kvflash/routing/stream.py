"""A request on its way to a worker, and its answer on the way back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
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

__all__ = ["RoutedStream", "Sender"]

logger = logging.getLogger(__name__)

ATTEMPTS_MAX = 5

# Nothing has come yet, and another worker may do better.
RETRIED = (TransportError, NotFoundError, OverloadedError, DrainingError)


class Sender:
    """Chooses a worker for a request, books the request there and sends it.

    Before its first item a request that fails goes to another worker, unless it was pinned; at most
    ATTEMPTS_MAX have it. Afterwards never.

    Args:
        line: Books requests.
        client: Reaches the workers.
        worker_ids: Tells who the workers are.
    """

    def __init__(
        self, line: WaitingLine, client: Client, worker_ids: Callable[[], Collection[int]]
    ) -> None:
        self._line, self._client, self._worker_ids = line, client, worker_ids

    async def send(
        self, request: Mapping[str, Any], options: dict[str, Any], name: str
    ) -> RoutedStream:
        """Send a request; its answer.

        Args:
            request: What the worker gets, but for its rank and the overlap that is expected.
            options: What it asks of routing, as ``RouterCore`` takes it.
            name: What its worker and the journal call it.

        Raises:
            NoWorkerError: No worker is there or allowed.
            AllBusyError: All of these are busy, or none had room in time.
            TransportError: None of those that were tried can be reached.
        """
        attempt = _Attempt(self, request, options, name)
        booking, stream = await attempt.next()
        return RoutedStream(attempt, booking, stream)

    async def book(
        self, tokens: Sequence[int], options: dict[str, Any], tried: set[int], name: str
    ) -> RouterBooking:
        """Book a request at a worker that was not tried yet."""
        if options.get("worker_id") is None and (tried or self._client.suspects()):
            allowed = options.get("allowed_worker_ids")
            ids = self._worker_ids() if allowed is None else allowed
            options = options | {"allowed_worker_ids": self._untried(ids, tried)}
        return await self._line.book(tokens, options, request_id=name)

    def _untried(self, ids: Collection[int], tried: set[int]) -> list[int]:
        """Of ``ids``, who may take a request; one that failed just now when nobody else is left.

        Its load went with what it failed, so that it would look the cheapest.
        """
        left, suspects = [i for i in ids if i not in tried], self._client.suspects()
        return [i for i in left if i not in suspects] or left

    async def direct(self, request: dict[str, Any], booking: RouterBooking, name: str) -> Stream:
        """Send a request to the worker where it is booked."""
        request["dp_rank"] = booking.dp_rank
        request["estimated_prefix_hit_num_blocks"] = booking.overlap_blocks
        return await self._client.direct(request, booking.worker_id, request_id=name)


class _Attempt:
    """One request on its way from worker to worker."""

    def __init__(
        self, sender: Sender, request: Mapping[str, Any], options: dict[str, Any], name: str
    ) -> None:
        self._sender, self._request, self._options, self._name = sender, request, options, name
        self._left = 1 if options.get("worker_id") is not None else ATTEMPTS_MAX
        self._tried: set[int] = set()

    async def next(self, failed: KvflashError | None = None) -> tuple[RouterBooking, Stream]:
        """Its booking and answer at the next worker; ``failed`` is how the last one went.

        Raises:
            KvflashError: ``failed`` where nobody is left to be tried.
        """
        while True:
            if failed is not None and self._left == 0:
                raise failed
            try:
                booking = await self._sender.book(
                    self._request["token_ids"], self._options, self._tried, self._name
                )
            except (NoWorkerError, NotFoundError):
                if failed is None:
                    raise
                # There is nobody else: what went wrong is the reason.
                raise failed from None
            self._tried.add(booking.worker_id)
            self._left -= 1
            try:
                return booking, await self._sender.direct({**self._request}, booking, self._name)
            except RETRIED as error:
                booking.free()
                failed = error
                logger.info("worker %d: %s", booking.worker_id, error)
            except BaseException:
                booking.free()
                raise


class RoutedStream:
    """The items of one answer, in an async iterator; what goes wrong is raised from it.

    Its load is freed at its end, however it comes: with the last item, an error, :meth:`aclose`, a
    cancelled reader, or when nobody has the stream any more. A request that fails before its first
    item goes to another worker, unless it was pinned.

    Attributes:
        worker_id: Who answers.
        dp_rank: Which of its ranks.
        overlap_blocks: Leading blocks of the prompt that it held.
    """

    def __init__(self, attempt: _Attempt, booking: RouterBooking, stream: Stream) -> None:
        self._attempt, self._booking, self._stream = attempt, booking, stream
        self._is_started = False
        self._is_ended = False
        self._is_prefilled = False
        self._generated = 0

    @property
    def worker_id(self) -> int:
        """Who answers."""
        return self._booking.worker_id

    @property
    def dp_rank(self) -> int:
        """Which of its ranks."""
        return self._booking.dp_rank

    @property
    def overlap_blocks(self) -> int:
        """Leading blocks of the prompt that it held."""
        return self._booking.overlap_blocks

    def __aiter__(self) -> RoutedStream:
        return self

    async def __anext__(self) -> Any:
        if self._is_ended:
            raise StopAsyncIteration
        try:
            item = await self._receive()
        except StopAsyncIteration:
            self._end(is_complete=True)
            raise
        except BaseException:
            self._end(is_complete=False)
            raise
        self._is_started = True
        self._note(item)
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
            # Some engines tell no tokens.
            self._is_prefilled = True
            self._booking.first_token()
        if tokens:
            self._generated += len(tokens)
        usage = item.get("completion_usage")
        details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        if isinstance(cached, int) and cached >= 0:
            self._booking.cached(cached)
            self._booking.used(cached_tokens=cached)
        generated = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if isinstance(generated, int):
            self._generated = max(self._generated, generated)
        self._booking.generated(self._generated)
        prompt = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if isinstance(prompt, int) and prompt >= 0:
            self._booking.used(input_tokens=prompt)

    def _end(self, *, is_complete: bool) -> None:
        self._is_ended = True
        self._booking.used(output_tokens=self._generated)
        self._booking.free(is_complete=is_complete)

    async def aclose(self) -> None:
        """Close it: the worker is told, the load is freed."""
        self._end(is_complete=False)
        await self._stream.aclose()

    async def __aenter__(self) -> RoutedStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
