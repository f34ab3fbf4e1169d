"""State on real servers: nats-server with JetStream and etcd; processes that are killed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import nats
import pytest

from kvflash._core import Catalog
from kvflash.discovery import open_discovery
from kvflash.servers import NatsSettings
from kvflash.state.attach import StateOptions, StateService, attach
from kvflash.transport import names
from kvflash.transport.origin import Origin
from servers import EtcdServer, NatsServer, outlet
from service import SUPPORT, Process, until
from wallclock import WallClock

STREAM = names.stream_name("ns", "backend")
BLOCK = 4


@pytest.fixture(scope="module")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    yield server
    server.close()


@pytest.fixture
def env(
    nats_server: NatsServer, etcd_server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, str]]:
    """The servers' addresses, in the environment; their streams are empty afterwards."""
    found = {"NATS_SERVER": nats_server.url, "ETCD_ENDPOINTS": etcd_server.url}
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    yield found

    async def clear() -> None:
        client = await nats.connect(nats_server.url)
        js = client.jetstream()
        for stream in await js.streams_info():
            await js.delete_stream(stream.config.name)
        await client.close()

    asyncio.run(clear())


class Worker:
    """An engine that stores blocks, one prompt after the other."""

    def __init__(self, instance_id: int, life: int = 1) -> None:
        self.outlet = outlet(instance_id)
        self._next_hash = life * 1_000_000

    def store(self, prompts: int) -> None:
        for _ in range(prompts):
            hashes = [self._next_hash + at for at in range(4)]
            self._next_hash += 4
            tokens = [name + at for name in hashes for at in range(BLOCK)]
            events = [["BlockStored", hashes, None, tokens, BLOCK, None]]
            self.outlet.put(msgpack.packb([0.0, events, 0]))
        assert self.outlet.flush()


@pytest.fixture
def worker(env: dict[str, str]) -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def make(instance_id: int, life: int = 1) -> Worker:
        workers.append(Worker(instance_id, life))
        return workers[-1]

    yield make
    for made in workers:
        made.outlet.close()


@pytest.fixture
def replica(env: dict[str, str]) -> Iterator[Callable[..., Process]]:
    """Start ``replica_process.py``, which is spoken to line by line."""
    started: list[Process] = []

    def start(*args: str) -> Process:
        script = str(SUPPORT / "replica_process.py")
        started.append(Process(script, *args, takes_input=True))
        return started[-1]

    yield start
    for process in started:
        process.close()


@pytest.fixture
def service(env: dict[str, str]) -> Iterator[Callable[..., tuple[Catalog, StateService]]]:
    made: list[StateService] = []

    async def open_keys() -> Any:
        return open_discovery("etcd")

    def start(**options: Any) -> tuple[Catalog, StateService]:
        catalog = Catalog(max_blocks=0)
        settings = StateOptions(lease_ttl_s=5.0, **{"snapshot_threshold": None, **options})
        made.append(attach(catalog, "ns", "backend", open_keys=open_keys, options=settings))
        assert made[-1].wait_ready()
        return catalog, made[-1]

    yield start
    for one in made:
        one.stop()


def blocks(catalog: Catalog) -> dict[int, int]:
    return {instance_id: count for _, instance_id, _, count, _, _ in catalog.digests()}


def held(catalog: Catalog) -> list[Any]:
    return [[i, rank, n, f"{digest:016x}"] for _, i, rank, n, digest, _ in catalog.digests()]


def ask_nats(url: str, question: Callable[[Any], Any]) -> Any:
    async def ask() -> Any:
        client = await nats.connect(url)
        try:
            return await question(client.jetstream())
        finally:
            await client.close()

    return asyncio.run(ask())


def test_two_replicas_hold_the_same_and_consumers_come_and_go(env, worker, service) -> None:
    first, second = service(), service()
    worker(1).store(20)
    worker(2).store(5)
    until(lambda: blocks(first[0]) == {1: 80, 2: 20} or blocks(first[0]), "events")
    until(lambda: held(first[0]) == held(second[0]) and blocks(first[0]) == {1: 80, 2: 20}, "both")

    def consumers() -> set[str]:
        async def ask(js: Any) -> set[str]:
            return {info.name for info in await js.consumers_info(STREAM)}

        return set(ask_nats(env["NATS_SERVER"], ask))

    assert consumers() == {first[1].name, second[1].name}
    second[1].stop()
    assert consumers() == {first[1].name}
    first[1].stop()
    assert consumers() == set()


