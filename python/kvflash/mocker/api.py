"""The OpenAI API, and the parts of vLLM's own API that routers use, over aiohttp."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version

from aiohttp import web

from kvflash.errors import ClosedError, OverloadedError, TransportError
from kvflash.mocker import metrics
from kvflash.mocker.config import MockerConfig
from kvflash.mocker.engine import Engine, Generation
from kvflash.mocker.handover import Handover
from kvflash.mocker.protocol import (
    Answer,
    ApiError,
    Body,
    GenerationParams,
    parse_bootstrap,
    parse_generation,
    parse_json,
    parse_model,
    parse_prompt,
    parse_token_ids,
    refuse,
)
from kvflash.mocker.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# A prompt of a million token ids fits; anything larger is a mistake.
BODY_BYTES_MAX = 32 * 1024 * 1024
RETRY_AFTER_S = 1

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(
    engine: Engine, config: MockerConfig, tokenizer: Tokenizer, handover: Handover
) -> web.Application:
    """Build the HTTP application of one worker.

    Args:
        engine: The engine that answers.
        config: Its options.
        tokenizer: Its tokenizer.
        handover: Its part in disaggregated serving.

    Returns:
        An application; run it with handler cancellation on, so that a client that leaves ends its
        request.
    """
    api = Api(engine, config, tokenizer, handover)
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_errors])
    app.add_routes(
        [
            web.post("/v1/chat/completions", api.chat),
            web.post("/v1/completions", api.completion),
            web.get("/v1/models", api.models),
            web.get("/health", api.health),
            web.get("/version", api.version),
            web.get("/metrics", api.metrics),
            web.post("/tokenize", api.tokenize),
            web.post("/detokenize", api.detokenize),
            web.post("/reset_prefix_cache", api.reset_prefix_cache),
        ]
    )
    return app


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every refusal into an OpenAI error body: the one table of statuses."""
    headers: dict[str, str] = {}
    try:
        return await handler(request)
    except ApiError as error:
        answer = error
    except OverloadedError as error:
        answer = ApiError(429, "TooManyRequestsError", str(error))
        headers["Retry-After"] = str(RETRY_AFTER_S)
    except TransportError as error:
        # SGLang's decode worker answers so when the prefill it waits for fails.
        answer = ApiError(500, "InternalServerError", str(error))
    except ClosedError as error:
        answer = ApiError(503, "ServiceUnavailableError", str(error))
    except web.HTTPRequestEntityTooLarge:
        answer = ApiError(413, "BadRequestError", f"the body is over {BODY_BYTES_MAX} bytes")
    except web.HTTPNotFound:
        answer = ApiError(404, "NotFoundError", f"no route {request.path}")
    except web.HTTPMethodNotAllowed as error:
        answer = ApiError(405, "BadRequestError", f"{request.path} does not take {error.method}")
        headers["Allow"] = error.headers["Allow"]
    return web.json_response(answer.body, status=answer.status, headers=headers)


class Api:
    """The handlers of one worker."""

    def __init__(
        self, engine: Engine, config: MockerConfig, tokenizer: Tokenizer, handover: Handover
    ) -> None:
        """Keep what the handlers need."""
        self._handover = handover
        self._engine = engine
        self._config = config
        self._tokenizer = tokenizer
        self._started_s = int(time.time())

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        return await self._generate(request, is_chat=True)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        return await self._generate(request, is_chat=False)

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

    async def _generate(self, request: web.Request, *, is_chat: bool) -> web.StreamResponse:
        body = parse_json(await request.read())
        # First of all: whatever else is wrong with the request, nobody shall wait for it.
        room = parse_bootstrap(body)
        generation: Generation | None = None
        try:
            params = parse_generation(
                body, is_chat=is_chat, config=self._config, tokenizer=self._tokenizer
            )
            is_transferred = await self._handover.receive(params.transfer, room)
            generation = self._engine.submit(
                params.prompt_ids,
                max_tokens=1 if self._handover.is_prefill else params.max_tokens,
                lora=params.lora,
                cache_salt=params.cache_salt,
                is_streaming=params.is_streaming,
                is_transferred=is_transferred,
            )
            answer = Answer(uuid.uuid4().hex, params.model, is_chat=is_chat)
            if params.is_streaming:
                return await self._stream(request, params, generation, answer)
            token_ids = await generation.take()
            told = token_ids if params.has_token_ids else None
            whole = answer.whole(self._text(token_ids), generation.request, told)
            if params.transfer is not None and params.transfer.get("do_remote_decode"):
                whole["kv_transfer_params"] = self._handover.params(len(params.prompt_ids))
            return web.json_response(whole)
        finally:
            if generation is not None:
                # The handler is cancelled when its client leaves; a finished request stays so.
                self._engine.abort(generation)
            is_done = generation is not None and generation.is_finished
            self._handover.finish(room, is_done=is_done)

    async def _stream(
        self,
        request: web.Request,
        params: GenerationParams,
        generation: Generation,
        answer: Answer,
    ) -> web.StreamResponse:
        # Headers go out with the first token, so that until then an error can have its status.
        token_ids = await generation.take()
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        try:
            if opening := answer.opening_chunk():
                await response.write(_sse(opening))
            while True:
                is_last = generation.is_finished
                told = token_ids if params.has_token_ids else None
                chunk = answer.text_chunk(self._text(token_ids), is_last=is_last, token_ids=told)
                await response.write(_sse(chunk))
                if is_last:
                    break
                token_ids = await generation.take()
            if params.has_usage_chunk:
                await response.write(_sse(answer.usage_chunk(generation.request)))
        except ClosedError as error:
            # The status is out already; the client must not take a part for the whole.
            await response.write(_sse(ApiError(503, "ServiceUnavailableError", str(error)).body))
        except ConnectionError:
            # The client left between two writes; nobody is there to be told.
            return response
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _text(self, token_ids: list[int]) -> str:
        return "".join(map(self._tokenizer.piece, token_ids))


def _sse(body: Body) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"
