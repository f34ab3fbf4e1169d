"""Workers that hang up on a request: it may be what ends them, so few get it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import struct
import weakref
from collections.abc import AsyncIterator, Callable

import msgpack
import pytest

from kvflash import Client, ClosedError, DistributedRuntime, TransportError
from support_push_router import PATH, TOKENS, Stage, is_idle
from support_runtime import eventually, run

ENDPOINT = "t.losses.run"
PLANES = pytest.mark.parametrize("kind", ["tcp", "http"])
# A frame with an item, and the end.
ANSWER = struct.pack(">IB", 2, 2) + msgpack.packb(1) + struct.pack(">IB", 1, 3)
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/x-kvflash-frames\r\n"
    b"content-length: %d\r\n\r\n" % len(ANSWER)
)


class Fragile:
    """A worker that reads whole requests; ``lives`` of them are answered, the next is not."""

    def __init__(self, kind: str, *, lives: int = 0) -> None:
        self.kind, self.lives = kind, lives
        self.requests = 0
        self.connections = 0
        #: Sent before it hangs up.
        self.last_words = b""
        #: Called as it hangs up.
        self.on_hang_up: Callable[[], None] = lambda: None
        self._server: asyncio.Server

    async def __aenter__(self) -> Fragile:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Accept no more connections."""
        self._server.close()

    @property
    def whole(self) -> bytes:
        return ANSWER if self.kind == "tcp" else HEAD + ANSWER

    async def _read(self, reader: asyncio.StreamReader) -> None:
        if self.kind == "tcp":
            (size,) = struct.unpack(">I", await reader.readexactly(4))
        else:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            size = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        await reader.readexactly(size)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await self._read(reader)
                self.requests += 1
                if self.requests > self.lives:
                    break
                writer.write(self.whole)
            self.on_hang_up()
            writer.write(self.last_words)
        writer.close()


async def announce(runtime: DistributedRuntime, path: str, *workers: Fragile) -> None:
    for number, worker in enumerate(workers, 1):
        where = {"address": f"127.0.0.1:{worker.port}", "url": f"http://127.0.0.1:{worker.port}"}
        transport = {"kind": worker.kind, **where}
        key = f"v1/instances/{path.replace('.', '/')}/{number}"
        await runtime.announce(key, {"instance_id": number, "transport": transport})


@contextlib.asynccontextmanager
async def client_of(*workers: Fragile) -> AsyncIterator[Client]:
    async with contextlib.AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker)
        runtime = await stack.enter_async_context(DistributedRuntime("mem"))
        await announce(runtime, ENDPOINT, *workers)
        client = runtime.endpoint(ENDPOINT).client()

        async def is_known() -> bool:
            return len(client.instance_ids()) == len(workers)

        await eventually(is_known, "the workers")
        yield client


async def ask(client: Client) -> list[object]:
    return [item async for item in await client.direct(1, 1)]


@PLANES
def test_a_request_on_a_new_connection_is_sent_once(kind: str) -> None:
    async def scenario() -> None:
        worker = Fragile(kind)
        async with client_of(worker) as client:
            with pytest.raises(TransportError) as caught:
                await ask(client)
            assert caught.value.was_sent
            assert worker.requests == 1

    run(scenario())


@PLANES
def test_a_kept_connection_that_closes_without_an_answer_is_replaced_once(kind: str) -> None:
    async def scenario() -> None:
        worker = Fragile(kind, lives=1)
        async with client_of(worker) as client:
            assert await ask(client) == [1]

            def recover() -> None:
                worker.lives = 3

            worker.on_hang_up = recover
            assert await ask(client) == [1]
            assert (worker.requests, worker.connections) == (3, 2)
            # The new one may die of it as well.
            worker.on_hang_up = lambda: None
            with pytest.raises(TransportError) as caught:
                await ask(client)
            assert caught.value.was_sent
            assert (worker.requests, worker.connections) == (5, 3)

    run(scenario())


def test_a_worker_that_is_gone_leaves_no_entry_for_its_connections() -> None:
    async def scenario() -> None:
        worker = Fragile("tcp", lives=1)
        async with client_of(worker) as client:
            assert await ask(client) == [1]
            worker.on_hang_up = worker.stop
            with pytest.raises(TransportError):
                await ask(client)
            assert client.endpoint.runtime.planes._by_kind["tcp"]._idle == {}

    run(scenario())


