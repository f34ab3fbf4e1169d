"""Reasoning and tool calls in the answers of token workers, from the tokens to OpenAI's fields."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvflash.errors import ConfigError
from support_frontend import CHAT, COMPLETIONS, ask
from support_tokens import (
    TINY_LLAMA,
    TOKENIZER,
    Ask,
    EmbeddedFrontend,
    FakeWorker,
    say,
    workers,
)

MANUAL = Path(__file__).parents[3] / "docs" / "runtime.md"
NAME = re.compile(r"`(\w+)`")
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
ARGUMENTS = '{"city": "Zürich </tool_call>", "days": 1.50}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
THOUGHT = "a < b, so I ask"
SAID = f"<think>{THOUGHT}</think>\n\nI look. {CALL}\n{CALL}"


@pytest.fixture(scope="module")
def frontend() -> Iterator[EmbeddedFrontend]:
    flags = ("--reasoning-parser", "qwen3", "--tool-call-parser", "hermes")
    with EmbeddedFrontend(*flags) as running:
        yield running


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "Say it"}], **more}


def whole(frontend: EmbeddedFrontend, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    answer = ask(frontend.url, CHAT, body)
    assert answer.status == 200, answer.body
    (choice,) = answer.json["choices"]
    return choice["message"], choice["finish_reason"]


def streamed(frontend: EmbeddedFrontend, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """A stream put together as OpenAI's clients do it."""
    events = ask(frontend.url, CHAT, {**body, "stream": True}).events
    message: dict[str, Any] = {}
    for event in events:
        (choice,) = event["choices"]
        for key, value in choice["delta"].items():
            if key == "tool_calls":
                for call in value:
                    calls = message.setdefault(key, [])
                    assert call.pop("index") == len(calls)
                    calls.append(call)
            else:
                message[key] = message.get(key, "") + value
    return message, events[-1]["choices"][0]["finish_reason"]


def calls_of(message: dict[str, Any]) -> list[tuple[str, str]]:
    calls = message.get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls)
    assert {call["type"] for call in calls} <= {"function"}
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize("at_once", [1, 3, 1_000])
def test_a_message_has_reasoning_content_and_calls(
    frontend: EmbeddedFrontend, at_once: int
) -> None:
    with workers(frontend, FakeWorker(51, say(SAID, at_once))):
        for answer in (whole, streamed):
            message, reason = answer(frontend, chat(tools=TOOLS))
            assert message["role"] == "assistant"
            assert message["reasoning_content"] == THOUGHT
            assert message["content"] == "\n\nI look. "
            assert calls_of(message) == [("weather", ARGUMENTS)] * 2
            assert reason == "tool_calls"


def test_a_message_of_calls_alone_has_no_content(frontend: EmbeddedFrontend) -> None:
    with workers(frontend, FakeWorker(52, say(f"\n{CALL}\n"))):
        message, reason = whole(frontend, chat(tools=TOOLS, tool_choice="auto"))
        assert (message["content"], reason) == (None, "tool_calls")
        assert calls_of(message) == [("weather", ARGUMENTS)]
        message, _ = streamed(frontend, chat(tools=TOOLS))
        assert message["content"] == ""


def test_without_tools_calls_are_content(frontend: EmbeddedFrontend) -> None:
    with workers(frontend, FakeWorker(53, say(SAID))):
        for more in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
            for answer in (whole, streamed):
                message, reason = answer(frontend, chat(**more))
                assert message["content"] == SAID.partition("</think>")[2]
                assert (message["reasoning_content"], reason) == (THOUGHT, "stop")
                assert "tool_calls" not in message
        answer = ask(frontend.url, COMPLETIONS, {"model": "m", "prompt": "Say", "max_tokens": 999})
        assert answer.json["choices"][0]["text"] == SAID


