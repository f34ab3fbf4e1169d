"""Two real vLLM engines behind the frontend: opt-in, see support_engines.py."""

from __future__ import annotations

import json

import pytest

from service import VECTORS, until
from support_engines import BLOCK_SIZE, MODEL, conversations, needs_engines, vllm_engines

pytestmark = needs_engines


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    with vllm_engines(tmp_path_factory.mktemp("engines")) as started:
        yield started


def measure(run, client, engines, mode, *, seed, salt=None):
    """Reuse as the engines count it, and the frontend's four stages, over one cold run."""
    for engine in engines:
        engine.clear()
    workers = [each.worker() for each in engines]
    process = run(
        "kvflash.frontend", "--port", "0", "--host", "127.0.0.1", "--router-mode", mode,
        "--tokenizer", str(VECTORS / "tiny-llama"), "--seed", "1", "--worker", *workers,
    )  # fmt: skip
    frontend = client(process.ready()["url"])
    # Until then the events of before are on their way, and what they tell earns no credit.
    until(lambda: frontend.call("GET", "/ready")[0] == 200, "both engines to be known", 60)
    prompt = cached = agreed = asked = 0
    for _, talk, question in conversations(seed):
        talk.append({"role": "user", "content": question})
        body = {"model": MODEL, "messages": talk, "max_tokens": 12, "temperature": 0}
        if salt is not None:
            body["cache_salt"] = salt
        status, answer, headers = frontend.call("POST", "/v1/chat/completions", body)
        assert status == 200, answer
        usage = answer["usage"]
        details = usage["prompt_tokens_details"] or {}
        reused = details.get("cached_tokens") or 0
        prompt += usage["prompt_tokens"]
        cached += reused
        asked += 1
        agreed += int(headers["x-kvflash-overlap-blocks"]) * BLOCK_SIZE == reused
        talk.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    text = frontend.get("/metrics").decode()
    stages = {
        stage: int(float(text.split(f'kvflash_tokens_total{{stage="{stage}"}} ')[1].split("\n")[0]))
        for stage in ("input", "available", "selected", "delivered")
    }
    events = {
        line.split('"')[1]: int(line.split()[-1])
        for line in text.splitlines()
        if line.startswith("kvflash_events{") and not line.endswith(" 0")
    }
    assert process.terminate() == 0
    return {
        "mode": mode, "requests": asked, "prompt": prompt, "reused": cached, "agreed": agreed,
        **stages, "events": events,
    }  # fmt: skip


def test_kv_mode_reuses_more_and_knows_how_much(engines, run, client):
    round_robin = measure(run, client, engines, "round-robin", seed=7)
    kv = measure(run, client, engines, "kv", seed=7)
    salted = measure(run, client, engines, "kv", seed=7, salt="tenant-a")
    print()
    for result in (round_robin, kv, salted):
        print(json.dumps(result))
    assert kv["requests"] == round_robin["requests"] == 48
    assert kv["reused"] > 1.3 * round_robin["reused"]
    for result in (kv, salted):
        assert result["delivered"] == result["reused"]
        assert result["input"] == result["prompt"], "local tokens are the engine's"
        # An eviction between decision and arrival may cost a request its agreement.
        assert result["agreed"] >= 0.95 * result["requests"]
        assert abs(result["selected"] - result["delivered"]) <= 0.02 * result["prompt"]
