"""The nats request plane: messages through a broker, which may lose them.

So the plane does itself what a connection would: the client acknowledges what it has read, with at
most WINDOW_BYTES in flight; both sides send signs of life, and a silence of SILENCE_S_MAX or a
missing message ends a request.

Message to the instance's subject: 1 byte kind (part, last part, signs). A part continues with the
request's name (16 bytes) and data; signs are msgpack [[name, bytes read, or -1 to cancel], ...].
Message to the client's subject: 4 bytes number, bytes of frames.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import struct
import time
import weakref
from collections import deque
from typing import Any

import msgpack  # type: ignore[import-untyped]

from kvflash.errors import (
    ClosedError,
    DecodeError,
    OverloadedError,
    TransportError,
)
from kvflash.runtime.frame import HEAD_BYTES, REFUSALS, Failure, FrameReader, Kind, Request, unpack
from kvflash.runtime.limits import RuntimeLimits
from kvflash.runtime.plane import FailedError, GoneError, PlaneClient, PlaneServer, item_in
from kvflash.runtime.serving import Running, Serving
from kvflash.servers import NatsSettings, needing_nats

with needing_nats("the nats request plane"):
    from nats.errors import Error as NatsError

    from kvflash import nats_login
    from kvflash.nats_login import Client as NatsConnection

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
RECONNECT_PAUSE_S = 1
# Data that may wait to be sent while the broker is away; beyond it sending fails.
PENDING_BYTES_MAX = 8 * 1024 * 1024
_OTHERWISE = "start one (nats-server), set NATS_SERVER, or use the request plane tcp"

WINDOW_BYTES = 256 * 1024
PART_BYTES = 64 * 1024
SILENCE_S_MAX = 10.0
# Requests of which only some parts have arrived.
PARTIAL_MAX = 1_024
PARTIAL_BYTES_MAX = 256 * 1024 * 1024

_PART, _LAST_PART, _SIGNS = b"\1", b"\2", b"\3"
_NAME_BYTES = 16
_NUMBER = struct.Struct(">I")
_NEVER_MIND = -1


def silence_s(limits: RuntimeLimits) -> float:
    """How long the peer may be silent."""
    return min(limits.peer_silence_s, SILENCE_S_MAX)


async def connect() -> NatsConnection:
    """Connect to NATS_SERVER; see :func:`kvflash.nats_login.connect`."""
    return await nats_login.connect(
        NatsSettings.from_env(),
        who="nats",
        otherwise=_OTHERWISE,
        timeout_s=CONNECT_TIMEOUT_S,
        max_reconnect_attempts=-1,
        reconnect_time_wait=RECONNECT_PAUSE_S,
        pending_size=PENDING_BYTES_MAX,
    )


async def _leave(connection: NatsConnection) -> None:
    """Leave the broker once it has received everything sent."""
    try:
        await connection.flush()
    except (NatsError, OSError, asyncio.TimeoutError) as error:
        logger.warning("nats: %s", error)
    await connection.close()


class NatsServer(PlaneServer):
    """Serves a runtime's endpoints, each at its own subject; addresses are the broker's."""

    def __init__(self, serving: Serving, *, host: str, port: int) -> None:
        super().__init__(serving, host=host, port=port)
        self._connection: NatsConnection
        # Requests of which some parts have arrived, and when the last one did.
        self._partial: dict[bytes, tuple[FrameReader, float]] = {}
        self._answers: dict[bytes, _Answer] = {}
        # An endpoint may be served again: a second subscription would repeat its requests.
        self._subjects: set[str] = set()
        self._ticking: asyncio.Task[None]

    async def start(self) -> None:
        self._connection = await connect()
        self._ticking = asyncio.get_running_loop().create_task(self._tick())

    async def open(self, endpoint: str) -> dict[str, Any]:
        subject = f"kvflash.{endpoint.replace('/', '.')}.{self._serving.instance_id}"
        async with nats_login.reaching("NATS"):
            if subject not in self._subjects:
                await self._connection.subscribe(subject, cb=self._receive)
                self._subjects.add(subject)
            await self._connection.flush()
        return {"kind": "nats", "subject": subject}

    async def close(self) -> None:
        self._ticking.cancel()
        await asyncio.gather(self._ticking, return_exceptions=True)
        await _leave(self._connection)

    async def _receive(self, message: Any) -> None:
        data = message.data
        if data[:1] == _SIGNS:
            self._read_signs(data[1:])
        elif data[:1] in (_PART, _LAST_PART):
            await self._take_part(message.reply, data)

    def _read_signs(self, data: bytes) -> None:
        try:
            # Only names that are bytes: bytes(n) of a number n would allocate n bytes.
            signs = [
                (name, int(count))
                for name, count in msgpack.unpackb(data)
                if isinstance(name, bytes)
            ]
        except (ValueError, TypeError, OverflowError, msgpack.UnpackException):
            logger.warning("nats: a heartbeat can't be read")
            return
        for name, count in signs:
            answer = self._answers.get(name)
            if answer is not None:
                answer.sign(count)
            elif count == _NEVER_MIND:
                self._partial.pop(name, None)

    async def _take_part(self, reply: str, data: bytes) -> None:
        name = data[1 : 1 + _NAME_BYTES]
        reader, _ = self._partial.get(name) or (FrameReader(self._limits.frame_bytes_max), 0.0)
        self._partial[name] = (reader, time.monotonic())
        answer = _Answer(self, reply)
        try:
            frames = reader.feed(data[1 + _NAME_BYTES :])
            if data[:1] == _PART:
                self._check_partial()
                return
            del self._partial[name]
            if len(frames) != 1 or frames[0][0] != Kind.REQUEST:
                raise DecodeError("a request arrived in parts that do not fit together")
            request = Request.parse(unpack(frames[0][1]))
            answer.running = self._serving.begin(request, answer.send)
        except REFUSALS as error:
            self._partial.pop(name, None)
            try:
                await answer.send(Failure.refusing(error).pack())
            except GoneError as gone:
                logger.warning("nats: %s", gone)
            return
        self._answers[name] = answer
        answer.running.task.add_done_callback(lambda _: self._answers.pop(name, None))

    def _check_partial(self) -> None:
        """Refuse another part with an OverloadedError if too much is buffered."""
        held = sum(reader.waiting_bytes for reader, _ in self._partial.values())
        if len(self._partial) > PARTIAL_MAX or held > PARTIAL_BYTES_MAX:
            raise OverloadedError(
                f"{len(self._partial)} requests of {held} bytes are incomplete; at most "
                f"{PARTIAL_MAX} and {PARTIAL_BYTES_MAX} may be"
            )

    async def publish(self, subject: str, data: bytes) -> None:
        """Send a message; GoneError if the broker is gone."""
        try:
            await self._connection.publish(subject, data)
        except (NatsError, OSError) as error:
            raise GoneError(f"NATS: {error or type(error).__name__}") from error

    async def _tick(self) -> None:
        """Send signs of life, and drop silent clients."""
        silence = silence_s(self._limits)
        while True:
            await asyncio.sleep(silence / 4)
            oldest = time.monotonic() - silence
            for answer in list(self._answers.values()):
                await answer.tick(oldest)
            for name in [n for n, (_, heard) in self._partial.items() if heard < oldest]:
                del self._partial[name]


class _Answer:
    def __init__(self, server: NatsServer, reply: str) -> None:
        self._server = server
        self._reply = reply
        self._number = 0
        self._sent = 0
        self._read = 0
        self._heard = time.monotonic()
        self._news = asyncio.Event()
        self._is_gone = False
        self._is_sending = asyncio.Lock()
        self.running: Running | None = None

    async def send(self, data: bytes) -> None:
        """Send a frame, in as many messages as needed; waits for the client to read."""
        async with self._is_sending:
            for start in range(0, len(data), PART_BYTES):
                while self._sent - self._read >= WINDOW_BYTES and not self._is_gone:
                    self._news.clear()
                    await self._news.wait()
                if self._is_gone:
                    raise GoneError("the client is gone")
                await self._publish(data[start : start + PART_BYTES])

    async def tick(self, oldest: float) -> None:
        if self._heard < oldest:
            self.sign(_NEVER_MIND)
            return
        try:
            # Empty, so that it fits between two parts of a frame and into a full window.
            await self._publish(b"")
        except GoneError as error:
            logger.warning("%s", error)

    def sign(self, count: int) -> None:
        """Take the client's acknowledgement of how much it has read."""
        self._heard = time.monotonic()
        if count == _NEVER_MIND:
            self._is_gone = True
            if self.running is not None:
                self.running.abandon()
        else:
            self._read = max(self._read, count)
        self._news.set()

    async def _publish(self, part: bytes) -> None:
        # Count before waiting: an acknowledgement may arrive in between.
        number, self._number = self._number, (self._number + 1) & 0xFFFFFFFF
        self._sent += len(part)
        await self._server.publish(self._reply, _NUMBER.pack(number) + part)


