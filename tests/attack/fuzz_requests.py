"""Requests that are nearly right at frontend, router and indexer: none is answered with 500.

    python tests/attack/fuzz_requests.py --requests 1000000

Each request begins as a valid one; some of its values, keys, bytes or headers are replaced. They go
over raw sockets, several at once on a connection, as no client library would send them. Fails for
an answer of 500, for a panic, and for a service that ended or does not answer; prints one JSON
object for each service. The same seed makes the same requests.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from service import DEADLINE_S, Http, Process, rss, until

TOKENIZER = Path(__file__).parents[1] / "vectors" / "tiny-llama"
MIB = 1 << 20
SERVICES = ("frontend", "router", "indexer")
# Requests that are sent before their answers are read.
AT_ONCE = 16
CONNECTIONS = 4
# On loopback, without a listener: the services connect to the given addresses.
NOWHERE = "http://127.0.0.1:9"
DEAD_SOCKET = "tcp://127.0.0.1:9"

TOKENS = list(range(40))
ASK = {
    "token_ids": TOKENS,
    "model_name": "m",
    "tenant_id": "default",
    "lora_name": None,
    "cache_salt": "s",
    "user": "u",
    "session_id": "v",
    "priority": 1.5,
    "strict_priority": 1,
    "expected_output_tokens": 10,
    "seed": 7,
    "allowed_worker_ids": [1],
    "router_config_override": {"overlap_score_weight": 1.0, "router_temperature": 0.0},
    "mm": [{"hash": "a", "offset": 1, "length": 2}],
}
HASHED = {"block_hashes": [1, 2, 3], "isl_tokens": 48, "model_name": "m", "request_id": "r"}
DONE = {"request_id": "r", "model_name": "m", "output_tokens": 3, "cached_tokens": 16}
NVEXT = {
    "backend_instance_id": 1,
    "annotations": ["worker_id", "query_instance_id:"],
    "agent_hints": {"priority": 1, "strict_priority": 2, "osl": 10},
    "token_data": TOKENS,
}
CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "what is a block?"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "tool", "content": "17", "tool_call_id": "c"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "chat_template_kwargs": {"enable_thinking": False},
    "max_tokens": 5,
    "stream": False,
    "user": "u",
    "priority": 1,
    "cache_salt": "s",
    "add_generation_prompt": True,
    "nvext": NVEXT,
}
COMPLETION = {"model": "m", "prompt": "say it again", "max_tokens": 5, "n": 1, "stop": ["x"]}
THRESHOLD = {"model": "m", "active_decode_blocks_threshold": 0.9}
WORKER = {"worker_id": 99, "model_name": "m", "url": NOWHERE, "dp_size": 2, "block_size": 16}

Seed = tuple[str, str, Any]
SEEDS: dict[str, list[Seed]] = {
    "frontend": [
        ("POST", "/v1/chat/completions", CHAT),
        ("POST", "/v1/chat/completions", {**CHAT, "stream": True}),
        ("POST", "/v1/completions", COMPLETION),
        ("POST", "/v1/completions", {**COMPLETION, "prompt": TOKENS}),
        ("POST", "/v1/completions", {**COMPLETION, "prompt": ["one", "two"], "stream": True}),
        ("POST", "/explain", CHAT),
        ("POST", "/explain", {**COMPLETION, "prompt": TOKENS}),
        ("POST", "/busy_threshold", THRESHOLD),
        ("POST", "/workers", {"url": NOWHERE, "id": 99, "role": "decode", "dp_size": 2}),
        ("DELETE", "/workers/99", None),
        ("GET", "/why/r", None),
        ("GET", "/v1/models/m", None),
        ("GET", "/workers", None),
        ("GET", "/health", None),
    ],
    "router": [
        *(("POST", path, ASK) for path in ("/select", "/potential_loads", "/explain")),
        ("POST", "/reserve", {**ASK, "request_id": "r"}),
        ("POST", "/reserve", HASHED),
        ("POST", "/select", HASHED),
        *(("POST", path, DONE) for path in ("/prefill_complete", "/touch", "/free")),
        ("POST", "/", {"method": "new", "tokens": TOKENS, "model_name": "m", "request_id": "r"}),
        ("POST", "/", {"method": "mark_free", "request_id": "r"}),
        ("POST", "/report_load", {"worker_id": 1, "dp_rank": 0, "kv_used_blocks": 5}),
        ("POST", "/busy_threshold", THRESHOLD),
        ("POST", "/workers", WORKER),
        ("DELETE", "/workers/99", None),
        ("GET", "/why/r", None),
        ("GET", "/workers?model_name=m", None),
        ("GET", "/health", None),
    ],
    "indexer": [
        ("POST", "/query", {"token_ids": TOKENS, "model_name": "m", "cache_salt": "s"}),
        ("POST", "/query", {"token_ids": TOKENS, "model_name": "m", "mm": ASK["mm"]}),
        ("POST", "/query_by_hash", {"block_hashes": [1, 2], "model_name": "m"}),
        (
            "POST",
            "/register",
            {
                "instance_id": 99,
                "endpoint": DEAD_SOCKET,
                "replay_endpoint": DEAD_SOCKET,
                "model_name": "m",
                "block_size": 16,
                "dp_rank": 0,
            },
        ),
        ("POST", "/unregister", {"instance_id": 99, "model_name": "m", "dp_rank": 0}),
        ("POST", "/register_peer", {"url": NOWHERE}),
        ("POST", "/deregister_peer", {"url": NOWHERE}),
        ("GET", "/workers?model_name=m", None),
        ("GET", "/dump?format=json&model_name=m", None),
        ("GET", "/digest?model_name=m", None),
        ("GET", "/peers", None),
        ("GET", "/ready", None),
    ],
}
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 16, 1.5, -0.0, 1e308, 2**31, 2**53, 2**63, 2**64 - 1, 2**64),
    *(-(2**63), 10**400, "", "m", "nan", "\x00", "\ud800", "ü€😀", "a" * 3_000, "../../etc/passwd"),
    *([], {}, [[]], [None], [0] * 500, [2**32 - 1], {"": ""}, [{}], {"type": "text"}),
    *("{{ 1 / 0 }}", "%s%n", "http://", DEAD_SOCKET, NOWHERE, [[[[[[[[]]]]]]]]),
]
RAW = [b"NaN", b"Infinity", b"1e999", b"-", b"[" * 200, b"{" * 200, b"\xff\xfe", b'"\\ud800"', b""]
HEADERS = [
    *("x-request-id", "x-kvflash-priority", "x-kvflash-max-attempts", "x-dynamo-request-priority"),
    *("x-dynamo-request-strict-priority", "user", "x-session-id", "content-type", "accept"),
    *("authorization", "connection", "accept-encoding", "expect", "content-encoding", "origin"),
    *("x-forwarded-for", "x-worker-instance-id", "x-dp-rank", "x-data-parallel-rank", "cookie"),
]
HEADER_VALUES = [
    *(b"", b"1", b"-1", b"1e308", b"nan", b"x" * 3_000, b"\xff\xfe", b"close", b"identity;q=0"),
    *(
        b"application/json; charset=utf-16",
        b"text/event-stream",
        b"100-continue",
        b"18446744073709551616",
    ),
]
PIECES = [
    "%00",
    "%ff",
    "%2e%2e/",
    "?",
    "&&==",
    "#",
    "?model_name=%",
    "/" * 50,
    "?format=x",
    "ü",
    "*",
]


def nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a body: what it is in, and its key or index."""
    if isinstance(value, (dict, list)):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        for key in keys:
            yield value, key
            yield from nodes(value[key])


