"""Token workers behind the frontend: from an OpenAI request to tokens, and back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvflash.errors import ConfigError, NotFoundError
from service import until
from support_frontend import CHAT, COMPLETIONS, Call, ask
from support_tokens import (
    DATA,
    TINY_LLAMA,
    TOKENIZER,
    Ask,
    EmbeddedFrontend,
    FakeWorker,
    frame,
    say,
    two_items_then,
    workers,
)


@pytest.fixture(scope="module")
def frontend() -> Iterator[EmbeddedFrontend]:
    with EmbeddedFrontend() as running:
        yield running


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "Say it"}], **more}


def text_of(events: list[Any]) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(
        choice.get("text") or choice.get("delta", {}).get("content", "") for choice in choices
    )


def test_the_worker_gets_tokens_and_settings(frontend: EmbeddedFrontend) -> None:
    with workers(frontend, worker := FakeWorker(11)):
        body = chat(
            max_tokens=7,
            stop=["x", "yz"],
            temperature=0.25,
            seed=3,
            min_tokens=2,
            cache_salt="s",
            nvext={"annotations": ["mine"]},
        )
        answer = ask(frontend.url, CHAT, body, {"x-request-id": "mine-1"})
        assert answer.status == 200, answer.body
        head, payload = worker.received[0].head, worker.received[0].payload
        rendered = TOKENIZER.render_chat(json.dumps(body["messages"]))
        assert rendered is not None
        assert payload["token_ids"] == TOKENIZER.encode(rendered, add_special_tokens=False)
        assert (head["id"], head["endpoint"], head["instance_id"]) == (
            "mine-1", "ns/backend/generate", 11,
        )  # fmt: skip
        assert payload["stop_conditions"] == {"max_tokens": 7, "stop": ["x", "yz"], "min_tokens": 2}
        assert payload["sampling_options"] == {"temperature": 0.25, "seed": 3, "n": 1}
        assert (payload["cache_salt"], payload["annotations"]) == ("s", ["mine"])
        assert payload["eos_token_ids"] and payload["model"] == "m"


def test_whole_and_streamed_answers_say_the_same(frontend: EmbeddedFrontend) -> None:
    text = "Grüße, 你好 👨‍👩‍👧 and so on"
    usage = {"completion_usage": {"prompt_tokens_details": {"cached_tokens": 3}}}
    for at_once in (1, 3, 100):
        with workers(frontend, FakeWorker(12, say(text, at_once, **usage))):
            for path, body in (
                (CHAT, chat()),
                (COMPLETIONS, {"model": "m", "prompt": "Say", "max_tokens": 99}),
            ):
                whole = ask(frontend.url, path, body).json
                options = {"stream": True, "stream_options": {"include_usage": True}}
                streamed = ask(frontend.url, path, {**body, **options})
                events = streamed.events
                choice = whole["choices"][0]
                assert choice.get("text", choice.get("message", {}).get("content")) == text
                assert text_of(events) == text
                assert not any(
                    "\ufffd" in json.dumps(event, ensure_ascii=False) for event in events
                )
                assert (
                    choice["finish_reason"] == events[-2]["choices"][0]["finish_reason"] == "stop"
                )
                assert whole["usage"] == events[-1]["usage"]
                assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
                tokens = len(TOKENIZER.encode(text, add_special_tokens=False))
                assert whole["usage"]["completion_tokens"] == tokens
                assert streamed.worker == 12


def test_the_time_between_items_with_tokens_is_measured(frontend: EmbeddedFrontend) -> None:
    text, name = "one two three four", "kvflash_inter_token_seconds_count"
    tokens = len(TOKENIZER.encode(text, add_special_tokens=False))
    with workers(frontend, FakeWorker(15, say(text))):
        for is_stream in (True, False):
            before = frontend.metric(name)
            assert ask(frontend.url, CHAT, chat(stream=is_stream)).status == 200
            assert frontend.metric(name) - before == tokens - 1


def test_a_stop_string_over_tokens_ends_the_worker_too(frontend: EmbeddedFrontend) -> None:
    def endless(ask: Ask) -> None:
        ids = TOKENIZER.encode("one two three four five six", add_special_tokens=False)
        for one in ids:
            ask.item(one)
        ask.wait_gone()

    with workers(frontend, worker := FakeWorker(13, endless)):
        whole = ask(frontend.url, CHAT, chat(stop="hree fo")).json["choices"][0]
        assert whole["message"]["content"] == "one two t"
        assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", "hree fo")
        events = ask(frontend.url, CHAT, chat(stop=["hree fo"], stream=True)).events
        assert text_of(events) == "one two t"
        until(lambda: all(one.is_gone.is_set() for one in worker.received), "both to be cancelled")


def test_max_tokens_holds_and_is_length(frontend: EmbeddedFrontend) -> None:
    with workers(frontend, FakeWorker(14, say("one two three four five"))):
        answer = ask(frontend.url, CHAT, chat(max_completion_tokens=2)).json
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 2


def test_connections_are_kept_and_reused(frontend: EmbeddedFrontend) -> None:
    with workers(frontend, worker := FakeWorker(15)):
        for _ in range(20):
            assert ask(frontend.url, CHAT, chat()).status == 200
            until(lambda: frontend.metric("kvflash_requests_in_flight") == 0, "the answer's end")
        assert worker.connections < 20
        assert len(worker.received) == 20


def test_text_reaches_the_client_as_it_comes(frontend: EmbeddedFrontend) -> None:
    def waits(ask: Ask) -> None:
        ask.wait_gone()

    with workers(frontend, FakeWorker(16, two_items_then(waits))):
        call = Call(frontend.url, CHAT, chat(stream=True))
        assert json.loads(call.read_event()[6:])["choices"][0]["delta"]["role"] == "assistant"
        assert json.loads(call.read_event()[6:])["choices"][0]["delta"]["content"]
        call.hang_up()


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({"n": 2}, "n: "),
        ({"logprobs": True}, "logprobs: "),
        ({"stop": [""]}, "stop: "),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"temperature": -1}, "temperature: "),
        (
            {"messages": [{"role": "user", "content": "x " * 5_000}]},
            "limit for prompt and answer is 4096",
        ),
        ({"messages": None}, "messages: "),
        ({"chat_template": "{{ 1 }}"}, "cannot be tokenized"),
    ],
)
def test_what_cannot_be_done_is_refused(
    frontend: EmbeddedFrontend, more: dict[str, Any], wanted: str
) -> None:
    with workers(frontend, worker := FakeWorker(17)):
        answer = ask(frontend.url, CHAT, chat(**more))
        assert answer.status == 400, answer.body
        assert wanted in answer.json["error"]["message"]
        assert not worker.received


def test_query_tells_workers_and_tokens_and_changes_nothing(frontend: EmbeddedFrontend) -> None:
    fakes = [FakeWorker(18), FakeWorker(19)]
    with workers(frontend, *fakes):
        for pinned in (18, 19):
            nvext = {"annotations": ["query_instance_id:"], "backend_instance_id": pinned}
            (event,) = ask(frontend.url, CHAT, chat(nvext=nvext)).events
            ids = event["nvext"]["worker_id"]
            assert ids["prefill_worker_id"] == ids["decode_worker_id"] == pinned
            assert event["nvext"]["token_ids"]
        assert not any(fake.received for fake in fakes)
        answer = ask(frontend.url, CHAT, chat(nvext={"backend_instance_id": 19}))
        assert (answer.status, answer.worker) == (200, 19)
        answer = ask(frontend.url, CHAT, chat(nvext={"decode_worker_id": 5}))
        assert answer.status == 404
        assert "worker 5" in answer.json["error"]["message"]


def test_each_query_draws_anew_and_its_seed_repeats_it() -> None:
    fakes = [FakeWorker(number) for number in range(21, 25)]
    query = {"annotations": ["query_instance_id:"]}
    with EmbeddedFrontend("--router-temperature", "1") as frontend, workers(frontend, *fakes):

        def told(**more: Any) -> tuple[int, int]:
            (event,) = ask(frontend.url, CHAT, chat(nvext={**query, **more})).events
            return event["nvext"]["worker_id"]["decode_worker_id"], event["nvext"]["seed"]

        found = {told() for _ in range(100)}
        assert {worker for worker, _ in found} == {21, 22, 23, 24}
        for worker, seed in sorted(found)[::10]:
            assert told(seed=seed) == (worker, seed)
            assert frontend.http.post("/explain", chat(nvext={"seed": seed}))["seed"] == seed
        explained = [frontend.http.post("/explain", chat()) for _ in range(2)]
        assert explained[0] == explained[1]
        refused = ask(frontend.url, CHAT, chat(nvext={"seed": -1}))
        assert refused.status == 400 and "nvext.seed" in refused.json["error"]["message"]


def test_text_workers_get_the_body_and_answer_in_chunks(frontend: EmbeddedFrontend) -> None:
    def chunks(ask: Ask) -> bool:
        for index, piece in enumerate(("one ", "two")):
            delta = {"role": "assistant", "content": piece}
            choice = {"index": 0, "delta": delta, "finish_reason": "stop" if index else None}
            body = {"id": "c", "object": "chat.completion.chunk", "choices": [choice]}
            ask.send(frame(DATA, body))
        return ask.end()

    with workers(frontend, worker := FakeWorker(20, chunks, model_input="text", tokenizer=None)):
        body = chat(x_unknown=1)
        whole = ask(frontend.url, CHAT, body).json
        assert whole["choices"][0]["message"]["content"] == "one two"
        assert worker.received[0].payload == body
        events = ask(frontend.url, CHAT, chat(stream=True)).events
        assert text_of(events) == "one two"
        # Such a worker must announce its abilities itself.
        body = chat(n=2, logprobs=True, response_format={"type": "structural_tag"})
        assert ask(frontend.url, CHAT, body).status == 200
        assert worker.received[-1].payload == body
        wrong = ask(frontend.url, CHAT, chat(stream=1))
        assert wrong.status == 400 and "stream" in wrong.json["error"]["message"]


def test_strings_of_text_workers_are_a_whole_answer(frontend: EmbeddedFrontend) -> None:
    def strings(ask: Ask) -> bool:
        for piece in ("one ", "two"):
            ask.send(frame(DATA, piece))
        return ask.end()

    with workers(frontend, FakeWorker(20, strings, model_input="text", tokenizer=None)):
        for path, body in ((CHAT, chat()), (COMPLETIONS, {"model": "m", "prompt": "Say"})):
            (choice,) = ask(frontend.url, path, body).json["choices"]
            assert choice.get("text", choice.get("message", {}).get("content")) == "one two"
            assert choice["finish_reason"] == "stop"
            events = ask(frontend.url, path, {**body, "stream": True}).events
            assert text_of(events) == "one two"
            reasons = [event["choices"][0]["finish_reason"] for event in events]
            assert reasons[-1] == "stop" and not any(reasons[:-1])


def test_a_request_larger_than_a_frame_is_refused_and_nobody_in_doubt() -> None:
    """Numbers take more room on the way to the worker than in the client's JSON."""
    limit = ("--max-body-bytes", "100000000")
    worker = FakeWorker(24, model_input="text", tokenizer=None)
    with EmbeddedFrontend(*limit) as frontend, workers(frontend, worker):
        answer = ask(frontend.url, CHAT, chat(**{f"x_{n}": [0.1] * 950_000 for n in range(4)}))
        assert answer.status == 413
        assert "33554432" in answer.json["error"]["message"]
        assert worker.received == [] and frontend.workers()[24]["healthy"]


