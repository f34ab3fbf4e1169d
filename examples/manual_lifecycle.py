"""The router chooses and books, the program itself sends the request.

Needs workers at dynamo.backend.generate:

    kvflash mocker --endpoint dynamo.backend.generate --num-workers 2 --block-size 16
"""

import asyncio
import sys

from kvflash import DeadlineError, DistributedRuntime, KvPushRouter

PROMPT = list(range(1, 100))


async def main() -> None:
    """Book, send, say when the first token came and when it ended."""
    async with DistributedRuntime.detached() as runtime:
        endpoint = runtime.endpoint("dynamo.backend.generate")
        client = endpoint.client()
        await client.wait_for_instances(5)
        async with KvPushRouter(endpoint, block_size=16) as router:
            worker, rank, _ = await router.best_worker(PROMPT, request_id="req-1")
            print("booked:", router.totals())
            try:
                request = {
                    "token_ids": PROMPT,
                    "dp_rank": rank,
                    "stop_conditions": {"max_tokens": 20},
                }
                stream = await client.direct(request, worker, request_id="req-1")
                first = await anext(stream)
                await router.mark_prefill_complete("req-1")
                print("prefilled:", router.totals())
                tokens = first["token_ids"] + [
                    t async for item in stream for t in item["token_ids"]
                ]
            finally:
                await router.free("req-1")
            print(f"freed after {len(tokens)} tokens:", router.totals())


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except DeadlineError as error:
        sys.exit(f"{error}.\n{__doc__}")
