"""A choice of one's own: the worker that has the least to prefill gives the first token first.

Needs workers at dynamo.backend.generate; see README.md beside this file.
"""

import asyncio

from kvflash import DistributedRuntime, KvPushRouter

PROMPT = list(range(1, 100))


async def main() -> None:
    """Ask twice; the second time the prompt is cached where the first one went."""
    async with DistributedRuntime.detached() as runtime:
        endpoint = runtime.endpoint("dynamo.backend.generate")
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
    asyncio.run(main())
