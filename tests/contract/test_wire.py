"""The planes as foreign programs see them: bytes on a socket, HTTP without a client of ours."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import aiohttp
import msgpack
import pytest
from aiohttp import web

from kvflash import DistributedRuntime, NotFoundError, OverloadedError, RuntimeLimits
from kvflash.runtime import http
from kvflash.runtime.frame import FrameReader
from support_runtime import eventually, run

Environment = Callable[..., dict[str, str]]
PATH = "t/wire/run"
JSON = {"content-type": "application/json"}


def framed(kind: int, value: Any = None) -> bytes:
    payload = b"" if value is None else msgpack.packb(value)
    return struct.pack(">IB", len(payload) + 1, kind) + payload


async def count(request: int) -> AsyncIterator[int]:
    for number in range(request):
        yield number
    if request == 0:
        raise ValueError("nothing")


async def serve(
    plane: str, use: Callable[[DistributedRuntime, dict[str, Any]], Awaitable[None]], **limits: Any
) -> None:
    """Serve `count`, and use its address."""
    async with DistributedRuntime("mem", plane, limits=RuntimeLimits(**limits)) as runtime:
        endpoint = runtime.namespace("t").component("wire").endpoint("run")
        serving = asyncio.create_task(endpoint.serve_endpoint(count))
        client = endpoint.client()
        await client.wait_for_instances(30)
        await use(runtime, client._instances.by_id[runtime.instance_id].transport)
    await serving


class Raw:
    """A TCP connection that sends given bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, transport: dict[str, Any]) -> Raw:
        host, port = transport["address"].split(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def frame(self) -> tuple[int, Any]:
        size, kind = struct.unpack(">IB", await self._reader.readexactly(5))
        payload = await self._reader.readexactly(size - 1)
        return kind, msgpack.unpackb(payload) if payload else None

    async def is_closed(self) -> bool:
        return await self._reader.read() == b""

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


def test_one_tcp_connection_carries_requests_one_after_the_other() -> None:
    async def use(runtime: DistributedRuntime, transport: dict[str, Any]) -> None:
        raw = await Raw.to(transport)
        request = {"id": "a", "endpoint": PATH, "instance_id": runtime.instance_id, "payload": 2}
        raw.send(framed(5))
        assert await raw.frame() == (6, None)
        for _ in range(2):
            # In pieces, as a network may deliver it.
            for byte in framed(1, request):
                raw.send(bytes([byte]))
                await asyncio.sleep(0)
            assert [await raw.frame() for _ in range(3)] == [(2, 0), (2, 1), (3, None)]
        refused = [
            ({**request, "endpoint": "t/wire/x"}, "not_found", "t/wire/x is not served here", True),
            ({**request, "instance_id": 5}, "not_found", "instance 5 is not here", True),
            ({**request, "payload": 0}, "internal", "ValueError: nothing", False),
            ({**request, "id": 7}, "invalid", "id must be of type str, got 7", False),
            ({**request, "deadline_ms": 0}, "invalid", "deadline_ms must be at least 1", False),
            ({**request, "deadline_ms": True}, "invalid", "deadline_ms must be of type int", False),
            ({"id": "a", **{"endpoint": PATH}, "instance_id": 1}, "invalid", "payload is", False),
            ([1], "invalid", "request must be a map, got list", False),
        ]
        for fields, code, text, retry in refused:
            raw.send(framed(1, fields))
            kind, error = await raw.frame()
            assert (kind, error["code"], error["retry"]) == (4, code, retry)
            assert text in error["message"]
        raw.send(struct.pack(">IB", 3, 1) + b"\xc1\xc1")
        kind, error = await raw.frame()
        assert (kind, error["code"]) == (4, "invalid")
        assert "not msgpack" in error["message"]
        raw.send(framed(1, request))
        assert (await raw.frame())[0] == 2
        await raw.close()

    run(serve("tcp", use))


def test_text_of_a_client_or_worker_is_logged_without_control_characters(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def use(runtime: DistributedRuntime, transport: dict[str, Any]) -> None:
        raw = await Raw.to(transport)
        request = {
            "id": "a\n1970 ERROR forged \x1b[2J" + "b" * 1_000,
            "endpoint": PATH,
            "instance_id": runtime.instance_id,
            "payload": 0,
        }
        raw.send(framed(1, request))
        assert (await raw.frame())[0] == 4
        await raw.close()
        (line,) = [one.getMessage() for one in caplog.records if "forged" in one.getMessage()]
        assert line.isprintable()
        assert len(line) < 300
        failure = {"code": "not_found", "message": "c\n1970 ERROR forged", "retry": True}

        async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(5)
            writer.write(framed(4, failure))
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        for number in (7, 8):
            there = {"kind": "tcp", "address": f"127.0.0.1:{port}"}
            key = f"v1/instances/t/odd/run/{number}"
            await runtime.announce(key, {"instance_id": number, "transport": there})
        client = runtime.endpoint("t.odd.run").client()
        caplog.set_level("INFO", "kvflash")
        caplog.clear()
        with pytest.raises(NotFoundError):
            _ = [item async for item in await client.generate(1)]
        lines = [one.getMessage() for one in caplog.records if "forged" in one.getMessage()]
        assert lines
        assert all(line.isprintable() for line in lines)
        server.close()
        await server.wait_closed()

    run(serve("tcp", use))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (struct.pack(">IB", 65_537, 1), "at most 65536 bytes, got 65537"),
        (struct.pack(">IB", 0, 1), "its length is 0"),
        (framed(3), "frame of kind 3 is not a request"),
        (b"GET / HTTP/1.1\r\n\r\n", "at most 65536 bytes"),
    ],
)
def test_what_is_no_request_is_said_and_the_connection_closed(data: bytes, text: str) -> None:
    async def use(_runtime: DistributedRuntime, transport: dict[str, Any]) -> None:
        raw = await Raw.to(transport)
        raw.send(data)
        kind, error = await raw.frame()
        assert (kind, error["code"]) == (4, "invalid")
        assert text in error["message"]
        assert await raw.is_closed()
        await raw.close()

    run(serve("tcp", use, frame_bytes_max=65_536))


