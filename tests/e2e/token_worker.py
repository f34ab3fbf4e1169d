"""A worker process of the runtime for tests: it answers with tokens of tests/vectors/tiny-llama.

Usage: token_worker.py NAME prefill|decode REQUEST_PLANE. What it says begins with its NAME.
A file named `NAME.hold` in $HOLD_DIR holds its answers after their second item while it is there.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from kvflash import Context, DistributedRuntime, ModelInput, ModelType, Tokenizer, register_llm

TINY_LLAMA = Path(__file__).parents[1] / "vectors" / "tiny-llama"


async def main(name: str, role: str, plane: str) -> None:
    runtime = DistributedRuntime(request_plane=plane)
    ids = Tokenizer(TINY_LLAMA).encode(f"{name} says hello to you", add_special_tokens=False)
    hold = Path(os.environ["HOLD_DIR"]) / f"{name}.hold"

    async def generate(request: dict[str, Any], context: Context) -> AsyncIterator[Any]:
        count = min(len(ids), request["stop_conditions"].get("max_tokens", 100))
        for at, one in enumerate(ids[:count]):
            # Another process decides.
            while (  # noqa: ASYNC110
                (at == 2 or role == "prefill") and hold.exists() and not context.is_stopped()
            ):
                await asyncio.sleep(0.01)
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
