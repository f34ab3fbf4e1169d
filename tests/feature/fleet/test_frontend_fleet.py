"""Engines that come, go, restart and do not fit, and what is then known of their caches."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from ports import free_port
from service import until
from support_frontend import (
    COMPLETIONS,
    Call,
    Exchange,
    FakeEngine,
    Frontend,
    Mocker,
    answer_json,
    ask,
    engines,
    hang,
    prompt_of,
)

BLOCKS = 5
PROMPT = {"model": "m", "prompt": list(range(1000, 1000 + 16 * BLOCKS + 3)), "max_tokens": 2}
OTHER = {"model": "m", "prompt": list(range(5000, 5000 + 16 * BLOCKS + 3)), "max_tokens": 2}


@pytest.fixture(scope="module")
def frontend() -> Iterator[Frontend]:
    """A frontend that is quick to notice; tests leave it without workers."""
    with Frontend("--health-interval", "0.2", "--tokenize-timeout", "20") as frontend:
        yield frontend


def wait_overlap(frontend: Frontend, body: dict[str, Any], worker: int, blocks: int) -> None:
    until(
        lambda: frontend.overlaps(body).get(worker) == blocks,
        f"worker {worker} to hold {blocks} blocks",
    )


def earn_credit(frontend: Frontend, body: dict[str, Any], worker: int) -> None:
    """Send a prompt until its blocks are known, then check them against the engine's count."""
    ask(frontend.url, COMPLETIONS, body)
    wait_overlap(frontend, body, worker, BLOCKS)
    answer = ask(frontend.url, COMPLETIONS, body)
    assert answer.worker == worker
    assert answer.overlap_blocks == BLOCKS
    assert answer.cached_tokens == BLOCKS * 16


# -- restarts and resets


@pytest.mark.parametrize("is_noticed", [True, False], ids=["noticed", "too_fast"])
def test_restarted_engine_gets_no_stale_credit(is_noticed: bool) -> None:
    with (
        Mocker("--speedup-ratio", "1000") as mocker,
        Frontend("--worker", mocker.spec(), "--health-interval", "0.2") as frontend,
    ):
        frontend.wait_healthy(1)
        earn_credit(frontend, PROMPT, 1)
        mocker.kill()
        if is_noticed:
            frontend.wait_unhealthy(1)
        mocker.restart()
        frontend.wait_healthy(1)
        wait_overlap(frontend, PROMPT, 1, 0)
        assert frontend.metric('kvflash_events{kind="restarts"}') == 1
        earn_credit(frontend, PROMPT, 1)


def test_restart_without_replay_shows_with_the_first_event() -> None:
    with (
        Mocker("--speedup-ratio", "1000", replay=False) as mocker,
        Frontend("--worker", mocker.spec(), "--health-interval", "0.2") as frontend,
    ):
        frontend.wait_healthy(1)
        wait_subscribed(frontend, mocker)
        earn_credit(frontend, PROMPT, 1)
        mocker.restart()
        frontend.wait_healthy(1)

        def is_forgotten() -> bool:
            # Another prompt's events; the first ones may precede the new subscription.
            other = {**OTHER, "prompt": [next(FRESH) for _ in range(40)]}
            assert ask(frontend.url, COMPLETIONS, other).status == 200
            return frontend.overlaps(PROMPT)[1] == 0

        until(is_forgotten, "the old engine's blocks to be forgotten")
        earn_credit(frontend, PROMPT, 1)


def test_restart_without_replay_leaves_no_stale_credit() -> None:
    with (
        Mocker("--speedup-ratio", "1000", replay=False) as mocker,
        Frontend("--worker", mocker.spec(), "--health-interval", "0.2") as frontend,
    ):
        frontend.wait_healthy(1)
        wait_subscribed(frontend, mocker)
        earn_credit(frontend, PROMPT, 1)
        mocker.kill()
        frontend.wait_unhealthy(1)
        mocker.restart()
        frontend.wait_healthy(1)
        assert frontend.overlaps(PROMPT)[1] == 0
        answer = ask(frontend.url, COMPLETIONS, PROMPT)
        assert answer.overlap_blocks * 16 == answer.cached_tokens == 0