@pytest.mark.parametrize("value", [r'"\ud83d"', r'["a", "b \ud83d"]', "1e400"])
def test_a_value_that_no_worker_can_be_sent_is_refused(
    frontend: EmbeddedFrontend, value: str
) -> None:
    worker = FakeWorker(25, model_input="text", tokenizer=None)
    with workers(frontend, worker):
        body = json.dumps(chat())[:-1] + f', "x_unknown": {value}}}'
        answer = ask(frontend.url, CHAT, body.encode())
        assert (answer.status, answer.json["error"]["param"]) == (400, "x_unknown"), answer.body
        assert worker.received == [] and frontend.workers()[25]["healthy"]


def test_adapters_and_models_are_listed_and_leave(frontend: EmbeddedFrontend) -> None:
    with workers(frontend, worker := FakeWorker(21, lora_names=["tuned", "org/fine tuned"])):
        listed = {one["id"]: one for one in frontend.http.get("/v1/models")["data"]}
        assert set(listed) == {"m", "tuned", "org/fine tuned"}
        assert listed["m"]["max_model_len"] == 4096
        for path in ("org/fine%20tuned", "org%2Ffine%20tuned"):
            assert frontend.http.get(f"/v1/models/{path}") == listed["org/fine tuned"]
        assert ask(frontend.url, CHAT, {**chat(), "model": "tuned"}).status == 200
        assert worker.received[0].payload["lora_name"] == "tuned"
    assert frontend.http.get("/v1/models")["data"] == []
    with pytest.raises(NotFoundError):
        frontend.core.remove_worker(21)


