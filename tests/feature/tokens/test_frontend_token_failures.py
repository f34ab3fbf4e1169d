"""Token workers that fail in every way: one end for each request, and no load left behind."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ports import free_port
from service import until
from support_frontend import CHAT, Call, ask
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
    wait_for,
    workers,
)

BODY = {"model": "m", "messages": [{"role": "user", "content": "Say it"}]}
STREAM = {**BODY, "stream": True}
BEGUN = "kvflash_first_byte_seconds_count"
# For those that wait for the end of a worker's silence.
IMPATIENT = ("--first-byte-timeout", "1.5", "--stream-idle-timeout", "1.5")


@pytest.fixture
def frontend() -> Iterator[EmbeddedFrontend]:
    with EmbeddedFrontend() as running:
        yield running


@pytest.fixture
def impatient() -> Iterator[EmbeddedFrontend]:
    with EmbeddedFrontend(*IMPATIENT) as running:
        yield running


def garbage(data: bytes) -> Answer:
    def answer(ask: Ask) -> bool:
        ask.send(data)
        return False

    return answer


BAD_FRAMES = {
    "http": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "kind": struct.pack(">IB", 1, 9),
    "too large": struct.pack(">IB", 2**31, 2),
    "not msgpack": struct.pack(">IB", 3, 2) + b"\xc1\xc1",
    "a request": struct.pack(">IB", 2, 1) + b"\xc0",
    "half a frame": struct.pack(">IB", 100, 2) + b"\x81",
}


@pytest.mark.parametrize(
    "bad",
    [
        die,
        hang,
        refuse("overloaded"),
        refuse("draining"),
        refuse("not_found"),
        refuse("internal"),
        lambda ask: ask.end(),
        lambda ask: ask.item(finish="error", text="out of memory") or ask.end(),
        *(garbage(data) for data in BAD_FRAMES.values()),
    ],
)
def test_before_the_first_item_another_worker_is_tried(bad: Answer) -> None:
    first = {"backend_instance_id": 31}
    flags = IMPATIENT if bad is hang else ()
    bad_one, good = FakeWorker(31, bad), FakeWorker(32)
    with EmbeddedFrontend(*flags) as frontend, workers(frontend, bad_one, good):
        alone = ask(frontend.url, CHAT, {**BODY, "nvext": first})
        assert alone.status in (502, 503, 504), alone.body
        for body in (BODY, STREAM, BODY, STREAM):
            answer = ask(frontend.url, CHAT, body)
            assert (answer.status, answer.worker) == (200, 32), answer.body
        assert frontend.outcomes() == {"complete": 4}


def test_a_request_that_the_worker_calls_wrong_is_not_tried_again(
    frontend: EmbeddedFrontend,
) -> None:
    bad = refuse("invalid", "no such adapter")
    with workers(frontend, one := FakeWorker(31, bad), two := FakeWorker(32, bad)):
        answer = ask(frontend.url, CHAT, BODY)
        assert answer.status == 400
        assert "no such adapter" in answer.json["error"]["message"]
        assert len(one.received) + len(two.received) == 1
        assert all(worker["healthy"] for worker in frontend.workers().values())


@pytest.mark.parametrize(
    "bad",
    [
        die,
        hang,
        refuse("internal", "the engine died"),
        refuse("draining"),
        lambda ask: ask.item(finish="error", text="out of memory") or ask.end(),
        lambda ask: ask.item(finish="cancelled") or ask.end(),
        *(garbage(data) for data in BAD_FRAMES.values()),
    ],
)
def test_after_it_the_client_hears_of_it_once(bad: Answer) -> None:
    flags = IMPATIENT if bad is hang else ()
    worker = FakeWorker(31, two_items_then(bad))
    with EmbeddedFrontend(*flags) as frontend, workers(frontend, worker):
        events = ask(frontend.url, CHAT, STREAM).events
        assert [("error" in event) for event in events[-2:]] == [False, True]
        assert "31" in events[-1]["error"]["message"]
        assert not any(choice["finish_reason"] for e in events[:-1] for choice in e["choices"])
        wait_for(frontend, "broken", 1)
        whole = ask(frontend.url, CHAT, {**BODY, "nvext": {"backend_instance_id": 31}})
        assert whole.status in (502, 503, 504), whole.body
        assert set(frontend.outcomes()) == {"broken"}


@pytest.mark.parametrize("answers_pings", [True, False])
@pytest.mark.parametrize(
    "bad", [die, hang, refuse("internal"), garbage(BAD_FRAMES["half a frame"])]
)
def test_a_whole_answer_that_breaks_is_made_by_another_worker(
    bad: Answer, answers_pings: bool
) -> None:
    flags = IMPATIENT if bad is hang and answers_pings else ()
    bad_one = FakeWorker(31, two_items_then(bad), answers_pings=answers_pings)
    good = FakeWorker(32)
    with EmbeddedFrontend(*flags) as frontend, workers(frontend, bad_one, good):
        while not bad_one.received:
            answer = ask(frontend.url, CHAT, BODY)
            assert (answer.status, answer.worker) == (200, 32), answer.body
            assert answer.json["choices"][0]["message"]["content"] == "hello"
        assert frontend.outcomes() == {"broken": 1, "complete": len(good.received)}
        frontend.wait_idle()


TEXT: dict[str, Any] = {"model_input": "text", "tokenizer": None}


def chunk(**fields: Any) -> bytes:
    """A frame of a worker of text."""
    return frame(DATA, {"id": "c", "object": "chat.completion.chunk", **fields})


def says_then_fails(error: Any) -> Answer:
    def answer(ask: Ask) -> bool:
        delta = {"role": "assistant", "content": "a"}
        ask.send(chunk(choices=[{"index": 0, "delta": delta, "finish_reason": None}]))
        ask.send(frame(DATA, {"error": error}))
        return ask.end()

    return answer


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ({"message": "too long a prompt", "type": "BadRequestError", "code": 400}, 400),
        ({"message": "too long a prompt", "code": 500}, 502),
        ("too long a prompt", 502),
    ],
)
def test_an_error_among_a_text_workers_chunks_is_no_answer(
    frontend: EmbeddedFrontend, error: Any, status: int
) -> None:
    with workers(frontend, worker := FakeWorker(31, says_then_fails(error), **TEXT)):
        whole = ask(frontend.url, CHAT, BODY)
        assert whole.status == status, whole.body
        assert "too long a prompt" in whole.json["error"]["message"]
        events = ask(frontend.url, CHAT, STREAM).events
        assert events[-1] == {"error": error}
        wait_for(frontend, "broken", 2)
        # By itself it is an attempt that failed, and a wrong request is not sent to anybody else.
        worker.answer = lambda ask: ask.send(frame(DATA, {"error": error})) or ask.end()
        with workers(frontend, FakeWorker(32, worker.answer, **TEXT)):
            before = len(worker.received)
            for body in (BODY, STREAM):
                alone = ask(frontend.url, CHAT, body)
                assert alone.status == status, alone.body
                assert "too long a prompt" in alone.json["error"]["message"]
            assert status == 502 or len(worker.received) - before <= 2
        assert frontend.outcomes() == {"broken": 2}
        assert all(one["healthy"] for one in frontend.workers().values())


def test_a_client_that_leaves_ends_the_generation(frontend: EmbeddedFrontend) -> None:
    with workers(frontend, worker := FakeWorker(31, two_items_then(hang))):
        for count, body in enumerate((STREAM, BODY), start=1):
            call = Call(frontend.url, CHAT, body)
            until(lambda count=count: frontend.metric(BEGUN) == count, "the first item")
            call.hang_up()
            until(worker.received[-1].is_gone.is_set, "the worker to be told")
            frontend.wait_idle()
            assert len(worker.received) == count
        wait_for(frontend, "client_gone", 2)
        assert frontend.outcomes() == {"client_gone": 2}


def test_a_worker_that_dies_is_left_alone_until_it_answers(frontend: EmbeddedFrontend) -> None:
    with workers(frontend, dead := FakeWorker(31), FakeWorker(32)):
        dead.close()
        answers = [ask(frontend.url, CHAT, BODY) for _ in range(8)]
        assert {(answer.status, answer.worker) for answer in answers} == {(200, 32)}
        failed = [
            frontend.metric(f'kvflash_attempts_failed_total{{cause="{cause}"}}')
            for cause in ("connect", "no_answer")
        ]
        assert sum(failed) <= 2
        frontend.wait_unhealthy(31)
        with FakeWorker(31) as successor:
            frontend.put(successor)
            frontend.wait_healthy(31)


def test_one_in_doubt_comes_back_with_a_ping(frontend: EmbeddedFrontend) -> None:
    with workers(frontend, worker := FakeWorker(31, die, answers_pings=False)):
        assert ask(frontend.url, CHAT, BODY).status == 502
        frontend.wait_unhealthy(31)
        answer = ask(frontend.url, CHAT, BODY)
        assert answer.status == 503 and "31: " in answer.json["error"]["message"]
        worker.answer, worker.answers_pings = say("well again"), True
        frontend.wait_healthy(31)
        assert ask(frontend.url, CHAT, BODY).status == 200


def test_a_port_that_takes_nothing_is_given_up(impatient: EmbeddedFrontend) -> None:
    """Half open: the connection stands without a reader or a writer."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as silent:
        with FakeWorker(31) as model:
            spec = model.spec()
        spec["plane"]["address"] = f"127.0.0.1:{silent.getsockname()[1]}"
        impatient.core.put_worker(json.dumps(spec))
        with workers(impatient, FakeWorker(32)):
            for _ in range(3):
                answer = ask(impatient.url, CHAT, BODY)
                assert (answer.status, answer.worker) == (200, 32)
            impatient.wait_unhealthy(31)
        impatient.core.remove_worker(31)


