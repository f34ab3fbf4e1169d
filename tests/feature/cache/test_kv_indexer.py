"""kvflash.KvIndexer: what its methods take and answer; random events are in tests/state."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from array import array

import numpy as np
import pytest

from kvflash import (
    DecodeError,
    InvalidArgumentError,
    KvIndexer,
    OverlapScores,
    compute_block_hash_array,
    compute_block_hash_for_seq,
)
from service import played

SIZE = 4
IDS = list(range(100, 116))
LOCALS = compute_block_hash_for_seq(IDS, SIZE)
NAMES = [11, 12, 13, 14]


def filled(**options):
    """Worker 1 holds four blocks, 2:3 two of them under other names."""
    index = KvIndexer(SIZE, **options)
    assert index.store(1, [11, 12, 13, 14], LOCALS) == 4
    assert index.store(2, [21, 22], LOCALS[:2], dp_rank=3) == 2
    return index


def test_a_prompt_is_found_by_tokens_and_by_hashes():
    index = filled()
    assert index.block_size() == SIZE
    wanted = {(1, 0): 4, (2, 3): 2}
    for found in (
        index.find_matches(LOCALS),
        index.find_matches(np.array(LOCALS, np.uint64)),
        index.find_matches(compute_block_hash_array(IDS, SIZE)),
        index.find_matches_for_request(IDS),
        index.find_matches_for_request(np.array([*IDS, 1, 2], np.uint32)),
    ):
        assert isinstance(found, OverlapScores)
        assert found.scores == wanted
        assert found.frequencies == [2, 2, 1, 1]
        assert len(found) == 2
    assert index.find_matches_for_request(IDS[:7]).scores == {(1, 0): 1, (2, 3): 1}
    assert index.find_matches(LOCALS, early_exit=True).scores == {(1, 0): 3, (2, 3): 2}
    assert repr(index.find_matches(LOCALS[:1])) in (
        "OverlapScores({1:0: 1, 2:3: 1})",
        "OverlapScores({2:3: 1, 1:0: 1})",
    )


def test_answers_can_be_awaited_as_the_published_ones():
    index = filled()

    async def ask():
        by_hash = await index.find_matches(LOCALS)
        by_token = await index.find_matches_for_request(IDS)
        return by_hash.scores, by_token.scores

    wanted = {(1, 0): 4, (2, 3): 2}
    assert asyncio.run(ask()) == (wanted, wanted)


def test_many_prompts_are_asked_at_once():
    index = filled()
    prompts = [IDS, IDS[:4], np.array(IDS[:8], np.uint32), [], [9] * 8]
    found = [one.scores for one in index.find_many(prompts)]
    assert found == [index.find_matches_for_request(ids).scores for ids in prompts]
    assert found[1] == {(1, 0): 1, (2, 3): 1}
    assert index.find_many([]) == []
    # More than are hashed, and than are answered, at a time.
    long = np.arange(1, 200_001, dtype=np.uint32)
    many = [one.scores for one in index.find_many([long, *prompts, long, long] + prompts * 30)]
    assert many == [{}, *found, {}, {}] + found * 30


def test_blocks_run_out_unless_they_are_stored_again():
    now = [1_000.0]
    index = KvIndexer(SIZE, ttl_s=60.0, clock=lambda: now[0])
    index.store(1, NAMES, LOCALS)
    index.store(2, NAMES[:2], LOCALS[:2])
    now[0] += 40.0
    # A block that goes on from the second one renews these two.
    index.store(1, [77], [77], parent_hash=NAMES[1])
    now[0] += 19.9
    assert index.find_matches(LOCALS).scores == {(1, 0): 4, (2, 0): 2}
    now[0] += 3.0
    assert index.find_matches(LOCALS).scores == {(1, 0): 2}
    assert index.find_many([IDS])[0].scores == {(1, 0): 2}
    assert (index.block_count(1), index.block_count(2)) == (3, 0)
    assert index.stats()["expired_blocks_total"] == 4
    assert index.workers() == [(1, 0), (2, 0)], "they stay known"
    now[0] += 1e9
    assert index.stats()["memberships"] == 0
    with pytest.raises(InvalidArgumentError, match="Orphan"):
        index.store(1, [78], [78], parent_hash=NAMES[1])
    index.store(1, NAMES, LOCALS)
    now[0] += 59.9
    assert index.top(LOCALS, 1) == [(1, 0, 4)]


@pytest.mark.parametrize("ttl_s", [0, -1.0, 0.0009, 1e13, float("nan"), float("inf")])
def test_a_time_out_of_range_is_refused(ttl_s):
    with pytest.raises(InvalidArgumentError, match=r"ttl_s must be seconds in 0\.001\.\.=1e12"):
        KvIndexer(SIZE, ttl_s=ttl_s)


def test_a_clock_without_a_time_is_refused():
    with pytest.raises(InvalidArgumentError, match="clock needs ttl_s"):
        KvIndexer(SIZE, clock=lambda: 0.0)
    index = KvIndexer(SIZE, ttl_s=1.0, clock=lambda: float("nan"))
    with pytest.raises(InvalidArgumentError, match="clock must return finite seconds"):
        index.find_matches(LOCALS)


def test_identities_stay_apart():
    index = KvIndexer(SIZE)
    for name, identity in enumerate(({}, {"lora_name": "a"}, {"cache_salt": "a"})):
        locals_ = compute_block_hash_for_seq(IDS, SIZE, **identity)
        index.store(name, [1, 2, 3, 4], locals_, **identity)
        assert index.find_matches_for_request(IDS, **identity).scores == {(name, 0): 4}
        [found] = index.find_many([IDS], **identity)
        assert found.scores == {(name, 0): 4}
    seeds = {
        event["worker_id"]: event["event"]["data"]["stored"].get("seed")
        for event in map(json.loads, index.dump_tree_as_events())
    }
    assert seeds[0] is None, "no identity is not said"
    assert len(set(seeds.values())) == 3


def test_the_deepest_come_first_and_ties_by_worker():
    index = filled()
    index.store(3, [31, 32, 33], LOCALS[:3])
    index.store(0, [1, 2], LOCALS[:2])
    wanted = [(1, 0, 4), (3, 0, 3), (0, 0, 2), (2, 3, 2)]
    for k in range(6):
        assert index.top(LOCALS, k) == wanted[:k]
    assert index.top([5], 3) == []


def test_matches_are_written_into_the_callers_memory():
    index = filled()
    ids, ranks, depths = np.zeros(8, np.uint64), np.zeros(8, np.uint32), np.zeros(8, np.uint32)
    count = index.find_matches_into(LOCALS, ids, ranks, depths)
    assert count == 2
    written = zip(
        ids[:count].tolist(), ranks[:count].tolist(), depths[:count].tolist(), strict=True
    )
    assert sorted(written) == [(1, 0, 4), (2, 3, 2)]
    assert depths[count:].tolist() == [0] * 6, "what is behind stays as it was"
    # Too short: the deepest.
    assert index.find_matches_into(LOCALS, ids[:1], ranks, depths) == 1
    assert (ids[0], ranks[0], depths[0]) == (1, 0, 4)
    assert index.find_matches_into(LOCALS, ids[:0], ranks, depths) == 0
    assert index.find_matches_into([5], ids, ranks, depths) == 0
    q, i = array("Q", [0, 0]), array("I", [0, 0])
    assert index.find_matches_into(LOCALS[:1], q, i, array("I", [0, 0])) == 2
    assert sorted(zip(q, i, strict=True)) == [(1, 0), (2, 3)]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (np.zeros(4, np.uint64), "depths"),
        (np.zeros(4, np.float32), "depths"),
        (np.zeros(8, np.uint32)[::2], "depths"),
        (np.zeros((2, 2), np.uint32), "depths"),
        (bytes(16), "depths"),
        ([0, 0], "depths"),
        (memoryview(array("I", [0])).toreadonly(), "depths"),
        (np.zeros(17, np.uint8)[1:].view(np.uint32), "depths"),
    ],
)
def test_memory_of_another_form_is_refused(wrong, named):
    with pytest.raises(InvalidArgumentError, match=f"{named} must be a writable flat buffer"):
        filled().find_matches_into(LOCALS, np.zeros(4, np.uint64), np.zeros(4, np.uint32), wrong)


def test_arrays_are_stored_and_removed_as_lists_are():
    for make in (
        list,
        lambda h: np.array(h, np.uint64),
        lambda h: np.array(h, np.uint64).view(np.int64),
        lambda h: array("Q", h),
    ):
        index = KvIndexer(SIZE)
        names = make([2**64 - 1, 12, 13, 14])
        assert index.store(1, names[:2], make(LOCALS[:2])) == 2
        assert index.store(1, names[2:], make(LOCALS[2:]), parent_hash=12, tier="cpu") == 2
        found = index.find_matches(LOCALS)
        assert (found.scores, found.tier_scores) == ({(1, 0): 2}, {(1, 0): (2, 4, 4, 4)})
        assert index.remove(1, names[:1]) == 1
        assert index.remove(1, names[:1]) == 0
        assert index.remove(1, names[2:], tier="host_pinned") == 2
        assert index.block_count(1) == 1


def test_a_chain_that_cannot_be_is_refused_as_a_whole():
    index = filled()
    before = index.dump_tree_as_events()
    for names, locals_, parent, why in (
        ([1, 2], [5], None, "of one length, got 2 and 1"),
        ([15], [5], 99, "Orphan"),
        ([15, 15], [5, 6], None, "SelfReference"),
        ([2**64], [5], None, r"block_hashes\[0\]"),
        ([15], [None], None, r"local_hashes\[0\]"),
        ([15], [5], 2**64, r"parent_hash\[0\]"),
    ):
        with pytest.raises(InvalidArgumentError, match=why):
            index.store(1, names, locals_, parent)
    with pytest.raises(InvalidArgumentError, match=r'tier must be device, .* got "tape"'):
        index.store(1, [15], [5], tier="tape")
    assert index.dump_tree_as_events() == before


def test_copies_are_counted_unless_told_otherwise():
    for mode, left in (("copies", 1), ("set", 0)):
        index = KvIndexer(SIZE, count_mode=mode)
        index.store(1, [11], LOCALS[:1])
        assert index.store(1, [11], LOCALS[:1]) == 0
        index.remove(1, [11])
        assert len(index.find_matches(LOCALS)) == left


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"block_size": 4, "count_mode": "bag"}, 'count_mode must be .* got "bag"'),
    ],
)
def test_options_out_of_range_are_refused(options, why):
    with pytest.raises(InvalidArgumentError, match=why):
        KvIndexer(**options)


def test_a_limit_of_blocks_refuses():
    index = KvIndexer(SIZE, max_blocks=3)
    assert index.store(1, [11, 12, 13, 14], LOCALS) == 3
    assert index.find_matches(LOCALS).scores == {(1, 0): 3}
    assert index.stats()["refused_blocks_total"] == 1


def test_a_capacity_keeps_the_blocks_stored_last():
    index = KvIndexer(SIZE, capacity_blocks=2)
    for name in range(5):
        index.store(1, [name], [1_000 + name])
    assert index.block_count(1) == 2
    assert index.stats()["evicted_blocks_total"] == 3
    assert index.find_matches([1_004]).scores == {(1, 0): 1}
    assert len(index.find_matches([1_000])) == 0


def test_a_dump_fills_another_index():
    index = filled()
    index.store(1, [15], [7], parent_hash=14, tier="disk")
    index.store(1, [11], LOCALS[:1])
    index.remove(1, [12])
    copy = KvIndexer(SIZE)
    dump = index.dump_tree_as_events()
    assert copy.apply_events(dump) == len(dump)
    assert played(map(json.loads, copy.dump_tree_as_events())) == played(map(json.loads, dump))
    copy.apply_events([line.encode() for line in dump[:0]])
    for each in (index, copy):
        assert each.find_matches(LOCALS).scores == {(1, 0): 1, (2, 3): 2}
        each.store(1, [12], LOCALS[1:2], parent_hash=11)
        assert each.find_matches([*LOCALS, 7]).tier_scores[1, 0] == (4, 4, 5, 5)
        # Stored twice, so that one removal leaves it.
        each.remove(1, [11])
        assert each.find_matches(LOCALS).scores[1, 0] == 4


def test_a_bad_event_is_named_by_its_place_and_the_ones_before_it_stay():
    good, orphan = filled().dump_tree_as_events()[:1], KvIndexer(SIZE)
    with pytest.raises(DecodeError, match=r"events\[1\]"):
        orphan.apply_events([*good, b"{}"])
    assert orphan.block_count(1) > 0
    event = {"event_id": 0, "data": {"stored": {"parent_hash": 9, "blocks": []}}}
    event["data"]["stored"]["blocks"] = [{"block_hash": 1, "tokens_hash": 2}]
    line = json.dumps({"worker_id": 8, "event": event})
    with pytest.raises(InvalidArgumentError, match=r"events\[1\]: .*Orphan"):
        orphan.apply_events([*good, line])
    with pytest.raises(TypeError):
        orphan.apply_events([5])


def test_events_of_engines_are_taken_one_by_one():
    index = KvIndexer(SIZE)
    blocks = [{"block_hash": 11, "tokens_hash": LOCALS[0], "mm_extra_info": None}]
    data = {"stored": {"parent_hash": None, "blocks": blocks}}
    index.apply_event(1, json.dumps({"event_id": 1, "data": data, "dp_rank": 2}).encode())
    assert index.find_matches_for_request(IDS).scores == {(1, 2): 1}
    index.apply_event(1, b'{"event_id": 2, "data": "cleared", "dp_rank": 2}')
    assert index.workers() == [(1, 2)]
    assert len(index.find_matches_for_request(IDS)) == 0


def test_workers_come_and_go():
    index = filled()
    index.store(1, [1], [1], dp_rank=7)
    assert index.workers() == [(1, 0), (1, 7), (2, 3)]
    assert index.clear_all_blocks(1, 7) == 1
    assert index.clear_all_blocks(1) == 4
    assert index.clear_all_blocks(9) == 0
    assert index.workers() == [(1, 0), (1, 7), (2, 3)]
    assert index.remove_worker(1) == 2
    assert index.remove_worker(1) == 0
    assert index.workers() == [(2, 3)]
    assert (index.block_count(2, 3), index.block_count(2)) == (2, 0)


def test_the_figures_are_named():
    stats = filled().stats()
    wanted = {"workers": 2, "memberships": 6, "unique_blocks": 4, "holders": 2, "predicted": 0}
    assert {name: stats[name] for name in wanted} == wanted
    assert {"bytes", "evicted_blocks_total", "expired_blocks_total"} <= set(stats)


def test_threads_ask_and_tell_at_once():
    """Depths that the writer really had, whichever way they are asked for."""
    index = KvIndexer(SIZE, count_mode="set")
    chain = np.arange(1, 65, dtype=np.uint64)
    index.store(2, chain, chain)
    index.store(1, chain[:1], chain[:1])
    wrong, asked, is_over = [], [], threading.Event()

    def write():
        try:
            deadline = time.monotonic() + 60
            while len(asked) < 200 and time.monotonic() < deadline:
                for at in range(1, 64):
                    index.store(1, chain[at : at + 1], chain[at : at + 1], int(chain[at - 1]))
                index.remove(1, chain[:0:-1])
        finally:
            is_over.set()

    def read():
        ids, ranks, depths = np.zeros(4, np.uint64), np.zeros(4, np.uint32), np.zeros(4, np.uint32)
        while not is_over.is_set():
            count = index.find_matches_into(chain, ids, ranks, depths)
            into = dict(zip(ids[:count].tolist(), depths[:count].tolist(), strict=True))
            top = {worker: depth for worker, _, depth in index.top(chain, 4)}
            for found in (into, top):
                if found.get(2) != 64 or not 1 <= found.get(1, 0) <= 64:
                    wrong.append(found)
            asked.append(1)

    threads = [threading.Thread(target=call) for call in (write, read, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) >= 200
    assert wrong == []


def test_prompts_with_pictures_and_embeddings_are_found():
    item = {"identifier": "a", "offset": 5, "length": 2}
    pictured = compute_block_hash_for_seq(IDS, SIZE, mm=[item])
    embedded = compute_block_hash_for_seq(IDS, SIZE, embeds=["00", "01", "02", "03"])
    index = KvIndexer(SIZE)
    index.store(1, [11, 12, 13, 14], pictured)
    index.store(2, [21, 22, 23, 24], embedded)

    def found(**keys):
        return index.find_matches_for_request(IDS, **keys).scores

    assert found(mm=[item]) == index.find_matches(pictured).scores == {(1, 0): 4}
    assert found(mm=[{**item, "offset": 6}]) == found() == {(1, 0): 1}
    assert found(embeds=[b"\0", b"\1", b"\2", b"\3"]) == {(2, 0): 4}
    assert found(embeds=["00", "ff", "02", "03"]) == {(2, 0): 1}
    with pytest.raises(InvalidArgumentError, match=r"mm\[0\].offset must be"):
        found(mm=[{**item, "offset": -1}])
    with pytest.raises(InvalidArgumentError, match=r"embeds\[0\] must be"):
        found(embeds=["xy"])
