"""The contract of every request plane, between two healthy runtimes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

import kvflash
from kvflash import (
    ClosedError,
    Context,
    DeadlineError,
    DecodeError,
    DistributedRuntime,
    InvalidArgumentError,
    NotFoundError,
    NoWorkerError,
    OverloadedError,
    RuntimeLimits,
    TransportError,
    WorkerError,
)
from kvflash.runtime import tcp
from kvflash.runtime.frame import Request
from kvflash.runtime.instances import Instance
from kvflash.runtime.plane import FailedError
from support_pair import Pair, Probe, count
from support_runtime import eventually, run

Environment = Callable[..., dict[str, str]]

SMALL = RuntimeLimits(frame_bytes_max=64 * 1024)


def test_items_arrive_in_order_by_every_way_to_ask(plane: str, environment: Environment) -> None:
    environment("mem", plane)

    async def scenario() -> None:
        async with Pair(count) as pair:
            wanted = [{"number": number} for number in range(500)]
            assert await pair.ask(500) == wanted
            client, server_id = pair.client, pair.server.instance_id
            assert client.instance_ids() == [server_id]
            assert await client is client
            for stream in (
                await client.random(500),
                await client.round_robin(500),
                await client.direct(500, server_id),
            ):
                assert stream.instance_id == server_id
                assert [item async for item in stream] == wanted
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)
            assert await pair.ask(0) == []
            for endless in (math.inf, 1e18, 10**400):
                assert await pair.ask(1, timeout_s=endless) == wanted[:1]
                assert await client.wait_for_instances(endless) == [server_id]

    run(scenario())


def test_values_survive(plane: str, environment: Environment) -> None:
    environment("mem", plane)
    value = {
        "int": [0, -1, 2**63, 2**64 - 1, -(2**63)],
        "float": 0.1,
        "text": "zwölf\0\n",
        "bytes": bytes(range(256)),
        "none": None,
        "bool": [True, False],
        "nested": {"a": {1: [[], {}]}},
    }

    async def echo(request: Any, context: Context) -> AsyncIterator[Any]:
        yield request
        yield context.id()
        yield context.is_stopped()
        yield None

    async def scenario() -> None:
        async with Pair(echo) as pair:
            assert await pair.ask(value, request_id="r-1") == [value, "r-1", False, None]
            numpy = pytest.importorskip("numpy")
            odd = {"array": numpy.arange(3), "one": numpy.int64(7), "t": (1,)}
            first = (await pair.ask(odd))[0]
            assert first == {"array": [0, 1, 2], "one": 7, "t": [1]}
            with pytest.raises(InvalidArgumentError, match="request can't be written as msgpack"):
                await pair.ask(object())
            with pytest.raises(InvalidArgumentError, match="request can't be written as msgpack"):
                await pair.ask(2**64)

    run(scenario())


def test_a_map_with_a_key_that_python_cannot_read_is_refused(
    plane: str, environment: Environment
) -> None:
    """A tuple may be a key here and is a list there; the worker is not at fault."""
    environment("mem", plane)
    odd = {(1, 2): 3}

    async def answer(request: Any) -> AsyncIterator[Any]:
        yield odd if request == "odd" else request

    async def scenario() -> None:
        async with Pair(answer) as pair:
            with pytest.raises(InvalidArgumentError, match="key of a map"):
                await pair.ask(odd)
            assert pair.client.suspects() == set()
            with pytest.raises(DecodeError, match="key of a map"):
                await pair.ask("odd")
            assert await pair.ask("plain") == ["plain"]

    run(scenario())


def test_handlers_of_every_form(plane: str, environment: Environment) -> None:
    environment("mem", plane)

    class Engine:
        async def generate(self, request: int) -> AsyncIterator[int]:
            yield request

    async def one(request: int) -> int:
        return request

    async def stream_of(request: int, context: Context) -> AsyncIterator[Any]:
        return count(request) if context.id() else count(0)

    async def optional(request: int, context: Context | None = None) -> AsyncIterator[bool]:
        yield context is not None

    async def scenario() -> None:
        for handler, wanted in (
            (Engine().generate, [2]),
            (one, [2]),
            (stream_of, [{"number": 0}, {"number": 1}]),
            (optional, [True]),
        ):
            async with Pair(handler) as pair:
                assert await pair.ask(2) == wanted
        for wrong in (lambda: None, lambda a, b, c: None, 7):
            with pytest.raises(InvalidArgumentError, match="handler must"):
                async with Pair(wrong):
                    pass

    run(scenario())


@pytest.mark.parametrize("after", [0, 3])
def test_an_error_reaches_the_client_as_what_it_is(
    plane: str, environment: Environment, after: int
) -> None:
    environment("mem", plane)

    async def fail(request: str) -> AsyncIterator[int]:
        for number in range(after):
            yield number
        if request == "ValueError":
            raise ValueError("out of ink")
        if request == "WorkerError":
            raise WorkerError("no_gpu", "the GPU is gone")
        raise getattr(kvflash, request)("it says so")

    async def scenario() -> None:
        async with Pair(fail) as pair:
            for name, kind, text in (
                ("ValueError", WorkerError, "internal: ValueError: out of ink"),
                ("WorkerError", WorkerError, "no_gpu: the GPU is gone"),
                ("OverloadedError", OverloadedError, "it says so"),
                ("InvalidArgumentError", InvalidArgumentError, "it says so"),
                ("NotFoundError", NotFoundError, "it says so"),
                ("NoWorkerError", NoWorkerError, "it says so"),
                ("DeadlineError", DeadlineError, "it says so"),
            ):
                items = []
                with pytest.raises(kind) as caught:
                    async for item in await pair.client.generate(name):
                        items.append(item)
                assert str(caught.value) == text
                assert items == list(range(after))
            # Failed requests leave the connections usable, and were sent once each.
            stats = pair.server.stats()["t/pair/run"]
            assert (stats["requests_total"], stats["failed_total"]) == (7, 7)

    run(scenario())


def test_a_handler_that_is_cancelled_or_returns_nonsense_says_so(
    plane: str, environment: Environment
) -> None:
    environment("mem", plane)

    async def odd(request: str) -> AsyncIterator[Any]:
        yield 1
        if request == "cancelled":
            raise asyncio.CancelledError
        yield object()

    async def scenario() -> None:
        async with Pair(odd) as pair:
            with pytest.raises(WorkerError, match="cancelled: the worker cancelled it"):
                await pair.ask("cancelled")
            with pytest.raises(WorkerError, match="internal: item can't be written as msgpack"):
                await pair.ask("nonsense")
            await eventually(pair.is_idle, "the handlers to be gone")

    run(scenario())


@pytest.mark.parametrize("how", ["close", "drop", "cancel", "timeout"])
@pytest.mark.parametrize("items", [0, 1])
def test_a_client_that_goes_frees_the_handler(
    plane: str, environment: Environment, how: str, items: int
) -> None:
    environment("mem", plane)

    async def scenario() -> None:
        probe = Probe()
        limits = RuntimeLimits(cancel_grace_s=0.05)
        async with Pair(probe.hang, limits=limits) as pair:
            timeout_s = 1.0 if how == "timeout" else None
            stream = await pair.client.generate(items, timeout_s=timeout_s)
            for number in range(items):
                assert await anext(stream) == number
            if how == "close":
                await probe.began.wait()
                await stream.aclose()
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)
            elif how == "drop":
                await probe.began.wait()
                del stream
                gc.collect()
            elif how == "cancel":
                reading = asyncio.create_task(anext(stream))
                await asyncio.sleep(0)  # a task that has not begun is not cancelled amid it
                await probe.began.wait()
                reading.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reading
                with pytest.raises(ClosedError, match="reading it was cancelled"):
                    await anext(stream)
            else:
                with pytest.raises(DeadlineError):
                    await anext(stream)
            await asyncio.wait_for(probe.cancelled.wait(), 30)
            await eventually(pair.is_idle, "the handler to be gone")

    run(scenario())


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_stream_that_is_closed_while_it_is_read_says_so(
    plane: str, is_kept: bool, environment: Environment
) -> None:
    environment("mem", plane)

    async def scenario() -> None:
        probe = Probe()

        async def handle(request: int, context: Context) -> AsyncIterator[int]:
            async for item in probe.hang(request - 1, context) if request else _nothing():
                yield item

        async with Pair(handle, limits=RuntimeLimits(cancel_grace_s=0.05)) as pair:
            if is_kept:
                # Its connection carries the next one.
                assert await pair.ask(0) == []
            for items in (0, 1):
                stream = await pair.client.generate(items + 1)
                assert [await anext(stream) for _ in range(items)] == list(range(items))
                reading = asyncio.ensure_future(anext(stream))
                # It waits, and the request has arrived.
                await asyncio.sleep(0)
                await probe.began.wait()
                probe.began.clear()
                await stream.aclose()
                with pytest.raises(ClosedError, match=r"the stream (is|was) closed"):
                    await reading
            assert pair.client.suspects() == set()
            await eventually(pair.is_idle, "the handlers to be gone")

    run(scenario())


async def _nothing() -> AsyncIterator[int]:
    return
    yield 0


def test_a_handler_that_watches_its_context_ends_by_itself(
    plane: str, environment: Environment
) -> None:
    environment("mem", plane)

    async def scenario() -> None:
        probe = Probe()
        async with Pair(probe.obey, limits=RuntimeLimits(cancel_grace_s=60.0)) as pair:
            stream = await pair.client.generate(1)
            assert await anext(stream) == 0
            await stream.aclose()
            await asyncio.wait_for(probe.stopped.wait(), 30)
            await eventually(pair.is_idle, "the handler to be gone")

    run(scenario())


def test_the_worker_ends_what_is_over_its_deadline(plane: str, environment: Environment) -> None:
    environment("mem", plane)

    async def scenario() -> None:
        probe = Probe()
        async with Pair(probe.hang, limits=RuntimeLimits(cancel_grace_s=0.05)) as pair:
            # The plane is asked without the client, which has the same limit and might end first.
            server_id = pair.server.instance_id
            transport = pair.asker.instances("t/pair/run").by_id[server_id].transport
            # The handler begins before any timer ends, however short.
            request = Request("r", "t/pair/run", server_id, 0, deadline_ms=50)
            reply = await pair.asker.planes.of(transport).ask(transport, request)
            with pytest.raises(FailedError) as failed:
                await reply.receive()
            assert isinstance(failed.value.failure.error(), DeadlineError)
            await asyncio.wait_for(probe.cancelled.wait(), 30)

    run(scenario())


def test_a_slow_reader_stops_the_handler(plane: str, environment: Environment) -> None:
    environment("mem", plane)

    async def scenario() -> None:
        probe = Probe()
        async with Pair(probe.flood) as pair:
            stream = await pair.client.generate(0)
            await probe.began.wait()
            seen = -1
            # It stops: nothing is added for many turns of the loop.
            while seen != probe.items:
                seen = probe.items
                for _ in range(50):
                    await asyncio.sleep(0.005)
            assert probe.items * 10_000 < 16 * 1024 * 1024, "that is what sockets may hold"
            # Reading makes it go on, and nothing is lost.
            for _ in range(seen + 100):
                assert len(await anext(stream)) == 10_000
            assert probe.items > seen
            await stream.aclose()
            await asyncio.wait_for(probe.closed.wait(), 30)

    run(scenario())


def test_a_request_id_comes_as_it_is_or_is_refused(plane: str, environment: Environment) -> None:
    environment("mem", plane)

    async def named(request: None, context: Context) -> AsyncIterator[str]:
        yield context.id()

    async def scenario() -> None:
        async with Pair(named) as pair:
            for name in ("r-1", "größer 1", "a\nb", "a\r\nx-kvflash-instance: 7", "a\0"):
                if plane == "http" and name.startswith("a"):
                    with pytest.raises(InvalidArgumentError, match="request_id goes to the worker"):
                        await pair.ask(None, request_id=name)
                else:
                    assert await pair.ask(None, request_id=name) == [name]
            assert await pair.is_idle()

    run(scenario())


def test_frames_have_a_limit(plane: str, environment: Environment) -> None:
    environment("mem", plane)

    async def sized(request: dict[str, Any]) -> AsyncIterator[bytes]:
        yield b"x" * request["bytes"]

    async def scenario() -> None:
        async with Pair(sized, limits=SMALL) as pair:
            assert await pair.ask({"bytes": 60_000}) == [b"x" * 60_000]
            with pytest.raises(WorkerError, match=r"item may have at most 65536 bytes, got 7000\d"):
                await pair.ask({"bytes": 70_000})
            with pytest.raises(InvalidArgumentError, match="request may have at most 65536 bytes"):
                await pair.ask({"bytes": 0, "pad": b"x" * 70_000})
            assert await pair.ask({"bytes": 1}) == [b"x"]
        # The server has its own limit, whatever the client's is.
        async with Pair(sized, limits=SMALL, asker_limits=RuntimeLimits()) as pair:
            with pytest.raises(InvalidArgumentError, match="at most 65536 bytes, got"):
                await pair.ask({"bytes": 0, "pad": b"x" * 70_000})
            assert await pair.ask({"bytes": 1}) == [b"x"]
        async with Pair(sized) as pair:
            size = 20 * 1024 * 1024
            items = await pair.ask({"bytes": size, "pad": b"y" * size})
            assert len(items[0]) == size

    run(scenario())


def test_an_endpoint_takes_as_many_requests_as_it_may(plane: str, environment: Environment) -> None:
    environment("mem", plane)

    async def scenario() -> None:
        probe = Probe()
        limits = RuntimeLimits(cancel_grace_s=0.05, drain_timeout_s=0.05)
        async with Pair(probe.hang, limits=limits, max_concurrent_requests=3) as pair:
            streams = [await pair.client.generate(1) for _ in range(3)]
            for stream in streams:
                assert await anext(stream) == 0
            with pytest.raises(OverloadedError, match="serves 3 requests, its maximum"):
                await pair.ask(1)
            assert pair.server.stats()["t/pair/run"]["refused_total"] == 1
            await streams[0].aclose()

            async def is_free() -> bool:
                return pair.server.stats()["t/pair/run"]["running"] == 2

            await eventually(is_free, "a place")
            stream = await pair.client.generate(1)
            assert await anext(stream) == 0

    run(scenario())


def test_another_process_at_the_same_address_is_not_taken_for_the_one_meant(
    plane: str, environment: Environment
) -> None:
    environment("mem", plane)

    async def scenario() -> None:
        async with Pair(count) as pair:
            known = pair.client._instances
            there = known.by_id[pair.server.instance_id]
            # A reused port: the address of one instance with the number of another.
            known.by_id = {77: Instance(77, there.transport)}
            with pytest.raises(NotFoundError, match="instance 77 is not here"):
                items = [item async for item in await pair.client.direct(1, 77)]
            # With another worker to retry, the client does not notice.
            known.by_id = {77: replace(there, id=77), there.id: there}
            for _ in range(4):
                items = [item async for item in await pair.client.round_robin(1)]
                assert items == [{"number": 0}]
            with pytest.raises(NotFoundError, match="has no instance 5"):
                await pair.client.direct(1, 5)

    run(scenario())


def test_closing_the_asking_runtime_ends_its_streams_with_an_error(
    plane: str, environment: Environment
) -> None:
    environment("mem", plane)

    async def scenario() -> None:
        probe = Probe()
        async with Pair(probe.hang, limits=RuntimeLimits(cancel_grace_s=0.05)) as pair:
            streams = [await pair.client.generate(1) for _ in range(2)]
            for stream in streams:
                assert await anext(stream) == 0
            reading = asyncio.create_task(anext(streams[0]))
            await asyncio.sleep(0)
            await pair.asker.close()
            for waiting in (reading, anext(streams[1])):
                with pytest.raises((ClosedError, TransportError)):
                    await waiting
            with pytest.raises(ClosedError):
                await pair.client.generate(1)
            await eventually(pair.is_idle, "the handlers to be gone")

    run(scenario())


@pytest.mark.parametrize("is_connected", [True, False])
def test_a_request_that_comes_to_be_sent_after_the_close_says_so(
    is_connected: bool, plane: str, environment: Environment
) -> None:
    """Its instance is picked that late: nothing may be opened that the close did not close."""
    environment("mem", plane)

    async def scenario() -> None:
        async with Pair(count) as pair:
            (server_id,) = await pair.client.wait_for_instances(30)
            if is_connected:
                assert len(await pair.ask(2)) == 2
            is_picking, goes_on = asyncio.Event(), asyncio.Event()

            async def pick(_tried: set[int]) -> tuple[int, int]:
                is_picking.set()
                await goes_on.wait()
                return server_id, 2

            sending = asyncio.create_task(pair.client.send(pick))
            await is_picking.wait()
            await pair.asker.close()
            goes_on.set()
            with pytest.raises(ClosedError, match="the runtime is closed"):
                await sending

    run(scenario())


def test_a_connection_that_is_made_during_the_close_is_closed() -> None:
    async def scenario() -> None:
        is_over = asyncio.Event()

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
            is_over.set()

        async with await asyncio.start_server(take, "127.0.0.1", 0) as there:
            address = f"127.0.0.1:{there.sockets[0].getsockname()[1]}"
            client = tcp.make_client(RuntimeLimits())
            asking = asyncio.create_task(
                client.ask({"address": address}, Request("id", "a/b/c", 1, {}))
            )
            await asyncio.sleep(0)
            await client.close()
            with pytest.raises(ClosedError, match="the runtime is closed"):
                await asking
            await asyncio.wait_for(is_over.wait(), 30)

    run(scenario())


def test_there_is_nobody(plane: str, environment: Environment) -> None:
    environment("mem", plane)

    async def scenario() -> None:
        async with DistributedRuntime() as runtime:
            client = await runtime.endpoint("t.nobody.run").client()
            assert client.instance_ids() == []
            with pytest.raises(NoWorkerError, match="t/nobody/run has no instance"):
                await client.generate({})
            with pytest.raises(DeadlineError, match=r"no instance of t/nobody/run within 0\.05 s"):
                await client.wait_for_instances(0.05)

    run(scenario())


def test_an_endpoint_that_is_served_again_answers_each_request_once(
    plane: str, environment: Environment
) -> None:
    environment("mem", plane)

    async def scenario() -> None:
        served: list[int] = []

        async def handle(number: int) -> AsyncIterator[int]:
            served.append(number)
            yield number

        async with DistributedRuntime() as server, DistributedRuntime() as asker:
            endpoint, client = server.endpoint("t.a.run"), asker.endpoint("t.a.run").client()
            for number in range(4):
                serving = asyncio.create_task(endpoint.serve_endpoint(handle))
                await client.wait_for_instances(30)
                assert [item async for item in await client.generate(number)] == [number]
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)

                async def is_gone() -> bool:
                    return client.instance_ids() == []

                await eventually(is_gone, "the endpoint to be withdrawn")
            assert served == [0, 1, 2, 3]

    run(scenario())


def test_a_thousand_streams_at_once(plane: str, environment: Environment) -> None:
    environment("mem", plane)
    streams_count, items_count = 1_000, 20

    async def slow(request: int) -> AsyncIterator[list[int]]:
        for number in range(items_count):
            yield [request, number]
            await asyncio.sleep(0)

    async def scenario() -> None:
        # Both ends share one event loop, which a busy machine can hold up for over two seconds.
        async with Pair(slow, limits=RuntimeLimits(connect_timeout_s=30.0)) as pair:
            streams = await asyncio.gather(
                *(pair.client.generate(number) for number in range(streams_count))
            )

            async def read(stream: Any) -> list[Any]:
                return [item async for item in stream]

            answers = await asyncio.gather(*(read(stream) for stream in streams))
            wanted = [[[n, k] for k in range(items_count)] for n in range(streams_count)]
            assert answers == wanted
            stats = pair.server.stats()["t/pair/run"]
            assert stats["requests_total"] == streams_count
            await eventually(pair.is_idle, "the handlers to be gone")

    run(scenario())
