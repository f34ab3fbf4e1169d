"""Frontends, mockers and engines that misbehave on purpose, for the frontend's tests."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import re
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from kvflash.frontend.app import make_frontend
from kvflash.frontend.args import parse_args
from kvflash.process import FedService
from service import DEADLINE_S, Http, Process, until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
DONE = b"data: [DONE]\n\n"


# -- frontends and mockers


class Client:
    """A client of a frontend's own API."""

    url: str
    http: Http

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 0

    def workers(self) -> dict[int, dict[str, Any]]:
        return {worker["id"]: worker for worker in self.http.get("/workers")}

    def wait_healthy(self, *ids: int) -> None:
        """The workers can take requests, and their events are subscribed to."""

        def are_ready() -> bool:
            workers = self.workers()
            return all(
                worker in workers
                and workers[worker]["healthy"]
                and all(one["status"] == "active" for one in workers[worker]["listeners"])
                for worker in ids
            )

        until(are_ready, f"workers {ids} to be healthy")

    def wait_unhealthy(self, worker: int) -> None:
        until(lambda: not self.workers()[worker]["healthy"], f"worker {worker} to be unhealthy")

    def add(self, url: str, **fields: Any) -> int:
        """POST /workers, and wait until the worker serves."""
        status, body, _ = self.http.call("POST", "/workers", {"url": url, **fields})
        assert status == 201, body
        self.wait_healthy(body["id"])
        return int(body["id"])

    def remove(self, worker: int) -> None:
        status, body, _ = self.http.call("DELETE", f"/workers/{worker}")
        assert (status, body) == (200, {"status": "ok", "id": worker})

    def metrics(self) -> dict[str, float]:
        return parse_metrics(self.http.get("/metrics").decode())

    def metric(self, name: str) -> float:
        return self.metrics().get(name, 0.0)

    def explain(self, body: dict[str, Any]) -> dict[str, Any]:
        return dict(self.http.post("/explain", body))

    def overlaps(self, body: dict[str, Any], kind: str = "device_blocks") -> dict[int, int]:
        """Leading blocks of a request's prompt that each worker holds."""
        return {
            int(one["worker"].partition(":")[0]): one[kind]
            for one in self.explain(body)["candidates"]
        }

    def wait_idle(self) -> None:
        """No load is booked and nothing is in flight."""

        def load() -> dict[str, float]:
            names = ("kvflash_worker_active_requests", "kvflash_requests_in_flight")
            return {k: v for k, v in self.metrics().items() if k.startswith(names) and v}

        until(lambda: not load(), "the load to be freed")


class Frontend(Client):
    """A frontend in this process: what a request meets, without what only a process has."""

    def __init__(self, *flags: str, host: str = "127.0.0.1") -> None:
        args = parse_args(["--host", host, "--seed", "7", "--discovery", "none", *flags])
        self.core, _ = make_frontend(args)
        self._service = FedService(self.core, dataclasses.replace(args, port=0))
        self._service.start()
        self.url = self._service.url
        self.http = Http(self.url)

    def __enter__(self) -> Frontend:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.http.close()
        self._service.stop()


class FrontendProcess(Client):
    """A frontend as a process: with a log, signals, an environment, discovery and brokers."""

    def __init__(self, *flags: str, env: dict[str, str] | None = None) -> None:
        common = ("--port", "0", "--host", "127.0.0.1", "--seed", "7", "--log-level", "error")
        if "--discovery" not in flags:
            common += ("--discovery", "none")
        self.process = Process("kvflash.frontend", *common, *flags, env=env)
        try:
            self.url = str(self.process.ready()["url"])
        except BaseException:
            self.process.close()
            raise
        self.http = Http(self.url)

    def __enter__(self) -> FrontendProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.http.close()
        self.process.close()


class Mocker:
    """A mocker process with one or more workers; it can be killed and started on its ports."""

    def __init__(self, *flags: str, workers: int = 1, replay: bool = True) -> None:
        self.flags = ("--log-level", "error", "--model-name", "m", "--block-size", "16", *flags)
        self.count = workers
        replay_flags = ("--zmq-replay-port", "auto") if replay else ()
        self._start("--port", "0", "--zmq-events-port", "auto", *replay_flags)

    def _start(self, *ports: str) -> None:
        count = ("--num-workers", str(self.count))
        self.process = Process("kvflash.mocker", *ports, *count, *self.flags)
        try:
            self.workers = [self.process.ready() for _ in range(self.count)]
        except BaseException:
            self.process.close()
            raise
        self.http = [Http(worker["url"]) for worker in self.workers]

    def restart(self) -> None:
        """Start again on the same ports; kill it first. Only for one worker."""
        self.close()
        worker = self.workers[0]
        ports = ["--port", str(urlsplit(worker["url"]).port)]
        for key, flag in (("events", "--zmq-events-port"), ("replay", "--zmq-replay-port")):
            if worker[key]:
                ports += [flag, str(urlsplit(worker[key]).port)]
        self._start(*ports)

    @property
    def url(self) -> str:
        return str(self.workers[0]["url"])

    def spec(self, index: int = 0, **more: Any) -> str:
        worker = self.workers[index]
        fields = {"events": worker["events"], "replay": worker["replay"], **more}
        return ",".join([worker["url"], *(f"{k}={v}" for k, v in fields.items() if v)])

    def metric(self, name: str, index: int = 0) -> float:
        text = self.http[index].get("/metrics").decode()
        (value,) = [v for k, v in parse_metrics(text).items() if k.startswith(name + "{")]
        return value

    def wait_metric(self, name: str, value: float, index: int = 0) -> None:
        until(lambda: self.metric(name, index) == value, f"{name} to be {value}")

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        for client in self.http:
            client.close()
        self.process.close()

    def __enter__(self) -> Mocker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def parse_metrics(text: str) -> dict[str, float]:
    samples = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