class NatsClient(PlaneClient):
    """Calls instances through the broker."""

    def __init__(self, limits: RuntimeLimits) -> None:
        super().__init__(limits)
        self._connection: NatsConnection | None = None
        self._connecting = asyncio.Lock()
        self._inbox = f"_INBOX.kvflash.{secrets.token_hex(12)}"
        self._replies: weakref.WeakValueDictionary[str, NatsReply] = weakref.WeakValueDictionary()
        self._ticking: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[None]] = set()

    async def ask(self, transport: dict[str, Any], request: Request) -> NatsReply:
        data = request.pack(self.limits.frame_bytes_max)
        async with self._connecting:
            self._check_open()
            if self._connection is None:
                self._connection = await self._connect()
                self._ticking = asyncio.get_running_loop().create_task(self._tick())
        name, subject = secrets.token_bytes(_NAME_BYTES), str(transport["subject"])
        reply = NatsReply(self, subject, name)
        self._replies[name.hex()] = reply
        self.replies.add(reply)
        inbox = f"{self._inbox}.{name.hex()}"
        try:
            for start in range(0, len(data), PART_BYTES):
                kind = _LAST_PART if start + PART_BYTES >= len(data) else _PART
                part = kind + name + data[start : start + PART_BYTES]
                await self.publish(subject, part, inbox)
        except BaseException:
            reply.close()
            raise
        return reply

    async def close(self) -> None:
        await super().close()
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, *self._sending, return_exceptions=True)
        if self._connection is not None:
            await _leave(self._connection)

    async def publish(self, subject: str, data: bytes, reply: str = "") -> None:
        """Send a message; TransportError if the broker is gone."""
        assert self._connection is not None
        async with nats_login.reaching("NATS"):
            await self._connection.publish(subject, data, reply)

    def sign(self, subject: str, name: bytes, count: int) -> None:
        """Acknowledge soon how much of an answer was read."""
        task = asyncio.get_running_loop().create_task(self._sign(subject, [(name, count)]))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _sign(self, subject: str, signs: list[tuple[bytes, int]]) -> None:
        try:
            await self.publish(subject, _SIGNS + msgpack.packb(signs))
        except TransportError as error:
            logger.warning("%s", error)

    async def _connect(self) -> NatsConnection:
        connection = await connect()
        try:
            async with nats_login.reaching("NATS"):
                await connection.subscribe(f"{self._inbox}.*", cb=self._receive)
            # It may have been closed meanwhile, and would not close this connection any more.
            self._check_open()
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _receive(self, message: Any) -> None:
        reply = self._replies.get(message.subject.rpartition(".")[2])
        if reply is not None:
            if "Status" in (message.headers or {}):
                reply.fail_alone()
            else:
                reply.take(message.data)

    async def _tick(self) -> None:
        """Send signs of life, and notice silent servers."""
        silence = silence_s(self.limits)
        while True:
            await asyncio.sleep(silence / 4)
            oldest = time.monotonic() - silence
            signs: dict[str, list[tuple[bytes, int]]] = {}
            for reply in list(self._replies.values()):
                if reply.heard < oldest:
                    reply.fail(TransportError(f"nothing came for {silence:g} s", was_sent=True))
                else:
                    signs.setdefault(reply.subject, []).append((reply.name, reply.read))
            for subject, some in signs.items():
                await self._sign(subject, some)


