"""Every client against two real vLLM engines: opt-in, see support_engines.py.

`make clients` installs them all. The weights are random, so that an engine's grammar alone gives
calls and JSON their form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from service import VECTORS
from support_engines import needs_engines, vllm_engines
from support_frontend import Frontend

pytestmark = needs_engines

MODEL = "tiny-hermes"
USER: Any = [{"role": "user", "content": "How is the weather?"}]


class Trip(BaseModel):
    city: Literal["Bern", "Basel"]
    is_back: bool


SCHEMA: Any = {**Trip.model_json_schema(), "additionalProperties": False}
WEATHER: Any = {"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA}
# Without `strict` the engine's grammar takes any JSON for the arguments.
TOOL: Any = {"type": "function", "function": {**WEATHER, "strict": True}}


@pytest.fixture(scope="module")
def frontend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    with vllm_engines(tmp_path_factory.mktemp("engines"), 2, MODEL) as engines:
        workers = [each.worker() for each in engines]
        with Frontend("--worker", *workers, "--tokenizer", str(VECTORS / MODEL)) as frontend:
            frontend.wait_healthy(1, 2)
            yield frontend
            frontend.wait_idle()


@pytest.fixture(scope="module")
def openai(frontend: Frontend) -> Any:
    library = pytest.importorskip("openai")
    return library.OpenAI(base_url=frontend.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def claude(frontend: Frontend) -> Any:
    library = pytest.importorskip("anthropic")
    return library.Anthropic(base_url=frontend.url, api_key="none", max_retries=0)


def test_openai_chats(openai: Any) -> None:
    ask: Any = {"model": MODEL, "messages": USER, "max_tokens": 7, "temperature": 0}
    whole = openai.chat.completions.create(**ask)
    assert whole.usage.completion_tokens == 7
    options = {"include_usage": True}
    chunks = list(openai.chat.completions.create(**ask, stream=True, stream_options=options))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 7
    plain = openai.completions.create(model=MODEL, prompt="hi", max_tokens=3)
    assert plain.usage.completion_tokens == 3


@pytest.mark.parametrize("is_streaming", [False, True])
def test_openai_calls_tools(openai: Any, is_streaming: bool) -> None:
    ask: Any = {"model": MODEL, "messages": USER, "tools": [TOOL], "tool_choice": "required"}
    done = openai.chat.completions.create(**ask, max_tokens=200, stream=is_streaming)
    # Nothing but the limit ends the list of calls: the first is whole, the last need not be.
    if is_streaming:
        deltas = [chunk.choices[0].delta for chunk in done if chunk.choices]
        parts = [part for delta in deltas for part in delta.tool_calls or () if part.index == 0]
    else:
        parts = done.choices[0].message.tool_calls[:1]
    assert parts[0].function.name == "weather"
    Trip.model_validate_json("".join(part.function.arguments or "" for part in parts))


def test_openai_structures_output(openai: Any) -> None:
    ask: Any = {"model": MODEL, "messages": USER, "max_tokens": 200}
    done = openai.chat.completions.parse(**ask, response_format=Trip)
    assert isinstance(done.choices[0].message.parsed, Trip)


def test_openai_responses(openai: Any) -> None:
    first = openai.responses.create(model=MODEL, input="hi", max_output_tokens=5)
    assert first.usage.output_tokens == 5
    with openai.responses.stream(model=MODEL, input="hi", max_output_tokens=5) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    parsed = openai.responses.parse(
        model=MODEL, input="Plan a trip.", text_format=Trip, max_output_tokens=200
    )
    assert isinstance(parsed.output_parsed, Trip)
    # Only the engine that keeps the first response can go on.
    for _ in range(4):
        again = openai.responses.create(
            model=MODEL, input="go on", previous_response_id=first.id, max_output_tokens=5
        )
        assert again.usage.input_tokens > first.usage.input_tokens


def test_openai_is_told_what_the_engine_lacks(openai: Any) -> None:
    library = pytest.importorskip("openai")
    with pytest.raises(library.InternalServerError, match="no such API"):
        openai.embeddings.create(model=MODEL, input=["a"])
    with pytest.raises(library.NotFoundError, match="nobody"):
        openai.chat.completions.create(model="nobody", messages=USER)
    with pytest.raises(library.BadRequestError):
        openai.chat.completions.create(model=MODEL, messages=USER, max_tokens=-1)


def test_anthropic(claude: Any) -> None:
    ask: Any = {"model": MODEL, "messages": USER, "max_tokens": 7}
    ask["extra_body"] = {"temperature": 0}
    whole = claude.messages.create(**ask)
    assert whole.usage.output_tokens == 7 and whole.stop_reason == "max_tokens"
    with claude.messages.stream(**ask) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds[0] == "message_start" and streamed.content[0].text == whole.content[0].text
    counted = claude.messages.count_tokens(model=MODEL, messages=USER)
    used = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    assert counted.input_tokens == used


@pytest.mark.parametrize("is_streaming", [False, True])
def test_anthropic_offers_tools(claude: Any, is_streaming: bool) -> None:
    tool = {"name": "weather", "description": "Tells the weather.", "input_schema": SCHEMA}
    ask: Any = {"model": MODEL, "messages": USER, "max_tokens": 50, "tools": [tool]}
    ask["extra_body"] = {"temperature": 0}
    if is_streaming:
        with claude.messages.stream(**ask) as stream:
            done = stream.get_final_message()
    else:
        done = claude.messages.create(**ask)
    # The engine cannot force a call of this API into the tool's form.
    assert {block.type for block in done.content} <= {"text", "tool_use"}
    assert done.usage.output_tokens == 50 and done.stop_reason == "max_tokens"


def test_litellm(frontend: Frontend) -> None:
    litellm: Any = pytest.importorskip("litellm", reason="make clients installs LiteLLM")
    api: Any = {"api_base": frontend.url + "/v1", "api_key": "none", "model": "openai/" + MODEL}
    answer = litellm.completion(**api, messages=USER, max_tokens=7, temperature=0)
    chunks = litellm.completion(**api, messages=USER, max_tokens=7, temperature=0, stream=True)
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == answer.choices[0].message.content
    call = (
        litellm.completion(
            **api, messages=USER, max_tokens=200, tools=[TOOL], tool_choice="required"
        )
        .choices[0]
        .message.tool_calls[0]
    )
    Trip.model_validate_json(call.function.arguments)
    told = litellm.responses(**api, input="hi", max_output_tokens=16)
    assert told.usage.output_tokens == 16
    by_messages = litellm.completion(
        model="anthropic/" + MODEL, api_base=frontend.url, api_key="none", messages=USER,
        max_tokens=7,
    )  # fmt: skip
    assert by_messages.usage.completion_tokens == 7


@pytest.mark.parametrize("is_responses", [False, True])
def test_langchain(frontend: Frontend, is_responses: bool) -> None:
    library: Any = pytest.importorskip("langchain_openai", reason="make clients installs LangChain")
    fields: Any = {"base_url": frontend.url + "/v1", "api_key": "none", "model": MODEL}
    fields |= {"max_retries": 0, "temperature": 0, "use_responses_api": is_responses}
    brief = library.ChatOpenAI(**fields, max_tokens=16)
    answer = brief.invoke("hi")
    assert answer.usage_metadata["output_tokens"] == 16
    assert "".join(one.text for one in brief.stream("hi")) == answer.text
    model = library.ChatOpenAI(**fields, max_tokens=200)
    structured = model.with_structured_output(Trip, method="json_schema")
    assert isinstance(structured.invoke("Plan a trip."), Trip)


def test_the_openai_package_of_npm(frontend: Frontend, node: Callable[..., list[str]]) -> None:
    assert len(node("real.mjs", frontend.url + "/v1", MODEL)) == 5


def test_nothing_was_lost_on_the_way(frontend: Frontend) -> None:
    metrics = frontend.metrics()
    assert metrics.get("kvflash_token_mismatches_total", 0) == 0
    statuses = {
        name.partition('status="')[2][:3]
        for name in metrics
        if name.startswith("kvflash_requests_total")
    }
    assert statuses == {"200", "400", "404", "501"}
