"""Effects of a log's messages on a catalog: workers that leave, with or without a return."""

from __future__ import annotations

import json
import struct
from itertools import islice
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import msgpack
import pytest

from kvflash._core import Catalog
from kvflash.errors import InvalidArgumentError, TransportError
from kvflash.state.frames import CatalogSink
from kvflash.transport.base import Message
from kvflash.transport.origin import Origin

NEXT = iter(range(1, 1_000_000))


def message(
    instance_id: int,
    number: int,
    *,
    epoch: int = 1,
    model: str = "m",
    tenant: str = "default",
    block_size: int = 4,
) -> Message:
    """A block of its own in a batch of its own."""
    origin = Origin(
        instance_id=instance_id,
        dp_rank=0,
        epoch=epoch,
        model_name=model,
        tenant_id=tenant,
        block_size=block_size,
    )
    tokens = [number * 10 + at for at in range(block_size)]
    event = ["BlockStored", [number + 1], None, tokens, block_size, None]
    payload = msgpack.packb([0.0, [event], 0])
    return Message(next(NEXT), origin.headers(number), payload)


def blocks(catalog: Catalog) -> dict[int, int]:
    return {told[1]: told[3] for told in catalog.digests()}


def indexes(catalog: Catalog) -> dict[tuple[tuple[str, str], int], int]:
    """Blocks by model and tenant, and worker."""
    return {(told[0], told[1]): told[3] for told in catalog.digests() if told[3]}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def catalog() -> Catalog:
    return Catalog()


