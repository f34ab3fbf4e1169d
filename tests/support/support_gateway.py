"""Every entrance of routing behind one face: ask, and see what became of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from kvflash import (
    AllBusyError,
    DistributedRuntime,
    InvalidArgumentError,
    KvPushRouter,
    KvRouterConfig,
    NotFoundError,
    NoWorkerError,
    OverloadedError,
    TransportError,
    WorkerError,
)
from kvflash.discovery import FileDiscovery
from kvflash.errors import KvflashError
from kvflash.router import RouterService, parse_args
from service import DEADLINE_S, Http, until
from support_frontend import COMPLETIONS, Call
from support_push_router import eventually
from support_tokens import (
    Answer,
    EmbeddedFrontend,
    FakeWorker,
    die,
    refuse,
    say,
    two_items_then,
)

T = TypeVar("T")

BLOCK = 16
NAMESPACE, ENDPOINT = "ns", "ns.backend.generate"
PATH = ENDPOINT.replace(".", "/")
# Routing itself is the knowledge of caches, so that all entrances learn it alike.
KNOWLEDGE = {"use_kv_events": False, "router_predicted_ttl_secs": 600.0}
# The first that fits.
STATUSES: list[tuple[type[KvflashError], int]] = [
    (AllBusyError, 503),
    (OverloadedError, 429),
    (NoWorkerError, 503),
    (NotFoundError, 404),
    (InvalidArgumentError, 400),
    (TransportError, 502),
    (WorkerError, 502),
]
MANNERS: dict[str, Answer] = {
    "answers": say("hello"),
    "refuses": refuse("overloaded"),
    "calls_wrong": refuse("invalid"),
    "closes": die,
    "breaks": two_items_then(die),
}


@dataclass(frozen=True)
class Outcome:
    """The client's view: workers are counted from 0."""

    status: int
    end: str
    worker: int | None = None
    overlap: int | None = None


@dataclass(frozen=True)
class Request:
    """A prompt and what is wished for it."""

    tokens: list[int]
    pin: int | None = None
    salt: str | None = None

    def fields(self, pin: str) -> dict[str, Any]:
        """As the router and its clients take it; ``pin`` names that field."""
        named = {pin: self.pin, "cache_salt": self.salt}
        return {"token_ids": self.tokens, **{k: v for k, v in named.items() if v is not None}}


class Entrance(Protocol):
    """A way in. A client waits in a thread of its own."""

    def ask(self, request: Request) -> Outcome:
        """Send a request and read its answer to the end."""

    def is_idle(self) -> bool:
        """Whether nothing is booked."""

    def close(self) -> None:
        """End it."""


class Workers:
    """Workers of the request plane that hold their answers back where a test says so."""

    def __init__(self, count: int) -> None:
        self.fakes = [FakeWorker(n + 1, MANNERS["answers"]) for n in range(count)]
        self.gate = threading.Event()

    def held(self, answer: Answer) -> Answer:
        def wait(ask: Any) -> bool | None:
            self.gate.wait(DEADLINE_S)
            return answer(ask)

        return wait

    def close(self) -> None:
        self.gate.set()
        for fake in self.fakes:
            fake.close()


class OpenAi:
    """The OpenAI frontend over HTTP."""

    def __init__(self, workers: Workers, settings: dict[str, Any], _folder: Path) -> None:
        self.frontend = EmbeddedFrontend(*flags(settings))
        for fake in workers.fakes:
            self.frontend.put(fake)

    def ask(self, request: Request) -> Outcome:
        body = {"model": "m", "prompt": request.tokens, "stream": True}
        if request.pin is not None:
            body["nvext"] = {"backend_instance_id": request.pin}
        if request.salt is not None:
            body["cache_salt"] = request.salt
        answer = Call(self.frontend.url, COMPLETIONS, body).finish()
        if answer.status != 200:
            return Outcome(answer.status, "refused")
        end = "broken" if any("error" in event for event in answer.events) else "complete"
        return Outcome(200, end, answer.worker - 1, answer.overlap_blocks)

    def is_idle(self) -> bool:
        name = "kvflash_worker_active_requests"
        return not any(v for k, v in self.frontend.metrics().items() if k.startswith(name))

    def close(self) -> None:
        self.frontend.__exit__(None, None, None)


class Decision:
    """The decision service: its client sends the request itself; here it goes nowhere."""

    def __init__(self, workers: Workers, settings: dict[str, Any], _folder: Path) -> None:
        local = ("--host", "127.0.0.1", "--port", "0", "--seed", "1")
        self.router = RouterService(parse_args([*local, *flags(settings)])).start()
        self._workers = workers
        self._count = 0
        self._lock = threading.Lock()
        with contextlib.closing(Http(self.router.url)) as http:
            for fake in workers.fakes:
                fields = {"model_name": "m", "block_size": BLOCK, "url": fake.address}
                http.post("/workers", {"worker_id": fake.id, **fields}, expect=201)

    def ask(self, request: Request) -> Outcome:
        with self._lock:
            self._count += 1
            name = f"r{self._count}"
        with contextlib.closing(Http(self.router.url)) as http:
            body = {"model_name": "m", "request_id": name, **request.fields("worker_id")}
            status, answer, _ = http.call("POST", "/reserve", body)
            if status != 200:
                return Outcome(status, "refused")
            fake = self._workers.fakes[answer["worker_id"] - 1]
            fake.received.append(None)  # type: ignore[arg-type]
            if fake.answer not in MANNERS.values():
                self._workers.gate.wait(DEADLINE_S)
            http.post("/prefill_complete", {"request_id": name})
            http.post("/free", {"request_id": name})
        return Outcome(200, "complete", answer["worker_id"] - 1, answer["overlap_blocks"])

    def is_idle(self) -> bool:
        ranks = (rank for one in self.router.call("GET", "/workers") for rank in one["ranks"])
        return not any(rank["active_requests"] for rank in ranks)

    def close(self) -> None:
        self.router.stop()


