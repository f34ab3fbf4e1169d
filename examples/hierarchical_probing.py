"""Two groups of workers, each with its router: the prompt goes where more of it is cached.

Probing changes nothing, so any number of groups may be asked. Needs workers in both groups:

    kvflash mocker --endpoint dynamo.east.generate --block-size 16 &
    kvflash mocker --endpoint dynamo.west.generate --block-size 16
"""

import asyncio
import sys

from kvflash import DeadlineError, DistributedRuntime, KvPushRouter

PROMPT = list(range(1, 100))


async def main() -> None:
    """Warm one group, then let both answer how much of the prompt they hold."""
    async with DistributedRuntime.detached() as runtime:
        groups = {
            name: KvPushRouter(runtime.endpoint(f"dynamo.{name}.generate"), block_size=16)
            for name in ("east", "west")
        }
        for router in groups.values():
            await router.endpoint.client().wait_for_instances(5)
        print("warming west with", await generate(groups["west"]))
        overlaps = {"east": 0, "west": 0}
        while not any(overlaps.values()):
            # A moment passes until the worker's events are here.
            await asyncio.sleep(0.01)
            for name, router in groups.items():
                _, _, overlaps[name] = await router.best_worker(PROMPT)
        chosen = max(overlaps, key=lambda name: overlaps[name])
        print(f"{chosen} holds {overlaps[chosen]} blocks and got", await generate(groups[chosen]))
        for router in groups.values():
            await router.aclose()


async def generate(router: KvPushRouter) -> str:
    """Ask one group."""
    stream = await router.generate(PROMPT, "mock-model", stop_conditions={"max_tokens": 4})
    return f"{sum([len(item['token_ids']) async for item in stream])} tokens"


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except DeadlineError as error:
        sys.exit(f"{error}.\n{__doc__}")
