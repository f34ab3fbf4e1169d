"""The http request plane, for networks that only let HTTP through (format: docs/runtime.md)."""

from __future__ import annotations

import asyncio
import io
import json
import math
import socket
from collections import deque
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import aiohttp
from aiohttp import web

from kvflash.errors import (
    ClosedError,
    ConfigError,
    DeadlineError,
    DecodeError,
    InvalidArgumentError,
    KvflashError,
    OverloadedError,
    TransportError,
)
from kvflash.runtime.connection import watch_socket
from kvflash.runtime.frame import REFUSALS, Failure, FrameReader, Kind, Request, pack, unpack
from kvflash.runtime.limits import RuntimeLimits
from kvflash.runtime.plane import FailedError, GoneError, PlaneClient, PlaneServer, item_in

INSTANCE = "x-kvflash-instance"
REQUEST_ID = "x-kvflash-request-id"
DEADLINE = "x-kvflash-deadline-ms"
FRAMES = "application/x-kvflash-frames"
MSGPACK = "application/msgpack"

_STATUS = {
    "invalid": 400,
    "not_found": 404,
    "overloaded": 429,
    "draining": 503,
    "no_worker": 503,
    "deadline": 504,
    "unreachable": 502,
}
# Head and separators around a request's payload.
REQUEST_MARGIN_BYTES = 1_024
READ_BYTES = 64 * 1024
# Connections beyond the limit that are kept until their clients have read the refusal.
REFUSED_MAX = 64
# The request was not sent.
_UNSENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class HttpServer(PlaneServer):
    """Serves a runtime's endpoints over HTTP/1.1 on one port."""

    url = ""
    _runner: web.AppRunner

    async def start(self) -> None:
        self._refused: dict[_Entrance, None] = {}
        # Connections that may come until they are counted again: aiohttp copies a list of all.
        self._spare = 0
        app = web.Application(client_max_size=self._limits.frame_bytes_max)
        app.router.add_post("/{namespace}/{component}/{endpoint}", self._answer)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=self._limits.server_idle_s_max,
            shutdown_timeout=self._limits.cancel_grace_s,
        )
        await self._runner.setup()
        try:
            self.url = f"http://{await self._listen(lambda: _Entrance(self))}"
        except ConfigError:
            await self._runner.cleanup()
            raise

    async def open(self, endpoint: str) -> dict[str, Any]:
        return {"kind": "http", "url": self.url}

    async def close(self) -> None:
        self._listener.close()
        for entrance in list(self._refused):
            entrance.transport.abort()
        await self._runner.cleanup()

    def enter(self, entrance: _Entrance) -> None:
        """Let aiohttp serve a new connection, or refuse it at the limit."""
        server, limit = self._runner.server, self._limits.connections_max
        assert server is not None, "the runner was set up"
        if not self._spare:
            self._spare = max(0, limit - len(server.connections))
        if self._spare:
            self._spare -= 1
            watch_socket(entrance.transport.get_extra_info("socket"), self._limits)
            handler = server()
            entrance.transport.set_protocol(handler)
            handler.connection_made(entrance.transport)
            return
        error = OverloadedError(f"{limit} connections, the maximum")
        entrance.refuse(Failure.of(error, retry=True), self._limits.cancel_grace_s)
        if len(self._refused) >= REFUSED_MAX:
            # Its connection is lost only after all connections of this turn have come.
            oldest = next(iter(self._refused))
            del self._refused[oldest]
            oldest.transport.abort()
        self._refused[entrance] = None

    def left(self, entrance: _Entrance) -> None:
        """A refused connection has ended."""
        self._refused.pop(entrance, None)

    async def _answer(self, http: web.Request) -> web.StreamResponse:
        answer = _Answer(http)
        try:
            request = await _request(http, self._limits)
            running = self._serving.begin(request, answer.send)
        except REFUSALS as error:
            return _refusal(Failure.refusing(error))
        except DeadlineError as error:
            refusal = _refusal(Failure.of(error), 408)
            refusal.force_close()
            return refusal
        try:
            await asyncio.wait({running.task})
        except asyncio.CancelledError:
            # The client disconnected.
            running.abandon()
            raise
        return await answer.end()