def test_a_worker_may_change_and_its_events_come_later(frontend: EmbeddedFrontend) -> None:
    with workers(frontend, worker := FakeWorker(22)):
        assert frontend.workers()[22]["listeners"] == []
        events = {"0": {"endpoint": "tcp://127.0.0.1:1"}}
        frontend.put(worker, events=events)
        assert [one["endpoint"] for one in frontend.workers()[22]["listeners"]] == [
            "tcp://127.0.0.1:1"
        ]
        frontend.put(worker)
        assert frontend.workers()[22]["listeners"] == []
        frontend.put(worker, model_name="other")
        assert frontend.workers()[22]["model"] == "other"
        frontend.core.report_load(json.dumps({"id": 22, "kv_used_blocks": 5}))
        assert frontend.workers()[22]["loads"]["0"]["kv_used_blocks"] == 5
        with pytest.raises(ConfigError, match="dp_rank must be below 1, got 3"):
            frontend.core.report_load(json.dumps({"id": 22, "dp_rank": 3}))


def test_what_was_set_for_a_model_outlives_its_workers_and_what_they_said_does_not() -> None:
    with EmbeddedFrontend("--no-kv-events") as frontend:
        with workers(frontend, FakeWorker(25)):
            assert frontend.workers()[25]["block_size"] == 16
            change = {"model": "m", "active_prefill_tokens_threshold": 1_000}
            frontend.http.post("/busy_threshold", change)
        with workers(frontend, FakeWorker(26, kv_cache_block_size=32)):
            (kept,) = frontend.http.get("/busy_threshold")["thresholds"]
            assert (kept["model"], kept["active_prefill_tokens_threshold"]) == ("m", 1_000)
            assert frontend.workers()[26]["block_size"] == 32
            assert frontend.http.get("/health")["warnings"] == []


