"""How far the index is believed about a worker, over real sockets: each fault once, and its end."""

from __future__ import annotations

import pytest
import zmq

from service import (
    EmbeddedIndexer,
    batch,
    cleared,
    listener,
    removed,
    stored,
    until,
    wait_for_sequence,
)
from support_indexer import register_and_wait as register

SIZE = 2


@pytest.fixture(scope="module")
def embedded():
    made = EmbeddedIndexer()
    yield made
    made.close()


def one(name=1, ids=None, parent=None, **fields):
    fields = {"block_size": SIZE, **fields}
    return batch(stored([name], ids or (name,) * fields["block_size"], parent, **fields))


def trust(http, instance=1, rank=0):
    entry = listener(http, instance, rank)["trust"]
    assert all(reason["message"] and reason["fix"] for reason in entry["reasons"])
    return entry["state"], *(reason["code"] for reason in entry["reasons"])


def becomes(http, *wanted, instance=1):
    until(lambda: trust(http, instance) == wanted, f"{wanted}; it is {trust(http, instance)}")


def wait(http, engine, payload, instance=1):
    wait_for_sequence(http, instance, engine.publish(payload))


# -- exact


def test_a_followed_engine_is_exact(http, engine):
    made = engine()
    register(http, made)
    wait(http, made, one(1))
    wait(http, made, batch(removed([1])))
    assert trust(http) == ("exact",)
    worker = http.get("/workers")[0]
    assert worker["trust"] == {"state": "exact", "reasons": []}
    assert worker["listeners"]["0"]["last_event_age_ms"] >= 0


def test_an_engine_that_says_it_has_published_nothing_is_exact(http, engine):
    register(http, engine())
    becomes(http, "exact")


def test_a_repaired_gap_leaves_nothing(http, engine):
    made = engine()
    register(http, made)
    wait(http, made, one(1))
    made.publish(one(2), is_sent=False)
    wait(http, made, one(3))
    assert trust(http) == ("exact",)
    assert listener(http, 1)["events"]["replays"] == 2


# -- degraded


def test_connected_and_silent(http, engine):
    register(http, engine(replay=False))
    assert trust(http) == ("degraded", "no_events_yet")


def test_a_replay_endpoint_that_does_not_answer_proves_nothing(engine):
    hasty = EmbeddedIndexer(replay_timeout_s=0.3)
    try:
        made, http = engine(), hasty.http
        made.answer = lambda first: None
        register(http, made)
        until(lambda: listener(http, 1)["events"]["failed_replays"] == 1, "the end of the replay")
        assert trust(http) == ("degraded", "no_events_yet")
    finally:
        hasty.close()


def test_garbage_as_an_answer_proves_nothing(http, engine):
    made = engine()
    # No end mark.
    made.answer = lambda first: [[b"kv-events", b"what", b""]]
    register(http, made)
    made.answer = made.ring_from
    assert trust(http) == ("degraded", "no_events_yet")
    wait(http, made, one(1))
    assert trust(http) == ("exact",)


def test_a_late_subscriber_misses_credit(http, engine):
    made = engine(replay=False)
    for name in (1, 2, 3):
        made.publish(one(name), is_sent=False)
    register(http, made)
    wait(http, made, one(4))
    assert trust(http) == ("degraded", "missed_first_batches")
    assert listener(http, 1)["trust"]["reasons"][0]["message"].startswith("3 batches")
    wait(http, made, one(5, parent=3))
    assert trust(http) == ("degraded", "missed_first_batches", "orphaned_stores")
    wait(http, made, batch(cleared()))
    assert trust(http) == ("exact",)
    wait(http, made, one(6))
    assert trust(http) == ("exact",)


def test_a_ring_that_begins_later_misses_credit(http, engine):
    made = engine(ring=2)
    for name in (1, 2, 3):
        made.publish(one(name), is_sent=False)
    register(http, made)
    wait_for_sequence(http, 1, 2)
    assert trust(http) == ("degraded", "missed_first_batches")


def test_lost_batches_until_a_restart(http, engine):
    made = engine(replay=False)
    register(http, made)
    wait(http, made, one(1))
    made.publish(batch(removed([1])), is_sent=False)
    wait(http, made, one(2))
    assert trust(http) == ("degraded", "lost_batches")
    made.stop()
    becomes(http, "stale", "disconnected", "lost_batches")
    made.start()
    made.wait_for_subscriber()
    becomes(http, "degraded", "lost_batches", "unverified_reconnect")
    made.publish(one(3))
    until(lambda: listener(http, 1)["events"]["restarts"] == 1, "the restart")
    becomes(http, "exact")


