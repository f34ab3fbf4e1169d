"""Disaggregated serving: prefill at one worker, decode at another; either may fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ports import free_port
from service import until
from support_frontend import CHAT, COMPLETIONS, Call, Exchange, FakeEngine, ask
from support_tokens import (
    DATA,
    Answer,
    Ask,
    EmbeddedFrontend,
    FakeWorker,
    die,
    frame,
    hang,
    refuse,
    say,
    two_items_then,
    workers,
)

BODY = {"model": "m", "messages": [{"role": "user", "content": "Say it"}], "max_tokens": 50}
STREAM = {**BODY, "stream": True}
PARAMS = {"kv_transfer_params": {"remote_port": 7, "blocks": [1, 2], "opaque": b"\x00\xff"}}


@pytest.fixture
def frontend() -> Iterator[EmbeddedFrontend]:
    with EmbeddedFrontend() as running:
        yield running


def hand_over(ask: Ask) -> bool:
    """A prefill worker's answer: one token and the transfer parameters."""
    ask.item(40, finish="length", disaggregated_params=PARAMS)
    return ask.end()


def prefiller(worker_id: int, answer: Answer = hand_over, **card: Any) -> FakeWorker:
    return FakeWorker(worker_id, answer, model_type=("prefill",), **card)


def prefills(frontend: EmbeddedFrontend) -> dict[str, float]:
    name = 'kvflash_prefills_total{outcome="'
    return {k[len(name) : -2]: v for k, v in frontend.metrics().items() if k.startswith(name)}


def prefiller_of(answer: Any) -> int:
    return int(answer.headers["x-kvflash-prefill-worker"].partition(":")[0])


def test_what_the_prefill_leaves_reaches_the_decode_worker(frontend: EmbeddedFrontend) -> None:
    with workers(frontend, decode := FakeWorker(41), prefill := prefiller(42)):
        for body in (BODY, STREAM):
            answer = ask(frontend.url, CHAT, body)
            assert (answer.status, answer.worker, prefiller_of(answer)) == (200, 41, 42)
        copy, request = prefill.received[0].payload, decode.received[0].payload
        assert copy["stop_conditions"]["max_tokens"] == 1
        assert request["stop_conditions"]["max_tokens"] == 50
        assert copy["token_ids"] == request["token_ids"]
        assert request["prefill_result"] == {"disaggregated_params": PARAMS}
        assert "prefill_result" not in copy and "bootstrap_info" not in copy
        assert prefills(frontend) == {"handed_off": 2}
        assert [model["id"] for model in frontend.http.get("/v1/models")["data"]] == ["m"]
        roles = {worker["id"]: worker["role"] for worker in frontend.workers().values()}
        assert roles == {41: "decode", 42: "prefill"}


def test_prompts_that_grow_stay_at_their_prefill_worker(frontend: EmbeddedFrontend) -> None:
    """Also where nothing publishes events, load alone spreads and never reaches a decode worker."""
    fakes = [FakeWorker(41), FakeWorker(42), prefiller(43), prefiller(44)]
    with workers(frontend, *fakes):
        answers = [ask(frontend.url, CHAT, BODY) for _ in range(8)]
        assert {prefiller_of(answer) for answer in answers} <= {43, 44}
        assert {answer.worker for answer in answers} <= {41, 42}
        pinned = {"prefill_worker_id": 44, "decode_worker_id": 41}
        answer = ask(frontend.url, CHAT, {**BODY, "nvext": pinned})
        assert (answer.worker, prefiller_of(answer)) == (41, 44)
        query = {**pinned, "annotations": ["query_instance_id:"]}
        (event,) = ask(frontend.url, CHAT, {**BODY, "nvext": query}).events
        ids = event["nvext"]["worker_id"]
        assert (ids["decode_worker_id"], ids["prefill_worker_id"]) == (41, 44)
        wrong = ask(frontend.url, CHAT, {**BODY, "nvext": {"prefill_worker_id": 41}})
        assert wrong.status == 404