def test_connections_have_a_limit_and_idle_ones_end() -> None:
    async def use(_runtime: DistributedRuntime, transport: dict[str, Any]) -> None:
        held = [await Raw.to(transport) for _ in range(2)]
        for raw in held:
            raw.send(framed(5))
            assert await raw.frame() == (6, None)
        further = await Raw.to(transport)
        kind, error = await further.frame()
        assert (kind, error["code"], error["retry"]) == (4, "overloaded", True)
        assert await further.is_closed()
        for raw in held:
            assert await raw.is_closed()
        again = await Raw.to(transport)
        again.send(framed(5))
        assert await again.frame() == (6, None)
        for raw in (*held, further, again):
            await raw.close()

    run(serve("tcp", use, connections_max=2, server_idle_s_max=1.0))


@pytest.mark.parametrize("is_empty", [False, True], ids=["one request", "pings without a payload"])
def test_who_sends_amid_an_answer_is_heard_out_but_not_without_limit(is_empty: bool) -> None:
    async def use(runtime: DistributedRuntime, transport: dict[str, Any]) -> None:
        request = {"id": "a", "endpoint": PATH, "instance_id": runtime.instance_id, "payload": 1}
        raw = await Raw.to(transport)
        raw.send(framed(1, request) * 3)
        assert [await raw.frame() for _ in range(6)] == [(2, 0), (3, None)] * 3
        raw.send(framed(1, {**request, "payload": 10**9}))
        assert await raw.frame() == (2, 0)
        more = framed(1, {**request, "pad": b"x" * 300_000})
        raw.send(framed(5) * 60_000 if is_empty else more)

        async def is_freed() -> bool:
            return runtime.stats()[PATH]["running"] == 0

        await eventually(is_freed, "the handler to be freed")
        await raw.close()

    run(serve("tcp", use, cancel_grace_s=0.05))


def test_http_without_a_client_of_ours() -> None:
    async def use(runtime: DistributedRuntime, transport: dict[str, Any]) -> None:
        url = f"{transport['url']}/{PATH}"
        headers = {"x-kvflash-instance": str(runtime.instance_id)}
        async with aiohttp.ClientSession() as session:
            for body in ({"json": 2}, {"data": msgpack.packb(2)}):
                async with session.post(url, headers=headers, **body) as answer:
                    assert answer.status == 200
                    assert answer.content_type == "application/x-kvflash-frames"
                    frames = FrameReader().feed(await answer.read())
                    assert frames == [(2, b"\0"), (2, b"\1"), (3, b"")]
            for where, head, body, status, code in (
                (url, headers, {"json": 0}, 500, "internal"),
                (url, {"x-kvflash-instance": "5"}, {"json": 1}, 404, "not_found"),
                (url + "x", headers, {"json": 1}, 404, "not_found"),
                (url, {}, {"json": 1}, 400, "invalid"),
                (url, {"x-kvflash-instance": "x"}, {"json": 1}, 400, "invalid"),
                (url, {**headers, "x-kvflash-deadline-ms": "0"}, {"json": 1}, 400, "invalid"),
                (url, headers, {"data": b"\xc1"}, 400, "invalid"),
                (url, {**headers, **JSON}, {"data": b"[" * 60_000}, 400, "invalid"),
                (url, headers, {"data": b"x" * 70_000}, 400, "invalid"),
            ):
                async with session.post(where, headers=head, **body) as answer:
                    error = json.loads(await answer.text())
                    assert (answer.status, error["code"]) == (status, code), error
                    assert error["message"]

    run(serve("http", use, frame_bytes_max=65_536))


async def on_socket(transport: dict[str, Any], data: bytes) -> bytes:
    """What the server sends back, up to the end of an error's JSON, or of the connection."""
    host, port = transport["url"].removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    try:
        return await reader.readuntil(b"}")
    except asyncio.IncompleteReadError as error:
        return error.partial
    finally:
        writer.close()


