"""Your own choice of a worker: the one with the least to prefill gives the first token first.

Needs workers at dynamo.backend.generate:

    kvflash mocker --endpoint dynamo.backend.generate --num-workers 2 --block-size 16
"""

import asyncio
import sys

from kvflash import DeadlineError, DistributedRuntime, KvPushRouter

PROMPT = list(range(1, 100))


async def main() -> None:
    """Ask twice; the second time the prompt is cached where the first one went."""
    async with DistributedRuntime.detached() as runtime:
        endpoint = runtime.endpoint("dynamo.backend.generate")
        await endpoint.client().wait_for_instances(5)
        async with KvPushRouter(endpoint, block_size=16) as router:
            for _ in range(2):
                loads = await router.get_potential_loads(PROMPT)
                best = min(loads, key=lambda load: load["potential_prefill_tokens"])
                stream = await router.generate(
                    PROMPT,
                    model="mock-model",
                    stop_conditions={"max_tokens": 20},
                    worker_id=best["worker_id"],
                )
                tokens = [token async for item in stream for token in item["token_ids"]]
                print(
                    f"worker {best['worker_id']} had {best['potential_prefill_tokens']} tokens "
                    f"to prefill and generated {len(tokens)}"
                )
                await cached_anywhere(router)


async def cached_anywhere(router: KvPushRouter) -> None:
    """Wait until the worker's events have told that it holds the prompt."""
    overlaps = [0]
    while not any(overlaps):
        await asyncio.sleep(0.01)
        overlaps = [load["overlap_blocks"] for load in await router.get_potential_loads(PROMPT)]


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except DeadlineError as error:
        sys.exit(f"{error}.\n{__doc__}")
