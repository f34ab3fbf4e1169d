"""KvPushRouter with workers, event sockets and discovery that are real, in one process."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import pickle
import re
import weakref
from pathlib import Path
from typing import Any

import pytest

from kvflash import (
    AllBusyError,
    ClosedError,
    ConfigError,
    ConflictError,
    DistributedRuntime,
    InvalidArgumentError,
    KvPushRouter,
    KvRouterConfig,
    NotFoundError,
    NoWorkerError,
    OverloadedError,
    Policy,
    WorkerError,
)
from support_push_router import BLOCK, PATH, TOKENS, Stage, eventually, is_idle, known, run

PICTURE = {"identifier": "a", "offset": 5, "length": 2}
DIGESTS = [b"\0", b"\1", b"\2", b"\3"]


def test_generate_goes_where_the_prompt_is_cached_and_leaves_nothing_behind() -> None:
    async def work() -> None:
        async with Stage() as stage:
            for _ in range(4):
                await stage.worker()
            router = await stage.router(4)
            home = list(stage.workers.values())[2]
            home.hold(TOKENS)
            await known(router, TOKENS, home, 4)
            stream = await router.generate(
                token_ids=TOKENS,
                model="m",
                stop_conditions={"max_tokens": 20, "ignore_eos": True},
                sampling_options={"temperature": 0.7},
                router_config_override={"overlap_score_weight": 2.0, "router_temperature": 0.0},
                request_id="r-1",
            )
            assert (stream.worker_id, stream.overlap_blocks) == (home.id, 4)
            assert router.totals()["requests"] == 1
            items = [item async for item in stream]
            assert [token for item in items for token in item["token_ids"]] == list(range(20))
            assert is_idle(router)
            (request,) = home.requests
            assert (request["token_ids"], request["model"]) == (TOKENS, "m")
            assert request["stop_conditions"] == {"max_tokens": 20, "ignore_eos": True}
            assert (request["dp_rank"], request["estimated_prefix_hit_num_blocks"]) == (0, 4)
            (decision,) = json.loads(await router.why("r-1"))
            assert (decision["outcome"], decision["cached_tokens"]) == ("complete", 8)
            assert len(decision["candidates"]) == 4
            events = json.loads(await router.dump_events())
            assert {event["worker_id"] for event in events} == {home.id}

    run(work())


def test_best_worker_books_only_with_a_name() -> None:
    """Pattern 2: the caller keeps the account."""

    async def work() -> None:
        async with Stage() as stage:
            for _ in range(2):
                await stage.worker()
            router = await stage.router(2, router_predicted_ttl_secs=None)
            for _ in range(10):
                assert await router.best_worker(TOKENS) in [(one, 0, 0) for one in stage.workers]
            assert is_idle(router)
            with pytest.deprecated_call(match="best_worker"):
                worker_id, overlap = await router.best_worker_id(TOKENS, request_id="req-123")
            assert worker_id in stage.workers
            assert overlap == 0
            assert router.totals()["prefill_tokens"] == 16
            response = await router.endpoint.client().direct(
                {"token_ids": TOKENS, "stop_conditions": {}}, worker_id
            )
            await anext(response)
            await router.mark_prefill_complete("req-123")
            assert (router.totals()["prefill_tokens"], router.totals()["requests"]) == (0, 1)
            _ = [item async for item in response]
            with pytest.raises(ConflictError, match="req-123"):
                await router.best_worker(TOKENS, request_id="req-123")
            await router.free("req-123")
            await router.free("req-123")
            assert is_idle(router)
            with pytest.raises(NotFoundError, match="req-123"):
                await router.mark_prefill_complete("req-123")

    run(work())


def test_each_question_draws_anew_and_its_seed_repeats_it() -> None:
    async def work() -> None:
        async with Stage() as stage:
            for _ in range(4):
                await stage.worker()
            router = await stage.router(4, router_temperature=1.0)
            found = [await router.best_worker([number] * 16) for number in range(200)]
            assert {one.worker_id for one in found} == set(stage.workers)
            for number, one in enumerate(found[:50]):
                again = await router.best_worker([number] * 16, seed=one.seed)
                assert (again, again.seed) == (one, one.seed)
            assert len({one.seed for one in found}) == 200
            # To those who know a tuple of three it is one.
            worker, rank, overlap = found[0]
            assert found[0] == (worker, rank, overlap) == pickle.loads(pickle.dumps(found[0]))
            assert pickle.loads(pickle.dumps(found[0])).seed == found[0].seed
            assert is_idle(router)
            booked = await router.best_worker(TOKENS, request_id="r", seed=7)
            assert booked.seed == 7
            await router.free("r")
            assert await router.best_worker(TOKENS, seed=7) == booked
            for bad in (-1, 2**64, 0.5, "7"):
                with pytest.raises(InvalidArgumentError, match=r"seed must be a whole number"):
                    await router.best_worker(TOKENS, seed=bad)

    run(work())


def test_probing_several_routers_of_one_process_changes_none() -> None:
    """Pattern 3: what the reference forbids works here; one that is closed leaves the other be."""

    async def work() -> None:
        async with Stage() as stage:
            first, _ = [await stage.worker() for _ in range(2)]
            routers = [await stage.router(2) for _ in range(3)]
            first.hold(TOKENS)
            for router in routers:
                await known(router, TOKENS, first, 4)
            found = [await router.best_worker(TOKENS) for router in routers]
            assert found == [(first.id, 0, 4)] * 3
            assert all(is_idle(router) for router in routers)
            await routers[0].aclose()
            stream = await routers[1].generate(TOKENS, model="m", worker_id=found[1][0])
            assert stream.worker_id == first.id
            assert len([item async for item in stream]) == 4
            assert (routers[1].totals()["requests"], routers[2].totals()["requests"]) == (0, 0)
            assert await routers[2].best_worker(TOKENS) == (first.id, 0, 4)

    run(work())


def test_loads_tell_enough_for_a_choice_of_ones_own() -> None:
    """Pattern 4: the least to prefill, forced."""

    async def work() -> None:
        async with Stage() as stage:
            for _ in range(3):
                await stage.worker()
            router = await stage.router(3)
            ids = sorted(stage.workers)
            for number, worker in enumerate(ids[:2]):
                await router.best_worker(
                    [7] * (8 + 8 * number), request_id=f"r{number}", worker_id=worker
                )
            loads = await router.get_potential_loads(TOKENS)
            told = {load["worker_id"]: load for load in loads}
            assert [told[one]["potential_prefill_tokens"] for one in ids] == [24, 32, 16]
            assert [told[one]["potential_decode_blocks"] for one in ids] == [6, 8, 4]
            assert [told[one]["active_requests"] for one in ids] == [1, 1, 0]
            best = min(loads, key=lambda load: load["potential_prefill_tokens"])
            stream = await router.generate(TOKENS, model="m", worker_id=best["worker_id"])
            _ = [item async for item in stream]
            assert len(stage.workers[ids[2]].requests) == 1

    run(work())


def test_a_hundred_bookings_at_once_spread() -> None:
    async def work() -> None:
        async with Stage() as stage:
            for _ in range(4):
                await stage.worker()
            router = await stage.router(4)
            found = await asyncio.gather(
                *(router.best_worker([n] * 16, request_id=str(n)) for n in range(100))
            )
            counts = [sum(one[0] == worker for one in found) for worker in stage.workers]
            assert counts == [25] * 4
            await asyncio.gather(*(router.free(str(n)) for n in range(100)))
            assert is_idle(router)

    run(work())


def test_load_is_freed_however_a_stream_ends() -> None:
    async def work() -> None:
        async with Stage() as stage:
            worker = await stage.worker()
            router = await stage.router(1)

            async def begun() -> Any:
                worker.gate.clear()
                stream = await router.generate(TOKENS)
                await anext(stream)
                assert router.totals()["requests"] == 1
                assert router.totals()["prefill_tokens"] == 0
                return stream

            stream = await begun()
            await stream.aclose()
            assert is_idle(router)
            stream = await begun()
            reading = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            assert is_idle(router)
            stream = await begun()
            del stream
            gc.collect()
            assert is_idle(router)
            worker.gate.set()
            for after in (0, 1):
                worker.failure, worker.fails_after = ValueError("broken"), after
                with pytest.raises(WorkerError, match="broken"):
                    _ = [item async for item in await router.generate(TOKENS)]
                assert is_idle(router)

    run(work())


def test_a_prompt_is_not_kept_for_its_answer() -> None:
    class Tokens(list[int]):
        """A list that can be watched."""

    async def work() -> None:
        async with Stage() as stage:
            await stage.worker()
            router = await stage.router(1)
            tokens = Tokens(TOKENS)
            watched = weakref.ref(tokens)
            stream = await router.generate_from_request(
                {"token_ids": tokens, "stop_conditions": {"max_tokens": 2}}
            )
            del tokens
            await anext(stream)
            gc.collect()
            assert watched() is None
            assert len([item async for item in stream]) == 2

    run(work())


def test_a_request_that_is_refused_before_its_first_item_goes_elsewhere() -> None:
    async def work() -> None:
        async with Stage() as stage:
            full, other = [await stage.worker() for _ in range(2)]
            full.failure = OverloadedError("full")
            router = await stage.router(2)
            full.hold(TOKENS)
            await known(router, TOKENS, full, 4)
            stream = await router.generate(TOKENS)
            assert len([item async for item in stream]) == 4
            assert stream.worker_id == other.id
            assert (len(full.requests), len(other.requests)) == (1, 1)
            # Pinned, it goes nowhere else.
            with pytest.raises(OverloadedError, match="full"):
                _ = [item async for item in await router.generate(TOKENS, worker_id=full.id)]
            # What a handler raises says nothing about the next request.
            full.failure = NotFoundError("no such adapter")
            with pytest.raises(NotFoundError, match="no such adapter"):
                only = await router.generate(TOKENS, allowed_worker_ids=[full.id])
                _ = [item async for item in only]
            assert len(full.requests) == 3
            assert router._client.suspects() == set()
            assert is_idle(router)

    run(work())


def test_workers_and_ranks_come_and_go() -> None:
    async def work() -> None:
        async with Stage() as stage:
            alone = KvPushRouter(stage.runtime().endpoint(PATH), BLOCK)
            with pytest.raises(NoWorkerError, match="no worker is registered"):
                await alone.best_worker(TOKENS)
            assert await alone.get_potential_loads(TOKENS) == []
            await alone.aclose()
            one, two = await stage.worker(), await stage.worker(ranks=3)
            router = await stage.router(2)
            loads = await router.get_potential_loads(TOKENS)
            places = sorted((load["worker_id"], load["dp_rank"]) for load in loads)
            assert places == sorted([(one.id, 0), (two.id, 0), (two.id, 1), (two.id, 2)])
            stream = await router.generate(TOKENS, worker_id=two.id, dp_rank=2)
            assert (stream.worker_id, stream.dp_rank) == (two.id, 2)
            _ = [item async for item in stream]
            assert two.requests[-1]["dp_rank"] == 2
            one.hold(TOKENS)
            await known(router, TOKENS, one, 4)
            await router.best_worker(TOKENS, request_id="kept", worker_id=one.id)
            del stage.workers[one.id]
            await one.stop()

            async def is_gone() -> bool:
                return one.id not in {
                    load["worker_id"] for load in await router.get_potential_loads(TOKENS)
                }

            await eventually(is_gone, "the worker to be forgotten")
            assert is_idle(router)
            assert json.loads(await router.dump_events()) == []
            with pytest.raises(NoWorkerError, match=f"pinned worker {one.id} is not registered"):
                await router.best_worker(TOKENS, worker_id=one.id)

    run(work())


@pytest.mark.parametrize("wrong", [-4, 2**64, 1.5, "4"])
def test_numbers_out_of_range_are_named(wrong: Any) -> None:
    async def work() -> None:
        async with Stage() as stage:
            router = await stage.router(0)

            def refused(field: str, most: int) -> Any:
                told = re.escape(f"{field} must be in 0..={most}, got {wrong!r}")
                return pytest.raises(InvalidArgumentError, match=f"^{told}$")

            for field in ("input_tokens", "cached_tokens", "output_tokens"):
                with refused(field, 2**64 - 1):
                    await router.free("r", **{field: wrong})
            with refused("worker_id", 2**64 - 1):
                router.report_metrics(wrong)
            with refused("dp_rank", 2**32 - 1):
                router.report_metrics(1, wrong)
            with refused("active_prefill_tokens_threshold", 2**64 - 1):
                router.set_busy_thresholds(active_prefill_tokens_threshold=wrong)
            told = re.escape(f"block_size must be in 1..={2**32 - 1}, got {wrong!r}")
            with pytest.raises(InvalidArgumentError, match=f"^{told}$"):
                KvPushRouter(router.endpoint, wrong)

    run(work())


@pytest.mark.parametrize("wrong", [10**400, "4"], ids=["long", "text"])
def test_numbers_that_no_float_holds_are_named(wrong: Any) -> None:
    async def work() -> None:
        async with Stage() as stage:
            router = await stage.router(0)

            def refused(field: str) -> Any:
                told = re.escape(f"{field} must be a number within +-1.8e+308, got ")
                return pytest.raises(InvalidArgumentError, match=f"^{told}")

            for field in ("active_decode_blocks_threshold", "active_prefill_tokens_threshold_frac"):
                with refused(field):
                    router.set_busy_thresholds(**{field: wrong})
            with refused("queue_s"):
                router.report_metrics(1, queue_s=wrong)

    run(work())


def test_without_events_routing_is_the_knowledge() -> None:
    async def work() -> None:
        async with Stage() as stage:
            for _ in range(2):
                await stage.worker()
            router = await stage.router(2, use_kv_events=False)
            worker, rank, overlap = await router.best_worker(TOKENS, request_id="a")
            assert overlap == 0
            await router.free("a")
            assert await router.best_worker(TOKENS) == (worker, rank, 4)

    run(work())


def test_busy_workers_are_passed_over() -> None:
    async def work() -> None:
        async with Stage() as stage:
            for _ in range(2):
                await stage.worker(total_kv_blocks=10)
            router = await stage.router(2, active_decode_blocks_threshold=0.3)
            first, _, _ = await router.best_worker([1] * 16, request_id="a")
            for _ in range(5):
                assert (await router.best_worker([1] * 16))[0] != first
            await router.best_worker([2] * 16, request_id="b")
            with pytest.raises(AllBusyError, match=r"active_decode_blocks_threshold=0\.3"):
                await router.best_worker([3] * 16)
            with pytest.raises(AllBusyError, match=f"pinned worker {first} is busy"):
                await router.generate([3] * 16, worker_id=first)
            router.set_busy_thresholds()
            await router.best_worker([3] * 16)

    run(work())


def test_generate_from_request_and_wrong_wishes() -> None:
    async def work() -> None:
        async with Stage() as stage:
            worker, _ = [await stage.worker() for _ in range(2)]
            router = await stage.router(2, router_track_output_blocks=True)
            stream = await router.generate_from_request(
                {
                    "token_ids": TOKENS,
                    "stop_conditions": {"max_tokens": 9},
                    "backend_instance_id": worker.id,
                    "custom": 1,
                }
            )
            before = router.totals()["blocks"]
            for _ in range(4):
                await anext(stream)
            assert (before, router.totals()["blocks"]) == (4, 3), "nine tenths of five are left"
            assert len([item async for item in stream]) == 6
            assert worker.requests[0]["custom"] == 1
            assert "backend_instance_id" not in worker.requests[0]
            wishes: list[tuple[dict[str, Any], str]] = [
                ({"router_config_override": {"weight": 1}}, "unknown setting 'weight'"),
                ({"router_config_override": {"overlap_score_weight": -1}}, "overlap_score_weight"),
                ({"router_config_override": KvRouterConfig()}, "must be a mapping of settings"),
                ({"router_config_override": 0.5}, "must be a mapping of settings, got 0.5"),
                ({"router_config_override": {"router_temperature": "x"}}, "router_temperature"),
                ({"dp_rank": 1}, "dp_rank 1 needs worker_id"),
                ({"allowed_worker_ids": 3}, "allowed_worker_ids must be a list"),
                ({"session_key": "k" * 257}, "session_key may have at most 256 bytes, got 257"),
                ({"user": "u" * 257}, "user may have at most 256 bytes, got 257"),
            ]
            for wish, text in wishes:
                with pytest.raises(InvalidArgumentError, match=text):
                    await router.generate_from_request(
                        {"token_ids": TOKENS, "stop_conditions": {}, **wish}
                    )
            with pytest.raises(InvalidArgumentError, match="token_ids"):
                await router.generate_from_request({})
            with pytest.raises(InvalidArgumentError, match="empty"):
                await router.generate([])
            assert is_idle(router)

    run(work())


@pytest.mark.parametrize("config", [{"router_temperature": 1.0}, {}, 0.5, KvRouterConfig])
def test_settings_that_are_no_config_are_refused_by_name(config: Any) -> None:
    async def work() -> None:
        async with DistributedRuntime("mem") as runtime:
            with pytest.raises(InvalidArgumentError, match="must be a KvRouterConfig or None, got"):
                KvPushRouter(runtime.endpoint("ns.backend.generate"), 16, config)
            with pytest.raises(InvalidArgumentError, match=r"component\.endpoint, got 5"):
                runtime.endpoint(5)  # type: ignore[arg-type]

    run(work())


def test_another_block_size_is_loud(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with Stage() as stage:
            await stage.worker(block_size=64)
            await stage.router(1)

    run(work())
    assert "blocks of 64 tokens, this router of 4" in caplog.text


def test_another_model_at_the_endpoint_is_loud(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with Stage() as stage:
            await stage.worker(model="a")
            await stage.worker(model="b")
            await stage.router(2)

    run(work())
    (said,) = [line for line in caplog.messages if "at the same endpoint" in line]
    assert "serve each model at an endpoint of its own" in said


def test_load_expires_by_last_activity() -> None:
    async def work() -> None:
        async with Stage() as stage:
            await stage.worker()
            router = await stage.router(1, active_request_expiry_secs=0.5)
            await router.best_worker(TOKENS, request_id="leaked")

            async def is_free() -> bool:
                return is_idle(router)

            await eventually(is_free, "the expiry")
            assert json.loads(await router.why("leaked"))[0]["outcome"] == "expired"

    run(work())


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"overlap_score_weight": -1.0}, "overlap_score_weight must be a number of at least 0"),
        ({"prefill_load_scale": float("nan")}, "prefill_load_scale"),
        ({"overlap_score_credit": -0.5}, "overlap_score_credit must be a number of at least 0"),
        ({"active_request_weight": "1"}, "active_request_weight"),
        ({"router_temperature": float("inf")}, "router_temperature"),
        ({"router_prune_target_ratio": 1.1}, "router_prune_target_ratio must be .* 0..=1"),
        ({"router_ttl_secs": -1}, "router_ttl_secs"),
        ({"router_ttl_secs": None}, "router_ttl_secs must be a number of at least 0, got None"),
        ({"max_requests": None}, "max_requests must be a whole number of at least 1, got None"),
        ({"router_queue_policy": None}, "router_queue_policy must be one of fcfs, .* got None"),
        ({"router_max_tree_size": 0}, "router_max_tree_size"),
        ({"router_max_tree_size": 1.5}, "router_max_tree_size must be a whole number"),
        ({"router_snapshot_threshold": 0}, "router_snapshot_threshold"),
        ({"active_decode_blocks_threshold": 1.1}, "active_decode_blocks_threshold"),
        ({"router_mode": 5}, r"router_mode must be .* a method choose\(request, .* got 5"),
        ({"router_mode": Policy}, "router_mode must be a policy's name, or an object"),
        ({"shadow_policies": "kv"}, "shadow_policies must be a list of policies' names, got 'kv'"),
        ({"shadow_policies": 5}, "shadow_policies must be a list"),
        ({"use_kv_events": 1}, "use_kv_events must be True or False"),
        ({"durable_kv_events": True, "use_kv_events": False}, "requires use_kv_events"),
        (
            {"router_track_output_blocks": True, "router_track_active_blocks": False},
            "requires router_track_active_blocks",
        ),
    ],
)
def test_settings_are_checked_by_name(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        KvRouterConfig(**settings)


def test_the_manual_says_which_methods_are_coroutines() -> None:
    methods = {
        name: getattr(KvPushRouter, name) for name in vars(KvPushRouter) if not name.startswith("_")
    }
    plain = {
        name for name, method in methods.items()
        if callable(method) and not inspect.iscoroutinefunction(method)
    }  # fmt: skip
    manual = (Path(__file__).parents[3] / "docs/routing.md").read_text()
    (said,) = re.findall(
        r"All methods are coroutines except ([^,]+(?:, [^,]+)*), which\s+return", manual
    )
    assert set(re.findall(r"`(\w+)`", said)) == plain
    assert len(methods) > len(plain) > 3


def test_without_weight_or_credit_nobody_listens() -> None:
    assert KvRouterConfig().make_core(16).uses_events
    assert not KvRouterConfig(overlap_score_weight=0.0).make_core(16).uses_events
    assert not KvRouterConfig(overlap_score_credit=0.0).make_core(16).uses_events


def test_the_first_call_knows_what_the_workers_hold() -> None:
    """Their replay takes a moment, which the first call waits for, up to its limit."""

    async def work() -> None:
        async with Stage() as stage:
            home, silent = await stage.worker(), await stage.worker()
            assert home.engine is not None
            assert silent.engine is not None
            home.hold(TOKENS)
            silent.engine.gate.clear()
            endpoint = stage.runtime().endpoint(PATH)
            async with KvPushRouter(endpoint, BLOCK) as router:
                assert await router.best_worker(TOKENS) == (home.id, 0, 4)
                assert not router._core.is_caught_up
            silent.engine.gate.set()
            async with KvPushRouter(endpoint, BLOCK) as router:
                assert await router.best_worker(TOKENS) == (home.id, 0, 4)
                assert router._core.is_caught_up

    run(work())


def test_requests_wait_until_enough_workers_were_there(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with Stage() as stage:
            first = await stage.worker()
            hasty = await stage.router(1, router_queue_timeout=0.01)
            wanted = "starting: 1 of the 2 workers that must be there first"
            for refused in (
                hasty.generate(TOKENS),
                hasty.best_worker(TOKENS),
                hasty.best_worker(TOKENS, request_id="r"),
            ):
                with pytest.raises(NoWorkerError, match=wanted):
                    await refused
            assert is_idle(hasty)
            router, closed = await stage.router(1), await stage.router(1)
            waiting = asyncio.gather(router.generate(TOKENS), router.best_worker(TOKENS))
            given_up = asyncio.ensure_future(closed.generate(TOKENS))
            assert not (await asyncio.wait([waiting, given_up], timeout=0.05))[0]
            await closed.aclose()
            with pytest.raises(ClosedError, match="while a request waited for workers"):
                await given_up
            second = await stage.worker()
            stream, best = await waiting
            assert {stream.worker_id, best.worker_id} <= {first.id, second.id}
            assert len([item async for item in stream]) == 4
            await second.stop()

            async def is_alone() -> bool:
                return router._workers.ids == [first.id]

            await eventually(is_alone, "it to be gone")
            assert (await router.best_worker(TOKENS))[0] == first.id

    monkeypatch.setenv("DYN_ROUTER_MIN_INITIAL_WORKERS", "2")
    run(work())
    monkeypatch.setenv("DYN_ROUTER_MIN_INITIAL_WORKERS", "two")
    with pytest.raises(ConfigError, match="DYN_ROUTER_MIN_INITIAL_WORKERS must be a whole number"):
        KvRouterConfig().make_core(BLOCK)
    assert KvRouterConfig(min_initial_workers=0).make_core(BLOCK)


def test_calls_that_wait_for_the_first_workers_go_on_in_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        async with Stage() as stage:
            await stage.worker()
            router = await stage.router(1)
            asked, slow = asyncio.Event(), asyncio.Event()
            done: list[int] = []

            async def sync(_timeout_s: float) -> None:
                is_first = not asked.is_set()
                asked.set()
                if is_first:
                    await slow.wait()

            monkeypatch.setattr(router._workers, "synced", sync)

            async def ask(number: int) -> None:
                await router.best_worker(TOKENS)
                done.append(number)

            first = asyncio.create_task(ask(0))
            await asked.wait()
            others = [asyncio.create_task(ask(number)) for number in range(1, 5)]
            assert not (await asyncio.wait(others, timeout=0.05))[0]
            # One that is given up lets none behind it pass the first.
            others.pop(0).cancel()
            assert not (await asyncio.wait(others, timeout=0.05))[0]
            slow.set()
            await asyncio.gather(first, *others)
            assert done == [0, 2, 3, 4]

    run(work())


def test_prompts_with_pictures_and_embeddings_go_where_they_are_cached() -> None:
    async def work() -> None:
        async with Stage() as stage:
            pictured, embedded = await stage.worker(), await stage.worker()
            await stage.worker()
            router = await stage.router(3)
            pictured.hold(TOKENS, extra_keys=[None, [["a", 1]], None, None])
            embedded.hold(TOKENS, extra_keys=[[digest] for digest in DIGESTS])
            await known(router, TOKENS, pictured, 4, mm=[PICTURE])
            await known(router, TOKENS, embedded, 4, embeds=DIGESTS)
            # One token further is another prompt.
            await known(router, TOKENS, pictured, 1, mm=[{**PICTURE, "offset": 6}])
            text = [digest.hex() for digest in DIGESTS]
            for keys, home in (
                ({"mm": [PICTURE]}, pictured),
                ({"embeds": text, "lora_path": "/sql"}, embedded),
            ):
                assert await router.best_worker(TOKENS, **keys) == (home.id, 0, 4)
                for stream in (
                    await router.generate(token_ids=TOKENS, **keys),
                    await router.generate_from_request(
                        {"token_ids": TOKENS, "stop_conditions": {}, **keys}
                    ),
                ):
                    async with stream:
                        assert (stream.worker_id, stream.overlap_blocks) == (home.id, 4)
                        async for _ in stream:
                            pass
                assert not {"mm", "embeds", "lora_path"} & set(home.requests[-1])
            for wrong, wanted in (
                ({"mm": [{**PICTURE, "length": -1}]}, r"mm\[0\].length must be"),
                ({"embeds": ["xy"]}, r"embeds\[0\] must be"),
                ({"lora_path": 5}, "lora_path must be"),
            ):
                with pytest.raises(InvalidArgumentError, match=wanted):
                    await router.generate(token_ids=TOKENS, **wrong)
                with pytest.raises(InvalidArgumentError, match=wanted):
                    await router.best_worker(TOKENS, **wrong)
                with pytest.raises(InvalidArgumentError, match=wanted):
                    await router.get_potential_loads(TOKENS, **wrong)
            assert is_idle(router)

    run(work())
