"""The doctor against real indexers, engines and their doubles: each fault once, with its fix."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvflash.doctor.app import main
from kvflash.doctor.checks import check_heard, listeners_of
from kvflash.doctor.events import listen
from kvflash.router import RouterService
from service import (
    END_OF_REPLAY,
    EmbeddedIndexer,
    batch,
    listener,
    run_to_end,
    stored,
    until,
    wait_for_sequence,
)
from support_indexer import register_and_wait as register

SIZE = 2


@pytest.fixture
def embedded():
    made = EmbeddedIndexer()
    yield made
    made.close()


@pytest.fixture
def http(embedded):
    return embedded.http


@pytest.fixture
def url(http):
    return http.url


@pytest.fixture
def canned():
    """HTTP servers that answer what a test says: path -> (status, body, headers)."""
    servers = []

    def make(answers):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                status, body, headers = answers.get(self.path, (404, b"{}", {}))
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response_only(status)
                for name, value in {"content-length": str(len(data)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def do_POST(self):
                self.rfile.read(int(self.headers["content-length"]))
                self.do_GET()

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield make
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def free_endpoint():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"tcp://127.0.0.1:{server.getsockname()[1]}"


def one(name=1, parent=None, ts=1.0, **fields):
    fields = {"block_size": SIZE, **fields}
    ids = (name,) * fields["block_size"]
    return batch(stored([name], ids, parent, **fields), ts=ts)


@pytest.fixture
def doctor(capsys):
    """Run it in this process: exit status, and findings by check."""

    def run(*args, timeout="5"):
        status = main([*args, "--json", "--timeout", timeout])
        report = json.loads(capsys.readouterr().out)
        assert report["status"] == status
        counts = [report["ok"], report["warnings"], report["failures"]]
        assert sum(counts) == len(report["findings"])
        for found in report["findings"]:
            assert bool(found["fix"]) == (found["level"] != "ok"), found
            assert found["seen"] and found["subject"] and found["check"], found
        return status, report["findings"]

    return run


def bad(findings):
    """Findings other than ok: (level, check, code)."""
    return [(f["level"], f["check"], f["code"]) for f in findings if f["level"] != "ok"]


def seen(findings, check):
    return next(found["seen"] for found in findings if found["check"] == check)


def ok_checks(findings):
    return {found["check"] for found in findings if found["level"] == "ok"}


# -- all is well


def test_a_healthy_service(run, client, doctor):
    """Real processes: the indexer and an engine without a model."""
    ports = ("--zmq-events-port", "auto", "--zmq-replay-port", "auto")
    mocker = run("kvflash.mocker", "--port", "0", "--host", "127.0.0.1", *ports).ready()
    indexer = run("kvflash.indexer", "--port", "0", "--host", "127.0.0.1").ready()["url"]
    http, engine = client(indexer), client(mocker["url"])
    model = engine.get("/v1/models")["data"][0]["id"]
    text = engine.get("/metrics").decode()
    size = int(text.split('block_size="')[1].split('"')[0])
    capacity = int(text.split('num_gpu_blocks="')[1].split('"')[0])
    body = {"instance_id": 1, "model_name": model, "block_size": size}
    sockets = {"endpoint": mocker["events"], "replay_endpoint": mocker["replay"]}
    http.post("/register", {**body, **sockets, "capacity_blocks": capacity}, expect=201)
    until(lambda: listener(http, 1)["trust"]["state"] == "exact", "the connection")
    prompt = {"model": model, "prompt": "word " * size * 4, "max_tokens": 1}
    engine.post("/v1/completions", prompt)
    until(lambda: listener(http, 1)["last_sequence"] is not None, "an event")
    status, findings = doctor(indexer, mocker["url"], timeout="10")
    assert (status, bad(findings)) == (0, [])
    assert ok_checks(findings) == {
        "reachable",
        "clock",
        "ready",
        "workers",
        "memory",
        "trust",
        "connected",
        "publishes",
        "decodes",
        "block size",
        "complete",
        "replay",
        "identity",
        "cache",
        "prefix caching",
        "registered",
        "engine capacity",
    }


def test_an_engine_that_is_heard(http, engine, url, doctor):
    made = engine()
    register(http, made)
    stop = threading.Event()

    def publish():
        number = 0
        while not stop.wait(0.01):
            made.publish(one(number := number + 1, ts=time.time()))

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        status, findings = doctor(url, "--listen", "1")
    finally:
        stop.set()
        thread.join()
    assert (status, bad(findings)) == (0, [])
    assert {"listened", "clock", "identity"} <= ok_checks(findings)


def test_an_idle_engine_is_no_fault(http, engine, url, doctor):
    made = engine()
    register(http, made)
    made.publish(one(1, ts=time.time()))
    until(lambda: listener(http, 1)["last_sequence"] is not None, "an event")
    status, findings = doctor(url, "--listen", "0.3", "--strict")
    assert (status, bad(findings)) == (0, [])
    assert "idle engine" in seen(findings, "listened")


def test_a_port_that_is_no_event_socket_is_not_an_idle_engine(engine, canned):
    """An HTTP port takes the connection, but not the handshake."""
    publisher = engine()
    web = canned({}).replace("http:", "tcp:")
    idle, strange, nobody = listen([publisher.endpoint, web, free_endpoint()], 0.1)
    assert [idle.is_connected, strange.is_connected, nobody.is_connected] == [True, False, False]
    entry = {"endpoint": web, "trust": {}}
    (of_web,) = listeners_of("http://i", [{"instance_id": 1, "listeners": {"0": entry}}])
    (found,) = check_heard(of_web, strange)
    assert (found.level, found.check) == ("warn", "listened")
    assert found.seen == f"{web} did not accept a subscription"
    assert "endpoint in POST /register" in found.fix


# -- who is there


def test_nobody_is_there(doctor):
    address = free_endpoint().removeprefix("tcp://")
    status, findings = doctor(address)
    assert (status, bad(findings)) == (1, [("FAIL", "reachable", "")])
    assert "refused" in findings[0]["seen"]


def test_something_else_is_there(canned, doctor):
    status, findings = doctor(canned({}))
    assert (status, bad(findings)) == (1, [("FAIL", "reachable", "")])
    assert "neither a kvflash service nor an engine" in findings[0]["seen"]


def test_an_answer_that_drips(doctor, monkeypatch):
    monkeypatch.setattr("kvflash.ask._SLOW", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        stop = threading.Event()

        def drip():
            peer, _ = server.accept()
            with peer:
                peer.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
                with contextlib.suppress(OSError):
                    while not stop.wait(0.01):
                        peer.sendall(b"x")

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        try:
            status, findings = doctor(f"127.0.0.1:{server.getsockname()[1]}")
        finally:
            stop.set()
            thread.join()
    assert (status, bad(findings)) == (1, [("FAIL", "reachable", "")])
    assert "the answer was not complete after 0.5 s" in findings[0]["seen"]


def test_an_answer_that_is_cut_off(canned, doctor):
    status, findings = doctor(canned({"/workers": (200, [], {"content-length": "1000"})}))
    assert (status, bad(findings)) == (1, [("FAIL", "reachable", "")])
    assert "IncompleteRead(2 bytes read, 998 more expected)" in findings[0]["seen"]


def test_an_engine_that_wants_a_key(canned, doctor, monkeypatch):
    answers = {"/v1/models": (401, {"error": "no key"}, {})}
    status, findings = doctor(canned(answers))
    assert (status, bad(findings)) == (1, [("FAIL", "reachable", "")])
    assert "401 no key" in findings[0]["seen"]
    assert "KVFLASH_WORKER_API_KEY" in findings[0]["fix"]


def test_a_service_that_wants_a_key(canned, doctor, tmp_path):
    error = {"error": {"message": "send a key of the role admin"}}
    refused = (401, error, {"x-kvflash-refused": "no_key"})
    place = canned({"/workers": refused, "/v1/models": refused})
    (found,) = doctor(place)[1]
    assert (found["level"], found["check"]) == ("FAIL", "reachable")
    assert "role admin" in found["seen"] and "--service-key-file" in found["fix"]
    key = tmp_path / "key"
    key.write_text("wrong")
    (found,) = doctor(place, "--service-key-file", str(key))[1]
    assert "give --service-key-file a key" in found["fix"]


@pytest.mark.parametrize(
    ("status", "cause", "fix"), [(403, "host", "IP address"), (429, "busy", "ask again")]
)
def test_a_service_that_refuses_whatever_the_key(canned, doctor, status, cause, fix):
    refused = (status, {"error": "the service says why"}, {"x-kvflash-refused": cause})
    (found,) = doctor(canned({"/workers": refused, "/v1/models": refused}))[1]
    assert "the service says why" in found["seen"]
    assert fix in found["fix"] and "--service-key-file" not in found["fix"]


def test_a_frontend_tells_its_warnings(canned, doctor):
    health = {"status": "ok", "causes": [{"code": "", "message": "worker 1: it smells"}]}
    models = {"data": [{"id": "m"}]}
    url = canned(
        {"/workers": (200, [], {}), "/v1/models": (200, models, {}), "/health": (200, health, {})}
    )
    status, findings = doctor(f"{url}/v1")
    found = [("warn", "warnings", ""), ("FAIL", "workers", "")]
    assert (status, bad(findings)) == (1, found)
    # As when DNS has lost all workers: they were given.
    assert findings[-1]["fix"].startswith("remove the cause that a warning above names; ")
    del health["causes"]
    fix = doctor(url)[1][-1]["fix"]
    assert fix.startswith("POST /workers, or start the frontend with")
    # It may have been started with it, which it does not say.
    assert "register workers where its --discovery looks" in fix


def test_workers_that_only_the_frontend_reaches(canned, doctor):
    socket_ = {"dp_rank": 0, "endpoint": free_endpoint(), "replay_endpoint": free_endpoint(),
               "status": "active", "events": {"batches": 1}, "last_sequence": 0}  # fmt: skip
    well = {"url": free_endpoint().replace("tcp:", "http:"), "healthy": True, "model": "m"}
    workers = [
        {**well, "id": 1, "role": "decode", "listeners": [socket_]},
        {**well, "id": 2, "role": "prefill", "listeners": [socket_]},
    ]
    health = {"status": "ok", "router_policy": "kv"}
    models = {"data": [{"id": "m"}]}
    url = canned(
        {
            "/workers": (200, workers, {}),
            "/v1/models": (200, models, {}),
            "/health": (200, health, {}),
            "/ready": (200, {"ready": True}, {}),
            "/v1/completions": (200, b'data: {"nvext": {"token_ids": [1]}}\n', {}),
        }
    )
    status, findings = doctor(url, timeout="0.3")
    checks = [("warn", check, "") for check in ("replay", "tokens", "replay")]
    assert (status, bad(findings)) == (0, checks)
    assert "Connection refused" in seen(findings, "tokens")


@pytest.mark.parametrize("endpoint", ["jetstream://ns-b/1/0", "nats://ns.b/1/0"])
def test_events_over_nats_have_no_sockets(canned, doctor, endpoint):
    """NATS, or the publisher behind it, repairs gaps: there is no ring to ask."""
    events = {"dp_rank": 0, "endpoint": endpoint, "replay_endpoint": None, "status": "active",
              "events": {"batches": 1}, "last_sequence": 0}  # fmt: skip
    worker = {"id": 1, "url": "tcp://127.0.0.1:1", "healthy": True, "model": "m", "loads": {},
              "listeners": [events]}  # fmt: skip
    url = canned(
        {
            "/workers": (200, [worker], {}),
            "/v1/models": (200, {"data": [{"id": "m"}]}, {}),
            "/health": (200, {"status": "healthy"}, {}),
            "/ready": (200, {"ready": True}, {}),
        }
    )
    status, findings = doctor(url, "--listen", "0.01")
    assert (status, bad(findings)) == (0, [])
    assert seen(findings, "connected") == f"to {endpoint}"


def test_a_router_is_no_indexer(doctor):
    with RouterService(host="127.0.0.1", port=0) as router:
        status, findings = doctor(router.url)
        assert (status, bad(findings)) == (1, [("FAIL", "workers", "")])
        assert seen(findings, "reachable") == "a kvflash router"
        assert "every request is refused" in seen(findings, "workers")
        worker = {"worker_id": 1, "model_name": "m"}
        router.call("POST", "/workers", worker)
        status, findings = doctor(router.url)
    assert (status, bad(findings)) == (0, [("warn", "warnings", "block_size_unknown")])
    assert "the block size is unknown" in seen(findings, "warnings")


@pytest.mark.parametrize(
    "workers",
    [
        [{"listeners": {"x": 5}}],
        [5],
        [{"instance_id": None, "listeners": {"0": {}}}],
        [{"instance_id": 1, "listeners": {"0": {"trust": {"reasons": 5}}}}],
        [{"instance_id": 1, "listeners": {"0": {"trust": {}, "last_event_age_ms": "old"}}}],
    ],
)
def test_answers_of_another_shape_end_one_check(canned, doctor, workers):
    url = canned({"/workers": (200, workers, {}), "/health": (200, b"", {})})
    status, findings = doctor(url)
    assert status == 1
    assert ("FAIL", "answers", "") in bad(findings)


# -- the indexer


def test_no_worker(url, doctor):
    status, findings = doctor(url)
    assert (status, bad(findings)) == (1, [("FAIL", "workers", "")])


def test_not_ready_far_in_time_full_and_failing(canned, doctor):
    metrics = (
        "kvflash_kvindexer_index_limit_bytes 1000\n"
        'kvflash_kvindexer_index_bytes{model="a\\"b",tenant="t"} 950\n'
        'kvflash_kvindexer_errors_total{endpoint="/query",status_class="5xx"} 3\n'
        'kvflash_kvindexer_errors_total{endpoint="/ready",status_class="5xx"} 5\n'
    )
    late = {"date": formatdate(time.time() - 3600, usegmt=True)}
    full = {"code": "state_file", "message": "the disk is full", "fix": "make room"}
    url = canned(
        {
            "/workers": (200, [], {}),
            "/health": (200, {"status": "degraded", "causes": [full]}, late),
            "/ready": (503, {"error": "waits for 2 of 3 workers"}, {}),
            "/metrics": (200, metrics.encode(), {}),
        }
    )
    status, findings = doctor(url)
    assert status == 1
    assert bad(findings) == [
        ("warn", "warnings", "state_file"),
        ("warn", "clock", ""),
        ("FAIL", "ready", ""),
        ("FAIL", "workers", ""),
        ("warn", "memory", ""),
        ("warn", "errors", ""),
    ]
    # Seconds may pass before the answer.
    assert re.search(r"36\d\d s behind", seen(findings, "clock"))
    assert "2 of 3 workers" in seen(findings, "ready")
    # A replica that waited for its peer has answered 503 to GET /ready, and is well.
    assert "3 requests" in seen(findings, "errors")
    assert 'a"b' in seen(findings, "memory") and "95%" in seen(findings, "memory")


def test_an_indexer_that_does_not_tell_trust(canned, doctor):
    entry = {"endpoint": "tcp://127.0.0.1:1", "status": "pending", "last_error": "no way"}
    workers = [{"instance_id": 1, "model_name": "m", "listeners": {"0": entry}}]
    status, findings = doctor(canned({"/workers": (200, workers, {}), "/health": (200, b"", {})}))
    assert status == 1
    assert ("FAIL", "connected", "") in bad(findings)
    assert ("warn", "trust", "") in bad(findings)


# -- workers


def test_a_worker_that_cannot_be_reached(http, url, doctor):
    body = {"instance_id": 1, "model_name": "m", "block_size": SIZE}
    http.post("/register", {**body, "endpoint": free_endpoint()}, expect=201)
    status, findings = doctor(url)
    assert status == 1
    assert bad(findings) == [("FAIL", "connected", "never_connected"), ("warn", "replay", "")]


def test_a_worker_that_never_published(http, engine, url, doctor):
    register(http, engine(replay=False))
    status, findings = doctor(url, "--listen", "0.3")
    wanted = [
        ("warn", "publishes", "no_events_yet"),
        ("warn", "replay", ""),
    ]
    assert (status, bad(findings)) == (0, wanted)
    assert main([url, "--strict", "--timeout", "5"]) == 1


def test_lost_batches(http, engine, url, doctor):
    made = engine(replay=False)
    register(http, made)
    made.publish(one(1))
    made.publish(one(2), is_sent=False)
    wait_for_sequence(http, 1, made.publish(one(3)))
    status, findings = doctor(url)
    assert (status, bad(findings)) == (
        0,
        [("warn", "complete", "lost_batches"), ("warn", "replay", "")],
    )


def test_another_block_size(http, engine, url, doctor):
    made = engine()
    register(http, made)
    wait_for_sequence(http, 1, made.publish(one(1, block_size=3)))
    status, findings = doctor(url)
    assert (status, bad(findings)) == (1, [("FAIL", "block size", "block_size_mismatch")])


def test_frames_that_are_none(http, engine, url, doctor):
    made = engine()
    register(http, made)
    made.publish(one(1))
    wait_for_sequence(http, 1, made.publish(b"\xc1\xc1"))
    status, findings = doctor(url)
    assert status == 1
    assert ("warn", "decodes", "undecodable") in bad(findings)


def replaying(http, engine, answer):
    made = engine()
    register(http, made)
    made.publish(one(1))
    wait_for_sequence(http, 1, made.publish(one(2)))
    made.answer = answer
    return made


REPLAYS = {
    "did not answer": ("FAIL", lambda first: None),
    "something other than batches": ("FAIL", lambda first: [[b"what"]]),
    "has nothing from batch 1 on": ("FAIL", lambda first: [[END_OF_REPLAY, b""]]),
    "ring begins at batch 7": ("warn", lambda first: [[(7).to_bytes(8, "big"), one(9)]]),
}


@pytest.mark.parametrize("words", REPLAYS)
def test_replay_endpoints(http, engine, url, doctor, words):
    level, answer = REPLAYS[words]
    replaying(http, engine, answer)
    _, findings = doctor(url, timeout="1" if words == "did not answer" else "5")
    assert bad(findings) == [(level, "replay", "")]
    assert words in seen(findings, "replay")


def test_a_replay_endpoint_that_cannot_be_used(http, engine, url, doctor):
    register(http, engine(replay=False), is_awaited=False, replay_endpoint="tcp://127.0.0.1:*")
    status, findings = doctor(url)
    assert status == 1
    assert ("FAIL", "replay", "") in bad(findings)
    assert "cannot be used" in seen(findings, "replay")


def test_an_instance_of_two_models_has_a_replay_socket_for_each(http, engine, url, doctor):
    ahead, idle = engine(), engine()
    register(http, ahead)
    ahead.publish(one(1))
    wait_for_sequence(http, 1, ahead.publish(one(2)))
    register(http, idle, model_name="n")
    _, findings = doctor(url)
    replays = {f["subject"]: f["seen"] for f in findings if f["check"] == "replay"}
    assert replays == {
        f"{url} worker 1:0 of m:default": f"{ahead.replay_endpoint} answers, and its ring covers "
        "batch 1",
        f"{url} worker 1:0 of n:default": f"{idle.replay_endpoint} answers",
    }


def test_a_replay_of_blocks_of_another_size(http, engine, url, doctor):
    """The ring's batch says it, whatever the indexer has counted."""
    replaying(http, engine, lambda first: [[first.to_bytes(8, "big"), one(9, block_size=5)]])
    status, findings = doctor(url)
    assert (status, bad(findings)) == (1, [("FAIL", "block size", "")])


