"""LangChain's OpenAI classes, by `make clients`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support_frontend import Frontend

langchain: Any = pytest.importorskip("langchain_openai", reason="make clients installs LangChain")
tools: Any = pytest.importorskip("langchain_core.tools", reason="make clients installs LangChain")
messages: Any = pytest.importorskip(
    "langchain_core.messages", reason="make clients installs LangChain"
)
pydantic: Any = pytest.importorskip("pydantic", reason="make clients installs LangChain")


def weather(city: str, days: int) -> str:
    """Tell the weather of a city for some days."""
    return f"{city}: 18 C for {days} days"


class Trip(pydantic.BaseModel):  # type: ignore[misc]
    """A trip."""

    city: str
    stops: list[str]


def chat_model(frontend: Frontend, **fields: Any) -> Any:
    return langchain.ChatOpenAI(
        base_url=frontend.url + "/v1", api_key="none", model="m", max_retries=0, **fields
    )


@pytest.mark.parametrize("is_responses", [False, True])
def test_chats(frontend: Frontend, is_responses: bool) -> None:
    model = chat_model(frontend, max_tokens=16, use_responses_api=is_responses)
    answer = model.invoke("hi")
    assert len(answer.text) == 16
    assert answer.usage_metadata["output_tokens"] == 16
    assert "".join(chunk.text for chunk in model.stream("hi")) == answer.text
    assert [one.text for one in model.batch(["hi", "hi"])] == [answer.text] * 2


def test_a_chat_that_is_awaited(frontend: Frontend) -> None:
    async def ask() -> tuple[str, str]:
        model = chat_model(frontend, max_tokens=16)
        chunks = [chunk.text async for chunk in model.astream("hi")]
        return (await model.ainvoke("hi")).text, "".join(chunks)

    # Once: the connections of a client that LangChain keeps belong to the first loop.
    text, streamed = asyncio.run(ask())
    assert len(text) == 16 and text == streamed


@pytest.mark.parametrize("is_responses", [False, True])
def test_an_agent(frontend: Frontend, is_responses: bool) -> None:
    model = chat_model(frontend, use_responses_api=is_responses).bind_tools([weather])
    turns = [messages.HumanMessage("How is the weather?")]
    called = model.invoke(turns)
    (call,) = called.tool_calls
    assert call["name"] == "weather" and weather(**call["args"])
    result = tools.tool(weather).invoke(call)
    last = model.invoke([*turns, called, result])
    assert last.text and not last.tool_calls
    streamed = None
    for chunk in model.stream(turns):
        streamed = chunk if streamed is None else streamed + chunk
    assert [one["args"] for one in streamed.tool_calls] == [call["args"]]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(frontend: Frontend, method: str) -> None:
    model = chat_model(frontend).with_structured_output(Trip, method=method)
    assert isinstance(model.invoke("Plan a trip."), Trip)


def test_embeddings(frontend: Frontend) -> None:
    model = langchain.OpenAIEmbeddings(
        base_url=frontend.url + "/v1", api_key="none", model="m", check_embedding_ctx_length=False
    )
    vectors = model.embed_documents(["a", "b", "a"])
    assert vectors[0] == vectors[2] != vectors[1]