class Loop:
    """An event loop in a thread, and workers that it announces."""

    def __init__(self, workers: Workers, folder: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.discovery = self.do(self._announce(workers, folder))

    async def _announce(self, workers: Workers, folder: Path) -> FileDiscovery:
        discovery = FileDiscovery(folder)
        lease = await discovery.lease()
        for fake in workers.fakes:
            transport = {"kind": "tcp", "address": fake.address}
            instance = {"instance_id": fake.id, "transport": transport}
            for kind, value in (("models", fake.card), ("instances", instance)):
                key = f"v1/{kind}/{PATH}/{fake.id}"
                await discovery.put(key, json.dumps(value).encode(), lease)
        return discovery

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(2 * DEADLINE_S)

    def close(self) -> None:
        self.do(self.discovery.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def outcome_of(begin: Callable[[], Coroutine[Any, Any, Any]]) -> tuple[int, str, Any]:
    """Status and end of a stream of items, and the stream."""
    items, stream = 0, None
    try:
        stream = await begin()
        async for _ in stream:
            items += 1
    except KvflashError as error:
        if items:
            return 200, "broken", stream
        return next(code for kind, code in STATUSES if isinstance(error, kind)), "refused", stream
    return 200, "complete", stream


class Plane:
    """The router on the request plane."""

    def __init__(self, workers: Workers, settings: dict[str, Any], folder: Path) -> None:
        self._loop = Loop(workers, folder)
        self._workers = workers
        local = ("--host", "127.0.0.1", "--port", "0", "--seed", "1", "--endpoint", ENDPOINT)
        more = ("--kv-cache-block-size", str(BLOCK))
        self.router = RouterService(parse_args([*local, *more, *flags(settings)])).start()
        until(lambda: len(self.router.call("GET", "/workers")) == len(workers.fakes), "workers")
        self._runtime, self._client = self._loop.do(self._connect())

    async def _connect(self) -> tuple[DistributedRuntime, Any]:
        runtime = DistributedRuntime.detached()
        client = await runtime.endpoint(f"{NAMESPACE}.router.generate").client()
        await client.wait_for_instances(DEADLINE_S)
        return runtime, client

    def ask(self, request: Request) -> Outcome:
        fields = request.fields("worker_id")

        async def begin() -> Any:
            return await self._client.random({"model": "m", **fields})

        status, end, _ = self._loop.do(outcome_of(begin))
        if status != 200:
            return Outcome(status, end)
        # Items do not name their request: it is the last one with the prompt.
        refused = (MANNERS["closes"], MANNERS["refuses"])
        for at, fake in enumerate(self._workers.fakes):
            payloads = [one.payload for one in fake.received if fake.answer not in refused]
            for payload in payloads:
                if payload["token_ids"] == request.tokens:
                    return Outcome(status, end, at, payload["estimated_prefix_hit_num_blocks"])
        return Outcome(status, end)

    def is_idle(self) -> bool:
        ranks = (rank for one in self.router.call("GET", "/workers") for rank in one["ranks"])
        return not any(rank["active_requests"] for rank in ranks)

    def close(self) -> None:
        self._loop.do(self._runtime.close())
        self.router.stop()
        self._loop.close()


class Push:
    """KvPushRouter in a process of the caller's."""

    def __init__(self, workers: Workers, settings: dict[str, Any], folder: Path) -> None:
        self._loop = Loop(workers, folder)
        self._workers = workers
        self._loop.do(self._open(settings))

    async def _open(self, settings: dict[str, Any]) -> None:
        self._runtime = DistributedRuntime(self._loop.discovery)
        config = KvRouterConfig(**settings)
        self.router = KvPushRouter(self._runtime.endpoint(ENDPOINT), BLOCK, config)

        async def are_known() -> bool:
            loads = await self.router.get_potential_loads([1])
            return len(loads) == len(self._workers.fakes)

        await eventually(are_known, "the workers")

    def ask(self, request: Request) -> Outcome:
        async def begin() -> Any:
            return await self.router.generate(model="m", **request.fields("worker_id"))

        status, end, stream = self._loop.do(outcome_of(begin))
        if status != 200:
            return Outcome(status, end)
        return Outcome(status, end, stream.worker_id - 1, stream.overlap_blocks)

    def is_idle(self) -> bool:
        return self.router.totals()["requests"] == 0

    def close(self) -> None:
        self._loop.do(self.router.aclose())
        self._loop.do(self._runtime.close())
        self._loop.close()


ENTRANCES: dict[str, Callable[[Workers, dict[str, Any], Path], Entrance]] = {
    "openai": OpenAi,
    "decision": Decision,
    "plane": Plane,
    "push": Push,
}


def flags(settings: dict[str, Any]) -> Iterator[str]:
    """Settings as a command line's."""
    for name, value in settings.items():
        if name == "use_kv_events":
            assert value is False
            yield "--no-kv-events"
            continue
        yield f"--{name.replace('_', '-')}"
        yield str(value)
