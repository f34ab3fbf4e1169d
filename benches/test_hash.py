"""Hashing tokens from Python: tokens a second by form, and what the forms are to each other.

Gates are ratios measured in one run. A peer's figure for a list on its own machine: 57 M tokens/s.
"""

from __future__ import annotations

import statistics
import time
from array import array

import numpy as np
import pytest

from kvflash import compute_block_hash_for_seq

TOKENS = 131_072
BLOCK_SIZE = 16
IDS = np.random.default_rng(1).integers(0, 150_000, TOKENS)
FORMS = {
    "list": IDS.tolist(),
    "tuple": tuple(IDS.tolist()),
    "array-q": array("q", IDS.tolist()),
    "int64": IDS.astype(np.int64),
    "uint32": IDS.astype(np.uint32),
}


def rates(rounds=30):
    """Tokens a second of each form, by the median round. In turns, as machines change speed."""
    times = {name: [] for name in FORMS}
    for _ in range(rounds):
        for name, form in FORMS.items():
            start = time.perf_counter()
            compute_block_hash_for_seq(form, BLOCK_SIZE)
            times[name].append(time.perf_counter() - start)
    return {name: TOKENS / statistics.median(each) for name, each in times.items()}


@pytest.mark.parametrize("name", FORMS)
def test_hash(benchmark, name):
    hashes = benchmark(compute_block_hash_for_seq, FORMS[name], BLOCK_SIZE)
    assert len(hashes) == TOKENS // BLOCK_SIZE
    benchmark.extra_info["tokens_per_s_median"] = round(TOKENS / benchmark.stats.stats.median)


def test_buffers_are_worth_it(benchmark):
    found = benchmark.pedantic(rates, rounds=1)
    benchmark.extra_info.update({f"{n}_tokens_per_s": round(r) for n, r in found.items()})
    assert found["uint32"] >= 3 * found["list"], found
    assert found["int64"] >= 2 * found["list"], found
    assert found["list"] >= found["tuple"], found
