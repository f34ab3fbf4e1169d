"""Effects of a log's messages on a catalog: workers that leave, with or without a return."""

from __future__ import annotations

import json
import struct
from itertools import islice

import msgpack
import pytest

from kvflash._core import Catalog
from kvflash.errors import TransportError
from kvflash.state.frames import CatalogSink, Origin, event_headers
from kvflash.transport.base import Message

NEXT = iter(range(1, 1_000_000))


def message(instance_id: int, number: int, *, epoch: int = 1) -> Message:
    """A block of its own in a batch of its own."""
    origin = Origin(instance_id=instance_id, dp_rank=0, epoch=epoch, model_name="m", block_size=4)
    tokens = [number * 10 + at for at in range(4)]
    event = ["BlockStored", [number + 1], None, tokens, 4, None]
    payload = msgpack.packb([0.0, [event], 0])
    return Message(next(NEXT), event_headers(origin, number), payload)


def blocks(catalog: Catalog) -> dict[int, int]:
    return {told[1]: told[3] for told in catalog.digests()}


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
def sink(catalog: Catalog, clock: Clock) -> CatalogSink:
    return CatalogSink(catalog, away_s_max=60.0, now_s=clock)


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
    with pytest.raises(TransportError, match="a worker came or went"):
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
