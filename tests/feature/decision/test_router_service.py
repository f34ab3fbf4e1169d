"""The standalone router over HTTP, fed by real ZMQ events."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter

import msgpack
import pytest

from kvflash import (
    AllBusyError,
    ClosedError,
    ConfigError,
    ConflictError,
    InvalidArgumentError,
    NotFoundError,
    compute_block_hash_for_seq,
)
from kvflash.router import RouterService
from kvflash.router.args import parse_worker
from service import (
    VECTORS,
    EmbeddedIndexer,
    Http,
    batch,
    dumped_blocks,
    stored,
    until,
    wait_for_sequence,
)
from support_router import IDS, SIZE, add, ask, hold, load, worker

LOCAL = {"host": "127.0.0.1", "port": 0, "threads": 2, "seed": 1}


@pytest.fixture
def service():
    """Makes routers that end with the test."""
    made = []

    def make(**settings):
        made.append(RouterService(**LOCAL, **settings).start())
        return made[-1]

    yield make
    for one in made:
        one.stop()


@pytest.fixture
def http(service, client):
    return client(service().url)


# -- the choice


def test_the_worker_that_holds_the_prompt_is_selected(http, engine):
    first, second = engine(), engine()
    add(http, 1, engine=first)
    add(http, 2, engine=second)
    hold(http, second, 2)
    answer = ask(http)
    assert (answer["worker_id"], answer["dp_rank"]) == (2, 0)
    assert answer["url"] == "http://worker-2"
    assert (answer["overlap_blocks"], answer["best_blocks"], answer["block_size"]) == (4, 4, SIZE)
    # The last token is always computed.
    assert (answer["isl_tokens"], answer["expected_cached_tokens"]) == (16, 12)
    assert answer["reason"] == "lowest_cost"
    assert "request_id" not in answer
    # A removed worker loses its credit together with its blocks.
    http.call("DELETE", "/workers/2")
    assert ask(http)["worker_id"] == 1


def test_hashes_stand_for_tokens(http, engine):
    made = engine()
    add(http, 1, engine=made)
    add(http, 2)
    hold(http, made, 1)
    hashes = compute_block_hash_for_seq(IDS, SIZE)
    for fields in ({"block_hashes": hashes}, {"local_hashes": hashes, "isl_tokens": 18}):
        answer = http.post("/select", {"model_name": "m", **fields})
        assert (answer["worker_id"], answer["overlap_blocks"]) == (1, 4)
        assert answer["isl_tokens"] == fields.get("isl_tokens", 16)
    for isl_tokens in (15, 20):
        body = {"model_name": "m", "block_hashes": hashes, "isl_tokens": isl_tokens}
        answer = http.post("/select", body, expect=400)
        assert (
            f"isl_tokens must be in 16..=19 with 4 block_hashes of 4 tokens, got {isl_tokens}"
            in (answer["error"])
        )


def test_a_length_alone_is_routed_by_load(http):
    add(http, 1)
    add(http, 2)
    one = http.post("/reserve", {"model_name": "m", "isl_tokens": 1_000, "request_id": "a"})
    two = http.post("/reserve", {"model_name": "m", "isl_tokens": 10, "request_id": "b"})
    assert {one["worker_id"], two["worker_id"]} == {1, 2}
    assert load(http, one["worker_id"])[2] == 1_000


def test_what_a_request_wants_otherwise_is_obeyed(http, engine):
    made = engine()
    add(http, 1, engine=made)
    add(http, 2, dp_size=2)
    hold(http, made, 1)
    assert ask(http)["worker_id"] == 1
    assert ask(http, allowed_worker_ids=[2])["worker_id"] == 2
    pinned = ask(http, worker_id=2, dp_rank=1)
    assert (pinned["worker_id"], pinned["dp_rank"], pinned["overlap_blocks"]) == (2, 1, 0)
    ask(http, "/reserve", request_id="r", worker_id=1)
    # With a weight of 0 the cache does not count, and only worker 1 has work.
    overrides = {"overlap_score_weight": 0.0}
    assert ask(http, router_config_override=overrides)["worker_id"] == 2
    for fields, wanted in [
        ({"allowed_worker_ids": [7]}, 503),
        ({"worker_id": 7}, 503),
        ({"dp_rank": 1}, 400),
        ({"router_config_override": {"router_temperature": -1}}, 400),
    ]:
        ask(http, expect=wanted, **fields)


def test_adapters_and_salts_are_prompts_of_their_own(http, engine):
    made = engine()
    add(http, 1, engine=made)
    add(http, 2)
    hold(http, made, 1)
    for fields in ({"lora_name": "adapter"}, {"cache_salt": "salt"}):
        assert ask(http, **fields)["best_blocks"] == 0
    assert ask(http)["best_blocks"] == 4


def test_selecting_changes_nothing(http):
    add(http, 1)
    add(http, 2)
    for path in ("/select", "/explain", "/potential_loads"):
        for _ in range(3):
            ask(http, path)
    assert load(http, 1) == load(http, 2) == (0, 0, 0)
    health = http.get("/health")
    assert health["reservations"] == 0


def test_each_selection_draws_anew_and_its_seed_repeats_it(http):
    for worker_id in range(1, 5):
        add(http, worker_id)
    warm = {"router_config_override": {"router_temperature": 1.0}}
    explained = ask(http, "/explain", **warm)
    drawn = [ask(http, tokens=[n] * 16, **warm) for n in range(200)]
    assert {answer["worker_id"] for answer in drawn} == {1, 2, 3, 4}
    for number, answer in enumerate(drawn[:50]):
        again = ask(http, tokens=[number] * 16, seed=answer["seed"], **warm)
        assert again == answer
    # Questions leave the next request alone, and /explain shows it, as often as it is asked.
    assert ask(http, "/explain", **warm) == explained
    booked = ask(http, "/reserve", request_id="r", **warm)
    assert (booked["worker_id"], booked["seed"]) == (explained["worker_id"], explained["seed"])
    (decision,) = http.get("/why/r")["decisions"]
    assert decision["seed"] == booked["seed"]
    http.post("/free", {"request_id": "r"})
    named = http.post("/", {"method": "new", "tokens": IDS, "seed": 5})
    assert (named["worker_id"], named["seed"]) == (ask(http, seed=5)["worker_id"], 5)
    for bad in (-1, 2**64, 0.5, "7"):
        assert "seed" in ask(http, seed=bad, expect=400)["error"]


# -- the life of a reservation


def test_a_reservation_is_load_until_it_is_freed(http):
    add(http, 1)
    answer = ask(http, "/reserve", request_id="r")
    assert answer["request_id"] == "r"
    assert load(http, 1) == (1, 4, 16)
    http.post("/prefill_complete", {"request_id": "r"})
    assert load(http, 1) == (1, 4, 0)
    # Saying it again changes nothing.
    http.post("/prefill_complete", {"request_id": "r"})
    http.post("/touch", {"request_id": "r"})
    assert http.post("/free", {"request_id": "r", "cached_tokens": 12})["freed"] is True
    assert load(http, 1) == (0, 0, 0)
    assert http.post("/free", {"request_id": "r"})["freed"] is False
    for path in ("/prefill_complete", "/touch"):
        assert 'request_id "r" is not active' in http.post(path, {"request_id": "r"}, 404)["error"]
    # Its name may be used again.
    ask(http, "/reserve", request_id="r")


def test_a_name_is_booked_once(http):
    add(http, 1)
    ask(http, "/reserve", request_id="r")
    assert "already active" in ask(http, "/reserve", request_id="r", expect=409)["error"]
    assert load(http, 1)[0] == 1
    for name in ("", "x" * 257):
        ask(http, "/reserve", request_id=name, expect=400)
    assert "request_id" in ask(http, "/reserve", expect=400)["error"]


def test_a_client_that_dies_gives_its_load_back(service, client):
    http = client(service(active_request_expiry=1.0).url)
    add(http, 1)
    doomed = Http(http.url)
    ask(doomed, "/reserve", request_id="lost")
    ask(http, "/reserve", request_id="kept")
    doomed.close()

    def is_expired():
        http.post("/touch", {"request_id": "kept"})
        return load(http, 1)[0] == 1

    until(is_expired, "the load of the request of which nothing is heard")
    http.post("/touch", {"request_id": "lost"}, expect=404)
    decisions = http.get("/why/lost")["decisions"]
    assert [decision["outcome"] for decision in decisions] == ["expired"]
    assert metric(http, "kvflash_load_expired_total") == 1


def test_a_worker_that_leaves_takes_its_requests_with_it(http):
    add(http, 1)
    add(http, 2)
    ask(http, "/reserve", request_id="r", worker_id=1)
    http.call("DELETE", "/workers/1")
    assert http.post("/free", {"request_id": "r"})["freed"] is False
    add(http, 1)
    assert load(http, 1) == (0, 0, 0)
    assert "no worker 3" in http.call("DELETE", "/workers/3")[1]["error"]


def test_a_hundred_reservations_at_once_spread(http):
    workers = 8
    for number in range(1, workers + 1):
        add(http, number)
    chosen: Counter[int] = Counter()
    lock, gate = threading.Lock(), threading.Barrier(20)

    def reserve(client_number):
        mine = Http(http.url)
        try:
            gate.wait()
            for at in range(5):
                name = f"{client_number}-{at}"
                answer = ask(mine, "/reserve", request_id=name, tokens=[client_number] * 64)
                with lock:
                    chosen[answer["worker_id"]] += 1
        finally:
            mine.close()

    threads = [threading.Thread(target=reserve, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert chosen.total() == 100
    assert len(chosen) == workers
    # No client gets twice its share.
    assert max(chosen.values()) <= 25, chosen
    assert sum(load(http, number)[0] for number in range(1, workers + 1)) == 100


def test_of_many_reservations_of_one_name_one_books(http):
    add(http, 1)
    statuses: list[int] = []
    gate = threading.Barrier(16)

    def reserve():
        mine = Http(http.url)
        body = {"model_name": "m", "token_ids": IDS, "request_id": "same"}
        gate.wait()
        statuses.append(mine.call("POST", "/reserve", body)[0])
        mine.close()

    threads = [threading.Thread(target=reserve) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [200] + [409] * 15
    assert load(http, 1)[0] == 1


# -- load, thresholds, explanations


def test_potential_loads_say_what_the_request_would_make_of_each(http, engine):
    made = engine()
    add(http, 1, engine=made)
    add(http, 2)
    hold(http, made, 1)
    ask(http, "/reserve", request_id="r", tokens=[1] * 8, worker_id=2)
    answer = ask(http, "/potential_loads")
    assert (answer["pending_count"], answer["pending_isl_tokens"]) == (0, 0)
    loads = {load["worker_id"]: load for load in answer["loads"]}
    assert loads[1] == {
        "worker_id": 1,
        "dp_rank": 0,
        "potential_prefill_tokens": 0,
        "potential_decode_blocks": 4,
        "active_requests": 0,
        "overlap_blocks": 4,
    }
    assert loads[2]["potential_prefill_tokens"] == 24
    assert loads[2]["active_requests"] == 1


def test_busy_workers_are_passed_over_and_all_busy_is_503(http):
    for number in (1, 2):
        add(http, number, kv_total_blocks=100, max_num_batched_tokens=64)
    body = {"model": "m", "active_decode_blocks_threshold": 0.5}
    assert http.post("/busy_threshold", body)["active_decode_blocks_threshold"] == 0.5
    http.post("/report_load", {"worker_id": 1, "kv_used_blocks": 51})
    assert worker(http, 1)["is_busy"]
    assert {ask(http)["worker_id"] for _ in range(8)} == {2}
    # Another router's share counts beside it.
    share = {"worker_id": 2, "router_id": 9, "active_decode_blocks": 51}
    http.post("/report_load", share)
    status, answer, headers = http.call(
        "POST", "/reserve", {"model_name": "m", "token_ids": IDS, "request_id": "r"}
    )
    assert (status, headers["retry-after"]) == (503, "1")
    assert answer["error"].startswith("Service temporarily unavailable")
    assert "active_decode_blocks_threshold=0.5" in answer["error"]
    assert load(http, 1) == load(http, 2) == (0, 0, 0)
    # An explicit null unsets.
    http.post("/busy_threshold", {"model": "m", "active_decode_blocks_threshold": None})
    ask(http, "/reserve", request_id="r")
    assert http.get("/busy_threshold") == {"thresholds": []}


def test_thresholds_outlive_a_worker_that_flaps(http):
    add(http, 1)
    http.post("/busy_threshold", {"model": "m", "active_prefill_tokens_threshold": 7})
    http.call("DELETE", "/workers/1")
    assert http.get("/busy_threshold") == {"thresholds": []}
    add(http, 1)
    assert http.get("/busy_threshold")["thresholds"][0]["active_prefill_tokens_threshold"] == 7


def test_reports_of_nobody_are_refused(http):
    add(http, 1)
    assert "no worker 2" in http.post("/report_load", {"worker_id": 2}, expect=404)["error"]
    body = {"worker_id": 1, "dp_rank": 1}
    assert "no dp_rank 1" in http.post("/report_load", body, expect=404)["error"]
    body = {"worker_id": 1, "router_id": 3, "kv_used_blocks": 1}
    assert "kv_used_blocks" in http.post("/report_load", body, expect=400)["error"]


def test_a_decision_is_explained_before_and_after(http, engine):
    made = engine()
    add(http, 1, engine=made)
    add(http, 2)
    hold(http, made, 1)
    before = ask(http, "/explain")
    assert (before["worker_id"], before["reason"]) == (1, "lowest_cost")
    candidates = {entry["worker_id"]: entry for entry in before["candidates"]}
    assert (candidates[1]["device_blocks"], candidates[2]["device_blocks"]) == (4, 0)
    assert candidates[1]["cost"] < candidates[2]["cost"]
    assert candidates[1]["trust"] == "exact"
    assert candidates[1]["formula"].startswith("1:0: ")
    assert set(candidates[1]["price"]) == {"queue", "prefill", "decode", "eviction"}
    assert "4 more blocks cached than 2:0" in before["because"]
    assert http.call("GET", "/why/r")[0] == 404
    ask(http, "/reserve", request_id="r")
    http.post("/prefill_complete", {"request_id": "r"})
    http.post("/free", {"request_id": "r", "cached_tokens": 12})
    (decision,) = http.get("/why/r")["decisions"]
    assert decision["outcome"] == "freed"
    assert decision["cached_tokens"] == 12
    assert decision["worker"] == "1:0"
    assert decision["margin"] == before["margin"]


# -- workers and models


def test_ranks_publish_on_ports_of_their_own(http, engine):
    zero, one = engine(), engine()
    events = {
        str(number): {"endpoint": made.endpoint, "replay_endpoint": made.replay_endpoint}
        for number, made in enumerate((zero, one))
    }
    add(http, 1, dp_size=2, events=events)
    zero.wait_for_subscriber()
    one.wait_for_subscriber()
    hold(http, one, 1, dp_rank=1)
    answer = ask(http)
    assert (answer["worker_id"], answer["dp_rank"], answer["overlap_blocks"]) == (1, 1, 4)
    listener = worker(http, 1)["ranks"][1]["listener"]
    assert listener["endpoint"] == one.endpoint
    assert listener["trust"]["state"] == "exact"


def test_models_and_tenants_are_apart(http):
    add(http, 1)
    add(http, 2, model_name="n")
    add(http, 3, tenant_id="t")
    assert ask(http)["worker_id"] == 1
    assert ask(http, model_name="n")["worker_id"] == 2
    assert ask(http, tenant_id="t")["worker_id"] == 3
    answer = http.post("/select", {"token_ids": IDS}, expect=400)
    assert "several models" in answer["error"]
    # A worker that must take it says which model is meant.
    assert http.post("/select", {"token_ids": IDS, "worker_id": 3})["tenant_id"] == "t"
    assert "no workers for model=x tenant=default" in ask(http, model_name="x", expect=404)["error"]
    # Of one name in two models the named one is freed.
    ask(http, "/reserve", request_id="r")
    ask(http, "/reserve", request_id="r", model_name="n")
    assert http.post("/free", {"request_id": "r", "model_name": "n"})["freed"]
    assert (load(http, 1)[0], load(http, 2)[0]) == (1, 0)
    assert [w["worker_id"] for w in http.get("/workers?model_name=m")] == [1, 3]


def test_without_workers_there_is_nobody(http):
    status, answer, headers = http.call("POST", "/select", {"token_ids": IDS})
    assert (status, headers["retry-after"]) == (503, "1")
    assert "no worker is registered" in answer["error"]
    assert http.get("/health")["status"] == "no_workers"


def test_workers_that_cannot_be_are_refused_by_field(service, client):
    http = client(service(max_workers=2).url)
    # The block size of a refused worker is not adopted.
    http.post("/workers", {**new_worker(2), "block_size": 64, "endpoint": "nowhere"}, expect=400)
    ipc = {"endpoint": "ipc:///tmp/x", "dp_size": 2}
    http.post("/workers", {**new_worker(2), "block_size": 64, **ipc}, expect=400)
    add(http, 1)
    for fields, wanted in [
        ({"model_name": ""}, "model_name"),
        ({"dp_size": 0}, "dp_size must be in 1..=1024, got 0"),
        ({"kv_total_blocks": 0}, "kv_total_blocks must be at least 1, got 0"),
        ({"dp_size": 1025}, "dp_size must be in 1..=1024, got 1025"),
        ({"block_size": 0}, "block_size"),
        ({"url": "x" * 4097}, "url may have at most 4096 characters, got 4097"),
        ({"endpoint": "nowhere"}, "endpoint"),
        ({"endpoint": "ipc:///tmp/x", "dp_size": 2}, "endpoint"),
        ({"endpoint": "tcp://h:65535", "dp_size": 2}, "endpoint"),
        ({"replay_endpoint": "tcp://h:1"}, "replay_endpoint"),
        ({"events": {"1": {"endpoint": "tcp://h:1"}}}, "events.1"),
        ({"events": {"x": {"endpoint": "tcp://h:1"}}}, "events.x"),
        ({"events": {"0": {}}}, "events.0"),
        ({"endpont": "tcp://h:1"}, "endpont"),
        ({"worker_id": -2}, "worker_id"),
    ]:
        error = http.post("/workers", {**new_worker(2), **fields}, expect=400)["error"]
        assert wanted in error, (fields, error)
    assert "block_size 8 differs from 4" in add(http, 2, block_size=8, expect=409)["error"]
    unknown = http.post("/select", {"token_ids": IDS, "tenant_id": "x"}, expect=404)["error"]
    assert unknown == "no workers for tenant=x"
    typo = http.call("GET", "/workers?model=m")[1]["error"]
    assert "unknown parameter model; known: model_name" in typo
    assert "already registered" in add(http, 1, expect=409)["error"]
    add(http, 2)
    assert "limit of 2 workers" in add(http, 3, expect=429)["error"]
    assert [w["worker_id"] for w in http.get("/workers")] == [1, 2]


def new_worker(number):
    return {"worker_id": number, "model_name": "m", "block_size": SIZE}


def test_the_block_size_is_learned_from_events_and_forgotten_with_the_last_worker(http, engine):
    made = engine()
    add(http, 1, engine=made, block_size=None)
    assert "block size is unknown" in str(http.get("/health")["warnings"])

    def are_counted():
        row = f"\nkvflash_health_warnings {len(http.get('/health')['warnings'])}\n"
        return row in http.get("/metrics").decode()

    until(are_counted, "the warnings in both")
    hold(http, made, 1)
    assert worker(http, 1)["block_size"] == SIZE
    assert ask(http)["overlap_blocks"] == 4
    http.call("DELETE", "/workers/1")
    add(http, 1, block_size=16)


def test_a_wrong_block_size_is_the_workers_or_the_routers(service, client):
    router = service(kv_cache_block_size=32)
    error = add(client(router.url), 1, block_size=16, expect=409)["error"]
    assert error.startswith("the worker's block_size 16 differs from 32, the router's for model=m ")
    router = service(kv_cache_block_size=32)
    # Over NATS a worker's events may come before the worker.
    router._core.catalog.register(9, "jetstream://s/9/0", model_name="m", block_size=16)
    error = add(client(router.url), 1, block_size=16, expect=409)["error"]
    assert error.startswith("the router's block_size 32 differs from 16, that of the workers of ")


def test_reservations_have_a_limit(service, client):
    http = client(service(max_concurrent_requests=2).url)
    add(http, 1)
    for name in "ab":
        ask(http, "/reserve", request_id=name)
    ask(http, "/reserve", request_id="c", expect=429)
    http.post("/free", {"request_id": "a"})
    ask(http, "/reserve", request_id="c")


def test_without_events_a_worker_is_believed_to_hold_what_was_sent_to_it(service, client, engine):
    http = client(service(use_kv_events=False).url)
    made = engine()
    body = {**new_worker(1), "endpoint": made.endpoint}
    http.post("/workers", body, expect=201)
    add(http, 2)
    chosen = ask(http, "/reserve", request_id="r")["worker_id"]
    http.post("/free", {"request_id": "r"})
    again = ask(http)
    assert (again["worker_id"], again["overlap_blocks"]) == (chosen, 4)
    assert worker(http, 1)["ranks"][0]["listener"] is None


# -- forms and refusals


def test_msgpack_is_taken_and_given(http):
    add(http, 1)
    body = {"model_name": "m", "token_ids": b"".join(t.to_bytes(4, "little") for t in IDS)}
    headers = {"content-type": "application/msgpack", "accept": "application/msgpack"}
    status, answer, given = http.call("POST", "/select", msgpack.packb(body), headers)
    assert (status, given["content-type"]) == (200, "application/msgpack")
    assert msgpack.unpackb(answer)["isl_tokens"] == 16
    body = {**new_worker(2), "events": {"0": {"endpoint": "tcp://127.0.0.1:1"}}}
    status, answer, _ = http.call("POST", "/workers", msgpack.packb(body), headers)
    assert status == 201, answer


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"token_ids": [1, -5]}, "token_ids[1]"),
        ({"token_ids": []}, "at least 1"),
        ({"block_hashes": [1, "x"]}, "block_hashes[1]"),
        ({"token_ids": [1], "block_hashes": [1]}, "give one of them"),
        ({"token_ids": [1], "isl_tokens": 2}, "isl_tokens is 2, but token_ids has 1"),
        ({"isl_tokens": 0}, "isl_tokens must be at least 1"),
        ({"isl_tokens": 2**32}, "isl_tokens may be at most 4294967295, got 4294967296"),
        ({}, "token_ids"),
        ({"token_ids": [1], "alowed_worker_ids": [1]}, "alowed_worker_ids"),
        ({"token_ids": [1], "allowed_worker_ids": [0] * 65_536}, "allowed_worker_ids"),
        ({"token_ids": [1], "router_config_override": {"x": 1}}, "router_config_override"),
        ([1], "the body must be a JSON object, got a list"),
        (b"{", "invalid request body"),
    ],
)
def test_what_is_wrong_is_named(http, body, wanted):
    add(http, 1)
    for path in ("/select", "/reserve", "/explain", "/potential_loads"):
        sent = {**body, "request_id": "r"} if isinstance(body, dict) else body
        status, answer, _ = http.call("POST", path, sent)
        assert status == 400, (path, answer)
        assert wanted in answer["error"], (path, answer)
    assert load(http, 1) == (0, 0, 0)


def test_bodies_have_limits_of_size_and_time(service, client):
    http = client(service(max_body_bytes=1_000, body_timeout=1.0).url)
    add(http, 1)
    ask(http, tokens=[1] * 1_000, expect=413)

    with socket.create_connection(("127.0.0.1", int(http.url.rsplit(":", 1)[1]))) as raw:
        raw.sendall(b"POST /select HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n{")
        assert b" 408 " in raw.recv(4_096).splitlines()[0]
    assert http.call("GET", "/nowhere")[0] == 404
    assert http.call("GET", "/select")[0] == 405


# -- with an indexer


def test_the_indexer_s_questions_are_answered_from_the_same_index(service, client, engine):
    http = client(service(serve_indexer=True).url)
    made = engine()
    add(http, 1, engine=made)
    hold(http, made, 1)
    answer = http.post("/query", {"token_ids": IDS, "model_name": "m"})
    assert answer["scores"] == {"1": {"0": 16}}
    hashes = compute_block_hash_for_seq(IDS, SIZE)
    by_hash = http.post("/query_by_hash", {"block_hashes": hashes, "model_name": "m"})
    assert by_hash == answer
    assert len(dumped_blocks(http)) == 4
    assert http.get("/digest")[0]["blocks"] == 4


def test_without_the_flag_they_are_not(http):
    assert http.call("POST", "/query", {"token_ids": IDS, "model_name": "m"})[0] == 404


def test_a_remote_indexer_tells_what_workers_hold(service, client, engine):
    indexer = EmbeddedIndexer()
    try:
        made = engine()
        body = {"instance_id": 2, "endpoint": made.endpoint, "model_name": "m", "block_size": SIZE}
        indexer.http.post("/register", body, expect=201)
        made.wait_for_subscriber()
        sequence = made.publish(batch(stored([1, 2, 3, 4], IDS, block_size=SIZE)))
        wait_for_sequence(indexer.http, 2, sequence)
        remote = service(use_remote_indexer=indexer.http.url, remote_indexer_deadline=30.0)
        http = client(remote.url)
        for number in (1, 2, 3):
            add(http, number)
        answer = ask(http)
        assert (answer["worker_id"], answer["overlap_blocks"], answer["best_blocks"]) == (2, 4, 4)
        explained = {c["worker_id"]: c for c in ask(http, "/explain")["candidates"]}
        assert (explained[2]["device_blocks"], explained[1]["device_blocks"]) == (4, 0)
        lookups = 'kvflash_remote_indexer_lookups_total{outcome="answered"}'
        assert metric(http, lookups) == 2
        # An unknown worker id belongs to no worker.
        assert http.post("/select", {"model_name": "m", "isl_tokens": 3})["best_blocks"] == 0
        assert metric(http, lookups) == 2
    finally:
        indexer.close()


def test_a_remote_indexer_that_is_late_or_gone_is_done_without(service, client):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        http = client(service(use_remote_indexer=url, remote_indexer_deadline=0.05).url)
        add(http, 1)
        answer = ask(http, "/reserve", request_id="r")
        assert (answer["worker_id"], answer["overlap_blocks"]) == (1, 0)
        assert metric(http, 'kvflash_remote_indexer_lookups_total{outcome="late"}') == 1
    http = client(service(use_remote_indexer=url, remote_indexer_deadline=30.0).url)
    add(http, 1)
    assert ask(http)["overlap_blocks"] == 0
    assert metric(http, 'kvflash_remote_indexer_lookups_total{outcome="failed"}') == 1
    (warning,) = http.get("/health")["warnings"]
    assert warning.startswith(f"--use-remote-indexer: {url}: "), warning
    assert "Connection refused" in warning, warning
    assert warning.endswith("only the load and the prompts sent lately decide"), warning


def test_a_remote_indexer_that_is_something_else_is_named(service, client):
    indexer, other = service(serve_indexer=True).url, service().url
    for url, why in (
        (
            indexer,
            f"it does not know the model m:default (model:tenant); kvflash workers {indexer}",
        ),
        (other, "not a kvflash indexer: it answered 404 Not Found"),
    ):
        http = client(service(use_remote_indexer=url, remote_indexer_deadline=30.0).url)
        add(http, 1)
        ask(http)
        (warning,) = http.get("/health")["warnings"]
        assert warning.startswith(f"--use-remote-indexer: {url}: {why}"), warning


# -- messages with a method


def test_the_recorded_protocol(http):
    cases = json.loads((VECTORS / "router_protocol_cases.json").read_text(encoding="utf-8"))
    assert len(cases) >= 1
    add(http, 1)
    for case in cases:
        for request, wanted in zip(
            case["input"]["requests"], case["expected"]["responses"], strict=True
        ):
            status, answer, _ = http.call("POST", "/", request, {"x-request-id": case["id"]})
            assert (status, answer) == (200, wanted)
    assert load(http, 1) == (0, 0, 0)


def test_messages_book_and_free_by_name(http):
    add(http, 1)
    http.post("/", {"method": "new", "tokens": IDS, "request_id": "r", "model": "m"})
    assert load(http, 1) == (1, 4, 16)
    loads = http.post("/", {"method": "potential_loads", "tokens": IDS})
    assert loads["method"] == "potential_loads"
    assert loads["loads"][0]["active_requests"] == 1
    marked = http.post("/", {"method": "mark_prefill", "request_id": "r"})
    assert marked == {"method": "prefill_marked", "success": True}
    assert load(http, 1) == (1, 4, 0)
    freed = http.post("/", {"method": "mark_free", "request_id": "r"})
    assert freed == {"method": "free_marked", "success": True}
    for method in ("mark_prefill", "mark_free"):
        assert http.post("/", {"method": method, "request_id": "r"})["success"] is False
        assert "request_id" in http.post("/", {"method": method}, expect=400)["error"]
    # Without a name nothing is booked, as it could not be freed.
    http.post("/", {"method": "new", "tokens": IDS})
    assert load(http, 1) == (0, 0, 0)
    assert "method" in http.post("/", {"method": "other"}, expect=400)["error"]


# -- the service


def metric(http, name):
    text = http.get("/metrics").decode()
    (line,) = [line for line in text.splitlines() if line.startswith(name + " ")]
    return float(line.split()[-1])


def test_metrics_follow_what_happens(http):
    ask(http, expect=404)
    http.post("/select", {"token_ids": IDS}, expect=503)
    add(http, 1)
    http.post("/explain", {"isl_tokens": 0}, expect=400)
    http.post("/potential_loads", {"model_name": "other", "token_ids": [1]}, expect=404)
    ask(http, "/reserve", request_id="r")
    ask(http, "/reserve", request_id="r", expect=409)
    ask(http, "/reserve", expect=400)
    text = http.get("/metrics").decode()
    for line in (
        'kvflash_requests_total{endpoint="/reserve",status="200"} 1',
        'kvflash_router_selections_total{outcome="reserved"} 1',
        'kvflash_router_selections_total{outcome="duplicate"} 1',
        'kvflash_router_selections_total{outcome="no_worker"} 2',
        'kvflash_router_selections_total{outcome="invalid"} 2',
        'kvflash_router_reservations{model="m",tenant="default"} 1',
        'kvflash_worker_active_blocks{model="m",tenant="default",worker="1:0"} 4',
        'kvflash_prompt_tokens_total{stage="input"} 16',
    ):
        assert line in text, text


def test_names_of_metrics_begin_as_asked(service, client):
    http = client(service(metrics_prefix="mine").url)
    add(http, 1)
    lines = http.get("/metrics").decode().splitlines()
    names = {line.split()[2] if line.startswith("# ") else line for line in lines[:-1]}
    assert len(names) > 20
    assert all(name.startswith("mine_") for name in names), names
    with pytest.raises(ConfigError, match="--metrics-prefix must be 1 to 64 letters"):
        RouterService(**LOCAL, metrics_prefix="a-b")


def test_ready_waits_for_workers(service, client):
    http = client(service(min_initial_workers=2).url)
    add(http, 1)
    status, answer, headers = http.call("GET", "/ready")
    assert (status, answer["ready"], headers["retry-after"]) == (503, False, "1")
    for path, fields in (("/select", {}), ("/reserve", {"request_id": "r"})):
        refused = ask(http, path, expect=503, **fields)
        assert "starting: 1 of the 2 workers that must have registered" in str(refused)
    body = {"method": "new", "tokens": IDS, "model_name": "m", "request_id": "n"}
    assert "starting: 1 of the 2 workers" in str(http.post("/", body, expect=503))
    # A question about one worker more or less is answered.
    ask(http, "/explain")
    add(http, 2)
    assert http.get("/ready")["ready"]
    http.call("DELETE", "/workers/2")
    assert http.get("/ready")["ready"]
    assert ask(http, "/reserve", request_id="r")["worker_id"] == 1


def test_the_object_says_what_http_says(service):
    router = service()
    router.add_worker(new_worker(1))
    with pytest.raises(ConflictError, match="already registered"):
        router.add_worker(new_worker(1))
    with pytest.raises(InvalidArgumentError, match="dp_size"):
        router.add_worker({**new_worker(2), "dp_size": 0})
    body = {"token_ids": IDS, "request_id": "r"}
    assert router.call("POST", "/reserve", body)["worker_id"] == 1
    router.call("POST", "/busy_threshold", {"model": "m", "active_prefill_tokens_threshold": 0})
    with pytest.raises(AllBusyError, match="Thresholds in force"):
        router.call("POST", "/select", body)
    router.set_worker_state(1, "draining")
    assert router.call("GET", "/workers")[0]["state"] == "draining"
    with pytest.raises(InvalidArgumentError, match="state"):
        router.set_worker_state(1, "away")
    router.remove_worker(1)
    for gone in (router.remove_worker, lambda number: router.set_worker_state(number, "active")):
        with pytest.raises(NotFoundError):
            gone(1)
    router.stop()
    with pytest.raises(ClosedError):
        router.call("GET", "/workers")


def test_flags_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match=r"--worker http://a: .*endpoint"):
        RouterService(**LOCAL, workers=(parse_worker("http://a,events=nowhere"),))
