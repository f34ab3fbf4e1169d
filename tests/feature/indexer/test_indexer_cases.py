"""Recorded behaviour of the published indexer: each case is run against a real process.

Not here: what a router does with tiers (tests/feature/cache/test_radix_tree.py has the
index's part of it), the event buffer that routers ask each other for, and the router's request
protocol.
"""

from __future__ import annotations

import json
import re

import pytest

from kvflash.errors import ConfigError
from kvflash.indexer.args import parse_workers
from service import VECTORS, Engine, batch, cleared, listener, stored, until, wait_for_sequence

CASES = json.loads((VECTORS / "indexer_cases.json").read_text(encoding="utf-8"))
SIZE = 16
TOKENS = list(range(1, 1 + 4 * SIZE))


def cases(area, *fields):
    """The cases of an area with these input fields."""
    found = [c for c in CASES if c["area"] == area and all(f in c["input"] for f in fields)]
    assert found, (area, fields)
    return pytest.mark.parametrize("case", found, ids=[c["id"].split("/", 1)[1] for c in found])


@pytest.fixture
def http(run, client):
    process = run("kvflash.indexer", "--port", "0", "--host", "127.0.0.1", "--log-level", "error")
    return client(process.ready()["url"])


@pytest.fixture
def engines():
    """Two engines that end with the test."""
    made = [Engine(), Engine()]
    yield made
    for engine in made:
        engine.close()


def register(http, engine, instance=1, expect=201, **fields):
    body = {"instance_id": instance, "endpoint": engine.endpoint, "model_name": "llama-3-8b"}
    return http.call("POST", "/register", {**body, "block_size": SIZE, **fields})[0]


def test_every_case_is_run():
    run_here = {"indexer-cli", "indexer-endpoint", "indexer-status", "indexer-http", "indexer-gap"}
    assert {case["area"] for case in CASES} == run_here
    assert len(CASES) >= 20


@cases("indexer-cli")
def test_cli(case):
    text, expected = case["input"]["workers"], case["expected"]
    if "error_contains" in expected:
        with pytest.raises(ConfigError, match=expected["error_contains"]):
            parse_workers(text)
    else:
        found = [[w.instance_id, w.dp_rank, w.endpoint] for w in parse_workers(text)]
        assert found == expected["parsed"]


@cases("indexer-endpoint")
def test_endpoint(http, case):
    body = {"instance_id": 1, "model_name": "m", "block_size": 1, **case["input"]}
    status = http.call("POST", "/register", body)[0]
    # Local files and threads may be named by flags, but not over HTTP.
    is_remote = not case["input"]["endpoint"].startswith(("ipc://", "inproc://"))
    assert status == (201 if case["expected"]["valid"] and is_remote else 400)


@cases("indexer-http", "ops")
def test_operations(http, engines, case):
    path_of_peers = "/deregister_peer"

    def run_one(op):
        if found := re.fullmatch(r"register (\d+)/(\d+) bs(\d+)", op):
            instance, rank, size = map(int, found.groups())
            return register(http, engines[0], instance, dp_rank=rank, block_size=size)
        if found := re.fullmatch(r"unregister (\d+)", op):
            body = {"instance_id": int(found[1]), "model_name": "m"}
            return http.call("POST", "/unregister", body)[0]
        if found := re.fullmatch(r"query model (\w+)", op):
            body = {"token_ids": [1], "model_name": found[1]}
            return http.call("POST", "/query", body)[0]
        if found := re.fullmatch(r"deregister_peer (\S+)", op):
            return http.call("POST", path_of_peers, {"url": found[1]})[0]
        found = re.fullmatch(r"GET (\S+)", op)
        assert found, op
        return http.call("GET", found[1])[0]

    assert [run_one(op) for op in case["input"]["ops"]] == case["expected"]["statuses"]


@cases("indexer-http", "then")
def test_peers(http, case):
    status, _, _ = http.call("POST", case["input"]["POST"], case["input"]["json"])
    assert status == 201
    assert http.get(case["input"]["then"].split()[1]) == case["expected"]["peers"]


