"""NATS is down: the messages about it, and a clean exit in the meantime."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvflash import DistributedRuntime, TransportError
from kvflash.publisher.brokered import BrokerOutlet, Served
from kvflash.runtime.nats import connect as runtime_connect
from kvflash.servers import NatsSettings
from kvflash.transport.jetstream import JetStreamLog
from kvflash.transport.jetstream_writer import JetStreamWriter
from kvflash.transport.nats_connection import connect
from servers import NatsServer
from service import until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server of the test's own, that it may kill."""
    with closing(NatsServer(tmp_path)) as server:
        yield server


def test_a_connection_whose_server_is_away_closes_with_all_its_tasks(server: NatsServer) -> None:
    async def scenario() -> None:
        settings = NatsSettings.from_env({"NATS_SERVER": server.url})
        client = await connect(settings, name="test")
        log = JetStreamLog(client, "s", settings)

        async def hear(_message: object) -> None: ...

        await client.subscribe("s", cb=hear)
        await client.flush()
        server.kill()
        await asyncio.to_thread(until, lambda: not client.is_connected, "the end to be seen")
        # A queued message that no server will take.
        await client.publish("s", b"x")
        with pytest.raises(TransportError, match="the server is away"):
            await log.drop_reader("r")
        await client.close()
        # Cancelled ones need a turn.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait_for(asyncio.gather(*others, return_exceptions=True), 30)

    asyncio.run(scenario())


def test_a_writer_tells_once_that_events_are_not_stored(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvflash.transport.jetstream_writer")
    server.kill()
    settings = NatsSettings.from_env({"NATS_SERVER": server.url})
    writer = JetStreamWriter("s", headers=lambda _n: {}, key=str, settings=settings)
    with closing(writer):
        writer.put(0, b"a")
        until(lambda: writer.counts["errors"] > 2, "some attempts")
        server.start()
        assert writer.flush(30)
    gone, back = (record.getMessage() for record in caplog.records)
    assert gone.startswith("events are not stored: ")
    assert f"trying again (NATS_SERVER: {server.url})" in gone
    assert back.startswith("events are stored again after ")


def test_the_broker_of_requests_tells_once_that_it_is_away(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "kvflash.nats_login")
    monkeypatch.setenv("NATS_SERVER", server.url)
    monkeypatch.setattr("kvflash.runtime.nats.RECONNECT_PAUSE_S", 0.05)

    def told(level: int) -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno == level]

    async def scenario() -> None:
        client = await runtime_connect()
        server.kill()
        await asyncio.to_thread(until, lambda: len(told(logging.DEBUG)) > 3, "some attempts")
        await asyncio.to_thread(server.start)
        await asyncio.to_thread(until, lambda: told(logging.INFO), "the connection")
        await client.close()

    asyncio.run(scenario())
    # The end of the connection and its absence are logged.
    *first, gone = told(logging.WARNING)
    [back] = told(logging.INFO)
    assert len(first) <= 1
    assert server.url in gone and gone.endswith("; trying again")
    assert back.startswith("nats: connected again after ")


def test_a_fault_in_a_handler_of_messages_is_told(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NATS_SERVER", server.url)

    async def fail(_message: object) -> None:
        raise LookupError("no such thing")

    async def scenario() -> None:
        client = await runtime_connect()
        await client.subscribe("s", cb=fail)
        await client.publish("s", b"x")
        await asyncio.to_thread(until, lambda: "no such thing" in caplog.text, "the fault")
        await client.close()

    asyncio.run(scenario())
    [told] = caplog.records
    assert told.getMessage() == "nats: a message could not be handled"


def test_a_publisher_tells_once_that_nothing_is_sent(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvflash.publisher.brokered")
    monkeypatch.setattr("kvflash.publisher.brokered._POLL_S", 0.01)
    monkeypatch.setattr("kvflash.publisher.brokered._RETRY_S", 0.01)
    attempts, is_known = 0, threading.Event()

    def count(*_: object) -> None:
        nonlocal attempts
        attempts += 1

    async def scenario() -> BrokerOutlet:
        async with DistributedRuntime("mem") as runtime:
            return BrokerOutlet(
                runtime.namespace("ns").component("c"),
                instance_id=1,
                dp_rank=0,
                block_size=4,
                served=lambda: Served("m") if is_known.is_set() else None,
                has_local_index=True,
                settings=NatsSettings.from_env({"NATS_SERVER": server.url}),
            )

    outlet = asyncio.run(scenario())
    make = BrokerOutlet._make
    monkeypatch.setattr(BrokerOutlet, "_make", lambda *args: (count(), make(*args))[1])
    with closing(outlet):
        server.kill()
        is_known.set()
        until(lambda: attempts > 2, "some attempts")
        server.start()
        until(lambda: "events are sent after" in caplog.text, "the connection")
    assert caplog.text.count("events are not sent: no NATS server answers at") == 1