@pytest.mark.parametrize("bad", [die, hang, refuse("internal"), say("no parameters")])
def test_a_prefill_that_fails_is_tried_elsewhere_then_left_to_the_decode_worker(
    bad: Answer,
) -> None:
    flags = ("--first-byte-timeout", "1.5") if bad is hang else ()
    fakes = [decode := FakeWorker(41), prefiller(42, bad), prefiller(43)]
    with EmbeddedFrontend(*flags) as frontend, workers(frontend, *fakes):
        pinned = {"prefill_worker_id": 42}
        answer = ask(frontend.url, CHAT, {**BODY, "nvext": pinned})
        assert answer.status == 200 and "x-kvflash-prefill-worker" not in answer.headers
        assert "prefill_result" not in decode.received[0].payload
        assert prefills(frontend) == {"failed": 1, "fallback": 1}
        frontend.wait_idle()
        for _ in range(4):
            assert prefiller_of(ask(frontend.url, CHAT, STREAM)) == 43


def test_enforced_it_is_never_left_to_the_decode_worker() -> None:
    with EmbeddedFrontend("--enforce-disagg") as frontend, workers(frontend, FakeWorker(41)):
        answer = ask(frontend.url, CHAT, BODY)
        assert answer.status == 503 and "--enforce-disagg" in answer.json["error"]["message"]
        with workers(frontend, prefiller(42, refuse("internal", "out of blocks"))):
            answer = ask(frontend.url, CHAT, BODY)
            assert answer.status == 502 and "out of blocks" in answer.json["error"]["message"]


def test_until_the_first_prefill_worker_it_may_be() -> None:
    flags = ("--enforce-disagg", "until-first-prefill")
    with EmbeddedFrontend(*flags) as frontend, workers(frontend, FakeWorker(41)):
        assert ask(frontend.url, CHAT, BODY).status == 200
        with workers(frontend, prefiller(42)):
            assert ask(frontend.url, CHAT, BODY).status == 200
        assert ask(frontend.url, CHAT, BODY).status == 503


# -- prefill and decode side by side, as with a bootstrap address

BOOTSTRAP = {"host": "10.0.0.1", "port": 8998}


def meet(others: list[FakeWorker], count: int) -> Callable[[Ask], None]:
    """Wait until all sides have the request: neither is sent only after the other's answer."""

    def wait(_ask: Ask) -> None:
        until(lambda: sum(len(one.received) for one in others) >= count, "the other side")

    return wait


def test_with_a_bootstrap_address_both_run_at_once(frontend: EmbeddedFrontend) -> None:
    fakes: list[FakeWorker] = []
    wait = meet(fakes, 2)

    def decode(ask: Ask) -> bool:
        wait(ask)
        return bool(say("hello")(ask))

    def prefill(ask: Ask) -> bool:
        wait(ask)
        ask.item(40, finish="length")
        return ask.end()

    fakes += [FakeWorker(41, decode), prefiller(42, prefill, bootstrap=BOOTSTRAP)]
    with workers(frontend, *fakes):
        answer = ask(frontend.url, CHAT, STREAM)
        assert (answer.status, answer.worker, prefiller_of(answer)) == (200, 41, 42)
        infos = [fake.received[0].payload["bootstrap_info"] for fake in fakes]
        assert infos[0] == infos[1]
        assert (infos[0]["bootstrap_host"], infos[0]["bootstrap_port"]) == ("10.0.0.1", 8998)
        rooms = {infos[0]["bootstrap_room"]}
        assert 0 < infos[0]["bootstrap_room"] < 2**63
        for _ in range(3):
            assert ask(frontend.url, CHAT, BODY).status == 200
            rooms.add(fakes[0].received[-1].payload["bootstrap_info"]["bootstrap_room"])
        assert len(rooms) == 4


@pytest.mark.parametrize("bad", [die, refuse("internal", "no blocks")])
def test_a_failed_prefill_cancels_its_decode(frontend: EmbeddedFrontend, bad: Answer) -> None:
    """A decode worker that waits for a prefill which failed would wait for ever."""

    def decode(ask: Ask) -> bool | None:
        if "bootstrap_info" in ask.payload:
            return hang(ask)
        return say("alone")(ask)

    waits = FakeWorker(41, decode)

    def prefill(ask: Ask) -> bool | None:
        until(lambda: waits.received, "the decode to have begun")
        return bad(ask)

    with workers(frontend, waits, prefiller(42, prefill, bootstrap=BOOTSTRAP)):
        answer = ask(frontend.url, CHAT, BODY)
        assert answer.json["choices"][0]["message"]["content"] == "alone"
        until(waits.received[0].is_gone.is_set, "the paired decode to be cancelled")
        assert len(waits.received) == 2


