"""Registering, publishing and asking, as most tests of the indexer do."""

from __future__ import annotations

import re

from service import batch, listener, until, wait_for_sequence

SIZE = 4
IDS = list(range(100, 116))  # four blocks

#: The least that a body has, by path.
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


def register(http, engine, model, instance=1, *, is_awaited=True, expect=201, **fields):
    body = {
        "instance_id": instance,
        "endpoint": engine.endpoint,
        "model_name": model,
        "block_size": SIZE,
        **fields,
    }
    answer = http.post("/register", body, expect=expect)
    if is_awaited and expect == 201:
        engine.wait_for_subscriber()
    return answer


def publish(http, engine, *events, instance=1, rank=0, dp_rank=None):
    """Publish a batch and wait until it is applied."""
    sequence = engine.publish(batch(*events, dp_rank=dp_rank))
    return wait_for_sequence(http, instance, sequence, rank)


def query(http, model, ids=IDS, **fields):
    return http.post("/query", {"token_ids": ids, "model_name": model, **fields})


def register_and_wait(http, engine, instance=1, *, is_awaited=True, **fields):
    """Register an engine of model m, blocks of 2 tokens; wait until what it has is asked for."""
    body = {
        "instance_id": instance,
        "endpoint": engine.endpoint,
        "model_name": "m",
        "block_size": 2,
        "replay_endpoint": engine.replay_endpoint,
    }
    http.post("/register", {**body, **fields}, expect=201)
    if is_awaited:
        engine.wait_for_subscriber()
        if fields.get("replay_endpoint", engine.replay_endpoint) is not None:
            until(lambda: engine.asked, "the catching up after the connection")
        until(lambda: listener(http, instance)["status"] == "active", "the connection")


def metric(http, name):
    """Sum of a metric's samples, by its labels as text."""
    text = http.get("/metrics").decode()
    found = re.findall(rf"^{name}(\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    return {labels: float(value) for labels, value in found}
