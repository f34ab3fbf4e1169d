"""asyncio work in the background, all in one thread with one event loop."""

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

STOP_TIMEOUT_S = 5.0
THREADS_MAX = 32


class _Executor(ThreadPoolExecutor):
    """Threads for work that blocks; cancels what asks for one while the interpreter exits."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            # Python closes executors first, while the background thread is still running. The
            # texts differ between its versions; all of them name the shutdown.
            if "shutdown" in str(error):
                raise asyncio.CancelledError from None
            raise


class _Thread:
    """The background thread of a process: starts with the first work and ends with the last."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._lock = threading.Lock()
        self._users = 0

    def enter(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if not self._users:
                self._loop = asyncio.new_event_loop()
                # Enough threads for work that blocks on servers.
                self._loop.set_default_executor(_Executor(THREADS_MAX))
                self._end = asyncio.Event()
                self._running = threading.Thread(
                    target=self._run, name="kvflash-background", daemon=True
                )
                self._running.start()
            self._users += 1
            return self._loop

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._loop.call_soon_threadsafe(self._end.set)
                if threading.current_thread() is not self._running:
                    self._running.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        with contextlib.closing(self._loop) as loop:
            loop.run_until_complete(_until(self._end))


async def _until(end: asyncio.Event) -> None:
    """Run the loop until ``end``, then finish as `asyncio.run` does, leaving no tasks behind."""
    await end.wait()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()


_THREAD = _Thread()
# A forked child has no thread of its parent: it starts its own.
os.register_at_fork(after_in_child=_THREAD.forget)


async def cancel(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel tasks, and wait for their ends."""
    left = set(tasks)
    while left:
        # Before Python 3.12 asyncio.wait_for may swallow a cancellation.
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=0.5)


class Background:
    """A coroutine in this process's background loop, from its start to its stop.

    If ``is_cancelled``, the stop cancels the coroutine and waits for 5 s at most. Otherwise the
    coroutine ends by itself once ``ending`` is set, and the stop waits as long as that takes.
    ``ending``, like everything that waits for it, belongs to the loop.
    """

    def __init__(
        self, name: str, work: Callable[[], Coroutine[Any, Any, None]], *, is_cancelled: bool = True
    ) -> None:
        self._name, self._work, self._is_cancelled = name, work, is_cancelled
        self.ending = asyncio.Event()
        self._is_ready: Future[None] = Future()
        self._is_awaited = False
        self._loop: asyncio.AbstractEventLoop
        self._done: Future[None] | None = None

    def start(self) -> None:
        """Start; returns at once. If the work fails, the log says so."""
        self._loop = _THREAD.enter()
        self._done = asyncio.run_coroutine_threadsafe(self._run(), self._loop)

    def ready(self) -> None:
        """Called by the work to make :meth:`start_and_wait` return."""
        self._is_ready.set_result(None)

    def start_and_wait(self) -> None:
        """Start, and wait until the work calls :meth:`ready`; if it fails before, raise why."""
        self._is_awaited = True
        Background.start(self)
        try:
            self._is_ready.result()
        except BaseException:
            self.stop()
            raise

    async def run_until_ending(self, works: Iterable[Coroutine[Any, Any, None]]) -> None:
        """Called by the work: it is ready, and runs these until the stop, or one of them fails."""
        tasks = {asyncio.ensure_future(one) for one in (*works, self._ending())}
        self.ready()
        done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await cancel(left)
        for task in done:
            task.result()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run another coroutine in its loop, from another thread; returns the result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def call_soon(self, call: Callable[[], object]) -> None:
        """Schedule a call in its loop, from any thread."""
        self._loop.call_soon_threadsafe(call)

    def stop_soon(self) -> None:
        """Begin to stop it, and return at once; :meth:`stop` is still to be called."""
        if self._done is not None:
            self._loop.call_soon_threadsafe(self.ending.set)

    def stop(self) -> None:
        """Stop it; blocks until done. Without effect before the start and after the end."""
        if (done := self._done) is None:
            return
        self.stop_soon()
        self._done = None
        wait([done], STOP_TIMEOUT_S if self._is_cancelled else None)
        _THREAD.leave()

    async def _ending(self) -> None:
        await self.ending.wait()

    async def _run(self) -> None:
        work = asyncio.ensure_future(self._work())
        ending = asyncio.ensure_future(self._ending())
        try:
            if self._is_cancelled:
                await asyncio.wait({work, ending}, return_when=asyncio.FIRST_COMPLETED)
                work.cancel()
            await work
        except asyncio.CancelledError:
            logger.debug("%s was stopped", self._name)
        except BaseException as error:
            if self._is_awaited and not self._is_ready.done():
                self._is_ready.set_exception(error)
            else:
                logger.exception("%s failed", self._name)
        finally:
            ending.cancel()
            self._is_ready.cancel()
