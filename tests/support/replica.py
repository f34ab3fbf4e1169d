"""Replicas of the indexer as processes, and what loses frames on the way to them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import zmq

from service import Http, Process, listener, until


class LossyProxy:
    """Carries an engine's frames on and loses some of them; its losses are the seed's.

    Attributes:
        share: Of the frames, those that are lost from now on.
        carried, lost: Frames so far.
        newest_seen, newest_carried: Sequence numbers of the last frames; None before the first.
    """

    def __init__(self, endpoint: str, seed: int, share: float) -> None:
        self.share = share
        self.carried = self.lost = 0
        self.newest_seen: int | None = None
        self.newest_carried: int | None = None
        self._rng = random.Random(seed)
        self._context: zmq.Context[Any] = zmq.Context()
        self._in = self._context.socket(zmq.SUB)
        self._in.setsockopt(zmq.SUBSCRIBE, b"")
        self._in.setsockopt(zmq.RECONNECT_IVL, 20)
        self._in.connect(endpoint)
        self._out = self._context.socket(zmq.PUB)
        self._out.setsockopt(zmq.LINGER, 0)
        port = self._out.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._in.poll(20):
                continue
            parts = self._in.recv_multipart()
            number = int.from_bytes(parts[-2], "big")
            if self._rng.random() < self.share:
                self.lost += 1
            else:
                self._out.send_multipart(parts)
                self.carried += 1
                self.newest_carried = number
            # Last: who sees this number sees what became of the frame.
            self.newest_seen = number

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._in.close(0)
        self._out.close(0)
        self._context.term()


class Replica:
    """``python -m kvflash.indexer``, ready and connected to its workers."""

    def __init__(
        self,
        run: Callable[..., Process],
        workers: Sequence[dict[str, Any]],
        peers: Iterable[str] = (),
    ) -> None:
        flags = ["--host", "127.0.0.1", "--port", "0", "--threads", "2"]
        if peers:
            flags += ["--peers", ",".join(peers)]
        self.process = run("kvflash.indexer", *flags)
        self.url = self.process.ready()["url"]
        self.http = Http(self.url)
        for worker in workers:
            self.http.post("/register", worker, expect=201)
        until(lambda: self.http.call("GET", "/ready")[0] == 200, "readiness")
        for worker in workers:
            until(lambda worker=worker: self.is_connected(worker["instance_id"]), "a connection")

    def is_connected(self, instance: int) -> bool:
        return bool(listener(self.http, instance)["status"] == "active")

    def kill(self) -> None:
        self.http.close()
        self.process.kill()
