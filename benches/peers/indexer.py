"""Standalone KV indexers, side by side: ``python benches/peers/indexer.py [--trials N] [NAME...]``.

Each trial is a fresh process, the two systems take turns, the first one changes with every round;
figures are medians. Measured are:

- *ingest*: four publisher processes send batches of one stored event of 8 new blocks of 16 tokens,
  five million blocks in all, as fast as the indexer takes them; the clock runs until queries see
  the last block of each. Publishers are ``wire`` (they cost nearly nothing) and ``zmq``: see
  ``publisher.py``;
- *memory*: resident memory of the process with these blocks;
- *queries*: wrk, 32 connections, a prompt of 1,900 token ids of which one worker holds the first
  128, as token ids and as block hashes;
- *recovery*: a second indexer is given the first, which has ten million blocks, as its peer.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from install import environment
from load import script, wait, wrk
from publisher import BLOCK_SIZE, BLOCKS, Publishers, publishers, tokens_of
from results import Section

from kvflash import compute_block_hash_for_seq

PUBLISHERS, PORT, SECOND_PORT = 4, 8_390, 8_391
MODEL = "bench"
PROMPT_TOKENS = 1_900
MEMBERSHIPS, RECOVERED = 5_000_000, 10_000_000
OURS, THEIRS = "kvflash.indexer", "dynamo.indexer 1.6.1"
DEADLINE_S = 90.0

Figures = dict[str, float]


def programs() -> dict[str, list[str]]:
    """Command lines without port, workers and peers."""
    flags = ["--block-size", str(BLOCK_SIZE), "--model-name", MODEL, "--threads"]
    # Of 1, 2 and 4 threads each has those that are best for it here, beside wrk on two cores.
    return {
        OURS: [sys.executable, "-m", "kvflash.indexer", *flags, "1"],
        THEIRS: [str(environment("dynamo") / "python"), "-m", "dynamo.indexer", *flags, "2"],
    }


class Service:
    """A running indexer."""

    def __init__(self, command: list[str], port: int, log: Path, *more: str) -> None:
        self._port = port
        self.url = f"http://127.0.0.1:{port}"
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [*command, "--port", str(port), *more],
                stdout=out,
                stderr=out,
                env={**os.environ, "DYN_LOG": "warn"},
            )

    def status(self, path: str) -> int:
        """Of a GET; 0 where nobody listens."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST; an empty answer where nobody listens."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        kind = {"content-type": "application/json"}
        try:
            connection.request("POST", f"/{path}", json.dumps(body), kind)
            return dict(json.loads(connection.getresponse().read()))
        except OSError:
            return {}
        finally:
            connection.close()

    def blocks_of(self, publisher: int, batch: int) -> int:
        """How many blocks of a batch a query credits to its publisher's worker."""
        query = {"token_ids": tokens_of(publisher, batch), "model_name": MODEL}
        scores = self.ask("query", query).get("scores", {})
        score = scores.get(str(publisher), {}).get("0", 0)
        assert score % BLOCK_SIZE == 0, scores
        return int(score) // BLOCK_SIZE

    def wait_for_all(self, sent: Publishers, started: float) -> float:
        """Seconds from ``started`` until the last block of every publisher is seen; inf: never."""
        pending = list(sent.numbers)
        while pending:
            if self.blocks_of(pending[-1], sent.batches - 1) == BLOCKS:
                pending.pop()
            elif time.perf_counter() - started > DEADLINE_S:
                return math.inf
            else:
                time.sleep(0.002)
        return time.perf_counter() - started

    def cpu_s(self) -> float:
        """Processor time so far, of all its threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8")
        user, system = fields.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def memory_mib(self, field: str = "VmRSS") -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        line = next(line for line in status.splitlines() if line.startswith(f"{field}:"))
        return int(line.split()[1]) / 1024

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def service(command: list[str], port: int, log: Path, *more: str) -> Iterator[Service]:
    """An indexer that ends with the block."""
    made = Service(command, port, log, *more)
    try:
        yield made
    finally:
        made.close()


def ingest(running: Service, sent: Publishers, kind: str) -> Figures:
    """Batches a second until the last ones are seen, and the indexer's processor time for one."""
    wait(f"{running.url}/health")
    sent.wait_for_subscriber()
    all_batches = PUBLISHERS * sent.batches
    started, cpu_s = time.perf_counter(), running.cpu_s()
    sent.go()
    seconds = running.wait_for_all(sent, started)
    if seconds == math.inf:
        raise SystemExit(f"events were lost: their last blocks were not seen in {DEADLINE_S:g} s")
    return {
        f"{kind}_batches_per_s": all_batches / seconds,
        f"{kind}_cpu_us": (running.cpu_s() - cpu_s) / all_batches * 1e6,
    }


