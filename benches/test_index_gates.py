"""Ratios between the index and a plain hash map, measured side by side: ``make bench``.

Speed is processor time, which does not see what else the machine does. Every figure is the median
of trials in fresh processes that take turns. KVFLASH_TRACE names a trace to replay instead of the
generated one.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

import pytest

from kvflash import RadixTree

sys.path.insert(0, str(Path(__file__).parent / "replay"))
from replay import HERE, Harness, build

TRACE = os.environ.get("KVFLASH_TRACE")
BOTH = ["kvflash", "plain"]

# How many times the plain map's figure was that of the index: the least of three runs on two busy
# cores. A gate is a part of it, for what machines differ in.
RECORDED = {
    "events": {"cpu_ns_per_event": 5.1},
    # One block an event: all that the map does is three insertions.
    "appends": {"cpu_ns_per_event": 0.93},
    "reads": {"native_ns": 16.0, "map_ns": 11.0},
    "matched": {"native_ns": 238.0},
    "bytes": {"bytes_per_membership": 7.1},
    "sharer": {"bytes_per_block_2_to_16": 38.0},
    # The map's time depends on the processor's cache: 171 where it exceeds that, 16 in 300 MiB.
    "clear": {"clear_median_us": 16.0},
}
# How many times clearing a worker the index needs to store its blocks, recorded likewise, and how
# many blocks these are in the scene `fleet`.
STORES_PER_CLEAR = 6.5
FLEET_BLOCKS = 16_384
SHARE = 0.6

pytestmark = pytest.mark.timeout(3_600)


@pytest.fixture(scope="module")
def harness():
    return Harness(build(HERE, "replay"))


@pytest.fixture(scope="module")
def corpus(harness):
    return harness.corpus(TRACE, workers=16)


def compare(harness, mode, *arguments, **options):
    """Figures of both, each recorded ratio held."""
    rows = harness.compare(BOTH, mode, *arguments, **options)
    for figure, recorded in RECORDED[mode].items():
        ratio = rows["plain"][figure] / rows["kvflash"][figure]
        assert ratio >= SHARE * recorded, (mode, figure, ratio, recorded)
    return rows


@pytest.mark.parametrize(
    "recipe",
    [
        {"workers": 16},
        {"workers": 16, "capacity": 4_096},
        {"workers": 16, "names": "differ"},
        {"workers": 64, "factor": 4, "requests": 4_000},
    ],
    ids=lambda recipe: " ".join(f"{name}={value}" for name, value in recipe.items()),
)
@pytest.mark.parametrize("backend", ["kvflash", "kvflash-copies", "plain"])
def test_answers_are_exact(harness, recipe, backend):
    corpus = harness.corpus(None, **recipe)
    figures = harness.compare([backend], "check", corpus, trials=1)[backend]
    assert figures["queries"] >= 300 and figures["depths"] >= 1_000
    assert figures["wrong_queries"] == figures["over_depths"] == figures["under_depths"] == 0


def test_the_harness_costs_little(harness, corpus):
    rows = harness.compare(["kvflash", "null"], "events", corpus)
    cost = rows["null"]["cpu_ns_per_event"] / rows["kvflash"]["cpu_ns_per_event"]
    assert cost < 0.15, "the harness' own share of what it measures"


def test_events_are_fast(harness, corpus):
    compare(harness, "events", corpus)


def test_decode_appends_are_fast(harness):
    compare(harness, "appends")


def test_reads_are_fast(harness, corpus):
    rows = compare(harness, "reads", corpus)
    assert rows["kvflash"]["matched_workers_mean"] == rows["plain"]["matched_workers_mean"] > 1


def test_reads_of_what_many_hold_are_fast(harness):
    rows = compare(harness, "matched")
    assert rows["kvflash"]["matched_workers"] == rows["plain"]["matched_workers"] == 1_000


def test_memory_is_small(harness, corpus):
    now = compare(harness, "bytes", corpus, trials=1)["kvflash"]
    assert now["memberships_end"] > 100_000
    assert now["bytes_per_membership"] <= 32
    assert now["mb_peak"] <= 1.25 * now["mb_most"]
    assert now["mb_after_removal"] < 0.5 * now["mb_most"]


def test_one_more_sharer_is_cheap(harness):
    rows = compare(harness, "sharer", trials=1)
    assert rows["kvflash"]["bytes_per_block_2_to_16"] <= 2


def test_clearing_depends_on_runs_not_blocks(harness):
    options = {"trials": 1, "blocks": 2_000_000}
    cleared = compare(harness, "clear", **options)["kvflash"]
    grown = harness.compare(["kvflash"], "growth", **options)["kvflash"]
    # The map's time says little where it fits into the cache; storing the blocks says more.
    stores = FLEET_BLOCKS / grown["million_blocks_per_s"] / cleared["clear_median_us"]
    assert stores >= SHARE * STORES_PER_CLEAR, (stores, cleared, grown)


def test_names_of_a_long_prompt_are_fast(harness):
    """100,000 tokens, 16 a block, with vLLM's default scheme, on one core."""
    row = harness.compare(["kvflash"], "names")["kvflash"]
    print("names of 100,000 tokens, ms:", row)
    assert row["new_prompt_ms"] < 3
    assert row["known_prompt_ms"] < row["new_prompt_ms"] / 5


@pytest.mark.parametrize("way", ["leaves", "is cleared", "evicts"])
def test_blocks_that_come_back_are_stored_nearly_as_fast_as_new_ones(way):
    workers, blocks, each = 4, 50_000, 500
    chance = random.Random(1)
    tree = RadixTree()

    def chain() -> list[dict[str, int]]:
        ids = [chance.getrandbits(62) + 1 for _ in range(each)]
        return [{"block_hash": one, "tokens_hash": one} for one in ids]

    def event(data: object) -> bytes:
        return json.dumps({"event_id": 0, "data": data}).encode()

    chains = [[chain() for _ in range(blocks // each)] for _ in range(workers)]
    stores = [[event({"stored": {"parent_hash": None, "blocks": c}}) for c in of] for of in chains]

    def store(worker: int) -> float:
        began = time.process_time()
        for one in stores[worker]:
            tree.apply_event(worker, one)
        return time.process_time() - began

    first_s = sum(store(worker) for worker in range(workers)) / workers
    again_s = []
    for turn in range(8):
        worker = turn % 2
        if way == "leaves":
            tree.remove_worker(worker)
        elif way == "is cleared":
            tree.clear_all_blocks(worker)
        else:
            for of in chains[worker]:
                names = [block["block_hash"] for block in reversed(of)]
                tree.apply_event(worker, event({"removed": {"block_hashes": names}}))
        again_s.append(store(worker))
    assert max(again_s) < 5 * first_s, (first_s, again_s)
