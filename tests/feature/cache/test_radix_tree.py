"""kvflash.RadixTree: the published cases, the JSON of events, and errors by class."""

from __future__ import annotations

import json
import threading
from array import array

import numpy as np
import pytest

from kvflash import (
    DecodeError,
    InvalidArgumentError,
    OverlapScores,
    RadixTree,
    compute_block_hash_for_seq,
)
from service import VECTORS, played

CASES = [
    case
    for case in json.loads((VECTORS / "radix_cases.json").read_text())
    if case["area"] == "radix"
]


def stored(blocks, parent=None, dp_rank=0, event_id=0):
    """An event in which block i is named 100 * i and its tokens hash to i."""
    data = {
        "stored": {
            "parent_hash": None if parent is None else 100 * parent,
            "blocks": [
                {"block_hash": 100 * i, "tokens_hash": i, "mm_extra_info": None} for i in blocks
            ],
        }
    }
    return json.dumps({"event_id": event_id, "data": data, "dp_rank": dp_rank}).encode()


def removed(blocks, dp_rank=0):
    data = {"removed": {"block_hashes": [100 * i for i in blocks]}}
    return json.dumps({"event_id": 0, "data": data, "dp_rank": dp_rank}).encode()


def cleared(dp_rank=0):
    return json.dumps({"event_id": 0, "data": "cleared", "dp_rank": dp_rank}).encode()


def scores(tree, sequence, *, early_exit=False):
    return tree.find_matches(sequence, early_exit).scores


def facts(tree):
    """The held blocks in a dump."""
    return played(map(json.loads, tree.dump_tree_as_events()))


def replayed(tree):
    copy = RadixTree()
    for event in map(json.loads, tree.dump_tree_as_events()):
        copy.apply_event(event["worker_id"], json.dumps(event["event"]).encode())
    return copy


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_published_case(case):
    tree, answers, done = RadixTree(), [], 0
    expected = case["expected"]
    for kind, *args in case["input"]["ops"]:
        if kind == "store":
            worker, blocks, parent = args
            if "error" in expected and done == len(case["input"]["ops"]) - 1:
                before = facts(tree)
                with pytest.raises(InvalidArgumentError):
                    tree.apply_event(worker, stored(blocks, parent))
                assert facts(tree) == before, "a refused event leaves nothing behind"
            else:
                tree.apply_event(worker, stored(blocks, parent))
        elif kind == "remove":
            worker, blocks = args
            tree.apply_event(worker, removed(blocks))
        elif kind == "clear":
            tree.apply_event(args[0], cleared())
        elif kind == "query":
            found = scores(tree, args[0], early_exit="early_exit" in args)
            assert all(rank == 0 for _, rank in found)
            answers.append({str(worker): blocks for (worker, _), blocks in found.items()})
        else:
            assert kind in ("dump", "replay dump into empty tree", "compare queries and dump")
        done += 1
    if "queries" in expected:
        assert answers == expected["queries"]
    if "contiguous_score" in expected:
        assert answers == [expected["contiguous_score"]]
    for worker, blocks in expected.get("blocks_per_worker", {}).items():
        assert tree.block_count(int(worker), 0) == blocks
    if expected.get("equal"):
        copy = replayed(tree)
        assert facts(copy) == facts(tree)
        for query in ([1, 2, 3], [1, 4, 5], [6, 7], [1, 4], [9]):
            assert scores(copy, query) == scores(tree, query)
    assert done == len(case["input"]["ops"])


def test_there_are_cases():
    assert len(CASES) >= 7


def test_scores_are_by_worker_and_rank():
    tree = RadixTree()
    tree.apply_event(7, stored([1, 2], dp_rank=0))
    tree.apply_event(7, stored([1], dp_rank=3))
    tree.apply_event(2**64 - 1, stored([1, 2, 3], dp_rank=2**32 - 1))
    found = tree.find_matches([1, 2, 3])
    assert isinstance(found, OverlapScores)
    assert found.scores == {(7, 0): 2, (7, 3): 1, (2**64 - 1, 2**32 - 1): 3}
    assert len(found) == 3
    assert len(tree.find_matches([9])) == 0
    assert tree.find_matches([]).scores == {}
    assert tree.block_count(7, 3) == 1
    assert tree.block_count(7, 9) == 0
    assert "7:0: 2" in repr(found)