def queries(running: Service, folder: Path, seconds: int) -> Figures:
    """The query load, as token ids and as block hashes; the indexer's processor time for one."""
    tokens = (tokens_of(1, 0) * 15)[:PROMPT_TOKENS]
    assert running.blocks_of(1, 0) == BLOCKS
    bodies = {
        "query": {"token_ids": tokens, "model_name": MODEL},
        "query_by_hash": {
            # Both take them signed; Dynamo only so.
            "block_hashes": [
                name - (name >> 63 << 64) for name in compute_block_hash_for_seq(tokens, BLOCK_SIZE)
            ],
            "model_name": MODEL,
        },
    }
    figures = {}
    for path, body in bodies.items():
        assert running.ask(path, body)["scores"]["1"]["0"] == BLOCKS * BLOCK_SIZE
        lua = script(folder / f"{path}.lua", [json.dumps(body)])
        wrk(f"{running.url}/{path}", lua, seconds=2)
        cpu_s = running.cpu_s()
        load = wrk(f"{running.url}/{path}", lua, seconds=seconds)
        cpu_s = running.cpu_s() - cpu_s
        if load.failed:
            raise SystemExit(f"{load.failed} requests to /{path} failed")
        figures[f"{path}_per_s"] = load.requests_per_s
        figures[f"{path}_p50_ms"] = load.p50_ms
        figures[f"{path}_p99_ms"] = load.p99_ms
        figures[f"{path}_cpu_us"] = cpu_s / (load.requests_per_s * seconds) * 1e6
    return figures


def measure_wire(command: list[str], folder: Path, seconds: int) -> Figures:
    """Ingest of five million blocks, the memory they take, queries beside nothing else."""
    batches = MEMBERSHIPS // BLOCKS // PUBLISHERS
    with (
        publishers("wire", PUBLISHERS, batches) as sent,
        service(command, PORT, folder / "log", "--workers", sent.workers) as running,
    ):
        figures = ingest(running, sent, "wire")
        # Allocators give back what they do not need any more a moment later.
        time.sleep(2)
        figures["rss_mib"] = running.memory_mib()
        figures |= queries(running, folder, seconds)
        figures["peak_mib"] = running.memory_mib("VmHWM")
        return figures


def measure_zmq(command: list[str], folder: Path, _seconds: int) -> Figures:
    """Ingest from publishers that take their part of the processor, as engines' do."""
    with (
        publishers("zmq", PUBLISHERS, 50_000) as sent,
        service(command, PORT, folder / "log", "--workers", sent.workers) as running,
    ):
        return ingest(running, sent, "zmq")


def measure_recovery(command: list[str], folder: Path, _seconds: int) -> Figures:
    """Seconds until a second indexer, started with the first as its peer, is ready and answers.

    Nothing where the program knows no ``--peers`` yet; inf where the blocks never come.
    """
    usage = subprocess.run([*command[:3], "--help"], capture_output=True, text=True, check=True)
    if "--peers" not in usage.stdout:
        return {}
    batches = RECOVERED // BLOCKS // PUBLISHERS
    with (
        publishers("wire", PUBLISHERS, batches) as sent,
        service(command, PORT, folder / "log", "--workers", sent.workers) as first,
    ):
        ingest(first, sent, "wire")
        started = time.perf_counter()
        with service(command, SECOND_PORT, folder / "log", "--peers", first.url) as second:
            while second.status("/ready") not in (200, 404):
                if time.perf_counter() - started > DEADLINE_S:
                    return {"recovery_s": math.inf}
                time.sleep(0.005)
            # Not everybody has /ready: what counts for all is that the blocks are there.
            return {"recovery_s": second.wait_for_all(sent, started)}


PARTS: dict[str, Callable[[list[str], Path, int], Figures]] = {
    "wire": measure_wire,
    "zmq": measure_zmq,
    "recovery": measure_recovery,
}