def test_what_is_heard(http, engine, url, doctor):
    """Numbers left out, adapters without names, a clock that is off by half a century."""
    made = engine(replay=False)
    register(http, made)
    stop = threading.Event()

    def publish():
        number = 0
        while not stop.wait(0.01):
            number += 1
            made.publish(one(number, lora_id=3), is_sent=number % 2 == 0)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        status, findings = doctor(url, "--listen", "1")
    finally:
        stop.set()
        thread.join()
    assert status == 0
    assert {("warn", check, "") for check in ("listened", "identity", "clock")} <= set(
        bad(findings)
    )
    assert "behind this host's" in [f["seen"] for f in findings if f["level"] == "warn"][-2]


def test_an_event_socket_that_is_none(http, engine, url, doctor):
    made = engine(replay=False)
    register(http, made)
    stop = threading.Event()

    def publish():
        while not stop.wait(0.01):
            made.pub.send_multipart([b"hello", b"there"])

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        status, findings = doctor(url, "--listen", "0.5")
    finally:
        stop.set()
        thread.join()
    assert status == 1
    assert ("FAIL", "decodes", "nothing_decodable") in bad(findings)
    assert ("FAIL", "listened", "") in bad(findings)


# -- engines, and what is registered of them


def vllm(model="m", **labels):
    given = {"block_size": str(SIZE), "num_gpu_blocks": "100", "enable_prefix_caching": "True"}
    text = ",".join(f'{name}="{value}"' for name, value in {**given, **labels}.items())
    return {
        "/v1/models": (200, {"data": [{"id": model}]}, {}),
        "/metrics": (200, f"vllm:cache_config_info{{{text}}} 1.0\n".encode(), {}),
    }


