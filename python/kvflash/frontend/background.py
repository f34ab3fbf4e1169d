"""Work of asyncio beside the frontend's core, in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

__all__ = ["Background"]

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0


class Background:
    """A coroutine that runs in a thread and a loop of its own until it is stopped.

    Args:
        name: Of the thread.
        work: Makes the coroutine; it is cancelled at the stop, and cleans up after itself.
    """

    def __init__(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._work = work
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End it; blocks until it has, for 5 s at most."""
        self._stopping.set()
        loop, task = self._loop, self._task
        if loop is not None and task is not None:
            # It may have ended by itself meanwhile.
            try:
                loop.call_soon_threadsafe(task.cancel)
            except RuntimeError:
                logger.debug("%s had ended", self._thread.name)
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._work())
        if self._stopping.is_set():
            self._task.cancel()
        try:
            await self._task
        except asyncio.CancelledError:
            logger.debug("%s was stopped", self._thread.name)
