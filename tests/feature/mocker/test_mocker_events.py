"""Event batches: byte for byte what the engines' own publishers wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped,unused-ignore]
import pytest

from kvflash.mocker.config import EventEra
from kvflash.mocker.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, put
from kvflash.publisher.stream import EventOutbox

CASES = json.loads((Path(__file__).parents[2] / "vectors" / "mocker_cases.json").read_text())

ROOT = BlockStored(
    block_hashes=[11, 2**63 + 5],
    parent_block_hash=None,
    token_ids=[0, 1, 2, 3, 4, 5, 6, 7],
    block_size=4,
)
CHILD = BlockStored(
    block_hashes=[77],
    parent_block_hash=11,
    token_ids=[9, 8, 7, 6],
    block_size=4,
    lora_id=3,
    lora_name="sql-adapter",
    medium=None,
)
ON_CPU = BlockStored(
    block_hashes=ROOT.block_hashes,
    parent_block_hash=None,
    token_ids=ROOT.token_ids,
    block_size=4,
    medium="CPU",
)
BATCHES: dict[str, tuple[list[Event], int | None]] = {
    "stored-root": ([ROOT], None),
    "stored-child-lora-dp1": ([CHILD], 1),
    "stored-cpu-tier": ([ON_CPU], None),
    "removed": ([BlockRemoved(block_hashes=[11, 77])], None),
    "mixed-cleared": ([BlockRemoved(block_hashes=[11]), AllBlocksCleared(), ROOT], None),
}


def encode_batch(
    events: list[Event], *, dp_rank: int | None, era: EventEra, size: int = 4
) -> bytes:
    """A batch without its time."""
    outbox = EventOutbox(size, shape=era, dp_rank=dp_rank)
    put(outbox, events)
    batch = outbox.take()
    assert batch is not None
    return without_time(batch[1])


def without_time(payload: bytes) -> bytes:
    assert payload[:2] == b"\x93\xcb"
    return payload[10:]


@pytest.mark.parametrize("engine", CASES["wire"], ids=lambda engine: engine["engine"])
def test_bytes_are_those_of_the_engine(engine: dict[str, Any]) -> None:
    assert engine["cases"].keys() == BATCHES.keys()
    for name, recorded in engine["cases"].items():
        events, dp_rank = BATCHES[name]
        got = encode_batch(events, dp_rank=dp_rank, era=engine["era"])
        assert got == without_time(bytes.fromhex(recorded)), name


def test_a_salt_is_a_key_of_the_first_block() -> None:
    salted = BlockStored(
        block_hashes=[1, 2],
        parent_block_hash=None,
        token_ids=[5, 6],
        block_size=1,
        cache_salt="salt",
    )
    array = msgpack.unpackb(encode_batch([salted], dp_rank=0, era="positional", size=1)[:-1])
    fields = msgpack.unpackb(encode_batch([salted], dp_rank=0, era="tagged", size=1)[:-1])
    assert array == [
        ["BlockStored", [1, 2], None, [5, 6], 1, None, "GPU", None, [["salt"], None]],
    ]
    assert fields[0]["extra_keys"] == [["salt"], None]
    assert "cache_salt" not in fields[0]
    unsalted = msgpack.unpackb(encode_batch([ROOT], dp_rank=0, era="tagged")[:-1])
    assert "extra_keys" not in unsalted[0]