def test_every_form_of_hashes_is_asked_alike():
    tree = RadixTree()
    locals_ = [2**64 - 1, 5, 2**63]
    blocks = [
        {"block_hash": 10 + at, "tokens_hash": h, "mm_extra_info": None}
        for at, h in enumerate(locals_)
    ]
    data = {"stored": {"parent_hash": None, "blocks": blocks}}
    tree.apply_event(1, json.dumps({"event_id": 0, "data": data, "dp_rank": 0}).encode())
    signed = [-1, 5, -(2**63)]
    for form in (
        locals_,
        tuple(locals_),
        signed,
        array("Q", locals_),
        array("q", signed),
        np.array(locals_, dtype=np.uint64),
        np.array(signed, dtype=np.int64),
        np.array(locals_, dtype=">u8"),
        np.repeat(np.array(locals_, dtype=np.uint64), 2)[::2],
        [np.uint64(h) for h in locals_],
    ):
        assert scores(tree, form) == {(1, 0): 3}


@pytest.mark.parametrize(
    ("sequence", "named"),
    [
        ([1, 2**64], str(2**64)),
        ([1, -(2**63) - 1], "sequence[1]"),
        ([1, None], "None"),
        ([1, True], "True"),
    ],
)
def test_a_hash_that_is_none_is_refused_by_index(sequence, named):
    with pytest.raises(InvalidArgumentError) as caught:
        RadixTree().find_matches(sequence)
    assert "sequence[1]" in str(caught.value)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "event",
    [
        b"",
        b"nonsense",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"event_id": 1}',
        b'{"event_id": 1, "data": "dropped"}',
        b'{"event_id": 1, "data": {"stored": {"parent_hash": null}}}',
        b'{"event_id": 1, "data": {"removed": {"block_hashes": ["a"]}}}',
        b'{"event_id": 1, "data": {"removed": {"block_hashes": [18446744073709551616]}}}',
        b'{"event_id": -1, "data": "cleared"}',
        b'{"event_id": 1, "data": "cleared", "dp_rank": 4294967296}',
        b'{"event_id": 1, "data": "cleared"} more',
        b"[" * 100_000,
    ],
    ids=lambda event: repr(event[:60]),
)
def test_what_is_no_event_is_a_decode_error(event):
    with pytest.raises(DecodeError) as caught:
        RadixTree().apply_event(1, event)
    assert isinstance(caught.value, ValueError)


def test_unknown_fields_and_absent_ones_have_a_meaning():
    tree = RadixTree()
    event = {
        "event_id": 1,
        "new_field": {"a": [1]},
        "data": {
            "stored": {
                "blocks": [{"block_hash": -1, "tokens_hash": -2, "later": 1}],
                "start_position": 0,
            }
        },
    }
    tree.apply_event(1, json.dumps(event).encode())
    assert scores(tree, [-2]) == {(1, 0): 1}
    tree.apply_event(
        1, b'{"event_id": 2, "data": {"removed": {"block_hashes": [18446744073709551615]}}}'
    )
    assert scores(tree, [-2]) == {}


def test_numbers_outside_their_width_are_no_worker_ids():
    tree = RadixTree()
    for worker in (-1, 2**64):
        with pytest.raises((OverflowError, InvalidArgumentError)):
            tree.apply_event(worker, cleared())
    with pytest.raises(TypeError):
        tree.apply_event(1, "text")


