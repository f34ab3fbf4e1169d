"""A cluster with processes that are killed while clients send, and the outcome of every request."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import random
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ports import free_port
from servers import EtcdServer, NatsServer
from service import Http, Process, until
from support_cluster import BLOCK, MODEL, Cluster, Workers
from support_frontend import COMPLETIONS, Answer, FrontendProcess, ask

__all__ = ["ChaosCluster", "Load", "Member"]

#: Instance, rank, blocks and digest of all that hold something.
Digests = list[list[object]]

SCRIPT = str(Path(__file__).with_name("frontend_with_digests.py"))
WORKERS = 3
FAMILIES = 40
CLIENTS = 6
# Less than the prompts need, so that workers evict.
CACHE_BLOCKS = 256


class Member(FrontendProcess):
    """A frontend at a port that outlives it; counts its lives."""

    def __init__(self, env: dict[str, str]) -> None:
        self.port, self._digests_port = free_port(), free_port()
        self._env = {**env, "DIGESTS_PORT": str(self._digests_port)}
        self.lives = 0
        self.is_open = False
        self.is_dead = False
        self.begin()

    def begin(self) -> None:
        """Start; not asked yet."""
        self.lives += 1
        self.process = Process(
            SCRIPT,
            *("--host", "127.0.0.1", "--port", str(self.port), "--log-level", "info"),
            *("--discovery", "etcd", "--event-plane", "nats", "--router-replica-sync"),
            *("--router-snapshot-threshold", "200"),
            env=self._env,
        )
        try:
            self.url = str(self.process.ready()["url"])
        except BaseException:
            self.process.close()
            raise
        self.is_dead = False
        self.http = Http(self.url)

    def kill(self) -> None:
        """kill -9; clients that ask now are refused."""
        # From before the signal until it is there again.
        self.is_dead = True
        self.process.kill()
        self.http.close()
        self.process.close()

    def digests(self) -> Digests:
        """Instance, rank, blocks and digest of all that is held."""
        url = f"http://127.0.0.1:{self._digests_port}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return list(json.load(answer))


@dataclass
class Outcome:
    """The end of a request.

    Attributes:
        kind: whole; worker lost (an error that says so); router lost (with the connection, if the
            router was killed meanwhile); anything else is wrong.
        text: Text of the answer or error.
    """

    kind: str
    text: str = ""


class Load:
    """Clients that ask open frontends in turn, and only repeat what was refused a connection.

    Attributes:
        counts: Requests by how they ended.
        wrong: Ends that nothing explains, the first ones.
    """

    def __init__(self, cluster: ChaosCluster, seed: int) -> None:
        self._cluster = cluster
        self._seed = seed
        self._turn = itertools.count()
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._may_ask = threading.Event()
        self._asking = 0
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._threads = [
            threading.Thread(target=self._run, args=(at,), daemon=True) for at in range(CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Ask meanwhile; at the end every request has ended."""
        self._may_ask.set()
        try:
            yield
        finally:
            self._may_ask.clear()
            until(lambda: self._asking == 0, "every request to end", deadline_s=60)

    def wait_ended(self, count: int) -> None:
        """Wait until so many more requests have ended whole."""
        wanted = self.counts["whole"] + count
        until(lambda: self.counts["whole"] >= wanted, f"{count} more answers", deadline_s=60)

    def close(self) -> None:
        self._is_over.set()
        self._may_ask.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        dice = random.Random(self._seed * 1_000 + number)
        while not self._is_over.is_set():
            self._may_ask.wait()
            with self._lock:
                if not self._may_ask.is_set():
                    continue
                self._asking += 1
            try:
                outcome = self._ask(dice)
            except Exception as error:
                outcome = Outcome("wrong", repr(error))
            with self._lock:
                self._asking -= 1
                self.counts[outcome.kind] += 1
                if outcome.kind == "wrong" and len(self.wrong) < 20:
                    self.wrong.append(outcome.text)

    def _ask(self, dice: random.Random) -> Outcome:
        family = dice.randrange(FAMILIES)
        body = {
            "model": MODEL,
            "prompt": tokens_of(family, dice.randint(2, 12), dice.randrange(6)),
            "max_tokens": dice.choice([1, 8, 40]),
            "stream": dice.random() < 0.5,
        }
        members = self._cluster.members
        while not self._is_over.is_set():
            member = members[next(self._turn) % len(members)]
            if not member.is_open:
                # A load balancer's view: it is starting.
                self._is_over.wait(0.01)
                continue
            lives, kills = member.lives, self._cluster.worker_kills
            try:
                answer = ask(member.url, COMPLETIONS, body)
            except ConnectionRefusedError:
                self.counts["refused"] += 1
                self._is_over.wait(0.01)
                continue
            except (OSError, http.client.HTTPException) as error:
                is_killed = member.is_dead or member.lives != lives
                return Outcome("router lost" if is_killed else "wrong", repr(error))
            outcome = judged(answer, is_stream=bool(body["stream"]))
            if outcome.kind == "worker lost" and self._cluster.worker_kills == kills:
                return Outcome("wrong", f"no worker was killed: {outcome.text}")
            return outcome
        return Outcome("given up")


