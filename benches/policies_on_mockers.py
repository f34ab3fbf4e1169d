"""A slice of a trace through the real frontend and mockers: what `make policies` simulates.

``python benches/policies_on_mockers.py TRACE [MODE...] [--requests N] [--speed N] [--slow N]``

A MODE may carry further flags of the frontend: ``"kv --no-track-active-blocks"``.

Prints, for each router mode, the figures that ``cargo bench --bench policies -- --trace TRACE
--requests N --speed N --only MODE`` prints of the simulation. The mockers run `--slow` times slower
than they model, so that the machine's own time does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[1]))
from demo.child import Children
from demo.fleet import MODEL, Fleet, FleetOptions, start_fleet

BLOCK_TOKENS = 512
WORKERS = 8


def tokens(line: dict[str, Any]) -> list[int]:
    """Tokens of a prompt: 512 for each of its ids."""
    made: list[int] = []
    for block in line["hash_ids"]:
        made.extend(random.Random(block).randbytes(BLOCK_TOKENS))
    return made[: line["input_length"]]


async def ask(
    session: aiohttp.ClientSession, url: str, line: dict[str, Any]
) -> tuple[float, int, str]:
    """Send one request; time to its first token in s, tokens that were cached, and its worker."""
    body = {
        "model": MODEL,
        "prompt": tokens(line),
        "max_tokens": line["output_length"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start_s, first_s, usage = time.perf_counter(), None, None
    async with session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        worker = response.headers["x-kvflash-worker"]
        async for row in response.content:
            if not row.startswith(b"data: {"):
                continue
            first_s = first_s or time.perf_counter() - start_s
            usage = json.loads(row[6:]).get("usage") or usage
    assert first_s is not None
    assert usage is not None
    return first_s, usage["prompt_tokens_details"]["cached_tokens"], worker


async def play(fleet: Fleet, lines: list[dict[str, Any]], speed: float, slow: float) -> str:
    """Send all requests at their time; the figures in a line."""
    limit = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=limit, timeout=aiohttp.ClientTimeout()) as session:
        start_s = time.perf_counter()

        async def one(line: dict[str, Any]) -> tuple[float, int, str]:
            due_s = start_s + line["timestamp"] / 1e3 / speed * slow
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            return await ask(session, fleet.url, line)

        answers = await asyncio.gather(*map(one, lines))
    times_ms = sorted(first_s / slow * 1e3 for first_s, _, _ in answers)
    prompts = sum(line["input_length"] for line in lines)
    requests: Counter[str] = Counter()
    computed: Counter[str] = Counter()
    for line, (_, cached, worker) in zip(lines, answers, strict=True):
        requests[worker] += 1
        computed[worker] += line["input_length"] - cached
    spreads = [max(by.values()) * WORKERS / by.total() for by in (computed, requests)]
    return (
        f"hit {sum(cached for _, cached, _ in answers) / prompts:.3f} "
        f"ttft p50 {times_ms[(len(lines) - 1) // 2]:.0f} "
        f"p99 {times_ms[int((len(lines) - 1) * 0.99)]:.0f} "
        f"spread {spreads[0]:.2f} {spreads[1]:.2f}"
    )


async def main() -> None:
    """Play the slice once for each mode, with a fresh fleet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--speed", type=float, default=5.0)
    parser.add_argument("--slow", type=float, default=5.0)
    parser.add_argument("modes", nargs="*", default=["kv", "round-robin"])
    args = parser.parse_args()
    with args.trace.open() as file:
        lines = [json.loads(line) for line, _ in zip(file, range(args.requests), strict=False)]
    options = FleetOptions(
        workers=WORKERS,
        block_size=BLOCK_TOKENS,
        cache_blocks=2_048,
        speedup_ratio=1 / args.slow,
        seed=1,
    )
    for words in args.modes:
        mode, *flags = words.split()
        with tempfile.TemporaryDirectory() as logs:
            async with Children(Path(logs)) as children, aiohttp.ClientSession() as session:
                told = dataclasses.replace(options, flags=tuple(flags))
                fleet = await start_fleet(children, session, mode, told)
                print(words, await play(fleet, lines, args.speed, args.slow), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