def changed(body: Any, dice: random.Random) -> Any:
    """The body with some of its values replaced, missing, elsewhere or under other names."""
    holder = [copy.deepcopy(body)]
    for _ in range(dice.choice([0, 1, 1, 1, 2, 3])):
        places = list(nodes(holder))
        inside, key = dice.choice(places)
        what = dice.randrange(8)
        if what == 0 and isinstance(inside, dict):
            inside[dice.choice(["", "model", "prompt", "messages", "extra"])] = inside.pop(key)
        elif what == 1 and inside is not holder:
            del inside[key]
        elif what == 2:
            other, at = dice.choice(places)
            with suppress(LookupError):
                inside[key] = copy.deepcopy(other[at])
        elif what == 3 and isinstance(inside[key], str):
            inside[key] += dice.choice(["\x00", " ", "/", "\n", "\u2028", "a" * 100])
        else:
            inside[key] = copy.deepcopy(dice.choice(VALUES))
    return holder[0]


def text_of(body: Any, dice: random.Random) -> bytes:
    """JSON of it, sometimes with a duplicate key or with corrupt bytes."""
    data = json.dumps(body, ensure_ascii=dice.random() < 0.8).encode(errors="surrogatepass")
    what = dice.randrange(12)
    if what == 0 and data.startswith(b'{"'):
        key = json.dumps(
            dice.choice(["model", "prompt", "model_name", "token_ids", "nvext", "url"])
        )
        data = b"{" + key.encode() + b": 1, " + data[1:]
    elif what == 1:
        data = data[: dice.randrange(len(data) + 1)]
    elif what == 2:
        at = dice.randrange(len(data) + 1)
        data = data[:at] + dice.choice(RAW) + data[at:]
    elif what == 3 and b"//" not in data and data:
        # Not of addresses: a service would ask some stranger.
        at = dice.randrange(len(data))
        data = data[:at] + bytes([dice.randrange(256)]) + data[at + 1 :]
    return data


