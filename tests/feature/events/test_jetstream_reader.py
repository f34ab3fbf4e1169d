"""A reader of a JetStream stream, on messages that a test writes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast

import pytest
from nats.aio.msg import Msg

from kvflash.nats_login import Client
from kvflash.transport.jetstream import JetStreamReader
from service import DEADLINE_S


class Server:
    """The client of a server that answers what a test delivers, and the requests to it."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self._put: Callable[[Msg], Awaitable[None]] | None = None

    def new_inbox(self) -> str:
        return "inbox"

    async def subscribe(self, _subject: str, *, cb: Any, **_limits: int) -> None:
        self._put = cb

    async def publish(self, subject: str, _data: bytes, *, reply: str) -> None:
        assert reply == "inbox"
        self.requests.append(subject)

    async def deliver(self, reply: str, headers: dict[str, str] | None = None) -> None:
        assert self._put is not None
        data = b"" if headers else b"a batch"
        client = cast("Any", self)
        await self._put(Msg(client, "inbox", reply, data, headers))


def with_reader(check: Callable[[JetStreamReader, Server], Coroutine[Any, Any, None]]) -> None:
    async def work() -> None:
        server = Server()
        reader = JetStreamReader(cast("Client", server), "stream", "name")
        await reader.start()
        await check(reader, server)

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "elsewhere",
        "$JS.ACK.s.c.1.x.6.1.0",
        f"$JS.ACK.s.c.1.5.6.{10**22}.0",
        f"$JS.ACK.s.c.1.5.6.{10**26}.0",
        f"$JS.ACK.s.c.1.5.6.{10**32}.0",
        "$JS.ACK.s.c.1.-5.6.1.0",
        "$JS.ACK.s.c.1.0.6.1.0",
        f"$JS.ACK._.hash.s.c.1.5.6.{10**32}.0.x",
    ],
)
def test_a_message_that_is_not_the_streams_is_dropped(
    reply: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def check(reader: JetStreamReader, server: Server) -> None:
        await server.deliver(reply)
        await server.deliver("$JS.ACK.s.c.1.5.6.1700000000000000000.0")
        assert [message.sequence for message in await reader.fetch(1.0)] == [5]

    with_reader(check)
    assert caplog.text.count("a message that is not the stream's: dropped") == 1