class NatsReply:
    """An answer on its way."""

    def __init__(self, client: NatsClient, subject: str, name: bytes) -> None:
        self._client = client
        self.subject = subject
        self.name = name
        self.heard = time.monotonic()
        self.read = 0
        self._told = 0
        self._number = 0
        # Bytes of the frames that were read.
        self._taken = 0
        self._reader = FrameReader(client.limits.frame_bytes_max)
        self._frames: deque[tuple[int, bytes]] = deque()
        self._failure: Exception | None = None
        self._is_open = True
        self._news = asyncio.Event()

    async def receive(self) -> bytes | None:
        while not self._frames:
            if self._failure is not None:
                raise self._failure
            if not self._is_open:
                raise ClosedError("the stream is closed")
            self._news.clear()
            await self._news.wait()
        kind, payload = self._frames.popleft()
        self._taken += HEAD_BYTES + len(payload)
        self._acknowledge()
        if kind != Kind.DATA:
            self._end()
        return item_in(kind, payload, self.subject)

    def close(self) -> None:
        if self._is_open:
            self._client.sign(self.subject, self.name, _NEVER_MIND)
            self._end()

    def take(self, data: bytes) -> None:
        self.heard = time.monotonic()
        if self._failure is not None or not self._is_open:
            return
        if len(data) < _NUMBER.size or _NUMBER.unpack_from(data)[0] != self._number:
            self.fail(TransportError(f"{self.subject}: a message was lost", was_sent=True))
            return
        self._number = (self._number + 1) & 0xFFFFFFFF
        try:
            self._frames.extend(self._reader.feed(data[_NUMBER.size :]))
        except DecodeError as error:
            self.fail(DecodeError(f"{self.subject}: {error}"))
            return
        self._acknowledge()
        self._news.set()

    def fail(self, error: Exception) -> None:
        """End the answer with an error, after the items received before."""
        self._failure = self._failure or error
        self._news.set()

    def fail_alone(self) -> None:
        """End the answer: no server is subscribed, so without data none saw the request."""
        why = f"no subscriber at {self.subject}"
        unsent = FailedError(Failure("unreachable", why, retry=True))
        self.fail(TransportError(why, was_sent=True) if self._number else unsent)

    def _acknowledge(self) -> None:
        """Acknowledge what was read, and the received part of an incomplete frame."""
        self.read = self._taken + self._reader.waiting_bytes
        if self.read - self._told >= WINDOW_BYTES // 4 and self._is_open:
            self._told = self.read
            self._client.sign(self.subject, self.name, self.read)

    def _end(self) -> None:
        self._is_open = False
        self._client._replies.pop(self.name.hex(), None)
        self._news.set()


make_server, make_client = NatsServer, NatsClient
