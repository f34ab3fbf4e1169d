"""LiteLLM as a library, by `make clients`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support_apis import WEATHER
from support_frontend import Frontend

litellm: Any = pytest.importorskip("litellm", reason="make clients installs LiteLLM")

USER = [{"role": "user", "content": "How is the weather?"}]


@pytest.fixture
def openai_api(frontend: Frontend) -> dict[str, Any]:
    """Registers the frontend as an endpoint with OpenAI's APIs."""
    return {"api_base": frontend.url + "/v1", "api_key": "none", "model": "openai/m"}


def test_chats(openai_api: dict[str, Any]) -> None:
    answer = litellm.completion(**openai_api, messages=USER, max_tokens=7)
    assert (len(answer.choices[0].message.content), answer.usage.completion_tokens) == (7, 7)
    chunks = litellm.completion(**openai_api, messages=USER, max_tokens=7, stream=True)
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == answer.choices[0].message.content


@pytest.mark.parametrize("is_streaming", [False, True])
def test_tools(openai_api: dict[str, Any], is_streaming: bool) -> None:
    chat: list[Any] = [*USER]
    answer = litellm.completion(**openai_api, messages=chat, tools=[WEATHER], stream=is_streaming)
    if is_streaming:
        answer = litellm.stream_chunk_builder(list(answer), messages=chat)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"city", "days"}
    chat += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "18 C"}]
    last = litellm.completion(**openai_api, messages=chat, tools=[WEATHER])
    assert last.choices[0].message.content


def test_structured_output(openai_api: dict[str, Any]) -> None:
    schema = {"name": "w", "schema": WEATHER["function"]["parameters"], "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    answer = litellm.completion(**openai_api, messages=USER, response_format=form)
    assert set(json.loads(answer.choices[0].message.content)) == {"city", "days"}


def test_responses_and_embeddings(openai_api: dict[str, Any]) -> None:
    told = litellm.responses(**openai_api, input="hi", max_output_tokens=16)
    assert len(told.output[0].content[0].text) == 16
    data = litellm.embedding(**openai_api, input=["a", "b"]).data
    assert len(data) == 2


@pytest.mark.parametrize("is_streaming", [False, True])
def test_messages_of_anthropic(frontend: Frontend, is_streaming: bool) -> None:
    answer = litellm.completion(
        model="anthropic/m",
        api_base=frontend.url,
        api_key="none",
        messages=USER,
        max_tokens=300,
        tools=[WEATHER],
        stream=is_streaming,
    )
    if is_streaming:
        answer = litellm.stream_chunk_builder(list(answer), messages=USER)
    (call,) = answer.choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"city", "days"}


def test_errors(openai_api: dict[str, Any]) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**openai_api, "model": "openai/nobody"}, messages=USER)
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**openai_api, messages=USER, max_tokens=-1)
    with pytest.raises(litellm.RateLimitError):
        litellm.completion(
            **openai_api, messages=USER, extra_headers={"x-mocker-status": "429"}, num_retries=0
        )
