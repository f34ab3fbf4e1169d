"""The nats plane when its broker is away, comes back, or was never installed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvflash import DistributedRuntime, KvflashError, RuntimeLimits, TransportError
from kvflash.runtime import nats
from kvflash.version import install_command
from servers import NatsServer
from support_runtime import eventually, run


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NatsServer]:
    """A broker of the test's own, that it may kill."""
    with closing(NatsServer(tmp_path)) as server:
        monkeypatch.setenv("NATS_SERVER", server.url)
        yield server


def test_streams_end_with_an_error_when_the_broker_goes_and_new_ones_begin_when_it_is_back(
    server: NatsServer,
) -> None:
    ended = asyncio.Event()

    async def hang(request: int) -> AsyncIterator[int]:
        try:
            yield 0
            if request:
                await asyncio.Event().wait()
        finally:
            ended.set()

    async def scenario() -> None:
        limits = RuntimeLimits(peer_silence_s=3.0, cancel_grace_s=0.1)
        async with (
            DistributedRuntime("mem", "nats", limits=limits) as runtime,
            DistributedRuntime("mem", "nats", limits=limits) as asker,
        ):
            endpoint = runtime.endpoint("t.broker.run")
            serving = asyncio.create_task(endpoint.serve_endpoint(hang))
            client = asker.endpoint("t.broker.run").client()
            await client.wait_for_instances(30)
            stream = await client.generate(1)
            assert await anext(stream) == 0
            ended.clear()
            server.kill()
            with pytest.raises(TransportError, match="nothing came for 3 s"):
                await anext(stream)
            await asyncio.wait_for(ended.wait(), 30)
            server.start()

            async def is_answered() -> bool:
                try:
                    return [item async for item in await client.generate(0)] == [0]
                except KvflashError:
                    return False

            await eventually(is_answered, "the broker to carry requests again")
            await runtime.close()
            await serving

    run(scenario())


def test_a_message_that_is_lost_ends_the_stream_with_an_error(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = 0
    publish = nats.NatsServer.publish

    async def lossy(self: nats.NatsServer, subject: str, data: bytes) -> None:
        nonlocal published
        published += 1
        if published != 3:
            await publish(self, subject, data)

    monkeypatch.setattr(nats.NatsServer, "publish", lossy)

    async def count(request: int) -> AsyncIterator[int]:
        for number in range(request):
            yield number

    async def scenario() -> None:
        async with DistributedRuntime("mem", "nats") as runtime:
            endpoint = runtime.endpoint("t.broker.run")
            serving = asyncio.create_task(endpoint.serve_endpoint(count))
            client = endpoint.client()
            await client.wait_for_instances(30)
            stream = await client.generate(5)
            assert [await anext(stream), await anext(stream)] == [0, 1]
            with pytest.raises(TransportError, match="a message was lost"):
                await anext(stream)
            assert [item async for item in await client.generate(3)] == [0, 1, 2]
            await runtime.close()
            await serving

    assert server.port
    run(scenario())


def test_a_broker_that_is_not_there_is_said(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        server.kill()
        monkeypatch.setattr("kvflash.runtime.nats.CONNECT_TIMEOUT_S", 0.5)
        async with DistributedRuntime("mem", "nats") as runtime:

            async def handler(request: int) -> int:
                return request

            with pytest.raises(TransportError, match=r"no NATS server answers at nats://127\.0"):
                await runtime.endpoint("t.broker.run").serve_endpoint(handler)

    run(scenario())


def test_without_the_client_one_line_says_what_to_install() -> None:
    script = """
import sys
sys.modules["nats"] = None
import asyncio, kvflash
async def main():
    async with kvflash.DistributedRuntime("mem", "nats") as runtime:
        try:
            await runtime.endpoint("a.b.c").serve_endpoint(lambda request: request)
        except kvflash.ConfigError as error:
            print(error)
asyncio.run(main())
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the nats request plane needs the NATS client (")
    assert done.stdout.endswith(f"): {install_command('nats')}\n")
