"""Plans of answers: their ends, the visible part, and the effect of a seed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvflash.mocker.fields import ApiError
from kvflash.mocker.options import AnswerOptions, Tool
from kvflash.mocker.plan import Choice, Plan, plan_answer
from kvflash.mocker.scheduler import Request
from kvflash.mocker.tokenizer import ByteTokenizer, call_text, pieces

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = (Tool("weather", CITY), Tool("now", {"type": "object"}))


def plan(max_tokens: int = 60, seed: int = 7, index: int = 0, **options: Any) -> Plan:
    return plan_answer(
        AnswerOptions(**options), ByteTokenizer(), seed=seed, index=index, max_tokens=max_tokens
    )


def told_in_steps(planned: Plan, size: int) -> tuple[str, dict[int, str], int]:
    """Text, arguments by call, and the number of calls begun, as a stream tells them."""
    request = Request(prompt_ids=[1], planned_ids=planned.token_ids)
    choice = Choice(0, planned, request)
    text, calls, begun = "", dict[int, str](), 0
    while not choice.is_told:
        assert not choice.has_news
        request.tokens += planned.token_ids[request.output_tokens :][:size]
        step = choice.step()
        for delta in step.deltas:
            begun += delta.is_first and delta.call is not None
            if delta.call is None:
                text += delta.text
            else:
                calls[delta.call] = calls.get(delta.call, "") + delta.text
    assert step.is_last
    return text, calls, begun


def test_words_go_on_to_the_limit_or_end_by_themselves() -> None:
    whole = plan()
    assert (len(whole.token_ids), whole.finish_reason) == (60, "length")
    assert bytes(whole.token_ids).decode() == whole.text == whole.raw
    for text_tokens, count, reason in ((10, 10, "stop"), (60, 60, "stop"), (61, 60, "length")):
        ended = plan(text_tokens=text_tokens)
        assert (len(ended.token_ids), ended.finish_reason) == (count, reason)


def test_a_seed_and_a_number_draw_other_answers() -> None:
    texts = set()
    options = [(None, 0), (1, 0), (2, 0), (None, 1), (1, 1)]
    for chosen, index in options:
        answer = AnswerOptions(seed=chosen)
        twice = [
            plan_answer(answer, ByteTokenizer(), seed=7, index=index, max_tokens=60).text
            for _ in range(2)
        ]
        assert twice[0] == twice[1]
        texts.add(twice[0])
    assert len(texts) == len(options)


@pytest.mark.parametrize("has_stop", [True, False])
def test_a_stop_ends_the_answer_with_the_token_that_completes_it(has_stop: bool) -> None:
    words = plan().raw
    stop = words[20:23]
    at = words.index(stop)
    ended = plan(stop=["@@", words[40:44], stop], has_stop=has_stop)
    assert (ended.finish_reason, ended.stop_reason) == ("stop", stop)
    assert ended.text == words[: at + 3 * has_stop]
    assert len(ended.token_ids) == at + 3
    assert told_in_steps(ended, 1)[0] == told_in_steps(ended, 4)[0] == ended.text
    assert plan(stop=["@@"]) == plan()


def test_a_stop_token_ends_the_answer_before_a_later_stop() -> None:
    whole = plan()
    token_id, at = whole.token_ids[5], list(whole.token_ids).index(whole.token_ids[5])
    ended = plan(stop=[whole.raw[20:25]], stop_token_ids=frozenset([token_id, 1_000]))
    assert (ended.text, ended.stop_reason) == (whole.raw[:at], token_id)
    assert len(ended.token_ids) == at + 1


def test_a_call_is_what_a_prompt_repeats() -> None:
    called = plan(200, tools=TOOLS)
    (call,) = called.calls
    assert called.raw == call_text(call.name, call.arguments)
    assert (called.finish_reason, called.text) == ("tool_calls", "")
    for size in (1, 7, 200):
        assert told_in_steps(called, size) == ("", {0: call.arguments}, 1)
    assert plan(200, tools=TOOLS[:1], is_named=True).finish_reason == "stop"
    names = {plan(200, seed=seed, tools=TOOLS).calls[0].name for seed in range(20)}
    assert names == {"weather", "now"}


def test_calls_of_each_tool() -> None:
    called = plan(400, tools=TOOLS, calls_each=True)
    assert [call.name for call in called.told_calls] == ["weather", "now"]
    assert "city" in json.loads(called.told_calls[0].arguments)
    wanted = {at: call.arguments for at, call in enumerate(called.calls)}
    assert told_in_steps(called, 1) == told_in_steps(called, 50) == ("", wanted, 2)
    assert len({call.call_id for call in called.calls}) == 2
    many = [Tool(f"f{number}", {"type": "object"}) for number in range(20)]
    assert len(plan(2_000, tools=many, calls_each=True).calls) == 16


def test_a_call_and_a_value_that_do_not_fit_are_cut() -> None:
    called = plan(200, tools=TOOLS[:1])
    cut = plan(len(called.raw) - 20, tools=TOOLS[:1])
    assert cut.finish_reason == "length"
    (call,) = cut.told_calls
    assert called.calls[0].arguments.startswith(call.arguments) and len(call.arguments) > 2
    assert told_in_steps(cut, 1) == ("", {0: call.arguments}, 1)
    # Not even the name came.
    assert plan(5, tools=TOOLS[:1]).told_calls == []
    value = plan(200, schema=CITY)
    assert (value.finish_reason, list(json.loads(value.text))) == ("stop", ["city"])
    assert plan(5, schema=CITY).text == value.text[:5]
    assert plan(5, schema=CITY).finish_reason == "length"
    assert plan(200, schema=CITY, stop=['": ']).text == '{"city'


def test_a_schema_without_a_value_is_refused() -> None:
    with pytest.raises(ApiError, match="response_format: found no value") as error:
        plan(schema={"enum": [1], "allOf": [{"type": "string"}, {"type": "null"}]})
    assert error.value.body["error"]["param"] == "response_format"
    with pytest.raises(ApiError, match="tools: f: ") as error:
        plan(tools=[Tool("f", {"required": ["a"], "properties": {"a": False}})])
    assert error.value.body["error"]["param"] == "tools"


def test_each_token_has_its_share_of_the_text() -> None:
    tokenizer = ByteTokenizer()
    assert pieces(tokenizer, tokenizer.encode("ab", add_special_tokens=False), "ab") == ["a", "b"]
    ids = tokenizer.encode("a€b", add_special_tokens=False)
    shares = pieces(tokenizer, ids, "a€b")
    assert (len(shares), "".join(shares)) == (5, "a€b")
    assert pieces(tokenizer, [], "") == []
    assert "".join(pieces(tokenizer, [1, 256], "ab")) == "ab"
