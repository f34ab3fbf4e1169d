"""Event batches: byte for byte what the engines' own publishers wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped,unused-ignore]
import pytest

from kvflash.mocker.config import EventEra
from kvflash.publisher.stream import EventOutbox

CASES = json.loads((Path(__file__).parents[2] / "vectors" / "mocker_cases.json").read_text())


def store_root(outbox: EventOutbox, medium: str | None = "GPU") -> None:
    tokens = [0, 1, 2, 3, 4, 5, 6, 7]
    outbox.store(tokens, [4, 4], [11, 2**63 + 5], medium=medium)


def store_child(outbox: EventOutbox) -> None:
    outbox.store([9, 8, 7, 6], [4], [77], 3, 11, lora_name="sql-adapter")


def store_on_cpu(outbox: EventOutbox) -> None:
    store_root(outbox, "CPU")


def remove(outbox: EventOutbox) -> None:
    outbox.remove([11, 77], medium="GPU")


def remove_clear_and_store(outbox: EventOutbox) -> None:
    outbox.remove([11], medium="GPU")
    outbox.clear()
    store_root(outbox)


Put = Callable[[EventOutbox], None]
BATCHES: dict[str, tuple[Put, int | None]] = {
    "stored-root": (store_root, None),
    "stored-child-lora-dp1": (store_child, 1),
    "stored-cpu-tier": (store_on_cpu, None),
    "removed": (remove, None),
    "mixed-cleared": (remove_clear_and_store, None),
}


def encode_batch(put: Put, *, dp_rank: int | None, era: EventEra, size: int = 4) -> bytes:
    """A batch without its time."""
    outbox = EventOutbox(size, shape=era, dp_rank=dp_rank)
    put(outbox)
    outbox.cut()
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
        put, dp_rank = BATCHES[name]
        got = encode_batch(put, dp_rank=dp_rank, era=engine["era"])
        assert got == without_time(bytes.fromhex(recorded)), name


def test_a_salt_is_a_key_of_the_first_block() -> None:
    def salted(outbox: EventOutbox) -> None:
        outbox.store([5, 6], [1, 1], [1, 2], cache_salt="salt", medium="GPU")

    array = msgpack.unpackb(encode_batch(salted, dp_rank=0, era="positional", size=1)[:-1])
    fields = msgpack.unpackb(encode_batch(salted, dp_rank=0, era="tagged", size=1)[:-1])
    assert array == [
        ["BlockStored", [1, 2], None, [5, 6], 1, None, "GPU", None, [["salt"], None]],
    ]
    assert fields[0]["extra_keys"] == [["salt"], None]
    assert "cache_salt" not in fields[0]
    unsalted = msgpack.unpackb(encode_batch(store_root, dp_rank=0, era="tagged")[:-1])
    assert "extra_keys" not in unsalted[0]