FRESH = iter(range(100_000, 2**32))


def wait_subscribed(frontend: Frontend, mocker: Mocker) -> None:
    """Traffic until an event arrives: without replay, what precedes the subscription is lost."""

    def has_event() -> bool:
        body = {**OTHER, "prompt": [next(FRESH) for _ in range(40)]}
        assert ask(frontend.url, COMPLETIONS, body).status == 200
        return frontend.metric('kvflash_events{kind="batches"}') > 0

    until(has_event, "the first event")
    assert mocker.workers[0]["replay"] is None


def test_cache_reset_is_followed(frontend: Frontend) -> None:
    with Mocker("--speedup-ratio", "1000") as mocker:
        worker = add(frontend, mocker)
        earn_credit(frontend, PROMPT, worker)
        assert mocker.http[0].call("POST", "/reset_prefix_cache")[0] == 200
        wait_overlap(frontend, PROMPT, worker, 0)
        answer = ask(frontend.url, COMPLETIONS, PROMPT)
        assert (answer.overlap_blocks, answer.cached_tokens) == (0, 0)
        earn_credit(frontend, PROMPT, worker)
        frontend.remove(worker)


# -- workers come and go


def add(frontend: Frontend, mocker: Mocker, index: int = 0, **more: Any) -> int:
    worker = mocker.workers[index]
    sockets = {key: worker[key] for key in ("events", "replay") if worker[key]}
    return frontend.add(worker["url"], **sockets, **more)


def test_worker_is_added_listed_and_removed(frontend: Frontend) -> None:
    with Mocker("--speedup-ratio", "1000", workers=2) as mocker:
        first, second = add(frontend, mocker, 0, id=70), add(frontend, mocker, 1)
        assert first == 70
        entry = frontend.workers()[first]
        assert entry["url"] == mocker.workers[0]["url"]
        assert (entry["model"], entry["serves"], entry["block_size"]) == ("m", ["m"], 16)
        assert entry["capacity_blocks"] == 16384
        (listener,) = entry["listeners"]
        assert listener["endpoint"] == mocker.workers[0]["events"]
        assert listener["replay_endpoint"] == mocker.workers[0]["replay"]

        ask(frontend.url, COMPLETIONS, PROMPT)
        until(lambda: max(frontend.overlaps(PROMPT).values()) == BLOCKS, "the events")
        overlaps = frontend.overlaps(PROMPT)
        assert sorted(overlaps.values()) == [0, BLOCKS]
        (holder,) = [worker for worker, blocks in overlaps.items() if blocks]
        assert frontend.workers()[holder]["blocks"] >= BLOCKS
        blocks = 'kvflash_index_blocks{model="m",tenant="default"}'
        assert frontend.metrics()[blocks] >= BLOCKS

        frontend.remove(holder)
        assert holder not in frontend.workers()
        assert frontend.overlaps(PROMPT) == {w: 0 for w in overlaps if w != holder}
        assert frontend.metrics()[blocks] == 0
        assert not any(f'"{holder}:0"' in name for name in frontend.metrics())
        # Back again: the replay tells what it holds, with no new traffic.
        again = add(frontend, mocker, 0 if holder == first else 1, id=holder)
        wait_overlap(frontend, PROMPT, again, BLOCKS)
        for worker in (first, second):
            frontend.remove(worker)
        assert frontend.http.get("/v1/models")["data"] == []