def test_a_prefill_that_fails_late_ends_the_stream(frontend: EmbeddedFrontend) -> None:
    gate = threading.Event()

    def prefill(ask: Ask) -> bool:
        gate.wait()
        return ask.error("internal", "lost the connection to the decode worker")

    decode = FakeWorker(41, two_items_then(hang))
    with workers(frontend, decode, prefiller(42, prefill, bootstrap=BOOTSTRAP)):
        call = Call(frontend.url, CHAT, STREAM)
        call.read_event()
        gate.set()
        events = call.finish().body.decode().split("\n\n")
        error = json.loads(next(event for event in events if "error" in event)[6:])["error"]
        assert "lost the connection" in error["message"]
        until(decode.received[0].is_gone.is_set, "the decode to be cancelled")
        frontend.wait_idle()
        assert frontend.outcomes() == {"broken": 1}


def test_a_client_that_leaves_ends_both(frontend: EmbeddedFrontend) -> None:
    fakes = [
        FakeWorker(41, two_items_then(hang)),
        prefiller(42, hang, bootstrap=BOOTSTRAP),
    ]
    with workers(frontend, *fakes):
        call = Call(frontend.url, CHAT, STREAM)
        call.read_event()
        until(lambda: all(fake.received for fake in fakes), "both to have the request")
        call.hang_up()
        for fake in fakes:
            until(lambda fake=fake: fake.received and fake.received[0].is_gone.is_set(), "the end")
        frontend.wait_idle()


def test_a_decode_that_fails_leaves_its_prefill_worker_to_the_next_one() -> None:
    """Even if it is the only worker, and none may decode alone."""

    def prefill(ask: Ask) -> bool:
        ask.item(40, finish="length")
        return ask.end()

    bad, good = FakeWorker(41, die), FakeWorker(43)
    fakes = (bad, good, prefiller(42, prefill, bootstrap=BOOTSTRAP))
    with EmbeddedFrontend("--enforce-disagg") as frontend, workers(frontend, *fakes):
        while not bad.received:
            answer = ask(frontend.url, CHAT, BODY)
            assert (answer.status, answer.worker) == (200, 43), answer.body


@pytest.mark.parametrize("is_beside", [False, True])
def test_workers_of_text_get_what_was_prefilled(
    frontend: EmbeddedFrontend, is_beside: bool
) -> None:
    def chunk(**more: Any) -> Answer:
        choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}

        def answer(ask: Ask) -> bool:
            ask.send(frame(DATA, {"id": "x", "choices": [choice], **more}))
            return ask.end()

        return answer

    card = {"bootstrap": BOOTSTRAP} if is_beside else {}
    decode = FakeWorker(41, chunk(), model_input="text")
    prefill = prefiller(42, chunk(kv_transfer_params={"port": 7}), model_input="text", **card)
    with workers(frontend, decode, prefill):
        assert prefiller_of(ask(frontend.url, CHAT, BODY)) == 42
        until(lambda: prefill.received, "the prefill to have begun")
        copy, request = prefill.received[0].payload, decode.received[0].payload
        assert (copy["max_tokens"], request["max_tokens"]) == (1, 50)
        if is_beside:
            assert copy["bootstrap_info"] == request["bootstrap_info"]
            assert request["bootstrap_info"]["bootstrap_port"] == 8998
        else:
            assert request["kv_transfer_params"] == {"port": 7}


def test_what_killed_two_prefill_workers_is_sent_to_one_decode_worker(
    frontend: EmbeddedFrontend,
) -> None:
    decodes = [FakeWorker(41, die), FakeWorker(43, die)]
    with workers(frontend, *decodes, *(prefiller(44 + n, die) for n in range(3))):
        answer = ask(frontend.url, CHAT, BODY)
        assert answer.status == 502 and "less than 60 s ago" in answer.json["error"]["message"]
        assert sum(len(decode.received) for decode in decodes) == 1
        assert prefills(frontend) == {"failed": 2, "fallback": 1}


