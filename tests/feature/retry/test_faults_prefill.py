"""Prefill workers of every kind that die or go silent: the decode worker does it, once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from service import until
from support_faults import BODY, IMPATIENT, KINDS, STREAM, Site, end_of


# The http plane differs from tcp in nothing that a prefill has a part in.
@pytest.fixture(params=[kind for kind in KINDS if kind != "http"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """A decode worker and a prefill worker."""
    with Site(request.param, tmp_path, *IMPATIENT) as one:
        one.start("dora")
        one.start("pia", role="prefill")
        assert one.ask(STREAM) == "dora"
        assert prefills(one) == {"handed_off": 1}
        yield one


def prefills(one: Site) -> dict[str, float]:
    name = 'kvflash_prefills_total{outcome="'
    metrics = one.frontend.metrics()
    return {k[len(name) : -2]: v for k, v in metrics.items() if k.startswith(name) and v}


def booked(one: Site, name: str) -> float:
    return one.frontend.metric(f'kvflash_worker_active_requests{{worker="{one.ids[name]}:0"}}')


def test_killed_while_it_prefills(site: Site) -> None:
    site.tell("pia", "hold")
    with site.asking(2, STREAM) as streams, site.asking(2, BODY) as wholes:
        site.wait_running("pia", 4)
        site.processes["pia"].kill()
        assert [future.result() for future in (*streams, *wholes)] == ["dora"] * 4
    assert site.ask(BODY) == "dora"
    assert prefills(site)["failed"] >= 4
    site.check_settled()


def test_killed_between_prefill_and_decode(site: Site) -> None:
    """After the handover the decode worker decides: the request ends once, as it says."""
    site.tell("dora", "mute")
    calls = [site.call(body) for body in (STREAM, STREAM)]
    site.wait_running("dora", 2)
    site.wait_running("pia", 0)
    site.processes["pia"].kill()
    site.untell("dora", "mute")
    assert [end_of(call) for call in calls] == ["dora"] * 2
    assert prefills(site) == {"handed_off": 3}
    site.check_settled()


def test_decode_killed_after_the_prefill(site: Site) -> None:
    """Before its first byte another decode worker takes what was handed on; amid it, an error."""
    site.start("emil")
    site.tell("dora", "hold")
    site.tell("emil", "hold")
    calls = [site.call(STREAM) for _ in range(4)]
    assert [call.response.status for call in calls] == [200] * 4
    assert site.running("dora") == 2
    site.processes["dora"].kill()
    site.untell("emil", "hold")
    assert sorted(end_of(call) for call in calls) == ["broken"] * 2 + ["emil"] * 2
    assert booked(site, "pia") == 0
    site.check_settled()


@pytest.mark.parametrize("how", ["stopped", "cut"])
def test_half_open_while_it_prefills(site: Site, how: str) -> None:
    site.tell("pia", "hold")
    with site.asking(2, STREAM) as streams, site.asking(2, BODY) as wholes:
        site.wait_running("pia", 4)
        site.silence("pia", how)
        assert [future.result() for future in (*streams, *wholes)] == ["dora"] * 4
    site.frontend.wait_unhealthy(site.ids["pia"])
    # Not asked again while it is in doubt.
    failed = prefills(site)["failed"]
    assert [site.ask(STREAM) for _ in range(3)] == ["dora"] * 3
    assert prefills(site)["failed"] == failed
    assert booked(site, "pia") == 0
    site.wake("pia", how)
    site.untell("pia", "hold")
    site.frontend.wait_healthy(site.ids["pia"])
    handed = prefills(site)["handed_off"]
    assert site.ask(STREAM) == "dora"
    assert prefills(site)["handed_off"] == handed + 1
    site.check_settled()


def test_clients_that_leave_while_it_prefills(site: Site) -> None:
    site.tell("pia", "hold")
    calls = [site.call(body) for body in (STREAM, BODY)]
    site.wait_running("pia", 2)
    until(lambda: booked(site, "pia") == 2, "the prefills to be booked")
    for call in calls:
        site.hang_up(call)
    site.check_settled()
