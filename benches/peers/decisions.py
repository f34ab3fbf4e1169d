"""What a booked decision costs, from tokens to worker: ``python decisions.py POLICY``.

Run by :mod:`against` with the Python of each commit, so it uses only what both have. Prints a JSON
object: the median in microseconds by shape.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from array import array

from kvflash._core import RouterCore

BLOCK_SIZE = 16
CALLS, WARM = 400, 100
# Nothing is sent to the workers.
PLANE, CARD = {"kind": "tcp", "address": "nowhere:1"}, {"model_name": "m"}


def median_us(policy: str, workers: int, tokens: int) -> float:
    """Median time of ``reserve`` while a quarter as many requests run as there are workers."""
    core = RouterCore(block_size=BLOCK_SIZE, policy=policy)
    for number in range(1, workers + 1):
        worker = {"id": number, "plane": PLANE, "endpoint": "ns/backend/generate", "card": CARD}
        core.put_worker(json.dumps(worker))
    draw = random.Random(workers + tokens)
    prompts = [array("I", (draw.randrange(30_000) for _ in range(tokens))) for _ in range(8)]
    took = []
    for number in range(CALLS):
        start = time.perf_counter()
        core.reserve(prompts[number % 8], f"r{number}")
        took.append((time.perf_counter() - start) * 1e6)
        if number >= workers // 4:
            core.free(f"r{number - workers // 4}")
    return statistics.median(took[WARM:])


if __name__ == "__main__":
    shapes = [(workers, tokens) for workers in (200, 2_000) for tokens in (1_000, 100_000)]
    print(
        json.dumps(
            {
                f"{workers} workers, {tokens} tokens": median_us(sys.argv[1], workers, tokens)
                for workers, tokens in shapes
            }
        )
    )