def test_a_request_falls_back_once_however_often_its_decode_is_tried(
    frontend: EmbeddedFrontend,
) -> None:
    full = [FakeWorker(41 + n, refuse("draining")) for n in range(3)]
    with workers(frontend, *full, prefiller(44, refuse("internal"))):
        assert ask(frontend.url, CHAT, BODY).status == 503
        assert [len(fake.received) for fake in full] == [1, 1, 1]
        assert prefills(frontend) == {"failed": 1, "fallback": 1}


def paired_or_alone(ask: Ask) -> bool | None:
    """A decode worker that waits for its prefill, and needs none without."""
    return hang(ask) if "bootstrap_info" in ask.payload else say("alone")(ask)


def test_a_prefill_worker_that_stops_answering_ends_the_wait_of_its_decode() -> None:
    silent = prefiller(42, hang, bootstrap=BOOTSTRAP)
    decode = FakeWorker(41, paired_or_alone)
    with (
        EmbeddedFrontend("--health-interval", "0.1") as frontend,
        workers(frontend, decode, silent),
    ):
        silent.answers_pings = False
        answer = ask(frontend.url, CHAT, BODY)
        assert answer.json["choices"][0]["message"]["content"] == "alone"
        assert frontend.metric('kvflash_attempts_failed_total{cause="unwell"}') == 1


def prefilled(ask: Ask) -> bool:
    """A prefill worker's answer beside its decode."""
    ask.item(40, finish="length")
    return ask.end()


def say_nothing(ask: Ask) -> bool:
    """An answer of a worker of text that has no choice."""
    ask.send(frame(DATA, {"id": "x", "choices": []}))
    return ask.end()


def say_as_text(ask: Ask) -> bool:
    choice = {"index": 0, "delta": {"content": "hello"}, "finish_reason": "stop"}
    ask.send(frame(DATA, {"id": "x", "choices": [choice]}))
    return ask.end()


@pytest.mark.parametrize("flag", ["--router-queue-threshold", "--active-prefill-tokens-threshold"])
@pytest.mark.parametrize(
    ("bad", "good", "model_input"),
    [
        (die, say("hello"), "tokens"),
        (two_items_then(die), say("hello"), "tokens"),
        (say_nothing, say_as_text, "text"),
    ],
)
def test_a_prefill_whose_decode_failed_is_no_load_to_the_next_one(
    flag: str, bad: Answer, good: Answer, model_input: str
) -> None:
    """It would wait for itself, or be refused because of itself."""
    decodes: list[Ask] = []

    def decode(ask: Ask) -> bool | None:
        decodes.append(ask)
        until(lambda: len(prefill.received) == len(decodes), "the prefill to have begun")
        return good(ask) if len(decodes) > 1 else bad(ask)

    def prefill_anew(ask: Ask) -> bool | None:
        return hang(ask) if len(prefill.received) < 2 else prefilled(ask)

    prefill = prefiller(42, prefill_anew, bootstrap=BOOTSTRAP)
    fakes = (*(FakeWorker(n, decode, model_input=model_input) for n in (41, 43)), prefill)
    with EmbeddedFrontend("--enforce-disagg", flag, "0") as frontend, workers(frontend, *fakes):
        answer = ask(frontend.url, CHAT, BODY)
        assert (answer.status, len(prefill.received)) == (200, 2), answer.body
        assert prefill.received[0].is_gone.is_set()


@pytest.mark.parametrize("bad", [die, refuse("internal"), refuse("draining")])
def test_prefills_that_fail_beside_a_decode_leave_the_prompt_to_it(
    frontend: EmbeddedFrontend, bad: Answer
) -> None:
    """However many: the decode worker has not failed."""
    bads = [prefiller(42 + n, bad, bootstrap=BOOTSTRAP) for n in range(3)]
    with workers(frontend, FakeWorker(41, paired_or_alone), *bads):
        answer = ask(frontend.url, CHAT, BODY)
        assert answer.status == 200, answer.body
        assert answer.json["choices"][0]["message"]["content"] == "alone"
        assert prefills(frontend)["fallback"] == 1


