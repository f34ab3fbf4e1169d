"""Your own engine: serves tokens, publishes its cache and its load.

    python examples/worker_with_events.py &
    kvflash frontend --tokenizer FOLDER

Its model repeats the prompt; its cache keeps the last CAPACITY blocks. Frontends and routers find
it through discovery.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

from kvflash import (
    DistributedRuntime,
    KvEventPublisher,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerMetricsPublisher,
    compute_block_hash_for_seq,
    compute_sequence_hashes,
    register_llm,
)

BLOCK = 16
CAPACITY = 64


class Cache:
    """Blocks by name, the longest unused first; every change is published."""

    def __init__(self, publisher: KvEventPublisher) -> None:
        self._publisher = publisher
        self._held: OrderedDict[int, None] = OrderedDict()

    def compute(self, tokens: list[int]) -> int:
        """Hold a prompt's full blocks. Returns how many of its tokens were there already."""
        # Any 64 bits would do as names; these are a function of all tokens before.
        names = [int(n) for n in compute_sequence_hashes(compute_block_hash_for_seq(tokens, BLOCK))]
        known = next((at for at, n in enumerate(names) if n not in self._held), len(names))
        # From the end to the beginning: what goes first is the end of the prompt used last.
        for name in reversed(names):
            self._held[name] = None
            self._held.move_to_end(name)
        if new := names[known:]:
            self._publisher.publish_stored(
                token_ids=tokens[known * BLOCK : len(names) * BLOCK],
                num_block_tokens=[BLOCK] * len(new),
                block_hashes=new,
                parent_hash=names[known - 1] if known else None,
            )
        evicted = [self._held.popitem(last=False)[0] for _ in range(len(self._held) - CAPACITY)]
        if evicted:
            self._publisher.publish_removed(block_hashes=evicted)
        return known * BLOCK


class Load:
    """Blocks of running requests.

    Those that are only cached are not active: they give way to any request. A worker that counts
    them gets no requests any more once its cache is full and routers have a threshold.
    """

    def __init__(self, metrics: WorkerMetricsPublisher) -> None:
        self._metrics = metrics
        self._blocks = 0
        self.add(0)

    def add(self, blocks: int) -> None:
        """So many more blocks are active; below 0: fewer."""
        self._blocks += blocks
        self._metrics.publish(
            dp_rank=0, active_decode_blocks=self._blocks, kv_total_blocks=CAPACITY
        )


async def main() -> None:
    """Serve until SIGTERM."""
    async with DistributedRuntime.detached() as runtime:
        component = runtime.namespace("dynamo").component("backend")
        endpoint = component.endpoint("generate")
        publisher = KvEventPublisher(component, kv_block_size=BLOCK)
        metrics = WorkerMetricsPublisher()
        await metrics.create_endpoint(component)
        cache, load = Cache(publisher), Load(metrics)

        async def generate(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
            prompt = request["token_ids"]
            count = request["stop_conditions"].get("max_tokens") or 16
            blocks = (len(prompt) + count) // BLOCK + 1
            load.add(blocks)
            try:
                cached = cache.compute(prompt)
                for at in range(count):
                    yield {
                        "token_ids": [prompt[at % len(prompt)]],
                        "finish_reason": "length" if at == count - 1 else None,
                        "completion_usage": {
                            "prompt_tokens": len(prompt),
                            "completion_tokens": at + 1,
                            "prompt_tokens_details": {"cached_tokens": cached},
                        },
                    }
            finally:
                load.add(-blocks)

        await register_llm(
            ModelInput.Tokens,
            ModelType.Chat | ModelType.Completions,
            endpoint,
            model_name="parrot",
            kv_cache_block_size=BLOCK,
            runtime_config=ModelRuntimeConfig(total_kv_blocks=CAPACITY),
        )
        try:
            await endpoint.serve_endpoint(generate)
        finally:
            publisher.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
