"""/health, log and refusals while requests can't be served, or not by cache."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from kvflash import ConfigError
from ports import free_port
from service import until
from support_frontend import (
    CHAT,
    COMPLETIONS,
    Client,
    FakeEngine,
    FrontendProcess,
    ask,
    engines,
    prompt_of,
)
from support_tokens import TINY_LLAMA, EmbeddedFrontend, FakeWorker, workers

BODY = {"model": "m", "messages": [{"role": "user", "content": "Say it"}], "max_tokens": 5}


def warnings(frontend: Client) -> list[str]:
    body: dict[str, Any] = frontend.http.call("GET", "/health")[1]
    return list(body["warnings"])


def nobody() -> str:
    """A URL that refuses connections."""
    return f"http://127.0.0.1:{free_port()}"


def test_an_engine_that_never_comes_up_is_named_with_its_reason() -> None:
    with FrontendProcess("--worker", nobody(), "--log-level", "warn") as frontend:
        until(lambda: "GET /health" in str(warnings(frontend)), "the first check")
        answer = ask(frontend.url, COMPLETIONS, prompt_of("m"))
        message = answer.json["error"]["message"]
        assert answer.status == 503
        assert "(1 registered); unhealthy: 1: GET /health" in message and "waiting" not in message
    (line,) = (line for line in frontend.process.errors if "worker is not healthy yet" in line)
    assert "GET /health" in line


def test_workers_that_only_prefill_serve_nobody() -> None:
    prefill = FakeWorker(42, model_type=("prefill",))
    with EmbeddedFrontend() as frontend, workers(frontend, prefill):
        status, health, _ = frontend.http.call("GET", "/health")
        assert (status, health["status"], health["healthy_workers"]) == (503, "unavailable", 1)
        assert health["warnings"] == [
            "model m has prefill workers, but no decode worker",
            "worker 42: announced no events, so its cache is unknown and earns no credit",
        ]
        assert frontend.http.call("GET", "/ready")[0] == 503
        answer = ask(frontend.url, CHAT, BODY)
        assert answer.status == 503
        assert "add a decode worker" in answer.json["error"]["message"]
        with workers(frontend, FakeWorker(41)):
            assert frontend.http.call("GET", "/ready")[0] == 200
            assert "decode worker" not in str(warnings(frontend))


def test_workers_that_are_not_taken_are_told_until_they_leave() -> None:
    with EmbeddedFrontend() as frontend, FakeWorker(43, tokenizer=None) as worker:
        with pytest.raises(ConfigError, match="pass the model's folder to register_llm"):
            frontend.put(worker)
        (told,) = warnings(frontend)
        assert "worker 43 in discovery is not accepted: its card names no tokenizer folder" in told
        frontend.put(worker, tokenizer=str(TINY_LLAMA))
        assert "not taken" not in str(warnings(frontend))
        frontend.core.remove_worker(43)
        with pytest.raises(ConfigError):
            frontend.put(worker)
        frontend.core.remove_worker(43)
        assert warnings(frontend) == []


def test_a_remote_indexer_of_no_use_is_told() -> None:
    flag = "--use-remote-indexer"
    with EmbeddedFrontend(flag, nobody()) as frontend, workers(frontend, FakeWorker(44)):
        assert warnings(frontend) == []
        assert ask(frontend.url, CHAT, BODY).status == 200
        (told,) = warnings(frontend)
        assert told.startswith(f"{flag}: ") and told.endswith("the prompts sent lately decide")


def test_chats_without_a_template_are_told(tmp_path: Path) -> None:
    shutil.copy(TINY_LLAMA / "tokenizer.json", tmp_path)
    flags = ("--tokenizer", str(tmp_path), "--kv-cache-block-size", "16")
    with EmbeddedFrontend(*flags) as frontend, FakeEngine("m") as fake, engines(frontend, fake):
        assert ask(frontend.url, CHAT, BODY).status == 200
        assert "chats are routed by load (1 so far)" in str(warnings(frontend))


def test_whose_block_size_is_wrong_is_told() -> None:
    with EmbeddedFrontend("--kv-cache-block-size", "32") as frontend:
        with workers(frontend, FakeWorker(45)):
            assert "--kv-cache-block-size is 32" in str(warnings(frontend))
        frontend.core.set_warnings(["NATS can't be reached"])
        assert warnings(frontend) == ["NATS can't be reached"]
