"""Real vLLM engines for opt-in tests, because an engine is more than a gigabyte.

``KVFLASH_VLLM_ENGINE`` names a program that starts one engine in the foreground:
``PROGRAM HTTP_PORT EVENTS_PORT REPLAY_PORT BLOCKS FOLDER``. It serves the model in FOLDER
(tests/vectors/tiny-llama or tiny-hermes) by the folder's name, with block size 32, prefix caching,
KV events, ``--enable-prompt-tokens-details``, ``--enable-scale-out``, and for tools
``--enable-auto-tool-choice --tool-call-parser hermes`` (docs/events.md has the command line); for
clients' structured output
``--structured-outputs-config '{"backend": "xgrammar", "disable_any_whitespace": true}'``, because
random weights would write spaces without end, and ``VLLM_ENABLE_RESPONSES_API_STORE=1``.
``VLLM_SERVER_DEV_MODE=1`` lets tests clear its cache.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from ports import free_ports
from service import VECTORS, Http, until

PROGRAM = os.environ.get("KVFLASH_VLLM_ENGINE")
MODEL = "tiny-llama"
BLOCK_SIZE = 32
BLOCKS = 160
WORDS = [chr(97 + i) + chr(97 + j) + chr(97 + (i * j) % 26) for i in range(26) for j in range(8)]
START_DEADLINE_S = 300

needs_engines = [
    pytest.mark.real_engine,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(PROGRAM is None, reason="KVFLASH_VLLM_ENGINE is not set"),
]


class VllmEngine:
    """One engine process, on ports that survive its restart."""

    def __init__(self, log: Path, model: str = MODEL) -> None:
        self.log, self.model = log, model
        self._ports = free_ports(3)
        http, events, replay = self._ports
        self.url = f"http://127.0.0.1:{http}"
        self.endpoint = f"tcp://127.0.0.1:{events}"
        self.replay_endpoint = f"tcp://127.0.0.1:{replay}"
        self.start()

    def start(self) -> None:
        assert PROGRAM is not None
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                [PROGRAM, *map(str, self._ports), str(BLOCKS), str(VECTORS / self.model)],
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def worker(self, url: str = "") -> str:
        """The value of --worker for it; behind a proxy at `url` if given."""
        events = f"events={self.endpoint},replay={self.replay_endpoint}"
        return f"{url or self.url},{events}"

    def wait_until_up(self) -> None:
        def is_up() -> bool:
            assert self._process.poll() is None, f"the engine ended, see {self.log}"
            try:
                return self.call("GET", "/health")[0] == 200
            except OSError:
                return False

        until(is_up, f"engine in {self.log}", START_DEADLINE_S)

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Over a connection of its own: the engine closes idle ones."""
        http = Http(self.url)
        try:
            return http.call(method, path, body)[:2]
        finally:
            http.close()

    def post(self, path: str, body: Any) -> Any:
        status, answer = self.call("POST", path, body)
        assert status == 200, (path, status, answer)
        return answer

    def clear(self) -> None:
        """Empty its prefix cache."""
        self.post("/reset_prefix_cache", None)
        # The engine publishes the clear with its next step.
        self.post("/v1/completions", {"model": self.model, "prompt": "reset", "max_tokens": 1})

    def newest_batch(self, context: zmq.Context[Any], known: int) -> int:
        """The last batch that it has published, -1 before the first; `known` is one of before.

        The engine queues a step's batch before the step's answer is sent, and one thread
        publishes from that queue, one batch between two answers to replays. Two equal ones mean
        that the queue was empty: the events of all answered requests are out.
        """
        dealer = context.socket(zmq.DEALER)
        try:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(self.replay_endpoint)

            def ask() -> int:
                dealer.send_multipart([b"", max(known, 0).to_bytes(8, "big")])
                newest = -1
                while True:
                    assert dealer.poll(30_000), "the engine answers no replay"
                    number, payload = dealer.recv_multipart()[-2:]
                    if not payload:
                        return newest
                    newest = int.from_bytes(number, "big")

            newest = ask()
            while (again := ask()) != newest:
                newest = again
            return newest
        finally:
            dealer.close()

    def kill(self) -> None:
        """SIGKILL to all its processes."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        if self._process.poll() is not None:
            return
        os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()


@contextlib.contextmanager
def vllm_engines(folder: Path, count: int = 2, model: str = MODEL) -> Iterator[list[VllmEngine]]:
    """Engines of one model that are up, until the end of the block."""
    engines: list[VllmEngine] = []
    try:
        engines.extend(VllmEngine(folder / f"{number}.log", model) for number in range(count))
        for engine in engines:
            engine.wait_until_up()
        yield engines
    finally:
        for engine in engines:
            engine.close()


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def conversations(
    seed: int, count: int = 12, turns: int = 4
) -> Iterator[tuple[int, list[dict[str, str]], str]]:
    """Interleaved turns of growing conversations: number, talk so far, next question."""
    rng = random.Random(seed)
    talks = [[{"role": "system", "content": words(rng, 70)}] for _ in range(count)]
    for _ in range(turns):
        order = list(range(count))
        rng.shuffle(order)
        for number in order:
            yield number, talks[number], words(rng, 12)
