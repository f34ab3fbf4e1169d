"""Prompts that are tokenized once, by tokens that were compared with the engine's."""

from __future__ import annotations

from typing import Any

from service import until
from support_frontend import CHAT, COMPLETIONS, Frontend, Mocker
from support_tokens import TINY_LLAMA

FAST = ("--speedup-ratio", "1000", "--tokenizer", str(TINY_LLAMA))
SENT = "kvflash_prompt_tokens_sent_as_ids_total"
BODY: dict[str, Any] = {"model": "m", "max_tokens": 4, "temperature": 0}


def is_known(frontend: Frontend) -> bool:
    """The engine was asked, and compared."""
    worker = frontend.workers()[1]["token_ids"]
    records = frontend.http.get("/health")["parity"].get("m", {}).values()
    is_compared = any(record["compared_s_ago"] is not None for record in records)
    return bool(worker["chat"] and worker["completions"] and is_compared)


def test_a_mocker_gets_ids_and_answers_as_to_the_text() -> None:
    chat = {**BODY, "messages": [{"role": "user", "content": "Name a river, 東京"}]}
    text = {**BODY, "prompt": "Name a river"}
    with Mocker(*FAST) as mocker:
        worker = ("--worker", mocker.spec(), "--tokenizer", str(TINY_LLAMA))
        answers = {}
        for flags in ((), ("--no-send-token-ids",)):
            with Frontend(*worker, *flags) as frontend:
                frontend.wait_healthy(1)
                if not flags:
                    until(lambda: is_known(frontend), "the engine to be known")
                answers[flags] = [
                    frontend.http.post(path, body)["choices"]
                    for path, body in ((CHAT, chat), (COMPLETIONS, text))
                ]
                sent = frontend.metric(SENT)
                assert (sent > 0) == (not flags)
                assert frontend.metric("kvflash_token_mismatches_total") == 0
                if not flags:
                    known = frontend.http.get("/health")["parity"]["m"]
                    (record,) = known.values()
                    outcomes = {name: form["outcome"] for name, form in record["forms"].items()}
                    assert outcomes.pop("adapter") == "not compared"
                    assert outcomes and set(outcomes.values()) == {"agrees"}, outcomes
        assert answers[()] == answers[("--no-send-token-ids",)]
