"""A prefill and a decode worker behind the frontend: start it twice, once for each role.

    python examples/disaggregated_pair.py prefill &
    python examples/disaggregated_pair.py decode &
    kvflash frontend --tokenizer FOLDER

The frontend sends each prompt to the prefill worker first, and passes its
``disaggregated_params`` to the decode worker: here a number, with a real engine the place of the
computed blocks.
"""

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator
from typing import Any

from kvflash import DistributedRuntime, ModelInput, ModelType, register_llm

_transfers = itertools.count(1)


async def prefill(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Compute the prompt, say where it can be fetched."""
    yield {
        "token_ids": [request["token_ids"][-1]],
        "finish_reason": "length",
        "disaggregated_params": {"transfer": next(_transfers)},
    }


async def decode(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Fetch the prompt, or compute it when nobody did, and go on."""
    handed = (request.get("prefill_result") or {}).get("disaggregated_params")
    print(f"prompt of {len(request['token_ids'])} tokens, handed over: {handed}", flush=True)
    count = request["stop_conditions"].get("max_tokens") or 16
    for at in range(count):
        yield {
            "token_ids": [request["token_ids"][at % len(request["token_ids"])]],
            "finish_reason": "length" if at == count - 1 else None,
        }


async def main(role: str) -> None:
    """Serve in one role until SIGTERM."""
    is_prefill = role == "prefill"
    async with DistributedRuntime.detached() as runtime:
        endpoint = runtime.namespace("dynamo").component(role).endpoint("generate")
        await register_llm(
            model_input=ModelInput.Tokens,
            model_type=ModelType.Prefill if is_prefill else ModelType.Chat | ModelType.Completions,
            endpoint=endpoint,
            model_name="pair",
        )
        await endpoint.serve_endpoint(prefill if is_prefill else decode)


if __name__ == "__main__":
    if sys.argv[1:] not in (["prefill"], ["decode"]):
        sys.exit(f"usage: disaggregated_pair.py prefill|decode\n\n{__doc__}")
    asyncio.run(main(sys.argv[1]))
