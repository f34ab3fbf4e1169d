"""Requests of KvPushRouter that wait until a worker has room to prefill them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvflash import (
    AllBusyError,
    ClosedError,
    ConfigError,
    InvalidArgumentError,
    KvPushRouter,
    KvRouterConfig,
    NoWorkerError,
    OverloadedError,
    Policy,
)
from kvflash.policy import PolicyCandidate, PolicyRequest
from support_push_router import TOKENS, Stage, eventually, is_idle, run


@asynccontextmanager
async def full(count: int = 1, **settings: Any) -> AsyncIterator[tuple[Stage, KvPushRouter]]:
    """Workers that take a batch of one prompt, each of which has one to prefill (r-0, r-1, ...)."""
    async with Stage() as stage:
        workers = [await stage.worker(max_num_batched_tokens=len(TOKENS)) for _ in range(count)]
        # A recently sent prompt does not count as cached: every prompt is prefilled whole.
        settings = {"router_queue_threshold": 0.5, "router_predicted_ttl_secs": None} | settings
        router = await stage.router(count, **settings)
        for number, worker in enumerate(workers):
            await router.best_worker([number] * 16, request_id=f"r-{number}", worker_id=worker.id)
        yield stage, router


def ask(router: KvPushRouter, **options: Any) -> asyncio.Task[int]:
    """Generate to the end; who answered."""

    async def work() -> int:
        stream = await router.generate(TOKENS, **options)
        assert len([item async for item in stream]) == 4
        return stream.worker_id

    return asyncio.get_running_loop().create_task(work())


def pending(router: KvPushRouter) -> int:
    return router.queue_stats()["pending"]


async def wait_pending(router: KvPushRouter, count: int) -> None:
    async def is_so() -> bool:
        return pending(router) == count

    await eventually(is_so, f"{count} to wait")


async def line_up(router: KvPushRouter, **options: Any) -> asyncio.Task[int]:
    """Ask, and return when that one waits."""
    before = pending(router)
    task = ask(router, **options)
    await wait_pending(router, before + 1)
    return task


@pytest.mark.parametrize("event", ["prefilled", "freed", "another worker"])
def test_generate_waits_for_room_and_goes_when_there_is(event: str) -> None:
    async def work() -> None:
        async with full() as (stage, router):
            (worker,) = stage.workers.values()
            task = await line_up(router)
            assert router.queue_stats()["pending_isl_tokens"] == len(TOKENS)
            assert router.totals()["requests"] == 1
            # Previews and manual bookings do not wait.
            assert (await router.best_worker(TOKENS))[0] == worker.id
            await router.best_worker(TOKENS, request_id="by hand")
            await router.free("by hand")
            await wait_pending(router, 1)
            expected = worker.id
            if event == "prefilled":
                await router.mark_prefill_complete("r-0")
            elif event == "freed":
                await router.free("r-0")
            else:
                expected = (await stage.worker(max_num_batched_tokens=len(TOKENS))).id
            assert await task == expected
            await router.free("r-0")
            stats = router.queue_stats()
            assert (stats["pending"], stats["pending_isl_tokens"]) == (0, 0)
            assert (stats["placed_total"], stats["left_total"]) == (1, 0)
            assert is_idle(router)

    run(work())


@pytest.mark.parametrize(("policy", "expected"), [("fcfs", "acbd"), ("lcfs", "bacd")])
def test_priorities_decide_who_goes_first(policy: str, expected: str) -> None:
    async def work() -> None:
        async with full(router_queue_policy=policy) as (stage, router):
            (worker,) = stage.workers.values()
            wishes: dict[str, dict[str, Any]] = {
                "d": {},
                "c": {"priority": 3_600},
                "b": {"priority": 3_600},
                "a": {"strict_priority": 1},
            }
            if policy == "lcfs":
                wishes["a"], wishes["b"] = wishes["b"], wishes["a"]
            tasks = [
                await line_up(router, extra_args={"name": name}, **wish)
                for name, wish in wishes.items()
            ]
            await router.free("r-0")
            await asyncio.gather(*tasks)
            assert "".join(one["extra_args"]["name"] for one in worker.requests) == expected
            assert is_idle(router)

    run(work())


def test_whoever_is_cancelled_leaves_nothing_behind() -> None:
    async def work() -> None:
        async with full(2) as (stage, router):
            tasks = [await line_up(router) for _ in range(3)]
            tasks[1].cancel()
            with pytest.raises(asyncio.CancelledError):
                await tasks[1]
            assert pending(router) == 2
            # Called, and cancelled before it hears of it: its turn goes to the next one.
            await router.mark_prefill_complete("r-0")
            tasks[0].cancel()
            assert await tasks[2] == next(iter(stage.workers))
            with pytest.raises(asyncio.CancelledError):
                await tasks[0]
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(
                    router.generate(TOKENS, worker_id=list(stage.workers)[1]), 0.05
                )
            stats = router.queue_stats()
            assert (stats["pending"], stats["left_total"], stats["placed_total"]) == (0, 3, 1)
            assert router.totals()["requests"] == 2
            await router.free("r-0")
            await router.free("r-1")
            assert is_idle(router)
            assert await ask(router) in stage.workers
            assert all(len(worker.requests) <= 2 for worker in stage.workers.values())

    run(work())


def test_a_full_line_refuses_a_long_wait_ends_and_closing_ends_all() -> None:
    async def work() -> None:
        settings = {"router_queue_limit": 1, "router_queue_timeout": 2}
        async with full(**settings) as (_stage, router):
            late = await line_up(router)
            with pytest.raises(OverloadedError, match=r"1 requests wait .*router_queue_limit"):
                await router.generate(TOKENS)
            with pytest.raises(AllBusyError, match=r"2 s \(router_queue_timeout\)"):
                await late
            stats = router.queue_stats()
            assert (stats["refused_total"], stats["expired_total"], stats["pending"]) == (1, 1, 0)
            assert router.totals()["requests"] == 1
        async with full() as (_stage, router):
            tasks = [await line_up(router) for _ in range(2)]
            await router.aclose()
            for task in tasks:
                with pytest.raises(ClosedError):
                    await task
            assert pending(router) == 0
            assert router.totals()["requests"] == 1

    run(work())


def test_what_comes_up_meanwhile_ends_the_wait() -> None:
    async def work() -> None:
        async with full() as (stage, router):
            task = await line_up(router)
            (worker,) = stage.workers.values()
            await worker.stop()
            with pytest.raises(NoWorkerError):
                await task
            assert router.queue_stats()["failed_total"] == 1

    run(work())


def test_one_that_fails_before_its_first_item_waits_again() -> None:
    async def work() -> None:
        async with Stage() as stage:
            first = await stage.worker(max_num_batched_tokens=len(TOKENS))
            router = await stage.router(1, router_queue_threshold=0.5)
            first.failure = OverloadedError("full")
            first.gate.clear()
            second = await stage.worker(max_num_batched_tokens=len(TOKENS))

            async def is_known() -> bool:
                return len(await router.get_potential_loads(TOKENS)) == 2

            await eventually(is_known, "the second worker")
            await router.best_worker([1] * 16, request_id="r", worker_id=second.id)
            task = ask(router)
            await wait_pending(router, 1)
            assert router.totals()["requests"] == 1
            await router.free("r")
            assert await task == second.id
            assert is_idle(router)

    run(work())


def test_room_that_comes_without_a_word_is_seen() -> None:
    """A prompt in prefill counts less and less, without a report."""

    async def work() -> None:
        async with full(router_prefill_tokens_per_second=8.0) as (stage, router):
            assert await ask(router) in stage.workers
            assert router.totals()["requests"] == 1

    run(work())


class Last(Policy):
    """Takes the worker with the highest number."""

    deadline_s = 30.0

    def choose(self, request: PolicyRequest, candidates: Sequence[PolicyCandidate]) -> int:
        assert request.user == "u"
        return len(candidates) - 1


def test_a_policy_of_your_own_is_asked_before_the_wait_and_heard_after_it() -> None:
    async def work() -> None:
        async with full(2, router_mode=Last()) as (stage, router):
            # With a single worker it is not called: for r-0 and r-1.
            task = await line_up(router, user="u")
            await router.free("r-0")
            await router.free("r-1")
            assert await task == max(stage.workers)
            assert is_idle(router)

    run(work())


def test_many_at_once_all_come_through_and_no_worker_gets_two_prompts() -> None:
    async def work() -> None:
        async with Stage() as stage:
            for _ in range(3):
                await stage.worker(max_num_batched_tokens=len(TOKENS))
            router = await stage.router(
                3, router_queue_threshold=0.0, router_predicted_ttl_secs=None
            )
            most = 0
            tasks = [ask(router, request_id=f"n-{number}") for number in range(200)]
            while not all(task.done() for task in tasks):
                most = max(most, router.totals()["prefill_tokens"])
                await asyncio.sleep(0)
            assert {task.result() for task in tasks} == set(stage.workers)
            assert most == 3 * len(TOKENS)
            stats = router.queue_stats()
            assert stats["pending"] == 0
            assert 0 < stats["placed_total"] <= 197
            assert is_idle(router)

    run(work())


def test_settings_and_wishes_out_of_range_are_named() -> None:
    for settings, message in (
        ({"router_queue_threshold": -1.0}, "router_queue_threshold"),
        ({"router_prefill_tokens_per_second": "fast"}, "must be a number or 'auto', got 'fast'"),
        ({"router_prefill_tokens_per_second": 0}, "router_prefill_tokens_per_second must be"),
        ({"router_queue_policy": "lifo"}, r"router_queue_policy must be one of fcfs, lcfs, wspt"),
        (
            {"router_queue_limit": 0},
            r"router_queue_limit must be a whole number in 1\.\.=10000000, got 0",
        ),
        ({"router_queue_limit": 10**7 + 1}, "router_queue_limit"),
        ({"router_queue_timeout": 0}, r"router_queue_timeout.*0\.001\.\.=86400"),
        ({"router_queue_batched_tokens": 1.5}, "router_queue_batched_tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            KvRouterConfig(**settings)  # type: ignore[arg-type]

    async def work() -> None:
        async with Stage() as stage:
            await stage.worker()
            router = await stage.router(1)
            assert set(router.queue_stats().values()) == {0}
            for wish, message in (
                ({"priority": float("nan")}, "priority must be finite"),
                ({"priority": "high"}, "priority must be a number"),
                ({"strict_priority": -1}, r"strict_priority must be a whole number in 0"),
                ({"expected_output_tokens": -1}, "expected_output_tokens must be a whole number"),
            ):
                with pytest.raises(InvalidArgumentError, match=message):
                    await router.generate(TOKENS, **wish)  # type: ignore[arg-type]
            stream = await router.generate_from_request(
                {"token_ids": TOKENS, "stop_conditions": {}, "priority": 1, "strict_priority": 2}
            )
            assert len([item async for item in stream]) == 4
            (worker,) = stage.workers.values()
            assert "priority" not in worker.requests[0]

    run(work())
