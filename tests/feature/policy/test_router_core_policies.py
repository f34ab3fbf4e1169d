"""Custom policies besides the built-in ones, in routers of the own process."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvflash import (
    ConfigError,
    InvalidArgumentError,
    KvRouterConfig,
    Policy,
    PolicyCandidate,
    PolicyEnded,
    PolicyRequest,
)
from kvflash import policy as policies
from kvflash._core import PolicyDesk, RouterCore
from kvflash.policy import AskedPolicy, asked_of, load
from kvflash.router import RouterService
from service import until
from support_found import join
from support_push_router import TOKENS, Stage, is_idle, run

IDS = list(range(100, 116))
OTHERS = (
    "prefix-cache",
    "vtc-basic",
    "least-request",
    "least-latency",
    "throughput",
    "session-affinity",
    "prefix-cache:2,least-request:1",
)


class Last(Policy):
    """Chooses the last one, and records its input."""

    deadline_s = 30.0

    def __init__(self) -> None:
        self.told: list[Any] = []

    def choose(self, request: PolicyRequest, candidates: list[PolicyCandidate]) -> PolicyCandidate:
        self.told.append(("choose", request.user, request.token_ids, len(candidates)))
        return candidates[-1]

    def routed(self, request: PolicyRequest, candidate: PolicyCandidate) -> None:
        self.told.append(("routed", request.user, candidate.worker_id))

    def finished(self, ended: PolicyEnded) -> None:
        used = (ended.input_tokens, ended.cached_tokens, ended.output_tokens)
        self.told.append(("finished", ended.user, ended.worker_id, used))

    def removed(self, worker_id: int, dp_rank: int) -> None:
        self.told.append(("removed", worker_id, dp_rank))


class Hasty(Last):
    """Has no time to choose."""

    deadline_s = 0.0


class Stuck(Policy):
    """Chooses nothing for as long as anybody waits."""

    def choose(self, request: PolicyRequest, candidates: list[PolicyCandidate]) -> int:
        time.sleep(3_600)
        return 0


def core(**settings: Any) -> RouterCore:
    made = RouterCore(block_size=4, seed=1, **settings)
    join(made, (1, 2, 3))
    return made


def test_a_count_that_no_answer_has_is_limited() -> None:
    router = core(policy="auto")
    request_id = "a"
    router.reserve(IDS, request_id)
    router.mark_prefill_complete(request_id)
    router.free(request_id, output_tokens=10**15)
    samples = {name: value for name, _, _, value in router.policy_samples()}
    assert samples["auto_answer_tokens"] < 2**32


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ({}, "auto"),
        ({"overlap_score_weight": 1.0}, "kv"),
        ({"overlap_score_credit": 1.0}, "kv"),
        ({"router_track_active_blocks": True}, "kv"),
        ({"router_temperature": 0.5}, "auto"),
        ({"use_kv_events": False}, "auto"),
        ({"overlap_score_weight": 1.0, "router_mode": "auto"}, "auto"),
    ],
    ids=str,
)
def test_a_setting_of_the_formula_selects_it(given: dict[str, Any], policy: str) -> None:
    config = KvRouterConfig(**given)
    assert config.make_core(4).policy == policy
    assert copy.copy(config).make_core(4).policy == policy
    # A copy with changes gives every setting, so that only values other than the defaults count.
    assert replace(KvRouterConfig(), log_decisions=True).make_core(4).policy == "auto"


def sample(made: RouterCore, name: str, value: str = "") -> float:
    found = [one[3] for one in made.policy_samples() if (one[0], one[2]) == (name, value)]
    assert len(found) == 1, made.policy_samples()
    return found[0]


@pytest.fixture
def asked() -> Iterator[Callable[..., AskedPolicy]]:
    """Makes threads in which policies are asked; they end with the test."""
    made: list[AskedPolicy] = []

    def make(policy: Policy) -> AskedPolicy:
        made.append(AskedPolicy(policy))
        made[-1].start()
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("policy", OTHERS)
def test_every_policy_chooses_beside_shadows(policy: str) -> None:
    made = core(policy=policy, shadow_policies=["kv", "least-request"])
    assert made.policy == policy
    for n in range(6):
        booked = made.decider.enter([n, *IDS], {"user": "u"}, request_id="r")
        assert booked.worker_id in (1, 2, 3)
    assert sample(made, "shadow_decisions_total", "kv") == 6
    assert f'"policy":"{policy}"' in made.why("r")


@pytest.mark.parametrize(
    ("settings", "left_blocks"),
    [
        # Of 10 blocks it is believed to keep 9: the last prompt, and half of the one before.
        ({}, 3),
        ({"policy": "auto"}, 3),
        # A given time takes precedence, and kv has its own.
        ({"router_ttl_s": 60.0}, 6),
        ({"is_router_ttl_meant": True}, 6),
        ({"policy": "kv"}, 6),
    ],
)
def test_without_events_auto_goes_by_the_size_of_the_cache(
    settings: dict[str, Any], left_blocks: int
) -> None:
    made = RouterCore(block_size=4, seed=1, use_kv_events=False, **settings)
    join(made, [1], total_kv_blocks=10)
    first, second = list(range(24)), list(range(100, 124))
    for prompt in (first, second):
        made.decider.enter(prompt)
    assert made.query(first)[2] == left_blocks
    assert made.query(second)[2] == 6


def test_faults_are_named() -> None:
    for settings, text in (
        ({"shadow_policies": ["kv:weight=8"]}, "--shadow-policy: .*it takes overlap_score_weight"),
        ({"policy": "fastest"}, "session-affinity"),
        ({"policy": "kv:1,random:1"}, "has no scores"),
        ({"shadow_policies": ["kv"] * 5}, "limit is 4"),
        ({"policy_profile": "best"}, "best"),
    ):
        with pytest.raises(ConfigError, match=text):
            core(**settings)
    # A router's settings are checked before there is one.
    for settings, text in (
        ({"router_mode": "fastest"}, "router_mode: .*fastest"),
        ({"router_mode": "kv:1,random:x"}, "router_mode: "),
        ({"shadow_policies": ["kv", "zz"]}, "shadow_policies: .*zz"),
        ({"shadow_policies": ["kv:temperature=x"]}, 'shadow_policies: .*at least 0, got "x"'),
        ({"policy_profile": "best"}, "policy_profile must be one of document, aibrix-compat"),
    ):
        with pytest.raises(ConfigError, match=text):
            KvRouterConfig(**settings)
    for block_size in (-1, 0, 2**32):
        with pytest.raises(InvalidArgumentError, match="block_size must be in 1"):
            KvRouterConfig().make_core(block_size)
    made = core(policy="session-affinity")
    for options, text in (
        ({"session_key": "k" * 257}, "session_key may have at most 256 bytes, got 257"),
        ({"session_worker": 1}, "session_worker must be"),
        ({"user": 5}, "user must be a string"),
    ):
        with pytest.raises(InvalidArgumentError, match=text):
            made.query(IDS, options)


def test_sessions_users_and_figures_of_engines_are_told() -> None:
    sessions = core(policy="session-affinity")
    assert (
        len({sessions.decider.enter([n, *IDS], {"session_key": "k"}).worker_id for n in range(5)})
        == 1
    )
    assert sessions.query(IDS, {"session_worker": (3, 0), "session_key": "k"})[0] == 3
    shares = core(policy="vtc-basic")
    booking = shares.decider.enter(IDS, {"user": "u"})
    booking.first_token()
    booking.used(cached_tokens=4)
    booking.used(input_tokens=16, output_tokens=900)
    booking.free()
    shares.reserve(IDS, "r", {"user": "other"})
    shares.mark_prefill_complete("r")
    assert shares.free("r", input_tokens=16, output_tokens=3)
    assert sample(shares, "vtc_corrected_requests_total") == 2
    usage = core(policy="least-kv-cache")
    for worker_id, value in ((1, 0.5), (2, 0.125), (3, 0.75)):
        assert usage.report_metrics(worker_id, 0, {"gpu_kv_usage": value})
    assert usage.report_metrics(2, 0, {"running_requests": 3})
    assert usage.query(IDS)[0] == 2
    assert not usage.report_metrics(9, 0, {"gpu_kv_usage": 0})
    for figures, text in (({"gpu_kv_usage": 2}, r"in 0..=1, got 2"), ({"load": 1}, "queue_s")):
        with pytest.raises(InvalidArgumentError, match=text):
            usage.report_metrics(1, 0, figures)


def test_text_stands_for_four_bytes_a_token() -> None:
    made = core(policy="prefix-cache")
    home = made.decider.enter([0x61626364] * 64).worker_id
    found = made.query([1], {"prompt": "abcd" * 64})
    assert found[0] == home


# -- policies in Python


def test_a_policy_in_python_chooses_and_is_told(asked: Callable[..., AskedPolicy]) -> None:
    policy = Last()
    made = core(policy_desk=asked(policy).desk)
    assert made.policy == "python:Last"
    booking = made.decider.enter(IDS, {"user": "u"})
    assert booking.worker_id == 3
    # The one that may not take it is not among the candidates; one alone is no choice.
    assert made.query(IDS, {"allowed_worker_ids": [1, 2]})[0] == 2
    assert made.query(IDS, {"worker_id": 1})[0] == 1
    booking.first_token()
    booking.used(cached_tokens=8, output_tokens=5)
    booking.free()
    made.remove_worker(3)
    until(lambda: len(policy.told) == 5, "what it is told")
    assert policy.told == [
        ("choose", "u", IDS, 3),
        ("routed", "u", 3),
        ("choose", None, IDS, 2),
        ("finished", "u", 3, (16, 8, 5)),
        ("removed", 3, 0),
    ]
    assert sample(made, "outside_policy_answers_total", "followed") == 1


@pytest.mark.parametrize("choice", [np.int64(1), np.array([0, 2, 1]), np.uint8(1)])
def test_a_choice_may_be_of_numpy(asked: Callable[..., AskedPolicy], choice: Any) -> None:
    policy = Last()
    policy.choose = lambda *_: choice  # type: ignore[method-assign]
    made = core(policy_desk=asked(policy).desk)
    assert made.decider.enter(IDS).worker_id == 2
    assert sample(made, "outside_policy_answers_total", "followed") == 1


def test_kv_chooses_for_a_policy_that_is_stuck_and_nobody_piles_up(
    asked: Callable[..., AskedPolicy],
) -> None:
    made = core(policy_desk=asked(Stuck()).desk)
    for n in range(20):
        made.decider.enter([n, *IDS])
    # No request waits again for one that has not come back.
    answers = {
        name: sample(made, "outside_policy_answers_total", name) for name in ("late", "stuck")
    }
    assert answers == {"late": 1, "stuck": 19}
    assert sample(made, "outside_policy_waiting") == 0
    assert made.totals()["requests"] == 0, "bookings that nobody holds are freed"


def test_the_thread_ends_with_its_router(asked: Callable[..., AskedPolicy]) -> None:
    thread = asked(Last())
    made = core(policy_desk=thread.desk)
    assert made.query(IDS)[0] == 3
    del made
    until(lambda: not thread._thread.is_alive(), "the thread to end")
    with pytest.raises(ConfigError, match=r"deadline_s must be at least 0\.001"):
        PolicyDesk("p", deadline_s=0.0001)


@pytest.mark.parametrize(
    "deadline_s",
    ["soon", None, 0, -1, 0.0001, 86_401, float("nan"), float("inf"), 10**400, [1]],
    ids=lambda value: f"{value!r:.9}",
)
def test_a_wrong_deadline_names_class_limit_and_value(deadline_s: Any) -> None:
    policy = Last()
    policy.deadline_s = deadline_s
    limit = "must be a number of seconds, at least 0.001 and at most 86400, got "
    with pytest.raises(ConfigError) as caught:
        asked_of(policy)
    assert str(caught.value) == f"Last.deadline_s {limit}{deadline_s!r:.100}"


def test_an_async_choose_is_refused() -> None:
    class Waiting(Last):
        async def choose(self, request: Any, candidates: Any) -> Any:
            return candidates[-1]

    with pytest.raises(ConfigError, match=r"Waiting\.choose must be a plain method, got an async"):
        asked_of(Waiting())


def test_pythonpath_is_named_for_the_policy_s_own_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imports_another.py").write_text("import nowhere_else")
    monkeypatch.syspath_prepend(tmp_path)
    for module, is_named in (
        ("nowhere", True),
        ("nowhere.deeper", True),
        ("imports_another", False),
    ):
        with pytest.raises(ConfigError, match="ModuleNotFoundError") as caught:
            load(f"python:{module}:Last")
        assert ("PYTHONPATH" in str(caught.value)) is is_named


def test_services_and_push_routers_take_objects_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with RouterService(host="127.0.0.1", port=0, policy=Last()) as router:
        for worker_id in (1, 2):
            router.add_worker({"worker_id": worker_id, "model_name": "m", "block_size": 4})
        answer = router.call("POST", "/reserve", {"request_id": "r", "token_ids": IDS})
        assert (answer["worker_id"], answer["reason"]) == (2, "highest_score")
    name = f"python:{__name__}:Last"
    assert type(load(name)).__name__ == "Last"
    for wrong in (
        "python:Last",
        "python:nowhere:Last",
        f"python:{__name__}:First",
        "python:builtins:int",
    ):
        with pytest.raises(ConfigError, match=r"^--router-mode python:"):
            asked_of(wrong)


def test_a_push_router_names_the_field_of_its_config() -> None:
    async def work() -> None:
        async with Stage() as stage:
            for wrong in ("python:nowhere:Last", f"python:{__name__}:Hasty"):
                with pytest.raises(ConfigError, match=f"^router_mode {wrong}: "):
                    await stage.router(0, router_mode=wrong)

    run(work())


def test_no_thread_is_left_where_no_core_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())

    async def work() -> None:
        async with Stage() as stage:
            with pytest.raises(ConfigError, match="MIN_INITIAL_WORKERS must be a whole number"):
                await stage.router(0, router_mode=Last())

    monkeypatch.setenv("KVFLASH_ROUTER_MIN_INITIAL_WORKERS", "some")
    run(work())
    with pytest.raises(InvalidArgumentError, match="max_blocks"):
        RouterService(policy=Last(), max_blocks=-1)
    left = set(threading.enumerate()) - before
    assert [thread.name for thread in left if thread.name == "kvflash-policy"] == []


def test_a_push_router_closes_beside_a_call_to_its_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    is_called, may_end = threading.Event(), threading.Event()
    ended: list[bool] = []

    class Slow(Last):
        def finished(self, ended_request: PolicyEnded) -> None:
            is_called.set()
            ended.append(may_end.wait(5))

    async def work() -> None:
        async with Stage() as stage:
            await stage.worker()
            router = await stage.router(1, router_mode=Slow())
            _ = [item async for item in await router.generate(TOKENS)]
            await asyncio.to_thread(is_called.wait)
            closing = asyncio.create_task(router.aclose())
            await asyncio.sleep(0)
            may_end.set()
            await closing
            assert ended == [True]

    # Longer than the call.
    monkeypatch.setattr(policies, "CLOSE_S_MAX", 60.0)
    run(work())


def test_a_push_router_sends_where_its_policy_says() -> None:
    async def work() -> None:
        policy = Last()
        async with Stage() as stage:
            for _ in range(3):
                await stage.worker()
            router = await stage.router(3, router_mode=policy, shadow_policies=("kv",))
            last = max(stage.workers)
            for n in range(3):
                stream = await router.generate(
                    [n, *TOKENS], "m", {"max_tokens": 4}, user="u", session_key="k"
                )
                assert stream.worker_id == last
                async for _ in stream:
                    pass
            assert is_idle(router)
            assert router.policy == "python:Last"
            counts = {one[:3]: one[3] for one in router.policy_samples()}
            assert counts["shadow_decisions_total", "policy", "kv"] == 3
            assert router.report_metrics(last, running_requests=2)

            def told() -> list[Any]:
                return [one for one in policy.told if one[1] == "u"]

            until(lambda: len(told()) == 9, "what it is told")
            assert told()[:3] == [
                ("choose", "u", [0, *TOKENS], 3),
                ("routed", "u", last),
                ("finished", "u", last, (17, 8, 4)),
            ]

    run(work())
