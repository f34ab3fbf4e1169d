"""Real processes and engines for tests: on free ports, awaited, ended in finally."""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgpack
import pytest
import zmq

from forks import Forked, Forks, read_at_start
from kvflash import compute_sequence_hashes
from kvflash._core import Indexer
from kvflash.indexer.args import IndexerArgs
from kvflash.process import FedService
from kvflash.transport import zmq as zmq_transport
from kvflash.transport import zmq_socket

T = TypeVar("T")

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
VECTORS = ROOT / "tests" / "vectors"
DEADLINE_S = 30.0
# Services close connections that were idle for 10 s, and may do so while a request is on its way.
IDLE_S_MAX = 4.0


def pause_s(waited_s: float) -> float:
    """Until a test asks again: rarely for what takes long, as both sides pay for an answer."""
    return min(max(0.01, waited_s / 10), 0.05)


def until(check: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
    """Ask until the answer is true; fails with what was waited for and the last answer."""
    begin = time.monotonic()
    pause = threading.Event()
    while True:
        answer = check()
        if answer:
            return answer
        waited_s = time.monotonic() - begin
        if waited_s > deadline_s:
            raise AssertionError(f"waited {deadline_s:g} s for {what}; last answer: {answer!r}")
        pause.wait(pause_s(waited_s))


def rss(process_id: int) -> int:
    """Resident memory of a process, bytes."""
    status = Path(f"/proc/{process_id}/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def has_ipv6() -> bool:
    """Whether this machine has an IPv6 loopback."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")


class Http:
    """A JSON client over one connection, kept while it is in use."""

    def __init__(self, url: str, *, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        host, self.url = parts.hostname or "", url
        self._connection = (
            http.client.HTTPConnection(host, parts.port, timeout=60)
            if tls is None
            else http.client.HTTPSConnection(host, parts.port, timeout=60, context=tls)
        )
        self._used = time.monotonic()

    def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        if time.monotonic() - self._used > IDLE_S_MAX:
            self._connection.close()
        try:
            kind = {} if body is None else {"content-type": "application/json"}
            self._connection.request(method, path, data, {**kind, **(headers or {})})
            response = self._connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException):
            self._connection.close()
            raise
        finally:
            self._used = time.monotonic()
        kind = response.headers.get("content-type", "")
        parsed = json.loads(text) if kind.startswith("application/json") and text else text
        return response.status, parsed, {k.lower(): v for k, v in response.headers.items()}

    def get(self, path: str) -> Any:
        status, body, _ = self.call("GET", path)
        assert status == 200, (path, status, body)
        return body

    def post(self, path: str, body: Any, expect: int = 200) -> Any:
        status, answer, _ = self.call("POST", path, body)
        assert status == expect, (path, status, answer)
        return answer

    def close(self) -> None:
        self._connection.close()


# A process of a test trusts nobody by default: reading the system's authorities takes 40 ms.
NO_AUTHORITIES = Path(__file__).with_name("no_authorities.pem")
_FORKS = Forks({**os.environ, "SSL_CERT_FILE": os.fspath(NO_AUTHORITIES)})
# Those of a library that is loaded before the system's: of a clock that many processes share.
_PRELOADED_FORKS: dict[frozenset[tuple[str, str]], Forks] = {}


def _forked(words: list[str], env: dict[str, str], *, takes_input: bool) -> Forked | None:
    forks = _FORKS
    if "LD_PRELOAD" in env and env["LD_PRELOAD"] != os.environ.get("LD_PRELOAD"):
        key = frozenset(read_at_start(env).items())
        forks = _PRELOADED_FORKS.setdefault(key, Forks(env))
    return forks.start(words, env, takes_input=takes_input)


class Process:
    """``python -m MODULE ARGS``, or a script by its path; its stdout read line by line."""

    def __init__(
        self,
        module: str,
        *args: str,
        env: dict[str, str] | None = None,
        takes_input: bool = False,
    ) -> None:
        env = {**os.environ, "SSL_CERT_FILE": os.fspath(NO_AUTHORITIES), **(env or {})}
        forked = _forked([module, *args], env, takes_input=takes_input)
        self.popen = forked or subprocess.Popen(
            [sys.executable, *([] if module.endswith(".py") else ["-m"]), module, *args],
            stdin=subprocess.PIPE if takes_input else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._read_output, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read_output(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self.popen.stderr is not None
        self.errors.extend(self.popen.stderr)

    def ready(self, event: str = "ready") -> dict[str, Any]:
        """The next line of this event."""
        end = time.monotonic() + DEADLINE_S
        while True:
            line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            if line is None:
                raise AssertionError("the process ended early: " + "".join(self.errors))
            if line.startswith("{") and json.loads(line).get("event") == event:
                return dict(json.loads(line))

    def read(self) -> Any:
        """Its next line, which is JSON; None if it ended instead."""
        line = self._lines.get(timeout=DEADLINE_S)
        return None if line is None else json.loads(line)

    def ask(self, what: str) -> Any:
        """Write a line to one that takes input, and read the answer."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(what + "\n")
        self.popen.stdin.flush()
        return self.read()

    def rest(self) -> list[str]:
        """What nobody has read of its output, once it has ended."""
        for reader in self._readers:
            reader.join()
        return list(iter(self._lines.get, None))

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def terminate(self, deadline_s: float = DEADLINE_S) -> int:
        """SIGTERM, and the exit status."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(deadline_s)

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            if stream is not None:
                stream.close()


def run_to_end(
    module: str, *args: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """``python -m MODULE ARGS``, or a script by its path: its status, and what it wrote."""
    process = Process(module, *args, env=env)
    try:
        status = process.popen.wait(DEADLINE_S)
        output = "".join(process.rest())
    finally:
        process.close()
    return subprocess.CompletedProcess([module, *args], status, output, "".join(process.errors))


# -- engines as the event transport sees them

STORED_FIELDS = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id")
# Messages that vLLM appended, in order.
STORED_EXTRAS = ("medium", "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind")
END_OF_REPLAY = b"\xff" * 8


def stored(
    hashes: Any,
    tokens: Any,
    parent: Any = None,
    *,
    block_size: int,
    named: bool = True,
    **extras: Any,
) -> Any:
    """A BlockStored event: a tagged map, or an array by position as older engines write."""
    values = (list(hashes), parent, list(tokens), block_size, extras.pop("lora_id", None))
    if named:
        return {"type": "BlockStored", **dict(zip(STORED_FIELDS, values, strict=True)), **extras}
    assert set(extras) <= set(STORED_EXTRAS), extras
    return ["BlockStored", *values, *(extras.get(name) for name in STORED_EXTRAS)]


def removed(hashes: Any, *, named: bool = True, medium: str | None = "GPU", **extras: Any) -> Any:
    """A BlockRemoved event."""
    if named:
        return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium, **extras}
    return ["BlockRemoved", list(hashes), medium, *extras.values()]


def cleared(*, named: bool = True) -> Any:
    """An AllBlocksCleared event."""
    return {"type": "AllBlocksCleared"} if named else ["AllBlocksCleared"]


def batch(*events: Any, dp_rank: int | None = None, ts: float = 1.0) -> bytes:
    """A message's payload."""
    packed: bytes = msgpack.packb([ts, list(events), dp_rank])
    return packed


class Engine:
    """An engine's PUB socket and the ROUTER that replays its ring, on ports that survive a restart.

    Attributes:
        asked: First sequence numbers of the requested replays.
        gate: Replays wait until it is set.
        answer: Returns a replay's messages from a sequence number on, without their envelope, or
            None for silence. The default is the ring's content and the end mark.
    """

    def __init__(
        self,
        *,
        replay: bool = True,
        topic_in_replay: bool = True,
        ring: int = 10_000,
        endpoint: str = "tcp://127.0.0.1:*",
        is_shared: bool = False,
    ) -> None:
        self._is_shared = is_shared
        host = "tcp://[::1]" if "://[::1]" in endpoint else "tcp://127.0.0.1"
        self._context: zmq.Context[Any] = zmq.Context()
        self._topic_in_replay = topic_in_replay
        self._ring_messages = ring
        self._has_replay = replay
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.endpoint, self.replay_endpoint = endpoint, f"{host}:*" if replay else None
        self.asked: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.answer: Callable[[int], list[list[bytes]] | None] = self.ring_from
        self.start()

    def start(self) -> None:
        """Bind, with an empty ring and the count at 0, as a new engine process."""
        self.sequence = 0
        self.ring: list[tuple[int, bytes]] = []
        self.pub = self._context.socket(zmq.XPUB)
        # Tell of every subscriber, not of the first one only.
        self.pub.setsockopt(zmq.XPUB_VERBOSE, self._is_shared)
        self.endpoint = self._bind(self.pub, self.endpoint)
        if self._has_replay:
            self.start_replay()

    def start_replay(self) -> None:
        router = self._context.socket(zmq.ROUTER)
        # A full queue drops silently: what an answer lacks is for a test to say.
        router.setsockopt(zmq.SNDHWM, 0)
        self.replay_endpoint = self._bind(router, self.replay_endpoint or "")
        self._stop.clear()
        self._thread = threading.Thread(target=self._serve, args=(router,), daemon=True)
        self._thread.start()

    def _bind(self, socket: zmq.Socket[Any], endpoint: str) -> str:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, int("://[" in endpoint))

        def bind() -> bool:
            # The predecessor's port is free a moment after its close.
            try:
                socket.bind(endpoint)
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE:
                    raise
                return False
            return True

        until(bind, f"{endpoint} to be free")
        return bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def stop(self) -> None:
        """Close the sockets, as the end of the process does."""
        self.stop_replay()
        self.pub.close(0)

    def stop_replay(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        self.gate.set()
        self.stop()
        self._context.term()

    def wait_for_subscriber(self, deadline_s: float = DEADLINE_S) -> None:
        assert self.pub.poll(deadline_s * 1000), "nobody subscribed"
        assert self.pub.recv() == b"\x01"

    def wait_for_departure(self) -> None:
        assert self.pub.poll(DEADLINE_S * 1000), "the subscriber stayed"
        assert self.pub.recv() == b"\x00"

    def publish(self, payload: bytes, *, is_sent: bool = True) -> int:
        """Keep a batch in the ring and send it, unless it is to be lost on the way."""
        sequence, self.sequence = self.sequence, self.sequence + 1
        self.ring = [*self.ring, (sequence, payload)][-self._ring_messages :]
        if is_sent:
            self.send(sequence, payload)
        return sequence

    def send(self, sequence: int, payload: bytes) -> None:
        self.pub.send_multipart([b"kv-events", sequence.to_bytes(8, "big"), payload])

    def ring_from(self, first: int) -> list[list[bytes]]:
        topic = [b"kv-events"] if self._topic_in_replay else []
        kept = [(number, payload) for number, payload in self.ring if number >= first]
        return [
            *([*topic, number.to_bytes(8, "big"), payload] for number, payload in kept),
            [*topic, END_OF_REPLAY, b""],
        ]

    def _serve(self, router: zmq.Socket[Any]) -> None:
        try:
            while not self._stop.is_set():
                if not router.poll(10):
                    continue
                peer, empty, start = router.recv_multipart()
                assert empty == b""
                first = int.from_bytes(start, "big")
                self.asked.append(first)
                self.gate.wait()
                for message in self.answer(first) or []:
                    router.send_multipart([peer, b"", *message])
        finally:
            router.close(0)


class EmbeddedIndexer:
    """The indexer and its transport in this process, which is quick to connect again.

    ``replay_timeout_s`` holds for all publishers until its end.
    """

    def __init__(
        self,
        *,
        replay_timeout_s: float = 5.0,
        is_native: bool = True,
        workers: Iterable[dict[str, Any]] = (),
        **settings: Any,
    ) -> None:
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(zmq_socket, "_RECONNECT_MS_MAX", 200)
        self._patch.setattr(zmq_transport, "_REFUSED_S", 0.2)
        self._patch.setattr(zmq_transport, "_REPLAY_TIMEOUT_S", replay_timeout_s)
        indexer = Indexer(threads=2, drain_timeout_s=0.5, **settings)
        for worker in workers:
            indexer.register(**worker)
        self.catalog = indexer.catalog
        with pytest.MonkeyPatch.context() as patch:
            if not is_native:
                patch.setattr(zmq_transport, "find_drain", lambda: None)
            self.receiver = zmq_transport.ZmqReceiver(indexer.catalog)
        self.receiver.start()
        self._service = FedService(indexer, IndexerArgs(host="127.0.0.1", port=0))
        self._service._feed._receivers[""] = self.receiver
        self._service.start()
        self.http = Http(self._service.url)

    def close(self) -> None:
        self.http.close()
        self._service.stop()
        self._patch.undo()


def listener(http: Http, instance: int, rank: int = 0) -> dict[str, Any]:
    """A publisher's entry of GET /workers."""
    workers = {worker["instance_id"]: worker for worker in http.get("/workers")}
    return dict(workers[instance]["listeners"][str(rank)])


def wait_for_sequence(http: Http, instance: int, sequence: int, rank: int = 0) -> dict[str, Any]:
    """Wait until a publisher's batches up to this one are applied; its entry of GET /workers."""

    def check() -> dict[str, Any] | None:
        entry = listener(http, instance, rank)
        return entry if entry["last_sequence"] == sequence else None

    return until(check, f"sequence {sequence} of {instance}:{rank}")  # type: ignore[return-value]


def dumped_blocks(http: Http, model: str = "m:default") -> set[tuple[int, int, str, int, int]]:
    """Held blocks by GET /dump: (instance, rank, tier, name, sequence hash)."""
    return played(http.get("/dump")[model]["events"])


def played(events: Iterable[dict[str, Any]]) -> set[tuple[int, int, str, int, int]]:
    """Held blocks after these router events: (instance, rank, tier, name, sequence hash)."""
    copies: Counter[tuple[int, int, str, int, int]] = Counter()
    places: dict[tuple[int, int, int], int] = {}
    for event in events:
        worker = (event["worker_id"], event["event"]["dp_rank"])
        tier = event.get("storage_tier", "device")
        data = event["event"]["data"]
        if "removed" in data:
            for name in data["removed"]["block_hashes"]:
                fact = (*worker, tier, name, places[(*worker, name)])
                assert copies[fact] > 0, f"{fact} is removed and not held"
                copies[fact] -= 1
            continue
        stored = data["stored"]
        parent = None if stored["parent_hash"] is None else places[(*worker, stored["parent_hash"])]
        for block in stored["blocks"]:
            chain = [block["tokens_hash"]] if parent is None else [parent, block["tokens_hash"]]
            name = block["block_hash"]
            parent = places[(*worker, name)] = compute_sequence_hashes(chain)[-1]
            copies[(*worker, tier, name, parent)] += 1
    return set(+copies)
