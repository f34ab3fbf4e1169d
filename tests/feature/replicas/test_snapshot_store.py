"""What snapshots leave behind in a real nats-server."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import nats.errors
import pytest

from kvflash._core import Catalog
from kvflash.discovery import MemoryDiscovery
from kvflash.errors import NotFoundError, TransportError
from kvflash.servers import NatsSettings
from kvflash.state.discovered import DiscoveredLock, DiscoveredRoster
from kvflash.state.frames import CatalogSink
from kvflash.state.replica import Replica
from kvflash.state.snapshot import Outcome, Snapshots
from kvflash.transport.jetstream import JetStreamLog
from kvflash.transport.jetstream_blobs import JetStreamBlobs
from kvflash.transport.nats_connection import connect
from kvflash.transport.origin import Origin
from servers import NatsServer

ORIGIN = Origin(instance_id=7, dp_rank=0, epoch=1, model_name="m", block_size=4)


@pytest.fixture(scope="module")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    yield server
    server.close()


class Store:
    """One replica with its snapshots, and a view of what the server holds."""

    def __init__(self, client: Any, settings: NatsSettings) -> None:
        self.js = client.jetstream()
        self.log = JetStreamLog(client, "log", settings)
        self.blobs = JetStreamBlobs(client, "blobs", "pointer", settings)
        keys = MemoryDiscovery(is_shared=False)
        self.replica = Replica(
            "router",
            log=self.log,
            blobs=self.blobs,
            roster=DiscoveredRoster(keys, "ns", "c"),
            sink=CatalogSink(Catalog()),
        )
        lock = DiscoveredLock(keys, "v1/locks/ns/c/snapshot")
        self.snapshots = Snapshots(self.replica, lock=lock, threshold_messages=None, age_s_max=None)
        self.sequence = 0

    async def snapshot(self) -> Outcome:
        """One batch more, and a snapshot that covers it."""
        number, self.sequence = self.sequence, self.sequence + 1
        payload = msgpack.packb([0.0, [], 0])
        await self.log.append(ORIGIN.headers(number), payload, key=ORIGIN.key(number))
        return await self.snapshots.take()

    async def messages(self) -> int:
        return (await self.js.stream_info("OBJ_blobs")).state.messages


@pytest.fixture
def in_store(
    nats_server: NatsServer,
) -> Callable[[Callable[[Store], Coroutine[Any, Any, None]]], None]:
    """Runs a test with a store that ends with it."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Store]:
        settings = NatsSettings(servers=(nats_server.url,))
        client = await connect(settings, name="test")
        store = Store(client, settings)
        running = asyncio.create_task(store.replica.run())
        try:
            await asyncio.wait_for(store.replica.wait_caught_up(), 20)
            yield store
        finally:
            running.cancel()
            await asyncio.wait([running])
            for stream in await store.js.streams_info():
                await store.js.delete_stream(stream.config.name)
            await client.close()

    def run(test: Callable[[Store], Coroutine[Any, Any, None]]) -> None:
        async def work() -> None:
            async with opened() as store:
                await asyncio.wait_for(test(store), 60)

        asyncio.run(work())

    return run


def test_a_stream_that_cannot_be_created_says_why(in_store) -> None:
    async def test(store: Store) -> None:
        await store.js.add_stream(name="taken", subjects=["other.>"])
        log = JetStreamLog(store.log._client, "other", NatsSettings())
        with pytest.raises(TransportError, match="subjects overlap with an existing stream"):
            await log.ensure()

    in_store(test)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_stream_that_another_process_created_is_taken_as_it_is(in_store, is_there: bool) -> None:
    async def test(store: Store) -> None:
        log = JetStreamLog(store.log._client, "other", NatsSettings())
        info, other = (
            log._js.stream_info,
            {"name": "other", "subjects": ["other.*"], "max_bytes": 99},
        )

        async def create_after(name: str) -> Any:
            # Another process is faster.
            log._js.stream_info = info
            try:
                return await info(name)
            finally:
                await store.js.add_stream(**other)

        if is_there:
            await store.js.add_stream(**other)
        else:
            log._js.stream_info = create_after
        await log.ensure()
        assert (await info("other")).config.max_bytes == 99

    in_store(test)


def test_a_bucket_holds_no_trace_of_deleted_snapshots(in_store) -> None:
    async def test(store: Store) -> None:
        held = []
        for _ in range(5):
            assert await store.snapshot() == Outcome.DONE
            held.append(await store.messages())
        assert len(set(held)) == 1, "each snapshot replaces the one before"
        pointer, _ = await store.blobs.pointer()
        assert await store.blobs.names() == [pointer.blob]

    in_store(test)


@pytest.mark.parametrize("is_older_version", [False, True])
def test_a_snapshot_that_the_client_deleted_leaves_the_bucket(
    in_store, is_older_version: bool
) -> None:
    async def test(store: Store) -> None:
        objects = await store.js.object_store("blobs")
        for name in (
            "radix-state-00000000000000000000-1-a",
            "radix-state-00000000000000000000-1-b",
        ):
            if is_older_version:
                # It stored by the client, which names chunks at random.
                await objects.put(name, b"an earlier one")
            else:
                await store.blobs.put(name, [b"an earlier one"])
        await objects.delete(name)
        assert await store.snapshot() == Outcome.DONE
        pointer, _ = await store.blobs.pointer()
        assert await store.blobs.names() == [pointer.blob]
        assert len([entry async for entry in store.blobs.read(pointer.blob)]) > 0
        # Its entry, and its chunk.
        assert await store.messages() == 2

    in_store(test)