def test_lost_batches_until_the_engine_clears(http, engine):
    made = engine(replay=False)
    register(http, made)
    wait(http, made, one(1))
    made.publish(one(2), is_sent=False)
    # Events after the clearing in the same batch count.
    wait(http, made, batch(cleared(), stored([4], (4, 4), 3, block_size=SIZE)))
    assert trust(http) == ("degraded", "orphaned_stores")
    wait(http, made, batch(cleared()))
    assert trust(http) == ("exact",)


def test_a_rank_that_clears_does_not_speak_for_the_others(http, engine):
    made = engine(replay=False)
    register(http, made)
    first = stored([1], (1, 1), block_size=SIZE)
    wait(http, made, batch(first, dp_rank=0))
    made.publish(batch(first, dp_rank=1), is_sent=False)
    wait(http, made, batch(first, dp_rank=1))
    wait(http, made, batch(cleared(), dp_rank=1))
    assert trust(http) == ("degraded", "lost_batches")


def test_a_gap_under_repair(http, engine):
    made = engine()
    register(http, made)
    wait(http, made, one(1))
    made.gate.clear()
    made.publish(one(2), is_sent=False)
    made.publish(one(3))
    becomes(http, "degraded", "catching_up")
    assert listener(http, 1)["trust"]["reasons"][0]["message"].startswith("1 missing batch ")
    made.gate.set()
    becomes(http, "exact")


def test_a_reconnect_is_verified(http, engine):
    made = engine()
    register(http, made)
    wait(http, made, one(1))
    kept = made.ring, made.sequence
    made.stop()
    becomes(http, "stale", "disconnected")
    made.gate.clear()
    made.start()
    made.ring, made.sequence = kept
    becomes(http, "degraded", "unverified_reconnect")
    made.gate.set()
    becomes(http, "exact")
    assert listener(http, 1)["events"]["restarts"] == 0


def test_a_reconnect_without_a_replay_endpoint_is_settled_by_the_next_batch(http, engine):
    made = engine(replay=False)
    register(http, made)
    wait(http, made, one(1))
    kept = made.sequence
    made.stop()
    becomes(http, "stale", "disconnected")
    made.start()
    made.sequence = kept
    made.wait_for_subscriber()
    becomes(http, "degraded", "unverified_reconnect")
    wait(http, made, one(2))
    assert trust(http) == ("exact",)


def test_more_blocks_than_the_device_has(http, engine):
    made = engine()
    register(http, made, capacity_blocks=2)
    wait(http, made, batch(stored([1, 2], (1, 1, 2, 2), block_size=SIZE)))
    # Other tiers have room of their own.
    wait(http, made, batch(stored([3], (3, 3), block_size=SIZE, medium="CPU")))
    assert trust(http) == ("exact",)
    wait(http, made, one(4))
    assert trust(http) == ("degraded", "over_capacity")
    entry = listener(http, 1)
    assert (entry["capacity_blocks"], entry["device_blocks"]) == (2, 3)
    wait(http, made, batch(removed([4])))
    assert trust(http) == ("exact",)


def test_two_instances_at_one_event_socket(http, engine):
    made = engine()
    register(http, made)
    wait(http, made, one(1))
    fields = {"endpoint": made.endpoint, "block_size": SIZE}
    # In another index, as of another name of the model, or as another rank.
    for other in ({"model_name": "n"}, {"model_name": "m", "instance_id": 1, "dp_rank": 1}):
        http.post("/register", {"instance_id": 2, **fields, **other}, expect=201)
    assert trust(http) == ("exact",)
    # As when an engine that restarted gets a new id, and the old one is still there.
    http.post("/register", {"instance_id": 3, "model_name": "m", **fields}, expect=201)
    for instance in (1, 3):
        reasons = listener(http, instance)["trust"]["reasons"]
        (shared,) = (one["message"] for one in reasons if one["code"] == "shared_socket")
        assert shared.startswith(f"instance {4 - instance} has the same event socket")
    http.post("/unregister", {"instance_id": 3, "model_name": "m"})
    assert trust(http) == ("exact",)


@pytest.mark.parametrize("value", [0, -1, "many", 1.5])
def test_a_capacity_that_cannot_be(http, engine, value):
    body = {"instance_id": 1, "endpoint": "tcp://127.0.0.1:1", "model_name": "m"}
    body = {**body, "block_size": SIZE, "capacity_blocks": value}
    assert "capacity_blocks" in http.post("/register", body, expect=400)["error"]


DEGRADING = {
    "orphaned_stores": one(2, parent=99),
    "self_parent": batch(stored([2, 2], (2, 2, 2, 2), 1, block_size=SIZE)),
    "hash_reused": one(1, ids=(8, 9)),
    "mixed_block_sizes": one(2, block_size=3),
    "identity_conflict": one(2, parent=1, cache_salt="other"),
    "undecodable": b"\xc1\xc1",
    "malformed_events": batch(stored([2, 3], (2, 2), block_size=SIZE)),
    "unknown_events": batch({"type": "BlockPraised"}),
    "unknown_medium": one(2, medium="PUNCHED_CARD"),
}