def test_unknown_removals_do_not_end_the_list():
    tree = RadixTree()
    tree.apply_event(1, stored([1, 2, 3]))
    tree.apply_event(1, removed([9, 3, 8, 2]))
    assert scores(tree, [1, 2, 3]) == {(1, 0): 1}
    tree.apply_event(5, removed([1]))
    assert tree.remove_worker(5) == 0, "a removal does not make a worker known"


def test_clear_concerns_one_rank_and_remove_worker_all():
    tree = RadixTree()
    for rank in (0, 1, 2):
        tree.apply_event(1, stored([1, 2], dp_rank=rank))
    tree.apply_event(2, stored([1]))
    tree.apply_event(1, cleared(dp_rank=1))
    assert scores(tree, [1, 2]) == {(1, 0): 2, (1, 2): 2, (2, 0): 1}
    assert tree.clear_all_blocks(1, 2) == 2
    assert scores(tree, [1, 2]) == {(1, 0): 2, (2, 0): 1}
    assert tree.clear_all_blocks(1) == 2
    assert tree.remove_worker(1) == 3, "a cleared rank stays known"
    assert tree.remove_worker(1) == 0
    assert tree.clear_all_blocks(1) == 0
    assert scores(tree, [1, 2]) == {(2, 0): 1}


def test_a_hole_survives_a_dump():
    tree = RadixTree()
    tree.apply_event(1, stored([1, 2, 3, 4]))
    tree.apply_event(1, removed([2]))
    copy = replayed(tree)
    assert scores(copy, [1, 2, 3, 4]) == {(1, 0): 1}
    for each in (tree, copy):
        # The hole is filled: what lay behind it counts again.
        each.apply_event(1, stored([2], parent=1))
        assert scores(each, [1, 2, 3, 4]) == {(1, 0): 4}
    assert facts(copy) == facts(tree)


def test_a_child_of_an_evicted_block_is_refused():
    tree = RadixTree()
    tree.apply_event(1, stored([1, 2]))
    tree.apply_event(1, removed([2]))
    with pytest.raises(InvalidArgumentError, match="after block 200 rejected: Orphan"):
        tree.apply_event(1, stored([3], parent=2))
    assert scores(tree, [1, 2, 3]) == {(1, 0): 1}
    assert tree.block_count(1, 0) == 1


def test_queries_run_beside_events():
    """Readers see a depth that the worker really had: it grows and shrinks at its end only."""
    tree, errors, is_over = RadixTree(), [], threading.Event()
    chain = list(range(1, 65))
    tree.apply_event(2, stored(chain))
    tree.apply_event(1, stored(chain[:1]))

    def write():
        try:
            for _ in range(60):
                for at in range(1, 64):
                    tree.apply_event(1, stored([chain[at]], parent=chain[at - 1]))
                for at in range(63, 0, -1):
                    tree.apply_event(1, removed([chain[at]]))
        finally:
            is_over.set()

    asked = 0

    def read():
        nonlocal asked
        while not is_over.is_set():
            found = scores(tree, chain)
            if found.get((2, 0)) != 64 or not 1 <= found.get((1, 0), 0) <= 64:
                errors.append(found)
            asked += 1

    threads = [threading.Thread(target=call) for call in (write, read, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asked > 10
    assert errors == []


def test_prompts_with_pictures_are_found():
    ids, item = [7] * 12, {"identifier": "a", "offset": 5, "length": 2}
    tree = RadixTree()
    blocks_held = [
        {"block_hash": name, "tokens_hash": local}
        for name, local in enumerate(compute_block_hash_for_seq(ids, 4, mm=[item]))
    ]
    data = {"stored": {"parent_hash": None, "blocks": blocks_held}}
    tree.apply_event(1, json.dumps({"event_id": 0, "data": data, "dp_rank": 0}).encode())

    def blocks(**keys):
        return scores(tree, compute_block_hash_for_seq(ids, 4, **keys)).get((1, 0), 0)

    assert blocks(mm=[item]) == 3
    assert blocks(mm=[{**item, "offset": 6}]) == blocks() == 1
    assert blocks(embeds=["00", "01", "02"]) == 0
