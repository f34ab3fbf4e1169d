"""What a launcher asks an engine, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from kvflash import vllm
from kvflash.errors import ConfigError, DeadlineError
from kvflash.launcher import probe
from kvflash.launcher.child import Child
from kvflash.launcher.options import parse_options
from kvflash.launcher.probe import Found, wait_until_idle, wait_until_ready

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
Ask = Callable[[str, Any], Awaitable[Any]]


def asked(answer: Answer, ask: Ask) -> Any:
    """The result of ``ask(url, child)`` with an engine that answers so."""

    async def work() -> Any:
        app = web.Application()
        app.add_routes([web.get("/{path:.*}", answer)])
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        child = SimpleNamespace(is_running=True, stopping=asyncio.Event())
        try:
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            return await asyncio.wait_for(ask(url, child), 30)
        finally:
            await runner.cleanup()

    return asyncio.run(work())


def found(words: str, answer: Answer) -> Found:
    options, arguments = parse_options("vllm", vllm.PROGRAM, words.split())
    command = vllm.build(options, arguments, "127.0.0.1")
    return asked(answer, lambda url, child: wait_until_ready(url, command, child, 30))


async def with_key(request: web.Request) -> web.Response:
    """As vLLM: health and metrics are open, the API asks for the key."""
    is_api = request.path.startswith("/v1/")
    if is_api and request.headers.get("Authorization") != "Bearer secret":
        return web.json_response({"error": "Unauthorized"}, status=401)
    return web.json_response({"data": [{"id": "served"}]})


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        ("m --api-key secret", {"VLLM_API_KEY": "other"}),
        ("m --api-key=secret", {}),
        ("m --api_key secret", {}),
        ("m", {"VLLM_API_KEY": "secret", "KVFLASH_WORKER_API_KEY": "other"}),
        ("m", {"KVFLASH_WORKER_API_KEY": "secret"}),
        ("m", {"VLLM_API_KEY": " ", "KVFLASH_WORKER_API_KEY": "secret\n"}),
    ],
)
def test_an_engine_is_asked_with_its_key(words, variables, monkeypatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert found(words, with_key).model_name == "served"


def test_a_key_that_no_header_can_have_is_refused_before_the_engine_loads(monkeypatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sec\nret")
    options, arguments = parse_options("vllm", vllm.PROGRAM, ["m"])
    with pytest.raises(ConfigError, match=r"^environment variable VLLM_API_KEY: must be one key"):
        vllm.build(options, arguments, "127.0.0.1")


def test_why_an_engine_is_waited_for_is_said(monkeypatch, caplog) -> None:
    monkeypatch.setattr("kvflash.launcher.probe.REMIND_S", 0)
    caplog.set_level("INFO")
    answers = iter((503, 503, 200))

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/health":
            return web.Response(status=next(answers))
        return await with_key(request)

    assert found("m --api-key secret", answer).model_name == "served"
    lines = [line for line in caplog.messages if "not healthy after" in line]
    assert len(lines) == 2 and all(line.endswith("/health: status 503") for line in lines)


def test_an_engine_that_never_gets_healthy_is_refused_with_the_reason() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=404)

    options, arguments = parse_options("vllm", vllm.PROGRAM, ["m"])
    command = vllm.build(options, arguments, "127.0.0.1")
    why = r"within 0.01 s \(--ready-timeout\): GET http://\S+/health: status 404$"
    with pytest.raises(DeadlineError, match=why):
        asked(answer, lambda url, child: wait_until_ready(url, command, child, 0.01))


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match=r"answered 401: set KVFLASH_WORKER_API_KEY"):
        found("m", with_key)


def test_another_failure_is_named_by_its_status() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=200 if request.path == "/health" else 500)

    with pytest.raises(ConfigError, match=r"^the engine's /v1/models answered 500$"):
        found("m", answer)


@pytest.mark.parametrize("failure", ["late", "unavailable"])
def test_a_busy_engine_is_waited_for_whatever_its_metrics_do(failure, monkeypatch) -> None:
    monkeypatch.setattr(probe, "_ANSWER_S_MAX", 0.2 if failure == "late" else 30)
    monkeypatch.setattr(probe, "SETTLE_S", 0)
    steps = ["1", failure, "1", failure, "0"]

    async def answer(request: web.Request) -> web.Response:
        step = steps.pop(0) if len(steps) > 1 else steps[0]
        if step == "late":
            await asyncio.Event().wait()
        if step == "unavailable":
            return web.Response(status=503)
        return web.Response(text=f"vllm:num_requests_running {step}.0\n")

    asked(answer, lambda url, child: wait_until_idle(url, child, 30))
    assert steps == ["0"]


def test_requests_are_counted_with_the_engines_key(monkeypatch) -> None:
    monkeypatch.setattr(probe, "SETTLE_S", 0)
    counts = [1, 0]

    async def answer(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer secret":
            return web.Response(status=401)
        count = counts.pop(0) if len(counts) > 1 else counts[0]
        return web.Response(text=f"vllm:num_requests_running {count}\n")

    asked(answer, lambda url, child: wait_until_idle(url, child, 30, "secret"))
    assert counts == [0]


@pytest.mark.parametrize("status", [200, 404])
def test_an_engine_that_does_not_count_is_not_waited_for(status) -> None:
    seen = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.path)
        return web.Response(status=status, text="other 1\n")

    asked(answer, lambda url, child: wait_until_idle(url, child, 30))
    assert seen == ["/metrics"]


def test_an_engine_without_an_http_server_is_not_waited_for() -> None:
    async def work() -> None:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            # Bound and not listening: the connection is refused.
            url = f"http://127.0.0.1:{held.getsockname()[1]}"
            child: Any = SimpleNamespace(is_running=True)
            await asyncio.wait_for(wait_until_idle(url, child, 600), 30)

    asyncio.run(work())


@pytest.mark.parametrize(
    ("count", "text"),
    [(2, "still had requests after 0.3 s"), (None, "did not report its requests for 0.3 s")],
)
def test_the_log_says_no_more_than_the_engine_did(
    count: int | None, text: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def requests(_session: object, _timeout_s: float) -> float:
        if count is None:
            raise asyncio.TimeoutError
        return count

    monkeypatch.setattr(probe, "_requests", requests)
    child: Any = SimpleNamespace(is_running=True)
    asyncio.run(wait_until_idle("http://127.0.0.1:1", child, 0.3))
    assert f"the engine {text} (--drain-timeout); stopping it" in caplog.text


def test_keys_of_an_engine_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    words = (
        "/no/such/engine --api-key secret1 secret2 --hf-token=secret3 --api_key secret4 "
        "--hf_token=secret5 --ssl-keyfile-password secret6 --port 8000"
    )

    async def work() -> None:
        with pytest.raises(ConfigError, match="can't start /no/such/engine"):
            await Child.start(words.split())

    with caplog.at_level("INFO"):
        asyncio.run(work())
    line = (
        "starting /no/such/engine --api-key *** *** --hf-token=*** --api_key *** "
        "--hf_token=*** --ssl-keyfile-password *** --port 8000"
    )
    assert line in caplog.text
