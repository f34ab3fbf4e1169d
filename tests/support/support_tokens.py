"""Runtime workers controlled by a test, and a frontend that gets them directly."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import msgpack

from service import DEADLINE_S, until
from support_frontend import Frontend
from tiny_llama import TINY_LLAMA, TOKENIZER

REQUEST, DATA, END, ERROR, PING, PONG = 1, 2, 3, 4, 5, 6


class EmbeddedFrontend(Frontend):
    """A frontend that a test tells of workers as discovery does."""

    def put(self, worker: FakeWorker, **card: Any) -> int:
        """Tell of a worker."""
        return self.core.put_worker(json.dumps(worker.spec(**card)))

    def outcomes(self) -> dict[str, float]:
        """How answers of runtime workers ended so far."""
        name = 'kvflash_answers_total{outcome="'
        found = {k: v for k, v in self.metrics().items() if k.startswith(name)}
        return {k[len(name) : -2]: v for k, v in found.items()}


# -- workers


def frame(kind: int, value: Any = None) -> bytes:
    payload = b"" if value is None else msgpack.packb(value)
    return struct.pack(">IB", len(payload) + 1, kind) + payload


@dataclass
class Ask:
    """A request as a fake worker got it, and the connection to answer on."""

    head: dict[str, Any]
    connection: socket.socket
    is_gone: threading.Event = field(default_factory=threading.Event)

    @property
    def payload(self) -> dict[str, Any]:
        return dict(self.head["payload"])

    def send(self, data: bytes) -> None:
        self.connection.sendall(data)

    def item(self, *token_ids: int, finish: str | None = None, **more: Any) -> None:
        self.send(frame(DATA, {"token_ids": token_ids, "finish_reason": finish, **more}))

    def end(self) -> bool:
        self.send(frame(END))
        return True

    def error(self, code: str, message: str) -> bool:
        self.send(frame(ERROR, {"code": code, "message": message, "retry": False}))
        return True

    def wait_gone(self) -> None:
        """Until the frontend closes the connection."""
        self.connection.settimeout(DEADLINE_S)
        with contextlib.suppress(ConnectionResetError):
            while self.connection.recv(65_536):
                pass
        self.is_gone.set()


Answer = Callable[[Ask], bool | None]


def say(text: str, at_once: int = 1, finish: str | None = "stop", **last: Any) -> Answer:
    """Answer with a text, some tokens an item."""
    ids = TOKENIZER.encode(text, add_special_tokens=False)

    def answer(ask: Ask) -> bool:
        for start in range(0, len(ids), at_once):
            is_last = start + at_once >= len(ids)
            more = last if is_last else {}
            ask.item(*ids[start : start + at_once], finish=finish if is_last else None, **more)
        return ask.end()

    return answer


def refuse(code: str, message: str = "because") -> Answer:
    return lambda ask: ask.error(code, message)


def hang(ask: Ask) -> None:
    ask.wait_gone()


def die(ask: Ask) -> None:
    """Close without an item."""


def two_items_then(then: Answer) -> Answer:
    def answer(ask: Ask) -> bool | None:
        first, second = TOKENIZER.encode("one two", add_special_tokens=False)[:2]
        ask.item(first)
        ask.item(second)
        return then(ask)

    return answer


class FakeWorker:
    """A worker in a thread, one connection after the other or side by side."""

    def __init__(
        self,
        worker_id: int,
        answer: Answer = say("hello"),  # noqa: B008
        *,
        model: str = "m",
        model_type: Sequence[str] = ("chat", "completions"),
        answers_pings: bool = True,
        **card: Any,
    ) -> None:
        self.id = worker_id
        self.answer = answer
        self.answers_pings = answers_pings
        self.card = {
            "model_name": model,
            "model_input": "tokens",
            "model_type": list(model_type),
            "kv_cache_block_size": 16,
            "context_length": 4096,
            "tokenizer": str(TINY_LLAMA),
            "dp_size": 1,
            **card,
        }
        self.received: list[Ask] = []
        self.connections = 0
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def spec(self, **card: Any) -> dict[str, Any]:
        events = card.pop("events", {})
        return {
            "id": self.id,
            "plane": {"kind": "tcp", "address": self.address},
            "endpoint": "ns/backend/generate",
            "card": {**self.card, **card},
            "events": events,
        }

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                self._open.add(connection)
                thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            reader = connection.makefile("rb")
            while head := reader.read(5):
                size, kind = struct.unpack(">IB", head)
                payload = reader.read(size - 1)
                if kind == PING:
                    if self.answers_pings:
                        connection.sendall(frame(PONG))
                    continue
                assert kind == REQUEST, kind
                ask = Ask(msgpack.unpackb(payload), connection)
                self.received.append(ask)
                try:
                    if not self.answer(ask):
                        break
                except OSError:
                    ask.is_gone.set()
                    raise
        self._open.discard(connection)

    def close(self) -> None:
        """End as a killed process does."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@contextlib.contextmanager
def workers(frontend: EmbeddedFrontend, *fakes: FakeWorker) -> Iterator[None]:
    """Tell of fake workers for a while; afterwards nothing is booked any more."""
    with contextlib.ExitStack() as stack:
        for fake in fakes:
            stack.enter_context(fake)
            frontend.put(fake)
            stack.callback(frontend.core.remove_worker, fake.id)
        yield
        frontend.wait_idle()


def wait_for(frontend: EmbeddedFrontend, outcome: str, count: float) -> None:
    until(lambda: frontend.outcomes().get(outcome, 0) == count, f"{count} answers {outcome}")
