"""Runs a request in the engine, and writes its answer: whole, or as a stream."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from aiohttp import web

from kvflash.errors import ClosedError
from kvflash.mocker.answer import Answer
from kvflash.mocker.blocks import output_seed
from kvflash.mocker.config import MockerConfig
from kvflash.mocker.engine import Engine, Waiter
from kvflash.mocker.fields import ApiError, Body, refuse
from kvflash.mocker.handover import Handover, Room, parse_room
from kvflash.mocker.plan import Choice, Step, plan_answer
from kvflash.mocker.protocol import GenerationParams, parse_generation
from kvflash.mocker.scheduler import Request
from kvflash.mocker.tokenizer import Tokenizer

# With this header the text of an answer ends by itself after that many tokens.
LENGTH_HEADER = "x-mocker-tokens"


class Generation(Waiter):
    """The answers to one request, while the engine works on them."""

    def __init__(self, *, is_streaming: bool) -> None:
        super().__init__(is_streaming=is_streaming)
        self.choices: list[Choice] = []

    async def steps(self) -> AsyncIterator[tuple[Choice, Step]]:
        """The steps of all answers, in order of arrival."""
        while waiting := [choice for choice in self.choices if not choice.is_told]:
            await self.wait()
            for choice in waiting:
                if choice.has_news:
                    yield choice, choice.step()


class Generator:
    """Answers the requests of one worker, which has one engine or more."""

    def __init__(
        self,
        engines: Sequence[Engine],
        config: MockerConfig,
        tokenizer: Tokenizer,
        handover: Handover,
    ) -> None:
        self._engines = engines
        self._config = config
        self._tokenizer = tokenizer
        self._handover = handover

    @asynccontextmanager
    async def generation(
        self, params: GenerationParams, room: Room | None
    ) -> AsyncIterator[Generation]:
        """Let the engine work on a request until the block ends, as it does when a client leaves.

        Waits first until the prompt is handed over, and reports to its room at the end.
        """
        generation = Generation(is_streaming=params.is_streaming)
        choices = generation.choices
        try:
            is_transferred = await self._handover.receive(params.transfer, room)
            engine = min(self._engines, key=lambda one: one.scheduler.request_count)
            if params.engine is not None:
                engine = self._engines[params.engine]
            for index in range(params.options.choices):
                choice = self._plan(params, index, is_transferred=is_transferred)
                engine.submit(choice.request, generation)
                choices.append(choice)
            yield generation
        finally:
            for choice in choices:
                engine.abort(choice.request)
            is_done = bool(choices) and all(choice.request.is_finished for choice in choices)
            self._handover.finish(room, is_done=is_done)

    def _plan(self, params: GenerationParams, index: int, *, is_transferred: bool) -> Choice:
        plan = plan_answer(
            params.options,
            self._tokenizer,
            seed=output_seed(params.lora_name, params.prompt_ids),
            index=index,
            max_tokens=1 if self._handover.is_prefill else params.max_tokens,
        )
        request = Request(
            prompt_ids=params.prompt_ids,
            planned_ids=plan.token_ids,
            lora_name=params.lora_name,
            cache_salt=params.cache_salt,
            is_transferred=is_transferred,
        )
        return Choice(index, plan, request)

    async def answer(
        self,
        request: web.Request,
        body: Body,
        make: Callable[[GenerationParams, Tokenizer], Answer],
        *,
        is_chat: bool = True,
    ) -> web.StreamResponse:
        """Answer a chat or a completion, in the form of the answer that ``make`` returns."""
        # Read first: if anything else is wrong, the waiting decode worker must be informed.
        room = parse_room(body)
        try:
            params = parse_generation(
                body,
                is_chat=is_chat,
                config=self._config,
                tokenizer=self._tokenizer,
                text_tokens=_text_tokens(request),
            )
            answer = make(params, self._tokenizer)
        except ApiError:
            self._handover.finish(room, is_done=False)
            raise
        async with self.generation(params, room) as generation:
            if params.is_streaming:
                return await _stream(request, generation, answer)
            async for _ in generation.steps():
                pass
            whole = answer.whole(generation.choices)
            if params.transfer.get("do_remote_decode"):
                whole["kv_transfer_params"] = self._handover.params(len(params.prompt_ids))
            return answer.respond(whole)


async def _stream(
    request: web.Request, generation: Generation, answer: Answer
) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    choices = generation.choices
    try:
        async for choice, step in generation.steps():
            # Headers go out with the first token: until then an error can have its own status.
            if not response.prepared:
                await response.prepare(request)
                await _write(response, answer.opening(choices))
            await _write(response, answer.piece(choice, step))
        await _write(response, answer.closing(choices))
    except ClosedError as error:
        if not response.prepared:
            raise
        # The status has been sent; the client must not take a partial answer for a complete one.
        failed = ApiError(503, "ServiceUnavailableError", str(error))
        await _write(response, answer.failure(failed))
    except ConnectionError:
        # The client disconnected between two writes; there is no one to answer.
        return response
    await response.write_eof()
    return response


async def _write(response: web.StreamResponse, events: bytes) -> None:
    if events:
        await response.write(events)


def _text_tokens(request: web.Request) -> int | None:
    told = request.headers.get(LENGTH_HEADER)
    if told is None:
        return None
    if not told.isdecimal() or len(told) > 9 or int(told) < 1:
        refuse(f"{LENGTH_HEADER} must be in 1..=999999999, got {told!r:.80}")
    return int(told)