def test_enforced_the_failure_beside_a_decode_is_told() -> None:
    bad = prefiller(42, refuse("internal", "out of blocks"), bootstrap=BOOTSTRAP)
    decode = FakeWorker(41, paired_or_alone)
    with EmbeddedFrontend("--enforce-disagg") as frontend, workers(frontend, decode, bad):
        answer = ask(frontend.url, CHAT, BODY)
        assert answer.status == 502 and "out of blocks" in answer.json["error"]["message"]


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_request_that_is_invalid_beside_its_decode_is_refused(
    frontend: EmbeddedFrontend, has_begun: bool
) -> None:
    """Also once the decode worker has begun a whole answer, of which the client has nothing."""

    def refuse_late(ask: Ask) -> bool | None:
        begun = "kvflash_first_byte_seconds_count"
        until(lambda: frontend.metric(begun) == has_begun, "the decode to have begun or not")
        return refuse("invalid", "too long")(ask)

    bads = [prefiller(42 + n, refuse_late, bootstrap=BOOTSTRAP) for n in (0, 1)]
    decode = two_items_then(hang) if has_begun else paired_or_alone
    with workers(frontend, FakeWorker(41, decode), *bads):
        answer = ask(frontend.url, CHAT, BODY)
        assert answer.status == 400 and "too long" in answer.json["error"]["message"]
        assert sum(len(bad.received) for bad in bads) == 1


def test_a_whole_answer_that_breaks_is_prefilled_and_decoded_again(
    frontend: EmbeddedFrontend,
) -> None:
    """As without disaggregation: the client has nothing of it."""
    decodes: list[Ask] = []

    def decode(ask: Ask) -> bool | None:
        decodes.append(ask)
        return two_items_then(die)(ask) if len(decodes) == 1 else say("hello")(ask)

    prefill = prefiller(42)
    with workers(frontend, FakeWorker(41, decode), FakeWorker(43, decode), prefill):
        answer = ask(frontend.url, CHAT, BODY)
        assert answer.status == 200, answer.body
        assert answer.json["choices"][0]["message"]["content"] == "hello"
        assert (prefiller_of(answer), len(prefill.received), len(decodes)) == (42, 2, 2)
        assert frontend.outcomes() == {"broken": 1, "complete": 1}
        assert frontend.metric('kvflash_attempts_failed_total{cause="no_answer"}') == 1


@pytest.mark.parametrize("other", [None, "draining", "without the adapter", "not the pinned one"])
def test_nothing_is_prefilled_that_no_worker_is_left_to_decode(
    frontend: EmbeddedFrontend, other: str | None
) -> None:
    decode = FakeWorker(41, two_items_then(die), lora_names=["a"])
    body = {**BODY, "model": "a"}
    with workers(frontend, decode, prefill := prefiller(42, lora_names=["a"])):
        if other is not None:
            names = [] if other == "without the adapter" else ["a"]
            frontend.put(left := FakeWorker(43, lora_names=names))
        if other == "draining":
            frontend.http.call("PATCH", "/workers/43", {"state": "draining"})
        if other == "not the pinned one":
            body["nvext"] = {"decode_worker_id": 41}
        answer = ask(frontend.url, CHAT, body)
        if other is not None:
            assert not left.received
            frontend.core.remove_worker(43)
            left.close()
        assert answer.status == 502 and "tried [41]" in answer.json["error"]["message"]
        assert len(prefill.received) == 1
        assert prefills(frontend) == {"handed_off": 1}


