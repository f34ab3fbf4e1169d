"""A component's events in a JetStream stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api

from kvflash.errors import InvalidArgumentError, TransportError
from kvflash.nats_login import Client, reaching
from kvflash.servers import NatsSettings
from kvflash.transport.base import LogState, Message
from kvflash.transport.nats_connection import message_bytes
from kvflash.transport.origin import Origin

logger = logging.getLogger(__name__)

# How long the server detects duplicates, so that a message sent twice is stored once.
_DUPLICATE_WINDOW_S = 120.0
# Limits of one pull request; at most twice as much is in flight.
_PULL_MESSAGES = 512
_PULL_BYTES = 16 * 1024 * 1024
# Received messages that were not fetched yet: pulled messages and the server's status messages.
# Above the limits the client drops messages, which shows as a hole, and they are read again.
_WAITING_MESSAGES_MAX = 4 * _PULL_MESSAGES
_WAITING_BYTES_MAX = 4 * _PULL_BYTES
_PULL_EXPIRES_S = 30.0
# How long after that a request that the server has not ended counts as lost.
_PULL_LATE_S = 5.0
# Unacknowledged messages after which the server stops sending.
_ACK_PENDING_MAX = 20_000
_ACK_WAIT_S = 30.0
# The server deletes a reader of a dead process after this time.
_INACTIVE_S = 3_600.0

_NOT_FOUND = nats.js.errors.NotFoundError
# Error code of the stream's own message limit, if it was created with one.
_TOO_LARGE = 10054
# Error code for a stream of that name with another configuration.
_NAME_IN_USE = 10058


class JetStreamLog:
    """A component's stream, with the subjects ``name.*``; messages are numbered as they are stored.

    The settings' retention and replicas apply only to a stream that this creates. All methods raise
    TransportError when the server can't be reached.
    """

    def __init__(self, client: Client, name: str, settings: NatsSettings) -> None:
        self._client = client
        self._js: JetStreamContext = client.jetstream(timeout=5.0)
        self._settings = settings
        self.name = name
        self._subject = f"{name}.queue"

    async def ensure(self) -> None:
        """Create the stream if it does not exist."""
        settings = self._settings
        config = api.StreamConfig(
            name=self.name,
            subjects=[f"{self.name}.*"],
            max_age=settings.stream_max_age_s,
            max_bytes=settings.stream_max_bytes,
            num_replicas=settings.replicas,
            duplicate_window=min(_DUPLICATE_WINDOW_S, settings.stream_max_age_s),
            discard=api.DiscardPolicy.OLD,
        )
        async with reaching(f"stream {self.name}"):
            try:
                await self._js.stream_info(self.name)
            except _NOT_FOUND:
                try:
                    await self._js.add_stream(config)
                except nats.js.errors.BadRequestError as error:
                    # Otherwise another process created it meanwhile with other settings.
                    if error.err_code != _NAME_IN_USE:
                        raise

    async def state(self) -> LogState:
        """The stream's bounds."""
        async with reaching(f"stream {self.name}"):
            info = await self._js.stream_info(self.name)
        limits, state = info.config, info.state
        first, last = state.first_seq, state.last_seq
        if state.messages == 0:
            first = last + 1
        used = ((state.bytes, limits.max_bytes), (state.messages, limits.max_msgs))
        fill = max(count / most if most and most > 0 else 0.0 for count, most in used)
        return LogState(str(info.created), first, last, limits.max_age or math.inf, fill)

    async def append(self, headers: Mapping[str, str], payload: bytes, *, key: str) -> int:
        """Store a message, once for each ``key``; returns its number.

        Raises InvalidArgumentError if it is larger than the server or the stream accepts.
        """
        named = {**headers, "Nats-Msg-Id": key}
        size, size_max = message_bytes(named, payload), self._client.max_payload
        if size > size_max:
            raise InvalidArgumentError(
                f"stream {self.name}: a message of {size} bytes; the server's max_payload is "
                f"{size_max}"
            )
        async with reaching(f"stream {self.name}"):
            # Otherwise the client would keep it, once more with every attempt.
            self._check_connected()
            try:
                ack = await self._js.publish(self._subject, payload, headers=named)
            except nats.js.errors.APIError as error:
                if error.err_code != _TOO_LARGE:
                    raise
                raise InvalidArgumentError(
                    f"stream {self.name}: a message of {size} bytes is above its max_msg_size"
                ) from error
        return ack.seq

    async def send(self, origin: Origin, sequence: int, payload: bytes) -> None:
        """Store a batch of events, once however often it is sent."""
        await self.append(origin.headers(sequence), payload, key=origin.key(sequence))

    async def open_reader(self, name: str, start: int) -> JetStreamReader:
        """Create a reader from message ``start`` on; replaces a reader of the same name."""
        config = api.ConsumerConfig(
            durable_name=name,
            deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=max(1, start),
            # One acknowledgement covers all earlier messages: they are applied in order.
            ack_policy=api.AckPolicy.ALL,
            ack_wait=_ACK_WAIT_S,
            max_ack_pending=_ACK_PENDING_MAX,
            inactive_threshold=_INACTIVE_S,
        )
        await self.drop_reader(name)
        async with reaching(f"consumer {name} of stream {self.name}"):
            await self._js.add_consumer(self.name, config)
            reader = JetStreamReader(self._client, self.name, name)
            await reader.start()
        return reader

    async def floors(self) -> dict[str, int]:
        """Last acknowledged message of each reader, by name."""
        found: dict[str, int] = {}
        async with reaching(f"consumers of stream {self.name}"):
            while True:
                page = await self._js.consumers_info(self.name, offset=len(found))
                fresh = {info.name: _floor(info) for info in page if info.name not in found}
                found.update(fresh)
                if len(page) < 256 or not fresh:
                    return found

    async def drop_reader(self, name: str) -> None:
        """Delete a reader; no error if it does not exist."""
        async with reaching(f"consumer {name} of stream {self.name}"):
            # A reader that leaves does not wait for a server to come back.
            self._check_connected()
            with contextlib.suppress(_NOT_FOUND):
                await self._js.delete_consumer(self.name, name)

    async def age_s(self, sequence: int) -> float | None:
        """Age of a message; None if it does not exist."""
        async with reaching(f"stream {self.name}"):
            # The client leaves out timestamps.
            told = await self._request("MSG.GET", json.dumps({"seq": sequence}).encode())
            if told.get("error", {}).get("code", 404) != 404:
                raise TransportError(f"stream {self.name}: {told['error'].get('description')}")
            stored = told.get("message", {}).get("time")
            if stored is None:
                return None
            now = (await self._request("INFO")).get("ts")
        # By the clock that stamped the message: this machine's clock may be an hour off, or jump.
        # Servers before 2.10 do not report theirs.
        now_s = datetime.now(timezone.utc).timestamp() if now is None else _seconds(now)
        return max(0.0, now_s - _seconds(stored))

    async def _request(self, call: str, body: bytes = b"") -> Any:
        subject = f"$JS.API.STREAM.{call}.{self.name}"
        return json.loads((await self._client.request(subject, body, timeout=5.0)).data)

    async def purge(self, last: int) -> None:
        """Delete all messages up to ``last``."""
        async with reaching(f"stream {self.name}"):
            # The server takes the first number to keep.
            await self._js.purge_stream(self.name, seq=last + 1)

    def _check_connected(self) -> None:
        if not self._client.is_connected:
            raise ConnectionError("the server is away")