def tokens_of(family: int, blocks: int, ending: int) -> list[int]:
    """A prompt: the beginning is its family's, the last block is one of a few."""
    start = 1_000 + family * 700
    return [*range(start, start + (blocks - 1) * BLOCK), *([20_000 + ending] * (BLOCK + 1))]


def judged(answer: Answer, *, is_stream: bool) -> Outcome:
    """The complete answer."""
    text = answer.body.decode(errors="replace")
    if answer.status == 502 or (answer.status == 200 and is_stream and '"error"' in text):
        # Its worker was killed after the first token; the client gets an error.
        return Outcome("worker lost", text[-300:])
    if answer.status != 200:
        return Outcome("wrong", f"{answer.status} {text[:300]}")
    if is_stream:
        is_whole = text.endswith("data: [DONE]\n\n")
    else:
        is_whole = bool(json.loads(text)["choices"][0]["finish_reason"])
    return Outcome("whole") if is_whole else Outcome("wrong", f"cut: {text[-300:]}")


class ChaosCluster:
    """NATS, etcd, two frontends, workers; everything can be killed and comes back."""

    def __init__(self, folder: Path) -> None:
        self.open = contextlib.ExitStack()
        self.worker_kills = 0
        try:
            for name in ("nats", "etcd"):
                (folder / name).mkdir()
            self.nats = NatsServer(folder / "nats")
            self.open.callback(self.nats.close)
            self.etcd = EtcdServer(folder / "etcd")
            self.open.callback(self.etcd.close)
            env = {
                "KVFLASH_DISCOVERY": "etcd",
                "ETCD_ENDPOINTS": self.etcd.url,
                "NATS_SERVER": self.nats.url,
            }
            self._cluster = self.open.enter_context(Cluster(env))
            self.workers = [self._new_workers() for _ in range(WORKERS)]
            self.members: list[Member] = []
            for _ in range(2):
                self.members.append(self._new_member())
        except BaseException:
            self.open.close()
            raise

    def _new_workers(self) -> Workers:
        flags = ("--event-plane", "nats", "--num-gpu-blocks", str(CACHE_BLOCKS))
        return self._cluster.workers(*flags, count=1)

    def _new_member(self) -> Member:
        member = self.open.enter_context(Member(self._cluster.env))
        self.wait_known(member)
        member.is_open = True
        return member

    @property
    def ids(self) -> set[int]:
        return {workers.ids[0] for workers in self.workers}

    def wait_known(self, member: Member) -> None:
        """A frontend knows exactly the workers that are there, and they serve."""

        def is_right() -> bool:
            workers = member.workers()
            return set(workers) == self.ids and all(one["healthy"] for one in workers.values())

        try:
            until(is_right, "the workers that are there", deadline_s=60)
        except AssertionError as error:
            said = "".join(member.process.errors[-40:])
            raise AssertionError(f"{error}: {self.ids}; {member.workers()}\n{said}") from None

    # -- one after the other

    def kill_nats(self, meanwhile: Callable[[], None]) -> None:
        self.nats.kill()
        meanwhile()
        self.nats.start()

    def kill_etcd(self, meanwhile: Callable[[], None]) -> None:
        self.etcd.kill()
        meanwhile()
        self.etcd.start()

    def kill_frontend(self, meanwhile: Callable[[], None], at: int) -> None:
        member = self.members[at]
        member.kill()
        meanwhile()
        member.is_open = False
        member.begin()
        self.wait_known(member)
        member.is_open = True

    def kill_worker(self, meanwhile: Callable[[], None], at: int) -> None:
        self.worker_kills += 1
        self.workers[at].process.kill()
        meanwhile()
        self.workers[at] = self._new_workers()

    def wait_equal(self) -> float:
        """Wait until all frontends hold what a new one finds; returns seconds to their last change.

        Call it without running requests: the time starts when all know the workers.
        """
        for member in self.members:
            self.wait_known(member)
        since = changed = time.monotonic()
        held: list[Digests] = []
        with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as ends:

            def begin() -> Member:
                fresh = ends.enter_context(Member(self._cluster.env))
                self.wait_known(fresh)
                return fresh

            starting = pool.submit(begin)

            def are_equal() -> bool:
                nonlocal held, changed
                now = [member.digests() for member in self.members]
                if now != held:
                    held, changed = now, time.monotonic()
                if not starting.done():
                    return False
                fresh = starting.result().digests()
                is_equal = all(one == fresh for one in held)
                if time.monotonic() - since > 30 and not is_equal:
                    raise AssertionError(f"a new frontend holds {fresh}, the others {held}")
                return is_equal

            until(are_equal, "a new frontend to hold what the others hold", deadline_s=90)
        assert {one[0] for one in held[0]} <= self.ids, "somebody who is gone is credited"
        assert held[0], "nobody holds anything"
        return changed - since

    def wait_idle(self) -> None:
        """No frontend books any load, its own or the other's."""
        for member in self.members:
            member.wait_idle()

    def close(self) -> None:
        self.open.close()
