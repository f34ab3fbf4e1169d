"""The double of an engine, as a process for tests; what it says begins with its NAME.

============================================  =====================================================
``double.py openai NAME ROLE``                speaks OpenAI's API
``double.py tokens NAME ROLE PLANE``          a worker of the runtime: tokens of vectors/tiny-llama;
                                              its lease lives for $LEASE_TTL_S, 10 s without it
``double.py flapping NAME ROLE PLANE TIMES``  the same; comes and goes, each time as a new instance
                                              that got a request or waited, and leaves as at SIGTERM
============================================  =====================================================

ROLE is prefill or decode. A test tells it what to do through files in $HOLD_DIR:

===================  ==============================================================================
``NAME.mute``        while it is there, no first item
``NAME.hold``        while it is there, nothing after the second item; of a prefill, nothing at all
``NAME.drip``        while it is there, half a second before each of the first five items
``NAME.running``     written by the double: how many requests run
===================  ==============================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

from double_gate import MODEL, Gate, ready, words_of
from kvflash import (
    Context,
    DistributedRuntime,
    ModelInput,
    ModelType,
    RuntimeLimits,
    register_llm,
)
from kvflash.errors import ClosedError
from tiny_llama import TINY_LLAMA, TOKENIZER

# A flapping worker stays no longer than this; no router has to find it that soon.
STAY_S_MAX = 5.0


class Worker:
    """A worker that answers with tokens."""

    def __init__(self, name: str, role: str, plane: str) -> None:
        limits = RuntimeLimits(lease_ttl_s=float(os.environ.get("LEASE_TTL_S", "10")))
        self.runtime = DistributedRuntime(request_plane=plane, limits=limits)
        component = self.runtime.namespace("tests").component(role)
        self.endpoint = component.endpoint("generate")
        self.asked = asyncio.Event()
        self._name, self._role, self._gate = name, role, Gate(name, role)
        self._ids = TOKENIZER.encode(words_of(name), add_special_tokens=False)

    async def register(self) -> None:
        kinds = ModelType.Chat | ModelType.Completions
        kind = ModelType.Prefill if self._role == "prefill" else kinds
        await register_llm(ModelInput.Tokens, kind, self.endpoint, TINY_LLAMA, MODEL)

    async def generate(self, request: dict[str, Any], context: Context) -> AsyncIterator[Any]:
        self.asked.set()
        count = min(len(self._ids), request["stop_conditions"].get("max_tokens", 100))
        with self._gate.request():
            for at, one in enumerate(self._ids[:count]):
                await self._gate.before(at, context.is_stopped)
                finish = "length" if at == count - 1 else None
                item: dict[str, Any] = {"token_ids": [one], "finish_reason": finish}
                if self._role == "prefill":
                    item["disaggregated_params"] = {"from": self._name}
                if "prefill_result" in request:
                    item["completion_usage"] = {
                        "prompt_tokens_details": {"cached_tokens": len(request["token_ids"])}
                    }
                yield item


async def tokens(name: str, role: str, plane: str) -> None:
    worker = Worker(name, role, plane)
    await worker.register()
    ready(id=worker.runtime.instance_id)
    await worker.endpoint.serve_endpoint(worker.generate)


async def flapping(name: str, role: str, plane: str, times: str) -> None:
    served = 0
    for _ in range(int(times)):
        worker = Worker(name, role, plane)
        await worker.register()
        serving = asyncio.create_task(worker.endpoint.serve_endpoint(worker.generate))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(worker.asked.wait(), STAY_S_MAX)
        served += worker.asked.is_set()
        await worker.runtime.close()
        # One that took long to begin leaves before it serves.
        with contextlib.suppress(ClosedError):
            await serving
    ready(served=served)


async def openai(name: str, role: str) -> None:
    # Here, because doubles that make tokens need not wait for a web server.
    from double_openai import serve  # noqa: PLC0415

    await serve(name, role)


KINDS: dict[str, Callable[..., Any]] = {"openai": openai, "tokens": tokens, "flapping": flapping}

if __name__ == "__main__":
    asyncio.run(KINDS[sys.argv[1]](*sys.argv[2:]))
