"""OpenAI bodies: what is understood, what is refused, what is answered."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from kvflash.mocker.config import MockerConfig
from kvflash.mocker.fields import ApiError
from kvflash.mocker.messages import as_chat
from kvflash.mocker.metrics import render
from kvflash.mocker.middleware import errors
from kvflash.mocker.options import AnswerOptions
from kvflash.mocker.protocol import (
    CHAT_TOKENS,
    GenerationParams,
    parse_generation,
    parse_json,
    parse_tokens,
)
from kvflash.mocker.scheduler import Request, Scheduler
from kvflash.mocker.tokenizer import ByteTokenizer

CONFIG = MockerConfig(model_name="m", lora_adapters=("first", "second"), max_model_len=200)


def parse(body: dict[str, Any], *, is_chat: bool = False) -> GenerationParams:
    return parse_generation(body, is_chat=is_chat, config=CONFIG, tokenizer=ByteTokenizer())


def test_completion_defaults() -> None:
    assert parse({"prompt": "ab"}) == GenerationParams(
        model="m",
        prompt_ids=[97, 98],
        max_tokens=16,
        lora_name=None,
        cache_salt=None,
        is_streaming=False,
        has_usage_chunk=False,
    )


def test_chat_with_everything() -> None:
    params = parse(
        {
            "model": "second",
            "messages": [{"role": "user", "content": "a"}],
            "max_completion_tokens": 3,
            "max_tokens": 4,
            "cache_salt": "s",
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.7,
        },
        is_chat=True,
    )
    assert bytes(params.prompt_ids) == b"<|user|>\na\n<|assistant|>\n"
    assert (params.model, params.lora_name) == ("second", "second")
    assert (params.max_tokens, params.cache_salt) == (3, "s")
    assert (params.is_streaming, params.has_usage_chunk) == (True, True)


def test_prompt_shapes() -> None:
    for prompt in ("ab", [97, 98], ["ab"], [[97, 98]]):
        assert list(parse({"prompt": prompt}).prompt_ids) == [97, 98]


def test_default_output_is_cut_to_what_is_left() -> None:
    assert parse({"prompt": "a" * 190}).max_tokens == 10
    assert parse({"prompt": "a" * 199, "max_tokens": 1}).max_tokens == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1, 2**32]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": "a" * 200}, "prompt"),
        ({"prompt": "a" * 199, "max_tokens": 2}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 33}, "n"),
        ({"prompt": "a", "echo": 1}, "echo"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "seed": "s"}, "seed"),
        ({"prompt": "a", "stop": ""}, "stop"),
        ({"prompt": "a", "stop": ["b", 1]}, "stop"),
        ({"prompt": "a", "stop": ["b"] * 65}, "stop"),
        ({"prompt": "a", "stop_token_ids": ["b"]}, "stop_token_ids"),
        ({"prompt": "a", "response_format": "json"}, "response_format"),
        ({"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format"),
        ({"prompt": "a", "stream": "yes"}, "stream"),
        ({"prompt": "a", "stream": True, "stream_options": 1}, "stream_options"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "a", "cache_salt": 7}, "cache_salt"),
    ],
)
def test_refusals_name_the_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        parse(body)
    assert error.value.status == 400
    assert error.value.body["error"]["param"] == param
    assert error.value.body["error"]["code"] == 400


TOOL = {"type": "function", "function": {"name": "f"}}
CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "f"}, "tools"),
        ({"tools": [1]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"function": {"name": ""}}]}, "tools"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "g"}}}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
    ],
)
def test_refusals_of_chats_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        parse({"messages": [{"role": "user", "content": "a"}], **fields}, is_chat=True)
    assert (error.value.status, error.value.body["error"]["param"]) == (400, param)


def test_tools_are_called_until_their_results_are_there() -> None:
    def called(*messages: dict[str, Any], **fields: Any) -> list[str]:
        body = {"messages": list(messages), "tools": [TOOL], **fields}
        return [tool.name for tool in parse(body, is_chat=True).options.tools]

    user, result = {"role": "user", "content": "a"}, {"role": "tool", "content": "b"}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert called(user) == called(user, tool_choice="auto") == ["f"]
    # A remark beside the results does not ask anew.
    for chat in ([user, asked, result], [user, asked, result, user]):
        assert called(*chat) == called(*chat, tool_choice="auto") == []
        assert called(*chat, tool_choice="required") == ["f"]
    assert called(user, asked, result, {"role": "assistant", "content": "x"}, user) == ["f"]
    assert called(user, tool_choice="none") == []
    assert parse({"messages": [user], "tools": [TOOL]}, is_chat=True).options.is_named is False


def test_a_chat_without_a_limit_ends_by_itself() -> None:
    params = parse({"messages": [{"role": "user", "content": "a"}]}, is_chat=True)
    assert (params.max_tokens, params.options.text_tokens) == (200 - 25, 128)
    assert parse({"prompt": "a"}).options == AnswerOptions()


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hi",
        [5],
        [{"content": "a"}],
        [{"role": 1}],
        [{"role": "assistant", "tool_calls": [{"function": {}}]}],
    ],
)
def test_malformed_messages_are_refused(messages: object) -> None:
    with pytest.raises(ApiError, match="messages must be") as error:
        parse({"messages": messages}, is_chat=True)
    assert error.value.status == 400


def test_what_is_nested_too_deeply_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    nested, told = {"type": deep}, "a value that is nested too deeply"
    for check in (
        lambda: parse({"prompt": "a", "stream": deep}),
        lambda: parse({**CHAT, "tools": [TOOL], "tool_choice": nested}, is_chat=True),
        lambda: as_chat({**CHAT, "max_tokens": 1, "tools": [{"name": "f"}], "tool_choice": nested}),
        lambda: parse_tokens({"token_ids": [1], "cache_salt": deep}, CONFIG),
    ):
        with pytest.raises(ApiError, match=told) as error:
            check()
        assert error.value.status == 400

    async def handle(_: web.Request) -> web.StreamResponse:
        return web.json_response({"metadata": deep})

    request = make_mocked_request("POST", "/v1/responses")
    assert asyncio.run(errors(request, handle)).status == 400


@pytest.mark.parametrize("model", ["third", "", 7])
def test_unknown_models_are_not_found(model: object) -> None:
    with pytest.raises(ApiError) as error:
        parse({"model": model, "prompt": "a"})
    assert (error.value.status, error.value.body["error"]["type"]) == (404, "NotFoundError")


def test_the_runtime_names_an_adapter_or_none() -> None:
    for lora_name, found in (("first", "first"), ("", None), (None, None), ("m", None)):
        assert parse_tokens({"token_ids": [1], "lora_name": lora_name}, CONFIG).lora_name == found


def test_the_runtimes_limit_is_none_if_it_is_all_the_room() -> None:
    for limit, text_tokens in ((199, CHAT_TOKENS), (198, None)):
        request = {"token_ids": [1], "stop_conditions": {"max_tokens": limit}}
        params = parse_tokens(request, CONFIG)
        assert (params.max_tokens, params.options.text_tokens) == (limit, text_tokens)


TOKEN_IDS = "token_ids must be a list of token ids in 0..=4294967295"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"token_ids": "ab"}, f"{TOKEN_IDS}, got 'ab'"),
        ({"token_ids": None}, f"{TOKEN_IDS}, got None"),
        ({"token_ids": [1, -1, 2]}, f"{TOKEN_IDS}, got a list with -1"),
        ({"token_ids": [1, 2**32]}, f"{TOKEN_IDS}, got a list with 4294967296"),
        ({"token_ids": [None]}, f"{TOKEN_IDS}, got a list with None"),
        ({"token_ids": []}, "token_ids must have at least one token"),
        (
            {"stop_conditions": {"max_tokens": 200}},
            "stop_conditions.max_tokens must be in 1..=199 (a context of 200 tokens less the "
            "prompt), got 200",
        ),
        ({"lora_name": {}}, "lora_name must be text, got {}"),
        ({"lora_name": []}, "lora_name must be text, got []"),
        ({"lora_name": 0}, "lora_name must be text, got 0"),
        ({"lora_name": "no"}, "lora_name 'no' is not one of ['first', 'second']"),
    ],
)
def test_refusals_of_the_runtimes_requests(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ApiError) as error:
        parse_tokens({"token_ids": [1], **fields}, CONFIG)
    assert told == str(error.value)


def test_a_prompt_that_is_neither_text_nor_tokens_is_shown() -> None:
    wanted = r"^prompt must be one string or one list of token ids in 0\.\.=4294967295, got "
    for prompt, got in ((5, "5"), (["a", "b"], "a list with 'a'"), ([1, True], "a list with True")):
        with pytest.raises(ApiError, match=f"{wanted}{got}$"):
            parse({"prompt": prompt})


SURROGATE = '{"a": "\\ud800"}'


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{", b"[1]", b"\xff", b"[" * 100_000),
        *(SURROGATE.encode(), SURROGATE.encode("utf-16"), b'{"a": "\xed\xa0\x80"}'),
    ],
)
def test_what_is_not_a_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as error:
        parse_json(data)
    assert error.value.status == 400


def test_metrics_escape_labels_and_count() -> None:
    config = MockerConfig(model_name='a"b\\c\n', block_size=16, num_gpu_blocks=64)
    scheduler = Scheduler(config)
    scheduler.add(Request(prompt_ids=[1] * 40, planned_ids=[2, 3]))
    scheduler.schedule()
    text = render(scheduler, config, 1.5)
    labels = '{engine="0",model_name="a\\"b\\\\c\\n"}'
    lines = text.splitlines()
    assert f"vllm:num_requests_running{labels} 1" in lines
    assert f"vllm:num_requests_waiting{labels} 0" in lines
    assert f"vllm:kv_cache_usage_perc{labels} {3 / 64}" in lines
    assert f"vllm:prefix_cache_queries_total{labels} 40" in lines
    assert f"vllm:prefix_cache_hits_total{labels} 0" in lines
    assert f"vllm:prompt_tokens_total{labels} 40" in lines
    assert (
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="64",enable_prefix_caching="True"} 1'
        in lines
    )
    samples = [line for line in lines if not line.startswith("#")]
    assert len(samples) * 3 == len(lines)
