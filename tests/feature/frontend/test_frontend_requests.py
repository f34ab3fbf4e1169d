"""The frontend as its clients see it: good requests reach the worker that knows them, bad ones
are refused with the reason, and the process goes on either way."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from service import VECTORS, until
from support_frontend import (
    CHAT,
    COMPLETIONS,
    Answer,
    Call,
    Exchange,
    FakeEngine,
    Frontend,
    Mocker,
    Raw,
    ask,
    engines,
    prompt_of,
)

BLOCK = 16
LIMIT = 1_000_000
FOLDER = str(VECTORS / "tiny-llama")
STAGES = ("input", "available", "selected", "delivered")


# -- requests through real engines


@pytest.fixture(scope="module", params=["engine_tokenizes", "frontend_tokenizes"])
def stack(request: pytest.FixtureRequest) -> Iterator[Frontend]:
    """Two engines behind a frontend, with and without a tokenizer of its own."""
    flags = ("--tokenizer", FOLDER) if request.param == "frontend_tokenizes" else ()
    with (
        Mocker("--speedup-ratio", "1000", *flags, workers=2) as mocker,
        Frontend("--worker", mocker.spec(0), "--worker", mocker.spec(1), *flags) as frontend,
    ):
        frontend.wait_healthy(1, 2)
        yield frontend


@pytest.fixture(scope="module")
def frontend() -> Iterator[Frontend]:
    """A frontend with tight limits; tests bring their own engines, under their own names."""
    flags = ("--max-body-bytes", str(LIMIT), "--body-timeout", "1.5", "--health-interval", "0.2")
    with Frontend(*flags) as frontend:
        yield frontend


@pytest.fixture(scope="module", autouse=True)
def slow_head(frontend: Frontend) -> Iterator[Raw]:
    """A client that never finishes its head: opened early, looked at last."""
    with Raw(frontend.address) as raw:
        raw.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        yield raw


def request_of(path: str, text: str, **more: Any) -> dict[str, Any]:
    if path == CHAT:
        turns = [{"role": "system", "content": text}, {"role": "user", "content": "Go."}]
        return {"model": "m", "messages": turns, "max_tokens": 5, **more}
    return {"model": "m", "prompt": text, "max_tokens": 5, **more}


def tokens(frontend: Frontend) -> dict[str, float]:
    metrics = frontend.metrics()
    return {stage: metrics[f'kvflash_tokens_total{{stage="{stage}"}}'] for stage in STAGES}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_second_time_goes_where_the_prompt_is_cached(
    stack: Frontend, path: str, is_stream: bool
) -> None:
    text = f"{is_stream}: the same {path} prompt. " * 20
    more = {"stream": True, "stream_options": {"include_usage": True}} if is_stream else {}
    body = request_of(path, text, **more)
    before = tokens(stack)
    answers: list[Answer] = []
    for _ in range(3):
        answers.append(ask(stack.url, path, body))
        assert answers[-1].status == 200
        until(lambda: max(stack.overlaps(body).values()) > 0, "the events of the first answer")
        explained = stack.explain(body)
        assert explained["prompt_tokens"] == answers[0].usage["prompt_tokens"]
    after = tokens(stack)

    first, *others = answers
    assert (first.overlap_blocks, first.cached_tokens) == (0, 0)
    prompt_tokens = first.usage["prompt_tokens"]
    assert prompt_tokens > 5 * BLOCK
    for answer in others:
        assert answer.worker == first.worker
        assert answer.overlap_blocks == (prompt_tokens - 1) // BLOCK
        assert answer.overlap_blocks * BLOCK == answer.cached_tokens
    grown = {stage: after[stage] - before[stage] for stage in STAGES}
    assert grown["input"] == 3 * prompt_tokens
    cached = sum(answer.cached_tokens for answer in others)
    assert cached > 0
    assert grown["available"] == grown["selected"] == grown["delivered"] == cached
    stack.wait_idle()


def test_stream_is_whole_and_ends_with_done(stack: Frontend) -> None:
    body = request_of(CHAT, "Count the chunks.", max_tokens=9)
    whole = ask(stack.url, CHAT, body).json
    answer = ask(stack.url, CHAT, {**body, "stream": True})
    assert answer.status == 200
    deltas = [event["choices"][0]["delta"] for event in answer.events]
    assert deltas[0]["role"] == "assistant"
    text = "".join(delta["content"] for delta in deltas)
    assert text == whole["choices"][0]["message"]["content"]
    assert answer.events[-1]["choices"][0]["finish_reason"] == "length"


def test_last_token_of_a_prompt_is_never_credited(stack: Frontend) -> None:
    # Exactly four blocks: the engine computes the last token anew, so it reuses three of them.
    body = {"model": "m", "prompt": list(range(100, 164)), "max_tokens": 2}
    ask(stack.url, COMPLETIONS, body)
    until(lambda: max(stack.overlaps(body).values()) == 4, "four blocks to be indexed")
    answer = ask(stack.url, COMPLETIONS, body)
    assert (answer.overlap_blocks, answer.cached_tokens) == (3, 48)
    assert stack.explain(body)["expected_cached_tokens"] == 48


def test_explain_books_and_sends_nothing(stack: Frontend) -> None:
    body = request_of(COMPLETIONS, "Only asking. " * 10)
    before = {worker["id"]: worker["requests"] for worker in stack.http.get("/workers")}
    answers = [stack.explain(body) for _ in range(5)]
    assert all(answer == answers[0] for answer in answers)
    assert len(answers[0]["candidates"]) == 2
    after = {worker["id"]: worker["requests"] for worker in stack.http.get("/workers")}
    assert after == before
    stack.wait_idle()


def test_models_are_those_of_the_engines(stack: Frontend) -> None:
    models = stack.http.get("/v1/models")
    assert [(card["id"], card["parent"]) for card in models["data"]] == [("m", None)]
    assert models["data"][0]["max_model_len"] > 0
    assert stack.http.get("/v1/models/m") == models["data"][0]
    status, body, _ = stack.http.call("GET", "/v1/models/other/m")
    assert status == 404
    assert body["error"]["message"] == 'the model "other/m" is not served; served models are m'


# -- what passes through


def test_body_and_headers_reach_the_engine_untouched(frontend: Frontend) -> None:
    body = (
        b'{ "model" :"echo",  "prompt":"\\u00e9\\n\xc3\xa9" , "seed": 1.50e2, "x":{"a":[null]}}\n'
    )
    with FakeEngine("echo") as fake, engines(frontend, fake):
        raw = (
            b"POST /v1/completions?trace=a%20b HTTP/1.1\r\nHost: public.example\r\n"
            b"Content-Type: application/json; charset=utf-8\r\nAuthorization: Bearer s3cret\r\n"
            b"X-Request-Id: r1\r\nX-Many: a\r\nX-Many: b\r\nUser-Agent: me\r\n"
            b"Keep-Alive: timeout=5\r\nProxy-Authorization: Basic eA==\r\nTE: trailers\r\n"
            b"Upgrade: h2c\r\nConnection: upgrade, te\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        with Raw(frontend.address) as client:
            client.send(raw)
            for part in (body[:7], body[7:]):
                client.send(b"%x\r\n%b\r\n" % (len(part), part))
            client.send(b"0\r\n\r\n")
            assert client.read_answer()[0] == 200
        (got,) = fake.received
        assert got.body == body
        assert (got.method, got.target) == ("POST", "/v1/completions?trace=a%20b")
        assert got.header("authorization") == "Bearer s3cret"
        assert got.header("content-type") == "application/json; charset=utf-8"
        assert (got.header("x-request-id"), got.header("user-agent")) == ("r1", "me")
        assert [value for name, value in got.headers if name == "x-many"] == ["a", "b"]
        assert got.header("content-length") == str(len(body))
        assert got.header("host") == f"127.0.0.1:{fake.port}"
        for name in ("keep-alive", "proxy-authorization", "te", "upgrade", "transfer-encoding"):
            assert got.header(name) is None, name
        assert got.header("connection") is None


def test_answer_headers_reach_the_client_without_connection_ones(frontend: Frontend) -> None:
    def answer(exchange: Exchange) -> bool:
        more = ("X-Engine: e1", "Set-Cookie: a=1", "Keep-Alive: timeout=9", "Connection: close")
        more += ("Access-Control-Allow-Origin: *", "Access-Control-Allow-Credentials: true")
        return exchange.whole(200, {"ok": True}, *more)

    with engines(frontend, FakeEngine("heads", answer)):
        got = ask(frontend.url, COMPLETIONS, prompt_of("heads"))
        assert (got.status, got.json) == (200, {"ok": True})
        assert got.headers["x-engine"] == "e1"
        assert got.headers["set-cookie"] == "a=1"
        assert "keep-alive" not in got.headers
        assert "connection" not in got.headers
        # --cors-origin decides which pages may read answers.
        assert not [name for name in got.headers if name.startswith("access-control-")]


def test_headers_named_by_connection_stay_here(frontend: Frontend) -> None:
    with FakeEngine("hop") as fake, engines(frontend, fake):
        headers = {"Connection": "X-Hop", "X-Hop": "1", "X-End": "2"}
        assert ask(frontend.url, COMPLETIONS, prompt_of("hop"), headers).status == 200
        assert fake.received[0].header("x-end") == "2"
        assert fake.received[0].header("x-hop") is None


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500])
def test_refusals_of_the_engine_pass_unchanged(frontend: Frontend, status: int) -> None:
    def refuse(exchange: Exchange) -> bool:
        return exchange.whole(status, {"error": {"message": "no"}}, "Retry-After: 7")

    with FakeEngine("refuses", refuse) as fake, engines(frontend, fake) as (worker,):
        got = ask(frontend.url, COMPLETIONS, prompt_of("refuses"))
        assert (got.status, got.json) == (status, {"error": {"message": "no"}})
        assert got.headers["retry-after"] == "7"
        # The engine has answered: that is no failure, and is not tried again.
        assert len(fake.received) == 1
        assert frontend.workers()[worker]["healthy"]
        frontend.wait_idle()


def test_data_parallel_rank_reaches_the_engine(frontend: Frontend) -> None:
    lock, ready = threading.Event(), threading.Semaphore(0)

    def wait(exchange: Exchange) -> bool:
        ready.release()
        lock.wait(30)
        return exchange.whole(200, {})

    with FakeEngine("dp", wait) as fake:
        worker = frontend.add(fake.url, dp_size=2)
        headers = {"X-Data-Parallel-Rank": "9"}
        calls = []
        # Both hang, so the second one goes to the idle rank; what the client says has no say.
        for n in range(2):
            body = prompt_of("dp", prompt=[n, *range(50)])
            calls.append(Call(frontend.url, COMPLETIONS, body, headers))
            assert ready.acquire(timeout=30)
        lock.set()
        answers = [call.finish() for call in calls]
        ranks = [exchange.header("x-data-parallel-rank") for exchange in fake.received]
        assert sorted(map(str, ranks)) == ["0", "1"]
        names = [answer.headers["x-kvflash-worker"] for answer in answers]
        assert sorted(names) == [f"{worker}:0", f"{worker}:1"]
        frontend.remove(worker)


# -- what is refused


WRONG: list[tuple[str, bytes | dict[str, Any], int, str]] = [
    (COMPLETIONS, b"", 400, "not a JSON object"),
    (COMPLETIONS, b"{", 400, "EOF while parsing"),
    (COMPLETIONS, b"\xff\xfe", 400, "not a JSON object"),
    (COMPLETIONS, b"5", 400, "not a JSON object"),
    (COMPLETIONS, b'{"model":"bad","prompt":"x"} {}', 400, "after its JSON object"),
    (COMPLETIONS, {"model": 5, "prompt": "x"}, 400, "model: "),
    (COMPLETIONS, {"model": ["bad"], "prompt": "x"}, 400, "model: "),
    (COMPLETIONS, {"model": "bad", "prompt": "x", "cache_salt": 7}, 400, "cache_salt: "),
    (CHAT, {"model": "bad", "messages": [], "add_generation_prompt": "y"}, 400, "add_generation"),
    (COMPLETIONS, {"model": "unknown", "prompt": "x"}, 404, '"unknown" is not served'),
    (CHAT, {"model": "unknown", "messages": []}, 404, "served models are bad"),
    (COMPLETIONS, {"model": "bad"}, 400, "prompt: "),
    (COMPLETIONS, {"model": "bad", "messages": []}, 400, "prompt: "),
    (CHAT, {"model": "bad"}, 400, "messages: "),
    (CHAT, {"model": "bad", "prompt": "x"}, 400, "messages: "),
    (COMPLETIONS, {"model": "bad", "prompt": {}}, 400, "prompt: "),
    (COMPLETIONS, {"model": "bad", "prompt": 5}, 400, "prompt: "),
    (COMPLETIONS, {"model": "bad", "prompt": []}, 400, "prompt: must not be empty"),
    (COMPLETIONS, {"model": "bad", "prompt": [1, 2**32, 3]}, 400, "[1] must be an integer"),
    (COMPLETIONS, {"model": "bad", "prompt": [1, 2**32, 3]}, 400, "4294967296"),
    (COMPLETIONS, {"model": "bad", "prompt": [0, 1, -2]}, 400, "[2] must be an integer"),
    (COMPLETIONS, {"model": "bad", "prompt": [1.5]}, 400, "got 1.5"),
    (COMPLETIONS, {"model": "bad", "prompt": [1, "a"]}, 400, "[1] must be an integer"),
    (COMPLETIONS, {"model": "bad", "prompt": [True]}, 400, "prompt: "),
]


def test_bad_requests_name_the_field(frontend: Frontend) -> None:
    with FakeEngine("bad") as fake, engines(frontend, fake):
        for path, body, status, wanted in WRONG:
            got = ask(frontend.url, path, body)
            assert got.status == status, (path, body, got)
            assert got.headers["content-type"] == "application/json"
            error = got.json["error"]
            assert wanted in error["message"], (body, error)
            assert (error["code"], "type" in error, "param" in error) == (status, True, True)
        assert fake.received == []
        assert ask(frontend.url, COMPLETIONS, prompt_of("bad")).status == 200
        frontend.wait_idle()


def test_body_that_is_an_array_is_refused(frontend: Frontend) -> None:
    with FakeEngine("array") as fake, engines(frontend, fake):
        got = ask(frontend.url, COMPLETIONS, ["array", None, [1, 2, 3]])
        assert got.status == 400
        assert "must be a JSON object, got a list" in got.json["error"]["message"]
        assert fake.received == []


def test_body_cut_off_is_called_so(frontend: Frontend) -> None:
    for body in (b"{", b'{"model":"x"', b'{"model":'):
        message = ask(frontend.url, COMPLETIONS, body).json["error"]["message"]
        assert "EOF" in message
        assert not message.startswith("?"), message


def test_every_refusal_is_json(frontend: Frontend) -> None:
    status, body, headers = frontend.http.call("DELETE", "/workers/%ff")
    assert (status, headers["content-type"]) == (400, "application/json")
    assert "id" in body["error"]["message"]


def test_paths_and_methods_that_do_not_exist(frontend: Frontend) -> None:
    for method, path, status in (
        ("GET", "/", 404),
        ("POST", "/v1/images/generations", 404),
        ("GET", "/v1/chat/completions/", 404),
        ("GET", CHAT, 405),
        ("DELETE", COMPLETIONS, 405),
        ("POST", "/health", 405),
        ("PUT", "/workers", 405),
        ("PUT", "/workers/1", 405),
    ):
        got, body, headers = frontend.http.call(method, path)
        assert got == status, (method, path, body)
        assert body["error"]["code"] == status
        assert path in body["error"]["message"]
        assert status != 405 or headers["allow"]


@pytest.mark.parametrize("path", [COMPLETIONS, "/explain", "/workers"])
def test_large_body_is_refused_without_being_read(frontend: Frontend, path: str) -> None:
    with Raw(frontend.address) as client:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000000\r\n\r\n"
        client.send(head.encode() + b"{" * 1000)
        status, _, body = client.read_answer()
        assert status == 413
        message = json.loads(body)["error"]["message"]
        limit = "65536 bytes" if path == "/workers" else f"{LIMIT} bytes (--max-body-bytes)"
        assert limit in message
        # The rest is not read: after what the sockets hold, nothing more goes in.
        sent = 0
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            while sent < 100_000_000:
                client.send(b"x" * 65_536)
                sent += 65_536
        assert sent < 50_000_000
    frontend.wait_idle()


def test_large_body_is_refused_before_it_is_asked_for(frontend: Frontend) -> None:
    with Raw(frontend.address) as client:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
        client.send(f"{head}Content-Length: 100000000\r\n\r\n".encode())
        assert client.read_answer()[0] == 413


def test_expect_100_continue_is_answered_here(frontend: Frontend) -> None:
    with FakeEngine("expect") as fake, engines(frontend, fake), Raw(frontend.address) as client:
        body = json.dumps(prompt_of("expect")).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
        client.send(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
        assert client.read_answer()[0] == 100
        client.send(body)
        assert client.read_answer()[0] == 200
        assert fake.received[0].header("expect") is None


def test_chunked_body_beyond_the_limit(frontend: Frontend) -> None:
    with Raw(frontend.address) as client:
        client.send(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        chunk = b"186a0\r\n" + b" " * 100_000 + b"\r\n"
        for _ in range(LIMIT // 100_000 + 1):
            client.send(chunk)
        status, _, body = client.read_answer()
        assert status == 413
        assert "--max-body-bytes" in json.loads(body)["error"]["message"]
    frontend.wait_idle()


def test_body_of_exactly_the_limit_is_taken(frontend: Frontend) -> None:
    with FakeEngine("fits") as fake, engines(frontend, fake):
        body = json.dumps(prompt_of("fits")).encode()
        assert ask(frontend.url, COMPLETIONS, body.ljust(LIMIT)).status == 200
        with Raw(frontend.address) as client:
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {LIMIT + 1}\r\n\r\n"
            client.send(head.encode())
            assert client.read_answer()[0] == 413
        assert [len(exchange.body) for exchange in fake.received] == [LIMIT]


@pytest.mark.parametrize("part", [b"", b'{"model":'], ids=["nothing", "half"])
def test_body_that_never_arrives(frontend: Frontend, part: bytes) -> None:
    with Raw(frontend.address) as client:
        client.send(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n" + part
        )
        status, headers, body = client.read_answer()
        assert status == 408
        assert headers["content-type"] == "application/json"
        assert "--body-timeout" in json.loads(body)["error"]["message"]
    frontend.wait_idle()


def test_client_that_leaves_within_its_body(frontend: Frontend) -> None:
    with Raw(frontend.address) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n"
        client.send(head + b"{" * 50_000)
        until(lambda: frontend.metric("kvflash_buffered_bodies_bytes") > 16_384, "the body to come")
        # It has no place before it is there as a whole.
        assert frontend.metric("kvflash_requests_in_flight") == 0
    until(lambda: frontend.metric("kvflash_buffered_bodies_bytes") == 0, "its memory to be free")
    frontend.wait_idle()


SMUGGLED = [
    b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}   ",
    b"Content-Length: 5, 6\r\n\r\n{}   ",
    b"Content-Length: -1\r\n\r\n{}",
    b"Content-Length: +2\r\n\r\n{}",
    b"Content-Length: 18446744073709551616\r\n\r\n{}",
    b"Transfer-Encoding: gzip\r\n\r\n{}",
    b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n{}\r\n0\r\n\r\n",
    b"X-Bad\x01: 1\r\nContent-Length: 2\r\n\r\n{}",
    b"X: " + b"a" * 1_000_000 + b"\r\n\r\n",
    b"".join(b"X-%d: a\r\n" % n for n in range(1_000)) + b"\r\n",
]


def test_framing_that_could_smuggle_a_request_is_refused(frontend: Frontend) -> None:
    with FakeEngine("smuggle") as fake, engines(frontend, fake):
        hidden = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b"
        body = json.dumps(prompt_of("smuggle")).encode()
        for rest in SMUGGLED:
            with Raw(frontend.address) as client:
                try:
                    client.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + rest)
                    client.send(hidden % (len(body), body))
                except (BrokenPipeError, ConnectionResetError):
                    pass  # Refused before all of it was sent.
                got = client.read_to_end()
                assert got == b"" or got.startswith(b"HTTP/1.1 4"), (rest[:60], got)
                assert got.count(b"HTTP/1.1 ") <= 1, (rest[:60], got)
        assert fake.received == []
        assert ask(frontend.url, COMPLETIONS, body).status == 200


def test_chunked_wins_over_a_content_length_and_one_request_goes_up(frontend: Frontend) -> None:
    """Both framings at once: whatever is made of it, the engine sees exactly one clean request."""
    with FakeEngine("both") as fake, engines(frontend, fake), Raw(frontend.address) as client:
        body = json.dumps(prompt_of("both")).encode()
        client.send(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        )
        status = client.read_answer()[0]
        assert status in (200, 400)
        seen = [(e.body, e.header("content-length")) for e in fake.received]
        assert seen == ([(body, str(len(body)))] if status == 200 else [])


def test_pipelined_requests_are_answered_in_order(frontend: Frontend) -> None:
    def echo(exchange: Exchange) -> bool:
        return exchange.whole(200, {"n": json.loads(exchange.body)["n"]})

    with engines(frontend, FakeEngine("pipe", echo)), Raw(frontend.address) as client:
        requests = b""
        for n in range(5):
            body = json.dumps(prompt_of("pipe", n=n)).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            if n == 4:
                head += "Connection: close\r\n"
            requests += head.encode() + b"\r\n" + body
        client.send(requests)
        answers = client.read_to_end()
        assert answers.count(b"HTTP/1.1 200") == 5
        assert [answers.index(b'{"n": %d}' % n) for n in range(5)] == sorted(
            answers.index(b'{"n": %d}' % n) for n in range(5)
        )


def test_http_1_0_head_and_upgrades(frontend: Frontend) -> None:
    with Raw(frontend.address) as client:
        client.send(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert client.read_to_end().startswith(b"HTTP/1.0 200")
    with Raw(frontend.address) as client:
        client.send(b"HEAD /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        head, _, body = client.read_to_end().partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert body == b""
    with Raw(frontend.address) as client:
        client.send(
            b"GET /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\n"
            b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n\r\n"
        )
        assert client.read_to_end().startswith(b"HTTP/1.1 405")


def test_nested_prompt_does_not_end_the_process() -> None:
    # A process of its own: this ended it with a stack overflow.
    with Frontend() as frontend, FakeEngine("deep") as fake:
        frontend.add(fake.url)
        body = b'{"model":"deep","prompt":' + b"[" * 50_000 + b"1" + b"]" * 50_000 + b"}"
        got = ask(frontend.url, COMPLETIONS, body)
        assert got.status == 400
        assert "prompt: " in got.json["error"]["message"]
        assert ask(frontend.url, COMPLETIONS, prompt_of("deep")).status == 200


def test_head_that_never_ends_is_closed(slow_head: Raw, frontend: Frontend) -> None:
    got = slow_head.read_to_end()
    assert got == b"" or got.startswith(b"HTTP/1.1 408"), got
    with Raw(frontend.address) as client:
        client.send(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.read_answer()[0] == 200