def request(seed: Seed, dice: random.Random) -> tuple[bytes, bool]:
    """A request's bytes, and whether its answer is the connection's last or may be none."""
    method, path, body = seed
    is_last = False
    if dice.random() < 0.05:
        method = dice.choice(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "M" * 20])
    if dice.random() < 0.1:
        at = dice.randrange(1, len(path) + 1)
        path = path[:at] + dice.choice(PIECES) + path[at:]
    data = b"" if body is None else text_of(changed(body, dice), dice)
    lines = [f"{method} {path} HTTP/1.1".encode(), b"host: localhost"]
    for _ in range(dice.choice([0, 0, 0, 1, 2])):
        name, value = dice.choice(HEADERS), dice.choice(HEADER_VALUES)
        is_last |= name in ("connection", "expect")
        lines.append(name.encode() + b": " + value)
    form = dice.randrange(40)
    if form == 0:
        lines.append(b"transfer-encoding: chunked")
        data = b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n"
    else:
        length = len(data)
        if form == 1:
            # Too short: what is left is read as the next request.
            length = dice.randrange(length + 1)
        elif form == 2:
            lines.append(
                dice.choice([b"content-length: 3", b"no colon", b": no name", b"\x01: \x02"])
            )
        is_last |= form in (1, 2)
        lines.append(b"content-length: %d" % length)
    return b"\r\n".join(lines) + b"\r\n\r\n" + data, is_last or b"\xc3" in path.encode()


@dataclass
class Found:
    """The results.

    Attributes:
        statuses: Answers by service and status.
        wrong: Requests that were answered with 500, or not at all; the first ones.
    """

    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def tell(self, service: str, what: str, sent: bytes) -> None:
        if len(self.wrong) < 20:
            self.wrong.append(f"{service}: {what}: {sent[:2_000]!r}")


async def answer(reader: asyncio.StreamReader) -> int:
    """The status of the next answer, read to its end."""
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head[9:12])
        if status >= 200:
            break
    if length := re.search(rb"content-length: (\d+)", head, re.IGNORECASE):
        await reader.readexactly(int(length[1]))
    elif b"chunked" in head.lower():
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            await reader.readexactly(size + 2)
        await reader.readuntil(b"\r\n")
    return status


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


async def converse(service: str, url: str, count: int, dice: random.Random, found: Found) -> None:
    """Send so many requests over one connection after the other."""
    parts, sent_in_all = urlsplit(url), 0
    while sent_in_all < count:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        with suppress(OSError, asyncio.IncompleteReadError):
            is_last = False
            while not is_last and sent_in_all < count:
                batch = []
                while not is_last and len(batch) < min(AT_ONCE, count - sent_in_all):
                    data, is_last = request(dice.choice(SEEDS[service]), dice)
                    batch.append(data)
                sent_in_all += len(batch)
                writer.write(b"".join(batch))
                await writer.drain()
                if is_last:
                    writer.write_eof()
                for data in batch:
                    try:
                        status = await asyncio.wait_for(answer(reader), DEADLINE_S)
                    except asyncio.TimeoutError:
                        found.tell(service, f"no answer in {DEADLINE_S:g} s", data)
                        raise ConnectionError from None
                    found.statuses[service, status] += 1
                    if status == 500:
                        found.tell(service, "500", data)
        await close(writer)


async def engine(port: asyncio.Future[int]) -> None:
    """An engine that answers at once, whole or as a short stream."""
    served = json.dumps({"data": [{"id": "m", "max_model_len": 32768}]}).encode()
    whole = json.dumps({"choices": [{"text": "a"}], "usage": {"prompt_tokens": 3}}).encode()
    stream = b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Up to Python 3.11 asyncio prints a traceback for a handler that ends as cancelled.
        ends = (OSError, asyncio.IncompleteReadError, asyncio.CancelledError)
        with suppress(*ends), closing(writer):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
                body = await reader.readexactly(int(length[1])) if length else b""
                kind, text = b"application/json", whole
                if b"GET /v1/models" in head:
                    text = served
                elif re.search(rb'"stream":\s*true', body):
                    kind, text = b"text/event-stream", stream
                elif head.startswith(b"POST") and b" /v1/" not in head:
                    text = b"{}"
                lines = (b"HTTP/1.1 200 OK", b"content-type: " + kind)
                lines += (b"content-length: %d" % len(text),)
                writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + text)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port.set_result(server.sockets[0].getsockname()[1])
    async with server:
        await server.serve_forever()


