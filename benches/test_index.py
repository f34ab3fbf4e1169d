"""kvflash.RadixTree from Python: matching a prompt, applying events as JSON.

A peer's figure for find_matches at 200 workers on its own machine: 68 us.
"""

from __future__ import annotations

import json
import random
import statistics
import time

import pytest

from kvflash import RadixTree

BLOCKS = 118  # a prompt of 1,900 tokens in blocks of 16


def event(blocks, parent=None):
    data = {
        "stored": {
            "parent_hash": parent,
            "blocks": [
                {"block_hash": name, "tokens_hash": local, "mm_extra_info": None}
                for name, local in blocks
            ],
        }
    }
    return json.dumps({"event_id": 0, "data": data, "dp_rank": 0}).encode()


def filled(workers, seed=1):
    """Workers that hold random lengths of one prompt, and 20 prompts of their own."""
    dice, tree, depths = random.Random(seed), RadixTree(), {}
    prompt = [dice.getrandbits(64) for _ in range(BLOCKS)]
    for worker in range(workers):
        depths[worker, 0] = depth = dice.randint(1, BLOCKS)
        tree.apply_event(worker, event([(at + 1, prompt[at]) for at in range(depth)]))
        for turn in range(20):
            names = range(1000 * (turn + 1), 1000 * (turn + 1) + BLOCKS)
            tree.apply_event(worker, event([(name, dice.getrandbits(64)) for name in names]))
    return tree, prompt, depths


def median_us(call, rounds=300):
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


@pytest.mark.parametrize("workers", [1, 8, 200])
def test_find_matches(benchmark, workers):
    tree, prompt, depths = filled(workers)
    found = benchmark(tree.find_matches, prompt)
    assert found.scores == depths
    benchmark.extra_info["blocks"] = BLOCKS


def test_find_matches_with_scores(benchmark):
    tree, prompt, depths = filled(200)
    assert benchmark(lambda: tree.find_matches(prompt).scores) == depths


def test_two_hundred_workers_cost_less_than_asking_each(benchmark):
    """Against a set a worker in Python, walked one by one; and against a tree of one worker."""
    tree, prompt, depths = filled(200)
    one, prompt_of_one, _ = filled(1)
    held = {key: set(prompt[:depth]) for key, depth in depths.items()}

    def brute():
        scores = {}
        for key, blocks in held.items():
            depth = 0
            while depth < BLOCKS and prompt[depth] in blocks:
                depth += 1
            scores[key] = depth
        return scores

    def measure():
        return {
            "brute_us": median_us(brute, 30),
            "workers_200_us": median_us(lambda: tree.find_matches(prompt).scores),
            "workers_1_us": median_us(lambda: one.find_matches(prompt_of_one).scores),
        }

    figures = benchmark.pedantic(measure, rounds=1)
    benchmark.extra_info.update({name: round(figure, 1) for name, figure in figures.items()})
    assert brute() == depths
    assert figures["brute_us"] >= 8 * figures["workers_200_us"], figures
    assert figures["workers_200_us"] <= 30 * figures["workers_1_us"], figures


def test_apply_event(benchmark):
    tree, dice = RadixTree(), random.Random(3)
    names = iter(range(10**9))

    def fresh():
        return (0, event([(next(names), dice.getrandbits(64)) for _ in range(8)])), {}

    benchmark.pedantic(tree.apply_event, setup=fresh, rounds=5000)
    assert tree.block_count(0, 0) == 40_000
