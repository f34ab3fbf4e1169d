"""Replicas of the indexer: recovery from a peer, readiness, digests; real sockets, real HTTP."""

from __future__ import annotations

import http.server
import json
import random
import socket
import threading

import pytest

from service import (
    EmbeddedIndexer,
    Engine,
    batch,
    cleared,
    dumped_blocks,
    listener,
    removed,
    stored,
    until,
    wait_for_sequence,
)
from support_indexer import metric

SIZE = 4
MODEL = "org/model:v2"
KEY = f"{MODEL}:default"


@pytest.fixture
def replica():
    """Makes indexers that end with the test."""
    made = []

    def make(*peers, workers=(), **settings):
        urls = [peer if isinstance(peer, str) else peer.http.url for peer in peers]
        made.append(EmbeddedIndexer(workers=workers, peers=urls, **settings))
        return made[-1]

    yield make
    for indexer in made:
        indexer.close()


@pytest.fixture
def peer_of():
    """Makes peers of the test's own that end with it."""
    peers = []

    def make(*args, **settings):
        peers.append(Peer(*args, **settings))
        return peers[-1]

    yield make
    for made in peers:
        made.close()


@pytest.fixture
def engine():
    """Makes engines that end with the test."""
    engines = []

    def make(**settings):
        engines.append(Engine(is_shared=True, **settings))
        return engines[-1]

    yield make
    for made in engines:
        made.close()


def worker(engine, instance=1, rank=0, model=MODEL, **fields):
    """Arguments of Indexer.register."""
    return {
        "instance_id": instance,
        "endpoint": engine.endpoint,
        "replay_endpoint": engine.replay_endpoint,
        "model_name": model,
        "block_size": SIZE,
        "dp_rank": rank,
        **fields,
    }


def register(indexer, engine, instance=1, **fields):
    body = {
        key: value for key, value in worker(engine, instance, **fields).items() if value is not None
    }
    indexer.http.post("/register", body, expect=201)
    engine.wait_for_subscriber()


def ready(indexer):
    """GET /ready once it is 200."""

    def check():
        status, body, _ = indexer.http.call("GET", "/ready")
        return body if status == 200 else None

    return until(check, "readiness")


def chain(first, blocks, parent=None, **fields):
    hashes = [first + n for n in range(blocks)]
    tokens = [first * 7 + n for n in range(blocks * SIZE)]
    return stored(hashes, tokens, parent, block_size=SIZE, **fields)


def digests(*indexers):
    return [indexer.http.get("/digest") for indexer in indexers]


def until_equal(*indexers):
    """Wait until all replicas hold the same; what that is."""

    def check():
        seen = [{m["model_name"]: m["digest"] for m in one} for one in digests(*indexers)]
        return seen if all(one == seen[0] for one in seen) else None

    return until(check, "equal digests")[0]


def test_a_replica_takes_over_what_its_peer_holds(replica, engine):
    # No replay endpoint: what the second one knows can come from the first one only.
    source = engine(replay=False)
    a = replica()
    register(a, source)
    source.publish(batch(chain(100, 5)))
    source.publish(batch(chain(200, 3, 104), dp_rank=1))
    source.publish(batch(removed([102]), chain(100, 2, medium="CPU")))
    wait_for_sequence(a.http, 1, 2)

    b = replica(a, workers=[worker(source)])
    answer = ready(b)
    assert answer["recovery"]["phase"] == "done"
    assert answer["recovery"]["peer"] == a.http.url
    assert (answer["recovery"]["publishers"], answer["recovery"]["skipped"]) == (1, [])
    assert dumped_blocks(b.http, KEY) == dumped_blocks(a.http, KEY) != set()
    assert listener(b.http, 1)["last_sequence"] == 2
    assert b.http.get("/workers")[0]["dynamic_dp_ranks"] == [1]

    # Later batches are applied once by both, without a gap.
    source.wait_for_subscriber()
    source.publish(batch(chain(300, 2, 104), removed([201], medium="GPU"), dp_rank=1))
    for indexer in (a, b):
        events = wait_for_sequence(indexer.http, 1, 3)["events"]
        assert (events["lost_batches"], events["gap_batches"], events["restarts"]) == (0, 0, 0)
    assert digests(a) == digests(b)