def test_a_replica_that_comes_to_a_long_stream_takes_it_all_in_one_go(worker, service) -> None:
    """More than is asked for at a time, so that requests end in every way that they can."""
    worker(1).store(1_800)
    catalog, state = service()
    assert blocks(catalog) == {1: 7_200}
    assert state.stats()["errors_total"] == 0
    assert state.stats()["reopened_total"] == 0


STEPS = [
    "listed",
    "restored",
    "applied",
    "acknowledged",
    "locked",
    "caught-up",
    "uploaded",
    "verified",
    "flipped",
    "purging",
    "purged",
    "swept",
    "unlocked",
]


@pytest.mark.parametrize("step", STEPS)
def test_killed_at_any_step_of_a_snapshot_nothing_is_lost(step, worker, replica, service) -> None:
    engine = worker(1)
    engine.store(30)
    doomed = replica(f"--die-at={step}")
    if doomed.read() is not None:
        assert doomed.ask("snapshot") is None, "it must die at this step"
    assert doomed.popen.wait(30) == 137
    engine.store(3)
    catalog, _ = service()
    assert blocks(catalog) == {1: 132}
    # The lock is free again when its lease has ended, and a snapshot then goes through.
    until(lambda: service_snapshot(service) == "done", "a snapshot after the crash")
    after, third = service()
    assert held(after) == held(catalog)
    assert third.stats()["restores_total"] == 1


def service_snapshot(service: Callable[..., tuple[Catalog, StateService]]) -> str:
    _, one = service()
    try:
        return one.snapshot()
    finally:
        one.stop()


def test_a_third_replica_restores_everything_while_the_first_two_are_dead(
    env, worker, replica, service
) -> None:
    engine = worker(1)
    engine.store(25)
    first, second = replica(), replica()
    assert first.read() is not None
    assert second.read() is not None
    assert first.ask("snapshot") == "done"
    engine.store(25)
    until(lambda: second.ask("digest")["held"][0][2] == 200, "all events")
    wanted = second.ask("digest")["held"]
    first.close()
    second.close()
    third, attached = service()
    assert held(third) == wanted
    assert attached.stats()["restores_total"] == 1

    async def names_of(js: Any) -> list[str]:
        store = await js.object_store(names.bucket_name("ns", "backend"))
        return [entry.name for entry in await store.list()]

    assert len(ask_nats(env["NATS_SERVER"], names_of)) == 1
    # The dead routers' readers go with their leases.
    until(lambda: attached.stats()["orphans_total"] == 2, "orphan readers to be deleted")


def test_a_snapshot_is_taken_by_threshold_and_the_stream_shrinks(env, worker, service) -> None:
    catalog, attached = service(snapshot_threshold=20)
    worker(1).store(50)
    until(lambda: attached.stats()["purged_messages_total"] >= 50, "the purge")
    assert blocks(catalog) == {1: 200}
    other, second = service()
    assert held(other) == held(catalog)
    assert second.stats()["restores_total"] == 1


def test_a_snapshot_is_taken_by_age_before_retention_takes_the_events(worker, service) -> None:
    settings = NatsSettings(servers=NatsSettings.from_env().servers, stream_max_age_s=6.0)
    _, attached = service(settings=settings)
    engine = worker(1)
    engine.store(10)
    until(lambda: attached.stats()["snapshots_total"] >= 1, "a snapshot by age")

    def is_empty() -> bool:
        async def ask(js: Any) -> int:
            return (await js.stream_info(STREAM)).state.messages

        return ask_nats(settings.servers[0], ask) == 0

    until(is_empty, "retention")
    other, _ = service(settings=settings)
    assert blocks(other) == {1: 40}


@pytest.mark.parametrize("limits", [{"max_age": 10.0}, {"max_bytes": 20_000}, {"max_msgs": 40}])
def test_a_snapshot_is_taken_before_the_streams_own_limits_take_the_events(
    env, worker, service, limits: dict[str, Any]
) -> None:
    """It was created by another, with other settings than this process has."""

    async def create(js: Any) -> None:
        await js.add_stream(name=STREAM, subjects=[f"{STREAM}.*"], **limits)

    ask_nats(env["NATS_SERVER"], create)
    catalog, attached = service(snapshot_threshold=1_000_000)
    worker(1).store(30)
    # It may be taken before the last events are there.
    until(lambda: attached.stats()["purged_messages_total"] > 0, "a snapshot")
    until(lambda: blocks(catalog) == {1: 120}, "events")
    other, late = service()
    assert blocks(other) == {1: 120}
    assert late.stats()["lost_messages_total"] == 0


