"""Engines that speak OpenAI's API only, asked through the runtime's clients and KvPushRouter."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from kvflash import (
    DeadlineError,
    DecodeError,
    DistributedRuntime,
    InvalidArgumentError,
    KvPushRouter,
    KvRouterConfig,
    NotFoundError,
    OverloadedError,
    TransportError,
    WorkerError,
)
from kvflash.discovery import MemoryDiscovery
from kvflash.runtime import RuntimeLimits
from support_openai_engine import USAGE, WHOLE, Engine, chunk, say
from support_push_router import BLOCK, PATH, TOKENS, eventually, is_idle, run


@asynccontextmanager
async def stage(
    count: int = 1, **settings: Any
) -> AsyncIterator[tuple[list[Engine], KvPushRouter]]:
    discovery = MemoryDiscovery()
    engines = [Engine() for _ in range(count)]
    for engine in engines:
        await engine.start(discovery)
    config = KvRouterConfig(use_kv_events=False, **settings)
    try:
        async with (
            DistributedRuntime(discovery) as runtime,
            KvPushRouter(runtime.endpoint(PATH), BLOCK, config) as router,
        ):

            async def is_ready() -> bool:
                return len(await router.get_potential_loads([1])) == count

            await eventually(is_ready, "the engines")
            yield engines, router
    finally:
        for engine in engines:
            await engine.stop()
        await discovery.close()


async def text_of(router: KvPushRouter, **options: Any) -> str:
    stream = await router.generate(TOKENS, **options)
    return "".join([item["text"] async for item in stream])


def test_a_request_becomes_a_completion_and_its_events_items() -> None:
    async def work() -> None:
        async with stage() as ((engine,), router):
            stream = await router.generate(
                np.array(TOKENS),  # type: ignore[arg-type]
                model="m",
                stop_conditions={"max_tokens": 3, "stop": ["x"], "min_tokens": None},
                sampling_options={"temperature": 0.5, "n": 1, "seed": np.int64(7)},
                output_options={"logprobs": 1, "formatted_prompt": "p"},
                extra_args={"vllm_xargs": {"a": 1}, "stream": False},
                cache_salt="s",
                request_id="r-1",
            )
            items = []
            async for item in stream:
                if not items:
                    totals = router.totals()
                    assert (totals["requests"], totals["prefill_tokens"]) == (1, 0)
                items.append(item)
            assert [item["token_ids"] for item in items] == [[1], [2], [3]]
            assert [item["text"] for item in items] == ["a", "bc", "d"]
            assert [item["finish_reason"] for item in items] == [None, None, "length"]
            assert items[2]["completion_usage"] == USAGE
            body, headers = engine.asked[0]
            assert body == {
                "prompt": TOKENS,
                "model": "m",
                "max_tokens": 3,
                "stop": ["x"],
                "temperature": 0.5,
                "n": 1,
                "seed": 7,
                "logprobs": 1,
                "vllm_xargs": {"a": 1},
                "cache_salt": "s",
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
            }
            assert (headers["x-request-id"], headers["x-data-parallel-rank"]) == ("r-1", "0")
            (decision,) = json.loads(await router.why("r-1"))
            assert (decision["outcome"], decision["cached_tokens"]) == ("complete", 8)
            assert is_idle(router)
            # An adapter is a separate model; an engine without a model's name announces none.
            assert await text_of(router, model="m", lora_name="sql") == "abcd"
            assert await text_of(router) == "abcd"
            assert [body.get("model") for body, _ in engine.asked] == ["m", "sql", None]

    run(work())


def test_an_engine_that_tells_no_tokens_is_read_by_its_text() -> None:
    async def work() -> None:
        async with stage(router_track_output_blocks=True) as ((engine,), router):
            engine.events = [
                chunk(""),
                chunk("hello "),
                chunk("you", reason="stop"),
                {"choices": [], "usage": USAGE | {"completion_tokens": 9}},
            ]
            stream = await router.generate(TOKENS)
            first = await anext(stream)
            assert first == {"token_ids": [], "text": "hello ", "finish_reason": None}
            assert router.totals()["prefill_tokens"] == 0
            last = await anext(stream)
            assert (last["text"], last["finish_reason"]) == ("you", "stop")
            assert last["completion_usage"]["completion_tokens"] == 9
            # 4 of the prompt, 2 that the usage tells of.
            assert router.totals()["blocks"] == 6
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            assert is_idle(router)
            # An engine that tells no usage, in pieces that end anywhere.
            whole = b"".join(
                b": hello\r\ndata: " + json.dumps(event).encode() + b"\r\n\r\n"
                for event in engine.events[:3]
            )

            async def drip(response: web.StreamResponse) -> None:
                for at in range(0, len(whole), 7):
                    await response.write(whole[at : at + 7])
                # Some keep the connection busy, and not all end their last line.
                await response.write(b"data:\n\ndata: [DONE]")

            engine.script = drip
            assert await text_of(router) == "hello you"
            assert is_idle(router)

    run(work())


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (400, {"error": {"message": "too long", "code": 400}}, InvalidArgumentError, "too long"),
        (400, {"object": "error", "message": "too long"}, InvalidArgumentError, "too long"),
        (404, {"error": {"message": "no model", "code": 404}}, NotFoundError, "no model"),
        (422, {"detail": [{"msg": "Field required"}]}, InvalidArgumentError, "Field required"),
        (429, {"error": {"message": "full"}}, OverloadedError, "full"),
        (500, {"error": {"message": "broken"}}, WorkerError, "broken"),
        (503, "loading", TransportError, "HTTP status 503.*loading"),
        (504, {}, DeadlineError, "HTTP status 504"),
        (200, {"choices": []}, WorkerError, "HTTP status 200"),
    ],
)
def test_refusals_are_errors_of_their_cause(
    status: int, body: Any, kind: type[Exception], message: str
) -> None:
    async def work() -> None:
        async with stage() as ((engine,), router):
            engine.refusal = (status, body)
            stream = await router.generate(TOKENS)
            with pytest.raises(kind, match=message):
                await anext(stream)
            assert is_idle(router)
            engine.refusal = None
            assert await text_of(router) == "abcd"

    run(work())


def test_another_engine_is_asked_before_the_first_item_and_never_after() -> None:
    async def work() -> None:
        async with stage(2) as (engines, router):
            home, other = engines
            for refusal in (
                (429, {"error": {"message": "full"}}),
                (503, {"error": {"message": "ends"}}),
            ):
                # The other one has something to do.
                busy = [9] * len(TOKENS)
                await router.best_worker(busy, request_id="other", worker_id=other.id)
                home.refusal = refusal
                home.asked.clear()
                stream = await router.generate(TOKENS)
                assert "".join([item["text"] async for item in stream]) == "abcd"
                assert stream.worker_id == other.id
                assert len(home.asked) == 1
                home.refusal = None
                await router.free("other")
                assert is_idle(router)
            for engine in engines:
                engine.events = [
                    chunk("a", [1]),
                    {"error": {"message": "out of memory", "code": 500}},
                ]
            stream = await router.generate(TOKENS)
            assert (await anext(stream))["text"] == "a"
            with pytest.raises(WorkerError, match="out of memory"):
                await anext(stream)
            assert is_idle(router)

    run(work())


@pytest.mark.parametrize(
    ("said", "kind", "message"),
    [
        (b"", TransportError, "closed the connection during its answer.*broke off before its end"),
        (b"data: {]\n\n", DecodeError, "an event is not JSON"),
        (b"data: 3\n\n", DecodeError, "an event must be an object"),
        (b'data: {"choices": [3]}\n\n', DecodeError, "a choice must be an object"),
        (b'data: {"choices": [{"token_ids": 4}]}\n\n', DecodeError, "a field of another type"),
        (b"data: " + b"[" * 60_000 + b"\n\n", DecodeError, "an event is not JSON"),
    ],
)
def test_an_answer_that_breaks_off_is_no_whole_one(
    said: bytes, kind: type[Exception], message: str
) -> None:
    async def work() -> None:
        async with stage() as ((engine,), router):

            async def half(response: web.StreamResponse) -> None:
                await say(response, WHOLE[:1])
                await response.write(said)

            engine.script = half
            stream = await router.generate(TOKENS)
            assert (await anext(stream))["text"] == "a"
            with pytest.raises(kind, match=message):
                await anext(stream)
            assert is_idle(router)

    run(work())


def test_events_come_whole_however_they_are_cut() -> None:
    async def work() -> None:
        async with stage() as ((engine,), router):
            said = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in WHOLE)

            async def byte_by_byte(response: web.StreamResponse) -> None:
                for at in range(len(said)):
                    await response.write(said[at : at + 1])
                # The last line has no end.
                await response.write(b"data: [DONE]")

            engine.script = byte_by_byte
            assert await text_of(router) == "abcd"

    run(work())


def test_an_event_has_a_limit() -> None:
    async def work() -> None:
        discovery = MemoryDiscovery()
        engine = Engine()
        await engine.start(discovery)
        engine.events = [chunk("x" * 10_000)]
        limits = RuntimeLimits(frame_bytes_max=4_096)
        async with DistributedRuntime(discovery, limits=limits) as runtime:
            client = runtime.endpoint(PATH).client()
            stream = await client.random({"token_ids": [1]})
            with pytest.raises(DecodeError, match="at most 4096 bytes"):
                await anext(stream)
            with pytest.raises(InvalidArgumentError, match="at most 4096 bytes"):
                await client.random({"token_ids": [1] * 4_096})
        await engine.stop()
        await discovery.close()

    run(work())


@pytest.mark.parametrize("how", ["aclose", "cancel", "before"])
def test_whoever_leaves_ends_the_request_at_the_engine(how: str) -> None:
    async def work() -> None:
        async with stage() as ((engine,), router):

            async def for_ever(response: web.StreamResponse) -> None:
                if how != "before":
                    await say(response, WHOLE[:1])
                await asyncio.Event().wait()

            engine.script = for_ever
            stream = await router.generate(TOKENS)
            if how != "before":
                await anext(stream)
            if how == "aclose":
                await stream.aclose()
            else:
                reading = asyncio.ensure_future(anext(stream))

                async def is_asked() -> bool:
                    return bool(engine.asked)

                await eventually(is_asked, "the engine to be asked")
                # It reads by now.
                await asyncio.sleep(0)
                reading.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reading
            await asyncio.wait_for(engine.left.wait(), 30)
            assert is_idle(router)

    run(work())


def test_what_is_handed_over_comes_in_a_whole_answer() -> None:
    async def work() -> None:
        async with stage() as ((engine,), router):
            handed = {"remote_engine_id": "e", "remote_block_ids": [1, 2]}
            whole = chunk("a", [1], "length") | {"usage": USAGE, "kv_transfer_params": handed}
            engine.refusal = (200, whole)
            stream = await router.generate(
                TOKENS,
                stop_conditions={"max_tokens": 1},
                extra_args={"kv_transfer_params": {"do_remote_decode": True}},
            )
            (item,) = [item async for item in stream]
            assert item == {
                "token_ids": [1],
                "text": "a",
                "finish_reason": "length",
                "completion_usage": USAGE,
                "disaggregated_params": {"kv_transfer_params": handed},
            }
            body, _ = engine.asked[0]
            assert body["stream"] is False
            assert "stream_options" not in body
            # Fields for a decode worker of the runtime are passed on to an engine.
            engine.refusal = None
            request = {"token_ids": TOKENS, "prefill_result": item}
            stream = await router.generate_from_request(request)
            assert "".join([item["text"] async for item in stream]) == "abcd"
            assert engine.asked[1][0]["kv_transfer_params"] == handed
            assert is_idle(router)

    run(work())


def test_what_is_no_request_for_one_is_refused_before_it_is_sent() -> None:
    async def work() -> None:
        async with stage() as ((engine,), router):
            client = router.endpoint.client()
            for request, message in (
                ("text", "token_ids, a list of at least one, got None"),
                ({"token_ids": []}, "at least one"),
                ({"token_ids": [1], "sampling_options": {"n": 2}}, "n must be 1, got 2"),
                ({"token_ids": [1], "stop_conditions": [3]}, "stop_conditions must be an object"),
                ({"token_ids": [1.5], "sampling_options": {"x": {1}}}, "written as JSON"),
            ):
                with pytest.raises(InvalidArgumentError, match=message):
                    await client.random(request)
            for name in ("a\nb", "a\r\nx-other: 1", "a\0"):
                with pytest.raises(InvalidArgumentError, match="request_id goes to the worker"):
                    await client.random({"token_ids": [1]}, request_id=name)
            assert engine.asked == []
            handed = {"disaggregated_params": {"kv_transfer_params": {"a": 1}}}
            room = {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 2}
            request = {"token_ids": [1], "prefill_result": handed, "bootstrap_info": room}
            stream = await client.random(request)
            assert len([item async for item in stream]) == 3
            body, _ = engine.asked[0]
            assert body["kv_transfer_params"] == {"a": 1}
            assert room.items() <= body.items()

    run(work())
