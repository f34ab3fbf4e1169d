"""Two runtimes, one that serves and one that asks, and handlers for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from kvflash import Context, DistributedRuntime, RuntimeLimits


class Pair:
    """A runtime that serves `t/pair/run` and one that asks it."""

    def __init__(self, handler: Any, **options: Any) -> None:
        limits = options.pop("limits", RuntimeLimits())
        self.server = DistributedRuntime(limits=limits)
        self.asker = DistributedRuntime(limits=options.pop("asker_limits", limits))
        self._options = options
        self._handler = handler
        self._task: asyncio.Task[None] | None = None
        self.client = self._endpoint(self.asker).client()

    @staticmethod
    def _endpoint(runtime: DistributedRuntime) -> Any:
        return runtime.namespace("t").component("pair").endpoint("run")

    async def __aenter__(self) -> Pair:
        serve = self._endpoint(self.server).serve_endpoint(self._handler, **self._options)
        self._task = asyncio.create_task(serve)
        waiting = asyncio.create_task(self.client.wait_for_instances(30))
        await asyncio.wait({self._task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            waiting.cancel()
            await self._task
        assert await waiting == [self.server.instance_id]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.asker.close()
        await self.server.close()
        if self._task is not None:
            await self._task

    async def ask(self, request: Any, **options: Any) -> list[Any]:
        return [item async for item in await self.client.generate(request, **options)]

    async def is_idle(self) -> bool:
        stats = self.server.stats()
        return stats["t/pair/run"]["running"] == 0


async def count(request: int) -> AsyncIterator[dict[str, int]]:
    for number in range(request):
        yield {"number": number}


class Probe:
    """Handlers that say what happens to them."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.stopped = asyncio.Event()
        self.closed = asyncio.Event()
        self.items = 0

    async def hang(self, request: int, context: Context) -> AsyncIterator[int]:
        """`request` items, then nothing."""
        self.began.set()
        try:
            for number in range(request):
                yield number
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            assert context.is_stopped()
            assert context.is_killed()
            self.cancelled.set()
            raise
        finally:
            self.closed.set()

    async def obey(self, request: int, context: Context) -> AsyncIterator[int]:
        """`request` items, then the end when it is stopped."""
        self.began.set()
        for number in range(request):
            yield number
        assert await context.async_killed_or_stopped()
        assert not context.is_killed()
        self.stopped.set()

    async def flood(self, _request: int) -> AsyncIterator[bytes]:
        """Items without end, as fast as they are taken."""
        self.began.set()
        try:
            while True:
                self.items += 1
                yield b"x" * 10_000
        finally:
            self.closed.set()
