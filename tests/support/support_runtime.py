"""Event loops and worker processes for the contract tests."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from kvflash import Client, DistributedRuntime
from service import DEADLINE_S, Process, pause_s

T = TypeVar("T")

WORKER = Path(__file__).with_name("worker.py")


def run(work: Coroutine[Any, Any, T], deadline_s: float = 90.0) -> T:
    """Run a test's coroutine in an event loop of its own."""

    async def limited() -> T:
        return await asyncio.wait_for(work, deadline_s)

    return asyncio.run(limited())


async def eventually(
    check: Callable[[], Awaitable[T]], what: str, deadline_s: float = DEADLINE_S
) -> T:
    """Ask until the answer is true."""
    begin = time.monotonic()
    while True:
        answer = await check()
        if answer:
            return answer
        waited_s = time.monotonic() - begin
        assert waited_s < deadline_s, f"waited {deadline_s:g} s for {what}; last: {answer!r}"
        await asyncio.sleep(pause_s(waited_s))


class WorkerProcess(Process):
    """`worker.py` in a process of its own."""

    def __init__(self, env: dict[str, str], **limits: Any) -> None:
        super().__init__(str(WORKER), json.dumps(limits), env=env)
        self.instance_id = int(self.ready()["instance_id"])

    def send(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def finish(self) -> tuple[int, str, str]:
        """Exit status, what it printed, what it logged."""
        code = self.popen.wait(DEADLINE_S)
        return code, "".join(self.rest()), "".join(self.errors)


def client(runtime: DistributedRuntime, endpoint: str = "run") -> Client:
    return runtime.namespace("t").component("workers").endpoint(endpoint).client()


async def known(runtime: DistributedRuntime, *workers: WorkerProcess) -> Client:
    """A client that knows exactly these workers, at both endpoints."""
    wanted = sorted(worker.instance_id for worker in workers)
    for endpoint in ("status", "run"):
        asked = client(runtime, endpoint)

        async def is_so(asked: Client = asked) -> bool:
            return asked.instance_ids() == wanted

        await eventually(is_so, f"{wanted} at {endpoint}")
    return asked


async def status(runtime: DistributedRuntime, instance_id: int, **request: Any) -> dict[str, int]:
    stream = await client(runtime, "status").direct(request, instance_id)
    items = [item async for item in stream]
    assert len(items) == 1
    return dict(items[0])
