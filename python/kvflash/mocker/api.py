"""The APIs of engines, and the parts of vLLM's own API that routers use, over aiohttp."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from aiohttp import web

from kvflash.errors import ClosedError
from kvflash.mocker import messages, pooling, responses
from kvflash.mocker.admin import Admin
from kvflash.mocker.answer import Answer, GenerateAnswer, OpenAiAnswer, TokensAnswer
from kvflash.mocker.block_hash import output_seed
from kvflash.mocker.config import MockerConfig
from kvflash.mocker.engine import Engine, Generation
from kvflash.mocker.handover import Handover, Room
from kvflash.mocker.messages import MessageAnswer
from kvflash.mocker.middleware import Handler, errors
from kvflash.mocker.protocol import (
    CompletionAnswer,
    GenerationParams,
    parse_bootstrap,
    parse_generation,
    parse_json,
    parse_model,
    parse_prompt,
    parse_token_ids,
    shared,
)
from kvflash.mocker.refusal import ApiError, Body, refuse
from kvflash.mocker.responses import ResponseAnswer, ResponseStore
from kvflash.mocker.tokenizer import Tokenizer

# A prompt of a million token ids fits; anything larger is a mistake.
BODY_BYTES_MAX = 32 * 1024 * 1024

Pooling = Callable[[Body, str, Tokenizer], Body]


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
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[errors])
    app.add_routes(
        [
            web.post("/v1/chat/completions", api.chat),
            web.post("/v1/completions", api.completion),
            web.post("/v1/responses", api.response),
            web.post("/v1/responses/render", api.render_response),
            web.post("/v1/messages", api.message),
            web.post("/v1/messages/count_tokens", api.count_tokens),
            web.post("/v1/messages/render", api.render_message),
            web.post("/inference/v1/generate", api.generate_tokens),
            web.post("/generate", api.generate),
            web.post("/v1/embeddings", api.pool(pooling.embeddings)),
            *(web.post(path + "/rerank", api.pool(pooling.rerank)) for path in ("", "/v1", "/v2")),
            *(web.post(path + "/score", api.pool(pooling.score)) for path in ("", "/v1")),
            web.post("/classify", api.pool(pooling.classify)),
            web.post("/pooling", api.pool(pooling.pooling)),
            *Admin(engine, config, tokenizer).routes(),
        ]
    )
    return app


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
        self._store = ResponseStore()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        return await self._openai(request, is_chat=True)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        return await self._openai(request, is_chat=False)

    async def response(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses: kept for the next turn, unless `store` is false."""
        body = parse_json(await request.read())
        chat = responses.as_chat(body, self._store)
        params = self._params(chat, is_chat=True)
        answer = ResponseAnswer(body, params.model, params.max_tokens)

        def keep(text: str) -> None:
            if body.get("store", True):
                told = {"role": "assistant", "content": text}
                self._store.keep(answer.id, [*chat["messages"], told])

        return await self._generate(request, params, answer, on_text=keep)

    async def message(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages."""
        chat = messages.as_chat(parse_json(await request.read()))
        params = self._params(chat, is_chat=True)
        answer = MessageAnswer(uuid.uuid4().hex, params.model, len(params.prompt_ids))
        return await self._generate(request, params, answer)

    async def count_tokens(self, request: web.Request) -> web.Response:
        """POST /v1/messages/count_tokens."""
        body = parse_json(await request.read())
        token_ids = self._chat_ids(messages.as_chat(body, needs_max_tokens=False))
        return web.json_response({"input_tokens": len(token_ids)})

    async def render_response(self, request: web.Request) -> web.Response:
        """POST /v1/responses/render: the tokens that a response is asked for with."""
        body = parse_json(await request.read())
        if body.get("previous_response_id") is not None:
            refuse("previous_response_id cannot be rendered", "previous_response_id")
        return self._rendered(responses.as_chat(body, self._store))

    async def render_message(self, request: web.Request) -> web.Response:
        """POST /v1/messages/render: the tokens that a message is asked for with."""
        return self._rendered(messages.as_chat(parse_json(await request.read())))

    async def generate_tokens(self, request: web.Request) -> web.StreamResponse:
        """POST /inference/v1/generate."""
        body = parse_json(await request.read())
        prompt = parse_token_ids(body.get("token_ids"), "token_ids")
        params = self._params(_completion(body, prompt, "max_tokens"), is_chat=False)
        answer = TokensAnswer(str(body.get("request_id") or uuid.uuid4().hex), params.model)
        return await self._generate(request, params, answer)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """POST /generate: {text} or {input_ids}, as SGLang has it."""
        body = parse_json(await request.read())
        prompt = body.get("text")
        if body.get("input_ids") is not None:
            prompt = parse_token_ids(body["input_ids"], "input_ids")
        params = self._params(_completion(body, prompt, "max_new_tokens"), is_chat=False)
        answer = GenerateAnswer(uuid.uuid4().hex, len(params.prompt_ids))
        return await self._generate(request, params, answer)

    def pool(self, answer: Pooling) -> Handler:
        """A handler of an API without generation."""

        async def handle(request: web.Request) -> web.StreamResponse:
            body = parse_json(await request.read())
            model, _ = parse_model(body, self._config)
            return web.json_response(answer(body, model, self._tokenizer))

        return handle

    def _params(self, body: Body, *, is_chat: bool) -> GenerationParams:
        return parse_generation(
            body, is_chat=is_chat, config=self._config, tokenizer=self._tokenizer
        )

    def _chat_ids(self, chat: Body) -> list[int]:
        parse_model(chat, self._config)
        return parse_prompt(chat, is_chat=True, tokenizer=self._tokenizer)

    def _rendered(self, chat: Body) -> web.Response:
        told = {"token_ids": self._chat_ids(chat), "features": None}
        return web.json_response({"request_id": uuid.uuid4().hex, **told})

    async def _openai(self, request: web.Request, *, is_chat: bool) -> web.StreamResponse:
        body = parse_json(await request.read())
        # First of all: whatever else is wrong with the request, nobody shall wait for it.
        room = parse_bootstrap(body)
        try:
            params = self._params(body, is_chat=is_chat)
        except ApiError:
            self._handover.finish(room, is_done=False)
            raise
        answer = OpenAiAnswer(
            CompletionAnswer(uuid.uuid4().hex, params.model, is_chat=is_chat),
            has_usage_chunk=params.has_usage_chunk,
            has_token_ids=params.has_token_ids,
        )
        return await self._generate(request, params, answer, room=room)

    async def _generate(
        self,
        request: web.Request,
        params: GenerationParams,
        answer: Answer,
        *,
        room: Room | None = None,
        on_text: Callable[[str], None] = lambda _: None,
    ) -> web.StreamResponse:
        generation: Generation | None = None
        try:
            is_transferred = await self._handover.receive(params.transfer, room)
            seed = output_seed(params.lora.name if params.lora else None, params.prompt_ids)
            count = 1 if self._handover.is_prefill else params.max_tokens
            generation = self._engine.submit(
                params.prompt_ids,
                self._tokenizer.plan_output(seed, count),
                lora=params.lora,
                cache_salt=params.cache_salt,
                is_streaming=params.is_streaming,
                is_transferred=is_transferred,
            )
            if params.is_streaming:
                return await self._stream(request, generation, answer, on_text)
            token_ids = await generation.take()
            text = self._text(token_ids)
            whole = answer.whole(text, generation.request, token_ids)
            on_text(text)
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
        generation: Generation,
        answer: Answer,
        on_text: Callable[[str], None],
    ) -> web.StreamResponse:
        # Headers go out with the first token, so that until then an error can have its status.
        token_ids = await generation.take()
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        text = ""
        try:
            await _write(response, answer.opening())
            while True:
                is_last = generation.is_finished
                piece = self._text(token_ids)
                text += piece
                await _write(response, answer.piece(piece, token_ids, is_last=is_last))
                if is_last:
                    break
                token_ids = await generation.take()
            # Kept before the end is told: the next turn may come at once.
            on_text(text)
            await _write(response, answer.closing(text, generation.request))
        except ClosedError as error:
            # The status is out already; the client must not take a part for the whole.
            failed = ApiError(503, "ServiceUnavailableError", str(error))
            await _write(response, answer.failure(failed))
        except ConnectionError:
            # The client left between two writes; nobody is there to be told.
            return response
        await response.write_eof()
        return response

    def _text(self, token_ids: list[int]) -> str:
        return "".join(map(self._tokenizer.piece, token_ids))


def _completion(body: Body, prompt: object, limit: str) -> Body:
    """The completion that a request for tokens is."""
    sampling = body.get("sampling_params") or {}
    if not isinstance(sampling, dict):
        refuse("sampling_params must be an object", "sampling_params")
    return {**shared(body), "prompt": prompt, "max_tokens": sampling.get(limit)}


async def _write(response: web.StreamResponse, events: bytes) -> None:
    if events:
        await response.write(events)
