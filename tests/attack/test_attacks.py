"""Attacks by one client on all others, each run once. ``make attack`` takes minutes."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from fuzz_requests import SERVICES, Found, fuzz

from service import Http, rss, until
from support_frontend import FrontendProcess, Mocker

TOKENIZER = Path(__file__).parents[1] / "vectors" / "tiny-llama"
MIB = 1 << 20


def chat(content: str) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()


@pytest.fixture(scope="module")
def frontend() -> Iterator[FrontendProcess]:
    with closing(Mocker()) as mocker, ExitStack() as stack:
        flags = (
            "--worker",
            mocker.url,
            "--tokenizer",
            str(TOKENIZER),
            "--tokenizer-cache",
            "16MiB",
        )
        yield stack.enter_context(FrontendProcess(*flags, "--max-concurrent-requests", "8"))


def ask(frontend: FrontendProcess, body: bytes) -> int:
    with closing(Http(frontend.url)) as http:
        return http.call("POST", "/v1/chat/completions", body)[0]


def test_huge_prompts_are_refused_and_leave_no_memory_behind(frontend: FrontendProcess) -> None:
    until(lambda: ask(frontend, chat("hello")) == 200, "the frontend to serve")
    idle = rss(frontend.process.popen.pid)
    one_text = chat("a" * (30 * MIB))
    many_messages = json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": "a"}] * 700_000}
    )
    numbers = {"model": "m", "messages": [], "chat_template_kwargs": {"n": [1] * 10_000_000}}
    bodies = [one_text, many_messages.encode(), json.dumps(numbers).encode()] * 3
    peak = idle
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, frontend, body) for body in bodies]
        while not all(one.done() for one in asked):
            peak = max(peak, rss(frontend.process.popen.pid))
            time.sleep(0.01)
        assert {one.result() for one in asked} == {400}
    assert peak - idle < 512 * MIB, f"{(peak - idle) >> 20} MiB"
    until(lambda: rss(frontend.process.popen.pid) < idle + 64 * MIB, "memory to come back")


def test_bodies_that_crawl_hold_up_nobody(frontend: FrontendProcess) -> None:
    address = urlsplit(frontend.url)
    length = "content-length: 100"
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {address.netloc}\r\n{length}\r\n\r\n{{"
    with ExitStack() as stack:
        for _ in range(64):
            one = stack.enter_context(socket.create_connection((address.hostname, address.port)))
            one.sendall(head.encode())
        assert ask(frontend, chat("hello")) == 200


@pytest.mark.parametrize("service", SERVICES)
def test_requests_that_are_nearly_right_break_nothing(service: str) -> None:
    found = Found()
    assert fuzz(service, 1_500, seed=1, found=found)["sent"] == 1_500
    assert found.wrong == []
    assert {200, 400, 404} <= {status for _, status in found.statuses}