def test_what_a_worker_reports_keeps_requests_from_it() -> None:
    both = [FakeWorker(41, total_kv_blocks=100), FakeWorker(42, total_kv_blocks=100)]
    with EmbeddedFrontend("--busy-threshold", "0.5") as frontend, workers(frontend, *both):
        for used, wanted in ((90, {"42:0"}), (10, {"41:0", "42:0"})):
            frontend.core.report_load(json.dumps({"id": 41, "kv_used_blocks": used}))
            seen = set()
            for n in range(12):
                body = chat(messages=[{"role": "user", "content": f"{n} and {used}"}])
                answer = ask(frontend.url, CHAT, body)
                assert answer.status == 200, answer.body
                seen.add(answer.headers["x-kvflash-worker"])
            assert seen == wanted
        for one in both:
            frontend.core.report_load(json.dumps({"id": one.id, "kv_used_blocks": 51}))
        answer = ask(frontend.url, CHAT, chat())
        assert answer.status == 503 and answer.headers["retry-after"] == "1"
        assert "busy" in answer.json["error"]["message"]


def test_a_card_that_cannot_be_served_changes_nothing(frontend: EmbeddedFrontend) -> None:
    with workers(frontend, worker := FakeWorker(23)):
        with pytest.raises(ConfigError, match=r"tokenizer\.json"):
            frontend.put(worker, tokenizer=str(TINY_LLAMA.parent))
        with pytest.raises(ConfigError, match="no tokenizer folder"):
            frontend.put(worker, tokenizer=None)
        with pytest.raises(ConfigError, match=r"card\.dp_size"):
            frontend.put(worker, dp_size=0)
        assert ask(frontend.url, CHAT, chat()).status == 200
