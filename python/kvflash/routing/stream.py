"""An answer on its way from the worker that was chosen for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from types import TracebackType
from typing import Any, Protocol

from kvflash._core import RouterBooking
from kvflash.errors import (
    DrainingError,
    NotFoundError,
    NoWorkerError,
    OverloadedError,
    TransportError,
)
from kvflash.runtime import Stream

__all__ = ["RETRIED", "RoutedStream", "untried"]

#: Nothing has come yet, and another worker may do better.
RETRIED = (TransportError, NotFoundError, OverloadedError, DrainingError)


def untried(ids: Collection[int], tried: Collection[int], suspects: Collection[int]) -> list[int]:
    """Of ``ids``, who may take a request; one that failed a moment ago when nobody else is left.

    Its load went with what it failed, so that it would look the cheapest.
    """
    left = [i for i in ids if i not in tried]
    return [i for i in left if i not in suspects] or left


class Attempt(Protocol):
    """Books a worker other than those that were tried, and sends the request there."""

    def __call__(self, tried: set[int]) -> Awaitable[tuple[RouterBooking, Stream]]:
        """The booking and the answer."""


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

    def __init__(
        self,
        attempt: Attempt,
        booking: RouterBooking,
        stream: Stream,
        *,
        tried: set[int],
        attempts_max: int,
        on_tokens: Callable[[RouterBooking, int], None],
    ) -> None:
        self._attempt = attempt
        self._booking = booking
        self._stream = stream
        self._tried = tried
        self._attempts_max = attempts_max
        self._on_tokens = on_tokens
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
                if self._is_started or len(self._tried) >= self._attempts_max:
                    raise
                self._booking.free()
                try:
                    self._booking, self._stream = await self._attempt(self._tried)
                except NoWorkerError:
                    # There is nobody else: what went wrong is the reason.
                    raise failed from None

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
            self._on_tokens(self._booking, len(tokens))
            self._generated += len(tokens)
        usage = item.get("completion_usage")
        details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        if isinstance(cached, int) and cached >= 0:
            self._booking.cached(cached)
            self._booking.used(cached_tokens=cached)
        generated = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if isinstance(generated, int) and generated > self._generated:
            self._on_tokens(self._booking, generated - self._generated)
            self._generated = generated
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

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()
