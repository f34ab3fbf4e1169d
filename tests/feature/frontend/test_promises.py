"""Expectations of a KV-aware router, with real processes: two frontends, mock workers.

The workers are found through discovery, publish events of their caches, and compute real block
management; only the model's time is modelled.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvflash import DistributedRuntime, KvPushRouter, KvRouterConfig
from kvflash.discovery import open_discovery
from service import Process, until
from support_cluster import TOKENIZER
from support_frontend import COMPLETIONS, Answer, Call, FrontendProcess, ask

BLOCK = 16
BACKEND, PREFILL = "tests.backend.generate", "tests.prefill.generate"


class Cluster:
    """A discovery folder with mock workers, and frontends that watch it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "discovery"
        self.env = {"KVFLASH_DISCOVERY_DIR": str(self.folder), "KVFLASH_HOST": "127.0.0.1"}
        self.frontends: list[FrontendProcess] = []
        self.mockers: list[Process] = []

    def frontend(self, *flags: str) -> FrontendProcess:
        self.frontends.append(FrontendProcess("--discovery", "file", *flags, env=self.env))
        return self.frontends[-1]

    def workers(
        self, count: int, *flags: str, endpoint: str = BACKEND, speedup: float = 100
    ) -> list[int]:
        """Start a mocker with so many workers; their ids, once all frontends know them."""
        process = Process(
            "kvflash.mocker", "--endpoint", endpoint, "--num-workers", str(count), "--model-name",
            "m", "--block-size", str(BLOCK), "--tokenizer", str(TOKENIZER), "--speedup-ratio",
            str(speedup), "--log-level", "error", *flags, env=self.env,
        )  # fmt: skip
        self.mockers.append(process)
        ids = [int(process.ready()["instance_id"]) for _ in range(count)]
        for frontend in self.frontends:
            frontend.wait_healthy(*ids)
        return ids

    def close(self) -> None:
        for frontend in self.frontends:
            frontend.__exit__(None, None, None)
        for mocker in self.mockers:
            mocker.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def body(tokens: Sequence[int], max_tokens: int = 1, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": list(tokens), "max_tokens": max_tokens, **fields}


def blocks(letters: str) -> list[int]:
    """A prompt of one distinct full block for each letter."""
    return [ord(letter) for letter in letters for _ in range(BLOCK)]


def pinned(worker: int) -> dict[str, Any]:
    return {"nvext": {"backend_instance_id": worker}}


def prefiller(answer: Answer) -> int:
    return int(answer.headers["x-kvflash-prefill-worker"].partition(":")[0])


def test_a_hundred_requests_at_once_are_answered(cluster: Cluster) -> None:
    """Also while they come through two frontends, and after one of them died."""
    first, second = cluster.frontend(), cluster.frontend()
    ids = cluster.workers(2) + cluster.workers(2)

    def one(number: int) -> Answer:
        frontend = (first, second)[number % 2]
        tokens = [number % 7 + 1] * 40 + [number + 1] * 10
        fields = {"stream": True, "stream_options": {"include_usage": True}} if number % 3 else {}
        return ask(frontend.url, COMPLETIONS, body(tokens, 8, **fields))

    with ThreadPoolExecutor(100) as pool:
        answers = list(pool.map(one, range(100)))
    assert [answer.status for answer in answers] == [200] * 100
    assert all(answer.usage["completion_tokens"] == 8 for answer in answers)
    assert {answer.worker for answer in answers} == set(ids)
    for frontend in (first, second):
        frontend.wait_idle()
    first.process.kill()
    assert ask(second.url, COMPLETIONS, body([1] * 40)).status == 200


def test_overload_is_refused_with_a_time_to_come_back(cluster: Cluster) -> None:
    """Fifty requests that stay: beyond a fifth of each worker's blocks there is no more."""
    frontend = cluster.frontend("--active-decode-blocks-threshold", "0.2")
    ids = cluster.workers(2, "--num-gpu-blocks", "400", speedup=0.1)
    calls: list[Call] = []

    def send(number: int) -> None:
        request = body([number + 1] * BLOCK * 10, 300, stream=True)
        calls.append(Call(frontend.url, COMPLETIONS, request))

    def are_busy() -> bool:
        return all(frontend.metric(f'kvflash_worker_busy{{worker="{one}"}}') for one in ids)

    try:
        for number in range(20):
            send(number)
        # The workers' own reports are what counts, and they come with their next step.
        until(are_busy, "both workers to be busy")
        for number in range(20, 50):
            send(number)
        refused = [call for call in calls if call.response.status == 503]
        assert len(refused) >= 30
        for call in refused:
            answer = call.finish()
            assert answer.headers["retry-after"] == "1"
            assert "active_decode_blocks" in answer.json["error"]["message"]
    finally:
        for call in calls:
            call.hang_up()
    until(lambda: ask(frontend.url, COMPLETIONS, body([1])).status == 200, "room")


def test_requests_go_where_most_of_them_is_cached(cluster: Cluster) -> None:
    """Case e2e-routing/001; its tie went to the smaller tree, which ties do not look at here."""
    kv = ("--router-mode", "kv")
    frontends = [cluster.frontend(*kv), cluster.frontend(*kv, "--router-predicted-ttl-secs", "0")]
    a, b = cluster.workers(2)

    def overlaps(letters: str, **expected: int) -> None:
        """Both frontends know the same caches; they learn of them by events."""
        wanted = {a: expected["a"], b: expected["b"]}
        for frontend in frontends:
            until(
                lambda f=frontend: f.overlaps(body(blocks(letters))) == wanted,
                f"{letters}: {wanted}",
            )
            frontend.wait_idle()

    def send(letters: str, to: int | None = None, by: int = 0) -> int:
        fields = {} if to is None else pinned(to)
        answer = ask(frontends[by].url, COMPLETIONS, body(blocks(letters), **fields))
        assert answer.status == 200, answer
        return answer.worker

    assert send("AB", a) == a
    overlaps("AB", a=2, b=0)
    assert send("ACD", a) == a
    overlaps("ACD", a=3, b=0)
    assert send("ACE", b) == b
    overlaps("ACE", a=2, b=3)
    overlaps("ACDF", a=3, b=2)
    assert send("ACDF", by=1) == a
    overlaps("ACDF", a=4, b=2)
    # A tie, which chance decides; from then on the other one holds it.
    overlaps("ACG", a=2, b=2)
    assert frontends[0].explain(body(blocks("ACG")))["ties"] == 2
    assert send("ACG", b) == b
    overlaps("ACG", a=2, b=3)
    for frontend in frontends:
        held = {worker["id"]: worker["blocks"] for worker in frontend.workers().values()}
        assert held == {a: 5, b: 4}


def test_who_would_take_it_can_be_asked_without_any_work(cluster: Cluster) -> None:
    """Case e2e-query-instance/001."""
    frontend = cluster.frontend()
    ids = cluster.workers(2)
    query = {"nvext": {"annotations": ["query_instance_id:"]}}
    answer = ask(frontend.url, COMPLETIONS, {**body([1]), "prompt": "Who takes it?", **query})
    assert answer.status == 200
    (event,) = answer.events
    told = event["nvext"]["worker_id"]
    assert told["prefill_worker_id"] == told["decode_worker_id"] in ids
    assert event["nvext"]["token_ids"]
    for worker in ids:
        assert not frontend.metric(f'kvflash_worker_requests_sent{{worker="{worker}"}}')
    frontend.wait_idle()


def test_growing_prompts_stay_at_their_prefill_worker(cluster: Cluster) -> None:
    """Case e2e-disagg/001."""
    frontend = cluster.frontend()
    prefill = set(cluster.workers(4, "--is-prefill-worker", endpoint=PREFILL))
    decode = set(cluster.workers(4, "--is-decode-worker"))
    prompt: list[int] = []
    answers = []
    for turn in range(4):
        prompt += [turn + 1] * BLOCK * 3
        answers.append(ask(frontend.url, COMPLETIONS, body(prompt, 8)))
        assert answers[-1].status == 200
    assert len({prefiller(answer) for answer in answers}) == 1
    assert {prefiller(answer) for answer in answers} <= prefill
    assert {answer.worker for answer in answers} <= decode
    assert not prefill & decode
    frontend.wait_idle()
    for answer in answers:
        decisions = frontend.http.get(f"/why/{answer.headers['x-request-id']}")
        (last,) = [
            one for one in decisions["decisions"] if one["worker"].startswith(str(answer.worker))
        ]
        assert 0 <= last["first_token_ms"] <= last["ended_ms"]


def test_a_router_in_python_gets_exactly_the_tokens_it_asks_for(cluster: Cluster) -> None:
    """Case e2e-bindings/001."""
    cluster.workers(2)
    overrides: list[dict[str, float] | None] = [
        {"overlap_score_weight": 2.0, "router_temperature": 0.5},
        None,
        {"overlap_score_weight": 0.5},
    ]

    async def check() -> None:
        discovery = open_discovery("file", folder=cluster.folder)
        async with DistributedRuntime(discovery) as runtime:
            endpoint = runtime.endpoint(BACKEND)
            async with KvPushRouter(endpoint, BLOCK, KvRouterConfig()) as router:
                for count, override in zip((20, 1, 33), overrides, strict=True):
                    stream = await router.generate(
                        list(range(1, 50)),
                        "m",
                        stop_conditions={"max_tokens": count, "ignore_eos": True},
                        router_config_override=override,
                    )
                    tokens = [token async for item in stream for token in item["token_ids"]]
                    assert len(tokens) == count
                assert router.totals()["requests"] == 0
        await discovery.close()

    asyncio.run(asyncio.wait_for(check(), 60))


@pytest.mark.parametrize("end", ["terminate", "kill"])
def test_workers_that_come_and_go_disturb_nobody(cluster: Cluster, end: str) -> None:
    """One worker stays; no request is lost with the others unless its answer had begun."""
    frontends = [cluster.frontend(), cluster.frontend()]
    cluster.workers(1)
    stop = threading.Event()
    statuses: list[int] = []

    def keep_asking(frontend: FrontendProcess) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            statuses.append(ask(frontend.url, COMPLETIONS, body([number] * 40, 4)).status)

    threads = [threading.Thread(target=keep_asking, args=(one,)) for one in frontends]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            (worker,) = cluster.workers(1)
            seen = len(statuses)
            until(lambda s=seen: len(statuses) > s + 10, "some requests")
            mocker = cluster.mockers.pop()
            getattr(mocker, end)()
            mocker.close()
            for frontend in frontends:
                until(lambda f=frontend, w=worker: w not in f.workers(), f"{worker} to be gone")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert len(statuses) > 20
    # Whole answers that break off are made again by another worker.
    assert set(statuses) == {200}
    for frontend in frontends:
        frontend.wait_idle()
        assert len(frontend.workers()) == 1