@cases("indexer-http", "GET")
def test_workers_have_the_recorded_shape(http, engines, case):
    wanted = case["expected"]["body"][0]
    for rank, engine in enumerate(engines):
        assert register(http, engine, dp_rank=rank) == 201
    until(lambda: http.get("/workers")[0]["status"] == "active", "both ranks")
    [found] = http.get("/workers")
    assert set(wanted) <= set(found)
    for name in ("instance_id", "source", "status"):
        assert found[name] == wanted[name]
    for rank, listening in wanted["listeners"].items():
        address = engines[int(rank)].endpoint
        assert found["endpoints"][rank] == found["listeners"][rank]["endpoint"] == address
        assert set(listening) <= set(found["listeners"][rank])


def shape(value):
    """Keys and types."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in value.items()}
    return type(value)


def publish(http, engine, *events, instance=1, rank=0):
    return wait_for_sequence(http, instance, engine.publish(batch(*events)), rank)


@pytest.mark.parametrize("case", [c for c in CASES if c["input"].get("POST") == "/query"])
def test_a_query_has_the_recorded_shape(http, engines, case):
    for (instance, rank), engine in zip([(1, 0), (2, 1)], engines, strict=True):
        assert register(http, engine, instance, dp_rank=rank) == 201
        engine.wait_for_subscriber()
    publish(
        http,
        engines[0],
        stored([1, 2], TOKENS[:32], block_size=SIZE),
        stored([3], TOKENS[32:48], 2, block_size=SIZE, medium="CPU"),
    )
    found = http.post("/query", case["input"]["json"])
    assert shape(found) == shape(case["expected"])
    # The recorded numbers belong to a prompt of 48 tokens.
    assert http.post("/query", {**case["input"]["json"], "token_ids": TOKENS}) == case["expected"]


@pytest.mark.parametrize(
    "case", [c for c in CASES if c["area"] == "indexer-status"], ids=lambda case: case["id"]
)
def test_the_worst_listener_gives_the_status(http, engines, case):
    """Outcomes that sockets can cause; the core has a test of the order of all four."""
    reachable = {"active": engines[0].endpoint, "pending": None, "failed": "tcp://127.0.0.1:*"}
    engines[1].pub.close(0)
    reachable["pending"] = engines[1].endpoint
    tried = 0
    pairs = zip(case["input"]["listener_statuses"], case["expected"]["aggregate"], strict=True)
    for statuses, wanted in pairs:
        if not set(statuses) <= set(reachable):
            continue
        tried += 1
        for rank, status in enumerate(statuses):
            body = {"endpoint": reachable[status], "dp_rank": rank, "model_name": "m"}
            http.post("/register", {"instance_id": 1, "block_size": 1, **body}, expect=201)
        for rank, status in enumerate(statuses):
            until(lambda r=rank, s=status: listener(http, 1, r)["status"] == s, status)
        assert http.get("/workers")[0]["status"] == wanted
        http.post("/unregister", {"instance_id": 1, "model_name": "m"})
    assert tried == 2


@cases("indexer-gap")
def test_gap(http, engines, case):
    engine, seen = engines[0], case["input"]["watermark"]
    sequence = case["input"].get("seq", case["input"].get("first_seq"))
    assert register(http, engine, replay_endpoint=engine.replay_endpoint) == 201
    engine.wait_for_subscriber()
    until(lambda: engine.asked, "the replay of a first connection")
    for number in range(0 if seen is None else seen + 1):
        event = stored([number + 1], [number] * SIZE, block_size=SIZE)
        wait_for_sequence(http, 1, engine.publish(batch(event)))
    asked = len(engine.asked)
    action = case["expected"]["action"]
    if action == "gap":
        while engine.sequence < sequence:
            engine.publish(batch(cleared()), is_sent=False)
    if action != "drop as stale":
        engine.publish(batch(cleared()))
        counts = wait_for_sequence(http, 1, sequence)["events"]
        if action == "gap":
            assert engine.asked[asked] == case["expected"]["replay_from"]
            missing = sequence - case["expected"]["replay_from"]
            assert (counts["gap_batches"], counts["lost_batches"]) == (missing, 0)
        else:
            assert counts["gap_batches"] == 0
        return
    # Dropped, it would leave the blocks of an engine that is gone.
    engine.ring = []
    engine.send(sequence, batch(cleared()))
    until(lambda: listener(http, 1)["events"]["restarts"] == 1, "the restart")
    assert http.post("/query", {"token_ids": [0] * SIZE, "model_name": "llama-3-8b"})["scores"] == {
        "1": {"0": 0}
    }