class _Entrance(asyncio.Protocol):
    """A new connection: passed on to aiohttp, or refused."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._server.enter(self)

    def refuse(self, failure: Failure, grace_s: float) -> None:
        """Answer, and read on for a while: closing at once could destroy the answer on its way."""
        body = json.dumps(asdict(failure)).encode()
        head = (
            f"HTTP/1.1 {_STATUS[failure.code]} {failure.code}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            "retry-after: 1\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.write_eof()
        asyncio.get_running_loop().call_later(grace_s, self.transport.close)

    def connection_lost(self, _exc: Exception | None) -> None:
        self._server.left(self)


class _Answer:
    """Sends a request's frames: a status if the first one is an error, else a stream."""

    def __init__(self, http: web.Request) -> None:
        self._http = http
        self._response: web.StreamResponse | None = None

    async def send(self, data: bytes) -> None:
        if self._response is None and data[4] == Kind.ERROR:
            self._response = _refusal(Failure.parse(unpack(data[5:])))
        if isinstance(self._response, web.Response):
            return
        try:
            if self._response is None:
                self._response = web.StreamResponse(headers={"content-type": FRAMES})
                await self._response.prepare(self._http)
            await self._response.write(data)
        except ConnectionError as error:
            raise GoneError(str(error)) from error

    async def end(self) -> web.StreamResponse:
        if self._response is None:
            return _refusal(Failure("internal", "the handler ended without an answer"))
        if not isinstance(self._response, web.Response):
            with suppress(ConnectionError):
                await self._response.write_eof()
        return self._response


def _refusal(failure: Failure, status: int | None = None) -> web.Response:
    headers = {"retry-after": "1"} if failure.code in ("overloaded", "draining") else {}
    status = status or _STATUS.get(failure.code, 500)
    return web.json_response(asdict(failure), status=status, headers=headers)


async def _request(http: web.Request, limits: RuntimeLimits) -> Request:
    """Parse a request.

    A wrong header or body is an InvalidArgumentError or DecodeError; a body that does not arrive
    within server_idle_s_max is a DeadlineError.
    """
    instance, deadline = http.headers.get(INSTANCE, ""), http.headers.get(DEADLINE)
    for name, text in ((INSTANCE, instance), (DEADLINE, deadline)):
        if text is not None and not (text.isascii() and text.isdecimal() and len(text) < 20):
            raise InvalidArgumentError(f"header {name} must be a number, got {text!r}")
    try:
        body = await asyncio.wait_for(http.read(), limits.server_idle_s_max)
    except asyncio.TimeoutError as error:
        raise DeadlineError(
            f"the request's body did not arrive within {limits.server_idle_s_max:g} s"
        ) from error
    except web.HTTPRequestEntityTooLarge as error:
        raise InvalidArgumentError(
            f"request may have at most {limits.frame_bytes_max} bytes, "
            f"got {http.content_length or 'more'}"
        ) from error
    if http.content_type == "application/json":
        try:
            payload = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise DecodeError(f"body is not JSON: {error}") from error
    else:
        payload = unpack(body)
    return Request.parse(
        {
            "id": http.headers.get(REQUEST_ID, "-"),
            "endpoint": "/".join(http.match_info.values()),
            "instance_id": int(instance),
            "payload": payload,
            "deadline_ms": None if deadline is None else int(deadline),
        }
    )


def id_in_header(request_id: str) -> str:
    """Return a request's id if a header can hold it, else raise InvalidArgumentError."""
    if any(char in request_id for char in "\r\n\0"):
        raise InvalidArgumentError(
            "request_id goes to the worker in a header and must not contain line breaks or NUL, "
            f"got {request_id!r}"
        )
    return request_id


class HttpClient(PlaneClient):
    """Calls instances over HTTP."""

    #: Upper bound for the lifetime of an idle connection, whatever the limits say.
    idle_s_max = math.inf

    def __init__(self, limits: RuntimeLimits) -> None:
        super().__init__(limits)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=min(limits.client_idle_s_max, self.idle_s_max),
                socket_factory=self._socket,
            ),
            # The duration of an answer is unlimited here; the runtime has its own limits.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_timeout_s),
            trace_configs=[_reuse_trace()],
            auto_decompress=False,
            read_bufsize=limits.receive_buffer_bytes // 2,
        )

    async def ask(self, transport: dict[str, Any], request: Request) -> HttpReply:
        """Also refuses an id that is not valid in a header."""
        body = pack(request.payload, "request")
        size, size_max = len(body) + REQUEST_MARGIN_BYTES, self.limits.frame_bytes_max
        if size > size_max:
            raise InvalidArgumentError(f"request may have at most {size_max} bytes, got {size}")
        headers = {
            "content-type": MSGPACK,
            INSTANCE: str(request.instance_id),
            REQUEST_ID: id_in_header(request.id),
        }
        if request.deadline_ms is not None:
            headers[DEADLINE] = str(request.deadline_ms)
        url = f"{transport['url']}/{request.endpoint}"
        return HttpReply(self, url, headers, body)

    async def post(self, url: str, headers: dict[str, str], body: bytes) -> aiohttp.ClientResponse:
        is_reused = asyncio.Event()
        post = partial(self._session.post, url, headers=headers, trace_request_ctx=is_reused)
        try:
            return await post(data=io.BytesIO(body))
        except aiohttp.ServerDisconnectedError as error:
            # Its message is the beginning of an answer, if there was one.
            if not is_reused.is_set() or not isinstance(error.message, str):
                raise
        try:
            # The server may have just closed the kept connection: retry once.
            return await post(data=io.BytesIO(body))
        except _UNSENT as error:
            # It may have read the request before it went.
            raise TransportError(
                f"the worker died with the request: {error}", was_sent=True
            ) from error

    async def close(self) -> None:
        await super().close()
        await self._session.close()

    def _socket(self, info: tuple[Any, ...]) -> socket.socket:
        made = socket.socket(info[0], info[1], info[2])
        watch_socket(made, self.limits)
        return made