def followed(http, engine, **fields):
    made = engine()
    register(http, made, **fields)
    wait_for_sequence(http, 1, made.publish(one(1)))


ENGINES = {
    "cache": ({"/v1/models": vllm()["/v1/models"]}, "warn"),
    "prefix caching": (vllm(enable_prefix_caching="False"), "FAIL"),
    "hashes": (vllm(prefix_caching_hash_algo="builtin"), "warn"),
    "block size": (vllm(block_size="64"), "FAIL"),
    "engine capacity": (vllm(num_gpu_blocks="0"), "FAIL"),
    "registered": (vllm("another"), "warn"),
}


@pytest.mark.parametrize("check", ENGINES)
def test_engines(embedded, engine, canned, doctor, check):
    answers, level = ENGINES[check]
    followed(embedded.http, engine)
    status, findings = doctor(embedded.http.url, canned(answers))
    assert bad(findings) == [(level, check, "")]
    assert status == (level == "FAIL")


def test_an_engine_that_is_all_right(http, engine, url, canned, doctor):
    followed(http, engine, capacity_blocks=100)
    answers = vllm(prefix_caching_hash_algo="sha256")
    status, findings = doctor(url, canned(answers))
    assert (status, bad(findings)) == (0, [])
    assert {"hashes", "engine capacity", "prefix caching"} <= ok_checks(findings)


