"""Routers as HTTP proxies: ``python benches/peers/routers.py [--seconds N] [NAME...]``.

Every system in turn gets the same four workers and the same prompts, in two rounds (forwards, then
backwards); the better round of each counts, and both are printed. A run of all systems is written
down in ``benches/RESULTS.md``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from install import environment
from load import Load, chat_bodies, script, wait, wrk
from results import Section
from workers import four_workers

REPOSITORY = Path(__file__).parents[2]
TOKENIZER = REPOSITORY / "tests" / "vectors" / "tiny-llama"
FIRST_WORKER, ROUTER, METRICS = 9_101, 8_300, 29_300
HOST = ["--host", "127.0.0.1", "--port", str(ROUTER)]

Commands = Callable[[list[str]], list[list[str]]]


def kvflash(mode: str, *more: str) -> Commands:
    """This project's frontend."""
    flags = ["--router-mode", mode, "--log-level", "warn", *more]
    return lambda workers: [
        [sys.executable, "-m", "kvflash.frontend", *HOST, *flags]
        + [part for url in workers for part in ("--worker", url)]
    ]


def router(name: str, program: list[str], policy: str, quiet: str) -> Commands:
    """The three routers of one family share their flags."""

    def commands(workers: list[str]) -> list[list[str]]:
        path = environment(name) / program[0]
        flags = [*program[1:], *HOST, "--policy", policy, "--log-level", quiet]
        return [[str(path), *flags, "--prometheus-port", str(METRICS), "--worker-urls", *workers]]

    return commands


def dynamo(mode: str) -> Commands:
    """Dynamo's frontend on its own mocker: it can't forward to HTTP workers."""

    def commands(_workers: list[str]) -> list[list[str]]:
        python = str(environment("dynamo") / "python")
        plane = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
        mocker = ["--model-path", str(TOKENIZER), "--model-name", "tiny-llama", "--num-workers",
                  "4", "--speedup-ratio", "1000000", "--block-size", "16"]  # fmt: skip
        front = ["--http-host", "127.0.0.1", "--http-port", str(ROUTER), "--router-mode", mode]
        return [
            [python, "-m", "dynamo.mocker", *plane, *mocker],
            [python, "-m", "dynamo.frontend", *plane, *front],
        ]

    return commands


SGLANG = ["python", "-m", "sglang_router.launch_router"]
SYSTEMS: dict[str, Commands] = {
    "nginx round-robin": lambda _workers: [],
    "kvflash round-robin": kvflash("round-robin"),
    "kvflash kv, local tokenizer": kvflash(
        "kv", "--tokenizer", str(TOKENIZER), "--kv-cache-block-size", "16"
    ),
    "vllm-router round-robin": router("vllm-router", ["vllm-router"], "round_robin", "warning"),
    "vllm-router cache-aware": router("vllm-router", ["vllm-router"], "cache_aware", "warning"),
    "sglang-router round-robin": router("sglang-router", SGLANG, "round_robin", "warn"),
    "sglang-router cache-aware": router("sglang-router", SGLANG, "cache_aware", "warn"),
    "smg round-robin": router("smg", ["smg", "launch"], "round_robin", "warn"),
    "smg cache-aware": router("smg", ["smg", "launch"], "cache_aware", "warn"),
    "dynamo.frontend round-robin + mocker": dynamo("round-robin"),
    "dynamo.frontend kv + mocker": dynamo("kv"),
}


@contextmanager
def running(name: str, workers: list[str], folder: Path) -> Iterator[str]:
    """Start a system before the workers; yields its base URL once it answers."""
    port = FIRST_WORKER + 9 if name.startswith("nginx") else ROUTER
    env = {**os.environ, "DYN_LOG": "warn", "HF_HUB_OFFLINE": "1"}
    env["DYN_FILE_KV"] = str(folder / name.replace(" ", "-"))
    started = []
    try:
        with (folder / "log").open("ab") as log:
            for command in SYSTEMS[name](workers):
                started.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        base = f"http://127.0.0.1:{port}"
        wait(f"{base}/v1/models")
        yield base
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def measure(name: str, workers: list[str], lua: Path, folder: Path, seconds: int) -> Load:
    """Start a system, load it, stop it."""
    with running(name, workers, folder) as base:
        warm = wrk(f"{base}/v1/chat/completions", lua, seconds=2)
        for _ in range(30):
            if not warm.failed:
                break
            warm = wrk(f"{base}/v1/chat/completions", lua, seconds=1)
        return wrk(f"{base}/v1/chat/completions", lua, seconds=seconds)


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=8)
    parser.add_argument("names", nargs="*", help="parts of system names; all when none is given")
    args = parser.parse_args()
    chosen = [n for n in SYSTEMS if not args.names or any(part in n for part in args.names)]
    section = None if args.names else Section("routers")
    results: dict[str, list[Load]] = {name: [] for name in chosen}
    with tempfile.TemporaryDirectory() as name, four_workers(FIRST_WORKER) as workers:
        folder = Path(name)
        lua = script(folder / "chat.lua", chat_bodies())
        for order in (chosen, chosen[::-1]):
            for system in order:
                load = measure(system, workers, lua, folder, args.seconds)
                results[system].append(load)
                print(f"{system}: {load}", file=sys.stderr)
    rows = ["| system | requests/s | p50 ms | p99 ms | failed | other round |", "|---" * 6 + "|"]
    for system, loads in results.items():
        best, other = sorted(loads, key=lambda load: -load.requests_per_s)
        rows.append(
            f"| {system} | {best.requests_per_s:,.0f} | {best.p50_ms:.2f} | {best.p99_ms:.2f} "
            f"| {best.failed} | {other.requests_per_s:,.0f} |"
        )
    text = "\n".join(rows)
    print(text)
    if section is not None:
        section.write(text)


if __name__ == "__main__":
    main()
