"""Conversations that grow to 430 kB a request, in turns through round-robin and kv.

    python benches/peers/long_prompts.py --tokenizer FOLDER [--against PYTHON ...]

Each round starts a frontend of each kind before four workers that answer at once (nginx) and sends
it the same conversations: they share a system prompt, and every turn repeats all that was said and
adds some 30,000 characters of source code. Printed are processor time a request of the frontend
alone, latencies, requests a second and resident memory: the median of the rounds, and their range.
The client and the workers share the machine with the frontend.

``--tokenizer`` is a model's folder; by default it is the small one of the tests, whose tokens are
short. ``--against`` names the Python of another build. ``--unique`` sends chats of 4,500 characters
that nobody has sent before.
Needs nginx.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import queue
import random
import statistics
import subprocess
import sys
import sysconfig
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers import MODEL, four_workers

ROOT = Path(__file__).parents[2]
FIRST_WORKER, PORT = 9_141, 8_340
TICKS = os.sysconf("SC_CLK_TCK")
SYSTEM_CHARS = 24_000


@dataclass(frozen=True)
class Shape:
    """How conversations grow."""

    conversations: int
    turns: int
    first_chars: int
    grow_chars: int
    clients: int
    seed: int


class Source:
    """The standard library's source: real code, of which pieces are drawn."""

    def __init__(self, seed: int) -> None:
        """Read it once; `seed` decides the pieces."""
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        self.text = "".join(file.read_text(errors="ignore") for file in files)
        self.random = random.Random(seed)

    def piece(self, chars: int) -> str:
        """Some of it."""
        start = self.random.randrange(len(self.text) - chars)
        return self.text[start : start + chars]


def conversations(shape: Shape) -> list[list[list[dict[str, str]]]]:
    """What each conversation's turns add; shape [conversations][turns]."""
    source = Source(shape.seed)
    system = {"role": "system", "content": source.piece(SYSTEM_CHARS)}
    answer_chars = shape.grow_chars // 3
    all_turns = []
    for _ in range(shape.conversations):
        turns = [[system, {"role": "user", "content": source.piece(shape.first_chars)}]]
        for _ in range(shape.turns - 1):
            answer = {"role": "assistant", "content": source.piece(answer_chars)}
            question = source.piece(shape.grow_chars - answer_chars)
            turns.append([answer, {"role": "user", "content": question}])
        all_turns.append(turns)
    return all_turns


def unique_chats(count: int, seed: int) -> list[list[list[dict[str, str]]]]:
    """Chats of one turn and 4,500 characters."""
    source = Source(seed)
    return [[[{"role": "user", "content": source.piece(4_500)}]] for _ in range(count)]


def usage(pid: int) -> tuple[float, float]:
    """Processor seconds of a process so far, and its resident MiB."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    resident = next(line for line in lines if line.startswith("VmRSS"))
    return sum(map(int, fields[11:13])) / TICKS, int(resident.split()[1]) / 1024


def drive(pid: int, turns: list[list[list[dict[str, str]]]], clients: int) -> dict[str, float]:
    """Send every conversation's turns, one after the other; `clients` at once."""
    todo: queue.Queue[tuple[int, int]] = queue.Queue()
    said: list[list[dict[str, str]]] = [[] for _ in turns]
    times: list[float] = []
    failures: list[str] = []
    left = threading.Semaphore(0)
    for at in range(len(turns)):
        todo.put((at, 0))

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
        while True:
            at, turn = todo.get()
            if at < 0:
                break
            said[at] += turns[at][turn]
            body = json.dumps({"model": MODEL, "messages": said[at], "max_tokens": 1}).encode()
            start = time.perf_counter()
            connection.request(
                "POST", "/v1/chat/completions", body, {"content-type": "application/json"}
            )
            answer = connection.getresponse()
            text = answer.read()
            times.append(time.perf_counter() - start)
            if answer.status != 200:
                failures.append(text[:200].decode())
            if turn + 1 < len(turns[at]):
                todo.put((at, turn + 1))
            else:
                left.release()
        connection.close()

    threads = [threading.Thread(target=client) for _ in range(clients)]
    before, _ = usage(pid)
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for _ in turns:
        left.acquire()
    took = time.perf_counter() - start
    after, resident = usage(pid)
    for _ in threads:
        todo.put((-1, 0))
    for thread in threads:
        thread.join()
    if failures:
        raise SystemExit(f"{len(failures)} of {len(times)} requests failed: {failures[0]}")
    return {
        "CPU ms/request": 1e3 * (after - before) / len(times),
        "p50 ms": 1e3 * statistics.median(times),
        "p99 ms": 1e3 * sorted(times)[int(len(times) * 0.99)],
        "requests/s": len(times) / took,
        "RSS MiB": resident,
    }


def wait(process: subprocess.Popen[bytes]) -> None:
    """Until the frontend answers."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit("the frontend ended before it served; its message is above")
        try:
            connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=5)
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise SystemExit("the frontend was not ready within 60 s")


def measure(
    python: str, mode: str, args: argparse.Namespace, turns: Any, workers: list[str]
) -> dict[str, float]:
    """One frontend, one run."""
    flags = ["--host", "127.0.0.1", "--port", str(PORT), "--log-level", "error"]
    flags += ["--tokenizer", str(args.tokenizer), "--max-prompt-bytes", "4MiB"]
    flags += ["--kv-cache-block-size", "16", "--router-mode", mode]
    for worker in workers:
        flags += ["--worker", worker]
    process = subprocess.Popen([python, "-m", "kvflash.frontend", *flags])
    try:
        wait(process)
        return drive(process.pid, turns, args.clients)
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    """Print one row a system."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "tests/vectors/tiny-llama")
    parser.add_argument("--against", action="append", default=[], metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--first-chars", type=int, default=60_000)
    parser.add_argument("--grow-chars", type=int, default=30_000)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--unique", type=int, default=0, metavar="CHATS")
    args = parser.parse_args()
    shape = Shape(
        args.conversations,
        args.turns,
        args.first_chars,
        args.grow_chars,
        args.clients,
        args.seed,
    )
    turns = unique_chats(args.unique, args.seed) if args.unique else conversations(shape)
    systems = [("round-robin", sys.executable, "round-robin"), ("kv", sys.executable, "kv")]
    systems += [(f"kv of {python}", python, "kv") for python in args.against]
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    with four_workers(FIRST_WORKER) as workers:
        for number in range(args.rounds):
            # Each goes first in some round.
            turned = number % len(systems)
            for name, python, mode in systems[turned:] + systems[:turned]:
                found[name].append(measure(python, mode, args, turns, workers))
    columns = list(found["kv"][0])
    print("| system |", " | ".join(columns), "|")
    print("|---|" + "---|" * len(columns))
    for name, *_ in systems:
        cells = []
        for column in columns:
            values = sorted(one[column] for one in found[name])
            cells.append(f"{statistics.median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})")
        print(f"| {name} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
