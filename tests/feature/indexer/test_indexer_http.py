"""The standalone indexer's API over real HTTP: routes, bodies, the process."""

from __future__ import annotations

import json
import select
import socket
from contextlib import closing

import pytest

from service import Http, stored
from support_indexer import IDS, REQUIRED, SIZE, metric, publish, query, register

# -- health, metrics, routes


def test_health_and_metrics(http, engine, model):
    status, body, _ = http.call("GET", "/health")
    assert (status, body) == (200, b"")
    register(http, engine(replay=False), model)
    query(http, model)
    status, body, headers = http.call("GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("application/openmetrics-text")
    assert body.decode().endswith("# EOF\n")
    asked = metric(http, "kvflash_kvindexer_requests_total")
    assert asked['{endpoint="/query",method="POST"}'] >= 1
    assert asked['{endpoint="/register",method="POST"}'] >= 1
    assert f'{{model="{model}",tenant="default"}}' in metric(http, "kvflash_kvindexer_index_blocks")


@pytest.mark.parametrize(
    ("method", "path", "wanted"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/", 404),
        ("GET", "/query", 405),
        ("GET", "/register", 405),
        ("POST", "/workers", 405),
        ("DELETE", "/dump", 405),
        ("POST", "/health", 405),
    ],
)
def test_other_paths_and_methods(http, method, path, wanted):
    status, body, _ = http.call(method, path)
    assert status == wanted
    assert isinstance(body["error"], str)


@pytest.mark.parametrize(("path", "wanted"), [("/nothing", 404), ("/health", 405)])
def test_a_refused_path_leaves_the_connection_usable_or_says_that_it_closes(embedded, path, wanted):
    host, port = embedded.http.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n"
        connection.sendall(head.encode())
        # The body comes behind the answer, or when none came for a while.
        select.select([connection], [], [], 0.3)
        answers = b""
        try:
            next_head = "GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
            connection.sendall(b"{}" + next_head.encode())
            while part := connection.recv(65536):
                answers += part
        except OSError:
            pass
    assert answers.startswith(b"HTTP/1.1 %d" % wanted)
    assert (
        b"connection: close" in answers.split(b"\r\n\r\n")[0].lower() or b"HTTP/1.1 200" in answers
    )


# -- bodies


@pytest.mark.parametrize(("path", "field"), [(p, f) for p, body in REQUIRED.items() for f in body])
def test_a_missing_field_is_400_and_named(http, path, field):
    body = {name: value for name, value in REQUIRED[path].items() if name != field}
    assert field in http.post(path, body, expect=400)["error"]


@pytest.mark.parametrize("path", REQUIRED)
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b"null", b"\xff\xfe", b"{}" * 2])
def test_what_is_no_request_is_400(http, path, body):
    status, answer, _ = http.call("POST", path, body)
    assert status == 400
    assert "error" in answer


@pytest.mark.parametrize("path", ["/register", "/unregister", "/query", "/query_by_hash"])
def test_a_compressed_body_is_415(http, path):
    status, answer, _ = http.call("POST", path, b"\x1f\x8b", {"content-encoding": "gzip"})
    assert status == 415
    assert 'content-encoding "gzip" is not supported' in answer["error"]


WRONG_TYPES = [
    ("/register", "instance_id", "one"),
    ("/register", "instance_id", -1),
    ("/register", "instance_id", 2**64),
    ("/register", "endpoint", 5),
    ("/register", "model_name", None),
    ("/register", "block_size", "16"),
    ("/register", "block_size", 2**32),
    ("/register", "dp_rank", -1),
    ("/register", "tenant_id", 5),
    ("/register", "replay_endpoint", 5),
    ("/unregister", "instance_id", "one"),
    ("/unregister", "dp_rank", "0"),
    ("/query", "model_name", 5),
    ("/query", "lora_name", 5),
    ("/query", "cache_salt", []),
    ("/query_by_hash", "model_name", {}),
]


@pytest.mark.parametrize(("path", "field", "value"), WRONG_TYPES)
def test_a_field_of_the_wrong_type_is_400(http, path, field, value):
    assert http.post(path, {**REQUIRED[path], field: value}, expect=400)["error"]


@pytest.mark.parametrize(("path", "field", "value"), WRONG_TYPES)
def test_a_field_of_the_wrong_type_is_named(http, path, field, value):
    assert field in http.post(path, {**REQUIRED[path], field: value}, expect=400)["error"]


@pytest.mark.parametrize(
    ("field", "path"), [("token_ids", "/query"), ("block_hashes", "/query_by_hash")]
)
@pytest.mark.parametrize("value", ["text", 5, {"0": 1}, None])
def test_a_list_that_is_none_is_named(http, field, path, value):
    assert field in http.post(path, {**REQUIRED[path], field: value}, expect=400)["error"]


@pytest.mark.parametrize("value", [-1, 2**32, 2**64, -(2**64), 1.5, 1.0, "1", None, True, [1]])
def test_a_token_outside_u32_is_named_by_index_and_value(http, value):
    error = http.post("/query", {"token_ids": [0, 1, value], "model_name": "x"}, expect=400)[
        "error"
    ]
    assert "token_ids[2]" in error
    if isinstance(value, int) and abs(value) < 2**64 and value is not True:
        assert str(value) in error


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 1.5, "1", None])
def test_a_hash_outside_64_bits_is_named_by_index(http, value):
    body = {"block_hashes": [0, value], "model_name": "x"}
    assert "block_hashes[1]" in http.post("/query_by_hash", body, expect=400)["error"]


