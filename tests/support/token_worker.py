"""A worker process of the runtime for tests: it answers with tokens of tests/vectors/tiny-llama.

Usage: token_worker.py NAME prefill|decode REQUEST_PLANE. What it says begins with its NAME, and
its lease lives for $LEASE_TTL_S, 10 s where that is not set.
See support_gate.py for what holds its answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from kvflash import (
    Context,
    DistributedRuntime,
    ModelInput,
    ModelType,
    RuntimeLimits,
    Tokenizer,
    register_llm,
)
from support_gate import Gate

TINY_LLAMA = Path(__file__).parents[1] / "vectors" / "tiny-llama"


async def main(name: str, role: str, plane: str) -> None:
    limits = RuntimeLimits(lease_ttl_s=float(os.environ.get("LEASE_TTL_S", "10")))
    runtime = DistributedRuntime(request_plane=plane, limits=limits)
    ids = Tokenizer(TINY_LLAMA).encode(f"{name} says hello to you", add_special_tokens=False)
    gate = Gate(name, role)

    async def generate(request: dict[str, Any], context: Context) -> AsyncIterator[Any]:
        count = min(len(ids), request["stop_conditions"].get("max_tokens", 100))
        with gate.request():
            for at, one in enumerate(ids[:count]):
                await gate.before(at, context.is_stopped)
                finish = "length" if at == count - 1 else None
                item: dict[str, Any] = {"token_ids": [one], "finish_reason": finish}
                if role == "prefill":
                    item["disaggregated_params"] = {"from": name}
                if "prefill_result" in request:
                    item["completion_usage"] = {
                        "prompt_tokens_details": {"cached_tokens": len(request["token_ids"])}
                    }
                yield item

    component = runtime.namespace("tests").component(role)
    endpoint = component.endpoint("generate")
    is_prefill = role == "prefill"
    await register_llm(
        ModelInput.Tokens,
        ModelType.Prefill if is_prefill else ModelType.Chat | ModelType.Completions,
        endpoint,
        TINY_LLAMA,
        "tiny",
    )
    print(json.dumps({"event": "ready", "id": runtime.instance_id}), flush=True)
    await endpoint.serve_endpoint(generate)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
