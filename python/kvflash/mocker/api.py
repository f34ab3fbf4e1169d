"""The APIs of engines, and the parts of vLLM's own API that routers use, over aiohttp."""

import time
import uuid
from collections.abc import Callable
from functools import partial
from hashlib import blake2b

from aiohttp import web

from kvflash.mocker import audio, messages, pooling, responses
from kvflash.mocker.answer import GenerateAnswer, TokensAnswer
from kvflash.mocker.audio import SoundAnswer
from kvflash.mocker.completions import ChatAnswer, CompletionAnswer, assistant_message
from kvflash.mocker.config import MockerConfig
from kvflash.mocker.engine import Engine
from kvflash.mocker.fields import ApiError, Body, mapping, refuse
from kvflash.mocker.generation import Generator
from kvflash.mocker.handover import Handover
from kvflash.mocker.messages import MessageAnswer
from kvflash.mocker.metrics import CONTENT_TYPE, render
from kvflash.mocker.middleware import at_once, errors
from kvflash.mocker.plan import Plan
from kvflash.mocker.protocol import (
    decode,
    parse_json,
    parse_model,
    parse_prompt,
    parse_token_ids,
    shared,
)
from kvflash.mocker.responses import ResponseAnswer, ResponseStore
from kvflash.mocker.tokenizer import Tokenizer

# A prompt of a million token ids fits; larger bodies are mistakes.
BODY_BYTES_MAX = 32 * 1024 * 1024

Pooling = Callable[[Body, str, Tokenizer], Body]
POOLING: dict[str, Pooling] = {
    "/v1/embeddings": pooling.embeddings,
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), pooling.rerank),
    **dict.fromkeys(("/score", "/v1/score"), pooling.score),
    "/classify": pooling.classify,
    "/pooling": pooling.pooling,
}


def build_app(
    engine: Engine, config: MockerConfig, tokenizer: Tokenizer, handover: Handover
) -> web.Application:
    """The HTTP application of one worker, to be run with handler cancellation."""
    api = Api(engine, config, tokenizer, handover)
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[errors])
    app.add_routes(
        [
            web.post("/v1/chat/completions", api.chat),
            web.post("/v1/chat/completions/render", at_once(api.render)),
            web.post("/v1/completions", api.completion),
            web.post("/v1/completions/render", at_once(api.render_completion)),
            web.post("/v1/responses", api.response),
            web.get("/v1/responses/{id}", api.kept_response),
            web.delete("/v1/responses/{id}", api.delete_response),
            web.post("/v1/responses/{id}/cancel", api.cancel_response),
            web.post("/v1/responses/render", at_once(api.render_response)),
            web.post("/v1/messages", api.message),
            web.post("/v1/messages/count_tokens", at_once(api.count_tokens)),
            web.post("/v1/messages/render", at_once(api.render_message)),
            web.post("/inference/v1/generate", api.generate_tokens),
            web.post("/generate", api.generate),
            *(web.post(path, at_once(partial(api.pool, one))) for path, one in POOLING.items()),
            web.post("/v1/audio/transcriptions", partial(api.sound, is_translated=False)),
            web.post("/v1/audio/translations", partial(api.sound, is_translated=True)),
            web.post("/v1/audio/speech", api.speech),
            web.get("/v1/models", api.models),
            web.get("/health", api.health),
            web.get("/version", api.version),
            web.get("/metrics", api.metrics),
            web.post("/tokenize", at_once(api.tokenize)),
            web.post("/detokenize", at_once(api.detokenize)),
            web.post("/reset_prefix_cache", api.reset_prefix_cache),
        ]
    )
    return app


