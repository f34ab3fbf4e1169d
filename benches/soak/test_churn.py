"""Memory over a long churn of distinct prefixes: it settles, and stays where it settled.

``make soak``; KVFLASH_SOAK_BLOCKS sets how many blocks are stored (default 10 million).
"""

from __future__ import annotations

import os
import struct
from collections import deque
from pathlib import Path

import msgpack

from kvflash._core import Indexer

BLOCK_SIZE = 16
BLOCKS_PER_EVENT = 8
CAPACITY_BLOCKS = 16_384
WORKERS = 4
BLOCKS = int(os.environ.get("KVFLASH_SOAK_BLOCKS", "10000000"))


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_memory_settles_under_churn_of_distinct_prefixes():
    indexer = Indexer(threads=1)
    for worker in range(1, WORKERS + 1):
        indexer.register(worker, "inproc://none", model_name="m", block_size=BLOCK_SIZE)
    catalog = indexer.catalog
    publishers = [catalog.next_order(1.0)[1] for _ in range(WORKERS)]
    held = [deque() for _ in range(WORKERS)]
    tail = list(range(BLOCK_SIZE * BLOCKS_PER_EVENT - 2))
    rounds = BLOCKS // BLOCKS_PER_EVENT // WORKERS
    samples = []
    hashes = 0
    for sequence in range(rounds):
        for worker, publisher in enumerate(publishers):
            names = list(range(hashes, hashes + BLOCKS_PER_EVENT))
            hashes += BLOCKS_PER_EVENT
            # The first tokens differ every time, so every chain is one nobody has seen.
            tokens = [sequence & 0xFFFF_FFFF, worker, *tail]
            events = [["BlockStored", names, None, tokens, BLOCK_SIZE, None, "GPU"]]
            held[worker].append(names)
            if len(held[worker]) * BLOCKS_PER_EVENT > CAPACITY_BLOCKS:
                events.insert(0, ["BlockRemoved", held[worker].popleft()[::-1], "GPU"])
            payload = msgpack.packb([0.0, events])
            head = struct.pack(">Q", sequence)
            consumed, outcome, _, _ = catalog.take(publisher, [[b"", head, payload]])
            assert (consumed, outcome) == (1, "applied")
        if sequence % max(1, rounds // 50) == 0:
            samples.append(resident_bytes())
    settled = max(samples[len(samples) // 5 : len(samples) // 2])
    late = max(samples[len(samples) // 2 :])
    print(f"\n{hashes:,} blocks stored; resident {settled / 2**20:.1f} MiB settled, "
          f"{late / 2**20:.1f} MiB late")  # fmt: skip
    assert late <= 1.05 * settled
