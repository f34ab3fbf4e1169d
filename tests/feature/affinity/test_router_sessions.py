"""Sessions that stay on their worker: the standalone router, and routers in the own process."""

from __future__ import annotations

import json

import pytest

from kvflash import ConfigError, InvalidArgumentError, KvRouterConfig
from kvflash._core import RouterCore
from kvflash.frontend.args import parse_args as frontend_args
from kvflash.router import RouterService
from kvflash.router import parse_args as router_args
from service import Http
from support_found import join
from support_push_router import Stage, run
from support_router import IDS, add, ask

FLAG = "--router-session-affinity-ttl-secs"


@pytest.fixture
def http():
    """A router of three workers that remembers sessions for a minute, round robin else."""
    settings = {"router_mode": "round-robin", "router_session_affinity_ttl_secs": 60}
    service = RouterService(host="127.0.0.1", port=0, threads=2, seed=1, **settings).start()
    http = Http(service.url)
    for worker_id in (1, 2, 3):
        add(http, worker_id)
    yield http
    http.close()
    service.stop()


def reserve(http, name, **fields):
    answer = ask(http, "/reserve", request_id=name, **fields)
    http.post("/free", {"request_id": name})
    return answer


def test_reservations_of_a_session_stay_together(http):
    home = reserve(http, "a-0", session_key="a")
    assert home["reason"] == "turn"
    for n in range(1, 5):
        again = reserve(http, f"a-{n}", session_key="a")
        assert (again["worker_id"], again["reason"]) == (home["worker_id"], "session_affinity")
        reserve(http, f"other-{n}")
    (why,) = http.get("/why/a-4")["decisions"]
    assert (why["reason"], why["policy"]) == ("session_affinity", "round_robin")
    # Only looking begins nothing, and moves nothing.
    for path in ("/select", "/explain"):
        assert ask(http, path, session_key="b")["reason"] == "turn"
        assert ask(http, path, session_key="a")["reason"] == "session_affinity"
    barred = [one for one in (1, 2, 3) if one != home["worker_id"]]
    moved = reserve(http, "moved", session_key="a", allowed_worker_ids=barred)
    assert moved["worker_id"] in barred and moved["reason"] == "turn"
    back = reserve(http, "back", session_key="a")
    assert (back["worker_id"], back["reason"]) == (moved["worker_id"], "session_affinity")
    lines = http.get("/metrics").decode().splitlines()
    for line in (
        'kvflash_session_affinity_requests_total{outcome="begun"} 1',
        'kvflash_session_affinity_requests_total{outcome="kept"} 5',
        'kvflash_session_affinity_requests_total{outcome="moved"} 1',
        "kvflash_session_affinity_sessions 1",
        'kvflash_session_affinity_forgotten_total{cause="evicted"} 0',
    ):
        assert [one for one in lines if one.startswith(line)], line


def test_a_key_that_is_too_long_is_refused(http):
    answer = ask(http, session_key="k" * 257, expect=400)
    assert "256" in json.dumps(answer)


def test_routers_of_ones_own_process_remember_too():
    async def work():
        config = {"router_mode": "round-robin", "router_session_affinity_ttl_secs": 60}
        async with Stage() as stage:
            for _ in range(3):
                await stage.worker()
            router = await stage.router(3, **config)
            found = set()
            for _ in range(5):
                answer = await router.best_worker(IDS, request_id="r", session_key="a")
                found.add(answer[0])
                await router.free("r")
            assert len(found) == 1

    run(work())


@pytest.mark.parametrize("value", [0, 31_536_001])
def test_a_time_out_of_range_is_refused(value, capsys):
    for parse in (frontend_args, router_args):
        with pytest.raises(SystemExit):
            parse([FLAG, str(value)])
        error = capsys.readouterr().err
        assert f"{FLAG}: must be a whole number in 1..=31536000, got '{value}'" in error
    name = "router_session_affinity_ttl_secs must be a whole number in 1..=31536000"
    with pytest.raises(ConfigError, match=f"{name}, got {value}"):
        KvRouterConfig(router_session_affinity_ttl_secs=value)
    with pytest.raises(ConfigError, match=rf"{FLAG} must be in 1\.\.=31536000, got {value}"):
        RouterCore(block_size=4, session_affinity_ttl_s=value)


def test_the_flag_its_variables_and_none(monkeypatch):
    for parse in (frontend_args, router_args):
        assert parse([]).router_session_affinity_ttl_secs is None
        assert parse([FLAG, "31536000"]).router_session_affinity_ttl_secs == 31_536_000
        for prefix in ("KVFLASH", "DYN"):
            with monkeypatch.context() as context:
                context.setenv(f"{prefix}_ROUTER_SESSION_AFFINITY_TTL_SECS", "7")
                assert parse([]).router_session_affinity_ttl_secs == 7
                assert parse([FLAG, "None"]).router_session_affinity_ttl_secs is None


def test_a_core_checks_the_key():
    core = RouterCore(block_size=4, seed=1, session_affinity_ttl_s=60)
    join(core, [1])
    with pytest.raises(InvalidArgumentError, match="at most 256 bytes, got 257"):
        core.query(IDS, {"session_key": "k" * 257})