def test_unknown_fields_are_ignored(http, engine, model):
    made = engine(replay=False)
    register(http, made, model, additional_salt_v2={"a": 1}, later=[1, 2])
    publish(http, made, stored([1], IDS[:4], block_size=SIZE))
    answer = query(http, model, trace={"id": "x"}, salts=["y"])
    assert answer["scores"] == {"1": {"0": 4}}
    body = {"instance_id": 1, "model_name": model, "why": "done"}
    http.post("/unregister", body)


def large_body(size, *, is_announced):
    start, end = b'{"model_name": "x", "token_ids": [', b"1]}"
    body = start + b"1," * ((size - len(start) - len(end)) // 2) + end
    if is_announced:
        return body, {}
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body), {"transfer-encoding": "chunked"}


@pytest.mark.parametrize(("size", "is_announced"), [(9 << 20, True), ((8 << 20) + 64, False)])
def test_a_body_of_9_mb_is_413(embedded, client, size, is_announced):
    body, headers = large_body(size, is_announced=is_announced)
    assert len(body) > 8 << 20
    status, answer, _ = client(embedded.http.url).call("POST", "/query", body, headers)
    assert status == 413
    assert str(8 << 20) in answer["error"]
    assert client(embedded.http.url).call("GET", "/health")[0] == 200


@pytest.mark.parametrize("is_announced", [True, False])
def test_a_body_of_64_mb_is_413(embedded, client, is_announced):
    body, headers = large_body(64 << 20, is_announced=is_announced)
    assert client(embedded.http.url).call("POST", "/query", body, headers)[0] == 413


def test_a_body_just_below_the_limit_is_read(http, model):
    body = json.dumps({"model_name": model, "token_ids": [1]}).encode()
    padded = body[:-1] + b" " * ((8 << 20) - len(body)) + b"}"
    assert len(padded) == 8 << 20
    assert http.call("POST", "/query", padded)[0] == 404
    assert http.call("POST", "/query", padded + b" ")[0] == 413


# -- the process


def test_the_process_serves_its_workers_and_ends_cleanly(run, client, engine):
    first, second = engine(replay=False), engine(replay=False)
    workers = f"1={first.endpoint},2:1={second.endpoint}"
    process = run(
        "kvflash.indexer",
        *("--port", "0", "--host", "127.0.0.1", "--block-size", str(SIZE), "--workers", workers),
        env={"KVFLASH_MODEL_NAME": "from-env", "KVFLASH_MAX_BODY_BYTES": "1KiB"},
    )
    http = client(process.ready()["url"])
    first.wait_for_subscriber()
    second.wait_for_subscriber()
    publish(http, first, stored([1], IDS[:4], block_size=SIZE))
    assert query(http, "from-env")["scores"] == {"1": {"0": 4}, "2": {"1": 0}}
    assert http.post("/query", {"token_ids": [1] * 2000, "model_name": "x"}, expect=413)
    assert process.terminate() == 0


@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        ((), "choose another port, or --reuse-port to share it"),
        (
            ("--reuse-port",),
            "the process there was started without --reuse-port: stop it, or choose another port",
        ),
    ],
)
def test_a_port_in_use_is_refused_by_name(run, embedded, flags, advice):
    port = embedded.http.url.rsplit(":", 1)[1]
    process = run("kvflash.indexer", "--port", port, "--host", "127.0.0.1", *flags)
    assert process.popen.wait(30) == 2
    process.close()
    errors = "".join(process.errors)
    assert port in errors
    assert "--port" in errors
    assert advice in errors


def test_the_fault_of_a_dropped_event_is_logged_at_debug(run, client, engine):
    made = engine(replay=False)
    flags = ("--block-size", str(SIZE), "--workers", f"1={made.endpoint}", "--log-level", "debug")
    process = run("kvflash.indexer", "--port", "0", "--host", "127.0.0.1", *flags)
    http = client(process.ready()["url"])
    made.wait_for_subscriber()
    publish(http, made, ["BlockRemoved", [1.5]])
    process.close()
    [said] = [line for line in process.errors if "events that contradict themselves" in line]
    assert 'reason="a block hash must be an integer or bytes"' in said, said
    assert "sequence=0" in said and made.endpoint in said, said


def test_an_indexer_without_a_usable_peer_says_how_it_starts(run):
    peers = ("--peers", "http://127.0.0.1:9")
    process = run("kvflash.indexer", "--port", "0", "--host", "127.0.0.1", *peers)
    process.ready("listening")
    process.ready()
    process.close()
    said = "no peer could be used (see above): the index starts empty"
    assert said in "".join(process.errors)


def test_an_engine_without_an_event_socket_is_followed_with_a_warning(run):
    broker = "http://127.0.0.1:8,events=nats://s/6/0"
    engines = ("--worker", "http://127.0.0.1:9", "--worker", broker)
    process = run("kvflash.indexer", "--port", "0", "--model-name", "m", *engines)
    process.ready()
    process.close()
    first, second = [line for line in process.errors if "this worker is not followed" in line]
    assert "add events=tcp://HOST:PORT" in first and "http://127.0.0.1:9" in first, first
    assert "--event-plane zmq" in second and "worker=2" in second, second


def test_an_indexer_is_ready_with_its_initial_workers(run):
    flags = ("--port", "0", "--host", "127.0.0.1", "--min-initial-workers", "1")
    process = run("kvflash.indexer", *flags, "--lame-duck-timeout", "0")
    listening = process.ready("listening")
    with closing(Http(listening["url"])) as http:
        assert http.call("GET", "/ready")[0] == 503
        http.post("/register", {**REQUIRED["/register"], "model_name": "m"}, expect=201)
        assert process.ready() == {**listening, "event": "ready"}
        assert http.call("GET", "/ready")[0] == 200
    # A signal ends the wait.
    process = run("kvflash.indexer", *flags, "--lame-duck-timeout", "0")
    process.ready("listening")
    assert process.terminate() == 0