# -- clients


@dataclass
class Answer:
    """An answer that was read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def worker(self) -> int:
        """Instance id of the worker that answered."""
        return int(re.split(r"[^0-9]", self.headers["x-kvflash-worker"])[0])

    @property
    def overlap_blocks(self) -> int:
        return int(self.headers["x-kvflash-overlap-blocks"])

    @property
    def events(self) -> list[Any]:
        """The data of a stream that ended with [DONE]."""
        assert self.headers["content-type"].startswith("text/event-stream"), self
        assert self.body.endswith(DONE), self.body[-300:]
        lines = [line for line in self.body.split(b"\n") if line]
        assert all(line.startswith(b"data: ") for line in lines), self.body
        return [json.loads(line[6:]) for line in lines[:-1]]

    @property
    def usage(self) -> dict[str, Any]:
        is_stream = self.headers["content-type"].startswith("text/event-stream")
        return dict((self.events[-1] if is_stream else self.json)["usage"])

    @property
    def cached_tokens(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


class Call:
    """One request on a connection of its own, its answer read in steps."""

    def __init__(
        self, url: str, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(
            parts.hostname or "", parts.port, timeout=DEADLINE_S
        )
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._response: http.client.HTTPResponse | None = None
        try:
            self._connection.request(
                "POST", path, data, {"Content-Type": "application/json", **(headers or {})}
            )
        except BaseException:
            self._connection.close()
            raise

    @property
    def response(self) -> http.client.HTTPResponse:
        """The answer's head; waits for it."""
        if self._response is None:
            self._response = self._connection.getresponse()
        return self._response

    def read_event(self) -> bytes:
        """The next event of a stream."""
        lines = iter(self.response.readline, b"\n")
        return b"".join(lines)

    def finish(self) -> Answer:
        """Read the rest; raises what http.client raises for a body cut short."""
        try:
            body = self.response.read()
            headers = {name.lower(): value for name, value in self.response.getheaders()}
            return Answer(self.response.status, headers, body)
        finally:
            self.hang_up()

    def hang_up(self) -> None:
        """Leave, whatever is still to come."""
        if self._response is not None:
            self._response.close()
        self._connection.close()


def ask(url: str, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
    """One request, one whole answer."""
    return Call(url, path, body, headers).finish()


class Raw:
    """A TCP connection for bytes that no decent client would send."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address, timeout=DEADLINE_S)

    def __enter__(self) -> Raw:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read_answer(self) -> tuple[int, dict[str, str], bytes]:
        """Read one answer with a content-length."""
        data = b""
        while b"\r\n\r\n" not in data:
            chunk = self.socket.recv(65_536)
            assert chunk, f"closed within the head: {data!r}"
            data += chunk
        head, _, body = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        while len(body) < int(headers.get("content-length", 0)):
            chunk = self.socket.recv(65_536)
            assert chunk, "closed within the body"
            body += chunk
        return int(first.split()[1]), headers, body

    def read_to_end(self) -> bytes:
        """Everything until the other side closes."""
        parts = []
        with contextlib.suppress(ConnectionResetError):
            while chunk := self.socket.recv(65_536):
                parts.append(chunk)
        return b"".join(parts)


# -- engines that misbehave


@dataclass
class Exchange:
    """A request as a fake engine got it, and the connection to answer on."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    connection: socket.socket

    def header(self, name: str) -> str | None:
        values = [value for key, value in self.headers if key == name]
        assert len(values) <= 1, values
        return values[0] if values else None

    def send(self, data: bytes) -> None:
        self.connection.sendall(data)

    def whole(self, status: int, body: Any, *headers: str) -> bool:
        """Answer with a JSON body and keep the connection."""
        data = json.dumps(body).encode()
        lines = [
            f"HTTP/1.1 {status} X",
            "Content-Type: application/json",
            f"Content-Length: {len(data)}",
            *headers,
        ]
        self.send("\r\n".join([*lines, "", ""]).encode() + data)
        return True

    def open_stream(self) -> None:
        """The head of a chunked event stream."""
        self.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )

    def chunk(self, data: bytes) -> None:
        """A chunk of it; an empty one ends it."""
        self.send(b"%x\r\n%b\r\n" % (len(data), data))

    def wait_gone(self) -> None:
        """Until the other side closes the connection."""
        with contextlib.suppress(ConnectionResetError):
            while self.connection.recv(65_536):
                pass


