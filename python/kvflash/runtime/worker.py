"""A decorator for a worker's main function."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from kvflash.runtime.distributed import DistributedRuntime

T = TypeVar("T")


def kvflash_worker(
    open_runtime: Callable[[], DistributedRuntime] = DistributedRuntime.detached,
) -> Callable[[Callable[..., Awaitable[T]]], Callable[..., Awaitable[T]]]:
    """Pass a coroutine function a runtime as its first argument, and close it afterwards.

    ::

        @kvflash_worker()
        async def worker(runtime): ...

        asyncio.run(worker())

    Args:
        open_runtime: Creates the runtime.
    """

    def wrap(function: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
        @functools.wraps(function)
        async def run(*args: Any, **options: Any) -> T:
            async with open_runtime() as runtime:
                return await function(runtime, *args, **options)

        return run

    return wrap
