"""Workers that come and go while requests run, and a host that disappears silently."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from service import SUPPORT, Process, until
from support_faults import BODY, IMPATIENT, STREAM, Site, end_of

# `make soak` plays more.
FLAPS = int(os.environ.get("KVFLASH_FLAPS", "6"))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    sites: list[Site] = []

    def make(kind: str, *flags: str, discovery: str = "file") -> Site:
        sites.append(Site(kind, tmp_path, *flags, discovery=discovery))
        return sites[-1]

    yield make
    for made in sites:
        made.__exit__(None, None, None)


class Load:
    """Requests from some clients, one after the other, until it is ended."""

    def __init__(self, one: Site, clients: int = 3) -> None:
        self._site = one
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(clients)
        self._futures = [self._pool.submit(self._run) for _ in range(clients)]

    def _run(self) -> Counter[str]:
        ends: Counter[str] = Counter()
        while not self._over.is_set():
            ends[self._site.ask(STREAM)] += 1
            ends[self._site.ask(BODY)] += 1
        return ends

    def finish(self) -> Counter[str]:
        """How they ended."""
        self._over.set()
        ends: Counter[str] = Counter()
        for future in self._futures:
            ends += future.result()
        self._pool.shutdown()
        return ends


@pytest.mark.timeout(120 + 10 * FLAPS)
@pytest.mark.parametrize(
    ("plane", "discovery"), [("tcp", "file"), ("tcp", "etcd"), ("http", "file"), ("nats", "file")]
)
def test_registrations_that_flap_lose_no_request(
    site: Callable[..., Site], plane: str, discovery: str
) -> None:
    one = site(plane, discovery=discovery)
    one.start("anna")
    load = Load(one)
    flapping = Process(
        str(SUPPORT / "double.py"), "flapping", "flora", "decode", plane, str(FLAPS), env=one.env
    )
    try:
        assert flapping.popen.wait(60 + 10 * FLAPS) == 0, "".join(flapping.errors)
        served = flapping.ready()["served"]
    finally:
        flapping.close()
        ends = load.finish()
    # It was not passed over: most of the times it came, requests did.
    assert served > FLAPS / 2
    assert set(ends) == {"anna", "flora"}
    until(lambda: set(one.frontend.workers()) == {one.ids["anna"]}, "the last one to be gone")
    assert one.ask(STREAM) == "anna"
    one.check_settled()


def test_engines_that_are_added_and_removed_lose_no_request(site: Callable[..., Site]) -> None:
    one = site("openai")
    one.start("anna", "flora")
    load = Load(one)
    url = f"http://{one.wires['flora'].address}"
    for _ in range(FLAPS):
        one.frontend.remove(one.ids["flora"])
        one.ids["flora"] = one.frontend.add(url)
        sent = one.ids["flora"]
        until(lambda sent=sent: one.frontend.workers()[sent]["requests"], "a request to it")
    ends = load.finish()
    assert set(ends) == {"anna", "flora"}
    one.check_settled()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ["stopped", "cut"])
def test_a_worker_whose_host_is_gone_leaves_with_its_lease(
    site: Callable[..., Site], how: str
) -> None:
    one = site("nats", *IMPATIENT, discovery="etcd")
    one.start("anna", "bert")
    one.tell("anna", "hold")
    calls = [one.call(one.pin("anna", STREAM)) for _ in range(3)]
    for call in calls:
        call.read_event()
    one.silence("anna", how)
    assert [end_of(call) for call in calls] == ["broken"] * 3
    gone = one.ids["anna"]
    while gone in one.frontend.workers():
        assert one.ask(STREAM) == "bert"
    assert one.frontend.metric("kvflash_streams_broken_total") == 3
    # It comes back under the same name, once its lease is known to be lost.
    one.untell("anna", "hold")
    one.wake("anna", how)
    one.frontend.wait_healthy(gone)
    assert one.ask(one.pin("anna", STREAM)) == "anna"
    one.check_settled()