@dataclass(frozen=True)
class Line:
    """A figure, and what it should be beside theirs: a ratio, or a bound of its own."""

    figure: str
    title: str
    more_is_better: bool
    ratio: float | None = None
    at_most: float | None = None

    @property
    def target(self) -> str:
        if self.at_most is not None:
            return f"under {self.at_most:g}"
        if self.ratio is None:
            return ""
        if self.ratio == 1:
            return "lower"
        return f"{'>=' if self.more_is_better else '<='} {self.ratio:g}x"

    def verdict(self, ours: float, theirs: float | None) -> str:
        if self.at_most is not None:
            return "met" if ours < self.at_most else "**missed**"
        if self.ratio is None or theirs is None:
            return ""
        ratio = ours / theirs
        is_met = ratio >= self.ratio if self.more_is_better else ratio <= self.ratio
        return "met" if is_met and ratio != 1 else "**missed**"


LINES = [
    Line("query_per_s", "`/query`, 1,900 tokens: requests/s", True, 1.3),
    Line("query_p50_ms", "its p50, ms", False),
    Line("query_p99_ms", "its p99, ms", False, 1),
    Line("query_cpu_us", "its processor time a request, us", False),
    Line("query_by_hash_per_s", "`/query_by_hash`, 118 hashes: requests/s", True, 1.5),
    Line("query_by_hash_p50_ms", "its p50, ms", False),
    Line("query_by_hash_p99_ms", "its p99, ms", False, 1),
    Line("query_by_hash_cpu_us", "its processor time a request, us", False),
    Line("wire_batches_per_s", "ingest, 4 publishers (wire): batches/s", True, 1.5),
    Line("wire_cpu_us", "its processor time a batch, us", False),
    Line("zmq_batches_per_s", "ingest, 4 publishers (zmq): batches/s", True, 1.5),
    Line("zmq_cpu_us", "its processor time a batch, us", False),
    Line("rss_mib", "resident with 5 million memberships, MiB", False, 0.5),
    Line("peak_mib", "highest resident memory, MiB", False),
    Line("recovery_s", "10 million blocks recovered from a peer, s", False, at_most=10),
]


def shown(figure: float | None) -> str:
    if figure is None:
        return "-"
    if figure == math.inf:
        return f"not within {DEADLINE_S:g}"
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def table(measured: dict[str, dict[str, list[float]]], chosen: list[str]) -> str:
    """Targets, medians of both, ratios, and how far the trials lie apart."""
    rows = [
        f"| | {OURS} | {THEIRS} | ratio | target | | trials |",
        "|---" * 7 + "|",
    ]
    for line in LINES:
        ours, theirs = (measured[name].get(line.figure, []) for name in (OURS, THEIRS))
        if not ours:
            if line.figure == "recovery_s" and "recovery" in chosen:
                their = statistics.median(theirs) if theirs else None
                cells = f"skipped: it has no `--peers` yet | {shown(their)} | - | {line.target} | |"
                rows.append(f"| {line.title} | {cells} |")
            continue
        our, their = statistics.median(ours), statistics.median(theirs) if theirs else None
        ratio = f"{our / their:.2f}x" if their and their != math.inf else "-"
        spread = "; ".join(
            ", ".join(shown(value) for value in values) for values in (ours, theirs) if values
        )
        rows.append(
            f"| {line.title} | {shown(our)} | {shown(their)} | {ratio} | {line.target} "
            f"| {line.verdict(our, their)} | {spread} |"
        )
    return "\n".join(rows)


def main() -> None:
    """Measure, print the table and write it down."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=6, help="of each query load")
    parser.add_argument("--dry", action="store_true", help="print only")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all when none is given")
    args = parser.parse_args()
    chosen = args.parts or list(PARTS)
    if set(chosen) - set(PARTS):
        parser.error(f"parts must be of {', '.join(PARTS)}, got {', '.join(chosen)}")
    section = None if args.dry or args.parts else Section("indexer")
    commands = programs()
    measured: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in commands}
    with tempfile.TemporaryDirectory() as name:
        for trial in range(args.trials):
            # Who never recovers costs its deadline in each trial: once is enough to see it.
            for part in chosen if trial == 0 else [name for name in chosen if name != "recovery"]:
                for system in list(commands)[:: 1 if trial % 2 == 0 else -1]:
                    figures = PARTS[part](commands[system], Path(name), args.seconds)
                    print(f"trial {trial + 1}, {part}, {system}: {figures}", file=sys.stderr)
                    for figure, value in figures.items():
                        measured[system][figure].append(value)
    text = table(measured, chosen)
    print(text)
    if section is not None:
        section.write(text)


if __name__ == "__main__":
    main()
