"""Runs a request in the engine and writes its answer: whole, or as a stream."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from aiohttp import web

from kvflash.errors import ClosedError
from kvflash.mocker.answer import Answer
from kvflash.mocker.block_hash import output_seed
from kvflash.mocker.engine import Engine, Generation
from kvflash.mocker.fields import ApiError
from kvflash.mocker.handover import Handover, Room
from kvflash.mocker.plan import Choice, Plan, Step, plan_answer
from kvflash.mocker.protocol import GenerationParams
from kvflash.mocker.request import Request
from kvflash.mocker.tokenizer import Tokenizer

Running = Sequence[tuple[Choice, Generation]]


class Generator:
    """Answers the requests of one worker."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, handover: Handover) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._handover = handover

    async def answer(
        self,
        request: web.Request,
        params: GenerationParams,
        answer: Answer,
        *,
        room: Room | None = None,
        on_plan: Callable[[Plan], None] = lambda _: None,
        respond: Callable[[Any], web.Response] = web.json_response,
    ) -> web.StreamResponse:
        """Generate the answer to a request.

        Calls ``on_plan`` with the finished answer before its end is sent, and ``respond`` for the
        response of a non-streamed body.
        """
        running: list[tuple[Choice, Generation]] = []
        is_done = False
        try:
            is_transferred = await self._handover.receive(params.transfer, room)
            for index in range(params.options.choices):
                worker = self._engine, self._tokenizer, self._handover
                running.append(submit(*worker, params, index, is_transferred=is_transferred))
            if params.is_streaming:
                response = await _stream(request, running, answer, on_plan)
            else:
                await asyncio.gather(*(generation.take() for _, generation in running))
                choices = [choice for choice, _ in running]
                whole = answer.whole(choices)
                on_plan(choices[0].plan)
                if params.transfer is not None and params.transfer.get("do_remote_decode"):
                    whole["kv_transfer_params"] = self._handover.params(len(params.prompt_ids))
                response = respond(whole)
            is_done = all(generation.request.is_finished for _, generation in running)
            return response
        finally:
            for _, generation in running:
                # The handler is cancelled when its client disconnects; a finished request stays
                # finished.
                self._engine.abort(generation)
            self._handover.finish(room, is_done=is_done)


def submit(
    engine: Engine,
    tokenizer: Tokenizer,
    handover: Handover,
    params: GenerationParams,
    index: int,
    *,
    is_transferred: bool,
) -> tuple[Choice, Generation]:
    """Plan answer ``index`` to a request, and let the engine work on it."""
    plan = plan_answer(
        params.options,
        tokenizer,
        seed=output_seed(params.lora_name, params.prompt_ids),
        index=index,
        max_tokens=1 if handover.is_prefill else params.max_tokens,
    )
    asked = Request(
        prompt_ids=params.prompt_ids,
        planned_ids=plan.token_ids,
        lora_name=params.lora_name,
        cache_salt=params.cache_salt,
        is_transferred=is_transferred,
    )
    return Choice(index, plan, asked), engine.submit(asked, is_streaming=params.is_streaming)


async def _stream(
    request: web.Request, running: Running, answer: Answer, on_plan: Callable[[Plan], None]
) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    choices = [choice for choice, _ in running]
    try:
        async with aclosing(_steps(running)) as steps:
            async for choice, step in steps:
                # Headers go out with the first token: until then an error can have its own status.
                if not response.prepared:
                    await response.prepare(request)
                    await _write(response, answer.opening(choices))
                await _write(response, answer.piece(choice, step))
        # Stored before the end is sent: the next turn may come at once.
        on_plan(choices[0].plan)
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


async def _steps(running: Running) -> AsyncGenerator[tuple[Choice, Step], None]:
    """The steps of all answers, in order of arrival."""
    if len(running) == 1:
        # A single answer needs no tasks.
        ((choice, generation),) = running
        while not choice.is_told:
            yield choice, choice.step(len(await generation.take()))
        return
    waiting = {
        asyncio.create_task(generation.take()): (choice, generation)
        for choice, generation in running
    }
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for take in sorted(done, key=lambda take: waiting[take][0].index):
                choice, generation = waiting.pop(take)
                yield choice, choice.step(len(take.result()))
                if not choice.is_told:
                    waiting[asyncio.create_task(generation.take())] = (choice, generation)
    finally:
        for take in waiting:
            take.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _write(response: web.StreamResponse, events: bytes) -> None:
    if events:
        await response.write(events)