def _seconds(time: str) -> float:
    """A server's timestamp in seconds since the epoch, to the second."""
    # Cut to a length and an offset that every supported Python parses.
    return datetime.fromisoformat(time[:19] + "+00:00").timestamp()


def _floor(info: api.ConsumerInfo) -> int:
    """The last message that a reader has processed, even before its first acknowledgement."""
    acked = info.ack_floor.stream_seq if info.ack_floor else 0
    return max(acked, (info.config.opt_start_seq or 1) - 1)


class JetStreamReader:
    """A durable pull consumer that prefetches messages while others are applied.

    Other routers see its last acknowledged message as its floor.
    """

    def __init__(self, client: Client, stream: str, name: str) -> None:
        self._client = client
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}"
        self._inbox = client.new_inbox()
        self._name = name
        self._waiting: asyncio.Queue[Msg] = asyncio.Queue(_WAITING_MESSAGES_MAX)
        self._subscription: Any
        self._wanted = 0
        # When the last request was sent, or anything was received.
        self._heard_s = 0.0
        self._last_reply: tuple[int, str] | None = None
        self._broken: TransportError | None = None

    async def start(self) -> None:
        """Subscribe; the first pull request is sent by the first fetch."""
        self._subscription = await self._client.subscribe(
            self._inbox,
            cb=self._waiting.put,
            pending_msgs_limit=_WAITING_MESSAGES_MAX,
            pending_bytes_limit=_WAITING_BYTES_MAX,
        )

    async def fetch(self, timeout_s: float) -> Sequence[Message]:
        """The next messages in order; empty after ``timeout_s``. Some may be missing or repeated.

        Raises TransportError if the server says that the reader or its stream is gone, or if it has
        lost the requests for messages: it would send none any more.
        """
        if self._broken is not None:
            raise self._broken
        loop = asyncio.get_running_loop()
        if self._wanted <= _PULL_MESSAGES // 2:
            await self._pull()
            self._heard_s = loop.time()
        messages: list[Message] = []
        end = loop.time() + timeout_s
        while not messages:
            try:
                raw = await asyncio.wait_for(self._waiting.get(), end - loop.time())
            except asyncio.TimeoutError:
                silent_s = loop.time() - self._heard_s
                if silent_s > _PULL_EXPIRES_S + _PULL_LATE_S:
                    what = f"consumer {self._name}: its requests are lost"
                    raise TransportError(f"{what}: no answer for {silent_s:.0f} s") from None
                return []
            self._heard_s = loop.time()
            try:
                self._take(raw, messages)
                while not self._waiting.empty():
                    self._take(self._waiting.get_nowait(), messages)
            except TransportError as error:
                if not messages:
                    raise
                # Return earlier messages first, so that the next reader starts after them.
                self._broken = error
        return messages

    async def ack(self, sequence: int) -> None:
        """Acknowledge all messages up to this one."""
        if self._last_reply is not None and self._last_reply[0] <= sequence:
            async with reaching(f"consumer {self._name}"):
                await self._client.publish(self._last_reply[1], b"+ACK")
            self._last_reply = None

    async def close(self) -> None:
        """Stop reading. The floor stays."""
        with contextlib.suppress(nats.errors.Error, OSError):
            await self._subscription.unsubscribe()

    async def _pull(self) -> None:
        request = {
            "batch": _PULL_MESSAGES,
            "max_bytes": _PULL_BYTES,
            "expires": int(_PULL_EXPIRES_S * 1e9),
        }
        async with reaching(f"consumer {self._name}"):
            await self._client.publish(self._next, json.dumps(request).encode(), reply=self._inbox)
        self._wanted += _PULL_MESSAGES

    def _take(self, raw: Msg, messages: list[Message]) -> None:
        headers = raw.headers or {}
        status = headers.get("Status") if not raw.data else None
        if status is not None:
            text = headers.get("Description", "")
            is_over = status in {"404", "408"} or (
                # The batch is complete, or a limit of bytes or requests was reached.
                status == "409" and ("max" in text.lower() or text == "Batch Completed")
            )
            if not is_over:
                raise TransportError(f"consumer {self._name}: {status} {text}")
            # The request has ended; the unsent rest is pulled again.
            left = int(headers.get("Nats-Pending-Messages", self._wanted))
            self._wanted = max(0, self._wanted - left)
            return
        self._wanted = max(0, self._wanted - 1)
        try:
            sequence = raw.metadata.sequence.stream
        except (nats.errors.NotJSMessageError, ValueError, OverflowError, OSError):
            # The client also converts the time: one far away is any of the last three.
            sequence = 0
        if sequence < 1:
            logger.warning("consumer %s: a message that is not the stream's: dropped", self._name)
            return
        self._last_reply = (sequence, raw.reply)
        messages.append(Message(sequence, headers, raw.data))
