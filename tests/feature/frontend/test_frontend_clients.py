"""Tools, structured output and more by official clients: two mockers behind a frontend."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from support_apis import CITY, WEATHER, library, two_mockers
from support_frontend import Frontend

if TYPE_CHECKING:
    import anthropic
    import openai

USER: Any = [{"role": "user", "content": "How is the weather?"}]
FUNCTION: Any = {"type": "function", "strict": True, **WEATHER["function"]}
SKILL: Any = {"name": "weather", "description": "Tells the weather.", "input_schema": CITY}


class Trip(BaseModel):
    city: str
    days: int
    stops: list[str]
    back: Trip | None


@pytest.fixture(scope="module")
def frontend() -> Iterator[Frontend]:
    with two_mockers() as frontend:
        yield frontend


@pytest.fixture(scope="module")
def client(frontend: Frontend) -> Iterator[openai.OpenAI]:
    with library("openai").OpenAI(
        base_url=frontend.url + "/v1", api_key="none", max_retries=0
    ) as client:
        yield client


@pytest.fixture(scope="module")
def claude(frontend: Frontend) -> Iterator[anthropic.Anthropic]:
    with library("anthropic").Anthropic(
        base_url=frontend.url, api_key="none", max_retries=0
    ) as client:
        yield client


def arguments(told: str) -> dict[str, Any]:
    """The arguments of a call, which must be what the tool takes."""
    found = json.loads(told)
    assert isinstance(found["city"], str) and found["days"] >= 1 and len(found) == 2
    return dict(found)


def test_openai_chats_call_tools(client: openai.OpenAI) -> None:
    chat: list[Any] = [*USER]
    tools: Any = [WEATHER]
    first = client.chat.completions.create(model="m", messages=chat, tools=tools).choices[0]
    assert first.finish_reason == "tool_calls" and first.message.tool_calls
    (call,) = first.message.tool_calls
    assert call.type == "function" and call.function.name == "weather"
    arguments(call.function.arguments)
    chat += [first.message, {"role": "tool", "tool_call_id": call.id, "content": "18 C"}]
    last = client.chat.completions.create(model="m", messages=chat, tools=tools).choices[0]
    assert (last.finish_reason, last.message.tool_calls) == ("stop", None)
    assert last.message.content


def test_openai_chats_stream_calls_and_text(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True}
    with client.chat.completions.stream(
        model="m",
        messages=USER,
        tools=[library("openai").pydantic_function_tool(Trip)],
        stream_options=options,
    ) as stream:
        kinds = {event.type for event in stream}
        done = stream.get_final_completion()
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert done.usage is not None and done.usage.completion_tokens > 20
    (call,) = done.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Trip)
    chunks = list(
        client.chat.completions.create(model="m", messages=USER, max_tokens=6, n=2, stream=True)
    )
    texts = {0: "", 1: ""}
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert {len(text) for text in texts.values()} == {6} and texts[0] != texts[1]


def test_openai_chats_and_responses_are_parsed(client: openai.OpenAI) -> None:
    chat = client.chat.completions.parse(model="m", messages=USER, response_format=Trip)
    assert isinstance(chat.choices[0].message.parsed, Trip)
    response = client.responses.parse(model="m", input="Plan a trip.", text_format=Trip)
    assert isinstance(response.output_parsed, Trip) and response.status == "completed"
    form: Any = {"type": "json_object"}
    plain = client.chat.completions.create(model="m", messages=USER, response_format=form)
    assert isinstance(json.loads(plain.choices[0].message.content or ""), dict)
    with pytest.raises(library("openai").LengthFinishReasonError):
        client.chat.completions.parse(model="m", messages=USER, response_format=Trip, max_tokens=5)


def test_openai_log_probabilities_stop_and_seed(client: openai.OpenAI) -> None:
    def ask(**fields: Any) -> Any:
        return client.chat.completions.create(
            model="m", messages=USER, max_tokens=40, **fields
        ).choices[0]

    told = ask(logprobs=True, top_logprobs=2)
    assert "".join(one.token for one in told.logprobs.content) == told.message.content
    assert {len(one.top_logprobs) for one in told.logprobs.content} == {2}
    assert ask(stop=[" "]).finish_reason == "stop" and " " not in ask(stop=" ").message.content
    texts = [ask(seed=seed).message.content for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    echo = client.completions.create(model="m", prompt="ab", echo=True, logprobs=1, max_tokens=2)
    assert echo.choices[0].text.startswith("ab") and echo.choices[0].logprobs is not None
    assert (echo.choices[0].logprobs.tokens or [])[:2] == ["a", "b"]


def test_openai_responses_call_tools(client: openai.OpenAI) -> None:
    with client.responses.stream(model="m", input="hi", tools=[FUNCTION]) as stream:
        kinds = [event.type for event in stream]
        first = stream.get_final_response()
    assert kinds.count("response.function_call_arguments.done") == 1
    (call,) = first.output
    assert call.type == "function_call" and call.name == "weather"
    arguments(call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "18 C"}
    # Only the worker that keeps the first response can go on.
    for _ in range(4):
        last = client.responses.create(
            model="m", input=[result], previous_response_id=first.id, tools=[FUNCTION]
        )
        assert last.output_text and last.status == "completed"
    told: Any = [{"role": "user", "content": "hi"}, call, result]
    again = client.responses.create(model="m", input=told, tools=[FUNCTION])
    assert again.output_text


def test_anthropic_calls_tools(claude: anthropic.Anthropic) -> None:
    chat: list[Any] = [*USER]
    first = claude.messages.create(model="m", max_tokens=300, messages=chat, tools=[SKILL])
    assert first.stop_reason == "tool_use"
    (block,) = first.content
    assert block.type == "tool_use" and block.name == "weather"
    arguments(json.dumps(block.input))
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "18 C"}
    chat += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    last = claude.messages.create(model="m", max_tokens=9, messages=chat, tools=[SKILL])
    assert [one.type for one in last.content] == ["text"]
    assert last.stop_reason == "max_tokens"


def test_anthropic_streams_calls_and_stops(claude: anthropic.Anthropic) -> None:
    choice: Any = {"type": "tool", "name": "weather"}
    with claude.messages.stream(
        model="m", max_tokens=300, messages=USER, tools=[SKILL], tool_choice=choice
    ) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert "input_json" in kinds and message.stop_reason == "tool_use"
    (block,) = message.content
    assert block.type == "tool_use"
    arguments(json.dumps(block.input))
    stopped = claude.messages.create(model="m", max_tokens=300, messages=USER, stop_sequences=[" "])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " ")
    parsed = claude.messages.parse(model="m", max_tokens=300, messages=USER, output_format=Trip)
    assert isinstance(parsed.parsed_output, Trip)


# The client's own remark that its translations are old.
@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
def test_openai_transcribes(client: openai.OpenAI) -> None:
    def sound() -> Any:
        return "a.wav", io.BytesIO(bytes(40_000))

    told = client.audio.transcriptions.create(model="m", file=sound())
    other = client.audio.translations.create(model="m", file=sound())
    assert told.text and other.text and told.text != other.text


def test_nothing_was_lost_on_the_way(frontend: Frontend) -> None:
    metrics = frontend.metrics()
    assert metrics.get("kvflash_token_mismatches_total", 0) == 0
    lost = [name for name in metrics if name.startswith("kvflash_requests_total") and '"5' in name]
    assert not lost
    frontend.wait_idle()
