"""Child processes: started, watched, and stopped in any case."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import IO, Any, TypeVar

from kvflash.errors import KvflashError

__all__ = ["Child", "ChildError", "Children", "together"]

T = TypeVar("T")

READY_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0
TAIL_LINES = 15
# A ready line is short; a longer one goes to the log in pieces.
LINE_BYTES_MAX = 64 * 1024


class ChildError(KvflashError):
    """A process ended or was not ready in time; the message has the tail of its log."""


class Child:
    """``python -m MODULE ARGS``; stdout and stderr go to a log, ready lines also to the caller.

    Attributes:
        name: Its name in messages.
        log: Its log.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        """Take ownership of a process that was just started."""
        self.name = name
        self.log = log
        self._process = process
        self._ready: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._pump = asyncio.create_task(self._read())
        self._end = asyncio.create_task(process.wait())

    async def ready(self, count: int) -> list[dict[str, Any]]:
        """Wait for ready lines.

        Args:
            count: Number of lines.

        Raises:
            ChildError: It ended earlier, or took longer than READY_TIMEOUT_S.
        """
        return await self.within(
            self._take(count), READY_TIMEOUT_S, f"{count} ready lines on its standard output"
        )

    async def within(self, wanted: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
        """Await something that needs this process to run.

        Raises:
            ChildError: It ended earlier, or the time is over.
        """
        work = asyncio.ensure_future(wanted)
        try:
            await asyncio.wait(
                {work, self._end}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if work.done():
                return work.result()
        finally:
            await _cancel(work)
        if self._end.done():
            raise self.death()
        raise ChildError(
            f"{self.name}: waited {timeout_s:g} s for {what}; the end of {self.log}:\n{self.tail()}"
        )

    async def ended(self, timeout_s: float | None = None) -> bool:
        """Wait for its end up to a time limit; returns whether it has ended."""
        await asyncio.wait({self._end}, timeout=timeout_s)
        return self._end.done()

    def death(self) -> ChildError:
        """The error that describes its end."""
        return ChildError(
            f"{self.name} ended with status {self._process.returncode}; "
            f"the end of {self.log}:\n{self.tail()}"
        )

    def tail(self) -> str:
        """The last lines of its log."""
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join(f"  | {line}" for line in lines) or "  | (empty)"

    def kill(self) -> None:
        """End it at once; without effect if it has ended."""
        if self._process.returncode is None:
            self._process.kill()

    async def stop(self) -> None:
        """Send SIGTERM, then SIGKILL after STOP_TIMEOUT_S."""
        if self._process.returncode is None:
            self._process.terminate()
        if not await self.ended(STOP_TIMEOUT_S):
            self.kill()
            await self.ended()
        await self._pump

    async def _take(self, count: int) -> list[dict[str, Any]]:
        return [await self._ready.get() for _ in range(count)]

    async def _read(self) -> None:
        """Copy stdout to the log: a pipe without a reader would stop the process."""
        stdout = self._process.stdout
        assert stdout is not None, "started with a pipe"
        with self.log.open("ab", buffering=0) as log:
            while True:
                try:
                    line = await stdout.readline()
                except ValueError:
                    # Above LINE_BYTES_MAX: the stream has dropped it.
                    continue
                if not line:
                    return
                log.write(line)
                self._offer(line)

    def _offer(self, line: bytes) -> None:
        try:
            said = json.loads(line)
        except ValueError:
            return
        if isinstance(said, dict) and said.get("event") == "ready":
            self._ready.put_nowait(said)


class Children:
    """All processes of the demo: an async context manager that stops all of them."""

    def __init__(self, logs: Path) -> None:
        """Keep logs in an existing folder."""
        self._logs = logs
        self._running: list[Child] = []

    async def start(self, name: str, module: str, *args: str) -> Child:
        """Start ``python -m MODULE ARGS``; its log is ``NAME.log``."""
        log = self._logs / f"{name}.log"
        log.write_bytes(b"")
        # Appending: the process writes its stderr to the file that receives its stdout.
        with log.open("ab") as errors:
            spawning = asyncio.ensure_future(_spawn(module, args, errors))
            try:
                process = await asyncio.shield(spawning)
            except asyncio.CancelledError:
                # It may have started meanwhile, so its owner must know it.
                self._running.append(Child(name, await spawning, log))
                raise
        child = Child(name, process, log)
        self._running.append(child)
        return child

    async def watch(self, wanted: Coroutine[Any, Any, T]) -> T:
        """Await something that needs all of them to run.

        Raises:
            ChildError: One ended.
        """
        work = asyncio.ensure_future(wanted)
        ends = {asyncio.ensure_future(child.ended()): child for child in self._running}
        try:
            await asyncio.wait({work, *ends}, return_when=asyncio.FIRST_COMPLETED)
            # Checked first: without an engine the work fails for a reason that explains less.
            for end, child in ends.items():
                if end.done():
                    raise child.death()
            return await work
        finally:
            await _cancel(work, *ends)

    async def stop(self, *children: Child) -> None:
        """Stop these processes, all at once."""
        await asyncio.gather(*(child.stop() for child in children))
        self._running = [child for child in self._running if child not in children]

    def kill(self) -> None:
        """Kill all at once, after a second signal."""
        for child in self._running:
            child.kill()

    async def __aenter__(self) -> Children:
        """Return itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop all running processes."""
        await self.stop(*self._running)


async def together(*wanted: Coroutine[Any, Any, T]) -> list[T]:
    """Await all in parallel. If one fails, the others have ended before the error is raised."""
    works = [asyncio.ensure_future(one) for one in wanted]
    try:
        return await asyncio.gather(*works)
    finally:
        await _cancel(*works)


async def _spawn(
    module: str, args: tuple[str, ...], errors: IO[bytes]
) -> asyncio.subprocess.Process:
    # Settings for the services of this machine must not change the demo.
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVFLASH_")}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *args,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=env,
        limit=LINE_BYTES_MAX,
        # Ctrl-C in the terminal goes to this process, which stops the others in order.
        start_new_session=True,
    )


async def _cancel(*works: asyncio.Future[Any]) -> None:
    for work in works:
        work.cancel()
    await asyncio.gather(*works, return_exceptions=True)