def test_copies_are_counted_as_the_peer_counted_them(replica, engine):
    source = engine(replay=False)
    a = replica()
    register(a, source)
    source.publish(batch(chain(100, 2), chain(100, 2)))
    wait_for_sequence(a.http, 1, 0)
    b = replica(a, workers=[worker(source)])
    ready(b)
    source.wait_for_subscriber()
    for wanted in (2, 0):
        source.publish(batch(removed([101]), removed([100])))
        until_equal(a, b)
        last = source.sequence - 1
        wait_for_sequence(b.http, 1, last)
        assert len(dumped_blocks(b.http, KEY)) == wanted


def test_frames_that_came_during_the_recovery_are_applied_once(replica, peer_of, engine):
    source = engine(replay=False)
    a = replica()
    register(a, source)
    source.publish(batch(chain(100, 4)))
    wait_for_sequence(a.http, 1, 0)

    # A peer that hands over a's dump as of now, when the test says so.
    status, dump, headers = a.http.call("GET", "/dump?format=snapshot")
    assert status == 200
    gate = threading.Event()
    peer = peer_of(dump, headers["content-type"], gate=gate)
    b = replica(peer.url, workers=[worker(source)])
    source.wait_for_subscriber()
    peer.asked.wait(30)
    status, answer, headers = b.http.call("GET", "/ready")
    assert (status, answer["status"], headers["retry-after"]) == (503, "recovering", "1")
    source.publish(batch(chain(200, 3, 103)))
    source.publish(batch(removed([202])))
    wait_for_sequence(a.http, 1, 2)
    # Connected, and it reads nothing yet.
    entry = listener(b.http, 1)
    assert (entry["last_sequence"], entry["status"]) == (None, "pending")
    assert metric(b.http, "kvflash_kvindexer_listeners")['{status="pending"}'] == 1
    gate.set()
    ready(b)
    assert wait_for_sequence(b.http, 1, 2)["status"] == "active"
    assert digests(a) == digests(b)


class Peer:
    """A peer that answers /dump with bytes of the test's choice, and a query with ``no_query``."""

    def __init__(
        self, dump, kind="application/json", *, gate=None, ready=404, length=None, no_query=None
    ):
        outer = self
        self.asked = threading.Event()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                if self.path.startswith("/ready"):
                    return self.send_error(ready)
                if no_query is not None and self.path != "/dump":
                    return self.send_error(no_query)
                outer.asked.set()
                if gate is not None:
                    assert gate.wait(30)
                self.send_response(200)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(length or len(dump)))
                self.end_headers()
                self.wfile.write(dump)
                return None

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def test_queries_are_answered_and_marked_before_readiness(replica, engine):
    source = engine(replay=False)
    a = replica(min_initial_workers=2)
    register(a, source)
    source.publish(batch(chain(100, 1)))
    wait_for_sequence(a.http, 1, 0)
    body = {"model_name": MODEL, "token_ids": list(range(700, 704))}
    for path in ("/query", "/query_by_hash", "/digest", "/dump"):
        method = "POST" if "query" in path else "GET"
        sent = {**body, "block_hashes": [1]} if method == "POST" else None
        status, _, headers = a.http.call(method, path, sent)
        assert (status, headers.get("x-kvflash-ready")) == (200, "false"), path
    status, answer, _ = a.http.call("GET", "/ready")
    assert (status, answer["status"]) == (503, "waiting_for_workers")
    assert answer["workers"] == {"registered": 1, "wanted": 2}

    register(a, engine(replay=False), 2)
    ready(a)
    status, answer, headers = a.http.call("POST", "/query", body)
    assert answer["scores"]["1"] == {"0": 4}
    assert "x-kvflash-ready" not in headers
    a.http.post("/unregister", {"instance_id": 2, "model_name": MODEL})
    assert ready(a)["status"] == "ready"


def test_a_peer_that_waits_for_workers_is_recovered_from(replica, engine):
    source = engine(replay=False)
    a = replica(min_initial_workers=5)
    register(a, source)
    source.publish(batch(chain(100, 3)))
    wait_for_sequence(a.http, 1, 0)
    b = replica(a)
    ready(b)
    assert digests(a) == digests(b)