def _reuse_trace() -> aiohttp.TraceConfig:
    """Sets the event that comes with a request whose connection has been used before."""

    async def reused(_session: Any, context: Any, _params: Any) -> None:
        context.trace_request_ctx.set()

    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(reused)
    return trace


class HttpReply:
    """An answer on its way."""

    def __init__(self, client: HttpClient, url: str, headers: dict[str, str], body: bytes) -> None:
        sending = asyncio.get_running_loop().create_task(client.post(url, headers, body))
        client.replies.add(self)
        # An answer may stay unread and open; asyncio would then log its failure.
        sending.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._sending: asyncio.Task[aiohttp.ClientResponse] | None = sending
        self._response: aiohttp.ClientResponse | None = None
        self._reader = FrameReader(client.limits.frame_bytes_max)
        self._frames: deque[tuple[int, bytes]] = deque()

    async def receive(self) -> bytes | None:
        try:
            if self._response is None:
                await self._begin()
            return await self._receive()
        except KvflashError:
            raise
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise TransportError(
                str(error) or type(error).__name__, was_sent=not isinstance(error, _UNSENT)
            ) from error

    async def _receive(self) -> bytes | None:
        """The next item of an answer that has begun; None at its end."""
        kind, payload = await self._next()
        if kind == Kind.END:
            await self._finish()
        return item_in(kind, payload, "the worker")

    def close(self) -> None:
        sending, self._sending, self._response = self._sending, None, None
        if sending is not None:
            sending.cancel()
            sending.add_done_callback(_drop)

    async def _begin(self) -> None:
        if self._sending is None:
            raise ClosedError("the stream is closed")
        try:
            # Reading may be cancelled; it then handles the request itself.
            response = await asyncio.shield(self._sending)
        except asyncio.CancelledError:
            if self._sending is None:
                raise ClosedError("the stream was closed meanwhile") from None
            raise
        if not self._is_answer(response):
            text = await response.content.read(READ_BYTES)
            response.close()
            try:
                fields = json.loads(text)
            except (ValueError, RecursionError):
                fields = None
            said = f"HTTP status {response.status}: {text[:200].decode(errors='replace')}"
            fields = fields if isinstance(fields, dict) else {}
            raise FailedError(self._refusal(response.status, fields, said))
        self._response = response

    def _is_answer(self, response: aiohttp.ClientResponse) -> bool:
        return response.status == 200 and response.content_type == FRAMES

    def _refusal(self, status: int, fields: dict[str, Any], said: str) -> Failure:
        """The failure in a refusal's JSON object, else one with the words of the response."""
        return Failure.parse(fields) if "code" in fields else Failure("internal", said)

    async def _next(self) -> tuple[int, bytes]:
        while not self._frames:
            data = await self._read()
            if not data:
                raise TransportError("the answer broke off before its end", was_sent=True)
            self._frames.extend(self._reader.feed(data))
        return self._frames.popleft()

    async def _read(self) -> bytes:
        """Some bytes of the body; empty at its end."""
        if self._response is None:
            raise ClosedError("the stream is closed")
        return await self._response.content.readany()

    async def _finish(self) -> None:
        """Read the end of the body, so that the connection can be reused."""
        response, self._response, self._sending = self._response, None, None
        if response is not None:
            with suppress(aiohttp.ClientError, OSError):
                await response.content.read(1)
            response.release()


def _drop(sending: asyncio.Task[aiohttp.ClientResponse]) -> None:
    if not sending.cancelled() and sending.exception() is None:
        sending.result().close()


make_server, make_client = HttpServer, HttpClient