def test_request_in_flight_survives_the_removal_of_its_worker(frontend: Frontend) -> None:
    release = threading.Event()

    def stream(exchange: Exchange) -> None:
        exchange.open_stream()
        exchange.chunk(b'data: {"n": 1}\n\n')
        release.wait(30)
        exchange.chunk(b'data: {"n": 2}\n\n')
        exchange.chunk(b"data: [DONE]\n\n")
        exchange.chunk(b"")

    with FakeEngine("leaving", stream) as fake:
        worker = frontend.add(fake.url)
        call = Call(frontend.url, COMPLETIONS, prompt_of("leaving", stream=True))
        assert call.read_event() == b'data: {"n": 1}\n'
        frontend.remove(worker)
        assert frontend.workers() == {}
        got = ask(frontend.url, COMPLETIONS, prompt_of("leaving"))
        assert got.status == 503
        release.set()
        assert call.finish().body.endswith(b'data: {"n": 2}\n\ndata: [DONE]\n\n')
        frontend.wait_idle()


def test_worker_that_is_not_up_yet_joins_when_it_is(frontend: Frontend) -> None:
    port = free_port()
    status, body, _ = frontend.http.call("POST", "/workers", {"url": f"http://127.0.0.1:{port}"})
    assert (status, body["healthy"], body["model"]) == (201, False, None)
    until(lambda: frontend.workers()[body["id"]]["last_error"], "the first health check")
    assert "refused" in frontend.workers()[body["id"]]["last_error"]
    with FakeEngine("later", port=port):
        frontend.wait_healthy(body["id"])
        assert ask(frontend.url, COMPLETIONS, prompt_of("later")).status == 200
        frontend.remove(body["id"])


URL = "http://127.0.0.1:9"
BAD_SPECS: list[tuple[Any, str]] = [
    (b"{", "invalid worker"),
    ({}, "url"),
    ({"url": ""}, "url"),
    ({"url": "127.0.0.1:9"}, "url"),
    ({"url": "ftp://127.0.0.1:9"}, "url"),
    ({"url": URL + "/?x=1"}, "url"),
    ({"url": URL, "event": "tcp://127.0.0.1:1"}, "event"),
    ({"url": URL, "events": "127.0.0.1:1"}, "events"),
    ({"url": URL, "events": "tcp://127.0.0.1:0"}, "events"),
    ({"url": URL, "events": "tcp://127.0.0.1:1", "replay": "udp://x:1"}, "replay"),
    ({"url": URL, "replay": "tcp://127.0.0.1:1"}, "events"),
    ({"url": URL, "dp_size": 0}, "dp_size"),
    ({"url": URL, "dp_size": 1025}, "dp_size"),
    ({"url": URL, "events": "tcp://127.0.0.1:65535", "dp_size": 2}, "65535"),
]


def test_bad_specs_name_the_field(frontend: Frontend) -> None:
    for spec, wanted in BAD_SPECS:
        status, body, _ = frontend.http.call("POST", "/workers", spec)
        assert status == 400, (spec, status, body)
        assert wanted in body["error"]["message"], (spec, body)
    assert frontend.workers() == {}


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"url": 5}, "url"),
        ({"url": URL, "id": "x"}, "id"),
        ({"url": URL, "dp_size": -1}, "dp_size"),
    ],
)
def test_fields_of_the_wrong_type_are_named(
    frontend: Frontend, spec: dict[str, Any], field: str
) -> None:
    status, body, _ = frontend.http.call("POST", "/workers", spec)
    assert status == 400
    assert re.search(rf"\b{field}\b", body["error"]["message"]), body


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:99999", "http://:80", "http://127.0.0.1:", f"{URL}/#f"]
)
def test_urls_that_lead_nowhere_are_refused(frontend: Frontend, url: str) -> None:
    status, body, _ = frontend.http.call("POST", "/workers", {"url": url})
    if status == 201:
        frontend.remove(body["id"])
    assert status == 400, body