def test_registrations_that_flap_lose_no_request(frontend: EmbeddedFrontend) -> None:
    """Requests go on while one worker comes and goes; each has one end."""
    statuses: list[int] = []
    done = threading.Event()

    flaps = 0

    def flap(worker: FakeWorker) -> None:
        nonlocal flaps
        # A pause: without one the requests would mostly wait for this thread.
        while not done.wait(0.001):
            frontend.put(worker)
            frontend.core.remove_worker(worker.id)
            flaps += 1

    with workers(frontend, FakeWorker(31)), FakeWorker(32) as flapping:
        thread = threading.Thread(target=flap, args=(flapping,))
        thread.start()
        try:
            for body in (BODY, STREAM) * 20:
                answer = ask(frontend.url, CHAT, body)
                statuses.append(answer.status)
        finally:
            done.set()
            thread.join()
        assert statuses == [200] * 40
        assert flaps > 10
        frontend.wait_idle()
        assert frontend.outcomes() == {"complete": 40}


def test_a_slow_worker_is_waited_for() -> None:
    gate = threading.Event()

    def slow(ask: Ask) -> bool:
        ask.item(40)
        gate.wait(0.5)
        return bool(say("late")(ask))

    flags = ("--stream-idle-timeout", "5")
    with EmbeddedFrontend(*flags) as frontend, workers(frontend, FakeWorker(31, slow)):
        answers: list[Any] = [ask(frontend.url, CHAT, STREAM)]
        assert answers[0].events[-1]["choices"][0]["finish_reason"] == "stop"


def test_nobody_there_is_said(frontend: EmbeddedFrontend) -> None:
    with FakeWorker(31) as model:
        spec = model.spec()
    spec["plane"]["address"] = f"127.0.0.1:{free_port()}"
    frontend.core.put_worker(json.dumps(spec))
    answer = ask(frontend.url, CHAT, BODY)
    assert answer.status == 502 and "can't connect" in answer.json["error"]["message"]
    frontend.core.remove_worker(31)
    answer = ask(frontend.url, CHAT, BODY)
    assert answer.status == 503
    frontend.wait_idle()