@pytest.mark.parametrize("bucket", [names.bucket_name, names.pointer_bucket_name])
def test_a_bucket_that_is_deleted_is_made_again(env, worker, service, bucket: Any) -> None:
    catalog, attached = service()
    engine = worker(1)
    engine.store(10)
    until(lambda: blocks(catalog) == {1: 40}, "events")
    assert attached.snapshot() == "done"
    kind = "OBJ" if bucket is names.bucket_name else "KV"

    async def delete(js: Any) -> None:
        await js.delete_stream(f"{kind}_{bucket('ns', 'backend')}")

    ask_nats(env["NATS_SERVER"], delete)
    until(lambda: attached.stats()["snapshots_total"] == 2, "another snapshot")
    other, late = service()
    assert blocks(other) == {1: 40}
    assert late.stats()["lost_messages_total"] == 0
    until(lambda: not attached.snapshot_failure, "the end of the failure")


def test_a_server_without_jetstream_is_named(tmp_path: Path, caplog) -> None:
    server = NatsServer(tmp_path)
    try:
        server.kill()
        with_js = server.command
        server.command = lambda: [word for word in with_js() if word != "-js"]  # type: ignore[method-assign]
        server.start()
        settings = NatsSettings(servers=(server.url,))

        async def open_keys() -> Any:
            return open_discovery("mem")

        options = StateOptions(settings=settings)
        state = attach(Catalog(), "ns", "backend", open_keys=open_keys, options=options)
        until(lambda: "does not answer: start nats-server with -js" in caplog.text, "the reason")
        state.stop()
    finally:
        server.close()


def test_reset_empties_all_replicas_in_the_order_of_the_events(worker, service) -> None:
    catalog, attached = service()
    engine = worker(1)
    engine.store(10)
    until(lambda: attached.snapshot() == "done", "a snapshot")
    engine.store(1)
    other, _ = service(is_resetting=True)
    assert blocks(other) == {}
    until(lambda: blocks(catalog) == {}, "the other replica to notice")
    engine.store(2)
    until(lambda: blocks(catalog) == blocks(other) == {1: 8}, "new events")
    fresh, _ = service()
    assert blocks(fresh) == {1: 8}


def test_nats_is_killed_and_started_again(nats_server, worker, service) -> None:
    catalog, attached = service()
    engine = worker(1)
    engine.store(10)
    nats_server.kill()
    engine.outlet.put(msgpack.packb([0.0, [["AllBlocksCleared"]], 0]))
    nats_server.start()
    assert engine.outlet.flush(30)
    engine.store(5)
    until(lambda: blocks(catalog) == {1: 20}, "the events from before and after")
    assert attached.stats()["lost_messages_total"] == 0


def test_etcd_is_killed_and_started_again(etcd_server, worker, service) -> None:
    catalog, attached = service()
    engine = worker(1)
    etcd_server.kill()
    engine.store(10)
    until(lambda: blocks(catalog) == {1: 40}, "events without etcd")
    etcd_server.start()
    until(lambda: attached.snapshot() == "done", "a snapshot")


def test_a_stream_that_is_deleted_is_made_again(env, worker, service) -> None:
    catalog, attached = service()
    engine = worker(1)
    engine.store(10)
    until(lambda: blocks(catalog) == {1: 40}, "events")

    async def delete(js: Any) -> None:
        await js.delete_stream(STREAM)

    ask_nats(env["NATS_SERVER"], delete)
    engine.store(10)
    until(lambda: blocks(catalog) == {1: 80}, "events in the new stream")
    assert attached.snapshot() == "done"
    other, _ = service()
    assert held(other) == held(catalog)


def test_what_found_no_room_is_read_again(worker, service, monkeypatch) -> None:
    """A slow replica: what the client drops is a hole, and the stream has it still."""
    monkeypatch.setattr("kvflash.transport.jetstream._WAITING_MESSAGES_MAX", 32)
    catalog, attached = service()
    engine, gate, apply = worker(1), threading.Event(), attached.sink.apply

    def slow(messages: Any) -> None:
        gate.wait()
        apply(messages)

    monkeypatch.setattr(attached.sink, "apply", slow)
    engine.store(100)
    gate.set()
    until(lambda: blocks(catalog) == {1: 400}, "all of it")
    stats = attached.stats()
    assert stats["reopened_total"] >= 1
    assert (stats["lost_messages_total"], stats["lost_batches_total"]) == (0, 0)


