"""Answers of every API over HTTP: whole, streamed, and what both say of their end."""

from __future__ import annotations

import gzip
import io
import json
import wave
from collections.abc import Iterator
from typing import Any

import pytest

from service import Http
from support_frontend import Mocker, ask

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
USER = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
# In the words of responses and of messages.
FUNCTION = {"type": "function", "name": "weather", "parameters": CITY}
SKILL = {"name": "weather", "input_schema": CITY}


@pytest.fixture(scope="module")
def mocker() -> Iterator[Mocker]:
    with Mocker("--speedup-ratio", "1000", "--max-model-len", "2000") as mocker:
        yield mocker


@pytest.fixture
def http(mocker: Mocker) -> Http:
    return mocker.http[0]


def events(mocker: Mocker, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, without their names, which their data repeat."""
    answer = ask(mocker.url, path, {**body, "stream": True})
    assert answer.status == 200, answer.body
    lines = [line for line in answer.body.decode().splitlines() if line.startswith("data: {")]
    return [json.loads(line[6:]) for line in lines]


def delta_sum(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The choice that the chunks of a chat add up to."""
    whole: dict[str, Any] = {"content": "", "calls": {}, "finish_reason": None}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            assert whole["finish_reason"] is None, "nothing comes after the end"
            whole["finish_reason"] = choice["finish_reason"]
            whole["content"] += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", []):
                function = call["function"]
                first = whole["calls"].setdefault(
                    call["index"], {"id": call.get("id"), "name": function.get("name"), "text": ""}
                )
                first["text"] += function["arguments"]
    return whole


def test_chats_stream_what_they_answer(mocker: Mocker, http: Http) -> None:
    for fields in (
        {"max_tokens": 9},
        {},
        {"response_format": {"type": "json_object"}},
        {"tools": [TOOL]},
        {"tools": [TOOL, TOOL], "parallel_tool_calls": True},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {"n": 3, "max_tokens": 7, "seed": 4},
    ):
        body = {"messages": USER, **fields}
        choices = http.post(CHAT, body)["choices"]
        chunks = events(mocker, CHAT, body)
        assert [choice["index"] for choice in choices] == list(range(fields.get("n", 1)))
        for choice in choices:
            streamed, message = delta_sum(chunks, choice["index"]), choice["message"]
            assert streamed["finish_reason"] == choice["finish_reason"]
            assert streamed["content"] == (message["content"] or "")
            calls = [
                {"id": c["id"], "name": c["function"]["name"], "text": c["function"]["arguments"]}
                for c in message.get("tool_calls", [])
            ]
            assert list(streamed["calls"].values()) == calls
            for call in calls:
                assert isinstance(json.loads(call["text"])["city"], str)
        assert len({choice["message"]["content"] for choice in choices}) == len(choices)


def test_finish_reasons(http: Http) -> None:
    def reason(**fields: Any) -> str:
        return str(http.post(CHAT, {"messages": USER, **fields})["choices"][0]["finish_reason"])

    named = {"type": "function", "function": {"name": "weather"}}
    assert reason(max_tokens=3) == "length"
    assert reason() == "stop"
    assert reason(tools=[TOOL]) == reason(tools=[TOOL], tool_choice="required") == "tool_calls"
    assert reason(tools=[TOOL], tool_choice=named) == "stop"
    assert reason(tools=[TOOL], max_tokens=3) == "length"
    assert reason(tools=[TOOL], tool_choice="none") == "stop"
    assert reason(response_format={"type": "json_object"}) == "stop"
    vowels = http.post(CHAT, {"messages": USER, "stop": list("aeiou")})["choices"][0]
    assert (vowels["finish_reason"], vowels["stop_reason"] in set("aeiou")) == ("stop", True)
    assert not set(vowels["message"]["content"]) & set("aeiou")


def test_usage_counts_all_answers_of_a_stream(mocker: Mocker) -> None:
    body = {"messages": USER, "max_tokens": 5, "n": 2, "stream_options": {"include_usage": True}}
    last = events(mocker, CHAT, body)[-1]
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (26, 10)


def test_an_agent_calls_and_then_answers(http: Http) -> None:
    chat: dict[str, Any] = {"messages": list(USER), "tools": [TOOL]}
    message = http.post(CHAT, chat)["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "18 C"}
    chat["messages"] += [message, result]
    answer = http.post(CHAT, chat)
    assert answer["choices"][0]["finish_reason"] == "stop"
    # The call was generated as the next prompt repeats it: only its end is new.
    first = http.post("/tokenize", {**chat, "messages": USER})["count"]
    called = answer["usage"]["prompt_tokens"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > (first + called) / 2


def test_log_probabilities(mocker: Mocker, http: Http) -> None:
    body = {"messages": USER, "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    choice = http.post(CHAT, body)["choices"][0]
    entries = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == choice["message"]["content"]
    for entry in entries:
        likely = entry["top_logprobs"]
        assert (likely[0]["token"], likely[0]["logprob"]) == (entry["token"], entry["logprob"])
        assert len({one["token"] for one in likely}) == 3
        assert [one["logprob"] for one in likely] == sorted(
            (one["logprob"] for one in likely), reverse=True
        )
    chunks = events(mocker, CHAT, body)
    streamed = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [entry for one in streamed for entry in one["content"]] == entries
    # Of a call even those of the marks, which no text tells.
    told = {"messages": USER, "tools": [TOOL], "logprobs": True, "return_token_ids": True}
    choice = http.post(CHAT, told)["choices"][0]
    chunks = [chunk["choices"][0] for chunk in events(mocker, CHAT, told)]
    ids = [token_id for chunk in chunks for token_id in chunk.get("token_ids", [])]
    tokens = [one["token"] for c in chunks if c["logprobs"] for one in c["logprobs"]["content"]]
    assert bytes(ids).decode() == "".join(tokens) and "".join(tokens).startswith("<tool_call>")
    assert ids == choice["token_ids"]
    body["top_logprobs"] = 0
    entries = http.post(CHAT, body)["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in entries)


@pytest.mark.parametrize("prompt", ["ab", [97, 98], "a€"])
def test_echo(mocker: Mocker, http: Http, prompt: Any) -> None:
    text = "ab" if isinstance(prompt, list) else prompt
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 4}
    choice = http.post(COMPLETIONS, body)["choices"][0]
    assert choice["text"].startswith(text) and len(choice["text"]) == len(text) + 4
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    assert told["token_logprobs"][0] is None and None not in told["token_logprobs"][1:]
    assert told["text_offset"][-1] == len(choice["text"]) - 1
    assert {len(one) for one in told.values()} == {len(text.encode()) + 4}
    streamed = [chunk["choices"][0] for chunk in events(mocker, COMPLETIONS, body)]
    assert "".join(one["text"] for one in streamed) == choice["text"]
    for key, values in told.items():
        assert [value for one in streamed for value in one["logprobs"][key]] == values
    bare = http.post(COMPLETIONS, {**body, "logprobs": 0})["choices"][0]["logprobs"]
    assert bare["top_logprobs"] is None and bare["tokens"] == told["tokens"]


def test_responses_call_and_end(mocker: Mocker, http: Http) -> None:
    body = {"input": "hi", "tools": [FUNCTION, {"type": "web_search"}]}
    whole = http.post(RESPONSES, body)
    assert (whole["status"], whole["tools"]) == ("completed", body["tools"])
    (call,) = whole["output"]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "weather", "completed")
    told = events(mocker, RESPONSES, body)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    deltas = [one["delta"] for one in told if one["type"].endswith("arguments.delta")]
    assert "".join(deltas) == call["arguments"]
    (streamed,) = told[-1]["response"]["output"]
    assert {**streamed, "id": 0} == {**call, "id": 0}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "18 C"}
    # The next turn repeats the call, or names the response that made it.
    for turn in (
        {"input": [{"role": "user", "content": "hi"}, call, result]},
        {"input": [result], "previous_response_id": whole["id"]},
    ):
        answer = http.post(RESPONSES, {**turn, "tools": [FUNCTION]})
        assert [item["type"] for item in answer["output"]] == ["message"]
        assert answer["usage"]["input_tokens_details"]["cached_tokens"] > 200
    both = {**body, "tools": [FUNCTION, FUNCTION], "parallel_tool_calls": True}
    told = events(mocker, RESPONSES, both)
    for kind in ("response.output_item.added", "response.output_item.done"):
        assert [one["output_index"] for one in told if one["type"] == kind] == [0, 1]
    cut = http.post(RESPONSES, {"input": "hi", "max_output_tokens": 2})
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"}
    assert http.post(RESPONSES, {"input": "hi"})["status"] == "completed"


def test_calls_beside_each_other_are_one_turn(http: Http) -> None:
    user, results = USER[0], [{"output": "1", "call_id": "a"}, {"output": "2", "call_id": "b"}]
    calls = [{"name": "f", "arguments": "{}", "call_id": one["call_id"]} for one in results]
    items = [
        user,
        *({"type": "function_call", **call} for call in calls),
        *({"type": "function_call_output", **result} for result in results),
    ]
    functions = [{"id": call["call_id"], "type": "function", "function": call} for call in calls]
    chat = [
        user,
        {"role": "assistant", "content": None, "tool_calls": functions},
        *({"role": "tool", "content": one["output"]} for one in results),
    ]
    wanted = http.post("/tokenize", {"messages": chat})["tokens"]
    assert http.post(f"{RESPONSES}/render", {"input": items})["token_ids"] == wanted
    used = [{"type": "tool_use", "id": c["call_id"], "name": "f", "input": {}} for c in calls]
    told = [{"type": "tool_result", "tool_use_id": "a", "content": r["output"]} for r in results]
    turns = [user, {"role": "assistant", "content": used}, {"role": "user", "content": told}]
    body = {"messages": turns, "max_tokens": 1}
    assert http.post(f"{MESSAGES}/render", body)["token_ids"] == wanted


def test_chats_and_completions_are_rendered(http: Http) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert http.post(f"{CHAT}/render", body)["token_ids"] == http.post("/tokenize", body)["tokens"]
    (rendered,) = http.post(f"{COMPLETIONS}/render", {"prompt": "hi"})
    assert rendered["token_ids"] == http.post("/tokenize", {"prompt": "hi"})["tokens"]
    for path in (CHAT, COMPLETIONS):
        assert http.post(f"{path}/render", {}, expect=400)["error"]["code"] == 400


def test_kept_responses_are_told_and_deleted(http: Http) -> None:
    made = http.post(RESPONSES, {"input": "hi", "max_output_tokens": 3})
    path = f"{RESPONSES}/{made['id']}"
    assert http.get(path) == made
    error = http.post(f"{path}/cancel", {}, expect=400)["error"]
    assert error["message"] == "Cannot cancel a synchronous response."
    status, answer, _ = http.call("DELETE", path)
    assert (status, answer["deleted"], answer["id"]) == (200, True, made["id"])
    for method, suffix in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
        status, answer, _ = http.call(method, path + suffix)
        assert (status, answer["error"]["param"]) == (404, "response_id"), method
    kept = http.post(RESPONSES, {"input": "hi", "max_output_tokens": 3, "store": False})
    assert http.call("GET", f"{RESPONSES}/{kept['id']}")[0] == 404


def test_responses_with_a_schema_and_log_probabilities(mocker: Mocker, http: Http) -> None:
    form = {"type": "json_schema", "name": "c", "schema": CITY}
    body = {
        "input": [{"type": "reasoning"}, {"role": "user", "content": [{"text": "hi"}]}],
        "text": {"format": form},
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    (item,) = http.post(RESPONSES, body)["output"]
    (part,) = item["content"]
    assert list(json.loads(part["text"])) == ["city"]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]
    told = events(mocker, RESPONSES, body)
    (streamed,) = told[-1]["response"]["output"]
    assert streamed["content"] == item["content"]
    deltas = [one for one in told if one["type"] == "response.output_text.delta"]
    assert [entry for one in deltas for entry in one["logprobs"]] == part["logprobs"]


def test_messages_call_and_end(mocker: Mocker, http: Http) -> None:
    body = {"max_tokens": 300, "messages": USER, "tools": [SKILL, {"type": "bash_20250124"}]}
    whole = http.post(MESSAGES, body)
    (block,) = whole["content"]
    assert (block["type"], whole["stop_reason"]) == ("tool_use", "tool_use")
    told = events(mocker, MESSAGES, body)
    deltas = [one["delta"] for one in told if one["type"] == "content_block_delta"]
    assert json.loads("".join(one["partial_json"] for one in deltas)) == block["input"]
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "18 C"}
    remark = {"type": "text", "text": "Be brief."}
    turns = [
        *USER,
        {"role": "assistant", "content": [block]},
        {"role": "user", "content": [result, remark]},
    ]
    answer = http.post(MESSAGES, {**body, "messages": turns})
    assert [block["type"] for block in answer["content"]] == ["text"]
    assert answer["usage"]["cache_read_input_tokens"] > 200
    chosen = {**body, "tool_choice": {"type": "tool", "name": "weather"}}
    assert http.post(MESSAGES, chosen)["stop_reason"] == "tool_use"
    both = {**body, "tools": [SKILL, SKILL], "tool_choice": {"type": "any"}}
    both["tool_choice"] = {"type": "any", "disable_parallel_tool_use": False}
    told = events(mocker, MESSAGES, both)
    begun = [one["index"] for one in told if one["type"] == "content_block_start"]
    assert begun == [0, 1] == [one["index"] for one in told if one["type"] == "content_block_stop"]
    parts = [one for one in told if one["type"] == "content_block_delta"]
    for index in begun:
        text = "".join(one["delta"]["partial_json"] for one in parts if one["index"] == index)
        assert list(json.loads(text)) == ["city"]
    none = {**body, "tool_choice": {"type": "none"}}
    assert http.post(MESSAGES, none)["content"][0]["type"] == "text"


@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
@pytest.mark.parametrize("told", [{}, {"messages": None}])
def test_a_system_prompt_alone_is_refused(http: Http, path: str, told: dict[str, Any]) -> None:
    status, answer, _ = http.call("POST", path, {"max_tokens": 5, "system": "x", **told})
    assert (status, answer["error"]["message"]) == (400, "messages is required")


def test_messages_stop(http: Http) -> None:
    body = {"max_tokens": 300, "messages": USER, "stop_sequences": ["@", " "]}
    stopped = http.post(MESSAGES, body)
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " ")
    assert " " not in stopped["content"][0]["text"]
    status, ended, _ = http.call("POST", MESSAGES, {**body, "stop_sequences": None}, TOKENS)
    assert (status, ended["stop_reason"]) == (200, "end_turn")
    form = {"format": {"type": "json_schema", "schema": CITY}}
    value = http.post(MESSAGES, {"max_tokens": 300, "messages": USER, "output_config": form})
    assert list(json.loads(value["content"][0]["text"])) == ["city"]


