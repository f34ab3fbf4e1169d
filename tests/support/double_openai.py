"""An engine's double that speaks OpenAI's API: see double.py."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from double_gate import MODEL, Gate, ready, words_of

METRICS = 'vllm:cache_config_info{block_size="16"} 1\n'


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


async def serve(name: str, role: str) -> None:
    # A client that leaves ends its handler.
    runner = web.AppRunner(OpenAi(name, role).app(), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    ready(url=f"http://127.0.0.1:{runner.addresses[0][1]}")
    await asyncio.Event().wait()
