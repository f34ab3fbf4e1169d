"""The router chooses and keeps account, the program itself sends the request.

Needs workers at dynamo.backend.generate; see README.md beside this file.
"""

import asyncio

from kvflash import DistributedRuntime, KvPushRouter

PROMPT = list(range(1, 100))


async def main() -> None:
    """Book, send, say when the first token came and when it ended."""
    async with DistributedRuntime.detached() as runtime:
        endpoint = runtime.endpoint("dynamo.backend.generate")
        client = await endpoint.client()
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
    asyncio.run(main())