TOKENS = {"x-mocker-tokens": "6"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": USER}),
        (COMPLETIONS, {"prompt": "a"}),
        (RESPONSES, {"input": "a"}),
        (MESSAGES, {"messages": USER, "max_tokens": 50}),
        ("/generate", {"text": "a"}),
        ("/inference/v1/generate", {"token_ids": [1]}),
    ],
)
def test_a_header_ends_the_text_by_itself(http: Http, path: str, body: dict[str, Any]) -> None:
    _, answer, _ = http.call("POST", path, body, TOKENS)
    text = json.dumps(answer)
    assert any(f'{word}_tokens": 6' in text for word in ("completion", "output")), text
    assert '"length"' not in text and '"max_tokens"' not in text
    for wrong in ("0", "-1", "x", "9" * 30, "9" * 5_000):
        assert http.call("POST", path, body, {"x-mocker-tokens": wrong})[0] == 400


def test_a_header_asks_for_a_status(http: Http) -> None:
    for status, got in (("418", 418), ("200", 400), ("x", 400), ("4" * 5_000, 400)):
        headers = {"x-mocker-status": status}
        assert http.call("POST", COMPLETIONS, {"prompt": "a"}, headers)[0] == got


def test_tokens_and_sglang_stop(mocker: Mocker, http: Http) -> None:
    body = {"text": "a", "sampling_params": {"max_new_tokens": 60, "stop": [" "]}}
    whole = http.post("/generate", body)
    assert whole["meta_info"]["finish_reason"] == {"type": "stop", "matched": " "}
    assert events(mocker, "/generate", body)[-1]["text"] == whole["text"]
    assert http.call("POST", "/generate", {"text": "a", "sampling_params": {"n": 2}})[0] == 400
    ids = http.post(
        "/inference/v1/generate",
        {"token_ids": [97], "sampling_params": {"max_tokens": 60, "n": 2, "stop_token_ids": [32]}},
    )
    for choice in ids["choices"]:
        assert (choice["token_ids"][-1], choice["finish_reason"]) == (32, "stop")