def test_http_connections_have_a_limit_and_idle_ones_end() -> None:
    async def use(runtime: DistributedRuntime, transport: dict[str, Any]) -> None:
        host, port = transport["url"].removeprefix("http://").split(":")
        head = f"POST /{PATH} HTTP/1.1\r\nhost: x\r\nx-kvflash-instance: 5\r\n"
        held = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        for reader, writer in held:
            writer.write(f"{head}content-length: 0\r\n\r\n".encode())
            assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
        for _ in range(100):
            answer = await on_socket(transport, b"")
            assert answer.startswith(b"HTTP/1.1 429 ")
            error = json.loads(answer.partition(b"\r\n\r\n")[2])
            assert (error["code"], error["retry"]) == ("overloaded", True)
            assert error["message"] == "2 connections, the maximum"
        with pytest.raises(OverloadedError, match="2 connections, the maximum"):
            client = runtime.endpoint(PATH.replace("/", ".")).client()
            _ = [item async for item in await client.generate(2)]
        for reader, _writer in held:
            await reader.read()
        assert await on_socket(transport, b"GET / HTTP/1.0\r\n\r\n") != b""
        for _reader, writer in held:
            writer.close()

    run(serve("http", use, connections_max=2, server_idle_s_max=1.0, cancel_grace_s=0.05))


def test_few_http_connections_are_let_in_by_counting_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A count costs as much as there are connections."""
    counted = 0

    def connections(server: web.Server) -> list[Any]:
        nonlocal counted
        counted += 1
        return list(server._connections)

    monkeypatch.setattr(web.Server, "connections", property(connections))

    async def use(runtime: DistributedRuntime, transport: dict[str, Any]) -> None:
        for _ in range(50):
            assert (await on_socket(transport, b"GET / HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.0 ")
        assert counted < 10

    run(serve("http", use, connections_max=20))


def test_refused_http_connections_of_one_turn_have_a_limit() -> None:
    limits = SimpleNamespace(connections_max=1, cancel_grace_s=0.05)
    runner = SimpleNamespace(server=SimpleNamespace(connections=[None]))
    server: Any = SimpleNamespace(_runner=runner, _limits=limits, _refused={}, _spare=0)
    aborted: list[int] = []
    for number in range(3 * http.REFUSED_MAX):
        entrance = Mock()
        entrance.transport.abort.side_effect = partial(aborted.append, number)
        http.HttpServer.enter(server, entrance)
    assert len(server._refused) == http.REFUSED_MAX
    assert aborted == list(range(2 * http.REFUSED_MAX))


def test_an_http_request_whose_body_does_not_come_ends() -> None:
    async def use(runtime: DistributedRuntime, transport: dict[str, Any]) -> None:
        head = f"POST /{PATH} HTTP/1.1\r\nhost: x\r\n"
        instance = f"x-kvflash-instance: {runtime.instance_id}\r\n"
        body = f"{instance}content-length: 9\r\n\r\n["
        answer = await on_socket(transport, f"{head}{body}".encode())
        assert answer.startswith(b"HTTP/1.1 408 ")
        error = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert error["code"] == "deadline"
        assert error["message"] == "the request's body did not arrive within 0.2 s"
        # Nor may a head take longer.
        assert await on_socket(transport, head.encode()) == b""

    run(serve("http", use, server_idle_s_max=0.2))


def test_a_worker_that_does_not_speak_our_language_is_an_error(
    environment: Environment,
) -> None:
    """Whatever comes back, the client raises; nothing hangs, nothing is silent."""
    environment("mem")
    answers = {
        "closes": b"",
        "cuts": framed(2, 1)[:-1],
        "html": b"HTTP/1.1 200 OK\r\n\r\n<html>",
        "deep": b"HTTP/1.1 500 Error\r\n\r\n" + b"[" * 60_000,
        "pong": framed(6),
        "garbage": struct.pack(">IB", 3, 2) + b"\xc1\xc1",
    }

    async def scenario() -> None:
        answer = b""

        async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(5)
            writer.write(answer)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(speak, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with DistributedRuntime("mem") as runtime:
            for kind in ("tcp", "http", "smoke"):
                transport = {
                    "kind": kind,
                    "address": f"127.0.0.1:{port}",
                    "url": f"http://127.0.0.1:{port}",
                }
                key = "v1/instances/t/odd/run/7"
                await runtime.announce(key, {"instance_id": 7, "transport": transport})
                client = runtime.endpoint("t.odd.run").client()

                async def is_known(kind: str = kind, client: Any = client) -> bool:
                    client.instance_ids()
                    found = client._instances.by_id.get(7)
                    return found is not None and found.transport["kind"] == kind

                await eventually(is_known, kind)
                for said in answers.values():
                    answer = said
                    with pytest.raises(Exception) as caught:
                        _ = [item async for item in await client.generate(1)]
                    assert type(caught.value).__module__ == "kvflash.errors", kind
        server.close()
        await server.wait_closed()

    run(scenario())
