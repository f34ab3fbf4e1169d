"""Worker processes that end, are killed, stand still: over every plane and shared discovery."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import pytest

from kvflash import (
    ClosedError,
    DistributedRuntime,
    KvflashError,
    NoWorkerError,
    RuntimeLimits,
    TransportError,
)
from kvflash.runtime.client import Client
from support_runtime import WorkerProcess, eventually, known, run, status

Environment = Callable[..., dict[str, str]]
Start = Callable[..., WorkerProcess]

# Time in which planes without connections detect a silent peer.
QUICK = {"cancel_grace_s": 0.1, "peer_silence_s": 3.0, "lease_ttl_s": 3.0}
CALM = {"cancel_grace_s": 0.1}


def asker(limits: dict[str, float] = QUICK) -> DistributedRuntime:
    return DistributedRuntime(limits=RuntimeLimits(**limits))


async def items(client: Client, request: Any, **options: Any) -> list[Any]:
    return [item async for item in await client.round_robin(request, **options)]


def test_instances_appear_and_vanish_with_their_process(
    shared_kind: str, environment: Environment, start_worker: Start
) -> None:
    env = environment(shared_kind)

    async def scenario() -> None:
        async with asker() as runtime:
            first, second = start_worker(env, **QUICK), start_worker(env, **QUICK)
            client = await known(runtime, first, second)
            answered = {(await items(client, {"do": "count", "n": 1}))[0]["worker"] for _ in "abcd"}
            assert answered == {str(first.instance_id), str(second.instance_id)}
            first.kill()
            await known(runtime, second)
            third = start_worker(env, **QUICK)
            await known(runtime, second, third)
            # One that ends properly is gone as well.
            second.send(signal.SIGTERM)
            third.send(signal.SIGTERM)
            await known(runtime)
            assert second.finish()[0] == third.finish()[0] == 0
            with pytest.raises(NoWorkerError):
                await client.generate({"do": "count", "n": 1})

    run(scenario())


def test_a_worker_killed_before_the_first_item_is_replaced_by_another(
    plane: str, environment: Environment, start_worker: Start
) -> None:
    env = environment("file", plane)

    async def scenario() -> None:
        async with asker() as runtime:
            workers = [start_worker(env, **QUICK) for _ in range(2)]
            client = await known(runtime, *workers)
            by_id = {worker.instance_id: worker for worker in workers}
            stream = await client.round_robin({"do": "wait", "n": 0})
            killed = stream.instance_id
            [other] = [instance for instance in by_id if instance != killed]
            await running(runtime, killed)
            by_id[killed].kill()
            await status(runtime, other, open=True)
            assert [item async for item in stream] == [{"number": -1, "worker": str(other)}]
            assert stream.instance_id == other

    run(scenario())


async def running(runtime: DistributedRuntime, instance_id: int, count: int = 1) -> None:
    async def is_so() -> bool:
        seen = await status(runtime, instance_id)
        return seen["began"] - seen["ended"] == count

    await eventually(is_so, f"{count} requests to run")


def test_a_worker_killed_amid_its_answer_is_an_error_and_no_second_answer(
    plane: str, environment: Environment, start_worker: Start
) -> None:
    env = environment("file", plane)

    async def scenario() -> None:
        async with asker() as runtime:
            workers = [start_worker(env, **QUICK) for _ in range(2)]
            client = await known(runtime, *workers)
            by_id = {worker.instance_id: worker for worker in workers}
            stream = await client.round_robin({"do": "wait", "n": 3})
            for number in range(3):
                assert (await anext(stream))["number"] == number
            by_id[stream.instance_id].kill()
            with pytest.raises(TransportError, match="during its answer"):
                await anext(stream)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            [other] = [instance for instance in by_id if instance != stream.instance_id]
            assert (await status(runtime, other))["began"] == 0
            # From now on the other one is asked.
            for _ in range(4):
                assert (await items(client, {"do": "echo"}))[0] == {"do": "echo"}

    run(scenario())


def test_a_killed_worker_asked_directly_is_an_error(
    plane: str, environment: Environment, start_worker: Start
) -> None:
    env = environment("file", plane)

    async def scenario() -> None:
        async with asker() as runtime:
            workers = [start_worker(env, **QUICK) for _ in range(2)]
            client = await known(runtime, *workers)
            target = workers[0].instance_id
            stream = await client.direct({"do": "wait", "n": 0}, target)
            await running(runtime, target)
            workers[0].kill()
            with pytest.raises(TransportError):
                await anext(stream)
            # At once again, before discovery has told: still an error, whichever.
            with pytest.raises(KvflashError):
                await items_of(client, target)
            assert (await status(runtime, workers[1].instance_id))["began"] == 0

    run(scenario())


async def items_of(client: Client, instance_id: int) -> list[Any]:
    return [item async for item in await client.direct({"do": "echo"}, instance_id)]


def test_a_client_process_that_is_killed_frees_the_handler(
    plane: str, environment: Environment, start_worker: Start
) -> None:
    env = environment("file", plane)

    async def scenario() -> None:
        async with asker() as runtime:
            worker = start_worker(env, **QUICK)
            await known(runtime, worker)
            gone = start_worker({**env, "KVFLASH_TEST_ASK": "1"}, **QUICK)
            await running(runtime, worker.instance_id)
            gone.kill()

            async def is_freed() -> bool:
                seen = await status(runtime, worker.instance_id)
                return seen["began"] == seen["ended"] == seen["stopped"] == 1

            await eventually(is_freed, "the handler to be freed")

    run(scenario())


def test_sigterm_lets_streams_end_whole_and_sends_new_requests_elsewhere(
    plane: str, environment: Environment, start_worker: Start
) -> None:
    env = environment("file", plane)

    async def scenario() -> None:
        async with asker(CALM) as runtime:
            workers = [start_worker(env, **CALM) for _ in range(2)]
            client = await known(runtime, *workers)
            leaving, staying = workers
            streams = [
                await client.direct({"do": "wait", "n": 1}, leaving.instance_id) for _ in range(5)
            ]
            for stream in streams:
                assert (await anext(stream))["number"] == 0
            stale = client._instances.by_id[leaving.instance_id]
            leaving.send(signal.SIGTERM)
            await known(runtime, staying)
            for _ in range(6):
                answer = await items(client, {"do": "count", "n": 1})
                assert answer[0]["worker"] == str(staying.instance_id)
            # A client that has not heard of it yet is refused, or is retried elsewhere if allowed.
            instances = client._instances
            instances.by_id[leaving.instance_id] = stale
            with pytest.raises(ClosedError, match="is draining"):
                await items_of(client, leaving.instance_id)
            instances.by_id[leaving.instance_id] = stale
            answers = [await items(client, {"do": "count", "n": 1}) for _ in range(6)]
            assert {answer[0]["worker"] for answer in answers} == {str(staying.instance_id)}
            # It is still there for what it had begun.
            assert leaving.popen.poll() is None
            leaving.send(signal.SIGUSR1)
            for stream in streams:
                rest = [item["number"] async for item in stream]
                assert rest == [-1]
            code, printed, _ = leaving.finish()
            assert code == 0
            assert '"end"' in printed

    run(scenario())


def test_what_lasts_longer_than_the_drain_is_cut_off_with_an_error(
    plane: str, environment: Environment, start_worker: Start
) -> None:
    env = environment("file", plane)

    async def scenario() -> None:
        async with asker(CALM) as runtime:
            worker = start_worker(env, drain_timeout_s=0.3, **CALM)
            client = await known(runtime, worker)
            stream = await client.generate({"do": "wait", "n": 1})
            assert (await anext(stream))["number"] == 0
            worker.send(signal.SIGTERM)
            with pytest.raises(ClosedError, match=r"ended after 0\.3 s of draining during this"):
                await anext(stream)
            assert worker.finish()[0] == 0

    run(scenario())


def test_a_second_signal_ends_it_at_once(
    plane: str, environment: Environment, start_worker: Start
) -> None:
    env = environment("file", plane)

    async def scenario() -> None:
        async with asker() as runtime:
            worker = start_worker(env, **QUICK)
            client = await known(runtime, worker)
            stream = await client.generate({"do": "wait", "n": 1})
            assert (await anext(stream))["number"] == 0
            worker.send(signal.SIGTERM)
            await known(runtime)
            worker.send(signal.SIGTERM)
            assert worker.finish()[0] == -signal.SIGTERM
            with pytest.raises(TransportError):
                await anext(stream)

    run(scenario())


def test_a_full_endpoint_sends_requests_to_others(
    plane: str, environment: Environment, start_worker: Start
) -> None:
    env = environment("file", plane)

    async def scenario() -> None:
        async with asker(CALM) as runtime:
            workers = [start_worker(env, requests_max=2, **CALM) for _ in range(2)]
            client = await known(runtime, *workers)
            full, free = workers
            held = [await client.direct({"do": "wait", "n": 1}, full.instance_id) for _ in range(2)]
            for stream in held:
                assert (await anext(stream))["number"] == 0
            for _ in range(6):
                answer = await items(client, {"do": "count", "n": 1})
                assert answer[0]["worker"] == str(free.instance_id)

    run(scenario())


def test_a_stopped_reader_in_another_process_stops_the_handler(
    plane: str, environment: Environment, start_worker: Start
) -> None:
    env = environment("file", plane)

    async def scenario() -> None:
        async with asker(CALM) as runtime:
            worker = start_worker(env, **CALM)
            client = await known(runtime, worker)
            many, size = 3_000, 10_000
            stream = await client.generate({"do": "count", "n": many, "bytes": size})
            before = -1
            while before != (now := (await status(runtime, worker.instance_id))["yielded"]):
                before = now
                await asyncio.sleep(0.3)
            assert now * size < 16 * 1024 * 1024
            assert now < many
            numbers = [item["number"] async for item in stream]
            assert numbers == list(range(many))

    run(scenario())


def test_nothing_is_lost_or_answered_twice_while_workers_come_and_go(
    plane: str, environment: Environment, start_worker: Start
) -> None:
    env = environment("file", plane)

    async def scenario() -> None:
        async with asker(CALM) as runtime:
            steady = start_worker(env, **CALM)
            client = await known(runtime, steady)
            outcomes: list[str] = []
            is_over = asyncio.Event()

            async def ask() -> None:
                while not is_over.is_set():
                    numbers = [
                        item["number"]
                        async for item in await client.round_robin({"do": "count", "n": 30})
                    ]
                    assert numbers == list(range(30))
                    outcomes.append("whole")

            asking = [asyncio.create_task(ask()) for _ in range(8)]
            for _ in range(3):
                # Leaves properly, amid requests: not one of them may fail.
                flapping = start_worker(env, **CALM)
                await known(runtime, steady, flapping)
                before = len(outcomes)

                async def went_on(before: int = before) -> bool:
                    return len(outcomes) > before + 50

                await eventually(went_on, "requests to be answered")
                flapping.send(signal.SIGTERM)
                assert flapping.finish()[0] == 0
            is_over.set()
            await asyncio.gather(*asking)
            assert len(outcomes) > 150

    run(scenario())
