"""Workers of every kind that die, stop or are cut off: one end for each request, no load left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from service import until
from support_faults import BODY, IMPATIENT, KINDS, STREAM, Site, end_of

HALF_OPEN = ("stopped", "cut")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    sites: list[Site] = []

    def make(kind: str, *flags: str, env: dict[str, str] | None = None) -> Site:
        sites.append(Site(kind, tmp_path, *flags, env=env))
        return sites[-1]

    yield make
    for made in sites:
        made.__exit__(None, None, None)


@pytest.mark.parametrize("kind", KINDS)
def test_killed_before_its_first_byte_another_takes_over(
    site: Callable[..., Site], kind: str
) -> None:
    one = site(kind, *IMPATIENT[2:])
    one.start("anna", "bert")
    one.tell("anna", "mute")
    with one.asking(4, STREAM) as streams, one.asking(4, BODY) as wholes:
        one.wait_running("anna", 4)
        one.processes["anna"].kill()
        ends = [future.result() for future in (*streams, *wholes)]
    assert ends == ["bert"] * 8
    assert one.failed_attempts() == 4
    assert one.ask(STREAM) == "bert"
    one.check_settled()


@pytest.mark.parametrize("kind", KINDS)
def test_killed_amid_its_answers_they_end_with_an_error(
    site: Callable[..., Site], kind: str
) -> None:
    one = site(kind, *IMPATIENT[2:])
    one.start("anna", "bert")
    one.tell("anna", "hold")
    calls = [one.call(one.pin("anna", STREAM)) for _ in range(4)]
    for call in calls:
        call.read_event()
    one.processes["anna"].kill()
    assert [end_of(call) for call in calls] == ["broken"] * 4
    assert one.frontend.metric("kvflash_streams_broken_total") == 4
    assert [one.ask(BODY) for _ in range(3)] == ["bert"] * 3
    one.check_settled()


@pytest.mark.parametrize("how", HALF_OPEN)
@pytest.mark.parametrize("kind", KINDS)
def test_half_open_before_its_first_byte_another_takes_over(
    site: Callable[..., Site], kind: str, how: str
) -> None:
    one = site(kind, *IMPATIENT)
    one.start("anna", "bert")
    one.tell("anna", "mute")
    with one.asking(2, STREAM) as streams, one.asking(2, BODY) as wholes:
        one.wait_running("anna", 2)
        one.silence("anna", how)
        assert [future.result() for future in (*streams, *wholes)] == ["bert"] * 4
    check_left_alone_then_back(one, how, "mute")


@pytest.mark.parametrize("how", HALF_OPEN)
@pytest.mark.parametrize("kind", KINDS)
def test_half_open_amid_its_answers_they_end_with_an_error(
    site: Callable[..., Site], kind: str, how: str
) -> None:
    one = site(kind, *IMPATIENT)
    one.start("anna", "bert")
    one.tell("anna", "hold")
    calls = [one.call(one.pin("anna", STREAM)) for _ in range(3)]
    for call in calls:
        call.read_event()
    one.silence("anna", how)
    assert [end_of(call) for call in calls] == ["broken"] * 3
    check_left_alone_then_back(one, how, "hold")


def check_left_alone_then_back(one: Site, how: str, word: str) -> None:
    """Requests go elsewhere while a peer is half open, and to it again afterwards."""
    one.frontend.wait_unhealthy(one.ids["anna"])
    before = one.failed_attempts()
    assert [one.ask(body) for body in (STREAM, BODY) * 3] == ["bert"] * 6
    assert one.failed_attempts() == before
    one.wake("anna", how)
    one.untell("anna", word)
    one.frontend.wait_healthy(one.ids["anna"])
    assert one.ask(one.pin("anna", STREAM)) == "anna"
    one.check_settled()


@pytest.mark.parametrize("kind", KINDS)
def test_slow_workers_are_waited_for(site: Callable[..., Site], kind: str) -> None:
    """An answer takes longer than either timeout, none of its items does."""
    one = site(kind, "--first-byte-timeout", "2", "--stream-idle-timeout", "2")
    one.start("anna", "bert")
    one.tell("anna", "drip")
    with one.asking(8, STREAM) as ends:
        assert sorted(end.result() for end in ends) == ["anna"] * 4 + ["bert"] * 4
    assert one.failed_attempts() == 0
    one.check_settled()


@pytest.mark.parametrize("kind", KINDS)
def test_clients_that_leave_end_what_they_asked_for(site: Callable[..., Site], kind: str) -> None:
    one = site(kind)
    one.start("anna")
    one.tell("anna", "mute")
    calls = [one.call(body) for body in (STREAM, BODY) * 2]
    one.wait_running("anna", 4)
    for call in calls:
        one.hang_up(call)
    one.check_settled()
    one.untell("anna", "mute")
    one.tell("anna", "hold")
    calls = [one.call(STREAM) for _ in range(3)]
    for call in calls:
        call.read_event()
        call.hang_up()
    one.check_settled()
    until(
        lambda: one.frontend.metric("kvflash_clients_gone_total") == 7,
        "those that left to be counted, before their answers and within",
    )
    one.untell("anna", "hold")
    assert one.ask(STREAM) == "anna"
    one.check_settled()


@pytest.mark.parametrize("kind", KINDS)
def test_clients_that_leave_the_queue_are_not_served(site: Callable[..., Site], kind: str) -> None:
    one = site(kind, "--fairness", "vtc-fair", "--fairness-max-running", "1")
    one.start("anna")
    one.tell("anna", "mute")
    first = one.call(STREAM)
    one.wait_running("anna", 1)
    gone = [one.call(STREAM) for _ in range(3)]
    stays = one.call(STREAM)
    waiting = 'kvflash_turns_waiting{model="tiny"}'
    until(lambda: one.frontend.metric(waiting) == 4, "four to wait")
    for call in gone:
        one.hang_up(call)
    until(lambda: one.frontend.metric(waiting) == 1, "one to wait")
    one.untell("anna", "mute")
    assert (end_of(first), end_of(stays)) == ("anna", "anna")
    assert one.frontend.workers()[one.ids["anna"]]["requests"] == 2
    one.check_settled()
