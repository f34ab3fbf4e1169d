"""The wall clock leaps while requests run: nothing ends because of it, and nothing stays."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from service import until
from support_cluster import Cluster, body, hold, overlap, wait_known
from support_faults import BODY, STREAM, Site, end_of
from support_frontend import Call
from wallclock import WallClock

LEAPS_S = (3_600, -3_600)
PREDICTED = 'kvflash_index_predicted_blocks{model="tiny",tenant="default"}'
ACTIVE = "kvflash_worker_active_requests"
# Of at least a block, each another one.
LONG = "word " * 40


@pytest.fixture(scope="module")
def shared_clock(tmp_path_factory: pytest.TempPathFactory) -> WallClock:
    """One for all tests: their processes are forked from one that was started with it."""
    return WallClock(tmp_path_factory.mktemp("clock"))


@pytest.fixture
def clock(shared_clock: WallClock) -> WallClock:
    shared_clock.leap(0)
    return shared_clock


@pytest.fixture
def site(tmp_path: Path, clock: WallClock) -> Iterator[Callable[..., Site]]:
    sites: list[Site] = []

    def make(kind: str, *flags: str, discovery: str = "file") -> Site:
        sites.append(Site(kind, tmp_path, *flags, env=clock.env, discovery=discovery))
        return sites[-1]

    yield make
    for made in sites:
        made.__exit__(None, None, None)


def say(prompt: str, base: dict[str, Any] = BODY) -> dict[str, Any]:
    return {**base, "messages": [{"role": "user", "content": prompt}]}


def has_leapt(one: Site, seconds: float) -> None:
    """The frontend itself sees the other time."""
    created = json.loads(one.call(BODY).finish().body)["created"]
    assert abs(created - time.time() - seconds) < 60


def booked(one: Site) -> float:
    return sum(v for k, v in one.frontend.metrics().items() if k.startswith(ACTIVE))


@pytest.mark.parametrize("seconds", LEAPS_S)
@pytest.mark.parametrize("kind", ["tcp", "http", "nats"])
def test_requests_workers_and_load_outlive_a_leap(
    site: Callable[..., Site], clock: WallClock, kind: str, seconds: int
) -> None:
    """Predictions of two seconds expire at the leap; predictions with a longer lifetime do not."""
    one = site(kind, "--router-mode", "kv", "--no-kv-events", "--router-ttl", "2")
    one.start("anna", "bert")
    for name in ("anna", "bert"):
        one.tell(name, "hold")
    calls = [one.call(say(f"{number} {LONG}", STREAM)) for number in range(4)]
    # Looked for before anything else: they do not live long.
    until(lambda: one.frontend.metric(PREDICTED) > 0, "predictions")
    for call in calls:
        call.read_event()
    clock.leap(seconds)
    until(lambda: one.frontend.metric(PREDICTED) == 0, "the predictions to run out")
    assert booked(one) == 4
    assert one.frontend.metric("kvflash_load_expired_total") == 0
    workers = one.frontend.workers()
    assert [workers[one.ids[name]]["healthy"] for name in ("anna", "bert")] == [True, True]
    for name in ("anna", "bert"):
        one.untell(name, "hold")
    assert {end_of(call) for call in calls} <= {"anna", "bert"}
    has_leapt(one, seconds)
    # New workers are found, and dead ones are missed.
    one.start("carl")
    one.processes["carl"].kill()
    one.wait_left("carl")
    clock.leap(0)
    one.processes["bert"].kill()
    one.wait_left("bert")
    assert one.ask(STREAM) == "anna"
    one.check_settled()


@pytest.mark.parametrize("seconds", LEAPS_S)
def test_load_and_predictions_outlive_a_leap(
    site: Callable[..., Site], clock: WallClock, seconds: int
) -> None:
    """A request that runs is load even beyond the time after which leaked load is freed."""
    flags = ("--router-mode", "kv", "--no-kv-events", "--active-request-expiry", "1")
    one = site("tcp", *flags)
    one.start("anna", "bert")
    one.tell("anna", "hold")
    call = one.call(one.pin("anna", say(f"first {LONG}", STREAM)))
    call.read_event()
    predicted = one.frontend.metric(PREDICTED)
    assert predicted > 0
    clock.leap(seconds)
    begun = time.monotonic()
    # The other worker answers all the while, and by its bookings others are looked at.
    until(lambda: one.ask(one.pin("bert", STREAM)) and time.monotonic() - begun > 2, "two seconds")
    assert one.frontend.metric("kvflash_load_expired_total") == 0
    assert one.running("anna") == 1
    assert one.frontend.metric(PREDICTED) >= predicted
    one.untell("anna", "hold")
    assert end_of(call) == "anna"
    has_leapt(one, seconds)
    one.check_settled()


@pytest.mark.parametrize("seconds", LEAPS_S)
def test_engines_of_openai_outlive_a_leap(
    site: Callable[..., Site], clock: WallClock, seconds: int
) -> None:
    one = site("openai", "--stream-idle-timeout", "2", "--first-byte-timeout", "60")
    one.start("anna", "bert")
    one.tell("anna", "mute")
    calls = [one.call(one.pin("anna", STREAM)) for _ in range(2)]
    one.wait_running("anna", 2)
    clock.leap(seconds)
    # Timeouts go on as they did: silence amid a stream ends it, none before it does.
    one.tell("bert", "hold")
    assert one.ask(one.pin("bert", STREAM)) == "broken"
    one.untell("bert", "hold")
    assert one.running("anna") == 2
    one.untell("anna", "mute")
    assert [end_of(call) for call in calls] == ["anna"] * 2
    # Bert was passed over from the broken answer until the next check of its health.
    one.frontend.wait_healthy(*one.ids.values())
    assert one.ask(one.pin("bert", STREAM)) == "bert"
    one.check_settled()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("seconds", LEAPS_S)
def test_leases_in_etcd_outlive_a_leap_and_still_end(
    site: Callable[..., Site], clock: WallClock, seconds: int
) -> None:
    one = site("tcp", discovery="etcd")
    one.start("anna", "bert")
    clock.leap(seconds)
    has_leapt(one, seconds)
    one.processes["bert"].kill()
    # As long as a lease lives, anna's own has to be renewed in that time.
    one.wait_left("bert")
    assert one.ask(STREAM) == "anna"
    one.processes["anna"].close()
    assert "lease" not in "".join(one.processes["anna"].errors)
    one.wait_left("anna")


@pytest.mark.parametrize("seconds", LEAPS_S)
def test_what_events_told_outlives_a_leap(tmp_path: Path, clock: WallClock, seconds: int) -> None:
    env = {
        "KVFLASH_DISCOVERY": "file",
        "KVFLASH_DISCOVERY_DIR": str(tmp_path / "discovery"),
        **clock.env,
    }
    with Cluster(env) as cluster:
        workers = cluster.workers()
        # A request or two make a worker busy.
        frontend = cluster.frontend(workers, "--active-decode-blocks-threshold", "0.0005")

        def busy() -> float:
            metrics = frontend.metrics()
            return sum(v for k, v in metrics.items() if k.startswith("kvflash_worker_busy"))

        assert overlap(frontend, 1) == 0
        wait_known(frontend, 1)
        stream: Call = hold(frontend, 2)
        until(lambda: busy() == 1, "one to be busy")
        clock.leap(seconds)
        assert 8 in frontend.overlaps(body(1)).values()
        overlap(frontend, 3)
        wait_known(frontend, 3)
        assert 8 in frontend.overlaps(body(1)).values()
        metrics = frontend.metrics()
        for kind in ("gap_batches", "restarts", "undecodable", "malformed"):
            assert metrics[f'kvflash_events{{kind="{kind}"}}'] == 0, kind
        until(lambda: busy() == 1, "one and no other to be busy")
        assert frontend.metric("kvflash_load_expired_total") == 0
        stream.hang_up()
        until(lambda: busy() == 0, "none to be busy")
        frontend.wait_idle()
