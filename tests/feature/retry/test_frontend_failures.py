"""Engines that die, hang, refuse and cut their answers short, and clients that leave."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ports import free_port
from service import until
from support_frontend import (
    CHAT,
    COMPLETIONS,
    DONE,
    Answer,
    Behaviour,
    Call,
    Exchange,
    FakeEngine,
    Frontend,
    Mocker,
    Raw,
    answer_json,
    ask,
    chunked_head_only,
    close_at_once,
    engines,
    half_json,
    hang,
    head_only,
    prompt_of,
    refuse_503,
    two_events_then_close,
    unframed_head_only,
)

# Round robin: the two engines of a test take turns, whichever was tried last.
QUICK = ("--health-interval", "0.2", "--router-mode", "round-robin")


@pytest.fixture(scope="module")
def frontend() -> Iterator[Frontend]:
    """A frontend that is quick to notice; tests bring engines under their own model names."""
    with Frontend(*QUICK) as frontend:
        yield frontend


@pytest.fixture(scope="module")
def impatient() -> Iterator[Frontend]:
    """Another one, for engines that say nothing."""
    with Frontend(*QUICK, "--first-byte-timeout", "1.5") as frontend:
        yield frontend


def patience(request: pytest.FixtureRequest, behaviour: Behaviour) -> Frontend:
    """The frontend for engines of this behaviour."""
    return request.getfixturevalue("impatient" if behaviour is hang else "frontend")


def failed(frontend: Frontend, cause: str) -> float:
    return frontend.metric(f'kvflash_attempts_failed_total{{cause="{cause}"}}')


# -- before the first byte: another worker does it


@pytest.mark.parametrize(
    ("behaviour", "cause"),
    [
        (close_at_once, "no_answer"),
        (head_only, "no_first_byte"),
        (chunked_head_only, "no_first_byte"),
        (unframed_head_only, "no_first_byte"),
        (refuse_503, "unavailable"),
        (hang, "timeout"),
    ],
)
def test_another_worker_takes_over(
    request: pytest.FixtureRequest, behaviour: Behaviour, cause: str
) -> None:
    frontend = patience(request, behaviour)
    bad, good = FakeEngine("over", behaviour), FakeEngine("over")
    before = failed(frontend, cause)
    with engines(frontend, bad, good) as (bad_id, good_id):
        # Two requests, so that one of them reaches the bad engine in any order.
        for n in range(2):
            frontend.wait_healthy(bad_id, good_id)
            got = ask(frontend.url, COMPLETIONS, prompt_of("over", n=n))
            assert (got.status, got.worker) == (200, good_id)
            assert got.json == {"object": "answer", "choices": []}
        assert [json.loads(e.body)["n"] for e in good.received] == [0, 1]
        assert len(bad.received) >= 1
        assert failed(frontend, cause) - before == len(bad.received)
        frontend.wait_idle()


@pytest.mark.parametrize(
    ("behaviour", "status", "wanted"),
    [
        (close_at_once, 502, "no worker answered"),
        (head_only, 502, "broke off its answer"),
        (refuse_503, 503, "answered 503"),
        (hang, 504, "--first-byte-timeout"),
    ],
)
def test_no_worker_is_left(
    request: pytest.FixtureRequest, behaviour: Behaviour, status: int, wanted: str
) -> None:
    frontend = patience(request, behaviour)
    with engines(frontend, FakeEngine("none", behaviour)) as (worker,):
        got = ask(frontend.url, COMPLETIONS, prompt_of("none"))
        assert got.status == status
        error = got.json["error"]
        assert wanted in error["message"]
        assert f"[{worker}]" in error["message"]
        assert ("retry-after" in got.headers) == (status == 503)
        frontend.wait_idle()


def test_busy_worker_stays_healthy(frontend: Frontend) -> None:
    with FakeEngine("busy", refuse_503) as fake, engines(frontend, fake) as (worker,):
        failures = frontend.workers()[worker]["failures"]
        assert ask(frontend.url, COMPLETIONS, prompt_of("busy")).status == 503
        assert frontend.workers()[worker]["healthy"]
        assert frontend.workers()[worker]["failures"] == failures


def test_a_refused_request_is_tried_at_one_more_worker() -> None:
    fakes = [FakeEngine("many", refuse_503) for _ in range(5)]
    with Frontend() as frontend, engines(frontend, *fakes):
        assert ask(frontend.url, COMPLETIONS, prompt_of("many")).status == 503
        assert sorted(len(fake.received) for fake in fakes) == [0, 0, 0, 1, 1]


def test_refused_connection_makes_unhealthy_until_the_engine_is_back(frontend: Frontend) -> None:
    port = free_port()
    first = FakeEngine("gone", port=port)
    worker = frontend.add(first.url)
    first.close()
    got = ask(frontend.url, COMPLETIONS, prompt_of("gone"))
    # Tried and refused, or known to be down from a health check: either way it is said why.
    assert got.status in (502, 503), got
    assert str(worker) in got.json["error"]["message"]
    frontend.wait_unhealthy(worker)
    got = ask(frontend.url, COMPLETIONS, prompt_of("gone"))
    assert got.status == 503
    assert got.headers["retry-after"] == "1"
    message = got.json["error"]["message"]
    assert f"1 registered, 0 healthy; unhealthy: {worker}: " in message
    assert "refused" in message
    warnings = frontend.http.call("GET", "/health")[1]["warnings"]
    assert any(one.startswith(f"worker {worker}: ") for one in warnings)
    with FakeEngine("gone", port=port):
        frontend.wait_healthy(worker)
        assert ask(frontend.url, COMPLETIONS, prompt_of("gone")).status == 200
        frontend.remove(worker)


def test_health_of_the_engine_decides(frontend: Frontend) -> None:
    with FakeEngine("ill") as fake, engines(frontend, fake) as (worker,):
        fake.health = 500
        frontend.wait_unhealthy(worker)
        label = f'kvflash_worker_healthy{{worker="{worker}"}}'
        assert frontend.metrics()[label] == 0
        got = ask(frontend.url, COMPLETIONS, prompt_of("ill"))
        assert got.status == 503
        assert "GET /health answered 500" in got.json["error"]["message"]
        assert frontend.workers()[worker]["last_status"] == 500
        fake.health = 200
        frontend.wait_healthy(worker)
        assert frontend.workers()[worker]["last_status"] is None
        assert frontend.metrics()[label] == 1
        assert ask(frontend.url, COMPLETIONS, prompt_of("ill")).status == 200


def test_no_worker_at_all(frontend: Frontend) -> None:
    refused = 'kvflash_refused_requests_total{cause="no_worker"}'
    before = frontend.metric(refused)
    got = ask(frontend.url, COMPLETIONS, prompt_of("any"))
    assert got.status == 503
    assert got.headers["retry-after"] == "1"
    assert "no worker is registered" in got.json["error"]["message"]
    status, body, _ = frontend.http.call("GET", "/health")
    assert (status, body["status"], body["workers"]) == (503, "unavailable", 0)
    assert frontend.metric(refused) == before + 1


def test_no_worker_at_all_without_a_model_name(frontend: Frontend) -> None:
    got = ask(frontend.url, COMPLETIONS, {"prompt": "x"})
    assert got.status == 503, got


def test_limit_of_concurrent_requests() -> None:
    with Frontend("--max-concurrent-requests", "2") as frontend:
        release = threading.Event()

        def wait(exchange: Exchange) -> bool:
            release.wait(30)
            return answer_json(exchange)

        with FakeEngine("full", wait) as fake, engines(frontend, fake):
            calls = [Call(frontend.url, COMPLETIONS, prompt_of("full")) for _ in range(2)]
            until(lambda: len(fake.received) == 2, "two requests at the engine")
            got = ask(frontend.url, COMPLETIONS, prompt_of("full"))
            assert got.status == 429
            assert int(got.headers["retry-after"]) >= 1
            assert "--max-concurrent-requests" in got.json["error"]["message"]
            assert frontend.metric('kvflash_refused_requests_total{cause="concurrency"}') == 1
            # Nor is the answer lost to a client that is still sending.
            with Raw(frontend.address) as large:
                body = b" " * 3_000_000
                head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
                large.send(head.encode() + b"\r\n" + body)
                assert large.read_answer()[0] == 429
            # Operators' requests are not refused.
            assert frontend.http.get("/health")["requests_in_flight"] == 2
            release.set()
            assert [call.finish().status for call in calls] == [200, 200]
            assert ask(frontend.url, COMPLETIONS, prompt_of("full")).status == 200
            assert len(fake.received) == 3


# -- after the first byte: the client gets an error


def test_stream_that_breaks_ends_with_an_error_event(frontend: Frontend) -> None:
    fake = FakeEngine("cut", two_events_then_close)
    broken = frontend.metric("kvflash_streams_broken_total")
    with engines(frontend, fake) as (worker,):
        # finish() raises unless the chunked body was ended properly.
        got = ask(frontend.url, COMPLETIONS, prompt_of("cut", stream=True))
        assert got.status == 200
        first, second, error = got.events
        assert (first, second) == ({"n": 1}, {"n": 2})
        assert error["error"]["code"] == 502
        assert f"worker {worker} broke off" in error["error"]["message"]
        assert frontend.metric("kvflash_streams_broken_total") - broken == 1
        assert len(fake.received) == 1
        frontend.wait_idle()


def test_stream_that_breaks_within_an_event(frontend: Frontend) -> None:
    def cut(exchange: Exchange) -> None:
        exchange.open_stream()
        exchange.chunk(b'data: {"n": 1}\n\n')
        exchange.chunk(b'data: {"n": "ha')

    with engines(frontend, FakeEngine("half", cut)):
        # Half an event would be taken for a whole one, and fail as JSON before the error is read.
        first, error = ask(frontend.url, COMPLETIONS, prompt_of("half", stream=True)).events
        assert (first, error["error"]["code"]) == ({"n": 1}, 502)


def test_events_that_come_in_parts_and_a_last_one_without_its_end(frontend: Frontend) -> None:
    parts = [b"data: ", b'{"n": 1}', b"\n", b"\ndata: [DONE]"]

    def drip(exchange: Exchange) -> bool:
        exchange.open_stream()
        for part in [*parts, b""]:
            exchange.chunk(part)
        return True

    with engines(frontend, FakeEngine("parts", drip)):
        got = ask(frontend.url, COMPLETIONS, prompt_of("parts", stream=True))
        assert got.body == b"".join(parts)


def test_a_compressed_stream_passes_as_it_comes(frontend: Frontend) -> None:
    head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\n"
    data = b"\x1f\x8b no line ends here"

    def zipped(exchange: Exchange) -> None:
        exchange.send(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
        exchange.chunk(data)
        exchange.wait_gone()

    with engines(frontend, FakeEngine("zip", zipped)):
        call = Call(frontend.url, COMPLETIONS, prompt_of("zip", stream=True))
        # It is not held back for the end of a line that may never come.
        assert call.response.read(len(data)) == data
        call.hang_up()
        frontend.wait_idle()


def test_stream_with_a_length_that_breaks(frontend: Frontend) -> None:
    def cut(exchange: Exchange) -> None:
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 999\r\n\r\n"
        exchange.send(head.encode() + b'data: {"n": 1}\n\n')

    with engines(frontend, FakeEngine("length", cut)):
        got = ask(frontend.url, COMPLETIONS, prompt_of("length", stream=True))
        assert got.events[-1]["error"]["code"] == 502


def test_whole_answer_that_breaks_is_never_a_short_200(frontend: Frontend) -> None:
    broken = frontend.metric("kvflash_streams_broken_total")
    with FakeEngine("short", half_json) as fake, engines(frontend, fake):
        with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
            ask(frontend.url, COMPLETIONS, prompt_of("short"))
        assert frontend.metric("kvflash_streams_broken_total") - broken == 1
        # Bytes had come: no second engine may repeat them.
        assert len(fake.received) == 1
        frontend.wait_idle()


def test_chunked_answer_that_breaks_has_no_end(frontend: Frontend) -> None:
    def cut(exchange: Exchange) -> None:
        exchange.send(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        exchange.chunk(b'{"choices": [')

    with engines(frontend, FakeEngine("torn", cut)):
        with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
            ask(frontend.url, COMPLETIONS, prompt_of("torn"))
        frontend.wait_idle()


def test_answers_that_are_not_http(frontend: Frontend) -> None:
    for garbage in (
        b"SSH-2.0-x\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 1_000_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
    ):
        bad = FakeEngine("odd", lambda exchange, garbage=garbage: exchange.send(garbage))
        with engines(frontend, bad):
            got = ask(frontend.url, COMPLETIONS, prompt_of("odd"))
            assert got.status == 502, got
            assert got.json["error"]["type"] == "upstream_error"


EVIL = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"


def test_bytes_after_an_answer_poison_nothing(frontend: Frontend) -> None:
    def extra(exchange: Exchange) -> bool:
        n = json.loads(exchange.body)["n"]
        exchange.send(b'HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n{"n": %d}' % n + EVIL)
        return True

    with engines(frontend, FakeEngine("extra", extra)):
        for n in range(5):
            assert ask(frontend.url, COMPLETIONS, prompt_of("extra", n=n)).json == {"n": n}


# -- workers killed under load

REQUESTS = 200
TOKENS = 24


def test_killed_worker_loses_nothing_that_had_no_byte() -> None:
    with (
        # The victim finishes nothing before it dies.
        Mocker("--speedup-ratio", "0.02") as victim,
        Mocker("--speedup-ratio", "5", workers=2) as rest,
        Frontend(
            *("--worker", victim.spec(), "--worker", rest.spec(0), "--worker", rest.spec(1)),
            *("--health-interval", "0.2", "--router-mode", "round-robin"),
        ) as frontend,
    ):
        frontend.wait_healthy(1, 2, 3)

        def one(n: int) -> Answer:
            # The length names the request, so that an answer meant for another one shows.
            body = {"model": "m", "prompt": [n] * (n + 1), "max_tokens": TOKENS}
            return ask(frontend.url, COMPLETIONS, body)

        with ThreadPoolExecutor(REQUESTS) as pool:
            futures = [pool.submit(one, n) for n in range(REQUESTS)]
            until(lambda: victim.metric("vllm:num_requests_running") >= 20, "load at the victim")
            victim.kill()
            answers = [future.result(60) for future in futures]

        assert [answer.status for answer in answers] == [200] * REQUESTS
        for n, answer in enumerate(answers):
            assert answer.usage["prompt_tokens"] == n + 1
            assert answer.usage["completion_tokens"] == TOKENS
        assert len({answer.json["id"] for answer in answers}) == REQUESTS
        moved = sum(v for k, v in frontend.metrics().items() if "attempts_failed_total" in k)
        assert moved >= 20
        assert frontend.metric("kvflash_streams_broken_total") == 0
        answered = '{endpoint="/v1/completions",status="200"}'
        assert frontend.metric("kvflash_requests_total" + answered) == REQUESTS
        frontend.wait_idle()


def test_killed_worker_breaks_only_streams_that_had_begun() -> None:
    with (
        Mocker("--speedup-ratio", "0.05") as victim,
        Mocker("--speedup-ratio", "20") as rest,
        Frontend(
            *("--worker", victim.spec(), "--worker", rest.spec()),
            *("--router-mode", "round-robin"),
        ) as frontend,
    ):
        frontend.wait_healthy(1, 2)
        began = threading.Semaphore(0)

        def one(n: int) -> Answer:
            body = {"model": "m", "prompt": [n] * 40, "max_tokens": 60, "stream": True}
            call = Call(frontend.url, COMPLETIONS, body)
            if call.response.getheader("x-kvflash-worker", "").startswith("1:"):
                began.release()
            return call.finish()

        with ThreadPoolExecutor(60) as pool:
            futures = [pool.submit(one, n) for n in range(60)]
            for _ in range(10):
                assert began.acquire(timeout=30)
            victim.kill()
            answers = [future.result(60) for future in futures]

        broken = 0
        for answer in answers:
            assert answer.status == 200
            events = answer.events
            if "error" in events[-1]:
                broken += 1
                assert answer.worker == 1
                assert events.pop()["error"]["code"] == 502
                assert len(events) < 60
            else:
                assert len(events) == 60
            assert not any("error" in event for event in events)
        assert 10 <= broken <= 30
        assert frontend.metric("kvflash_streams_broken_total") == broken
        frontend.wait_idle()


@pytest.mark.parametrize("ending", [DONE, b""])
def test_an_error_event_of_the_engine_is_no_complete_answer(ending: bytes) -> None:
    events = b'data: {"choices": [{"text": "a"}]}\n\ndata: {"error": {"code": 500}}\n\n' + ending

    def answer(exchange: Exchange) -> bool:
        exchange.open_stream()
        exchange.chunk(events)
        exchange.chunk(b"")
        return True

    with FakeEngine("m", answer) as fake, Frontend("--worker", fake.url) as frontend:
        frontend.wait_healthy(1)
        body = {"model": "m", "prompt": "x", "stream": True}
        got = ask(frontend.url, COMPLETIONS, body, {"x-request-id": "r"})
        assert (got.status, got.body) == (200, events)
        frontend.wait_idle()
        (decision,) = frontend.http.get("/why/r")["decisions"]
        assert decision["outcome"] == "broken"
        assert frontend.metric("kvflash_streams_broken_total") == 1
        assert frontend.workers()[1]["healthy"]


# -- clients that leave


@pytest.fixture(scope="module")
def slow() -> Iterator[tuple[Frontend, Mocker]]:
    """An engine in real time behind a frontend."""
    with (
        Mocker("--speedup-ratio", "0.5") as mocker,
        Frontend("--worker", mocker.spec()) as frontend,
    ):
        frontend.wait_healthy(1)
        yield frontend, mocker


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("moment", ["waiting", "streaming"])
def test_client_that_leaves_ends_its_request_at_the_engine(
    slow: tuple[Frontend, Mocker], path: str, moment: str
) -> None:
    frontend, mocker = slow
    gone = frontend.metric("kvflash_clients_gone_total")
    aborted = mocker.metric("mocker:requests_aborted_total")
    prompt = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    body = {"model": "m", **prompt, "max_tokens": 4_000, "stream": moment == "streaming"}
    names = [{"x-request-id": f"{moment}-{path}-{n}".replace("/", "-")} for n in range(5)]
    calls = [Call(frontend.url, path, body, name) for name in names]
    mocker.wait_metric("vllm:num_requests_running", 5)
    label = 'kvflash_worker_active_requests{worker="1:0"}'
    assert frontend.metrics()[label] == 5
    assert frontend.metric("kvflash_requests_in_flight") == 5
    if moment == "streaming":
        for call in calls:
            assert call.read_event().startswith(b"data: ")
    for call in calls:
        call.hang_up()
    mocker.wait_metric("vllm:num_requests_running", 0)
    assert mocker.metric("mocker:requests_aborted_total") - aborted == 5
    frontend.wait_idle()
    assert frontend.metrics()[label] == 0
    until(
        lambda: frontend.metric("kvflash_clients_gone_total") - gone == 5,
        "the clients to be counted",
    )
    for name in names:
        (decision,) = frontend.http.get(f"/why/{name['x-request-id']}")["decisions"]
        assert decision["outcome"] == "client_gone"


@pytest.mark.parametrize(
    ("path", "last", "outcome"),
    [
        (CHAT, DONE, "complete"),
        ("/v1/messages", b'data: {"type": "message_stop"}\n\n', "complete"),
        # Clients close at an error, too.
        (CHAT, b'data: {"error": {"code": 500}}\n\n', "broken"),
    ],
)
def test_client_that_leaves_at_the_last_event_has_its_whole_answer(
    path: str, last: bytes, outcome: str
) -> None:
    def answer(exchange: Exchange) -> None:
        exchange.open_stream()
        exchange.chunk(b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n')
        exchange.chunk(last)
        exchange.wait_gone()

    with FakeEngine("m", answer) as fake, Frontend("--worker", fake.url) as frontend:
        frontend.wait_healthy(1)
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
        call = Call(frontend.url, path, {**body, "stream": True}, {"x-request-id": "r"})
        while call.read_event() + b"\n" != last:
            pass
        call.hang_up()
        frontend.wait_idle()
        (decision,) = frontend.http.get("/why/r")["decisions"]
        assert decision["outcome"] == outcome
        assert frontend.metric("kvflash_clients_gone_total") == 0


def test_client_that_leaves_while_the_prompt_is_tokenized() -> None:
    asked, release = threading.Event(), threading.Event()

    def tokenize(_body: object) -> list[int]:
        asked.set()
        release.wait(30)
        return [1]

    with Frontend("--tokenize-timeout", "20") as kv, FakeEngine("tok", tokenize=tokenize) as fake:
        kv.add(fake.url)
        call = Call(kv.url, COMPLETIONS, {"model": "tok", "prompt": "text"})
        assert asked.wait(30)
        call.hang_up()
        kv.wait_idle()
        release.set()
        # The client no longer waits for an answer, so no engine is asked for one.
        assert fake.received == []
        assert kv.metric("kvflash_clients_gone_total") == 1


def test_hanging_tokenizer_costs_credit_not_the_request() -> None:
    release = threading.Event()

    def tokenize(_body: object) -> list[int]:
        release.wait(30)
        return [1]

    fake = FakeEngine("slow", tokenize=tokenize)
    with Frontend("--tokenize-timeout", "0.2") as frontend, engines(frontend, fake):
        body = {"model": "slow", "prompt": "text"}
        assert ask(frontend.url, COMPLETIONS, body).status == 200
        release.set()
        name = 'kvflash_untokenized_requests_total{cause="tokenize_timeout"}'
        assert frontend.metric(name) == 1
        assert frontend.metric('kvflash_tokens_total{stage="selected"}') == 0
