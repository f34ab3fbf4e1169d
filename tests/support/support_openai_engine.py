"""An engine that speaks OpenAI's API only, announced in a runtime's discovery."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from kvflash import DistributedRuntime
from kvflash.discovery import MemoryDiscovery
from support_push_router import PATH

USAGE = {
    "prompt_tokens": 16,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 8},
}


def chunk(text: str, tokens: list[int] | None = None, reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": reason}
    return {"choices": [choice if tokens is None else choice | {"token_ids": tokens}]}


WHOLE = [
    chunk("a", [1]),
    chunk("bc", [2]),
    chunk("d", [3], "length"),
    {"choices": [], "usage": USAGE},
]
Script = Callable[[web.StreamResponse], Awaitable[None]]


async def say(response: web.StreamResponse, events: list[dict[str, Any]]) -> None:
    for event in events:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


class Engine:
    """Answers as configured, with events or a refusal; announced like launchers do it."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = WHOLE
        self.refusal: tuple[int, Any] | None = None
        self.script: Script | None = None
        self.asked: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.left = asyncio.Event()

    async def start(self, discovery: MemoryDiscovery) -> None:
        app = web.Application()
        app.add_routes([web.post("/v1/completions", self._answer)])
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.runtime = DistributedRuntime(discovery)
        self.id = self.runtime.instance_id
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        await self.runtime.announce(
            f"v1/instances/{PATH.replace('.', '/')}/{self.id}",
            {"instance_id": self.id, "transport": {"kind": "openai", "url": self.url}},
        )

    async def stop(self) -> None:
        await self.runtime.close()
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(
            (await request.json(), {k.lower(): v for k, v in request.headers.items()})
        )
        if self.refusal is not None:
            status, body = self.refusal
            return web.json_response(body, status=status)
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        try:
            if self.script is not None:
                await self.script(response)
                return response
            await say(response, self.events)
            await response.write(b"data: [DONE]\n\n")
        except asyncio.CancelledError:
            self.left.set()
            raise
        return response