class Api:
    """The handlers of one worker."""

    def __init__(
        self, engine: Engine, config: MockerConfig, tokenizer: Tokenizer, handover: Handover
    ) -> None:
        self._engine = engine
        self._config = config
        self._tokenizer = tokenizer
        self._answer = Generator([engine], config, tokenizer, handover).answer
        self._store = ResponseStore()
        self._started_s = time.time()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, parse_json(await request.read()), ChatAnswer)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        body = parse_json(await request.read())
        return await self._answer(request, body, partial(CompletionAnswer, body), is_chat=False)

    async def response(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses: stored for the next turn, unless `store` is false."""
        body = parse_json(await request.read())
        chat = responses.as_chat(body, self._store)

        def keep(whole: Body, plan: Plan) -> None:
            if body.get("store", True):
                self._store.keep(whole, [*chat["messages"], assistant_message(plan)])

        return await self._answer(request, chat, partial(ResponseAnswer, body, keep))

    async def kept_response(self, request: web.Request) -> web.Response:
        return web.json_response(self._store.find(request.match_info["id"])[0])

    async def delete_response(self, request: web.Request) -> web.Response:
        return web.json_response(self._store.delete(request.match_info["id"]))

    async def cancel_response(self, request: web.Request) -> web.Response:
        """POST /v1/responses/{id}/cancel: refused, since no response runs in the background."""
        self._store.find(request.match_info["id"])
        refuse("Cannot cancel a synchronous response.", "response_id")

    async def message(self, request: web.Request) -> web.StreamResponse:
        chat = messages.as_chat(parse_json(await request.read()))
        return await self._answer(request, chat, MessageAnswer)

    def count_tokens(self, body: Body) -> Body:
        chat = messages.as_chat(body, needs_max_tokens=False)
        return {"input_tokens": len(self.render(chat)["token_ids"])}

    def render(self, body: Body, *, is_chat: bool = True) -> Body:
        parse_model(body, self._config)
        token_ids = parse_prompt(body, is_chat=is_chat, tokenizer=self._tokenizer)
        return {"request_id": uuid.uuid4().hex, "token_ids": token_ids, "features": None}

    def render_completion(self, body: Body) -> list[Body]:
        """POST /v1/completions/render: a list, the tokens of each prompt."""
        return [self.render(body, is_chat=False)]

    def render_response(self, body: Body) -> Body:
        if body.get("previous_response_id") is not None:
            refuse("previous_response_id cannot be rendered", "previous_response_id")
        return self.render(responses.as_chat(body, self._store))

    def render_message(self, body: Body) -> Body:
        return self.render(messages.as_chat(body))

    def pool(self, answer: Pooling, body: Body) -> Body:
        model = parse_model(body, self._config)
        return answer(body, model, self._tokenizer)

    async def generate_tokens(self, request: web.Request) -> web.StreamResponse:
        body = parse_json(await request.read())
        prompt = parse_token_ids(body.get("token_ids"), "token_ids")
        completion = _completion(body, prompt, "max_tokens")
        make = partial(TokensAnswer, body.get("request_id"))
        return await self._answer(request, completion, make, is_chat=False)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """POST /generate: {text} or {input_ids}, as in SGLang."""
        body = parse_json(await request.read())
        prompt = body.get("text")
        if body.get("input_ids") is not None:
            prompt = parse_token_ids(body["input_ids"], "input_ids")
        completion = _completion(body, prompt, "max_new_tokens")
        if completion["n"] not in (None, 1):
            refuse("only n = 1 is supported", "sampling_params.n")
        return await self._answer(request, completion, GenerateAnswer, is_chat=False)

    async def sound(self, request: web.Request, *, is_translated: bool) -> web.StreamResponse:
        upload = await audio.read_upload(request, is_translated=is_translated)
        digest = blake2b(upload.sound, digest_size=8).hexdigest()
        make = partial(SoundAnswer, upload)
        return await self._answer(request, upload.as_completion(digest), make, is_chat=False)

    async def speech(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/audio/speech: answered at once."""
        body = parse_json(await request.read())
        parse_model(body, self._config)
        sound, kind = audio.speak(body)
        return web.Response(body=sound, content_type=kind)

    async def models(self, _request: web.Request) -> web.Response:
        base = self._config.model_name
        cards = [
            {
                "id": name,
                "object": "model",
                "created": int(self._started_s),
                "owned_by": "kvflash",
                "root": name,
                "parent": None if name == base else base,
                "max_model_len": self._config.model_len,
            }
            for name in (base, *self._config.lora_adapters)
        ]
        return web.json_response({"object": "list", "data": cards})

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.is_alive else 503)

    async def version(self, _request: web.Request) -> web.Response:
        # Here, because it is slow to load, and few ask for it.
        from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415

        try:
            text = version("kvflash")
        except PackageNotFoundError:
            # Run from a source tree.
            text = "unknown"
        return web.json_response({"version": text})

    async def metrics(self, _request: web.Request) -> web.Response:
        text = render(self._engine.scheduler, self._config, self._started_s)
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    def tokenize(self, body: Body) -> Body:
        """POST /tokenize: {model, prompt} or {model, messages} to token ids."""
        parse_model(body, self._config)
        token_ids = parse_prompt(body, is_chat="messages" in body, tokenizer=self._tokenizer)
        length = self._config.model_len
        return {"count": len(token_ids), "max_model_len": length, "tokens": token_ids}

    def detokenize(self, body: Body) -> Body:
        """POST /detokenize: {model, tokens} to text."""
        parse_model(body, self._config)
        token_ids = parse_token_ids(body.get("tokens"), "tokens")
        return {"prompt": decode(token_ids, "tokens", self._tokenizer)}

    async def reset_prefix_cache(self, _request: web.Request) -> web.Response:
        """POST /reset_prefix_cache: 200, or 409 with nothing changed while a request runs."""
        if not self._engine.scheduler.reset():
            raise ApiError(409, "ConflictError", "a running request holds blocks; try again")
        return web.Response(status=200)


def _completion(body: Body, prompt: object, limit: str) -> Body:
    """The completion request that a request for tokens stands for."""
    sampling = mapping(body, "sampling_params")
    options = {name: sampling.get(name) for name in ("n", "seed", "stop", "stop_token_ids")}
    return {**shared(body), **options, "prompt": prompt, "max_tokens": sampling.get(limit)}
