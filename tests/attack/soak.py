"""Hostile clients of every kind beside honest ones: what the honest ones and the memory feel.

    python tests/attack/soak.py --seconds 300 --clients 64

With ``--baseline`` the attacks go to a second frontend with engines of its own: what the honest
clients of the first then feel is the machine's, whose cores all of them share. Needs the package
and this folder's neighbours; prints one JSON object, and fails where a bound is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from service import rss, until
from support_frontend import FrontendProcess

MIB = 1 << 20
TOKENIZER = Path(__file__).parents[1] / "vectors" / "tiny-llama"
# As published templates of gpt-oss: for each answer with tool calls, a look at all later messages.
SQUARE = (
    "{% for a in messages %}{% for b in messages %}{% if b.role == 'none' %}x{% endif %}"
    "{% endfor %}{{ a.role }}: {{ a.content }}\n{% endfor %}"
)


class Target:
    """Where the attacks go."""

    def __init__(self, url: str, seed: int) -> None:
        parts = urlsplit(url)
        self.host, self.port = str(parts.hostname), int(parts.port or 0)
        self.random = random.Random(seed)

    def connect(self, timeout: float = 30.0) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout)

    def post(self, body: bytes, timeout: float = 60.0) -> int:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        with closing(connection):
            kind = {"content-type": "application/json"}
            connection.request("POST", "/v1/chat/completions", body, kind)
            answer = connection.getresponse()
            answer.read()
            return answer.status

    def head(self, length: int) -> bytes:
        path = "POST /v1/chat/completions HTTP/1.1"
        return f"{path}\r\nhost: {self.host}\r\ncontent-length: {length}\r\n\r\n".encode()


def chat(content: str, model: str = "m", **more: object) -> bytes:
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": model, "messages": messages, **more}).encode()


HUGE = chat("a" * (30 * MIB))
MANY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}] * 2_000}).encode()


def oversized(target: Target) -> None:
    target.post(HUGE)


def slow_head(target: Target) -> None:
    with target.connect() as one:
        for byte in target.head(10):
            one.sendall(bytes([byte]))
            time.sleep(0.5)


def slow_body(target: Target) -> None:
    with target.connect() as one:
        one.sendall(target.head(1_000))
        for _ in range(1_000):
            one.sendall(b" ")
            time.sleep(0.5)


def never_reading(target: Target) -> None:
    with target.connect() as one:
        # By an engine of their own: what they do to it is not the service's.
        body = chat("tell me", model="endless", stream=True, max_tokens=2_000)
        one.sendall(target.head(len(body)) + body)
        time.sleep(10)


def template_loop(target: Target) -> None:
    target.post(MANY)


def unbroken_text(target: Target) -> None:
    letters = "".join(target.random.choices("abcdefghij", k=60_000))
    target.post(chat(letters, max_tokens=1))


def idle(target: Target) -> None:
    with target.connect() as one:
        time.sleep(5)
        one.sendall(b"G")
        time.sleep(5)


def malformed(target: Target) -> None:
    lines = [
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x00" * 100,
        b"POST /v1 HTTP/1.1\r\ncontent-length: x\r\n\r\n",
    ]
    with target.connect() as one:
        one.sendall(target.random.choice(lines))
        one.recv(1_000)


ATTACKS: list[Callable[[Target], None]] = [
    oversized,
    slow_head,
    slow_body,
    never_reading,
    template_loop,
    unbroken_text,
    idle,
    malformed,
]


def honest(target: Target, seconds: float, rate: float) -> tuple[list[float], int]:
    """Short chats at ``rate`` a second: seconds that each took, and how many failed."""
    took, failed = [], 0
    status: object
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.monotonic()
        try:
            number = target.random.randrange(10**9)
            status = target.post(chat(f"question {number} of many", max_tokens=1))
        except (OSError, http.client.HTTPException) as error:
            status = repr(error)
        if status != 200:
            failed += 1
            print("an honest request:", status, file=sys.stderr)
        took.append(time.monotonic() - began)
        time.sleep(max(0.0, 1 / rate - took[-1]))
    return took, failed


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def besiege(url: str, attacks: list[Callable[[Target], None]], clients: int, seed: int) -> None:
    """Attack until this process is killed."""
    os.nice(10)

    def attack(kind: Callable[[Target], None], seed: int) -> None:
        hostile = Target(url, seed)
        while True:
            try:
                kind(hostile)
            except (OSError, http.client.HTTPException):
                time.sleep(0.05)

    for number in range(clients):
        for kind in attacks:
            arguments = (kind, seed * 1_000 + number)
            threading.Thread(target=attack, args=arguments, daemon=True).start()
    threading.Event().wait()


async def engine(model: str) -> None:
    """An engine that answers at once, or without end where a stream is asked for."""
    served = json.dumps({"data": [{"id": model, "max_model_len": 32768}]}).encode()

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                found = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
                body = await reader.readexactly(int(found[1])) if found else b""
                if b'"stream": true' in body:
                    kind = b"content-type: text/event-stream\r\ntransfer-encoding: chunked"
                    writer.write(b"HTTP/1.1 200 OK\r\n" + kind + b"\r\n\r\n")
                    while True:
                        writer.write(b'10\r\ndata: {"n": 111}\n\r\n')
                        await writer.drain()
                text = b'{"choices": []}'
                if b"GET /v1/models" in head:
                    text = served
                length = f"content-length: {len(text)}".encode()
                kind = b"content-type: application/json\r\n"
                writer.write(b"HTTP/1.1 200 OK\r\n" + kind + length + b"\r\n\r\n" + text)
        writer.close()

    server = await asyncio.start_server(converse, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def model_folder(folder: Path) -> Path:
    """The tiny tokenizer with a template that has a loop in a loop."""
    for file in TOKENIZER.iterdir():
        if file.name != "chat_template.jinja" and file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
    settings["chat_template"] = SQUARE
    config.write_text(json.dumps(settings), encoding="utf-8")
    return folder


NGINX = """
daemon off; user root; worker_processes 2; pid {folder}/pid; error_log {folder}/log crit;
events {{ worker_connections 4096; }}
http {{
    access_log off; client_max_body_size 32m; client_body_temp_path {folder}/bodies;
    proxy_temp_path {folder}/proxied; fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u;
    scgi_temp_path {folder}/s;
    upstream engine {{ server 127.0.0.1:{engine}; keepalive 64; }}
    server {{
        listen 127.0.0.1:{port};
        proxy_http_version 1.1;
        proxy_set_header Connection "";
        location / {{ proxy_pass http://engine; }}
    }}
}}
"""


@contextmanager
def kvflash(folder: Path, engines: list[int]) -> Iterator[tuple[str, int]]:
    """A frontend before these engines: its URL and its process."""
    workers = ("--worker", *(f"http://127.0.0.1:{port}" for port in engines))
    # A small cache: what it holds stays, and is not what a burst leaves behind.
    tokens = ("--tokenizer", str(model_folder(folder)), "--tokenizer-cache", "16MiB")
    with FrontendProcess(*workers, *tokens) as frontend:
        yield frontend.url, frontend.process.popen.pid


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def serves(target: Target) -> bool:
    with suppress(OSError):
        return target.post(chat("hello", max_tokens=1)) == 200
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="how long the attack lasts")
    parser.add_argument("--clients", type=int, default=64, help="hostile clients of each kind")
    parser.add_argument(
        "--quiet", type=float, default=20.0, help="how long the honest are alone before"
    )
    parser.add_argument("--only", default="", help="one kind of attack alone")
    parser.add_argument("--settle", type=float, default=30.0, help="until memory must be back")
    parser.add_argument("--baseline", action="store_true", help="attack a second frontend")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", default="", help=argparse.SUPPRESS)
    parser.add_argument("--besiege", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    attacks = [attack for attack in ATTACKS if given.only in ("", attack.__name__)]
    if given.engine:
        asyncio.run(engine(given.engine))
    if given.besiege:
        besiege(given.besiege, attacks, given.clients, given.seed)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = [
            subprocess.Popen([sys.executable, __file__, "--engine", model], stdout=subprocess.PIPE)
            for model in ("m", "endless") * (1 + given.baseline)
        ]
        stack.callback(end, servers)
        ports = [int(server.stdout.readline()) for server in servers if server.stdout]
        url, process_id = stack.enter_context(kvflash(Path(folder), ports[:2]))
        attacked = url
        if given.baseline:
            attacked, _ = stack.enter_context(kvflash(Path(folder), ports[2:]))
        target = Target(url, given.seed)
        until(lambda: serves(target), "the first answer")
        quiet, failed_before = honest(target, given.quiet, 50)
        before, is_over = rss(process_id), threading.Event()
        # In processes of their own, of low priority: their work is not the service's.
        hostile = [
            subprocess.Popen(
                (
                    *(sys.executable, __file__, "--besiege", attacked),
                    *("--only", kind.__name__),
                    *("--clients", str(given.clients), "--seed", str(given.seed)),
                )
            )
            for kind in attacks
        ]
        stack.callback(end, hostile)
        peaks: list[int] = []

        def watch() -> None:
            while not is_over.is_set():
                peaks.append(rss(process_id))
                time.sleep(0.05)

        threading.Thread(target=watch, daemon=True).start()
        besieged, failed = honest(target, given.seconds, 50)
        is_over.set()
        end(hostile)
        time.sleep(given.settle)
        after = rss(process_id)
    figures = {
        "quiet_p50_ms": 1e3 * statistics.median(quiet),
        "quiet_p99_ms": 1e3 * p99(quiet),
        "p50_ms": 1e3 * statistics.median(besieged),
        "p99_ms": 1e3 * p99(besieged),
        "asked": len(besieged),
        "failed": failed + failed_before,
        "rss_before_mib": before // MIB,
        "rss_peak_mib": max(peaks) // MIB,
        "rss_after_mib": after // MIB,
    }
    print(json.dumps({name: round(value, 2) for name, value in figures.items()}))
    broken = [
        what
        for what, is_broken in (
            ("p99 above 3 times its quiet value", figures["p99_ms"] > 3 * figures["quiet_p99_ms"]),
            ("memory above idle + 512 MiB", max(peaks) - before > 512 * MIB),
            ("memory after that above idle + 64 MiB", after - before > 64 * MIB),
            ("an honest request failed", failed > 0),
        )
        if is_broken
    ]
    if given.baseline:
        return 0
    for what in broken:
        print(what, file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
