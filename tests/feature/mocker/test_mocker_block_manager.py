"""The KV cache of the mocker: recorded cases, and random operations against a dumb twin."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflash.mocker.blocks import BlockManager, block_hash, extend_hashes, root_hash

CASES = json.loads((Path(__file__).parents[2] / "vectors" / "mocker_cases.json").read_text())


def active_refs(blocks: BlockManager) -> dict[int, int]:
    return dict(blocks._active)


def inactive(blocks: BlockManager) -> list[int]:
    """Next to be evicted first."""
    return list(blocks._inactive)


@pytest.mark.parametrize("case", CASES["kv"], ids=lambda case: case["id"])
def test_recorded_case(case: dict[str, Any]) -> None:
    blocks = BlockManager(case["input"]["capacity"])
    operations: dict[str, Callable[[list[int]], object]] = {
        "use": blocks.use,
        "deref": blocks.deref,
        "destroy": lambda hashes: [blocks._active.pop(one) for one in hashes],
        "probe_new": lambda hashes: sum(not blocks.is_cached(one) for one in hashes),
    }
    after = case["expected"].get("after", {})
    results: list[object] = []
    compared = 0
    for step, (name, hashes) in enumerate(case["input"]["ops"], start=1):
        results.append(operations[name](hashes))
        for what, expected in after.get(str(step), {}).items():
            compared += 1
            if what == "inactive":
                assert sorted(inactive(blocks)) == expected, step
            elif what == "active_refs":
                refs = {str(block): count for block, count in active_refs(blocks).items()}
                assert refs == expected, step
            else:
                assert what in ("ok", "new_blocks")
                assert results[-1] == expected, step
    if "results" in case["expected"]:
        compared += 1
        assert results == case["expected"]["results"]
    assert compared >= 1


def test_there_are_recorded_cases() -> None:
    assert len(CASES["kv"]) == 2


def test_tail_is_evicted_before_its_prefix() -> None:
    blocks = BlockManager(4)
    assert blocks.use([1, 2, 3, 4])
    blocks.deref([1, 2, 3, 4])
    assert blocks.use([], partial=3)
    assert blocks.drain_evicted() == [4, 3, 2]
    assert blocks.drain_evicted() == []
    assert blocks.cached_prefix([1, 2]) == 1


def test_use_never_evicts_what_it_names() -> None:
    blocks = BlockManager(3)
    assert blocks.use([1, 2, 3])
    blocks.deref([1, 2, 3])
    # 3 is the next to go, but is asked for.
    assert blocks.use([3, 9])
    assert blocks.drain_evicted() == [2]
    assert inactive(blocks) == [1]


def test_failed_use_changes_nothing() -> None:
    blocks = BlockManager(3)
    assert blocks.use([1, 2])
    blocks.deref([1, 2])
    assert blocks.use([], partial=2)
    assert blocks.drain_evicted() == [2]
    assert not blocks.use([1], partial=1)
    assert inactive(blocks) == [1]
    assert blocks.drain_evicted() == []


def test_promote_merges_with_a_twin() -> None:
    blocks = BlockManager(4)
    assert blocks.use([], partial=2)
    assert blocks.promote(7) is True
    assert blocks.promote(7) is False
    assert active_refs(blocks) == {7: 2}
    assert blocks.used_blocks == 1
    blocks.deref([7])
    blocks.deref([7])
    assert inactive(blocks) == [7]
    assert blocks.use([], partial=1)
    assert blocks.promote(7) is False
    assert (active_refs(blocks), inactive(blocks)) == ({7: 1}, [])


def test_clear_only_when_nothing_is_used() -> None:
    blocks = BlockManager(2)
    assert blocks.use([1])
    assert not blocks.clear()
    blocks.deref([1])
    assert blocks.clear()
    assert not blocks.is_cached(1)
    # Cleared blocks are not evicted, so they are not reported twice.
    assert blocks.drain_evicted() == []


def test_a_limit_below_the_capacity() -> None:
    blocks = BlockManager(4)
    assert blocks.use([1, 2], partial=1, most=3)
    # An active block is counted once.
    assert blocks.use([1], most=3)
    assert not blocks.use([3], most=3)
    assert blocks.use([3])


def test_release_of_too_many_is_a_bug() -> None:
    blocks = BlockManager(2)
    assert blocks.use([], partial=1)
    with pytest.raises(AssertionError):
        blocks.release(2)


class DumbBlocks:
    """The same rules, written as naively as possible."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.partial = 0
        self.refs: list[tuple[int, int]] = []
        self.idle: list[int] = []
        self.evicted: list[int] = []

    def use(self, hashes: list[int], partial: int) -> bool:
        active = {block for block, _ in self.refs}
        if len(active | set(hashes)) + self.partial + partial > self.capacity:
            return False
        for block in hashes:
            refs = dict(self.refs).get(block, 0)
            self.refs = [pair for pair in self.refs if pair[0] != block] + [(block, refs + 1)]
            self.idle = [other for other in self.idle if other != block]
        self.partial += partial
        while len(self.refs) + len(self.idle) + self.partial > self.capacity:
            self.evicted.append(self.idle.pop(0))
        return True

    def deref(self, hashes: list[int]) -> None:
        for block in hashes[::-1]:
            refs = dict(self.refs)[block]
            self.refs = [pair for pair in self.refs if pair[0] != block]
            if refs == 1:
                self.idle.append(block)
            else:
                self.refs.append((block, refs - 1))

    def promote(self, block: int) -> bool:
        is_new = block not in dict(self.refs) and block not in self.idle
        self.partial -= 1
        assert self.use([block], 0)
        return is_new