@PLANES
def test_a_kept_connection_that_closes_within_an_answer_is_not_replaced(kind: str) -> None:
    async def scenario() -> None:
        worker = Fragile(kind, lives=1)
        async with client_of(worker) as client:
            assert await ask(client) == [1]
            worker.last_words = worker.whole[:4]
            with pytest.raises(TransportError) as caught:
                await ask(client)
            assert caught.value.was_sent
            assert worker.requests == 2

    run(scenario())


@PLANES
def test_a_worker_that_is_gone_after_it_had_the_request_died_with_it(kind: str) -> None:
    async def scenario() -> None:
        worker = Fragile(kind, lives=1)
        async with client_of(worker) as client:
            assert await ask(client) == [1]
            worker.on_hang_up = worker.stop
            with pytest.raises(TransportError, match="the worker died with the request") as caught:
                await ask(client)
            assert caught.value.was_sent
            assert worker.requests == 2

    run(scenario())


@PLANES
def test_no_third_instance_gets_a_request_on_which_two_hung_up(kind: str) -> None:
    async def scenario() -> None:
        workers = [Fragile(kind) for _ in range(4)]
        async with client_of(*workers) as client:
            with pytest.raises(TransportError) as caught:
                _ = [item async for item in await client.round_robin(1)]
            assert caught.value.was_sent
            assert sum(worker.requests for worker in workers) == 2

    run(scenario())


@PLANES
def test_a_router_sends_such_a_request_to_one_other_worker(kind: str) -> None:
    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            stage = await stack.enter_async_context(Stage())
            workers = [await stack.enter_async_context(Fragile(kind)) for _ in range(4)]
            await announce(stage.runtime(), PATH, *workers)
            router = await stage.router(4, use_kv_events=False)
            stream = await router.generate(TOKENS)
            with pytest.raises(TransportError) as caught:
                await anext(stream)
            assert caught.value.was_sent
            assert sum(worker.requests for worker in workers) == 2
            assert is_idle(router)

    run(scenario())


@PLANES
def test_instances_that_refuse_the_connection_cost_no_such_attempt(kind: str) -> None:
    async def scenario() -> None:
        workers = [Fragile(kind, lives=1) for _ in range(4)]
        with contextlib.ExitStack() as stack:
            async with client_of(*workers) as client:
                for worker in workers[:3]:
                    # Bound without listening.
                    worker.stop()
                    silent = stack.enter_context(socket.socket())
                    silent.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    silent.bind(("127.0.0.1", worker.port))
                assert [item async for item in await client.round_robin(1)] == [1]

    run(scenario())


def test_an_instance_that_leaves_is_no_suspect_any_more() -> None:
    """A client that asks by number never looks for suspects, and so drops none itself."""

    async def scenario() -> None:
        async with client_of(Fragile("tcp")) as client:
            with pytest.raises(TransportError):
                await ask(client)
            assert client._instances._suspects.keys() == {1}
            await client.endpoint.runtime.withdraw(f"v1/instances/{ENDPOINT.replace('.', '/')}/1")

            async def is_gone() -> bool:
                return client.instance_ids() == []

            await eventually(is_gone, "its end")
            assert client._instances._suspects == {}

    run(scenario())


async def first_then_second(tried: set[int]) -> tuple[int, int]:
    return (2 if tried else 1), 1


@PLANES
def test_a_stream_that_was_sent_elsewhere_ends_with_its_last_user(kind: str) -> None:
    """What the first instance did to it is forgotten by then: no cycle waits for a collection."""

    async def scenario() -> None:
        async with client_of(Fragile(kind), Fragile(kind, lives=1)) as client:
            gc.disable()
            try:
                stream = await client.send(first_then_second)
                ended = weakref.ref(stream)
                assert await anext(stream) == 1
                assert stream.instance_id == 2
                del stream
                assert ended() is None
            finally:
                gc.enable()

    run(scenario())


@PLANES
def test_a_stream_that_is_closed_while_it_is_sent_elsewhere_says_so(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with client_of(Fragile(kind), Fragile(kind, lives=1)) as client:
            stream = await client.send(first_then_second)

            async def close_and_fail(*_: object) -> None:
                await stream.aclose()
                raise TransportError("away")

            plane = client.endpoint.runtime.planes.of({"kind": kind})
            monkeypatch.setattr(plane, "ask", close_and_fail)
            with pytest.raises(ClosedError, match="the stream was closed while it was read"):
                await anext(stream)
            assert client.suspects() == {1}

    run(scenario())