def test_a_call_that_is_cut_off_is_content(frontend: EmbeddedFrontend) -> None:
    with workers(frontend, FakeWorker(54, say(CALL, finish="length"))):
        for answer in (whole, streamed):
            message, reason = answer(frontend, chat(tools=TOOLS, stop="days"))
            assert (message["content"], reason) == (CALL.partition("days")[0], "stop")
            message, reason = answer(frontend, chat(tools=TOOLS, max_tokens=9))
            assert reason == "length" and CALL.startswith(message["content"])
            assert "tool_calls" not in message


def test_a_stream_that_breaks_off_gives_out_what_was_held_back(frontend: EmbeddedFrontend) -> None:
    said = "<tool_call> {"

    def breaks_off(one: Ask) -> bool:
        one.item(*TOKENIZER.encode(said, add_special_tokens=False))
        return one.error("internal", "the engine died")

    with workers(frontend, FakeWorker(55, breaks_off)):
        *events, last = ask(frontend.url, CHAT, chat(tools=TOOLS, stream=True)).events
        deltas = [event["choices"][0]["delta"] for event in events]
        assert "".join(delta.get("content", "") for delta in deltas) == said
        assert "the engine died" in last["error"]["message"]


def test_a_template_may_open_the_reasoning(frontend: EmbeddedFrontend, tmp_path: Path) -> None:
    said = f"{THOUGHT}</think>So."
    for end, wanted in (("<think>\n", (THOUGHT, "So.")), ("", (None, said))):
        folder = shutil.copytree(TINY_LLAMA, tmp_path / f"template{len(end)}")
        template = "{{ messages[0].content }} assistant:" + end
        (folder / "chat_template.jinja").write_text(template)
        with workers(frontend, FakeWorker(58, say(said), tokenizer=str(folder))):
            for answer in (whole, streamed):
                message, _ = answer(frontend, chat())
                assert (message.get("reasoning_content"), message["content"]) == wanted


def test_a_card_names_its_own_formats(frontend: EmbeddedFrontend) -> None:
    said = '◁think▷I ask◁/think▷[TOOL_CALLS] [{"name": "weather", "arguments": {}}]'
    card = {"reasoning_parser": "kimi", "tool_call_parser": "mistral"}
    with workers(frontend, FakeWorker(56, say(said), **card)):
        message, reason = whole(frontend, chat(tools=TOOLS))
        assert (message["reasoning_content"], message["content"]) == ("I ask", None)
        assert (calls_of(message), reason) == ([("weather", "{}")], "tool_calls")
        assert len(message["tool_calls"][0]["id"]) == 9


def test_a_worker_whose_card_names_an_unknown_format_serves_text() -> None:
    with (
        EmbeddedFrontend() as frontend,
        workers(frontend, FakeWorker(57, say(SAID), tool_call_parser="herms")),
    ):
        for answer in (whole, streamed):
            message, reason = answer(frontend, chat(tools=TOOLS))
            assert message == {"role": "assistant", "content": SAID}
            assert reason == "stop"
        warnings = " ".join(frontend.http.get("/health")["warnings"])
        assert "worker 57: its card's tool_call_parser must be one of hermes, " in warnings
        assert 'got "herms"; did you mean "hermes"?' in warnings


@pytest.mark.parametrize(
    ("flag", "name", "known", "hint"),
    [
        ("--reasoning-parser", "deepseek-r1", "deepseek_r1, ", '; did you mean "deepseek_r1"?'),
        ("--tool-call-parser", "xml", "hermes, llama3_json, mistral, ", 'got "xml"'),
    ],
)
def test_an_unknown_flag_is_refused(flag: str, name: str, known: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused, EmbeddedFrontend(flag, name):
        pass
    message = str(refused.value)
    assert message.startswith(f"{flag} must be one of ")
    assert known in message and message.endswith(hint)
    names = message.partition(" must be one of ")[2].partition(", got ")[0].split(", ")
    assert sorted(documented(flag)) == names


def documented(flag: str) -> list[str]:
    """The names in the manual's table of a flag."""
    table = MANUAL.read_text(encoding="utf-8").partition(f"| `{flag}` |")[2].partition("\n\n")[0]
    return [name for row in table.splitlines()[2:] for name in NAME.findall(row.split("|")[1])]
