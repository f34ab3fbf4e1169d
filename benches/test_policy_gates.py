"""What a decision by ``auto`` costs beside ``kv``, at the same requests in turn: ``make bench``."""

from __future__ import annotations

import os
import random
import re
import statistics
import subprocess
import time
from array import array
from pathlib import Path

import pytest

from kvflash._core import RouterCore
from support_found import join

ROOT = Path(__file__).parent.parent
RUNS = 3
ROW = re.compile(r"^decision (\d+) workers (\d+) tokens (kv|auto) +median +([0-9.]+) us", re.M)

pytestmark = pytest.mark.timeout(3_600)

Medians = dict[tuple[int, int, str], float]


@pytest.fixture(scope="module")
def medians() -> Medians:
    """By workers, prompt tokens and policy: the median of the runs' medians, in microseconds."""
    profile = os.environ.get("PROFILE", "fast")
    command = ["cargo", "bench", "--quiet", "--locked", "--profile", profile]
    command += ["--package", "kvflash-core", "--bench", "policy"]
    runs: list[Medians] = []
    for _ in range(RUNS):
        run = subprocess.run(
            [*command, "--", "decision"], cwd=ROOT, check=True, capture_output=True, text=True
        )
        rows = ROW.findall(run.stdout)
        runs.append({(int(of), int(tokens), name): float(us) for of, tokens, name, us in rows})
    keys = {
        (of, tokens, name)
        for of in (200, 2_000)
        for tokens in (1_000, 100_000)
        for name in ("kv", "auto")
    }
    assert all(set(run) == keys for run in runs), runs
    return {key: statistics.median(run[key] for run in runs) for key in keys}


@pytest.mark.parametrize("tokens", [1_000, 100_000])
@pytest.mark.parametrize("workers", [200, 2_000])
def test_a_decision_by_auto_is_fast(medians: Medians, workers: int, tokens: int) -> None:
    auto, kv = medians[workers, tokens, "auto"], medians[workers, tokens, "kv"]
    print(f"{workers} workers, {tokens} tokens: auto {auto} us, kv {kv} us")
    assert auto < 3.5 * kv


@pytest.mark.parametrize("workers", [200, 2_000])
def test_a_long_prompt_is_decided_as_fast_as_a_short_one(medians: Medians, workers: int) -> None:
    assert medians[workers, 100_000, "auto"] < 1.5 * medians[workers, 1_000, "auto"]


@pytest.fixture(scope="module")
def whole() -> Medians:
    """By workers, prompt tokens and policy: from tokens to worker, median in microseconds."""
    found: Medians = {}
    for of in (200, 2_000):
        for tokens in (1_000, 100_000):
            cores = {name: RouterCore(block_size=16, policy=name) for name in ("kv", "auto")}
            for core in cores.values():
                join(core, range(1, of + 1))
            draw = random.Random(of + tokens)
            prompts = [
                array("I", (draw.randrange(30_000) for _ in range(tokens))) for _ in range(8)
            ]
            took: dict[str, list[float]] = {name: [] for name in cores}
            for number in range(400):
                # They take turns at being second, when the processor has the prompt in its cache.
                for name in sorted(cores, reverse=bool(number % 2)):
                    start = time.perf_counter()
                    cores[name].query(prompts[number % 8])
                    took[name].append((time.perf_counter() - start) * 1e6)
                    cores[name].reserve(prompts[number % 8], f"r{number}")
                    if number >= of // 4:
                        cores[name].free(f"r{number - of // 4}")
            found |= {(of, tokens, name): statistics.median(took[name][100:]) for name in cores}
    return found


@pytest.mark.parametrize("tokens", [1_000, 100_000])
@pytest.mark.parametrize("workers", [200, 2_000])
def test_a_whole_decision_by_auto_is_as_fast(whole: Medians, workers: int, tokens: int) -> None:
    auto, kv = whole[workers, tokens, "auto"], whole[workers, tokens, "kv"]
    shape = f"{workers} workers, {tokens} tokens, from tokens to worker"
    print(f"{shape}: auto {auto:.1f} us, kv {kv:.1f} us")
    assert auto < 1.4 * kv
