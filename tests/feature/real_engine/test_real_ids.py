"""A real vLLM gets token ids and is compared: opt-in, see support_engines.py."""

from __future__ import annotations

import json
from typing import Any

import pytest

from service import VECTORS, until
from support_engines import BLOCK_SIZE, MODEL, conversations, needs_engines, vllm_engines

pytestmark = needs_engines

FIELD = "kv_transfer_params.prompt_token_ids"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with vllm_engines(tmp_path_factory.mktemp("engines"), 1) as (started,):
        yield started


def usage_of(answer: dict[str, Any], headers: dict[str, str]) -> tuple[int, int, int]:
    """Prompt tokens, reused ones, and those that were predicted."""
    details = answer["usage"]["prompt_tokens_details"] or {}
    predicted = int(headers["x-kvflash-overlap-blocks"]) * BLOCK_SIZE
    return answer["usage"]["prompt_tokens"], details.get("cached_tokens") or 0, predicted


def test_ids_change_neither_answers_nor_reuse(engine, run, client):
    worker = engine.worker()
    texts, sent = {}, {}
    for flag in ("--send-token-ids", "--no-send-token-ids"):
        engine.clear()
        process = run(
            "kvflash.frontend", "--port", "0", "--host", "127.0.0.1", "--router-mode", "kv",
            "--tokenizer", str(VECTORS / "tiny-llama"), "--seed", "1", "--worker", worker, flag,
        )  # fmt: skip
        frontend = client(process.ready()["url"])

        def is_known(frontend=frontend, flag=flag) -> bool:
            health = frontend.call("GET", "/health")[1]
            records = health.get("parity", {}).get(MODEL, {}).values()
            if not any(record["compared_s_ago"] is not None for record in records):
                return False
            (worker,) = frontend.call("GET", "/workers")[1]
            return flag.startswith("--no") or worker["token_ids"]["chat"] == FIELD

        until(is_known, "the engine to be asked and compared", 60)
        (record,) = frontend.call("GET", "/health")[1]["parity"][MODEL].values()
        outcomes = {name: form["outcome"] for name, form in record["forms"].items()}
        assert outcomes.pop("adapter") == "not compared"
        assert outcomes and set(outcomes.values()) == {"agrees"}, outcomes

        texts[flag], agreed = [], 0
        for _, talk, question in conversations(11, count=3):
            talk.append({"role": "user", "content": question})
            body = {"model": MODEL, "max_tokens": 8, "temperature": 0}
            prompt = "\n".join(message["content"] for message in talk)
            for path, more in (
                ("chat/completions", {"messages": talk}),
                ("completions", {"prompt": prompt}),
            ):
                status, answer, headers = frontend.call("POST", f"/v1/{path}", {**body, **more})
                assert status == 200, answer
                tokens, reused, predicted = usage_of(answer, headers)
                agreed += reused == predicted
                choice = answer["choices"][0]
                text = choice["text"] if "text" in choice else choice["message"]["content"]
                texts[flag].append((tokens, text))
            talk.append({"role": "assistant", "content": "as before"})
        # Events may be on their way when the next request is decided.
        assert agreed >= 0.9 * len(texts[flag]), (flag, agreed, len(texts[flag]))
        text = frontend.get("/metrics").decode()
        sent[flag] = float(text.split("kvflash_prompt_tokens_sent_as_ids_total ")[1].split("\n")[0])
        assert "kvflash_token_mismatches_total 0" in text
        assert process.terminate() == 0
    on, off = texts.values()
    assert on == off
    prompt_tokens = sum(tokens for tokens, _ in on)
    print(json.dumps({"requests": len(on), "prompt_tokens": prompt_tokens, "sent": sent}))
    assert sent["--no-send-token-ids"] == 0
    assert sent["--send-token-ids"] > 0.9 * prompt_tokens
