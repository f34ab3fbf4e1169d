"""GET /metrics of the indexer: names, labels, and values against the performed operations."""

from __future__ import annotations

import re
from contextlib import closing

import pytest

from kvflash import ConfigError
from kvflash.indexer import IndexerService
from service import EmbeddedIndexer, Engine, batch, listener, stored, until, wait_for_sequence

SIZE = 2
PREFIX = "kvflash_kvindexer_"
SAMPLE = re.compile(r'^(\w+)(?:\{((?:\w+="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (\S+)$')
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
WORKER = {"model": "m", "tenant": "default", "instance_id": "1", "dp_rank": "0"}


@pytest.fixture
def embedded():
    made = EmbeddedIndexer()
    yield made
    made.close()


@pytest.fixture
def http(embedded):
    return embedded.http


@pytest.fixture
def engine():
    made = Engine(replay=False)
    yield made
    made.close()


def scrape(http):
    """Each sample once: (name without prefix, labels) -> value. Every line is looked at."""
    lines = http.get("/metrics").decode().splitlines()
    assert lines[-1] == "# EOF"
    samples = {}
    for line in lines[:-1]:
        if line.startswith("#"):
            assert re.match(rf"# (HELP|TYPE|UNIT) {PREFIX}\w+ ", line), line
            continue
        found = SAMPLE.match(line)
        assert found, line
        name, labels, value = found.groups()
        key = (name.removeprefix(PREFIX), frozenset(LABEL.findall(labels or "")))
        assert key not in samples, line
        samples[key] = float(value)
    return samples


def value(http, name, /, **labels):
    return scrape(http).get((name, frozenset(labels.items())))


def register(http, engine, instance=1, *, is_awaited=True, **fields):
    body = {"instance_id": instance, "endpoint": engine.endpoint, "model_name": "m"}
    http.post("/register", {**body, "block_size": SIZE, **fields}, expect=201)
    if is_awaited:
        engine.wait_for_subscriber()
        until(lambda: listener(http, instance)["status"] == "active", "the connection")


def one(name, parent=None, **fields):
    return batch(stored([name], (name, name), parent, block_size=SIZE, **fields))


# -- requests


def test_every_route_is_counted_with_its_method(http, engine):
    register(http, engine)
    http.post("/query", {"model_name": "m", "token_ids": [1]})
    http.post("/query_by_hash", {"model_name": "m", "block_hashes": [1]})
    for path in ("/health", "/workers", "/workers?model_name=m", "/dump", "/metrics"):
        http.get(path)
    http.post("/unregister", {"instance_id": 1, "model_name": "m"})
    samples = scrape(http)
    asked = {
        tuple(sorted(labels)): count
        for (name, labels), count in samples.items()
        if name == "requests_total"
    }
    expected = {
        ("/register", "POST"): 1,
        ("/unregister", "POST"): 1,
        ("/query", "POST"): 1,
        ("/query_by_hash", "POST"): 1,
        ("/health", "GET"): 1,
        ("/dump", "GET"): 1,
        ("/metrics", "GET"): 1,
    }
    for (endpoint, method), count in expected.items():
        assert asked[(("endpoint", endpoint), ("method", method))] == count, endpoint
        assert samples["request_duration_seconds_count", frozenset({("endpoint", endpoint)})] == 1
    assert asked[(("endpoint", "/workers"), ("method", "GET"))] >= 2


def test_errors_are_counted_by_class_and_paths_of_clients_are_no_labels(http):
    http.call("GET", "/nothing/here")
    http.call("BREW", "/nothing/there")
    http.call("DELETE", "/dump")
    http.post("/query", {"model_name": "none", "token_ids": []}, expect=404)
    http.post("/query", {"token_ids": 5}, expect=400)
    assert value(http, "errors_total", endpoint="other", status_class="4xx") == 2
    assert value(http, "errors_total", endpoint="/query", status_class="4xx") == 2
    assert value(http, "errors_total", endpoint="/dump", status_class="4xx") == 1
    assert value(http, "requests_total", endpoint="/dump", method="DELETE") == 1
    assert value(http, "requests_total", endpoint="other", method="GET") == 1
    assert value(http, "requests_total", endpoint="other", method="other") == 1
    assert value(http, "errors_total", endpoint="/health", status_class="4xx") is None


# -- what is registered


def test_models_workers_and_listeners(http, engine):
    assert value(http, "models") == value(http, "workers") == 0
    register(http, engine)
    dead = {"endpoint": "tcp://127.0.0.1:1", "model_name": "m", "block_size": SIZE}
    for instance, rank, tenant in ((1, 1, "default"), (2, 0, "other")):
        body = {**dead, "instance_id": instance, "dp_rank": rank, "tenant_id": tenant}
        http.post("/register", body, expect=201)
    broken = {**dead, "instance_id": 3, "endpoint": "tcp://127.0.0.1:*"}
    http.post("/register", broken, expect=201)
    until(lambda: listener(http, 3)["status"] == "failed", "the failure")
    assert (value(http, "models"), value(http, "workers")) == (2, 3)
    statuses = ("active", "pending", "failed", "paused")
    counted = [value(http, "listeners", status=status) for status in statuses]
    assert counted == [1, 2, 1, 0]


