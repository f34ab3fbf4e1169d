"""A real vLLM by each API that has conversations: opt-in, see support_engines.py."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from service import VECTORS, Http, until
from support_engines import BLOCK_SIZE, needs_engines, vllm_engines, words

pytestmark = needs_engines

MODEL = "tiny-hermes"
PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
CALL = {"name": "weather", "arguments": json.dumps({"place": "Bern"})}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with vllm_engines(tmp_path_factory.mktemp("engines"), 1, MODEL) as (started,):
        yield started


def chat(system: str, question: str) -> dict[str, Any]:
    tool = {"name": "weather", "description": "The weather of a place", "parameters": PLACE}
    call = {"id": "call_1", "type": "function", "function": CALL}
    return {
        "max_tokens": 4,
        "tools": [{"type": "function", "function": tool}],
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": "How warm is it in Bern?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "21.5"},
            {"role": "user", "content": question},
        ],
    }


def messages(system: str, question: str) -> dict[str, Any]:
    use = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"place": "Bern"}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "21.5"}
    header = "x-anthropic-billing-header: cc_version=2.1; cch=" + question[:5]
    return {
        "max_tokens": 4,
        "system": [{"type": "text", "text": header}, {"type": "text", "text": system}],
        "tools": [
            {"name": "weather", "description": "The weather of a place", "input_schema": PLACE}
        ],
        "messages": [
            {"role": "user", "content": "How warm is it in Bern?"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result, {"type": "text", "text": question}]},
        ],
    }


def responses(system: str, question: str) -> dict[str, Any]:
    tool = {"name": "weather", "description": "The weather of a place", "parameters": PLACE}
    return {
        "max_output_tokens": 4,
        "instructions": system,
        "tools": [{"type": "function", **tool}],
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "How warm is it?"}]},
            {"type": "function_call", "call_id": "call_1", **CALL},
            {"type": "function_call_output", "call_id": "call_1", "output": "21.5"},
            {"role": "user", "content": question},
        ],
    }


def reused(path: str, usage: dict[str, Any]) -> int:
    if path == "messages":
        return usage.get("cache_read_input_tokens") or 0
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return details.get("cached_tokens") or 0


@pytest.mark.parametrize("by", ["template", "engine"])
def test_predictions_are_what_the_engine_reuses_by_every_api(engine, run, client, by):
    engine.clear()
    worker = engine.worker()
    tokenizer = ("--tokenizer", str(VECTORS / MODEL)) if by == "template" else ()
    process = run(
        "kvflash.frontend", "--port", "0", "--host", "127.0.0.1", "--router-mode", "kv",
        "--seed", "1", "--worker", worker, *tokenizer,
    )  # fmt: skip
    frontend: Http = client(process.ready()["url"])

    def is_compared() -> bool:
        records = frontend.call("GET", "/health")[1].get("parity", {}).get(MODEL, {}).values()
        return any(record["compared_s_ago"] is not None for record in records)

    until(lambda: frontend.call("GET", "/ready")[0] == 200, "the engine to be healthy", 60)
    if tokenizer:
        until(is_compared, "the tokens to be compared", 60)
        (record,) = frontend.call("GET", "/health")[1]["parity"][MODEL].values()
        forms = {name: form["outcome"] for name, form in record["forms"].items()}
        assert forms["messages"] == forms["responses"] == forms["tools"] == "agrees", record
    rng, agreed, asked, hits = random.Random(f"apis {by}"), 0, 0, 0
    systems = [words(rng, 60) for _ in range(3)]
    for _ in range(6):
        for path, make in (
            ("chat/completions", chat),
            ("messages", messages),
            ("responses", responses),
        ):
            body = make(rng.choice(systems), words(rng, 30))
            body.update(model=MODEL, temperature=0)
            status, answer, headers = frontend.call("POST", f"/v1/{path}", body)
            assert status == 200, (path, answer)
            told = reused(path, answer["usage"])
            predicted = int(headers["x-kvflash-overlap-blocks"]) * BLOCK_SIZE
            agreed, asked, hits = agreed + (told == predicted), asked + 1, hits + (told > 0)
    # Events may be on their way when the next request is decided.
    assert hits > asked / 2 and agreed >= 0.9 * asked, (hits, agreed, asked)
    print(f"{by}: {agreed} of {asked} predicted, {hits} reused something")
    assert process.terminate() == 0