@pytest.fixture
def sink(catalog: Catalog, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> CatalogSink:
    monkeypatch.setattr("kvflash.state.frames.time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr("kvflash.state.frames._AWAY_S_MAX", 60.0)
    return CatalogSink(catalog)


def test_who_stays_away_for_too_long_is_forgotten(
    sink: CatalogSink, catalog: Catalog, clock: Clock
) -> None:
    sink.apply([message(1, 0), message(2, 0)])
    sink.leave(1)
    clock.now = 59.0
    sink.apply([message(1, 1), message(2, 1)])
    sink.join(1)
    assert blocks(catalog) == {1: 2, 2: 2}
    sink.leave(1)
    sink.leave(1)
    clock.now = 119.5
    sink.apply([message(1, 2)])
    assert sink.away() == 0
    sink.join(1)
    assert blocks(catalog) == {2: 2}
    # It is followed again from what it tells now; what came before is known to be missing.
    sink.apply([message(1, 3)])
    assert blocks(catalog) == {1: 1, 2: 2}
    assert (sink.counts["of_gone_workers"], sink.counts["lost_batches"]) == (2, 3)


def test_nothing_stays_of_those_who_left_for_good(
    sink: CatalogSink, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvflash.state.frames._GONE_MAX", 5)
    for instance_id in range(1, 21):
        sink.apply([message(instance_id, 0)])
        sink.leave(instance_id)
        sink.apply([message(instance_id, 1)])
        clock.now += 61.0
    sink.leave(21)
    assert not sink._publishers
    assert not sink._epochs
    assert sink.workers() == []


class Undumpable:
    """A catalog that raises when it is dumped."""

    def __init__(self) -> None:
        self._catalog = Catalog()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._catalog, name)

    def dump(self, instance_id: int | None = None) -> NoReturn:
        raise InvalidArgumentError(f"worker {instance_id} does not fit the format")


def test_blocks_that_can_not_be_set_aside_do_not_count() -> None:
    catalog = cast("Catalog", Undumpable())
    sink = CatalogSink(catalog)
    sink.apply([message(1, 0), message(2, 0)])
    sink.leave(1)
    assert blocks(catalog) == {2: 1}
    assert sink.away() == 0
    # It is followed again from its next message after its return.
    sink.apply([message(1, 1)])
    sink.join(1)
    assert blocks(catalog) == {2: 1}
    sink.apply([message(1, 2)])
    assert blocks(catalog) == {1: 1, 2: 1}


def test_blocks_that_do_not_fit_a_dump_do_not_count() -> None:
    catalog = Catalog()
    sink = CatalogSink(catalog)
    sink.apply([message(1, 0), message(2, 0)])
    # Its shared stores have longer names than a dump takes.
    for number, name in enumerate("ab", start=1):
        stored = {
            "type": "BlockStored",
            "block_hashes": [100 + number],
            "parent_block_hash": None,
            "token_ids": [],
            "block_size": 0,
            "medium": "EXTERNAL",
            "locality": "REMOTE",
            "ownership": name * 40_000,
            "group_idx": 0,
        }
        origin = message(1, number)
        payload = msgpack.packb([0.0, [stored], 0])
        sink.apply([Message(origin.sequence, origin.headers, payload)])
    sink.leave(1)
    assert (blocks(catalog), sink.away()) == ({2: 1}, 0)
    sink.join(1)
    sink.apply([message(1, 3)])
    assert blocks(catalog) == {1: 1, 2: 1}


def test_a_worker_returns_without_blocks_that_can_not_be_read(
    monkeypatch: pytest.MonkeyPatch, catalog: Catalog
) -> None:
    monkeypatch.setattr("kvflash.state.frames.Catalog", Undumpable)
    sink = CatalogSink(catalog)
    sink.apply([message(1, 0), message(2, 0)])
    sink.leave(1)
    sink.join(1)
    assert blocks(catalog) == {2: 1}
    sink.apply([message(1, 1)])
    assert blocks(catalog) == {1: 1, 2: 1}


@pytest.mark.parametrize("epoch", [1, 2])
def test_who_returns_after_too_long_is_followed_from_what_it_tells_then(
    sink: CatalogSink, catalog: Catalog, clock: Clock, epoch: int
) -> None:
    sink.apply([message(1, number) for number in range(6)])
    sink.leave(1)
    clock.now = 61.0
    sink.join(1)
    assert blocks(catalog) == {}
    # A new life counts from 0; the same one goes on.
    first = 0 if epoch == 2 else 6
    sink.apply([message(1, number, epoch=epoch) for number in range(first, first + 3)])
    assert blocks(catalog) == {1: 3}
    assert sink.counts["lost_batches"] == first


def test_another_life_that_begins_while_it_is_away_begins_empty(
    sink: CatalogSink, catalog: Catalog
) -> None:
    sink.apply([message(1, 0), message(1, 1)])
    sink.leave(1)
    sink.apply([message(1, 0, epoch=2)])
    assert blocks(catalog) == {}
    sink.join(1)
    assert blocks(catalog) == {1: 1}
    sink.apply([message(1, 2), message(1, 1, epoch=2)])
    assert blocks(catalog) == {1: 2}
    assert sink.counts["of_earlier_lives"] == 1


@pytest.mark.parametrize("index", [{"model": "n"}, {"tenant": "t"}, {"block_size": 8}])
@pytest.mark.parametrize("is_at_once", [True, False])
@pytest.mark.parametrize("epoch", [1, 2])
def test_a_worker_that_moves_to_another_index_leaves_the_one_before(
    catalog: Catalog, index: dict[str, Any], is_at_once: bool, epoch: int
) -> None:
    sink = CatalogSink(catalog)
    key = (index.get("model", "m"), index.get("tenant", "default"))
    first = 0 if epoch == 2 else 2
    messages = [
        *(message(1, 0), message(1, 1)),
        *(message(1, number, epoch=epoch, **index) for number in range(first, first + 3)),
    ]
    for batch in [messages] if is_at_once else [[one] for one in messages]:
        sink.apply(batch)
    assert indexes(catalog) == {(key, 1): 3}
    # And back again.
    sink.apply([message(1, 0, epoch=3)])
    assert indexes(catalog) == {(("m", "default"), 1): 1}
    assert sink.counts["refused"] == 0


def test_a_worker_that_returns_in_another_index_has_no_blocks_in_the_one_before(
    sink: CatalogSink, catalog: Catalog
) -> None:
    sink.apply([message(1, 0), message(1, 1)])
    sink.leave(1)
    sink.apply([message(1, 0, epoch=2, model="other")])
    sink.join(1)
    assert indexes(catalog) == {(("other", "default"), 1): 1}
    sink.apply([message(1, 1, epoch=2, model="other")])
    assert indexes(catalog) == {(("other", "default"), 1): 2}
    # It has returned before its new life was heard of.
    sink.leave(1)
    sink.join(1)
    sink.apply([message(1, 0, epoch=3)])
    assert indexes(catalog) == {(("m", "default"), 1): 1}


def test_a_restored_worker_stays_in_the_index_of_the_snapshot(
    sink: CatalogSink, catalog: Catalog
) -> None:
    other = CatalogSink(Catalog())
    other.apply([message(1, 0, epoch=2, model="other")])
    sink.apply([message(1, 0), message(1, 1)])
    assert sink.restore(b"".join(other.snapshot())) == []
    sink.apply([message(1, 1, epoch=2, model="other")])
    assert indexes(catalog) == {(("other", "default"), 1): 2}


@pytest.mark.parametrize(
    "index", ['["\\ud800", "default", 4]', '["m", "\\udfff", 4]', "[" * 100_000]
)
def test_a_message_with_a_header_that_no_catalog_can_hold_is_dropped(
    sink: CatalogSink, catalog: Catalog, index: str, caplog: pytest.LogCaptureFixture
) -> None:
    broken = message(2, 0)
    headers = {**broken.headers, "Kvflash-Index": index}
    sink.apply([message(1, 0), Message(broken.sequence, headers, broken.payload), message(1, 1)])
    assert blocks(catalog) == {1: 2}
    assert sink.counts["undecodable"] == 1
    assert f"message {broken.sequence} is dropped (undecodable, 1 so far)" in caplog.text
    assert len(caplog.text) < 500


def test_who_is_told_of_another_way_is_left_to_whoever_does(
    sink: CatalogSink, catalog: Catalog
) -> None:
    publisher = catalog.register(7, "tcp://127.0.0.1:1", model_name="m", block_size=4)
    frame = [(0).to_bytes(8, "big"), message(7, 0).payload]
    assert catalog.take(publisher, [frame])[1] == "applied"
    sink.apply([message(1, 0)])
    assert sink.workers() == [(1, 0)]
    sink.leave(7)
    assert blocks(catalog) == {1: 1, 7: 1}
    assert sink.away() == 0


def test_a_snapshot_during_which_a_worker_left_is_none(sink: CatalogSink) -> None:
    sink.apply([message(1, 0), message(2, 0)])
    chunks = sink.snapshot()
    assert len(list(islice(chunks, 2))) == 2
    sink.leave(1)
    with pytest.raises(TransportError, match="a worker joined or left"):
        list(chunks)
    # The next one has it, wherever it is.
    other = Catalog()
    late = CatalogSink(other)
    assert late.restore(b"".join(sink.snapshot())) == []
    assert blocks(other) == {1: 1, 2: 1}


def test_who_left_is_not_held_for_a_snapshot_that_began_before_its_life(
    sink: CatalogSink, catalog: Catalog
) -> None:
    other = CatalogSink(Catalog())
    other.apply([message(1, 0), message(2, 0)])
    snapshot = b"".join(other.snapshot())
    # The head is older than the blocks: it tells of one worker only.
    head = json.dumps({"version": 1, "epochs": [[2, 0, 1]]}).encode()
    behind = 16 + int.from_bytes(snapshot[8:16], "little")
    older = snapshot[:8] + struct.pack("<Q", len(head)) + head + snapshot[behind:]
    sink.leave(1)
    assert sink.restore(older) == []
    assert blocks(catalog) == {2: 1}