def test_explain_tells_who_would_prefill_and_who_decode(frontend: EmbeddedFrontend) -> None:
    with workers(frontend, FakeWorker(41), FakeWorker(43), prefiller(42)):
        pinned = {"decode_worker_id": 43, "prefill_worker_id": 42}
        explained = frontend.explain({**BODY, "nvext": pinned})
        assert (explained["worker"], explained["prefill"]["worker"]) == ("43:0", "42:0")
        # The decode worker's cache has no effect: the blocks come from the prefill worker.
        (chosen,) = (one for one in explained["candidates"] if one["worker"] == "43:0")
        assert chosen["price"]["queue"] == 0, chosen
        (chosen,) = explained["prefill"]["candidates"]
        assert chosen["price"]["decode"] == 0 < chosen["price"]["prefill"], chosen
        wrong = ask(frontend.url, "/explain", {**BODY, "nvext": {"decode_worker_id": 42}})
        assert wrong.status == 404
    with workers(frontend, FakeWorker(41)):
        assert "prefill" not in frontend.explain(BODY)


def test_a_remote_indexer_is_asked_about_both_sides() -> None:
    failed = 'kvflash_remote_indexer_lookups_total{outcome="failed"}'
    remote = ("--use-remote-indexer", f"http://127.0.0.1:{free_port()}")
    both = (FakeWorker(41), prefiller(42))
    with EmbeddedFrontend(*remote) as frontend, workers(frontend, *both):
        assert ask(frontend.url, CHAT, BODY).status == 200
        assert frontend.metric(failed) == 2


# -- OpenAI engines


def openai_prefill(exchange: Exchange) -> bool:
    body = json.loads(exchange.body)
    assert body["kv_transfer_params"]["do_remote_decode"] is True
    params = {"remote_engine_id": "p", "remote_port": 9, "do_remote_prefill": True}
    return exchange.whole(200, {"choices": [], "kv_transfer_params": params})


def test_openai_engines_are_paired_as_well() -> None:
    with EmbeddedFrontend() as frontend:
        decode, prefill = FakeEngine("o"), FakeEngine("o", openai_prefill)
        with decode, prefill:
            frontend.core.add_worker(decode.url)
            frontend.core.add_worker(prefill.url + ",role=prefill")
            until(lambda: all(w["healthy"] for w in frontend.workers().values()), "both to serve")
            body = {"model": "o", "prompt": list(range(64)), "max_tokens": 20, "stream": False}
            answer = ask(frontend.url, COMPLETIONS, body, {"x-request-id": "r7"})
            assert answer.status == 200
            assert answer.headers["x-kvflash-prefill-worker"] == "2:0"
            copy, request = (json.loads(one.received[0].body) for one in (prefill, decode))
            assert (copy["max_tokens"], copy["stream"]) == (1, False)
            assert request["max_tokens"] == 20
            assert request["kv_transfer_params"]["remote_engine_id"] == "p"
            assert prefill.received[0].header("x-request-id") == "r7"
            prefill.answer = lambda exchange: exchange.whole(500, {"error": "no blocks"})
            answer = ask(frontend.url, COMPLETIONS, body)
            assert answer.status == 200 and "x-kvflash-prefill-worker" not in answer.headers
            assert "kv_transfer_params" not in json.loads(decode.received[1].body)
            prefill.answer = lambda exchange: exchange.whole(400, {"error": "bad prompt"})
            assert ask(frontend.url, COMPLETIONS, body).status == 400
            frontend.wait_idle()


def test_a_prefill_that_is_refused_tells_nothing_of_its_worker_s_speed() -> None:
    with EmbeddedFrontend("--router-prefill-tokens-per-second", "auto") as frontend:
        decode = FakeEngine("o", max_len=50_000)
        prefill = FakeEngine("o", openai_prefill, max_len=50_000)
        with decode, prefill:
            frontend.core.add_worker(decode.url)
            frontend.core.add_worker(prefill.url + ",role=prefill")
            until(lambda: all(w["healthy"] for w in frontend.workers().values()), "both to serve")
            speed = 'kvflash_worker_prefill_tokens_per_second{worker="2:0"}'
            body = {"model": "o", "prompt": list(range(5_000)), "max_tokens": 2}
            prefill.answer = lambda exchange: exchange.whole(400, {"error": "bad prompt"})
            assert ask(frontend.url, COMPLETIONS, body).status == 400
            assert speed not in frontend.metrics()
            prefill.answer = openai_prefill
            assert ask(frontend.url, COMPLETIONS, body).status == 200
            assert frontend.metrics()[speed] > 0
            frontend.wait_idle()
