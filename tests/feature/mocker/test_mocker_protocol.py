"""OpenAI bodies: what is understood, what is refused, what is answered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvflash.mocker.config import MockerConfig
from kvflash.mocker.metrics import render
from kvflash.mocker.protocol import (
    CompletionAnswer,
    GenerationParams,
    parse_generation,
    parse_json,
    usage,
)
from kvflash.mocker.refusal import ApiError
from kvflash.mocker.request import Lora, Request
from kvflash.mocker.scheduler import Scheduler
from kvflash.mocker.tokenizer import ByteTokenizer

CONFIG = MockerConfig(model_name="m", lora_adapters=("first", "second"), max_model_len=200)


def parse(body: dict[str, Any], *, is_chat: bool = False) -> GenerationParams:
    return parse_generation(body, is_chat=is_chat, config=CONFIG, tokenizer=ByteTokenizer())


def test_completion_defaults() -> None:
    assert parse({"prompt": "ab"}) == GenerationParams(
        model="m",
        prompt_ids=[97, 98],
        max_tokens=16,
        lora=None,
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
    assert (params.model, params.lora) == ("second", Lora(2, "second"))
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
        ({"prompt": "a", "n": 2}, "n"),
        ({"prompt": "a", "echo": True}, "echo"),
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


@pytest.mark.parametrize("messages", [None, [], "hi", [5], [{"content": "a"}], [{"role": 1}]])
def test_malformed_messages_are_refused(messages: object) -> None:
    with pytest.raises(ApiError, match="messages must be") as error:
        parse({"messages": messages}, is_chat=True)
    assert error.value.status == 400


@pytest.mark.parametrize("model", ["third", "", 7])
def test_unknown_models_are_not_found(model: object) -> None:
    with pytest.raises(ApiError) as error:
        parse({"model": model, "prompt": "a"})
    assert (error.value.status, error.value.body["error"]["type"]) == (404, "NotFoundError")


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_what_is_not_a_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as error:
        parse_json(data)
    assert error.value.status == 400


def answered() -> Request:
    request = Request(request_id=1, prompt_ids=[1, 2, 3], planned_ids=[4, 5])
    request.tokens += [4, 5]
    request.cached_tokens = 2
    return request


def test_usage() -> None:
    assert usage(answered()) == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


@pytest.mark.parametrize("is_chat", [True, False])
def test_chunks_add_up_to_the_whole(is_chat: bool) -> None:
    answer = CompletionAnswer("1", "m", is_chat=is_chat)
    whole = answer.whole("ab", answered())
    chunks = [answer.text_chunk("a", is_last=False), answer.text_chunk("b", is_last=True)]
    if opening := answer.opening_chunk():
        chunks.insert(0, opening)
    assert (opening is not None) == is_chat
    choices = [chunk["choices"][0] for chunk in chunks]
    texts = [one["delta"]["content"] if is_chat else one["text"] for one in choices]
    choice = whole["choices"][0]
    assert "".join(texts) == (choice["message"]["content"] if is_chat else choice["text"])
    assert [one["finish_reason"] for one in choices[-2:]] == [None, "length"]
    assert {chunk["id"] for chunk in chunks} == {whole["id"]}
    assert whole["id"] == ("chatcmpl-1" if is_chat else "cmpl-1")
    last = answer.usage_chunk(answered())
    assert (last["choices"], last["usage"]) == ([], usage(answered()))
    json.dumps([whole, *chunks, last])


def test_metrics_escape_labels_and_count() -> None:
    config = MockerConfig(model_name='a"b\\c\n', block_size=16, num_gpu_blocks=64)
    scheduler = Scheduler(config)
    scheduler.add(Request(request_id=1, prompt_ids=[1] * 40, planned_ids=[2, 3]))
    scheduler.schedule()
    text = render(scheduler, config)
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
