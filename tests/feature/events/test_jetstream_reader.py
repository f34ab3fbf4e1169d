"""A reader of a JetStream stream, on messages that a test writes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast

import pytest
from nats.aio.msg import Msg

from kvflash.errors import TransportError
from kvflash.nats_login import Client
from kvflash.transport.jetstream import JetStreamReader


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

    asyncio.run(work())


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


def test_requests_that_are_lost_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server ends every request after 30 s, unless it was restarted meanwhile."""

    async def check(reader: JetStreamReader, server: Server) -> None:
        loop = asyncio.get_running_loop()
        time, passed_s = loop.time, 0.0
        monkeypatch.setattr(loop, "time", lambda: time() + passed_s)
        for _ in range(3):
            assert list(await reader.fetch(0.01)) == []
            passed_s += 34.0
            assert list(await reader.fetch(0.01)) == []
            await server.deliver("", {"Status": "408", "Description": "Request Timeout"})
            assert list(await reader.fetch(0.01)) == []
        assert list(await reader.fetch(0.01)) == []
        assert len(server.requests) == 4
        passed_s += 34.0
        await server.deliver("$JS.ACK.s.c.1.5.6.1700000000000000000.0")
        assert [message.sequence for message in await reader.fetch(0.01)] == [5]
        passed_s += 34.0
        assert list(await reader.fetch(0.01)) == []
        passed_s += 2.0
        with pytest.raises(TransportError, match="its requests are lost: no answer for 36 s"):
            await reader.fetch(0.01)

    with_reader(check)
