"""A router in this process, and workers that publish, for tests."""

from __future__ import annotations

from service import Engine, batch, stored, until

SIZE = 4
IDS = list(range(100, 116))  # four blocks


def add(http, worker_id, *, engine=None, expect=201, **fields):
    """Register a worker of model m; waits until its events are listened to."""
    body = {"worker_id": worker_id, "model_name": "m", "block_size": SIZE}
    body["url"] = f"http://worker-{worker_id}"
    if engine is not None:
        body |= {"endpoint": engine.endpoint, "replay_endpoint": engine.replay_endpoint}
    entry = http.post("/workers", {**body, **fields}, expect=expect)
    if engine is not None and expect == 201:
        engine.wait_for_subscriber()
    return entry


def worker(http, worker_id):
    """A worker's entry of GET /workers."""
    return {entry["worker_id"]: entry for entry in http.get("/workers")}[worker_id]


def rank(http, worker_id, dp_rank=0):
    return worker(http, worker_id)["ranks"][dp_rank]


def load(http, worker_id, dp_rank=0):
    """Requests, blocks and prompt tokens that are booked on a rank."""
    entry = rank(http, worker_id, dp_rank)
    names = ("active_requests", "active_blocks", "active_prefill_tokens")
    return tuple(entry[name] for name in names)


def hold(http, engine: Engine, worker_id, tokens=IDS, *, names=None, dp_rank=0):
    """Let a worker hold the prompt's blocks, and wait until the router knows."""
    count = len(tokens) // SIZE
    before = rank(http, worker_id, dp_rank)["blocks"]
    named = names or [worker_id * 1_000 + at for at in range(count)]
    engine.publish(batch(stored(named, tokens, block_size=SIZE)))
    wanted = before + count
    until(lambda: rank(http, worker_id, dp_rank)["blocks"] == wanted, f"{wanted} blocks")


def ask(http, path="/select", tokens=IDS, expect=200, **fields):
    return http.post(path, {"model_name": "m", "token_ids": tokens, **fields}, expect=expect)