@contextmanager
def engine_beside() -> Iterator[str]:
    """The engine in a thread of this process: its URL."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def begin() -> tuple[asyncio.Task[None], int]:
        port: asyncio.Future[int] = loop.create_future()
        task = loop.create_task(engine(port))
        return task, await port

    async def end() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        # Transports that are closed now are gone in the loop's next turn.
        await asyncio.sleep(0)

    task, port = asyncio.run_coroutine_threadsafe(begin(), loop).result(DEADLINE_S)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        # Tasks are held by who begins them.
        assert not task.done(), task
        asyncio.run_coroutine_threadsafe(end(), loop).result(DEADLINE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(DEADLINE_S)
        loop.close()


def start(service: str, engine_url: str) -> Process:
    flags = ["--host", "127.0.0.1", "--port", "0", "--log-level", "error"]
    flags += ["--max-workers", "64"] if service != "indexer" else []
    if service == "frontend":
        flags += ["--worker", f"{engine_url},id=1", "--tokenizer", str(TOKENIZER)]
        flags += ["--discovery", "none", "--tokenizer-cache", "16MiB", "--health-interval", "60"]
    return Process(f"kvflash.{service}", *flags)


def prepare(service: str, http: Http, engine_url: str) -> None:
    """Create the objects that most requests need, and remove leftovers of others."""
    if service == "router":
        http.call("POST", "/workers", {**WORKER, "worker_id": 1})
    elif service == "indexer":
        http.call("POST", "/register", {**SEEDS["indexer"][3][2], "instance_id": 1})
    else:
        for worker in http.get("/workers"):
            if worker["id"] != 1:
                http.call("DELETE", f"/workers/{worker['id']}")
        http.call("POST", "/workers", {"url": engine_url, "id": 1})
        until(lambda: http.call("GET", "/ready")[0] == 200, "the frontend to be ready")
    http.call("POST", "/busy_threshold", {"model": "m", "active_decode_blocks_threshold": None})


def panics(http: Http) -> int:
    text = http.get("/metrics").decode()
    return sum(int(float(n)) for n in re.findall(r"^\w*panics_total (\S+)$", text, re.MULTILINE))


def fuzz(service: str, count: int, seed: int, found: Found) -> dict[str, float]:
    """Fuzz one service: its memory before and after, and what was wrong in ``found``."""
    with ExitStack() as stack:
        engine_url = stack.enter_context(engine_beside())
        process = start(service, engine_url)
        stack.callback(process.close)
        url = str(process.ready()["url"])
        http = stack.enter_context(closing(Http(url)))
        before, began, sent, turn = 0, time.monotonic(), 0, 0
        while sent < count:
            prepare(service, http, engine_url)
            before = before or rss(process.popen.pid)
            share = min(2_000, -(-(count - sent) // CONNECTIONS))
            rounds = [
                converse(
                    service, url, share, random.Random(f"{seed} {service} {turn} {one}"), found
                )
                for one in range(CONNECTIONS)
            ]

            async def together(rounds: list[Any] = rounds) -> None:
                await asyncio.gather(*rounds)

            try:
                asyncio.run(together())
            except OSError as error:
                found.tell(service, f"does not take connections: {error!r}", b"")
                break
            sent, turn = sent + share * CONNECTIONS, turn + 1
        seconds = time.monotonic() - began
        if process.popen.poll() is not None:
            found.tell(service, f"ended with {process.popen.returncode}", b"")
            return {}
        if count_of := panics(http):
            found.tell(service, f"{count_of} panics", b"")
        if any("panicked" in line for line in process.errors):
            found.tell(service, "a panic in the log", "".join(process.errors[-20:]).encode())
        after = rss(process.popen.pid)
    figures = {"sent": sent, "seconds": seconds, "rss_mib": before / MIB, "after_mib": after / MIB}
    return {name: round(value, 1) for name, value in figures.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000, help="of all services together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=SERVICES, help="one service alone")
    given = parser.parse_args()
    services = [given.only] if given.only else SERVICES
    found, figures = Found(), {}
    for service in services:
        figures[service] = fuzz(service, given.requests // len(services), given.seed, found)
        counts = {str(n): c for (name, n), c in sorted(found.statuses.items()) if name == service}
        print(json.dumps({"service": service, **figures[service], "answers": counts}), flush=True)
    for line in found.wrong:
        print(line, file=sys.stderr)
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
