"""The double of an engine, as a process for tests; what it says begins with its NAME.

============================================  =====================================================
``double.py openai NAME ROLE``                speaks OpenAI's API
``double.py tokens NAME ROLE PLANE``          a worker of the runtime: tokens of vectors/tiny-llama;
                                              its lease lives for $LEASE_TTL_S, 10 s without it
``double.py flapping NAME ROLE PLANE TIMES``  the same; comes and goes, each time as a new instance
                                              that got a request or waited, and leaves as at SIGTERM
============================================  =====================================================

ROLE is prefill or decode. A test tells it what to do through files in $HOLD_DIR:

===================  ==============================================================================
``NAME.mute``        while it is there, no first item
``NAME.hold``        while it is there, nothing after the second item; of a prefill, nothing at all
``NAME.drip``        while it is there, half a second before each of the first five items
``NAME.running``     written by the double: how many requests run
===================  ==============================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from aiohttp import web

from kvflash import (
    Context,
    DistributedRuntime,
    ModelInput,
    ModelType,
    RuntimeLimits,
    Tokenizer,
    register_llm,
)
from kvflash.errors import ClosedError

TINY_LLAMA = Path(__file__).parents[1] / "vectors" / "tiny-llama"
MODEL = "tiny"
METRICS = 'vllm:cache_config_info{block_size="16"} 1\n'
LOOK_S = 0.01
DRIP_S = 0.5
DRIPS = 5
# A flapping worker stays no longer than this; no router has to find it that soon.
STAY_S_MAX = 5.0


def words_of(name: str) -> str:
    return f"{name} says hello to you"


def ready(**fields: Any) -> None:
    print(json.dumps({"event": "ready", **fields}), flush=True)


class Gate:
    """The double's side of the files."""

    def __init__(self, name: str, role: str) -> None:
        folder = Path(os.environ["HOLD_DIR"])
        self._mute, self._hold, self._drip = (
            folder / f"{name}.{word}" for word in ("mute", "hold", "drip")
        )
        self._is_prefill = role == "prefill"
        self._count = folder / f"{name}.running"
        self._running = 0

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """A request that runs."""
        self._add(1)
        try:
            yield
        finally:
            self._add(-1)

    async def before(self, item: int, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Wait for what the files say of an item, the first one being 0."""
        if item < DRIPS and self._drip.exists():
            await asyncio.sleep(DRIP_S)
        # Another process decides.
        while self._is_shut(item) and not is_stopped():  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)

    def _is_shut(self, item: int) -> bool:
        if item == 0 and self._mute.exists():
            return True
        return (item == 2 or self._is_prefill) and self._hold.exists()

    def _add(self, count: int) -> None:
        self._running += count
        draft = self._count.with_suffix(".draft")
        draft.write_text(str(self._running))
        draft.rename(self._count)


# -- OpenAI's API


class OpenAi:
    def __init__(self, name: str, role: str) -> None:
        self._words = [f"{word} " for word in words_of(name).split()]
        self._words[-1] = self._words[-1].strip()
        self._role, self._gate = role, Gate(name, role)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/chat/completions", self._generate)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": MODEL, "parent": None, "max_model_len": 4096}
        return web.json_response({"object": "list", "data": [card]})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=METRICS)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        with self._gate.request():
            if not body.get("stream"):
                return await self._whole()
            answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            for at, word in enumerate(self._words):
                await self._gate.before(at)
                if at == 0:
                    await answer.prepare(request)
                finish = "stop" if at == len(self._words) - 1 else None
                choice = {"index": 0, "delta": {"content": word}, "finish_reason": finish}
                event = json.dumps({"object": "chat.completion.chunk", "choices": [choice]})
                await answer.write(f"data: {event}\n\n".encode())
            await answer.write(b"data: [DONE]\n\n")
            return answer

    async def _whole(self) -> web.Response:
        for at in range(len(self._words)):
            await self._gate.before(at)
        message = {"role": "assistant", "content": "".join(self._words)}
        fields: dict[str, Any] = {
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        }
        if self._role == "prefill":
            fields["kv_transfer_params"] = {"remote_port": 9, "do_remote_prefill": True}
        return web.json_response(fields)


async def openai(name: str, role: str) -> None:
    # A client that leaves ends its handler.
    runner = web.AppRunner(OpenAi(name, role).app(), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    ready(url=f"http://127.0.0.1:{runner.addresses[0][1]}")
    await asyncio.Event().wait()


# -- workers of the runtime


class Worker:
    """A worker that answers with tokens."""

    def __init__(self, name: str, role: str, plane: str) -> None:
        limits = RuntimeLimits(lease_ttl_s=float(os.environ.get("LEASE_TTL_S", "10")))
        self.runtime = DistributedRuntime(request_plane=plane, limits=limits)
        component = self.runtime.namespace("tests").component(role)
        self.endpoint = component.endpoint("generate")
        self.asked = asyncio.Event()
        self._name, self._role, self._gate = name, role, Gate(name, role)
        self._ids = Tokenizer(TINY_LLAMA).encode(words_of(name), add_special_tokens=False)

    async def register(self) -> None:
        kinds = ModelType.Chat | ModelType.Completions
        kind = ModelType.Prefill if self._role == "prefill" else kinds
        await register_llm(ModelInput.Tokens, kind, self.endpoint, TINY_LLAMA, MODEL)

    async def generate(self, request: dict[str, Any], context: Context) -> AsyncIterator[Any]:
        self.asked.set()
        count = min(len(self._ids), request["stop_conditions"].get("max_tokens", 100))
        with self._gate.request():
            for at, one in enumerate(self._ids[:count]):
                await self._gate.before(at, context.is_stopped)
                finish = "length" if at == count - 1 else None
                item: dict[str, Any] = {"token_ids": [one], "finish_reason": finish}
                if self._role == "prefill":
                    item["disaggregated_params"] = {"from": self._name}
                if "prefill_result" in request:
                    item["completion_usage"] = {
                        "prompt_tokens_details": {"cached_tokens": len(request["token_ids"])}
                    }
                yield item


async def tokens(name: str, role: str, plane: str) -> None:
    worker = Worker(name, role, plane)
    await worker.register()
    ready(id=worker.runtime.instance_id)
    await worker.endpoint.serve_endpoint(worker.generate)


async def flapping(name: str, role: str, plane: str, times: str) -> None:
    served = 0
    for _ in range(int(times)):
        worker = Worker(name, role, plane)
        await worker.register()
        serving = asyncio.create_task(worker.endpoint.serve_endpoint(worker.generate))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(worker.asked.wait(), STAY_S_MAX)
        served += worker.asked.is_set()
        await worker.runtime.close()
        # One that took long to begin leaves before it serves.
        with contextlib.suppress(ClosedError):
            await serving
    ready(served=served)


KINDS: dict[str, Callable[..., Any]] = {"openai": openai, "tokens": tokens, "flapping": flapping}

if __name__ == "__main__":
    asyncio.run(KINDS[sys.argv[1]](*sys.argv[2:]))
