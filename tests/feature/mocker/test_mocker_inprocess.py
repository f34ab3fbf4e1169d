"""The mocker inside another process: serve(), close(), and an engine that fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from kvflash.errors import ConfigError
from kvflash.mocker.app import serve
from kvflash.mocker.config import MockerConfig
from kvflash.mocker.handover import Room, meet
from ports import free_port
from service import needs_ipv6

DEADLINE_S = 30.0
CONFIG = MockerConfig(port=0, block_size=16, num_gpu_blocks=512, speedup_ratio=1000.0)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, DEADLINE_S))


async def complete(
    session: aiohttp.ClientSession, url: str, prompt: str, **options: Any
) -> tuple[int, Any]:
    body = {"prompt": prompt, **options}
    async with session.post(url + "/v1/completions", json=body) as response:
        return response.status, await response.json()


def test_workers_are_independent_and_close() -> None:
    async def scenario() -> None:
        async with aiohttp.ClientSession() as session:
            config = replace(CONFIG, num_workers=2, zmq_events_port="auto")
            async with await serve(config) as mocker:
                first, second = mocker.workers
                assert first.events_url != second.events_url
                assert first.replay_url is None
                for worker, cached in ((first, 0), (first, 32), (second, 0)):
                    status, answer = await complete(session, worker.url, "x" * 40)
                    assert status == 200
                    details = answer["usage"]["prompt_tokens_details"]
                    assert details["cached_tokens"] == cached
            for worker in mocker.workers:
                assert not worker.engine.is_alive
                with pytest.raises(aiohttp.ClientConnectionError):
                    await session.get(worker.url + "/health")

    run(scenario())


def test_a_local_index_without_nats_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        for is_set in (False, True):
            async with await serve(replace(CONFIG, enable_local_indexer=is_set)):
                assert ("--enable-local-indexer has no effect" in caplog.text) is is_set

    run(scenario())


def test_many_at_once_each_get_exactly_their_tokens() -> None:
    async def scenario() -> None:
        # Too few blocks for all: some wait, some are preempted, all are answered.
        config = replace(CONFIG, num_gpu_blocks=40, max_num_batched_tokens=256)
        async with aiohttp.ClientSession() as session, await serve(config) as mocker:
            (worker,) = mocker.workers
            answers = await asyncio.gather(
                *(
                    complete(session, worker.url, f"{number:03}" + "y" * 97, max_tokens=50 + number)
                    for number in range(60)
                )
            )
            for number, (status, answer) in enumerate(answers):
                assert status == 200
                assert answer["usage"]["completion_tokens"] == 50 + number
                assert len(answer["choices"][0]["text"]) == 50 + number
            scheduler = worker.engine.scheduler
            assert scheduler.counters.preemptions > 0
            assert scheduler.counters.finished_requests == 60
            assert scheduler.blocks.used_blocks == 0

    run(scenario())


def test_modelled_time_goes_by() -> None:
    async def scenario() -> None:
        async with (
            aiohttp.ClientSession() as session,
            await serve(replace(CONFIG, speedup_ratio=10.0)) as mocker,
        ):
            loop = asyncio.get_running_loop()
            start_s = loop.time()
            await complete(session, mocker.workers[0].url, "x" * 100, max_tokens=101)
            took_s = loop.time() - start_s
            # A prefill of 18 ms and 100 steps of about 6.5 ms, ten times as fast.
            assert took_s > 0.055
            assert took_s < DEADLINE_S / 10

    run(scenario())


def test_a_failed_engine_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with aiohttp.ClientSession() as session, await serve(CONFIG) as mocker:
            (worker,) = mocker.workers
            monkeypatch.setattr(worker.engine.scheduler, "complete", lambda _: 1 / 0)
            status, answer = await complete(session, worker.url, "x")
            assert (status, answer["error"]["code"]) == (503, 503)
            assert "ZeroDivisionError" in answer["error"]["message"]
            assert (await complete(session, worker.url, "x"))[0] == 503
            async with session.get(worker.url + "/health") as response:
                assert response.status == 503

    with caplog.at_level(logging.ERROR):
        run(scenario())
    assert "the engine loop failed" in caplog.text


def test_close_cuts_off_what_outlasts_the_drain_timeout() -> None:
    async def scenario() -> None:
        config = replace(CONFIG, speedup_ratio=0.001, drain_timeout_s=0.0)
        async with aiohttp.ClientSession() as session:
            mocker = await serve(config)
            (worker,) = mocker.workers
            asked = asyncio.create_task(complete(session, worker.url, "x"))
            while worker.engine.scheduler.running_count == 0:
                # Asked until it is so; each answer gives the engine a turn.
                async with session.get(worker.url + "/health") as response:
                    assert response.status == 200
            await mocker.close()
            with pytest.raises(aiohttp.ClientConnectionError):
                await asked

    run(scenario())


def test_a_taken_port_leaves_nothing_running() -> None:
    async def scenario() -> None:
        async with await serve(CONFIG) as mocker:
            port = int(mocker.workers[0].url.rpartition(":")[2])
            before = asyncio.all_tasks()
            with pytest.raises(ConfigError, match=f"--port: can't bind {port} on 127.0.0.1"):
                await serve(replace(CONFIG, port=port, zmq_events_port="auto"))
            assert asyncio.all_tasks() <= before

    run(scenario())


def test_a_foreign_host_is_named() -> None:
    async def scenario() -> None:
        # An address for documentation, which no machine has.
        with pytest.raises(ConfigError, match=r"^--host: can't bind 192\.0\.2\.1: Cannot assign"):
            await serve(replace(CONFIG, host="192.0.2.1", zmq_events_port=0, zmq_replay_port=0))

    run(scenario())


def test_a_taken_port_of_a_rank_frees_those_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFLASH_DISCOVERY", "mem")

    async def scenario(taken: int) -> None:
        config = replace(CONFIG, endpoint="a.b.c", data_parallel_size=2, zmq_events_port=taken - 1)
        with pytest.raises(ConfigError, match=f"can't bind {taken}"):
            await serve(config)
        with socket.create_server(("127.0.0.1", taken - 1)):
            pass

    with taken_after_a_free_one() as second:
        run(scenario(second.getsockname()[1]))


def taken_after_a_free_one() -> socket.socket:
    """A socket on a port; the port before it is free."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first, contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", first.getsockname()[1] + 1))


@pytest.mark.parametrize(
    ("host", "reached"),
    [("0.0.0.0", "127.0.0.2"), pytest.param("::1", "::1", marks=needs_ipv6)],
)
def test_decode_workers_wait_where_requests_come_in(host: str, reached: str) -> None:
    async def scenario() -> None:
        port = free_port()
        config = replace(CONFIG, host=host, role="prefill", bootstrap_ports=(port,))
        async with aiohttp.ClientSession() as session, await serve(config) as mocker:
            room = {"bootstrap_host": reached, "bootstrap_port": port, "bootstrap_room": 1}
            waiting = asyncio.create_task(meet(Room(host=reached, port=port, number=1)))
            status, answer = await complete(session, mocker.workers[0].url, "x", **room)
            assert (status, answer["usage"]["completion_tokens"]) == (200, 1)
            await waiting

    run(scenario())


def test_an_unusable_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--tokenizer \(or --model-path\) must be a folder"):
        run(_refused())


async def _refused() -> None:
    await serve(replace(CONFIG, tokenizer="/nonexistent"))