def upload(mocker: Mocker, path: str, **fields: str) -> Any:
    parts = [f'Content-Disposition: form-data; name="{k}"\r\n\r\n{v}' for k, v in fields.items()]
    sound = "0" * 40_000
    parts.append(f'Content-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n{sound}')
    body = "".join(f"--b\r\n{part}\r\n" for part in parts) + "--b--\r\n"
    kind = {"Content-Type": "multipart/form-data; boundary=b"}
    return ask(mocker.url, path, body.encode(), kind)


def test_sound_to_text(mocker: Mocker) -> None:
    path = "/v1/audio/transcriptions"
    told = upload(mocker, path, model="m").json
    assert (len(told["text"]), told["usage"]["seconds"]) == (9, 3)
    assert upload(mocker, path, response_format="text").body.decode() == told["text"]
    long = upload(mocker, path, response_format="verbose_json").json
    assert (long["text"], long["duration"]) == (told["text"], 3.0)
    stream = upload(mocker, path, stream="true", stream_include_usage="true").events
    texts = [chunk["choices"][0]["delta"]["content"] for chunk in stream[:-1]]
    assert "".join(texts) == told["text"]
    assert stream[-1]["usage"]["completion_tokens"] == 9
    assert upload(mocker, "/v1/audio/translations").json["text"] != told["text"]
    for fields, status in (({"model": "other"}, 404), ({"response_format": "srt"}, 400)):
        assert upload(mocker, path, **fields).status == status
    for kind in ("application/json", "multipart/form-data; boundary=x", "multipart/form-data"):
        wrong = ask(mocker.url, path, b"nonsense", {"Content-Type": kind})
        assert (wrong.status, wrong.json["error"]["code"]) == (400, 400)
    for header in ("Content-Type: text/a; charset=x", "Content-Transfer-Encoding: x", "no header"):
        wrong = upload(mocker, path, **{f'prompt"\r\n{header}; more="': "hi"})
        assert (wrong.status, wrong.json["error"]["code"]) == (400, 400), header


