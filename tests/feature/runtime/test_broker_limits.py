"""Events into NATS that are larger than it takes: cut where that can be, dropped and counted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import nats
import pytest
from nats.js import api

from kvflash import DistributedRuntime
from kvflash.publisher import KvEventPublisher
from kvflash.servers import NatsSettings
from kvflash.transport import names
from servers import NatsServer, outlet

STREAM = names.stream_name("ns", "backend")
SIZE = 4
LONG_HASH = 1 << 63


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], NatsServer]]:
    """Start a server that takes messages of so many bytes."""
    servers: list[NatsServer] = []

    def make(max_payload: int) -> NatsServer:
        config = tmp_path / "nats.conf"
        config.write_text(f"max_payload: {max_payload}")
        servers.append(NatsServer(tmp_path, ["-c", str(config)]))
        monkeypatch.setenv("NATS_SERVER", servers[0].url)
        return servers[0]

    yield make
    for server in servers:
        server.close()


async def stored(server: NatsServer) -> list[bytes]:
    """The messages of the stream."""
    client = await nats.connect(server.url)
    try:
        js = client.jetstream()
        state = (await js.stream_info(STREAM)).state
        numbers = range(1, state.last_seq + 1)
        return [(await js.get_msg(STREAM, number)).data or b"" for number in numbers]
    finally:
        await client.close()


@pytest.mark.parametrize("max_payload", [64 * 1024, 1024 * 1024])
def test_events_are_cut_to_what_the_server_takes(start, max_payload: int) -> None:
    server, count = start(max_payload), 100_000
    hashes = list(range(LONG_HASH, LONG_HASH + count))
    blocks: list[tuple[int | None, int]] = []
    removed: list[int] = []

    async def scenario() -> None:
        async with DistributedRuntime("mem", "tcp") as runtime:
            component = runtime.namespace("ns").component("backend")
            with KvEventPublisher(
                component, kv_block_size=SIZE, event_plane="nats", model_name="m"
            ) as publisher:
                tokens = [70_000] * (count * SIZE)
                publisher.publish_stored(tokens, [SIZE] * count, hashes)
                publisher.publish_removed(hashes)
                assert await asyncio.to_thread(publisher.flush, 30)
                assert publisher.stats()["dropped_batches_total"] == 0
        messages = await stored(server)
        assert max(map(len, messages)) <= min(max_payload, 600_000)
        for message in messages:
            for event in msgpack.unpackb(message)[1]:
                if event["type"] == "BlockRemoved":
                    removed.extend(event["block_hashes"])
                    continue
                assert len(event["token_ids"]) == SIZE * len(event["block_hashes"])
                parent = event["parent_block_hash"]
                for block in event["block_hashes"]:
                    blocks.append((parent, block))
                    parent = block

    asyncio.run(scenario())
    assert blocks == list(zip([None, *hashes], hashes, strict=False))
    assert removed == hashes


@pytest.mark.parametrize("limit", ["server", "stream"])
def test_what_is_never_taken_is_dropped_and_keeps_nothing_else_back(
    start, limit: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = start(64 * 1024 if limit == "server" else 1024 * 1024)

    async def make_stream() -> None:
        client = await nats.connect(server.url)
        config = api.StreamConfig(name=STREAM, subjects=[f"{STREAM}.*"], max_msg_size=64 * 1024)
        await client.jetstream().add_stream(config)
        await client.close()

    if limit == "stream":
        asyncio.run(make_stream())
    writer = outlet(settings=NatsSettings(servers=(server.url,)))
    # With its headers the second one is just too large.
    payloads = [b"a", bytes(64 * 1024), b"b"]
    try:
        with caplog.at_level(logging.WARNING):
            for payload in payloads:
                writer.put(payload)
            assert writer.flush()
        stats = writer.stats()
        assert (stats["stored_batches_total"], stats["dropped_batches_total"]) == (2, 1)
        assert stats["errors_total"] == 0
    finally:
        writer.close()
    assert asyncio.run(stored(server)) == [b"a", b"b"]
    lost = [record.message for record in caplog.records if "is lost" in record.message]
    assert len(lost) == 1
    assert "max_payload is 65536" in lost[0] if limit == "server" else "max_msg_size" in lost[0]
