"""A stage for KvPushRouter: workers, event sockets and discovery that are real, in one process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any

from kvflash import (
    DistributedRuntime,
    KvPushRouter,
    KvRouterConfig,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    compute_block_hash_for_seq,
    compute_sequence_hashes,
    register_llm,
)
from kvflash.discovery import MemoryDiscovery
from service import DEADLINE_S, Engine, batch, stored

BLOCK = 4
PATH = "dynamo.backend.generate"


def run(work: Coroutine[Any, Any, Any]) -> None:
    asyncio.run(asyncio.wait_for(work, 90))


async def eventually(check: Callable[[], Awaitable[Any]], what: str) -> Any:
    end = time.monotonic() + DEADLINE_S
    while not (answer := await check()):
        assert time.monotonic() < end, f"waited for {what}"
        await asyncio.sleep(0.01)
    return answer


class Worker:
    """Answers with its own number, token by token; publishes the blocks that a test requests."""

    def __init__(self, runtime: DistributedRuntime) -> None:
        self.runtime = runtime
        self.id = runtime.instance_id
        self.engine: Engine | None = None
        self.requests: list[dict[str, Any]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.fails_after = 0
        self.task: asyncio.Task[None] | None = None

    async def handle(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        self.requests.append(request)
        for number in range(request["stop_conditions"].get("max_tokens", 3)):
            if self.failure is not None and number >= self.fails_after:
                raise self.failure
            yield {"token_ids": [number], "finish_reason": None}
            await self.gate.wait()
        yield {
            "token_ids": [],
            "finish_reason": "length",
            "completion_usage": {"prompt_tokens_details": {"cached_tokens": 8}},
        }

    async def start(
        self, *, ranks: int = 1, block_size: int = BLOCK, model: str = "m", **config: Any
    ) -> None:
        endpoint = self.runtime.endpoint(PATH)
        await register_llm(
            ModelInput.Tokens,
            ModelType.Chat,
            endpoint,
            model_name=model,
            kv_cache_block_size=block_size,
            runtime_config=ModelRuntimeConfig(data_parallel_size=ranks, **config),
        )
        self.task = asyncio.get_running_loop().create_task(endpoint.serve_endpoint(self.handle))
        self.engine = Engine(is_shared=True)
        await self.runtime.announce(
            f"v1/events/dynamo/backend/{self.id}/0",
            {
                "kind": "zmq",
                "endpoint": self.engine.endpoint,
                "replay_endpoint": self.engine.replay_endpoint,
                "block_size": block_size,
            },
        )

    def hold(self, tokens: Sequence[int], **extras: Any) -> None:
        assert self.engine is not None
        hashes = compute_sequence_hashes(compute_block_hash_for_seq(list(tokens), BLOCK))
        held = list(tokens)[: len(hashes) * BLOCK]
        event = stored([int(h) for h in hashes], held, block_size=BLOCK, **extras)
        self.engine.publish(batch(event))

    async def stop(self) -> None:
        await self.runtime.close()
        if self.engine is not None:
            self.engine.close()
        if self.task is not None:
            await asyncio.gather(self.task, return_exceptions=True)


class Stage:
    """Workers and routers that share a discovery of their own."""

    def __init__(self) -> None:
        self.discovery = MemoryDiscovery()
        self.workers: dict[int, Worker] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Stage:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        await self.discovery.close()

    def runtime(self) -> DistributedRuntime:
        runtime = DistributedRuntime(self.discovery)
        self._stack.push_async_callback(runtime.close)
        return runtime

    async def worker(self, **settings: Any) -> Worker:
        worker = Worker(self.runtime())
        self._stack.push_async_callback(worker.stop)
        await worker.start(**settings)
        self.workers[worker.id] = worker
        return worker

    async def router(self, count: int, **settings: Any) -> KvPushRouter:
        """A router that knows ``count`` workers and listens to them."""
        router = KvPushRouter(self.runtime().endpoint(PATH), BLOCK, KvRouterConfig(**settings))
        self._stack.push_async_callback(router.aclose)

        async def is_ready() -> bool:
            loads = await router.get_potential_loads([1])
            return len({load["worker_id"] for load in loads}) == count

        await eventually(is_ready, "the workers")
        if router._core.uses_events:
            for worker in self.workers.values():
                assert worker.engine is not None
                await asyncio.to_thread(worker.engine.wait_for_subscriber)
        return router


async def known(
    router: KvPushRouter, tokens: Sequence[int], worker: Worker, blocks: int, **keys: Any
) -> None:
    async def is_known() -> bool:
        loads = await router.get_potential_loads(tokens, **keys)
        return any(
            (load["worker_id"], load["overlap_blocks"]) == (worker.id, blocks) for load in loads
        )

    await eventually(is_known, f"{blocks} blocks of worker {worker.id}")


def is_idle(router: KvPushRouter) -> bool:
    totals = router.totals()
    return (totals["requests"], totals["prefill_tokens"], totals["blocks"]) == (0, 0, 0)


TOKENS = list(range(100, 116))
