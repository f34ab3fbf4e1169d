"""NATS is down: the messages about it, and a clean exit in the meantime."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgpack
import pytest

from kvflash import ClosedError, InvalidArgumentError, TransportError
from kvflash.nats_login import Client
from kvflash.publisher.brokered import Served
from kvflash.runtime.nats import connect as runtime_connect
from kvflash.servers import NatsSettings
from kvflash.transport import names
from kvflash.transport.jetstream import JetStreamLog
from kvflash.transport.local_index import Answer, join, question
from kvflash.transport.nats_connection import connect
from servers import NatsServer, outlet
from service import until
from wire import Wire


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
    caplog.set_level(logging.INFO, "kvflash.publisher.brokered")
    with closing(outlet(settings=NatsSettings.from_env({"NATS_SERVER": server.url}))) as writer:
        writer.put(b"a")
        assert writer.flush(30)
        server.kill()
        writer.put(b"b")
        until(lambda: writer.stats()["errors_total"] > 2, "some attempts")
        server.start()
        assert writer.flush(30)
        assert writer.stats()["stored_batches_total"] == 2
    messages = [
        record.getMessage() for record in caplog.records if record.name.endswith("brokered")
    ]
    gone, back = messages
    assert gone.startswith("events are not stored: ")
    assert f"trying again (NATS_SERVER: {server.url})" in gone
    assert back.startswith("events are stored again after ")


def test_a_writer_that_has_failed_takes_no_more_events(
    server: NatsServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(JetStreamLog, "append", fail)
    with closing(outlet(settings=NatsSettings.from_env({"NATS_SERVER": server.url}))) as writer:
        writer.put(b"a")
        until(lambda: "which loses them, failed" in caplog.text, "the failure")
        assert writer.flush(30)
        assert writer.stats()["waiting_bytes"] == 0
        with pytest.raises(ClosedError):
            writer.put(b"b")


def test_a_stream_that_is_refused_at_first_costs_no_batch(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [InvalidArgumentError("refused")]
    ensure = JetStreamLog.ensure

    async def refuse(log: JetStreamLog) -> None:
        if refusals:
            raise refusals.pop()
        await ensure(log)

    monkeypatch.setattr(JetStreamLog, "ensure", refuse)
    with closing(outlet(settings=NatsSettings.from_env({"NATS_SERVER": server.url}))) as writer:
        until(lambda: not refusals, "the refusal")
        writer.put(b"a")
        assert writer.flush(30)
        counts = writer.stats()
    assert (counts["stored_batches_total"], counts["dropped_batches_total"]) == (1, 0)


def test_a_writer_whose_model_has_no_name_says_so(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    settings = NatsSettings.from_env({"NATS_SERVER": server.url})
    made = outlet(served=lambda: Served(""), has_local_index=True, settings=settings)
    with closing(made):
        until(lambda: "events are not sent: model_name" in caplog.text, "the reason")


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


async def connect_events() -> Client:
    return await connect(NatsSettings.from_env(), name="events")


@pytest.mark.parametrize("connects", [connect_events, runtime_connect])
def test_a_connection_that_dies_without_a_word_is_replaced(
    connects: Callable[[], Awaitable[Client]], server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvflash.nats_login.PING_INTERVAL_S", 0.1)

    async def scenario() -> None:
        with closing(Wire(server.url.removeprefix("nats://"))) as wire:
            monkeypatch.setenv("NATS_SERVER", f"nats://{wire.address}")
            client = await connects()
            wire.freeze()
            await asyncio.to_thread(until, lambda: not client.is_connected, "the end to be seen")
            wire.thaw()
            await asyncio.to_thread(until, lambda: client.is_connected, "another connection")
            await client.close()

    asyncio.run(scenario())


def test_a_server_that_sends_other_data_than_the_answer_to_a_ping_is_there(
    server: NatsServer,
) -> None:
    async def scenario() -> None:
        client = await connect(NatsSettings.from_env({"NATS_SERVER": server.url}), name="test")
        heard = asyncio.Event()

        async def hear(_message: object) -> None:
            heard.set()

        await client.subscribe("s", cb=hear)
        await client.flush()
        client._pings_outstanding = 2
        await client.publish("s", b"x")
        await asyncio.wait_for(heard.wait(), 30)
        assert client._pings_outstanding == 0
        await client.close()

    asyncio.run(scenario())


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


def test_a_publisher_with_an_index_of_its_own_outlives_its_server(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvflash.nats_login")
    is_known = threading.Event()
    made = outlet(
        served=lambda: Served("m") if is_known.is_set() else None,
        has_local_index=True,
        settings=NatsSettings.from_env({"NATS_SERVER": server.url}),
    )

    async def ask() -> Answer:
        client = await connect(NatsSettings.from_env({"NATS_SERVER": server.url}), name="test")
        subject = names.query_subject(names.event_subject("ns", "backend"), 1, 0)
        try:
            answer = await client.request(subject, question(), timeout=5)
            return join([msgpack.unpackb(answer.data)])
        finally:
            await client.close()

    with closing(made):
        made.put(msgpack.packb([0.0, [["BlockStored", [1], None, [1, 2, 3, 4], 4, None]], 0]))
        server.kill()
        until(lambda: "disconnected; connecting again" in caplog.text, "the end to be seen")
        is_known.set()
        assert made.flush(30)
        server.start()
        until(lambda: "connected again after" in caplog.text, "the connection")
        assert asyncio.run(ask()).last == 0
    assert caplog.text.count("NATS (kvflash-publisher): disconnected") == 1
