"""An engine's own socket relayed into a stream in NATS: what it said is there, in its order."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from kvflash import DistributedRuntime, KvPushRouter, KvRouterConfig
from kvflash.errors import InvalidArgumentError
from kvflash.publisher import KvEventPublisher
from kvflash.publisher.brokered import BrokerOutlet
from kvflash.publisher.relay import Relay
from kvflash.transport import zmq_socket
from servers import NatsServer
from service import Engine, batch, stored, until
from wire import Wire

SIZE = 4


@pytest.fixture
def nats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path)
    monkeypatch.setenv("NATS_SERVER", server.url)
    monkeypatch.setenv("KVFLASH_EVENT_PLANE", "nats")
    monkeypatch.setenv("KVFLASH_DISCOVERY", "file")
    monkeypatch.setenv("KVFLASH_DISCOVERY_DIR", str(tmp_path / "keys"))
    yield server
    server.close()


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(**options: Any) -> Engine:
        made.append(Engine(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def say(engine: Engine, *names: int, is_sent: bool = True) -> None:
    """The engine stores blocks of their own prompts."""
    for name in names:
        tokens = [name * 100 + at for at in range(SIZE)]
        engine.publish(
            batch(stored([name], tokens, block_size=SIZE), ts=float(name)), is_sent=is_sent
        )


class Stage:
    """A relay beside an engine, and a router that hears of it from the stream only."""

    def __init__(self, runtime: DistributedRuntime, engine: Engine, router: KvPushRouter) -> None:
        self.runtime, self.router, self._engine = runtime, router, engine
        self.publisher: KvEventPublisher | None = None

    async def relay(self) -> KvEventPublisher:
        self.publisher = KvEventPublisher(
            self.runtime.namespace("ns").component("backend"),
            kv_block_size=SIZE,
            zmq_endpoint=self._engine.endpoint,
            zmq_replay_endpoint=self._engine.replay_endpoint,
            model_name="m",
        )
        assert self.publisher.endpoint.startswith("jetstream://")
        await asyncio.to_thread(self._engine.wait_for_subscriber)
        return self.publisher

    async def holds(self, *names: int) -> None:
        loop = asyncio.get_running_loop()

        def check() -> bool:
            dump = asyncio.run_coroutine_threadsafe(self.router.dump_events(), loop).result()
            blocks = [
                block["block_hash"]
                for event in json.loads(dump)
                for block in event["event"]["data"]["stored"]["blocks"]
            ]
            return sorted(blocks) == sorted(names)

        await asyncio.to_thread(until, check, f"{names} to be held")


@asynccontextmanager
async def staged(engine: Engine) -> AsyncIterator[Stage]:
    async with DistributedRuntime.detached() as runtime:
        endpoint = runtime.endpoint("ns.backend.generate")

        async def handler(request: Any) -> Any:
            return request

        await runtime.announce(
            f"v1/models/ns/backend/generate/{runtime.instance_id}", {"model_name": "m"}
        )
        serving = asyncio.create_task(endpoint.serve_endpoint(handler))
        async with KvPushRouter(endpoint, SIZE, KvRouterConfig()) as router:
            stage = Stage(runtime, engine, router)
            try:
                yield stage
            finally:
                if stage.publisher is not None:
                    await asyncio.to_thread(stage.publisher.shutdown)
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 90))


@pytest.mark.usefixtures("nats")
def test_what_was_before_comes_from_the_replay_and_what_is_lost_is_asked_for(engine) -> None:
    made = engine()
    say(made, 1, 2)

    async def work() -> None:
        async with staged(made) as stage:
            publisher = await stage.relay()
            await stage.holds(1, 2)
            say(made, 3)
            await stage.holds(1, 2, 3)
            say(made, 4, 5, is_sent=False)
            say(made, 6)
            await stage.holds(1, 2, 3, 4, 5, 6)
            assert made.asked == [0, 3]
            stats = publisher.stats()
            assert (stats["relayed_batches_total"], stats["missed_batches_total"]) == (6, 0)

    run(work())


@pytest.mark.usefixtures("nats")
def test_without_a_replay_a_gap_is_told_to_routers(engine) -> None:
    made = engine(replay=False)

    async def work() -> None:
        async with staged(made) as stage:
            publisher = await stage.relay()
            say(made, 1)
            await stage.holds(1)
            say(made, 2, is_sent=False)
            say(made, 3)
            await stage.holds(1, 3)
            assert publisher.stats()["missed_batches_total"] == 1
            assert stage.router.stats()["ns.backend"]["lost_batches_total"] == 1

    run(work())


@pytest.mark.parametrize("is_set_back", [False, True])
@pytest.mark.usefixtures("nats")
def test_an_engine_that_starts_anew_begins_empty(engine, monkeypatch, is_set_back: bool) -> None:
    made = engine()

    async def work() -> None:
        async with staged(made) as stage:
            publisher = await stage.relay()
            say(made, 1, 2)
            await stage.holds(1, 2)
            if is_set_back:
                before_ns = time.time_ns() - 3_600_000_000_000
                monkeypatch.setattr(time, "time_ns", lambda: before_ns)
            await asyncio.to_thread(made.restart)
            await asyncio.to_thread(made.wait_for_subscriber)
            say(made, 7)
            await stage.holds(7)
            assert publisher.stats()["restarts_total"] == 1

    run(work())


@pytest.mark.usefixtures("nats")
def test_a_relay_that_is_started_again_tells_what_the_engine_still_has(engine) -> None:
    made = engine(ring=2)

    async def work() -> None:
        async with staged(made) as stage:
            publisher = await stage.relay()
            say(made, 1, 2, 3)
            await stage.holds(1, 2, 3)
            await asyncio.to_thread(publisher.shutdown)
            await asyncio.to_thread(made.wait_for_departure)
            await stage.relay()
            await stage.holds(2, 3)

    run(work())


def wait_for_end(child: int) -> None:
    try:
        until(lambda: os.waitpid(child, os.WNOHANG)[0] == child, "the end of the fork")
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise


@pytest.mark.usefixtures("nats")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_ends_without_the_relay_of_its_parent(engine) -> None:
    made = engine()

    async def work() -> None:
        async with staged(made) as stage:
            publisher = await stage.relay()
            child = os.fork()
            if child == 0:
                publisher.shutdown()
                os._exit(0)
            wait_for_end(child)
            say(made, 1)
            await stage.holds(1)

    run(work())


class Outlet:
    """Takes batches; the first ``failures`` calls fail."""

    kind, endpoint = "jetstream", "jetstream://ns/1/0"

    def __init__(self, failures: int = 0) -> None:
        self.batches: list[bytes] = []
        self.is_closed = False
        self._failures = failures

    def put(self, payload: bytes) -> None:
        if self._failures:
            self._failures -= 1
            raise OSError("not thought of")
        self.batches.append(payload)

    def skip(self, batches: int) -> None:
        self.batches += [b""] * batches

    def close(self) -> None:
        self.is_closed = True


def test_an_endpoint_that_cannot_be_dialed_is_refused() -> None:
    outlet = Outlet()
    with pytest.raises(InvalidArgumentError, match=r"zmq_endpoint must look like .*Protocol not"):
        Relay(cast(BrokerOutlet, outlet), "http://127.0.0.1:1", None, "")
    assert outlet.is_closed


def test_a_connection_that_is_silently_dead_is_replaced(
    engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_socket, "_HEARTBEAT_MS", 50)
    made, outlet = engine(), Outlet()
    wire = Wire(made.endpoint.removeprefix("tcp://"))
    relay = Relay(cast(BrokerOutlet, outlet), f"tcp://{wire.address}", made.replay_endpoint, "")
    try:
        made.wait_for_subscriber()
        say(made, 1)
        until(lambda: len(outlet.batches) == 1, "the first batch")
        wire.freeze()
        until(lambda: wire.accepted > 1, "another connection")
    finally:
        relay.close()
        wire.close()


@pytest.mark.parametrize("failure", ["replay", "outlet"])
def test_a_relay_goes_on_after_an_error(engine, caplog, failure) -> None:
    made, outlet = engine(), Outlet(failures=failure == "outlet")
    # Such an endpoint can't be dialed, as none can without a free file descriptor.
    replay = "tcp://127.0.0.1" if failure == "replay" else made.replay_endpoint
    relay = Relay(cast(BrokerOutlet, outlet), made.endpoint, replay, "")
    try:
        made.wait_for_subscriber()
        say(made, 1, 2)
        until(lambda: len(outlet.batches) == 2, "both batches")
    finally:
        relay.close()
    assert outlet.batches == [payload for _, payload in made.ring]
    text = {"replay": "can't request missed batches", "outlet": "not thought of"}[failure]
    assert text in caplog.text
