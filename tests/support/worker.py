"""A worker process for tests: serves `t/workers/run`, and `t/workers/status` about itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

from kvflash import Context, DistributedRuntime, RuntimeLimits


class Worker:
    """Does what a request says, and counts what became of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.began = self.ended = self.stopped = self.cancelled = self.yielded = 0
        self.gate = asyncio.Event()

    async def run(self, request: dict[str, Any], context: Context) -> AsyncIterator[Any]:
        """count: `n` items; wait: one item, then the gate; fail: `n` items, then an error."""
        self.began += 1
        try:
            async for item in getattr(self, request["do"])(request, context):
                self.yielded += 1
                yield item
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.stopped += context.is_stopped()
            self.ended += 1

    async def count(self, request: dict[str, Any], context: Context) -> AsyncIterator[Any]:
        """`n` items of `bytes` bytes, one for each turn of the event loop."""
        for number in range(request["n"]):
            yield {
                "number": number,
                "worker": self.name,
                "id": context.id(),
                "pad": b"x" * request.get("bytes", 0),
            }
            await asyncio.sleep(0)

    async def wait(self, request: dict[str, Any], _context: Context) -> AsyncIterator[Any]:
        """`n` items, then one more when the gate opens."""
        for number in range(request.get("n", 1)):
            yield {"number": number, "worker": self.name}
        await self.gate.wait()
        yield {"number": -1, "worker": self.name}

    async def watch(self, _request: dict[str, Any], context: Context) -> AsyncIterator[Any]:
        """One item; ends by itself when it is stopped."""
        yield {"number": 0}
        await context.async_killed_or_stopped()

    async def fail(self, request: dict[str, Any], _context: Context) -> AsyncIterator[Any]:
        """`n` items, then an error."""
        for number in range(request["n"]):
            yield {"number": number}
        raise ValueError("out of ink")

    async def echo(self, request: dict[str, Any], _context: Context) -> AsyncIterator[Any]:
        """The request."""
        yield request

    async def status(self, request: dict[str, Any]) -> AsyncIterator[Any]:
        """Outcomes of the requests; `open` opens the gate."""
        if request.get("open"):
            self.gate.set()
        names = ("began", "ended", "stopped", "cancelled", "yielded")
        yield {name: getattr(self, name) for name in names}


async def ask(runtime: DistributedRuntime) -> None:
    """Hold a request open that never ends, and serve nothing."""
    client = runtime.namespace("t").component("workers").endpoint("run").client()
    await client.wait_for_instances()
    stream = await client.generate({"do": "wait", "n": 1})
    await anext(stream)
    print(json.dumps({"event": "ready", "instance_id": runtime.instance_id}), flush=True)
    await anext(stream)


async def main() -> None:
    """Serve with the limits of the first argument, JSON."""
    options = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    requests_max = options.pop("requests_max", None)
    runtime = DistributedRuntime(limits=RuntimeLimits(**options))
    worker = Worker(str(runtime.instance_id))
    component = runtime.namespace("t").component("workers")
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, worker.gate.set)
    if "KVFLASH_TEST_ASK" in os.environ:
        await ask(runtime)
    print(json.dumps({"event": "ready", "instance_id": runtime.instance_id}), flush=True)
    await asyncio.gather(
        component.endpoint("run").serve_endpoint(worker.run, max_concurrent_requests=requests_max),
        component.endpoint("status").serve_endpoint(worker.status),
    )
    print(json.dumps({"event": "end"}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
