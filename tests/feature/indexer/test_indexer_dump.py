"""The standalone indexer's /dump, and what a full index refuses."""

from __future__ import annotations

import json

from kvflash import (
    KvIndexer,
    RadixTree,
    compute_block_hash_for_seq,
    compute_sequence_hashes,
)
from service import (
    EmbeddedIndexer,
    dumped_blocks,
    removed,
    stored,
)
from support_indexer import IDS, SIZE, publish, query, register

# -- dump


def test_a_dump_round_trips_by_worker(http, engine, model):
    """The dump as events into kvflash.RadixTree answers as the indexer, holes included."""
    made, other = engine(replay=False), engine(replay=False)
    register(http, made, model)
    register(http, other, model, 2, dp_rank=1)
    ids = [7 * n for n in range(64)]
    publish(
        http,
        made,
        stored(range(1, 9), ids[:32], block_size=SIZE),
        stored([20, 21], [900 + n for n in range(8)], 3, block_size=SIZE),
        stored([31], IDS[:4], block_size=SIZE, lora_name="sql"),
        removed([4, 6]),
        stored([2], ids[4:8], 1, block_size=SIZE),
    )
    publish(
        http,
        other,
        stored([-1, -2, -3], ids[:12], block_size=SIZE),
        stored([-1], ids[:4], block_size=SIZE),
        instance=2,
        rank=1,
    )
    dump = http.get("/dump")[f"{model}:default"]
    assert dump["block_size"] == SIZE
    assert len(dump["events"]) >= 8
    tree = RadixTree()
    for event in dump["events"]:
        assert "storage_tier" not in event, "device memory is not said"
        tree.apply_event(event["worker_id"], json.dumps(event["event"]).encode())
    prompts = [(ids, {}), (ids[:12] + [900 + n for n in range(8)], {}), (IDS, {"lora_name": "sql"})]
    for prompt, identity in prompts:
        for length in range(0, len(prompt) + 1, SIZE):
            hashes = compute_block_hash_for_seq(prompt[:length], SIZE, **identity)
            found = tree.find_matches(hashes).scores
            scores = query(http, model, prompt[:length], **identity)["scores"]
            assert {(1, 0): scores["1"]["0"] // SIZE, (2, 1): scores["2"]["1"] // SIZE} == {
                (1, 0): found.get((1, 0), 0),
                (2, 1): found.get((2, 1), 0),
            }
    assert query(http, model, ids)["scores"] == {"1": {"0": 12}, "2": {"1": 12}}
    # Blocks behind the hole are in the dump as well: filling the hole brings them back.
    [fourth] = compute_block_hash_for_seq(ids[12:16], SIZE)
    [sixth] = compute_block_hash_for_seq(ids[20:24], SIZE)
    for name, local, parent in ((4, fourth, 3), (6, sixth, 5)):
        blocks = [{"block_hash": name, "tokens_hash": local, "mm_extra_info": None}]
        data = {"stored": {"parent_hash": parent, "blocks": blocks}}
        tree.apply_event(1, json.dumps({"event_id": 0, "data": data, "dp_rank": 0}).encode())
    assert tree.find_matches(compute_block_hash_for_seq(ids, SIZE)).scores[1, 0] == 8


def test_a_dump_says_tiers_and_what_lies_behind_a_hole(http, engine, model):
    made = engine(replay=False)
    register(http, made, model)
    publish(
        http,
        made,
        stored([1], IDS[:4], block_size=SIZE),
        stored([2], IDS[4:8], 1, block_size=SIZE, medium="CPU"),
        stored([3], IDS[8:12], 2, block_size=SIZE, medium="DISK"),
        stored([4], IDS[12:16], 3, block_size=SIZE, medium="EXTERNAL"),
        removed([1]),
    )
    chain = compute_sequence_hashes(compute_block_hash_for_seq(IDS, SIZE))
    assert dumped_blocks(http, f"{model}:default") == {
        (1, 0, "host_pinned", 2, chain[1]),
        (1, 0, "disk", 3, chain[2]),
        (1, 0, "external", 4, chain[3]),
    }
    events = http.get("/dump")[f"{model}:default"]["events"]
    assert [event["event"]["event_id"] for event in events] == list(range(len(events)))
    assert "removed" in events[-1]["event"]["data"], "what only marked a place goes last"


def test_a_salted_chain_goes_on_after_a_load(http, engine, model):
    """Engines name the salt with the first block only, so the dump must keep the chain's owner."""
    made = engine(replay=False)
    register(http, made, model)
    publish(http, made, stored([1, 2], IDS[:8], block_size=SIZE, cache_salt="tenant"))
    events = http.get("/dump")[f"{model}:default"]["events"]
    seeds = {event["event"]["data"]["stored"]["seed"] for event in events}
    assert len(seeds) == 1
    index = KvIndexer(SIZE)
    assert index.apply_events([json.dumps(event) for event in events]) == len(events) >= 1
    again = map(json.loads, index.dump_tree_as_events())
    assert {event["event"]["data"]["stored"]["seed"] for event in again} == seeds


def test_an_index_without_workers_dumps_nothing(http, engine, model):
    register(http, engine(replay=False), model)
    entry = http.get("/dump")[f"{model}:default"]
    assert (entry["block_size"], entry["events"]) == (SIZE, [])
    assert [mark["last_sequence"] for mark in entry["watermarks"]] == [None]


def test_a_full_index_refuses_and_counts(engine):
    embedded = EmbeddedIndexer(max_blocks=2)
    try:
        made = engine(replay=False)
        register(embedded.http, made, "full")
        entry = publish(embedded.http, made, stored([1, 2, 3, 4], IDS, block_size=SIZE))
        assert entry["events"]["refused_blocks"] == 2
        assert query(embedded.http, "full")["scores"] == {"1": {"0": 8}}
        publish(embedded.http, made, removed([2]))
        publish(embedded.http, made, stored([2], IDS[4:8], 1, block_size=SIZE))
        assert query(embedded.http, "full")["scores"] == {"1": {"0": 8}}
    finally:
        embedded.close()
