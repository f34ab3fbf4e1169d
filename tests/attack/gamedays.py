"""Faults of processes under load: what was lost, and how long the others waited.

    python tests/attack/gamedays.py --only frozen

Prints a table with one line for each fault. Lost before the first byte is a request without an
answer of status 200; an answer that breaks later is lost after it, and nobody can send it again.
Fails where a fault that must lose nothing before the first byte does, or where a request waited
longer than a second beyond the time in which the fault was noticed. Needs nats-server and etcd.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from ports import free_port
from servers import EtcdServer, NatsServer
from service import Process, until
from support_cluster import Cluster
from support_frontend import FrontendProcess, Mocker

RATE = 60.0
CLIENTS = 40
# A client's patience: longer than every bound that is tested here.
TIMEOUT_S = 30.0
CALM_S = 2.0
MAX_EXTRA_S = 1.0


class Balancer:
    """Frontends in turn: the unready get nothing, and a refused connection goes to the next."""

    def __init__(self, *urls: str) -> None:
        self._urls = list(urls)
        self._turn = itertools.count()
        self._ready = set(urls)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._probe, daemon=True)
        self._thread.start()

    def _probe(self) -> None:
        while not self._is_over.wait(0.25):
            for url in self._urls:
                is_ready = False
                failures = (OSError, http.client.HTTPException)
                with suppress(*failures), closing(_connection(url, 1.0)) as probe:
                    probe.request("GET", "/ready")
                    is_ready = probe.getresponse().status == 200
                (self._ready.add if is_ready else self._ready.discard)(url)

    def connect(self) -> http.client.HTTPConnection:
        """A connection to one of them; raises if all refuse."""
        urls = [url for url in self._urls if url in self._ready] or self._urls
        for _ in range(2 * len(urls)):
            connection = _connection(urls[next(self._turn) % len(urls)], TIMEOUT_S)
            try:
                connection.connect()
            except ConnectionRefusedError:
                continue
            return connection
        raise ConnectionRefusedError("no frontend takes connections")

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()


def _connection(url: str, timeout: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)


@dataclass
class Load:
    """Clients that ask at a steady rate, half of them for streams."""

    balancer: Balancer
    asked: int = 0
    lost_before: int = 0
    lost_after: int = 0
    waits: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._is_over, self._lock = threading.Event(), threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(at,), daemon=True) for at in range(CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        dice = random.Random(number)
        self._is_over.wait(number / RATE)
        while not self._is_over.is_set():
            began = time.monotonic()
            before, after, wait, error = self._ask(dice)
            with self._lock:
                self.asked += 1
                self.lost_before += before
                self.lost_after += after
                self.waits.append(wait)
                if error and len(self.errors) < 5:
                    self.errors.append(error)
            self._is_over.wait(max(0.0, CLIENTS / RATE - (time.monotonic() - began)))

    def _ask(self, dice: random.Random) -> tuple[bool, bool, float, str]:
        body = {
            "model": "m",
            "prompt": [dice.randrange(50) * 100 + at for at in range(64)],
            "max_tokens": 20,
            "stream": dice.random() < 0.5,
        }
        began, has_begun, wait = time.monotonic(), False, 0.0
        try:
            with closing(self.balancer.connect()) as connection:
                kind = {"content-type": "application/json"}
                connection.request("POST", "/v1/completions", json.dumps(body), kind)
                answer = connection.getresponse()
                wait = time.monotonic() - began
                # Only an answer of success has begun.
                has_begun = answer.status == 200
                text = answer.read()
                is_whole = has_begun and (not body["stream"] or text.endswith(b"data: [DONE]\n\n"))
                if is_whole and b'"error"' not in text:
                    return False, False, wait, ""
                error = f"{answer.status} {text[-300:]!r}"
        except (OSError, http.client.HTTPException) as failure:
            error = repr(failure)
        wait = wait or time.monotonic() - began
        return not has_begun, has_begun, wait, error

    def calm(self, seconds: float = CALM_S) -> None:
        """Go on for so long."""
        self._is_over.wait(seconds)

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        self.balancer.close()


@dataclass
class Day:
    """The outcome of one fault.

    Attributes:
        noticed_s: Time from the fault until a frontend knew of it; requests may wait that long.
        back_s: Time until everything served again.
        may_lose: Whether requests that a killed process had accepted may be lost.
    """

    load: Load
    noticed_s: float = 0.0
    back_s: float = 0.0
    may_lose: bool = False

    @contextmanager
    def noticing(self, check: Callable[[], bool], what: str) -> Iterator[None]:
        """The fault is made within; wait until it is noticed."""
        began = time.monotonic()
        yield
        until(check, what)
        self.noticed_s = max(self.noticed_s, time.monotonic() - began)

    def until_back(self, check: Callable[[], bool], what: str) -> None:
        began = time.monotonic()
        until(check, what)
        self.back_s = max(self.back_s, time.monotonic() - began)


def engines(stack: ExitStack, count: int) -> list[Mocker]:
    flags = ("--num-gpu-blocks", "2048", "--speedup-ratio", "4")
    return [stack.enter_context(Mocker(*flags)) for _ in range(count)]


def frontend(stack: ExitStack, mockers: Sequence[Mocker], *flags: str) -> FrontendProcess:
    workers = ("--worker", *(mocker.spec(id=at) for at, mocker in enumerate(mockers, 1)))
    made = stack.enter_context(FrontendProcess(*workers, *flags))
    made.wait_healthy(*range(1, len(mockers) + 1))
    return made


def begin(stack: ExitStack, *frontends: FrontendProcess) -> Day:
    load = Load(Balancer(*(one.url for one in frontends)))
    stack.callback(load.stop)
    load.calm()
    return Day(load)


def is_healthy(one: FrontendProcess, worker: int) -> bool:
    return bool(one.workers()[worker]["healthy"])


def freeze(process: Process, is_frozen: bool = True) -> None:
    process.popen.send_signal(signal.SIGSTOP if is_frozen else signal.SIGCONT)


# -- the faults


def engine_killed(stack: ExitStack) -> Day:
    """kill -9 of two engines of four, one after the other; each starts again with an empty cache"""
    mockers = engines(stack, 4)
    one = frontend(stack, mockers)
    day = begin(stack, one)
    for at in (1, 2):
        with day.noticing(lambda at=at: not is_healthy(one, at), "the death to be noticed"):
            mockers[at - 1].kill()
        day.load.calm()
        mockers[at - 1].restart()
        day.until_back(lambda at=at: is_healthy(one, at), "the engine to be back")
        day.load.calm()
    return day


def engine_frozen(stack: ExitStack) -> Day:
    """SIGSTOP of one engine of four, for 8 s"""
    mockers = engines(stack, 4)
    one = frontend(stack, mockers)
    day = begin(stack, one)
    with day.noticing(lambda: not is_healthy(one, 1), "the silence to be noticed"):
        freeze(mockers[0].process)
    day.load.calm(8)
    freeze(mockers[0].process, False)
    day.until_back(lambda: is_healthy(one, 1), "the engine to be back")
    day.load.calm()
    return day


def engine_stalled(stack: ExitStack) -> Day:
    """one engine of two stalls in everything, for good"""
    mockers = engines(stack, 2)
    one = frontend(stack, mockers)
    day = begin(stack, one)
    with day.noticing(lambda: not is_healthy(one, 1), "the silence to be noticed"):
        freeze(mockers[0].process)
    day.load.calm(8)
    return day


def all_engines_frozen(stack: ExitStack) -> Day:
    """SIGSTOP of all four engines, for 3 s"""
    mockers = engines(stack, 4)
    one = frontend(stack, mockers)
    day = begin(stack, one)
    for mocker in mockers:
        freeze(mocker.process)
    day.load.calm(3)
    for mocker in mockers:
        freeze(mocker.process, False)
    day.noticed_s = 3.0
    day.until_back(lambda: all(is_healthy(one, at) for at in (1, 2, 3, 4)), "all to be back")
    day.load.calm()
    return day


def engine_replaced(stack: ExitStack) -> Day:
    """DELETE and POST of a worker"""
    mockers = engines(stack, 2)
    one = frontend(stack, mockers)
    day = begin(stack, one)
    for _ in range(3):
        one.remove(1)
        day.load.calm(1)
        worker = mockers[0].workers[0]
        one.add(worker["url"], id=1, events=worker["events"], replay=worker["replay"])
        day.load.calm(1)
    return day


def rolling_restart(stack: ExitStack) -> Day:
    """SIGTERM of two frontends in turn, twice, each replaced at its port"""
    mockers = engines(stack, 2)
    ports = [free_port(), free_port()]
    members = [frontend(stack, mockers, "--port", str(port)) for port in ports]
    day = begin(stack, *members)
    for at in (0, 1, 0, 1):
        members[at].process.terminate()
        members[at].process.close()
        began = time.monotonic()
        members[at] = frontend(stack, mockers, "--port", str(ports[at]))
        day.back_s = max(day.back_s, time.monotonic() - began)
        day.load.calm()
    return day


def take_over(stack: ExitStack) -> Day:
    """a new frontend takes over the port of the only one (--reuse-port), twice"""
    mockers = engines(stack, 2)
    flags = ("--port", str(free_port()), "--reuse-port", "--lame-duck-timeout", "1")
    old = frontend(stack, mockers, *flags)
    day = begin(stack, old)
    for _ in range(2):
        new = frontend(stack, mockers, *flags)
        old.process.terminate()
        old = new
        day.load.calm()
    return day


def frontend_killed(stack: ExitStack) -> Day:
    """kill -9 of one frontend of two: what it had is lost with it"""
    mockers = engines(stack, 2)
    port = free_port()
    other, member = frontend(stack, mockers), frontend(stack, mockers, "--port", str(port))
    day = begin(stack, other, member)
    day.may_lose = True
    member.process.kill()
    day.load.calm()
    member.process.close()
    began = time.monotonic()
    frontend(stack, mockers, "--port", str(port))
    day.back_s = time.monotonic() - began
    day.load.calm()
    return day


def _runtime(stack: ExitStack) -> tuple[NatsServer, EtcdServer, Cluster]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    for name in ("nats", "etcd"):
        (folder / name).mkdir()
    nats = stack.enter_context(closing(NatsServer(folder / "nats")))
    etcd = stack.enter_context(closing(EtcdServer(folder / "etcd")))
    env = {
        "KVFLASH_DISCOVERY": "etcd",
        "ETCD_ENDPOINTS": etcd.url,
        "NATS_SERVER": nats.url,
    }
    return nats, etcd, stack.enter_context(Cluster(env))


def brokers_killed(stack: ExitStack) -> Day:
    """kill -9 of NATS, then of etcd, for 5 s each; workers of the runtime"""
    nats, etcd, cluster = _runtime(stack)
    workers = cluster.workers("--event-plane", "nats", count=3)
    one = cluster.frontend(workers, "--event-plane", "nats")
    day = begin(stack, one)
    for server in (nats, etcd):
        server.kill()
        day.load.calm(5)
        server.start()
        day.load.calm()
    day.until_back(lambda: all(is_healthy(one, at) for at in workers.ids), "all to serve")
    return day


def _three_of_the_runtime(stack: ExitStack) -> tuple[Day, Process, Callable[[], bool]]:
    """A day before three workers of the runtime, the first process, and whether its loss shows."""
    _, _, cluster = _runtime(stack)
    workers = [cluster.workers("--event-plane", "nats", count=1) for _ in range(3)]
    one = cluster.frontend(workers[0], "--event-plane", "nats")
    one.wait_healthy(*(worker.ids[0] for worker in workers))
    day = begin(stack, one)
    worker = workers[0].ids[0]

    def is_noticed() -> bool:
        known = one.workers()
        return worker not in known or not known[worker]["healthy"]

    return day, workers[0].process, is_noticed


def runtime_worker_killed(stack: ExitStack) -> Day:
    """kill -9 of one worker of the runtime of three"""
    day, process, is_noticed = _three_of_the_runtime(stack)
    with day.noticing(is_noticed, "the death to be noticed"):
        process.kill()
    day.load.calm(4)
    return day


def runtime_worker_frozen(stack: ExitStack) -> Day:
    """SIGSTOP of one worker of the runtime of three, for 13 s"""
    day, process, is_noticed = _three_of_the_runtime(stack)
    with day.noticing(is_noticed, "the silence to be noticed"):
        freeze(process)
    day.load.calm(max(0.0, 13 - day.noticed_s))
    freeze(process, False)
    day.until_back(lambda: not is_noticed(), "the worker to be back")
    day.load.calm()
    return day


FAULTS: list[Callable[[ExitStack], Day]] = [
    engine_killed,
    engine_frozen,
    engine_stalled,
    all_engines_frozen,
    engine_replaced,
    rolling_restart,
    take_over,
    frontend_killed,
    brokers_killed,
    runtime_worker_killed,
    runtime_worker_frozen,
]


def play(fault: Callable[[ExitStack], Day]) -> tuple[dict[str, object], list[str]]:
    """Make one fault: its line of the table, and what was wrong."""
    with ExitStack() as stack:
        day = fault(stack)
        day.load.stop()
    load, wrong = day.load, []
    longest = max(load.waits)
    if load.lost_before and not day.may_lose:
        wrong.append(f"{load.lost_before} lost before the first byte: {load.errors}")
    if longest > day.noticed_s + MAX_EXTRA_S:
        wrong.append(f"one waited {longest:.2f} s; the fault was noticed in {day.noticed_s:.2f} s")
    line = {
        "fault": fault.__name__,
        "asked": load.asked,
        "lost before": load.lost_before,
        "lost after": load.lost_after,
        "noticed s": round(day.noticed_s, 2),
        "longest wait s": round(longest, 2),
        "back s": round(day.back_s, 2),
    }
    return line, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="faults that have this in their name")
    given = parser.parse_args()
    faults = [fault for fault in FAULTS if given.only in fault.__name__]
    failed = not faults
    for at, fault in enumerate(faults):
        line, wrong = play(fault)
        if at == 0:
            print("| " + " | ".join(line) + " |", "|---" * len(line) + "|", sep="\n")
        print("| " + " | ".join(map(str, line.values())) + " |", flush=True)
        for what in wrong:
            print(f"{fault.__name__} ({fault.__doc__}): {what}", file=sys.stderr, flush=True)
        failed = failed or bool(wrong)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
