"""Standalone KV indexers, side by side: ``python benches/peers/indexer.py [--batches N]``.

Events: four publisher processes send batches of one stored event of 8 new blocks of 16 tokens as
fast as they can; the clock runs until queries see the last block of each. Queries: wrk, 32
connections, 1,900 token ids of which one worker holds the first 128.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import msgpack
import zmq
from install import environment
from load import Load, script, wait, wrk

PUBLISHERS, BLOCKS, BLOCK_SIZE, PORT = 4, 8, 16, 8_390
MODEL = "bench"


def tokens_of(publisher: int, batch: int) -> list[int]:
    """Tokens that no other batch has."""
    return [publisher, batch, *range(BLOCKS * BLOCK_SIZE - 2)]


def frame(publisher: int, batch: int) -> list[bytes]:
    """One message as vLLM publishes it."""
    hashes = [(publisher << 48) + batch * BLOCKS + n + 1 for n in range(BLOCKS)]
    event = ["BlockStored", hashes, None, tokens_of(publisher, batch), BLOCK_SIZE, None, "GPU"]
    return [b"kv-events", struct.pack(">Q", batch), msgpack.packb([0.0, [event], 0])]


def publish(publisher: int, batches: int, pipe: Any) -> None:
    """Encode first, wait for the word, then send."""
    frames = [frame(publisher, batch) for batch in range(batches)]
    socket = zmq.Context().socket(zmq.XPUB)
    socket.setsockopt(zmq.SNDHWM, 0)
    pipe.send(socket.bind_to_random_port("tcp://127.0.0.1"))
    assert socket.recv().startswith(b"\x01")
    pipe.send("subscribed")
    pipe.recv()
    for parts in frames:
        socket.send_multipart(parts, copy=False)
    pipe.recv()


def ask(tokens: list[int]) -> dict[str, Any]:
    """POST /query."""
    body = json.dumps({"token_ids": tokens, "model_name": MODEL}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/query", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return dict(json.loads(response.read()))


def systems() -> dict[str, list[str]]:
    """Command lines without the workers."""
    flags = ["--port", str(PORT), "--block-size", str(BLOCK_SIZE), "--model-name", MODEL]
    return {
        "kvflash.indexer": [sys.executable, "-m", "kvflash.indexer", *flags, "--threads", "2"],
        "dynamo.indexer": [
            str(environment("dynamo") / "python"), "-m", "dynamo.indexer", *flags, "--threads", "2",
        ],
    }  # fmt: skip


def measure(command: list[str], batches: int, seconds: int, folder: Path) -> tuple[float, Load]:
    """Batches a second until the last one is seen, and the query load."""
    pipes, processes = [], []
    for publisher in range(1, PUBLISHERS + 1):
        near, far = multiprocessing.Pipe()
        process = multiprocessing.Process(target=publish, args=(publisher, batches, far))
        process.start()
        pipes.append(near)
        processes.append(process)
    ports = [pipe.recv() for pipe in pipes]
    workers = ",".join(f"{n}=tcp://127.0.0.1:{port}" for n, port in enumerate(ports, start=1))
    with (folder / "log").open("ab") as log:
        env = {**os.environ, "DYN_LOG": "warn"}
        service = subprocess.Popen(
            [*command, "--workers", workers], stdout=log, stderr=log, env=env
        )
    try:
        wait(f"http://127.0.0.1:{PORT}/health")
        for pipe in pipes:
            assert pipe.recv() == "subscribed"
        started = time.perf_counter()
        for pipe in pipes:
            pipe.send("go")
        pending = set(range(1, PUBLISHERS + 1))
        while pending:
            for publisher in sorted(pending):
                answer = ask(tokens_of(publisher, batches - 1))
                score = answer["scores"].get(str(publisher), {}).get("0", 0)
                if score in (BLOCKS, BLOCKS * BLOCK_SIZE):
                    pending.discard(publisher)
            if time.perf_counter() - started > 120:
                raise SystemExit("events were lost: the last block was not seen within 120 s")
            time.sleep(0.002)
        rate = PUBLISHERS * batches / (time.perf_counter() - started)
        tokens = tokens_of(1, 0)[: BLOCKS * BLOCK_SIZE]
        body = json.dumps({"token_ids": (tokens * 15)[:1_900], "model_name": MODEL})
        lua = script(folder / "query.lua", [body])
        url = f"http://127.0.0.1:{PORT}/query"
        wrk(url, lua, seconds=2)
        return rate, wrk(url, lua, seconds=seconds)
    finally:
        service.terminate()
        service.wait()
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send("end")
            process.join()


def main() -> None:
    """Measure in two rounds and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=50_000, help="a publisher's")
    parser.add_argument("--seconds", type=int, default=6)
    args = parser.parse_args()
    commands = systems()
    print("| indexer | round | event batches/s | queries/s | p50 ms | p99 ms | failed |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        for turn, order in enumerate((list(commands), list(commands)[::-1]), start=1):
            for system in order:
                rate, load = measure(commands[system], args.batches, args.seconds, Path(name))
                print(
                    f"| {system} | {turn} | {rate:,.0f} | {load.requests_per_s:,.0f} "
                    f"| {load.p50_ms:.2f} | {load.p99_ms:.2f} | {load.failed} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