HASHES = st.lists(st.integers(0, 9), unique=True, max_size=5)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), capacity=st.integers(1, 8))
def test_random_operations_match_the_dumb_twin(data: st.DataObject, capacity: int) -> None:
    blocks, dumb = BlockManager(capacity), DumbBlocks(capacity)
    for _ in range(data.draw(st.integers(1, 25))):
        name = data.draw(st.sampled_from(["use", "deref", "promote", "release", "clear"]))
        if name == "use":
            hashes, partial = data.draw(HASHES), data.draw(st.integers(0, 3))
            assert blocks.use(hashes, partial) == dumb.use(hashes, partial)
        elif name == "deref" and dumb.refs:
            active = sorted(dict(dumb.refs))
            hashes = data.draw(st.lists(st.sampled_from(active), unique=True))
            blocks.deref(hashes)
            dumb.deref(hashes)
        elif name == "promote" and dumb.partial:
            block = data.draw(st.integers(0, 9))
            assert blocks.promote(block) == dumb.promote(block)
        elif name == "release":
            count = data.draw(st.integers(0, dumb.partial))
            blocks.release(count)
            dumb.partial -= count
        elif name == "clear":
            is_idle = not dumb.refs and not dumb.partial
            assert blocks.clear() == is_idle
            if is_idle:
                dumb.idle = []
        assert active_refs(blocks) == dict(dumb.refs)
        assert inactive(blocks) == dumb.idle
        assert blocks.partial_blocks == dumb.partial
        assert blocks.used_blocks + len(inactive(blocks)) <= capacity
        assert blocks.drain_evicted() == dumb.evicted
        dumb.evicted = []
        probe = data.draw(HASHES)
        cached = [block in dict(dumb.refs) or block in dumb.idle for block in probe]
        assert blocks.cached_prefix(probe) == [*cached, False].index(False)


def test_hashes_are_chained_and_separated() -> None:
    plain = root_hash(None, None)
    hashes: list[int] = []
    extend_hashes(hashes, plain, [1, 2, 3, 4, 5], 2)
    assert hashes == [block_hash(plain, [1, 2]), block_hash(hashes[0], [3, 4])]
    extend_hashes(hashes, plain, [1, 2, 3, 4, 5, 6], 2)
    assert len(set(hashes)) == 3
    roots = {
        root_hash(lora, salt) for lora in (None, "", "a", "ab") for salt in (None, "", "b", "ab")
    }
    assert len(roots) == 16
    assert all(0 <= value < 2**64 for value in (*hashes, *roots))