def test_duplicates_and_unknown_ids(frontend: Frontend) -> None:
    with FakeEngine("twice") as fake, engines(frontend, fake) as (worker,):
        for spec in ({"url": fake.url}, {"url": fake.url + "/"}, {"url": URL, "id": worker}):
            status, body, _ = frontend.http.call("POST", "/workers", spec)
            assert status == 409, (spec, body)
            assert "already registered" in body["error"]["message"]
        assert list(frontend.workers()) == [worker]
        for path, status in (("/workers/424242", 404), ("/workers/x", 400), ("/workers/-1", 400)):
            got, body, _ = frontend.http.call("DELETE", path)
            assert (got, body["error"]["code"]) == (status, status)
        assert ask(frontend.url, COMPLETIONS, prompt_of("twice")).status == 200


def test_limit_of_workers() -> None:
    with Frontend("--max-workers", "1", "--worker", URL) as frontend:
        status, body, _ = frontend.http.call("POST", "/workers", {"url": "http://127.0.0.1:10"})
        assert status == 429
        assert "--max-workers" in body["error"]["message"]


def test_worker_that_joins_during_a_request_does_not_fail_it(frontend: Frontend) -> None:
    asked, release = threading.Event(), threading.Event()

    def tokenize(body: dict[str, Any]) -> list[int]:
        if body["prompt"] == "slow":
            asked.set()
            release.wait(30)
        return list(range(64))

    old, new = FakeEngine("joins", hang, tokenize=tokenize), FakeEngine("joins")
    with engines(frontend, old):
        busy = Call(frontend.url, COMPLETIONS, prompt_of("joins"))
        until(lambda: old.received, "the old worker to be busy")
        call = Call(frontend.url, COMPLETIONS, {"model": "joins", "prompt": "slow"})
        assert asked.wait(30)
        with engines(frontend, new):
            release.set()
            old.answer = answer_json
            try:
                assert call.finish().status == 200
            finally:
                busy.hang_up()


def test_worker_that_joined_during_a_request_is_tried(frontend: Frontend) -> None:
    started, die = threading.Event(), threading.Event()

    def dies(_exchange: Exchange) -> None:
        started.set()
        die.wait(30)

    with engines(frontend, FakeEngine("rescue", dies)):
        call = Call(frontend.url, COMPLETIONS, prompt_of("rescue"))
        assert started.wait(30)
        with engines(frontend, FakeEngine("rescue")):
            die.set()
            assert call.finish().status == 200


# -- adapters of some engines


def test_adapter_goes_to_the_engines_that_have_it(frontend: Frontend) -> None:
    having, lacking = FakeEngine("base", adapters=("sql",)), FakeEngine("base")
    with engines(frontend, having, lacking):
        for n in range(6):
            assert ask(frontend.url, COMPLETIONS, prompt_of("sql", n=n)).status == 200
        assert len(lacking.received) == 0
        assert len(having.received) == 6


def test_adapter_that_is_gone_is_not_served(frontend: Frontend) -> None:
    with FakeEngine("base2", adapters=("old",)) as fake, engines(frontend, fake) as (worker,):
        assert ask(frontend.url, COMPLETIONS, prompt_of("old")).status == 200
        fake.adapters, fake.health = (), 500
        frontend.wait_unhealthy(worker)
        fake.health = 200
        frontend.wait_healthy(worker)
        assert ask(frontend.url, COMPLETIONS, prompt_of("old")).status == 404


def test_adapter_loaded_at_run_time_is_served(frontend: Frontend) -> None:
    with FakeEngine("base3") as fake, engines(frontend, fake):
        assert ask(frontend.url, COMPLETIONS, prompt_of("new")).status == 404
        fake.adapters = ("new",)
        until(
            lambda: ask(frontend.url, COMPLETIONS, prompt_of("new")).status == 200,
            "the adapter to be known",
        )


def test_engine_that_comes_back_with_another_model_moves(frontend: Frontend) -> None:
    with FakeEngine("before") as fake, engines(frontend, fake) as (worker,):
        fake.model, fake.health = "after", 500
        frontend.wait_unhealthy(worker)
        fake.health = 200
        frontend.wait_healthy(worker)
        got = ask(frontend.url, COMPLETIONS, prompt_of("before"))
        assert got.status == 404
        assert "served models are after" in got.json["error"]["message"]
        assert ask(frontend.url, COMPLETIONS, prompt_of("after")).status == 200