Behaviour = Callable[[Exchange], bool | None]


def answer_json(exchange: Exchange) -> bool:
    """The smallest decent answer."""
    return exchange.whole(200, {"object": "answer", "choices": []})


def refuse_503(exchange: Exchange) -> bool:
    return exchange.whole(503, {"error": "busy"})


def hang(exchange: Exchange) -> None:
    """Say nothing until the frontend has had enough."""
    exchange.wait_gone()


def close_at_once(exchange: Exchange) -> None:
    """Close without a byte."""


def head_only(exchange: Exchange) -> None:
    """A 200 with a body that never comes."""
    exchange.send(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 90\r\n\r\n"
    )


def chunked_head_only(exchange: Exchange) -> None:
    exchange.open_stream()


def unframed_head_only(exchange: Exchange) -> None:
    """A 200 that ends with the connection, and ends at once."""
    exchange.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")


def half_json(exchange: Exchange) -> None:
    exchange.send(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 90\r\n\r\n"
        b'{"choices": ['
    )


def two_events_then_close(exchange: Exchange) -> None:
    exchange.open_stream()
    exchange.chunk(b'data: {"n": 1}\n\n')
    exchange.chunk(b'data: {"n": 2}\n\n')


@dataclass
class FakeEngine:
    """An engine in a thread: decent but for `answer`, which is given every generation request."""

    model: str
    answer: Behaviour = answer_json
    port: int = 0
    block_size: int = 16
    adapters: tuple[str, ...] = ()
    max_len: int = 4096
    tokenize: Callable[[dict[str, Any]], list[int]] = lambda _body: list(range(64))
    render: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    health: int = 200
    host: str = "127.0.0.1"
    #: SGLang's server info; other engines have none.
    server_info: dict[str, Any] | None = None
    received: list[Exchange] = field(default_factory=list)

    def __post_init__(self) -> None:
        engine = self
        self._open: set[socket.socket] = set()

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                engine._open.add(self.connection)
                with contextlib.suppress(OSError):
                    while engine._serve(self.rfile, self.connection):
                        pass
                engine._open.discard(self.connection)

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            request_queue_size = 256

        self._server = Server((self.host, self.port), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://{self.host}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def _serve(self, reader: Any, connection: socket.socket) -> bool:
        line = reader.readline().decode()
        if not line:
            return False
        method, target, _ = line.split()
        headers = []
        while line := reader.readline().decode("latin-1").rstrip("\r\n"):
            name, _, value = line.partition(":")
            headers.append((name.lower(), value.strip()))
        length = int(dict(headers).get("content-length", 0))
        exchange = Exchange(method, target, headers, reader.read(length), connection)
        if target == "/health":
            return exchange.whole(self.health, {})
        if target == "/v1/models":
            names = [(self.model, None), *((one, self.model) for one in self.adapters)]
            cards = [{"id": n, "parent": p, "max_model_len": self.max_len} for n, p in names if n]
            return exchange.whole(200, {"object": "list", "data": cards})
        if target == "/metrics":
            info = f'vllm:cache_config_info{{block_size="{self.block_size}"}} 1\n'.encode()
            exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(info) + info)
            return True
        if target in ("/server_info", "/get_server_info"):
            info = None if target == "/server_info" else self.server_info
            return exchange.whole(404 if info is None else 200, info or {"detail": "Not Found"})
        if target == "/tokenize":
            tokens = self.tokenize(json.loads(exchange.body))
            return exchange.whole(200, {"count": len(tokens), "tokens": tokens})
        if target == f"{CHAT}/render":
            if self.render is None:
                return exchange.whole(404, {"detail": "Not Found"})
            return exchange.whole(200, self.render(json.loads(exchange.body)))
        self.received.append(exchange)
        return bool(self.answer(exchange))

    def close(self) -> None:
        """Close the listener and every connection, as a dying process does."""
        self._server.shutdown()
        self._server.socket.close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@contextlib.contextmanager
def engines(frontend: Client, *fakes: FakeEngine) -> Iterator[list[int]]:
    """Register fake engines for a while; gives their ids."""
    with contextlib.ExitStack() as stack:
        ids = []
        for fake in fakes:
            stack.enter_context(fake)
            ids.append(frontend.add(fake.url))
            stack.callback(frontend.remove, ids[-1])
        yield ids


def prompt_of(model: str, **more: Any) -> dict[str, Any]:
    """A completion of 64 token ids: four blocks of 16."""
    return {"model": model, "prompt": list(range(64)), **more}


class Typist:
    """An engine's behaviour: a stream of a given number of tokens, one event each."""

    def __init__(self) -> None:
        self._typed = threading.Semaphore(0)
        self.end = threading.Event()

    def __call__(self, exchange: Exchange) -> bool:
        exchange.open_stream()
        while not self.end.is_set():
            if self._typed.acquire(timeout=0.01):
                exchange.chunk(b'data: {"choices": [{"text": "x"}]}\n\n')
        exchange.chunk(b"data: [DONE]\n\n")
        exchange.chunk(b"")
        return True

    def type(self, count: int) -> None:
        self._typed.release(count)
