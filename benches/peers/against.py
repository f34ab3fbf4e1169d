"""Two commits, side by side in one run: ``python benches/peers/against.py [BASE [OTHER]]``.

Each commit is built once, with one profile, in ``~/.cache/kvflash/against/COMMIT``. Then both run
at the same time, and a load goes to one and to the other in turns; the first one changes with every
round. Measured are:

- *round-robin*, *kv*: requests through the frontend to four workers that answer at once (nginx);
  ``kv`` tokenizes and hashes 4,500 characters. wrk, 32 connections;
- *auto*: the same, OTHER with ``auto`` beside BASE with ``kv``;
- *decision*: ``auto`` of OTHER beside ``kv`` of BASE in process, from tokens to the booked worker;
- *query*: ``POST /query`` of 1,900 token ids to an indexer, under the same wrk;
- *ingest*: batches of events that four publishers send as fast as a fresh indexer takes them.

A ratio is that of the two loads of one round, and above 1 where OTHER is better (of times: BASE's
over OTHER's). The table has the median of the rounds and their range; the exit status is 1 when a
median is below ``--at-least``.
Needs wrk and nginx.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from indexer import (
    BLOCK_SIZE,
    BLOCKS,
    MODEL,
    PROMPT_TOKENS,
    PUBLISHERS,
    Figures,
    Service,
    ingest,
    service,
)
from load import Load, chat_bodies, script, wait, wrk
from publisher import publishers, tokens_of
from results import stamp
from workers import four_workers

ROOT = Path(__file__).parents[2]
CACHE = Path.home() / ".cache" / "kvflash"
FIRST_WORKER, FIRST_PORT = 9_101, 8_310
TOKENIZER = ROOT / "tests" / "vectors" / "tiny-llama"
DECISIONS = Path(__file__).with_name("decisions.py")
# One for both, whatever their manifests say: what `make bench` measures.
PROFILE = {"CARGO_PROFILE_RELEASE_LTO": "thin", "CARGO_PROFILE_RELEASE_CODEGEN_UNITS": "8"}


@dataclass(frozen=True)
class Build:
    """A commit that is ready to run."""

    commit: str
    python: Path

    def command(self, module: str, *flags: str) -> list[str]:
        """How it is started."""
        return [str(self.python), "-m", f"kvflash.{module}", "--log-level", "error", *flags]


def build(revision: str) -> Build:
    """Check a commit out and build it, unless that has been done before."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", f"{revision}^{{commit}}"]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    commit = found.stdout.strip()
    folder = CACHE / "against" / commit
    python, mark = folder / ".venv" / "bin" / "python", folder / ".built"
    if not mark.exists():
        print(f"building {commit} (some minutes) ...", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        archive = subprocess.Popen(
            ["git", "-C", str(ROOT), "archive", commit], stdout=subprocess.PIPE
        )
        subprocess.run(["tar", "x"], cwd=folder, stdin=archive.stdout, check=True)
        archive.wait()
        target = os.environ.get("CARGO_TARGET_DIR", str(CACHE / "target"))
        env = {**os.environ, **PROFILE, "CARGO_TARGET_DIR": target}
        env |= {"VIRTUAL_ENV": str(folder / ".venv")}
        for step in (
            [sys.executable, "-m", "venv", str(folder / ".venv")],
            [str(python), "-m", "pip", "install", "--quiet", "maturin>=1.9,<2"],
            [str(python.with_name("maturin")), "develop", "--quiet", "--release"],
        ):
            subprocess.run(step, cwd=folder, env=env, check=True)
        mark.touch()
    return Build(commit, python)


@dataclass(frozen=True)
class Size:
    """How long a wrk run takes, and the batches of each publisher."""

    seconds: int
    batches: int


Pair = tuple[Build, Build]
Loads = Callable[[int], Figures]


@contextmanager
def frontends(
    pair: Pair, folder: Path, size: Size, flags: tuple[tuple[str, ...], tuple[str, ...]]
) -> Iterator[Loads]:
    """Both frontends before the same workers; yields how to load one of them."""
    lua = script(folder / "chat.lua", chat_bodies())
    with ExitStack() as stack:
        workers = stack.enter_context(four_workers(FIRST_WORKER))
        urls = []
        for at, one in enumerate(pair):
            port = FIRST_PORT + at
            command = one.command("frontend", "--host", "127.0.0.1", *flags[at])
            command += [part for url in workers for part in ("--worker", url)]
            running = stack.enter_context(service(command, port, folder / f"{one.commit}.log"))
            wait(f"{running.url}/v1/models", 180)
            urls.append(f"{running.url}/v1/chat/completions")
        for url in urls:
            warm = wrk(url, lua, seconds=2)
            for _ in range(30):
                if not warm.failed:
                    break
                warm = wrk(url, lua, seconds=1)
        yield lambda at: rate(wrk(urls[at], lua, seconds=size.seconds))


@contextmanager
def queries(pair: Pair, folder: Path, size: Size) -> Iterator[Loads]:
    """Both indexers with the same blocks; yields how to load one of them."""
    tokens = (tokens_of(1, 0) * 15)[:PROMPT_TOKENS]
    body = {"token_ids": tokens, "model_name": MODEL}
    lua = script(folder / "query.lua", [json.dumps(body)])
    with ExitStack() as stack:
        indexers = [
            stack.enter_context(filled(one, FIRST_PORT + at, folder, 5_000))[0]
            for at, one in enumerate(pair)
        ]
        for running in indexers:
            assert running.blocks_of(1, 0) == BLOCKS
            wrk(f"{running.url}/query", lua, seconds=2)
        yield lambda at: rate(wrk(f"{indexers[at].url}/query", lua, seconds=size.seconds))


@contextmanager
def intake(pair: Pair, folder: Path, size: Size) -> Iterator[Loads]:
    """Yields how to fill a fresh indexer of one of the two."""

    def load(at: int) -> Figures:
        with filled(pair[at], FIRST_PORT + at, folder, size.batches) as (_, figures):
            return {"batches/s": figures["wire_batches_per_s"]}

    yield load


@contextmanager
def filled(one: Build, port: int, folder: Path, batches: int) -> Iterator[tuple[Service, Figures]]:
    """An indexer that has taken batches of four publishers in, and how fast it did."""
    flags = ("--block-size", str(BLOCK_SIZE), "--model-name", MODEL, "--threads", "1")
    log = folder / f"{one.commit}.log"
    with (
        publishers("wire", PUBLISHERS, batches) as sent,
        service(one.command("indexer", *flags), port, log, "--workers", sent.workers) as running,
    ):
        yield running, ingest(running, sent, "wire")


@contextmanager
def decisions(pair: Pair, folder: Path, size: Size) -> Iterator[Loads]:
    """Yields how to time the decisions of one of the two."""

    def load(at: int) -> Figures:
        command = [str(pair[at].python), str(DECISIONS), ("kv", "auto")[at]]
        run = subprocess.run(command, check=True, capture_output=True, text=True)
        return {f"{shape}, us": us for shape, us in json.loads(run.stdout).items()}

    yield load


def rate(load: Load) -> Figures:
    """What counts of a load."""
    assert not load.failed, load
    return {"requests/s": load.requests_per_s, "p50 ms": load.p50_ms}


ROUND_ROBIN = ("--router-mode", "round-robin")
TOKENS = ("--tokenizer", str(TOKENIZER), "--kv-cache-block-size", "16")
KV, AUTO = ("--router-mode", "kv", *TOKENS), ("--router-mode", "auto", *TOKENS)
PARTS = {
    "round-robin": partial(frontends, flags=(ROUND_ROBIN, ROUND_ROBIN)),
    "kv": partial(frontends, flags=(KV, KV)),
    "auto": partial(frontends, flags=(KV, AUTO)),
    "decision": decisions,
    "query": queries,
    "ingest": intake,
}


def compare(load: Loads, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Pairs of figures, BASE's first."""
    measured: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for number in range(rounds):
        figures: dict[int, Figures] = {}
        for at in (0, 1) if number % 2 == 0 else (1, 0):
            figures[at] = load(at)
        for name, base in figures[0].items():
            measured[name].append((base, figures[1][name]))
    return measured


def main() -> int:
    """Build, measure, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("base", nargs="?", default="3912177")
    parser.add_argument("other", nargs="?", default="HEAD")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=int, default=4, help="of each wrk run")
    parser.add_argument("--batches", type=int, default=50_000, help="of each publisher")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--at-least", type=float, default=0.97, help="the least median ratio")
    args = parser.parse_args()
    size = Size(args.seconds, args.batches)
    machine_load = os.getloadavg()[0]
    pair = build(args.base), build(args.other)
    rows = [
        f"| | {pair[0].commit} | {pair[1].commit} | ratio | range | |",
        "|---" * 6 + "|",
    ]
    is_met = True
    with tempfile.TemporaryDirectory() as name:
        for part in args.parts:
            with PARTS[part](pair, Path(name), size) as load:
                measured = compare(load, args.rounds)
            for figure, pairs in measured.items():
                is_time = figure.endswith((" ms", " us"))
                ratios = [base / other if is_time else other / base for base, other in pairs]
                ratio = statistics.median(ratios)
                is_met &= ratio >= args.at_least
                base, other = (statistics.median(values) for values in zip(*pairs, strict=True))
                digits = 2 if is_time else 0
                rows.append(
                    f"| {part}, {figure} | {base:,.{digits}f} | {other:,.{digits}f} | {ratio:.3f} "
                    f"| {min(ratios):.3f} to {max(ratios):.3f} "
                    f"| {'met' if ratio >= args.at_least else '**missed**'} |"
                )
                print(rows[-1], file=sys.stderr)
    print(f"{stamp(machine_load)}\n\n" + "\n".join(rows))
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
