"""What POST /query costs with many registered workers: microseconds a request, one client.

    python benches/indexer_answer.py [WORKERS ...]

A fifth of the workers hold the prompt's 32 blocks, the rest nothing; each answer names them all.
The ratio is that of a query of a model with one worker, in the same process.
"""

from __future__ import annotations

import http.client
import json
import statistics
import sys
import time

import msgpack

from kvflash._core import Indexer

SIZE = 16
TOKENS = list(range(1_000, 1_000 + 32 * SIZE))
ROUNDS, WARM = 400, 50


def fill(indexer: Indexer, model: str, workers: int, first: int) -> None:
    """Register `workers` and let every fifth one hold the prompt."""
    event = {
        "type": "BlockStored",
        "block_hashes": list(range(1, 33)),
        "parent_block_hash": None,
        "token_ids": TOKENS,
        "block_size": SIZE,
    }
    payload = msgpack.packb([1.0, [event], None])
    for at in range(workers):
        indexer.register(first + at, "tcp://127.0.0.1:1", model_name=model, block_size=SIZE)
        order = indexer.catalog.next_order(1.0)
        assert order is not None
        if at % 5 == 0:
            indexer.catalog.take(order[1], [[(0).to_bytes(8, "big"), payload]])


def measure(port: int, model: str) -> tuple[float, int]:
    """Median microseconds of a query, and the answer's bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps({"token_ids": TOKENS, "model_name": model})
    times = []
    for _ in range(WARM + ROUNDS):
        start = time.perf_counter()
        connection.request("POST", "/query", body)
        answer = connection.getresponse().read()
        times.append(time.perf_counter() - start)
    connection.close()
    return statistics.median(times[WARM:]) * 1e6, len(answer)


def main() -> None:
    """Print one line a fleet size."""
    indexer = Indexer(threads=1)
    port = indexer.start("127.0.0.1", 0)
    first, base = 1, 0.0
    for workers in [1, *(map(int, sys.argv[1:]) if len(sys.argv) > 1 else (200, 2_000))]:
        fill(indexer, f"m{workers}", workers, first)
        first += workers
        median, size = measure(port, f"m{workers}")
        base = base or median
        print(f"{workers:6} workers  {median:9.1f} us  {median / base:6.1f} x  {size:8} bytes")
    indexer.stop()


if __name__ == "__main__":
    main()
