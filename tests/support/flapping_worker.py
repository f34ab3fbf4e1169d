"""A worker process that comes and goes, each time as a new instance that got a request or waited.

Usage: flapping_worker.py NAME TIMES REQUEST_PLANE. Each time it leaves as a worker does at SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

from kvflash import DistributedRuntime, ModelInput, ModelType, Tokenizer, register_llm
from kvflash.errors import ClosedError
from token_worker import TINY_LLAMA

# Nobody need have found it so soon.
STAY_S_MAX = 5.0


async def main(name: str, times: int, plane: str) -> None:
    ids = Tokenizer(TINY_LLAMA).encode(f"{name} says hello to you", add_special_tokens=False)
    served = 0
    for _ in range(times):
        asked = asyncio.Event()

        async def generate(
            _request: dict[str, Any], asked: asyncio.Event = asked
        ) -> AsyncIterator[Any]:
            asked.set()
            for one in ids[:-1]:
                yield {"token_ids": [one], "finish_reason": None}
                await asyncio.sleep(0)
            yield {"token_ids": [ids[-1]], "finish_reason": "length"}

        runtime = DistributedRuntime(request_plane=plane)
        endpoint = runtime.namespace("tests").component("decode").endpoint("generate")
        types = ModelType.Chat | ModelType.Completions
        await register_llm(ModelInput.Tokens, types, endpoint, TINY_LLAMA, "tiny")
        serving = asyncio.create_task(endpoint.serve_endpoint(generate))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asked.wait(), STAY_S_MAX)
        served += asked.is_set()
        await runtime.close()
        # One that took long to begin leaves before it serves.
        with contextlib.suppress(ClosedError):
            await serving
    print(json.dumps({"event": "ready", "served": served}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
