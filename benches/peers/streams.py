"""Many streams at once: ``python benches/peers/streams.py [--streams N] [--tokens N] [NAME...]``.

64 engines stream numbered tokens; a client reads all streams and checks that each is whole and in
order. Once paced (each engine sends a token of a stream every 50 ms), once as fast as they are
taken. Every system runs twice, forwards and then backwards; both rounds are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from install import HOME
from results import Section
from routers import SYSTEMS, running

FIRST_ENGINE, ENGINES, PACE_US = 9_200, 64, 50_000
CRATE = Path(__file__).parent / "streams"
NAMES = [name for name in SYSTEMS if not name.startswith(("nginx", "dynamo"))]
DIRECT = "the engines alone"


def build() -> Path:
    """Compile engines and client; returns the program."""
    target = HOME / "streams-target"
    env = {**os.environ, "CARGO_TARGET_DIR": str(target)}
    command = ["cargo", "build", "--release", "--locked", "--quiet", "--manifest-path"]
    subprocess.run([*command, str(CRATE / "Cargo.toml")], env=env, check=True)
    return target / "release" / "streams"


@contextmanager
def engines(program: Path, interval_us: int) -> Iterator[list[str]]:
    """Run the engines; yields their URLs."""
    command = [str(program), "engines", str(FIRST_ENGINE), str(ENGINES), str(interval_us)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield [f"http://127.0.0.1:{FIRST_ENGINE + at}" for at in range(ENGINES)]
    finally:
        process.terminate()
        process.wait()


def load(program: Path, url: str, streams: int, tokens: int) -> dict[str, float]:
    """Read all streams; what the client measured."""
    command = [str(program), "load", url, str(streams), str(tokens)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    outcome: dict[str, float] = json.loads(done.stdout)
    return outcome


def main() -> None:
    """Measure and print tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=2_000)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("names", nargs="*", help="parts of system names; all when none is given")
    args = parser.parse_args()
    chosen = [n for n in NAMES if not args.names or any(part in n for part in args.names)]
    section = None if args.names else Section("streams")
    program, tables = build(), []
    for title, pace in (("A token every 50 ms", PACE_US), ("As fast as it goes", 0)):
        head = ["system", "tokens/s", "gap p50 ms", "gap p99 ms", "longest gap ms",
                "first token p50 ms", "p99 ms", "failed"]  # fmt: skip
        rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        with tempfile.TemporaryDirectory() as folder, engines(program, pace) as urls:
            for system in (DIRECT, *chosen, *reversed(chosen)):
                if system == DIRECT:
                    found = load(program, urls[0], args.streams, args.tokens)
                else:
                    with running(system, urls, Path(folder)) as base:
                        load(program, base, 64, 20)
                        found = load(program, base, args.streams, args.tokens)
                print(system, found, file=sys.stderr)
                rows.append(
                    f"| {system} | {found['tokens_per_s']:,.0f} | {found['gap_p50_ms']:.1f} "
                    f"| {found['gap_p99_ms']:.1f} | {found['gap_max_ms']:.0f} "
                    f"| {found['first_p50_ms']:.0f} | {found['first_p99_ms']:.0f} "
                    f"| {found['failed']} |"
                )
        tables.append(f"{title}, {args.streams:,} streams of {args.tokens} tokens:\n\n"
                      + "\n".join(rows))  # fmt: skip
    text = "\n\n".join(tables)
    print(text)
    if section is not None:
        section.write(text)


if __name__ == "__main__":
    main()