@pytest.mark.parametrize("purges", range(3))
def test_an_interrupted_deletion_goes_on_later(
    in_store, purges: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(store: Store) -> None:
        name = "radix-state-00000000000000000000-1-a"
        # As an older version stored it.
        await (await store.js.object_store("blobs")).put(name, b"an earlier one")
        purge, left = store.blobs._js.purge_stream, purges

        async def purge_some(*args: Any, **kwargs: Any) -> bool:
            nonlocal left
            if left == 0:
                raise nats.errors.TimeoutError
            left -= 1
            return await purge(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(store.blobs._js, "purge_stream", purge_some)
            with pytest.raises(TransportError):
                await store.blobs.delete(name)
        assert await store.snapshot() == Outcome.DONE
        # Those of the snapshot.
        assert await store.messages() == 2

    in_store(test)


def test_foreign_and_damaged_entries_stop_no_sweep(in_store) -> None:
    async def test(store: Store) -> None:
        damaged = base64.urlsafe_b64encode(b"radix-state-00000000000000000000-1-a").decode()
        for entry in ("abcde", "_w==", damaged):
            await store.js.publish(f"$O.blobs.M.{entry}", b"{}")
        assert await store.snapshot() == Outcome.DONE
        pointer, _ = await store.blobs.pointer()
        assert await store.blobs.names() == [pointer.blob]
        # The foreign ones, and those of the snapshot.
        assert await store.messages() == 4

    in_store(test)


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_an_interrupted_upload_leaves_with_a_later_snapshot(in_store, is_cancelled: bool) -> None:
    async def test(store: Store) -> None:
        has_stored, goes_on = threading.Event(), threading.Event()

        def chunks() -> Iterator[bytes]:
            yield b"x" * 1_000_000
            has_stored.set()
            goes_on.wait(30)
            raise TransportError("a worker joined or left")

        name = "radix-state-00000000000000000000-1-a"
        upload = asyncio.create_task(store.blobs.put(name, chunks()))
        assert await asyncio.to_thread(has_stored.wait, 30)
        assert await store.messages() == 1
        if is_cancelled:
            upload.cancel()
        goes_on.set()
        with pytest.raises(asyncio.CancelledError if is_cancelled else TransportError):
            await upload
        assert await store.blobs.names() == ([name] if is_cancelled else [])
        with pytest.raises(NotFoundError):
            _ = [chunk async for chunk in store.blobs.read(name)]
        assert await store.snapshot() == Outcome.DONE
        pointer, _ = await store.blobs.pointer()
        assert await store.blobs.names() == [pointer.blob]
        assert await store.messages() == 2

    in_store(test)


def test_an_upload_reads_as_it_was_written_by_every_client(in_store) -> None:
    async def test(store: Store) -> None:
        written = [bytes([at]) * (at * 30_011) for at in range(40)]
        digest = await store.blobs.put("a", written)
        whole = b"".join(written)
        assert digest == hashlib.sha256(whole).hexdigest()
        assert b"".join([chunk async for chunk in store.blobs.read("a")]) == whole
        objects = await store.js.object_store("blobs")
        # It checks the digest.
        assert (await objects.get("a")).data == whole
        await objects.delete("a")
        assert await store.messages() == 1
        await store.blobs.delete("a")
        assert await store.messages() == 0
        assert await store.blobs.put("empty", []) == hashlib.sha256().hexdigest()
        assert [chunk async for chunk in store.blobs.read("empty")] == []

    in_store(test)


@pytest.mark.parametrize("how", ["delete", "purge"])
def test_snapshots_and_resets_survive_a_deleted_pointer(in_store, how: str) -> None:
    async def test(store: Store) -> None:
        assert await store.snapshot() == Outcome.DONE
        keys = await store.js.key_value("pointer")
        await getattr(keys, how)("radix-state")
        assert await store.snapshot() == Outcome.DONE
        await getattr(keys, how)("radix-state")
        await store.snapshots.reset()
        pointer, _ = await store.blobs.pointer()
        assert pointer.blob is None
        assert await store.snapshot() == Outcome.DONE

    in_store(test)


@pytest.mark.parametrize("is_held", [True, False])
def test_only_a_snapshot_that_the_server_lacks_counts_as_lost(
    in_store, is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(store: Store) -> None:
        await store.blobs.put("a", [b"x" * 1_000_000])

        async def say_nothing(*_: Any) -> None:
            raise asyncio.TimeoutError

        monkeypatch.setattr("nats.js.JetStreamContext.PushSubscription.next_msg", say_nothing)
        if not is_held:
            await store.js.purge_stream("OBJ_blobs", subject="$O.blobs.C.a")
        with pytest.raises(TransportError if is_held else NotFoundError, match="1000000 bytes"):
            _ = [chunk async for chunk in store.blobs.read("a")]

    in_store(test)