def test_two_replicas_that_start_together_do_not_wait_for_each_other(replica):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        other = f"http://127.0.0.1:{taken.getsockname()[1]}"
    a = replica(other)
    assert ready(a)["recovery"]["errors"] == [f"{other}: no connection"]
    b = replica(a)
    assert ready(b)["recovery"]["peer"] == a.http.url


def test_the_first_healthy_peer_serves(replica, peer_of, engine):
    source = engine(replay=False)
    a = replica()
    register(a, source)
    source.publish(batch(chain(100, 3)))
    wait_for_sequence(a.http, 1, 0)
    broken = peer_of(b"no dump", ready=500)
    b = replica(broken.url, a)
    answer = ready(b)["recovery"]
    assert answer["peer"] == a.http.url
    assert answer["errors"] == [f"{broken.url}: GET /ready answered 500 Internal Server Error"]
    assert digests(a) == digests(b)


def test_a_dump_that_breaks_off_keeps_what_came(replica, peer_of, engine):
    sources = [engine(replay=False) for _ in range(3)]
    a = replica()
    for instance, source in enumerate(sources):
        register(a, source, instance)
        source.publish(batch(chain(100 * (instance + 1), 4)))
        wait_for_sequence(a.http, instance, 0)
    _, dump, headers = a.http.call("GET", "/dump?format=snapshot")
    half = peer_of(dump[: len(dump) // 2], headers["content-type"], length=len(dump))
    b = replica(half.url, a, workers=[worker(s, n) for n, s in enumerate(sources)])
    answer = ready(b)["recovery"]
    assert len(answer["errors"]) == 1 and answer["errors"][0].startswith(half.url)
    assert answer["peer"] == a.http.url
    assert digests(a) == digests(b)
    assert [listener(b.http, n)["last_sequence"] for n in range(3)] == [0, 0, 0]


@pytest.mark.parametrize(
    "dump", [b"", b"no dump", b'{"m:default": {"block_size": 4, "events": [{}]}}', b"[1]", b"{"]
)
def test_a_peer_without_a_dump_costs_only_itself(replica, peer_of, dump):
    peer = peer_of(dump)
    b = replica(peer.url)
    answer = ready(b)["recovery"]
    assert len(answer["errors"]) == 1 and "dump" in answer["errors"][0]


def test_any_flipped_byte_of_a_dump_is_harmless(replica, peer_of, engine):
    source = engine(replay=False)
    a = replica()
    register(a, source)
    source.publish(batch(chain(100, 4)))
    wait_for_sequence(a.http, 1, 0)
    _, dump, headers = a.http.call("GET", "/dump?format=snapshot")
    whole = dumped_blocks(a.http, KEY)
    rng = random.Random(7)
    for at in sorted(rng.sample(range(len(dump)), 12)):
        broken = dump[:at] + bytes([dump[at] ^ 0x55]) + dump[at + 1 :]
        peer = peer_of(broken, headers["content-type"])
        b = replica(peer.url)
        answer = ready(b)["recovery"]
        held = b.http.get("/dump")
        blocks = dumped_blocks(b.http, KEY) if KEY in held else set()
        is_told = bool(answer["errors"] or answer["skipped"])
        assert blocks in (set(), whole), at
        assert is_told or blocks == whole, at
        b.close = lambda: None  # closed here, not by the fixture
        EmbeddedIndexer.close(b)


@pytest.mark.parametrize("no_query", [None, 400, 404])
def test_a_peer_of_another_make(replica, peer_of, engine, no_query):
    # The published form: no watermarks, the name split at a colon that may be in it.
    def event(number, data, tier=None):
        extra = {"storage_tier": tier} if tier else {}
        return {"worker_id": 1, "event": {"event_id": number, "data": data, "dp_rank": 0}, **extra}

    def block(name):
        return {"block_hash": name, "tokens_hash": name * 3, "mm_extra_info": None}

    events = [
        event(0, {"stored": {"parent_hash": None, "blocks": [block(1), block(2)]}}),
        event(1, {"stored": {"parent_hash": 2, "blocks": [block(3)]}}, "disk"),
    ]
    dump = {
        "org/model:v2:default": {"block_size": SIZE, "events": events},
        "x:y": {"error": "busy"},
    }
    peer = peer_of(json.dumps(dump).encode(), no_query=no_query)
    source = engine(replay=False)
    b = replica(peer.url, workers=[worker(source)])
    answer = ready(b)["recovery"]
    assert (answer["workers"], answer["blocks"], answer["errors"]) == (1, 3, [])
    assert answer["skipped"] == ["model x:y: the peer says: busy"]
    assert {fact[2:4] for fact in dumped_blocks(b.http, KEY)} == {
        ("device", 1),
        ("device", 2),
        ("disk", 3),
    }
    # Their last batch is unknown: a stream from its start replaces them, a later one continues.
    source.wait_for_subscriber()
    source.publish(batch(chain(100, 2)))
    wait_for_sequence(b.http, 1, 0)
    assert {fact[3] for fact in dumped_blocks(b.http, KEY)} == {100, 101}


@pytest.mark.parametrize("first", [0, 41])
def test_blocks_without_a_watermark_stay_when_the_stream_goes_on(replica, peer_of, engine, first):
    stored_one = {"parent_hash": None, "blocks": [{"block_hash": 9, "tokens_hash": 9}]}
    events = [
        {"worker_id": 1, "event": {"event_id": 0, "data": {"stored": stored_one}, "dp_rank": 0}}
    ]
    peer = peer_of(json.dumps({KEY: {"block_size": SIZE, "events": events}}).encode())
    source = engine(replay=False)
    b = replica(peer.url, workers=[worker(source)])
    ready(b)
    source.wait_for_subscriber()
    source.sequence = first
    # A stream from its start goes on only if it continues a copied block: see the test above.
    source.publish(batch(chain(100, 2, parent=None if first else 9)))
    entry = wait_for_sequence(b.http, 1, first)
    assert {fact[3] for fact in dumped_blocks(b.http, KEY)} == {9, 100, 101}
    assert entry["events"]["lost_batches"] == 0
    codes = [reason["code"] for reason in entry["trust"]["reasons"]]
    assert codes == ["recovered_without_watermark"]


def test_a_peers_doubts_are_taken_over(replica, engine):
    source = engine(replay=False)
    a = replica()
    register(a, source)
    source.publish(batch(chain(100, 2)))
    source.publish(batch(removed([101])), is_sent=False)
    source.publish(batch(chain(200, 2)))
    wait_for_sequence(a.http, 1, 2)
    b = replica(a, workers=[worker(source)])
    ready(b)
    source.wait_for_subscriber()
    assert digests(a) == digests(b)
    reasons = until(
        lambda: [reason["code"] for reason in listener(b.http, 1)["trust"]["reasons"]],
        "the doubt",
    )
    assert "recovered_inexact" in reasons
    source.publish(batch(cleared()))
    entry = wait_for_sequence(b.http, 1, 3)
    assert entry["trust"]["state"] == "exact"


def test_an_engine_that_registers_after_the_recovery_goes_on_from_there(replica, engine):
    source = engine()
    a = replica()
    register(a, source)
    for n in range(3):
        source.publish(batch(chain(100 * (n + 1), 2)))
    wait_for_sequence(a.http, 1, 2)
    b = replica(a)
    ready(b)
    assert digests(a) == digests(b)
    register(b, source)
    source.publish(batch(removed([101])))
    events = wait_for_sequence(b.http, 1, 3)["events"]
    assert (events["restarts"], events["lost_batches"]) == (0, 0)
    wait_for_sequence(a.http, 1, 3)
    assert digests(a) == digests(b)
    # It verified the batch that it went on from, and asked for nothing before.
    assert min(source.asked[1:]) == 2


def test_recovered_blocks_go_with_unregister(replica, engine):
    source = engine(replay=False)
    a = replica()
    register(a, source)
    source.publish(batch(chain(100, 2)))
    wait_for_sequence(a.http, 1, 0)
    b = replica(a)
    ready(b)
    assert len(dumped_blocks(b.http, KEY)) == 2
    b.http.post("/unregister", {"instance_id": 1, "model_name": MODEL})
    assert dumped_blocks(b.http, KEY) == set()
    b.http.post("/unregister", {"instance_id": 1, "model_name": MODEL}, expect=404)


def test_an_engine_that_restarted_after_the_dump_is_found_out(replica, peer_of, engine):
    source = engine()
    a = replica()
    register(a, source)
    for n in range(3):
        source.publish(batch(chain(100 * (n + 1), 2)))
    wait_for_sequence(a.http, 1, 2)
    _, dump, headers = a.http.call("GET", "/dump?format=snapshot")
    a.http.post("/unregister", {"instance_id": 1, "model_name": MODEL})
    source.restart()
    source.publish(batch(chain(900, 2)))
    peer = peer_of(dump, headers["content-type"])
    b = replica(peer.url, workers=[worker(source)])
    ready(b)
    assert wait_for_sequence(b.http, 1, 0)["events"]["restarts"] == 1
    assert {fact[3] for fact in dumped_blocks(b.http, KEY)} == {900, 901}


def test_a_model_that_nobody_holds_anything_of_has_no_digest(replica, engine):
    a = replica()
    register(a, engine(replay=False))
    assert digests(a) == [[]]


def test_another_block_size_is_left_out_and_said(replica, engine):
    source, other = engine(replay=False), engine(replay=False)
    a = replica()
    register(a, source)
    source.publish(batch(chain(100, 2)))
    wait_for_sequence(a.http, 1, 0)
    b = replica(a, workers=[worker(other, 7, block_size=16)])
    answer = ready(b)["recovery"]
    assert answer["skipped_count"] == 1 and "block_size 4 differs from 16" in answer["skipped"][0]
    assert dumped_blocks(b.http, KEY) == set()


def test_models_and_tenants_stay_apart(replica, peer_of, engine):
    a = replica()
    for instance, tenant in enumerate(["x", "y:z"]):
        source = engine(replay=False)
        register(a, source, instance, tenant_id=tenant)
        source.publish(batch(chain(100 * (instance + 1), 2)))
        wait_for_sequence(a.http, instance, 0)
    for path in ("/dump?format=snapshot", "/dump"):
        _, dump, headers = a.http.call("GET", path)
        body = dump if isinstance(dump, bytes) else json.dumps(dump).encode()
        peer = peer_of(body, headers["content-type"])
        b = replica(peer.url)
        ready(b)
        assert digests(a) == digests(b), path
    assert [(m["model_name"], m["tenant_id"]) for m in a.http.get("/digest")] == [
        (MODEL, "x"),
        (MODEL, "y:z"),
    ]
    assert [m["tenant_id"] for m in a.http.get("/digest?tenant_id=x")] == ["x"]
    assert list(a.http.get("/dump?tenant_id=x")) == [f"{MODEL}:x"]


def test_registering_again_goes_on_and_gets_the_blocks_back(replica, engine):
    source = engine()
    a = replica()
    register(a, source)
    for n in range(3):
        source.publish(batch(chain(100 * (n + 1), 2)))
    wait_for_sequence(a.http, 1, 2)
    held = dumped_blocks(a.http, KEY)
    a.http.post("/unregister", {"instance_id": 1, "model_name": MODEL})
    source.wait_for_departure()
    source.publish(batch(chain(400, 2)))
    register(a, source)
    until(lambda: dumped_blocks(a.http, KEY) > held, "all that the engine still has")
    entry = wait_for_sequence(a.http, 1, 3)
    assert (entry["events"]["restarts"], entry["events"]["lost_batches"]) == (0, 0)
    assert entry["trust"] == {"state": "exact", "reasons": []}


def test_registering_again_without_replay_knows_what_was_missed(replica, engine):
    source = engine(replay=False)
    a = replica()
    register(a, source)
    for n in range(3):
        source.publish(batch(chain(100 * (n + 1), 2)))
    wait_for_sequence(a.http, 1, 2)
    a.http.post("/unregister", {"instance_id": 1, "model_name": MODEL})
    source.wait_for_departure()
    source.publish(batch(cleared()), is_sent=False)
    register(a, source)
    assert listener(a.http, 1)["last_sequence"] == 2
    source.publish(batch(chain(500, 2)))
    entry = wait_for_sequence(a.http, 1, 4)
    assert (entry["events"]["lost_batches"], entry["events"]["restarts"]) == (1, 0)
    codes = {reason["code"] for reason in entry["trust"]["reasons"]}
    assert codes == {"missed_first_batches", "lost_batches"}
    # A number from before the unregistration is a new life.
    a.http.post("/unregister", {"instance_id": 1, "model_name": MODEL})
    source.wait_for_departure()
    register(a, source)
    source.sequence = 0
    source.publish(batch(chain(600, 2)))
    assert wait_for_sequence(a.http, 1, 0)["events"]["restarts"] == 1


def test_peers_are_registered_listed_and_forgotten(replica):
    a = replica()
    assert a.http.get("/peers") == []
    for _ in range(2):
        assert a.http.post("/register_peer", {"url": "http://peer:8091"}, expect=201) == {
            "status": "ok"
        }
    assert a.http.get("/peers") == ["http://peer:8091"]
    assert a.http.post("/deregister_peer", {"url": "http://peer:8091"}) == {"status": "ok"}
    assert a.http.post("/deregister_peer", {"url": "http://peer:8091"}, expect=404) == {
        "error": "peer not found"
    }
    error = a.http.post("/register_peer", {"url": "peer:8091"}, expect=400)["error"]
    assert error == 'url must be http://host[:port] of a peer indexer, got "peer:8091"'


def test_a_paused_listener_loses_nothing_that_fits(replica, engine):
    source = engine(replay=False)
    a = replica(test_endpoints=True)
    register(a, source)
    who = {"instance_id": 1}
    a.http.post("/test/resume_listener", who, expect=409)
    a.http.post("/test/pause_listener", who)
    until(lambda: listener(a.http, 1)["status"] == "paused", "the pause")
    a.http.post("/test/pause_listener", who, expect=409)
    source.publish(batch(chain(100, 2)))
    a.http.post("/test/pause_listener", {"instance_id": 2}, expect=404)
    assert listener(a.http, 1)["last_sequence"] is None
    a.http.post("/test/resume_listener", who)
    assert wait_for_sequence(a.http, 1, 0)["status"] == "active"


def test_an_unknown_format_is_named(replica):
    status, answer, _ = replica().http.call("GET", "/dump?format=xml")
    assert (status, answer) == (400, {"error": 'format must be json or snapshot, got "xml"'})


def test_a_worker_without_blocks_hands_over_its_place(replica, engine):
    source = engine(replay=False)
    a = replica()
    register(a, source)
    source.publish(batch(chain(100, 2)))
    source.publish(batch(cleared()))
    wait_for_sequence(a.http, 1, 1)
    b = replica(a, workers=[worker(source)])
    ready(b)
    source.wait_for_subscriber()
    assert listener(b.http, 1)["last_sequence"] == 1
    source.publish(batch(chain(300, 2)))
    events = wait_for_sequence(b.http, 1, 2)["events"]
    assert (events["lost_batches"], events["restarts"]) == (0, 0)


def test_an_empty_dump_without_a_place_hides_no_gap(replica, engine):
    source = engine()
    a = replica()
    register(a, source)
    b = replica(a, workers=[worker(source)])
    ready(b)
    source.wait_for_subscriber()
    assert listener(b.http, 1)["last_sequence"] is None
    # These never reach a subscriber; the engine has them still.
    for first in (100, 200):
        source.publish(batch(chain(first, 2)), is_sent=False)
    source.publish(batch(chain(300, 2)))
    for indexer in (a, b):
        wait_for_sequence(indexer.http, 1, 2)
    assert {fact[3] for fact in dumped_blocks(b.http, KEY)} == {100, 101, 200, 201, 300, 301}
    until_equal(a, b)


def test_a_gap_behind_an_empty_dump_that_nobody_repairs_is_counted(replica, engine):
    source = engine(replay=False)
    a = replica()
    register(a, source)
    b = replica(a, workers=[worker(source)])
    ready(b)
    source.wait_for_subscriber()
    source.sequence = 3
    source.publish(batch(chain(100, 2)))
    for indexer in (a, b):
        assert wait_for_sequence(indexer.http, 1, 3)["events"]["lost_batches"] == 3