# -- what does not fit


def test_mixed_block_sizes_are_loud() -> None:
    with (
        Mocker("--speedup-ratio", "1000") as fits,
        Mocker("--speedup-ratio", "1000", "--block-size", "32") as odd,
        Frontend("--worker", fits.spec(), "--health-interval", "0.2") as frontend,
    ):
        frontend.wait_healthy(1)
        assert frontend.http.get("/health")["warnings"] == []
        assert add(frontend, odd) == 2
        health = frontend.http.get("/health")
        (warning,) = health["warnings"]
        assert warning.startswith("worker 2: its block size is 32, but that of model m is 16")
        entry = frontend.workers()[2]
        assert (entry["block_size"], entry["engine_block_size"]) == (16, 32)
        # It serves all the same, and its events are counted, not indexed.
        seen = set()
        for n in range(8):
            body = {**PROMPT, "prompt": [n, *range(200)]}
            seen.add(ask(frontend.url, COMPLETIONS, body).worker)
        assert seen == {1, 2}
        name = 'kvflash_events{kind="block_size_mismatch"}'
        until(lambda: frontend.metric(name) > 0, "the mismatch to be counted")
        warnings = " ".join(frontend.http.get("/health")["warnings"])
        assert "a block size that differs from the index's" in warnings
        for n in range(8):
            assert frontend.overlaps({**PROMPT, "prompt": [n, *range(200)]})[2] == 0


def test_engine_that_lists_no_model_says_so(frontend: Frontend) -> None:
    with FakeEngine("") as fake:
        _, body, _ = frontend.http.call("POST", "/workers", {"url": fake.url})
        worker = body["id"]
        until(lambda: frontend.workers()[worker]["last_error"], "its models to be asked for")
        entry = frontend.workers()[worker]
        assert (entry["healthy"], entry["model"]) == (False, None)
        assert "/v1/models lists no base model" in entry["last_error"]
        warnings = frontend.http.call("GET", "/health")[1]["warnings"]
        assert f"worker {worker}: its /v1/models lists no base model" in warnings
        frontend.remove(worker)


# -- engines that say themselves where they publish


def test_sockets_of_an_sglang_engine_are_learned_from_its_server(frontend: Frontend) -> None:
    with zmq.Context() as context, contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(context.socket(zmq.PUB)) for _ in range(2)]
        while True:
            port = sockets[0].bind_to_random_port("tcp://127.0.0.1")
            try:
                sockets[1].bind(f"tcp://127.0.0.1:{port + 1}")
                break
            except zmq.ZMQError:
                # The next port is somebody else's.
                sockets[0].unbind(f"tcp://127.0.0.1:{port}")
        config = {"publisher": "zmq", "endpoint": f"tcp://*:{port}", "topic": "kv-events"}
        info = {"page_size": 16, "dp_size": 2, "kv_events_config": json.dumps(config)}
        with engines(frontend, FakeEngine("sglang", server_info=info)) as (worker,):
            found = frontend.workers()[worker]
            wanted = [f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}"]
            assert [listener["endpoint"] for listener in found["listeners"]] == wanted
            assert found["dp_size"] == 2


def test_an_sglang_engine_that_publishes_nothing_is_told_of(frontend: Frontend) -> None:
    info = {"page_size": 16, "dp_size": 1, "kv_events_config": None}
    with engines(frontend, FakeEngine("sglang", server_info=info)) as (worker,):
        frontend.wait_healthy(worker)
        warnings = frontend.http.get("/health")["warnings"]
        said = f"worker {worker}: given without events=, and GET /get_server_info says that it"
        assert any(line.startswith(said) for line in warnings), warnings