def test_a_message_that_was_deleted_is_counted_and_holds_nobody_up(env, worker, service) -> None:
    engine = worker(1)
    engine.store(6)
    for sequence in (2, 3, 5):
        ask_nats(env["NATS_SERVER"], lambda js, at=sequence: js.delete_msg(STREAM, at))
    catalog, attached = service()
    assert blocks(catalog) == {1: 12}
    assert attached.stats()["lost_messages_total"] == 3
    engine.store(1)
    until(lambda: blocks(catalog) == {1: 16}, "what came since")


def test_what_cannot_be_understood_is_counted_and_dropped(env, worker, service, caplog) -> None:
    catalog, attached = service()
    engine = worker(1)
    # Its life begins later, and it has not published anything yet.
    origin = Origin(instance_id=1, dp_rank=0, epoch=1, model_name="m", block_size=BLOCK)

    async def publish(js: Any) -> None:
        await js.publish(f"{STREAM}.queue", b"no headers")
        headers = origin.headers(0)
        await js.publish(f"{STREAM}.queue", b"\xc1", headers=headers)
        headers["Kvflash-Publisher"] = "1/2"
        await js.publish(f"{STREAM}.queue", b"", headers=headers)

    ask_nats(env["NATS_SERVER"], publish)
    engine.store(3)
    until(lambda: blocks(catalog) == {1: 12}, "what can be understood")
    assert attached.stats()["undecodable_total"] == 2
    first, second = (text for text in caplog.messages if "is dropped" in text)
    assert first.startswith("message 1 is dropped (undecodable, 1 so far): header Kvflash-")
    assert second.startswith("message 3 is dropped (undecodable, 2 so far): Kvflash-Publisher must")


def test_a_worker_that_left_takes_its_blocks_along_and_brings_them_back(worker, service) -> None:
    catalog, attached = service()
    one, two = worker(1), worker(2)
    one.store(5)
    two.store(5)
    until(lambda: blocks(catalog) == {1: 20, 2: 20}, "events")
    attached.worker_left(1)
    assert blocks(catalog) == {2: 20}
    assert attached.stats()["away_workers"] == 1
    # Batches that it publishes meanwhile do not count yet.
    one.store(1)
    two.store(1)
    until(lambda: blocks(catalog) == {2: 24}, "the other's event")
    assert attached.stats()["of_gone_workers_total"] == 1
    # Nor is it lost: a snapshot has it, and so has a replica that begins from there.
    assert attached.snapshot() == "done"
    late, of_late = service()
    of_late.keep_only({2})
    assert blocks(late) == {2: 24}
    for known, of_known in ((catalog, attached), (late, of_late)):
        of_known.worker_joined(1)
        assert blocks(known) == {1: 24, 2: 24}
        assert of_known.stats()["away_workers"] == 0
    one.store(1)
    for known in (catalog, late):
        until(lambda known=known: blocks(known) == {1: 28, 2: 24}, "what comes later")
    assert attached.stats()["lost_batches_total"] == 0


def test_another_life_of_a_publisher_begins_empty(worker, service) -> None:
    catalog, _ = service()
    old = worker(1)
    old.store(5)
    worker(1, life=2).store(2)
    until(lambda: blocks(catalog) == {1: 8}, "the new life")
    old.store(1)
    worker(2).store(1)
    until(lambda: blocks(catalog) == {1: 8, 2: 4}, "the old life's last message to be dropped")


AGE = """
import asyncio, sys, time
import nats
from kvflash.servers import NatsSettings
from kvflash.transport.jetstream import JetStreamLog

async def main():
    settings = NatsSettings.from_env()
    client = await nats.connect(settings.servers[0])
    log = JetStreamLog(client, sys.argv[1], settings)
    print(time.time(), flush=True)
    while (age_s := await log.age_s(1)) < 1.0:
        await asyncio.sleep(0.05)
    print(age_s, flush=True)
    await client.close()

asyncio.run(main())
"""


@pytest.mark.parametrize("seconds", [3_600, -3_600])
def test_a_message_is_as_old_as_its_server_says(
    worker, env: dict[str, str], tmp_path: Path, seconds: int
) -> None:
    """This machine's clock is off: no snapshot is due at once, and none is due never."""
    worker(1).store(1)
    clock = WallClock(tmp_path)
    clock.leap(seconds)
    child = subprocess.run(
        [sys.executable, "-c", AGE, STREAM],
        env={**os.environ, **env, **clock.env},
        stdout=subprocess.PIPE,
        timeout=60,
        check=True,
    )
    now_s, age_s = map(float, child.stdout.split())
    assert abs(now_s - time.time() - seconds) < 120
    assert 1.0 <= age_s < 120
