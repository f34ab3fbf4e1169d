"""The standalone indexer's API: every route over real HTTP, events over real ZMQ."""

from __future__ import annotations

import json
import re
import select
import socket

import pytest
from support_indexer import IDS, SIZE, publish, query, register

from kvflash import (
    KvIndexer,
    RadixTree,
    compute_block_hash_for_seq,
    compute_sequence_hashes,
)
from service import (
    EmbeddedIndexer,
    cleared,
    dumped_blocks,
    listener,
    removed,
    stored,
    until,
)


def metric(http, name):
    """Sum of a metric's samples, by its labels as text."""
    text = http.get("/metrics").decode()
    found = re.findall(rf"^{name}(\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    return {labels: float(value) for labels, value in found}


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
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n"
        connection.sendall(head.encode())
        # The body comes behind the answer, or when none came for a while.
        select.select([connection], [], [], 0.3)
        answers = b""
        try:
            connection.sendall(b"{}GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            while part := connection.recv(65536):
                answers += part
        except OSError:
            pass
    assert answers.startswith(b"HTTP/1.1 %d" % wanted)
    assert (
        b"connection: close" in answers.split(b"\r\n\r\n")[0].lower() or b"HTTP/1.1 200" in answers
    )


# -- bodies


REQUIRED = {
    "/register": {
        "instance_id": 1,
        "endpoint": "tcp://127.0.0.1:1",
        "model_name": "bodies",
        "block_size": SIZE,
    },
    "/unregister": {"instance_id": 1, "model_name": "bodies"},
    "/query": {"token_ids": IDS, "model_name": "bodies"},
    "/query_by_hash": {"block_hashes": [1], "model_name": "bodies"},
}


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


# -- registering


def test_registering_twice_is_a_conflict(http, engine, model):
    first, second = engine(replay=False), engine(replay=False)
    assert register(http, first, model) == {"status": "ok"}
    error = register(http, second, model, expect=409)["error"]
    assert "instance_id 1" in error
    assert "dp_rank 0" in error
    register(http, second, model, dp_rank=1)


def test_an_instance_belongs_to_one_model_and_tenant(http, engine, model):
    made = engine(replay=False)
    register(http, made, model)
    for other in ({"model_name": f"{model}-2"}, {"tenant_id": "b"}):
        error = register(http, made, model, expect=409, dp_rank=1, **other)["error"]
        assert "instance_id 1" in error
        assert model in error
    # A refused registration makes no index.
    assert http.post("/query", {"token_ids": [], "model_name": f"{model}-2"}, expect=404)["error"]


def test_a_model_has_one_block_size(http, engine, model):
    register(http, engine(replay=False), model)
    error = register(http, engine(replay=False), model, 2, expect=409, block_size=32)["error"]
    assert "block_size 32" in error
    assert str(SIZE) in error
    register(http, engine(replay=False), model, 2, block_size=32, tenant_id="another")


def test_block_size_zero_is_400(http, engine, model):
    error = register(http, engine(replay=False), model, expect=400, block_size=0)["error"]
    assert "block_size must be at least 1" in error


def test_the_last_worker_takes_the_block_size_along(http, engine, model):
    made = engine(replay=False)
    register(http, made, model)
    http.post("/unregister", {"instance_id": 1, "model_name": model})
    register(http, engine(replay=False), model, block_size=32)


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://host", "tcp://:5558", "udp://host:5558", "not-an-endpoint", "", "tcp://h:99999"],
)
@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint"])
def test_an_endpoint_that_is_none_is_400_and_named(http, model, field, endpoint):
    body = {**REQUIRED["/register"], "model_name": model, field: endpoint}
    error = http.post("/register", body, expect=400)["error"]
    assert error.startswith(f"{field} must be")
    assert endpoint in error


def test_an_empty_model_name_is_400(http):
    body = {**REQUIRED["/register"], "model_name": ""}
    assert "model_name" in http.post("/register", body, expect=400)["error"]


def test_unregistering_what_is_not_there_is_404(http, engine, model):
    register(http, engine(replay=False), model)
    for body in (
        {"instance_id": 9, "model_name": model},
        {"instance_id": 1, "model_name": "another"},
        {"instance_id": 1, "model_name": model, "tenant_id": "another"},
        {"instance_id": 1, "model_name": model, "dp_rank": 7},
    ):
        error = http.post("/unregister", body, expect=404)["error"]
        assert f"instance_id {body['instance_id']}" in error
    assert http.post("/unregister", {"instance_id": 1, "model_name": model}) == {"status": "ok"}


def test_unregistering_a_rank_an_instance_a_tenant(http, engine, model):
    engines = {rank: engine(replay=False) for rank in range(3)}
    for rank, made in engines.items():
        register(http, made, model, dp_rank=rank)
        publish(http, made, stored([1], IDS[:4], block_size=SIZE), rank=rank)
    other = engine(replay=False)
    register(http, other, model, 2, tenant_id="b")
    publish(http, other, stored([1], IDS[:4], block_size=SIZE), instance=2)
    assert query(http, model)["scores"] == {"1": {"0": 4, "1": 4, "2": 4}}

    http.post("/unregister", {"instance_id": 1, "model_name": model, "dp_rank": 1})
    assert query(http, model)["scores"] == {"1": {"0": 4, "2": 4}}
    engines[1].wait_for_departure()
    body = {"instance_id": 1, "model_name": model, "tenant_id": "b"}
    http.post("/unregister", body, expect=404)
    # Without a tenant, all ranks of the instance go.
    http.post("/unregister", {"instance_id": 1, "model_name": model})
    assert query(http, model) == {"scores": {}, "frequencies": [], "instances": {}}
    assert query(http, model, tenant_id="b")["scores"] == {"2": {"0": 4}}
    http.post("/unregister", {"instance_id": 2, "model_name": model, "tenant_id": "b"})
    assert query(http, model, tenant_id="b")["scores"] == {}
    other.wait_for_departure()


def test_registering_again_starts_anew(http, engine, model):
    made = engine()
    register(http, made, model, replay_endpoint=made.replay_endpoint)
    publish(http, made, stored([1], IDS[:4], block_size=SIZE))
    http.post("/unregister", {"instance_id": 1, "model_name": model})
    made.wait_for_departure()
    assert query(http, model)["scores"] == {}
    # The replay brings back what was published before.
    register(http, made, model, replay_endpoint=made.replay_endpoint)
    again = {"1": {"0": 4}}
    until(lambda: query(http, model)["scores"] == again, "what the engine still has")


# -- workers


def test_workers_have_the_published_shape(http, engine, model):
    assert http.get("/workers") == []
    first, second = engine(), engine(replay=False)
    register(http, first, model, replay_endpoint=first.replay_endpoint)
    register(http, second, model, dp_rank=1)
    publish(http, second, stored([1, 2], IDS[:8], block_size=SIZE), rank=1)
    publish(http, first, stored([1], IDS[:4], block_size=SIZE), dp_rank=5)
    until(lambda: http.get("/workers")[0]["status"] == "active", "both to be active")
    [worker] = http.get("/workers")
    assert {name: worker[name] for name in ("instance_id", "source", "status", "endpoints")} == {
        "instance_id": 1,
        "source": "zmq",
        "status": "active",
        "endpoints": {"0": first.endpoint, "1": second.endpoint},
    }
    assert (worker["model_name"], worker["tenant_id"]) == (model, "default")
    assert (worker["block_size"], worker["blocks"], worker["dynamic_dp_ranks"]) == (SIZE, 3, [5])
    assert set(worker["listeners"]) == {"0", "1"}
    entry = worker["listeners"]["0"]
    assert (entry["endpoint"], entry["status"]) == (first.endpoint, "active")
    assert entry["replay_endpoint"] == first.replay_endpoint
    assert "last_error" not in entry
    assert entry["last_sequence"] == 0
    assert 0 <= entry["last_event_age_ms"] < 60_000
    assert entry["events"]["batches"] == entry["events"]["stored"] == 1
    assert "replay_endpoint" not in worker["listeners"]["1"]


def test_workers_of_one_model(http, engine, model):
    register(http, engine(replay=False), model)
    register(http, engine(replay=False), f"{model}-2", 2)
    assert [w["instance_id"] for w in http.get("/workers")] == [1, 2]
    assert [w["instance_id"] for w in http.get(f"/workers?model_name={model}-2")] == [2]
    assert http.get("/workers?model_name=none") == []


def test_a_worker_is_pending_until_its_engine_is_there(http, engine, model):
    made = engine(replay=False)
    made.pub.close(0)
    until(lambda: _is_refused(made.endpoint), "the port to be closed")
    register(http, made, model, is_awaited=False)
    entry = listener(http, 1)
    assert (entry["status"], entry["last_sequence"]) == ("pending", None)
    until(lambda: "no connection" in listener(http, 1).get("last_error", ""), "the reason")
    made.start()
    until(lambda: listener(http, 1)["status"] == "active", "the connection")
    assert "last_error" not in listener(http, 1)
    made.pub.close(0)
    until(lambda: listener(http, 1)["status"] == "pending", "the loss to be seen")


def _is_refused(endpoint):
    host, port = endpoint.removeprefix("tcp://").split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*", "ipc:///" + "x" * 200])
def test_an_address_that_cannot_be_connected_is_failed(http, model, endpoint):
    body = {**REQUIRED["/register"], "model_name": model, "endpoint": endpoint}
    http.post("/register", body, expect=201)
    until(lambda: listener(http, 1)["status"] == "failed", "failed")
    assert endpoint in listener(http, 1)["last_error"]
    # The transport serves others all the same, and the failed one can go.
    http.post("/unregister", {"instance_id": 1, "model_name": model})


def test_a_failed_rank_fails_its_instance(http, engine, model):
    register(http, engine(replay=False), model)
    until(lambda: http.get("/workers")[0]["status"] == "active", "active")
    body = {**REQUIRED["/register"], "model_name": model, "endpoint": "tcp://127.0.0.1:*"}
    http.post("/register", {**body, "dp_rank": 1}, expect=201)
    until(lambda: http.get("/workers")[0]["status"] == "failed", "failed")
    assert listener(http, 1)["status"] == "active"


# -- queries


def test_query_has_the_published_shape(http, engine, model):
    made = engine(replay=False)
    register(http, made, model)
    register(http, engine(replay=False), model, 2, dp_rank=1)
    publish(http, made, stored([1, 2], IDS[:8], block_size=SIZE))
    zeros = {"longest_matched": 0, "gpu": 0, "dp": {"1": 0}, "cpu": 0, "disk": 0}
    assert query(http, model) == {
        "scores": {"1": {"0": 8}, "2": {"1": 0}},
        "frequencies": [1, 1],
        "instances": {
            "1": {"longest_matched": 8, "gpu": 8, "dp": {"0": 8}, "cpu": 8, "disk": 8},
            "2": zeros,
        },
    }
    assert query(http, model, [])["scores"] == {"1": {"0": 0}, "2": {"1": 0}}
    assert query(http, model, IDS[:7])["scores"]["1"]["0"] == 4
    assert query(http, model, [9, *IDS])["scores"]["1"]["0"] == 0
    error = http.post("/query", {"token_ids": IDS, "model_name": "none"}, expect=404)["error"]
    assert error == "no indexer for model=none tenant=default"


def test_query_by_hash_takes_both_signs(http, engine, model):
    made = engine(replay=False)
    register(http, made, model)
    publish(http, made, stored([1, 2, 3, 4], IDS, block_size=SIZE))
    hashes = compute_block_hash_for_seq(IDS, SIZE)
    wanted = query(http, model)
    assert wanted["scores"] == {"1": {"0": 16}}
    signed = [h - 2**64 if h >= 2**63 else h for h in hashes]
    for form in (hashes, signed):
        body = {"block_hashes": form, "model_name": model, "cache_salt": "said already"}
        assert http.post("/query_by_hash", body) == wanted
    body = {"block_hashes": hashes, "model_name": "none"}
    assert "no indexer for model=none" in http.post("/query_by_hash", body, expect=404)["error"]


@pytest.mark.parametrize("named", [True, False], ids=["maps", "arrays"])
def test_both_eras_of_events(http, engine, model, named):
    made = engine(replay=False)
    register(http, made, model)
    root = stored([11, 2**64 - 5], IDS[:8], block_size=SIZE, named=named, medium="GPU")
    child = stored([77], IDS[8:12], -5, block_size=SIZE, named=named)
    publish(http, made, root, child)
    assert query(http, model)["scores"] == {"1": {"0": 12}}
    publish(http, made, removed([77], named=named))
    assert query(http, model)["scores"] == {"1": {"0": 8}}
    # The last 8 bytes of a digest are the name that integers have.
    digests = [bytes(range(24)) + n.to_bytes(8, "big") for n in (501, 502)]
    publish(
        http,
        made,
        cleared(named=named),
        stored(digests, IDS[:8], block_size=SIZE, named=named),
        stored([503], IDS[8:12], 502, block_size=SIZE, named=named),
    )
    assert query(http, model)["scores"] == {"1": {"0": 12}}
    entry = publish(http, made, removed([digests[1]], named=named))
    assert query(http, model)["scores"] == {"1": {"0": 4}}
    assert entry["events"]["orphaned"] == entry["events"]["unknown_removed"] == 0


@pytest.mark.parametrize("named", [True, False], ids=["maps", "arrays"])
def test_lora_and_salt_take_part(http, engine, model, named):
    made = engine(replay=False)
    register(http, made, model)
    names = iter(range(1, 100))

    def chain(ids, *, salt=None, **fields):
        """Two blocks in two events; vLLM names the salt with the first one only."""
        first, second = next(names), next(names)
        keys = {"extra_keys": [[salt]]} if salt else {}
        return [
            stored([first], ids[:4], block_size=SIZE, named=named, **keys, **fields),
            stored([second], ids[4:8], first, block_size=SIZE, named=named, **fields),
        ]

    publish(
        http,
        made,
        *chain(IDS[:8]),
        *chain(IDS[4:12], lora_name="sql"),
        *chain(IDS[8:16], salt="tenant-a"),
    )

    def score(ids, **fields):
        return query(http, model, ids, **fields)["scores"]["1"]["0"]

    identities = ({}, {"lora_name": "sql"}, {"cache_salt": "tenant-a"}, {"cache_salt": "sql"})
    held = [(IDS[:8], {}), (IDS[4:12], identities[1]), (IDS[8:16], identities[2])]
    for ids, owner in held:
        for identity in identities:
            assert score(ids, **identity) == (8 if identity == owner else 0), (ids, identity)
    assert score(IDS[:8], lora_name="", cache_salt="") == 8
    hashes = compute_block_hash_for_seq(IDS[8:16], SIZE, cache_salt="tenant-a")
    body = {"block_hashes": hashes, "model_name": model}
    assert http.post("/query_by_hash", body)["scores"]["1"]["0"] == 8


def test_tiers_are_cumulative(http, engine, model):
    made, other = engine(replay=False), engine(replay=False)
    register(http, made, model)
    register(http, other, model, 2)
    publish(
        http,
        made,
        stored([1], IDS[:4], block_size=SIZE, medium="GPU"),
        stored([2], IDS[4:8], 1, block_size=SIZE, medium="CPU"),
        stored([3], IDS[8:12], 2, block_size=SIZE, medium="DISK"),
        stored([4], IDS[12:16], 3, block_size=SIZE, medium="EXTERNAL"),
    )
    publish(
        http,
        other,
        stored([1], IDS[:4], block_size=SIZE, medium="CPU_PINNED"),
        stored([1], IDS[:4], block_size=SIZE, medium="DISK"),
        stored([2], IDS[4:8], 1, block_size=SIZE, medium="external"),
        stored([3], IDS[8:12], 2, block_size=SIZE, medium="MOON"),
        instance=2,
    )
    assert query(http, model)["instances"] == {
        "1": {"longest_matched": 16, "gpu": 4, "dp": {"0": 4}, "cpu": 8, "disk": 16},
        "2": {"longest_matched": 8, "gpu": 0, "dp": {"0": 0}, "cpu": 4, "disk": 8},
    }
    assert listener(http, 2)["events"]["unknown_medium"] == 1
    # A tier's copy goes alone.
    publish(http, made, stored([2], IDS[4:8], 1, block_size=SIZE, medium="GPU"))
    assert query(http, model)["instances"]["1"]["gpu"] == 8
    publish(http, made, removed([2], medium="CPU"))
    assert query(http, model)["instances"]["1"]["cpu"] == 8
    publish(http, made, removed([2], medium="GPU"))
    assert query(http, model)["instances"]["1"] == {
        "longest_matched": 4,
        "gpu": 4,
        "dp": {"0": 4},
        "cpu": 4,
        "disk": 4,
    }
    publish(http, made, cleared())
    assert query(http, model)["instances"]["1"]["longest_matched"] == 0


def test_blocks_offloaded_by_name_alone_are_credited(http, engine, model):
    """vLLM's offloading connector names the blocks it copied to a tier, without their tokens."""
    made = engine(replay=False)
    register(http, made, model)
    publish(http, made, stored([1, 2], IDS[:8], block_size=SIZE, medium="GPU"))
    entry = publish(
        http,
        made,
        stored([1, 2], [], block_size=0, medium="CPU"),
        removed([1, 2], medium="GPU"),
    )
    assert entry["events"]["malformed"] == 0
    assert query(http, model)["instances"]["1"]["cpu"] == 8


def test_a_batch_names_its_rank(http, engine, model):
    made = engine(replay=False)
    register(http, made, model, dp_rank=2)
    publish(http, made, stored([1], IDS[:4], block_size=SIZE), rank=2)
    publish(http, made, stored([1, 2], IDS[:8], block_size=SIZE), rank=2, dp_rank=7)
    answer = query(http, model)
    assert answer["scores"] == {"1": {"2": 4, "7": 8}}
    assert answer["instances"]["1"]["gpu"] == 8
    assert answer["instances"]["1"]["dp"] == {"2": 4, "7": 8}
    assert answer["frequencies"] == [2, 1]
    publish(http, made, cleared(), rank=2, dp_rank=7)
    assert query(http, model)["scores"]["1"] == {"2": 4, "7": 0}
    publish(http, made, stored([1, 2], IDS[:8], block_size=SIZE), rank=2, dp_rank=7)
    # The socket that spoke for the rank takes its blocks along.
    http.post("/unregister", {"instance_id": 1, "model_name": model, "dp_rank": 2})
    assert query(http, model)["scores"] == {}
    assert http.get("/dump")[f"{model}:default"]["events"] == []


def test_models_and_tenants_are_apart(http, engine, model):
    places = [(model, "default"), (model, "b"), (f"{model}-2", "default")]
    for instance, (name, tenant) in enumerate(places):
        made = engine(replay=False)
        register(http, made, name, instance, tenant_id=tenant)
        block = stored([1], IDS[4 * instance :][:4], block_size=SIZE)
        publish(http, made, block, instance=instance)
    for instance, (name, tenant) in enumerate(places):
        for other in range(3):
            ids = IDS[4 * other :][:4]
            scores = query(http, name, ids, tenant_id=tenant)["scores"]
            assert scores == {str(instance): {"0": 4 if other == instance else 0}}
    assert {f"{name}:{tenant}" for name, tenant in places} <= set(http.get("/dump"))


def test_groups_that_say_nothing_about_the_prompt_give_no_credit(http, engine, model):
    made = engine(replay=False)
    register(http, made, model)
    groups = [
        {"group_idx": 0, "kv_cache_spec_kind": "sliding_window"},
        {"group_idx": 1, "kv_cache_spec_kind": "mamba"},
        {"group_idx": 2, "kv_cache_spec_kind": "full_attention"},
        {"group_idx": 3, "kv_cache_spec_kind": "full_attention"},
    ]
    entry = publish(
        http,
        made,
        *(stored([1, 2], IDS[:8], block_size=SIZE, **group) for group in groups[:2]),
    )
    assert query(http, model)["scores"] == {"1": {"0": 0}}
    assert entry["events"]["other_group"] == 2
    publish(
        http,
        made,
        *(stored([1, 2], IDS[:8], block_size=SIZE, **group) for group in groups[2:]),
    )
    assert query(http, model)["scores"] == {"1": {"0": 8}}
    # A removal from another group takes nothing from the one that counts.
    entry = publish(http, made, *(removed([1, 2], group_idx=group) for group in (0, 1, 3)))
    assert query(http, model)["scores"] == {"1": {"0": 8}}
    assert entry["events"]["other_group"] == 6
    publish(http, made, removed([2], group_idx=2))
    assert query(http, model)["scores"] == {"1": {"0": 4}}


def test_another_block_size_is_counted_and_seen(http, engine, model):
    made = engine(replay=False)
    register(http, made, model)
    before = metric(http, "kvflash_kvindexer_events_total").get('{kind="block_size_mismatch"}', 0)
    entry = publish(http, made, stored([1, 2], IDS, block_size=8))
    assert entry["events"]["block_size_mismatch"] == 1
    assert query(http, model)["scores"] == {"1": {"0": 0}}
    events = metric(http, "kvflash_kvindexer_events_total")
    assert events['{kind="block_size_mismatch"}'] == before + 1


def test_events_that_are_wrong_cost_themselves_only(http, engine, model):
    made = engine(replay=False)
    register(http, made, model)
    entry = publish(
        http,
        made,
        {"type": "FutureEvent", "x": 1},
        ["FutureEvent", 1, 2],
        stored([1], IDS[:3], block_size=SIZE),
        stored([5], IDS[:4], 99, block_size=SIZE),
        stored([6, 6], IDS[:8], block_size=SIZE),
        {"type": "BlockStored", "block_hashes": "no"},
        removed([12345]),
        stored([1], IDS[:4], block_size=SIZE, later={"a": [1]}),
    )
    events = entry["events"]
    assert (events["unknown_type"], events["malformed"], events["orphaned"]) == (2, 2, 1)
    assert (events["self_parent"], events["unknown_removed"], events["stored"]) == (1, 1, 1)
    assert query(http, model)["scores"] == {"1": {"0": 4}}


# -- dump


def test_a_dump_round_trips_by_worker(http, engine, model):
    """The dump as events into kvflash.RadixTree answers as the indexer, holes included."""
    made, other = engine(replay=False), engine(replay=False)
    register(http, made, model)
    register(http, other, model, 2, dp_rank=1)
    ids = [7 * n for n in range(64)]
    publish(
        http,
        made,
        stored(range(1, 9), ids[:32], block_size=SIZE),
        stored([20, 21], [900 + n for n in range(8)], 3, block_size=SIZE),
        stored([31], IDS[:4], block_size=SIZE, lora_name="sql"),
        removed([4, 6]),
        stored([2], ids[4:8], 1, block_size=SIZE),
    )
    publish(
        http,
        other,
        stored([-1, -2, -3], ids[:12], block_size=SIZE),
        stored([-1], ids[:4], block_size=SIZE),
        instance=2,
        rank=1,
    )
    dump = http.get("/dump")[f"{model}:default"]
    assert dump["block_size"] == SIZE
    assert len(dump["events"]) >= 8
    tree = RadixTree()
    for event in dump["events"]:
        assert "storage_tier" not in event, "device memory is not said"
        tree.apply_event(event["worker_id"], json.dumps(event["event"]).encode())
    prompts = [(ids, {}), (ids[:12] + [900 + n for n in range(8)], {}), (IDS, {"lora_name": "sql"})]
    for prompt, identity in prompts:
        for length in range(0, len(prompt) + 1, SIZE):
            hashes = compute_block_hash_for_seq(prompt[:length], SIZE, **identity)
            found = tree.find_matches(hashes).scores
            scores = query(http, model, prompt[:length], **identity)["scores"]
            assert {(1, 0): scores["1"]["0"] // SIZE, (2, 1): scores["2"]["1"] // SIZE} == {
                (1, 0): found.get((1, 0), 0),
                (2, 1): found.get((2, 1), 0),
            }
    assert query(http, model, ids)["scores"] == {"1": {"0": 12}, "2": {"1": 12}}
    # What lies behind the hole is in the dump as well: filling it brings the rest back.
    [fourth] = compute_block_hash_for_seq(ids[12:16], SIZE)
    [sixth] = compute_block_hash_for_seq(ids[20:24], SIZE)
    for name, local, parent in ((4, fourth, 3), (6, sixth, 5)):
        blocks = [{"block_hash": name, "tokens_hash": local, "mm_extra_info": None}]
        data = {"stored": {"parent_hash": parent, "blocks": blocks}}
        tree.apply_event(1, json.dumps({"event_id": 0, "data": data, "dp_rank": 0}).encode())
    assert tree.find_matches(compute_block_hash_for_seq(ids, SIZE)).scores[1, 0] == 8


def test_a_dump_says_tiers_and_what_lies_behind_a_hole(http, engine, model):
    made = engine(replay=False)
    register(http, made, model)
    publish(
        http,
        made,
        stored([1], IDS[:4], block_size=SIZE),
        stored([2], IDS[4:8], 1, block_size=SIZE, medium="CPU"),
        stored([3], IDS[8:12], 2, block_size=SIZE, medium="DISK"),
        stored([4], IDS[12:16], 3, block_size=SIZE, medium="EXTERNAL"),
        removed([1]),
    )
    chain = compute_sequence_hashes(compute_block_hash_for_seq(IDS, SIZE))
    assert dumped_blocks(http, f"{model}:default") == {
        (1, 0, "host_pinned", 2, chain[1]),
        (1, 0, "disk", 3, chain[2]),
        (1, 0, "external", 4, chain[3]),
    }
    events = http.get("/dump")[f"{model}:default"]["events"]
    assert [event["event"]["event_id"] for event in events] == list(range(len(events)))
    assert "removed" in events[-1]["event"]["data"], "what only marked a place goes last"


def test_a_salted_chain_goes_on_after_a_load(http, engine, model):
    """Engines name the salt with the first block only: the dump has to keep whose chain it is."""
    made = engine(replay=False)
    register(http, made, model)
    publish(http, made, stored([1, 2], IDS[:8], block_size=SIZE, cache_salt="tenant"))
    events = http.get("/dump")[f"{model}:default"]["events"]
    seeds = {event["event"]["data"]["stored"]["seed"] for event in events}
    assert len(seeds) == 1
    index = KvIndexer(SIZE)
    assert index.apply_events([json.dumps(event) for event in events]) == len(events) >= 1
    again = map(json.loads, index.dump_tree_as_events())
    assert {event["event"]["data"]["stored"]["seed"] for event in again} == seeds


def test_an_index_without_workers_dumps_nothing(http, engine, model):
    register(http, engine(replay=False), model)
    entry = http.get("/dump")[f"{model}:default"]
    assert (entry["block_size"], entry["events"]) == (SIZE, [])
    assert [mark["last_sequence"] for mark in entry["watermarks"]] == [None]


def test_a_full_index_refuses_and_counts(engine):
    embedded = EmbeddedIndexer(max_blocks=2)
    try:
        made = engine(replay=False)
        register(embedded.http, made, "full")
        entry = publish(embedded.http, made, stored([1, 2, 3, 4], IDS, block_size=SIZE))
        assert entry["events"]["refused_blocks"] == 2
        assert query(embedded.http, "full")["scores"] == {"1": {"0": 8}}
        publish(embedded.http, made, removed([2]))
        publish(embedded.http, made, stored([2], IDS[4:8], 1, block_size=SIZE))
        assert query(embedded.http, "full")["scores"] == {"1": {"0": 8}}
    finally:
        embedded.close()


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


def test_a_port_in_use_is_refused_by_name(run, embedded):
    port = embedded.http.url.rsplit(":", 1)[1]
    process = run("kvflash.indexer", "--port", port, "--host", "127.0.0.1")
    assert process.popen.wait(30) == 2
    process.close()
    assert port in "".join(process.errors)
    assert "--port" in "".join(process.errors)