@pytest.mark.parametrize("code", DEGRADING)
def test_what_degrades_until_the_engine_clears(http, engine, code):
    made = engine()
    register(http, made)
    wait(http, made, one(1))
    assert trust(http) == ("exact",)
    wait(http, made, DEGRADING[code])
    assert trust(http) == ("degraded", code)
    wait(http, made, batch(cleared()))
    # Engines do not change their block size by a clear.
    after = ("degraded", code) if code == "mixed_block_sizes" else ("exact",)
    assert trust(http) == after


def limited(engine, name, **settings):
    embedded = EmbeddedIndexer(**settings)
    try:
        made = engine()
        register(embedded.http, made)
        at = 0
        # Until it has heard of the engine at all, trust has another reason.
        while name not in trust(embedded.http):
            assert at < 200_000, f"no {name}"
            ids = range(at, at + 2_000)
            made.publish(batch(*(stored([i], (i, i), block_size=SIZE) for i in ids)))
            wait_for_sequence(embedded.http, 1, made.sequence - 1)
            at += 2_000
        assert trust(embedded.http) == ("degraded", name)
    finally:
        embedded.close()


def test_blocks_that_found_no_room(engine):
    limited(engine, "refused_blocks", max_blocks=3_000)


def test_blocks_that_went_at_the_memory_limit(engine):
    limited(engine, "evicted_by_limit", index_memory_bytes=2**20)


# -- stale


def test_never_connected(http):
    context = zmq.Context()
    free = context.socket(zmq.PUB)
    free.bind("tcp://127.0.0.1:*")
    endpoint = free.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
    free.close(0)
    context.term()
    body = {"instance_id": 1, "endpoint": endpoint, "model_name": "m", "block_size": SIZE}
    http.post("/register", body, expect=201)
    assert trust(http) == ("stale", "never_connected")


def test_an_endpoint_that_cannot_be_used(http):
    body = {"instance_id": 1, "endpoint": "tcp://127.0.0.1:*", "model_name": "m"}
    http.post("/register", {**body, "block_size": SIZE}, expect=201)
    until(lambda: listener(http, 1)["status"] == "failed", "the failure")
    assert trust(http) == ("stale", "failed")


def test_an_engine_of_another_block_size(http, engine):
    made = engine()
    register(http, made)
    wait(http, made, one(1, block_size=3))
    assert trust(http) == ("stale", "block_size_mismatch")
    wait(http, made, batch(cleared()))
    assert trust(http) == ("stale", "block_size_mismatch")


def test_a_socket_that_speaks_something_else(http, engine):
    made = engine()
    register(http, made)
    wait(http, made, b"\xc1\xc1")
    assert trust(http) == ("stale", "nothing_decodable")
    wait(http, made, one(1))
    assert trust(http) == ("degraded", "undecodable")


# -- instances


def test_an_instance_is_trusted_as_its_worst_rank(http, engine):
    good, bad = engine(), engine(replay=False)
    register(http, good)
    register(http, bad, dp_rank=1, is_awaited=False)
    bad.wait_for_subscriber()
    wait(http, good, one(1))
    bad.publish(one(1))
    bad.publish(one(2), is_sent=False)
    wait_for_sequence(http, 1, bad.publish(one(3)), rank=1)
    assert trust(http) == ("exact",)
    assert trust(http, rank=1) == ("degraded", "lost_batches")
    whole = http.get("/workers")[0]["trust"]
    assert whole["state"] == "degraded"
    assert [(reason["dp_rank"], reason["code"]) for reason in whole["reasons"]] == [
        (1, "lost_batches")
    ]


def test_what_gets_worse_is_logged_once_and_so_is_its_end(run, client, engine):
    process = run("kvflash.indexer", "--port", "0", "--host", "127.0.0.1")
    http, made = client(process.ready()["url"]), engine(replay=False)
    register(http, made, capacity_blocks=3)

    def logged(words):
        return [line for line in process.errors if words in line]

    wait(http, made, one(1))
    wait(http, made, one(2, parent=99))
    wait(http, made, one(3, parent=99))
    until(lambda: logged("not exact about a worker"), "the log line")
    (line,) = logged("not exact about a worker")
    assert " WARN " in line and "worker=1:0" in line and "orphaned_stores" in line
    assert "fix=" in line and "1 stored event continues unknown blocks" in line
    assert not logged("exact about a worker again")
    wait(http, made, batch(cleared()))
    until(lambda: logged("exact about a worker again"), "the end of it")
    # Findings that require a search of the index are logged by that search.
    for name in (4, 5, 6, 7):
        wait(http, made, one(name))
    for _ in range(3):
        http.get("/metrics")
        assert trust(http) == ("degraded", "over_capacity")
    until(lambda: logged("over_capacity"), "the log line")
    assert len(logged("not exact about a worker")) == 2
