"""Routes besides answers: models, tokens, health and metrics."""

from __future__ import annotations

import time

from aiohttp import web

from kvflash.mocker import metrics
from kvflash.mocker.config import MockerConfig
from kvflash.mocker.engine import Engine
from kvflash.mocker.protocol import parse_json, parse_model, parse_prompt, parse_token_ids
from kvflash.mocker.refusal import ApiError, refuse
from kvflash.mocker.tokenizer import Tokenizer


class Admin:
    """The handlers of one worker that do not generate."""

    def __init__(self, engine: Engine, config: MockerConfig, tokenizer: Tokenizer) -> None:
        """Store the handlers' dependencies."""
        self._engine = engine
        self._config = config
        self._tokenizer = tokenizer
        self._started_s = int(time.time())

    def routes(self) -> list[web.RouteDef]:
        """The routes that it serves."""
        return [
            web.get("/v1/models", self.models),
            web.get("/health", self.health),
            web.get("/version", self.version),
            web.get("/metrics", self.metrics),
            web.post("/tokenize", self.tokenize),
            web.post("/detokenize", self.detokenize),
            web.post("/reset_prefix_cache", self.reset_prefix_cache),
        ]

    async def models(self, _request: web.Request) -> web.Response:
        """GET /v1/models: the model, then its adapters."""
        base = self._config.model_name
        cards = [
            {
                "id": name,
                "object": "model",
                "created": self._started_s,
                "owned_by": "kvflash",
                "root": name,
                "parent": None if name == base else base,
                "max_model_len": self._config.model_len,
            }
            for name in (base, *self._config.lora_adapters)
        ]
        return web.json_response({"object": "list", "data": cards})

    async def health(self, _request: web.Request) -> web.Response:
        """GET /health: 200 with an empty body, 503 once the engine has stopped."""
        return web.Response(status=200 if self._engine.is_alive else 503)

    async def version(self, _request: web.Request) -> web.Response:
        """GET /version: the version of the kvflash package."""
        # Here, because it is slow to load, and few ask for it.
        from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415

        try:
            text = version("kvflash")
        except PackageNotFoundError:
            # Run from a source tree.
            text = "unknown"
        return web.json_response({"version": text})

    async def metrics(self, _request: web.Request) -> web.Response:
        """GET /metrics: Prometheus text."""
        text = metrics.render(self._engine.scheduler, self._config)
        return web.Response(body=text.encode(), headers={"Content-Type": metrics.CONTENT_TYPE})

    async def tokenize(self, request: web.Request) -> web.Response:
        """POST /tokenize: {model, prompt} or {model, messages} to token ids."""
        body = parse_json(await request.read())
        parse_model(body, self._config)
        token_ids = parse_prompt(body, is_chat="messages" in body, tokenizer=self._tokenizer)
        return web.json_response(
            {
                "count": len(token_ids),
                "max_model_len": self._config.model_len,
                "tokens": token_ids,
            }
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        """POST /detokenize: {model, tokens} to text."""
        body = parse_json(await request.read())
        parse_model(body, self._config)
        token_ids = parse_token_ids(body.get("tokens"), "tokens")
        try:
            return web.json_response({"prompt": self._tokenizer.decode(token_ids)})
        except (ValueError, OverflowError) as error:
            refuse(f"tokens cannot be decoded: {error}", "tokens")

    async def reset_prefix_cache(self, _request: web.Request) -> web.Response:
        """POST /reset_prefix_cache: 200, or 409 with nothing changed while a request runs."""
        if not self._engine.reset_prefix_cache():
            raise ApiError(409, "ConflictError", "a running request holds blocks; try again")
        return web.Response(status=200)
