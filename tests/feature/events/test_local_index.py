"""NATS Core with the workers' own indexes: rules of its answers, and recovery on a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvflash._core import Catalog
from kvflash.background import Background
from kvflash.errors import DecodeError
from kvflash.servers import NatsSettings
from kvflash.transport import names
from kvflash.transport.local_index import LocalIndex, join, question
from kvflash.transport.nats_connection import connect
from kvflash.transport.nats_core import NatsCorePublisher, NatsCoreReceiver
from kvflash.transport.origin import Origin
from servers import NatsServer, outlet
from service import VECTORS, until

BLOCK = 4
SUBJECT = names.event_subject("ns", "backend")


def batch(number: int) -> bytes:
    """One block of a prompt of its own."""
    tokens = [number * 10 + at for at in range(BLOCK)]
    return msgpack.packb([0.0, [["BlockStored", [number], None, tokens, BLOCK, None]], 0])


def origin(epoch: int = 1) -> Origin:
    return Origin(instance_id=1, dp_rank=0, epoch=epoch, model_name="m", block_size=BLOCK)


def local_index(ring: int = 1024, epoch: int = 1) -> LocalIndex:
    return LocalIndex(origin(epoch), ring_batches=ring, ring_bytes=1 << 20)


CASES = json.loads((VECTORS / "local_indexer_cases.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_answers_follow_the_published_rules(case: dict[str, Any]) -> None:
    given, expected = case["input"], case["expected"]
    index = local_index(given["buffer_capacity"])
    for number in given["published_event_ids"]:
        index.record(number, batch(number))
    parts = [msgpack.unpackb(p) for p in index.respond(question(given["start"], given["end"]))]
    answer = join(parts)
    if "events" in expected:
        assert answer.kind == "events"
        assert [number for number, _ in answer.batches] == expected["events"]
        assert all(payload == batch(number) for number, payload in answer.batches)
    elif expected["result"].startswith("TreeDump"):
        assert (answer.kind, answer.last) == ("dump", given["published_event_ids"][-1])
        catalog = Catalog()
        _, blocks, skipped = catalog.restore(answer.data)
        assert f"TreeDump({blocks} events)" == expected["result"]
        assert skipped == []
    else:
        kinds = {"InvalidRange": "invalid_range", "TooNew": "too_new"}
        assert answer.kind == kinds[expected["result"]]
        assert (answer.start, answer.end) == (given["start"], given["end"])


def test_a_range_is_chosen_by_number_where_batches_were_skipped() -> None:
    index = local_index()
    published = [2, 3, 7, 8, 9, 20]
    for number in published:
        index.record(number, batch(number))
    for start in range(2, 21):
        for end in (*range(start, 22), None):
            answer = index.answer(start, end)
            wanted = [n for n in published if start <= n and (end is None or n <= end)]
            assert (answer.kind, [n for n, _ in answer.batches]) == ("events", wanted)
    assert index.answer(1, 9).kind == "dump"


def test_nonsense_is_answered_with_an_error() -> None:
    for nonsense in (b"", b"\xc1", msgpack.packb([]), msgpack.packb({"start": "a"})):
        answer = join([msgpack.unpackb(part) for part in local_index().respond(nonsense)])
        assert answer.kind == "error"
        assert answer.message


@pytest.mark.parametrize(
    "change",
    [
        {"batches": [[0, 1 << 30]]},
        {"batches": [[0, "text"]]},
        {"part": float("inf")},
        {"epoch": None},
        {"data": 1},
    ],
)
def test_an_invalid_answer_is_refused(change: dict[str, Any]) -> None:
    part = {"kind": "events", "part": 0, "parts": 1, "epoch": 1}
    assert join([part]).kind == "events"
    with pytest.raises(DecodeError, match="an answer of a worker's index is invalid"):
        join([part | change])


def test_a_large_dump_comes_in_parts() -> None:
    index = local_index()
    for first in range(0, 40_000, 400):
        hashes = list(range(first + 1, first + 401))
        tokens = list(range(first * BLOCK, (first + 400) * BLOCK))
        events = [["BlockStored", hashes, None, tokens, BLOCK, None]]
        index.record(first // 400, msgpack.packb([0.0, events, 0]))
    parts = index.respond(question())
    assert len(parts) > 1
    assert max(map(len, parts)) < 1_000_000
    catalog = Catalog()
    assert catalog.restore(join([msgpack.unpackb(part) for part in parts]).data)[1] == 40_000


def test_a_dump_of_one_worker_is_handed_over_in_small_chunks_and_joins_with_others() -> None:
    source = Catalog(max_blocks=0)
    count = 100_000
    for instance_id in (1, 2, 3):
        publisher = source.register(instance_id, "inproc://own", model_name="m", block_size=1)
        for first in range(0, count, 50_000):
            hashes = list(range(first + 1, first + 50_001))
            parent = first or None
            event = ["BlockStored", hashes, parent, hashes, 1, None]
            frame = [(first // 50_000).to_bytes(8, "big"), msgpack.packb([0.0, [event], 0])]
            assert source.take(publisher, [frame])[1] == "applied"
    whole = list(source.dump())
    assert len(b"".join(whole)) > 3 * (1 << 20)
    assert max(map(len, whole)) == 1 << 20
    catalog = Catalog(max_blocks=0)
    assert catalog.restore(b"".join(whole)) == (3, 3 * count, [])
    assert catalog.digests() == source.digests()

    one, two, nobody = (list(source.dump(instance_id)) for instance_id in (1, 2, 9))
    assert len(nobody) == 2
    both = Catalog(max_blocks=0)
    assert both.restore(b"".join([*one[:-1], *two[1:]])) == (2, 2 * count, [])
    assert both.digests() == source.digests()[:2]


class Worker(Background):
    def __init__(self, settings: NatsSettings, *, ring: int = 1024, epoch: int = 1) -> None:
        super().__init__("worker", lambda: self._serve(settings), is_cancelled=False)
        self._origin = origin(epoch)
        self._index = local_index(ring, epoch)
        self.sequence = 0
        self.start_and_wait()

    async def _serve(self, settings: NatsSettings) -> None:
        client = await connect(settings, name="worker")
        self._publisher = NatsCorePublisher(client, SUBJECT, self._index)
        await self._publisher.ensure()
        await client.flush()
        self.ready()
        await self.ending.wait()
        await client.close()

    def put(self, number: int, payload: bytes) -> None:
        self.call(self._publisher.send(self._origin, number, payload))

    async def _record(self, number: int) -> None:
        self._index.record(number, batch(number))

    def store(self, count: int, *, is_silent: bool = False) -> None:
        for _ in range(count):
            number, self.sequence = self.sequence, self.sequence + 1
            if is_silent:
                self.call(self._record(number))
            else:
                self.put(number, batch(number))


class Router:
    def __init__(self, settings: NatsSettings) -> None:
        self.catalog = Catalog()
        self.receiver = NatsCoreReceiver(self.catalog, SUBJECT, settings)
        self.receiver.start()
        until(self.receiver._is_connected.is_set, "the connection")
        self.catalog.register(1, f"nats://{SUBJECT}/1/0", model_name="m", block_size=BLOCK)
        self.obey()

    def obey(self) -> None:
        while (order := self.catalog.next_order(0)) is not None:
            self.receiver.obey(order)

    def held(self) -> int:
        return sum(blocks for _, _, _, blocks, _, _ in self.catalog.digests())


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[NatsSettings]:
    server = NatsServer(tmp_path)
    yield NatsSettings(servers=(server.url,))
    server.close()


@pytest.fixture
def closing() -> Iterator[list[Any]]:
    things: list[Any] = []
    yield things
    for thing in things:
        thing.stop()


def test_a_router_takes_what_a_worker_holds_and_follows(settings, closing) -> None:
    worker = Worker(settings)
    closing.append(worker)
    worker.store(10)
    router = Router(settings)
    closing.append(router.receiver)
    until(lambda: router.held() == 10, "the dump")
    worker.store(5)
    until(lambda: router.held() == 15, "live events")
    assert router.receiver.stats["dumps"] == 1
    assert router.receiver.stats["lost_batches"] == 0
    router.catalog.expel(1)
    router.obey()
    worker.store(1)
    assert router.held() == 0


@pytest.mark.parametrize(("ring", "kind"), [(1024, "ranges"), (3, "dumps")])
def test_a_gap_is_asked_for_once(settings, closing, ring: int, kind: str) -> None:
    worker = Worker(settings, ring=ring)
    closing.append(worker)
    router = Router(settings)
    closing.append(router.receiver)
    worker.store(2)
    until(lambda: router.held() == 2, "live events")
    before = router.receiver.stats[kind]
    worker.store(7, is_silent=True)
    worker.store(1)
    until(lambda: router.held() == 10, "the gap to be repaired")
    worker.store(3)
    until(lambda: router.held() == 13, "live events after it")
    assert router.receiver.stats[kind] == before + 1, "no loop"
    assert router.receiver.stats["lost_batches"] == 0


def test_batches_behind_others_that_the_worker_lost_are_applied(settings, closing) -> None:
    worker = Worker(settings)
    closing.append(worker)
    router = Router(settings)
    closing.append(router.receiver)
    worker.store(2)
    until(lambda: router.held() == 2, "live events")
    for _ in range(2):
        worker.sequence += 3
        worker.store(2, is_silent=True)
    worker.store(1)
    until(lambda: router.receiver.stats["messages"] == 3, "the batch behind the gap")
    until(lambda: router.held() == 7, "the gap to be repaired, apart from what is lost")
    assert router.receiver.stats["lost_batches"] == 6


def test_a_batch_that_the_server_does_not_take_ends_no_connection(
    settings, closing, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(settings)
    closing.append(worker)
    router = Router(settings)
    closing.append(router.receiver)
    worker.store(1)
    until(lambda: router.held() == 1, "live events")
    # With its headers it is too large.
    worker.put(1, bytes((1 << 20) - 10))
    worker.sequence = 2
    worker.store(1)
    until(lambda: router.receiver.stats["messages"] == 2, "the batch behind it")
    assert "disconnected" not in caplog.text


def test_another_life_of_a_worker_begins_empty(settings, closing) -> None:
    first = Worker(settings, epoch=1)
    first.store(5)
    router = Router(settings)
    closing.append(router.receiver)
    until(lambda: router.held() == 5, "the dump")
    first.stop()
    second = Worker(settings, epoch=2)
    closing.append(second)
    second.store(2)
    until(lambda: router.held() == 2, "the new life")


def test_an_engine_that_restarts_has_an_empty_index(settings, closing) -> None:
    router = Router(settings)
    closing.append(router.receiver)
    made = outlet(has_local_index=True, settings=settings)
    try:
        for number in range(5):
            made.put(batch(number))
        until(lambda: router.held() == 5, "the first life")
        made.restart()
        made.put(batch(7))
        until(lambda: router.held() == 1, "the second life")
    finally:
        made.close()


def test_a_worker_that_does_not_answer_is_followed_all_the_same(settings, closing) -> None:
    router = Router(settings)
    closing.append(router.receiver)
    until(lambda: router.receiver.stats["failed_questions"] > 0, "a question without an answer")
    worker = Worker(settings)
    closing.append(worker)
    worker.store(4)
    until(lambda: router.held() == 4, "the worker to be there")


def test_the_dump_of_a_worker_that_has_told_nothing_hides_no_gap(settings, closing) -> None:
    worker = Worker(settings)
    closing.append(worker)
    router = Router(settings)
    closing.append(router.receiver)
    until(lambda: router.receiver.stats["dumps"] == 1, "the empty dump")
    worker.store(1, is_silent=True)
    worker.store(1)
    until(lambda: router.held() == 2, "the batch before the first that came")
