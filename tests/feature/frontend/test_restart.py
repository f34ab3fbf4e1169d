"""A frontend that is replaced by another one while requests come."""

from __future__ import annotations

import signal
from contextlib import closing, suppress
from http.client import HTTPException
from urllib.parse import urlsplit

import pytest

from ports import free_port
from service import Http, Process, until
from support_frontend import FakeEngine, FrontendProcess, Mocker

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}


def status(url: str, method: str, path: str, body: object = None) -> int:
    with closing(Http(url)) as http:
        return http.call(method, path, body)[0]


def test_sigterm_is_announced_before_it_is_obeyed() -> None:
    with closing(Mocker()) as mocker:
        flags = ("--worker", mocker.url, "--lame-duck-timeout", "60")
        with FrontendProcess(*flags) as frontend:
            until(lambda: status(frontend.url, "GET", "/ready") == 200, "the frontend to be ready")
            frontend.process.popen.send_signal(signal.SIGTERM)
            until(lambda: status(frontend.url, "GET", "/ready") == 503, "the announcement")
            assert status(frontend.url, "GET", "/live") == 200
            assert status(frontend.url, "POST", "/v1/chat/completions", CHAT) == 200
            frontend.process.popen.send_signal(signal.SIGTERM)
            assert frontend.process.popen.wait(10) == -signal.SIGTERM


def test_a_new_process_takes_over_the_port_and_no_request_is_lost() -> None:
    with closing(Mocker()) as mocker:
        flags = ("--worker", mocker.url, "--reuse-port")
        with FrontendProcess(*flags, "--lame-duck-timeout", "1") as old:
            port = str(urlsplit(old.url).port)
            until(lambda: status(old.url, "GET", "/ready") == 200, "the first to be ready")
            admin = str(free_port())
            with FrontendProcess(*flags, "--port", port, "--admin-port", admin) as new:
                # At the port of both, the first would answer for the second.
                own = f"http://127.0.0.1:{admin}"
                until(lambda: status(own, "GET", "/ready") == 200, "the second to be ready")
                old.process.popen.send_signal(signal.SIGTERM)
                answers, failures = [], 0
                while old.process.popen.poll() is None:
                    try:
                        answers.append(status(new.url, "POST", "/v1/chat/completions", CHAT))
                    except (OSError, HTTPException):
                        failures += 1
                assert (set(answers), failures) == ({200}, 0)
                assert status(new.url, "POST", "/v1/chat/completions", CHAT) == 200
                with suppress(OSError):
                    new.process.popen.terminate()


def test_a_new_process_leaves_clients_to_the_old_one_until_it_is_ready() -> None:
    with (
        closing(Mocker()) as mocker,
        FakeEngine("m", health=503) as engine,
        FrontendProcess("--worker", mocker.url, "--reuse-port") as old,
    ):
        port = str(urlsplit(old.url).port)
        until(lambda: status(old.url, "GET", "/ready") == 200, "the first to be ready")
        flags = ("--host", "127.0.0.1", "--port", port, "--reuse-port", "--discovery", "none")
        new = Process("kvflash.frontend", *flags, "--worker", engine.url)
        with closing(new):
            new.ready("listening")
            # One that listened would get about half of them.
            answers = {status(old.url, "POST", "/v1/chat/completions", CHAT) for _ in range(20)}
            assert answers == {200}
            engine.health = 200
            new.ready()


@pytest.mark.parametrize("service", ["router", "indexer"])
def test_a_router_and_an_indexer_announce_their_stop(run, service) -> None:
    flags = ("--host", "127.0.0.1", "--port", "0", "--lame-duck-timeout", "60")
    process = run(f"kvflash.{service}", *flags)
    url = process.ready()["url"]
    assert status(url, "GET", "/ready") == 200
    process.popen.send_signal(signal.SIGTERM)
    until(lambda: status(url, "GET", "/ready") == 503, "the announcement")
    assert status(url, "GET", "/health") == 200
    process.popen.send_signal(signal.SIGTERM)
    assert process.popen.wait(10) == -signal.SIGTERM