def test_who_left_is_in_no_sample_but_its_events_stay_counted(http, engine):
    register(http, engine)
    wait_for_sequence(http, 1, engine.publish(one(1)))
    assert value(http, "worker_trust", **WORKER, state="degraded") is not None
    http.post("/unregister", {"instance_id": 1, "model_name": "m"})
    assert not any(dict(labels).get("instance_id") for _, labels in scrape(http))
    assert value(http, "events_total", kind="batches") == 1


def test_names_of_models_cannot_break_the_text(http, engine):
    name = 'a"b\\c\nd} 1'
    register(http, engine, model_name=name, tenant_id='"')
    escaped = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    assert value(http, "index_blocks", model=escaped, tenant='\\"') == 0


# -- what came of events


def test_events_gaps_and_lag(http, engine):
    register(http, engine)
    assert value(http, "worker_last_event_age_seconds", **WORKER) is None
    engine.publish(one(1))
    engine.publish(one(2), is_sent=False)
    wait_for_sequence(http, 1, engine.publish(one(3, parent=99)))
    for kind, count in {"batches": 2, "lost_batches": 1, "gap_batches": 1, "orphaned": 1}.items():
        assert value(http, "events_total", kind=kind) == count, kind
    assert 0 <= value(http, "worker_last_event_age_seconds", **WORKER) < 60
    assert value(http, "worker_missing_batches", **WORKER) == 0


def test_batches_that_are_asked_for(http):
    made = Engine()
    try:
        register(http, made, replay_endpoint=made.replay_endpoint)
        wait_for_sequence(http, 1, made.publish(one(1)))
        made.gate.clear()
        for name in (2, 3):
            made.publish(one(name), is_sent=False)
        made.publish(one(4))
        until(lambda: value(http, "worker_missing_batches", **WORKER) == 2, "the gap")
        made.gate.set()
        wait_for_sequence(http, 1, 3)
        assert value(http, "worker_missing_batches", **WORKER) == 0
        until(lambda: value(http, "events_total", kind="replays") == 2, "the replays")
    finally:
        made.close()


# -- index and trust


def test_the_index_and_its_limits(engine):
    embedded = EmbeddedIndexer(index_memory_bytes=64 * 2**20, max_blocks=1000)
    try:
        http = embedded.http
        register(http, engine, capacity_blocks=7)
        event = stored([3], (3, 3), block_size=SIZE, medium="CPU")
        wait_for_sequence(http, 1, engine.publish(batch(event)))
        wait_for_sequence(http, 1, engine.publish(one(1)))
        model = {"model": "m", "tenant": "default"}
        assert value(http, "index_blocks", **model) == 2
        assert value(http, "index_unique_blocks", **model) == 2
        assert value(http, "index_bytes", **model) > 1000
        assert value(http, "index_evicted_blocks_total", **model) == 0
        assert value(http, "index_limit_bytes") == 64 * 2**20
        assert value(http, "index_limit_blocks") == 1000
        assert value(http, "worker_device_blocks", **WORKER) == 1
        assert value(http, "worker_capacity_blocks", **WORKER) == 7
    finally:
        embedded.close()


def test_trust_by_worker_state_and_reason(http, engine):
    register(http, engine)
    model = {"model": "m", "tenant": "default"}

    def states():
        found = scrape(http)
        names = ("exact", "degraded", "stale")
        per_worker = [
            found["worker_trust", frozenset({**WORKER, "state": state}.items())] for state in names
        ]
        counted = [
            found["trust_listeners", frozenset({**model, "state": state}.items())]
            for state in names
        ]
        assert per_worker == counted
        return counted

    assert states() == [0, 1, 0]
    assert value(http, "trust_reasons", **model, reason="no_events_yet") == 1
    wait_for_sequence(http, 1, engine.publish(one(1)))
    assert states() == [1, 0, 0]
    wait_for_sequence(http, 1, engine.publish(one(2, parent=99)))
    assert states() == [0, 1, 0]
    assert value(http, "trust_reasons", **model, reason="orphaned_stores") == 1
    assert value(http, "trust_reasons", **model, reason="no_events_yet") == 0
    engine.stop()
    until(lambda: states() == [0, 0, 1], "the loss of the connection")


def test_names_begin_as_asked():
    with closing(EmbeddedIndexer(metrics_prefix="mine")) as indexer:
        lines = indexer.http.get("/metrics").decode().splitlines()
    names = {line.split()[2] if line.startswith("# ") else line for line in lines[:-1]}
    assert len(names) > 20
    assert all(name.startswith("mine_kvindexer_") for name in names), names
    with pytest.raises(ConfigError, match="--metrics-prefix must be 1 to 64 letters"):
        IndexerService(host="127.0.0.1", port=0, metrics_prefix="a-b").start()