def test_text_to_sound(http: Http) -> None:
    path = "/v1/audio/speech"
    _, sound, headers = http.call("POST", path, {"input": "hello", "voice": "x"})
    assert headers["content-type"] == "audio/wav"
    with wave.open(io.BytesIO(sound)) as reader:
        assert (reader.getframerate(), reader.getnframes()) == (8_000, 2_500)
    assert len(http.post(path, {"input": "hello", "response_format": "pcm"})) == 5_000
    for body in ({}, {"input": ""}, {"input": "a" * 5_000}, {"input": "a", "response_format": "x"}):
        assert http.call("POST", path, body)[0] == 400
    for form in (["wav"], {"type": "wav"}):
        body = {"input": "a", "response_format": form}
        assert http.call("POST", path, body)[0] == 400


def test_compressed_bodies(mocker: Mocker, http: Http) -> None:
    data, kind = b'{"prompt": "a", "max_tokens": 1}', {"content-encoding": "gzip"}
    assert http.call("POST", COMPLETIONS, gzip.compress(data), kind)[0] == 200
    for _ in range(2):
        status, answer, _ = http.call("POST", COMPLETIONS, data, kind)
        assert (status, answer["error"]["code"]) == (400, 400)
        assert answer["error"]["message"].endswith("Can not decode content-encoding: gzip")
    assert http.call("POST", COMPLETIONS, data)[0] == 200
    assert mocker.process.errors == [], "a client's fault is none of the engine's"


def test_unknown_fields_are_ignored(http: Http) -> None:
    for path, body in ((CHAT, {"messages": USER}), (COMPLETIONS, {"prompt": "a"})):
        more = {"temperature": 0.2, "user": "u", "min_p": 1, "nonsense": {"a": []}, "max_tokens": 4}
        plain = http.post(path, {**body, "max_tokens": 4})
        assert http.post(path, {**body, **more})["choices"] == plain["choices"]
