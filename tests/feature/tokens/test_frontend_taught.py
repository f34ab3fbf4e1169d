"""Chats without a chat template: matched by the ids that came with answers to earlier turns."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service import until
from support_frontend import CHAT, Frontend, Mocker
from support_tokens import TINY_LLAMA

BLOCK = 16
FAST = ("--speedup-ratio", "1000", "--tokenizer", str(TINY_LLAMA))
BODY: dict[str, Any] = {"model": "m", "max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def mocker() -> Iterator[Mocker]:
    with Mocker(*FAST, workers=2) as mocker:
        yield mocker


@pytest.fixture
def frontend(mocker: Mocker, tmp_path: Path) -> Iterator[Frontend]:
    shutil.copy(TINY_LLAMA / "tokenizer.json", tmp_path)
    workers = [mocker.spec(index) for index in range(2)]
    flags = ("--worker", *workers, "--tokenizer", str(tmp_path), "--router-mode", "kv")
    with Frontend(*flags) as frontend:
        frontend.wait_healthy(*frontend.workers())
        yield frontend


def ask(frontend: Frontend, body: dict[str, Any]) -> tuple[dict[str, Any], str, int, int]:
    """The answer's message, its worker, tokens expected to be cached and those that were."""
    status, answer, headers = frontend.http.call("POST", CHAT, body)
    assert status == 200, answer
    if body.get("stream"):
        events = [line[6:] for line in answer.decode().splitlines() if line.startswith("data: {")]
        chunks = [json.loads(event) for event in events]
        assert all(not chunk.get("prompt_token_ids") for chunk in chunks)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        message = {"role": "assistant", "content": text}
        usage = chunks[-1]["usage"]
    else:
        assert answer["prompt_token_ids"] is None
        choices = answer["choices"]
        message, usage = choices[0]["message"], answer["usage"]
    assert all(not choice.get("token_ids") for choice in choices)
    expected = int(headers["x-kvflash-overlap-blocks"]) * BLOCK
    return (
        message,
        headers["x-kvflash-worker"],
        expected,
        usage["prompt_tokens_details"]["cached_tokens"],
    )


def wait_for_events(frontend: Frontend, body: dict[str, Any]) -> None:
    until(lambda: any(frontend.overlaps(body).values()), "events of the last turn")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_turns_follow_each_other(frontend: Frontend, is_streamed: bool) -> None:
    more: dict[str, Any] = {}
    if is_streamed:
        more = {"stream": True, "stream_options": {"include_usage": True}}
    talks: dict[str, list[dict[str, Any]]] = {f"{n} {is_streamed}": [] for n in range(4)}
    workers: dict[str, str] = {}
    matched = 0
    for turn in range(4):
        for name, messages in talks.items():
            text = f"Conversation {name}, turn {turn}: " + "tell me more of the river. " * 12
            messages.append({"role": "user", "content": text})
            body = {**BODY, **more, "messages": messages}
            assert frontend.explain(body)["prompt_source"] == ("taught" if turn else "unknown")
            if turn:
                wait_for_events(frontend, body)
            message, worker, expected, cached = ask(frontend, body)
            if turn:
                assert worker == workers[name], (name, turn)
                assert 0 < expected <= cached, (name, turn)
                matched += 1
            workers[name] = worker
            messages.append(message)
    assert matched == 12
    told = frontend.metrics()
    assert told['kvflash_taught_prompts_total{outcome="learned"}'] == 16
    assert told.get('kvflash_taught_prompts_total{outcome="corrected"}', 0) == 0
    assert told.get("kvflash_token_mismatches_total", 0) == 0
    assert {one["tells_token_ids"] for one in frontend.workers().values()} <= {True, None}