def test_a_capacity_that_was_registered_wrong(http, engine, url, canned, doctor):
    followed(http, engine, capacity_blocks=90)
    status, findings = doctor(url, canned(vllm()))
    assert (status, bad(findings)) == (0, [("warn", "engine capacity", "")])


def test_an_engine_that_nobody_registered(url, canned, doctor):
    status, findings = doctor(url, canned(vllm()))
    assert (status, bad(findings)) == (1, [("FAIL", "workers", ""), ("FAIL", "registered", "")])


# -- usage and output


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["ftp://host"],
        ["http://"],
        ["http://host:99999"],
        ["http://host:0"],
        ["http://host/?x=1"],
        ["http://a b"],
        ["http://h", "--listen", "-1"],
        ["http://h", "--timeout", "0"],
        ["http://h", "--what"],
    ],
)
def test_bad_usage_is_status_2(capsys, args):
    try:
        status = main(args)
    except SystemExit as stopped:
        status = stopped.code
    output = capsys.readouterr()
    assert status == 2
    assert output.out == ""
    assert "Traceback" not in output.err and output.err


@pytest.mark.parametrize("url", ["localhost:99999", "http://host:0"])
def test_the_limit_of_a_port_is_named(capsys, url):
    assert main([url]) == 2
    told = "URL must be http://HOST[:PORT][/PATH], or https://..., with PORT in 1..=65535, got "
    assert f"{told}{url!r}" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://me:secret@host:80/v1", "me:secret@host", "me@host:0"])
def test_a_login_in_a_url_is_refused_and_not_shown(capsys, url):
    assert main([url]) == 2
    told = capsys.readouterr().err
    assert "***@host" in told and "me" not in told.partition("***")[2] and "secret" not in told


def test_the_report_in_words(run, canned):
    """A real process; one line a finding, whatever the other side says."""
    ready = (503, {"error": "first\nsecond \x1b[31mred"}, {})
    url = canned({"/workers": (200, [], {}), "/health": (200, b"", {}), "/ready": ready})
    done = run_to_end("kvflash.doctor", url, "--timeout", "5")
    assert (done.returncode, done.stderr) == (1, "")
    *lines, last = done.stdout.splitlines()
    assert all(line.startswith(("ok    ", "warn  ", "FAIL  ")) for line in lines), done.stdout
    assert any("first second" in line and "\x1b" not in line for line in lines)
    assert last == "1 ok, 1 warning, 2 failures"
    assert [" | fix: " in line for line in lines] == [not line.startswith("ok") for line in lines]
