"""Names looked up at a real name server, and their effects on the frontend's core."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import dns.asyncresolver
import dns.name
import dns.resolver
import pytest

from dns_server import GARBAGE, SERVFAIL, SILENCE, DnsServer
from kvflash.errors import ConflictError, NotFoundError, OverloadedError
from kvflash.roster.dns_spec import DnsWorkers
from kvflash.roster.dns_watch import DnsWatch
from kvflash.roster.shared import shared_id
from service import until

NAME = "engines.test"


class Core:
    """A fleet that notes its workers by their specs, and has room for some of them."""

    def __init__(self) -> None:
        self.workers: dict[str, int] = {}
        self.given = 0
        self.room = 10_000
        # Engines that are registered another way.
        self.others: set[str] = set()
        self.joined: dict[int, int | None] = {}
        self.metrics, self.warnings = "", list[str]()

    def add_worker(self, spec: str) -> int:
        url = spec.partition(",")[0]
        if url in self.others:
            raise ConflictError(f"{url} is already registered as worker 1")
        if len(self.workers) >= self.room:
            raise OverloadedError(f"the limit of {self.room} workers is reached (--max-workers)")
        assert spec not in self.workers
        self.given += 1
        self.workers[spec] = self.given
        return self.given

    def remove_worker(self, instance_id: int) -> None:
        for spec, number in self.workers.items():
            if number == instance_id:
                del self.workers[spec]
                return
        raise NotFoundError(f"no worker {instance_id} is registered")

    def worker_joined(
        self, _component: tuple[str, str], instance_id: int, shared_id: int | None = None
    ) -> None:
        self.joined[instance_id] = shared_id

    def worker_gone(self, instance_id: int) -> None:
        del self.joined[instance_id]

    def show_metrics(self, text: str) -> None:
        self.metrics = text

    def show_warnings(self, warnings: list[str]) -> None:
        self.warnings = warnings

    def lookups(self, outcome: str, record: str = "A") -> int:
        wanted = f'record="{record}",outcome="{outcome}"}} '
        return sum(int(line.split()[-1]) for line in self.metrics.splitlines() if wanted in line)

    def wait(self, *urls: str) -> None:
        until(lambda: sorted(self.workers) == sorted(urls), f"the workers {urls}")


class World:
    """A name server, a core, and the watch between them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.server, self.core = stack.enter_context(DnsServer()), Core()

    def watch(self, *texts: str, is_named: bool = True) -> DnsWatch:
        made = DnsWatch(
            self.core,
            [DnsWorkers.parse(text) for text in texts],
            interval_s=0.1,
            server=("127.0.0.1", self.server.port) if is_named else None,
            replicas=self.core,
            show_metrics=self.core.show_metrics,
            show_warnings=self.core.show_warnings,
        )
        self._stack.callback(made.stop)
        made.start()
        return made


@pytest.fixture
def world() -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack)


def test_workers_come_and_go_with_their_addresses(world: World) -> None:
    world.server.names[NAME] = ["127.0.0.3", "127.0.0.2", "::1"]
    world.watch(f"dns+http://{NAME}:8000,events=tcp://*:5557")
    two, three, six = (
        "http://127.0.0.2:8000,events=tcp://127.0.0.2:5557",
        "http://127.0.0.3:8000,events=tcp://127.0.0.3:5557",
        "http://[::1]:8000,events=tcp://[::1]:5557",
    )
    world.core.wait(two, three, six)
    until(lambda: set(world.core.joined) == set(world.core.workers.values()), "replicas to hear")
    assert world.core.joined[world.core.workers[two]] == shared_id("http://127.0.0.2:8000")
    number = world.core.workers[three]
    world.server.names[NAME] = ["127.0.0.3", "127.0.0.4"]
    four = "http://127.0.0.4:8000,events=tcp://127.0.0.4:5557"
    # IPv6 has no address now, which is believed three lookups later.
    until(lambda: set(world.core.workers) == {three, four, six}, "IPv4 to follow")
    world.core.wait(three, four)
    assert world.core.workers[three] == number
    until(lambda: set(world.core.joined) == set(world.core.workers.values()), "replicas to hear")
    assert f'kvflash_dns_addresses{{name="dns+http://{NAME}:8000"}} 2' in world.core.metrics
    until(lambda: world.core.warnings == [], "the warnings to be over")


@pytest.mark.parametrize("trouble", [SERVFAIL, GARBAGE, SILENCE])
def test_a_failure_changes_nothing_and_is_told_once(
    world: World, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvflash.roster.dns_watch")
    world.server.names[NAME] = ["127.0.0.2", "127.0.0.3"]
    world.watch(f"dns+http://{NAME}:1,ip=4")
    both = ("http://127.0.0.2:1", "http://127.0.0.3:1")
    world.core.wait(*both)
    world.server.trouble[NAME] = trouble
    failures = 4 if trouble == SERVFAIL else 1
    until(lambda: world.core.lookups("failed") >= failures, "lookups to fail")
    world.core.wait(*both)
    (warning,) = world.core.warnings
    assert warning.startswith(f"dns+http://{NAME}:1: the lookup (A) fails: ")
    assert warning.endswith("; the 2 known addresses stay in use")
    if trouble == SILENCE:
        assert "did not answer within 3 s" in warning
    del world.server.trouble[NAME]
    until(lambda: world.core.warnings == [], "the failure to be over")
    assert [record.message.split(" after ")[0] for record in caplog.records] == [
        warning,
        f"dns+http://{NAME}:1: lookups are answered again",
    ]


def test_a_record_that_fails_holds_up_no_other(world: World) -> None:
    """Some name servers never answer questions for AAAA."""
    world.server.trouble[NAME, "AAAA"] = SILENCE
    world.server.names[NAME] = ["127.0.0.2"]
    world.watch(f"dns+http://{NAME}:1")
    world.core.wait("http://127.0.0.2:1")
    world.server.names[NAME] = ["127.0.0.3"]
    world.core.wait("http://127.0.0.3:1")
    until(lambda: world.core.lookups("failed", "AAAA") == 1, "the lookup to fail")
    assert "the lookup (AAAA) fails" in world.core.warnings[0]
    assert world.core.lookups("failed", "A") == 0


@pytest.mark.parametrize("nothing", [[], None], ids=["no addresses", "NXDOMAIN"])
def test_nothing_is_believed_when_it_came_three_times_in_a_row(
    world: World, nothing: list[str] | None, caplog: pytest.LogCaptureFixture
) -> None:
    world.server.names[NAME] = ["127.0.0.2"]
    world.watch(f"dns+http://{NAME}:1,ip=4")
    world.core.wait("http://127.0.0.2:1")
    label = f"dns+http://{NAME}:1"
    world.server.once[NAME] = [nothing, nothing, ["127.0.0.2"], nothing, nothing]
    until(lambda: world.core.lookups("empty") == 4, "empty answers")
    until(lambda: world.core.warnings == [], "an answer")
    # It was never taken away: it has its first number.
    assert world.core.workers == {"http://127.0.0.2:1": 1}
    world.server.once[NAME] = [nothing] * 3
    world.server.names[NAME] = ["127.0.0.2", "127.0.0.3"]
    world.core.wait("http://127.0.0.2:1", "http://127.0.0.3:1")
    assert world.core.given == 3
    until(lambda: world.core.warnings == [], "the warnings to be over")
    del world.server.names[NAME]
    until(lambda: not world.core.workers, "the workers to go")
    world.server.wait_lookups(NAME)
    assert world.core.warnings == [f"{label}: the name has no address"]
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert said.count(f"{label}: the name has no address") == 2


def test_answers_that_do_not_fit_come_over_tcp(world: World) -> None:
    addresses = [f"127.1.{n // 250}.{n % 250 + 1}" for n in range(2_000)]
    world.server.names[NAME] = addresses
    world.server.is_truncating = True
    world.watch(f"dns+http://{NAME}:1")
    world.core.wait(*(f"http://{address}:1" for address in addresses))
    assert world.server.asked[NAME, "A", "tcp"] >= 1


def test_more_addresses_than_the_limit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvflash.roster.dns_answers.ADDRESSES_MAX", 2)
    world.server.names[NAME] = ["127.0.0.10", "127.0.0.4", "127.0.0.9"]
    world.watch(f"dns+http://{NAME}:1")
    world.core.wait("http://127.0.0.4:1", "http://127.0.0.9:1")
    (warning,) = world.core.warnings
    assert "it has 3 addresses, and the first 2 in order are used" in warning
    world.server.names[NAME] = ["127.0.0.10", "127.0.0.9"]
    world.core.wait("http://127.0.0.9:1", "http://127.0.0.10:1")
    until(lambda: world.core.warnings == [], "the warnings to be over")


def test_an_address_of_two_names_is_one_worker_as_long_as_one_has_it(world: World) -> None:
    names = world.server.names
    names["one.test"], names["two.test"] = ["127.0.0.2"], ["127.0.0.2", "127.0.0.3"]
    world.watch("dns+http://one.test:1,events=tcp://*:2", "dns+http://two.test:1,ip=4")
    first, second = "http://127.0.0.2:1,events=tcp://127.0.0.2:2", "http://127.0.0.2:1"
    world.core.wait(first, "http://127.0.0.3:1")
    # The other name stands for it without events: it is another worker then.
    names["one.test"] = ["127.0.0.4"]
    world.core.wait("http://127.0.0.4:1,events=tcp://127.0.0.4:2", second, "http://127.0.0.3:1")
    names["two.test"] = ["127.0.0.3"]
    world.core.wait("http://127.0.0.4:1,events=tcp://127.0.0.4:2", "http://127.0.0.3:1")


def test_what_the_core_does_not_take_is_tried_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvflash.roster.dns_fleet")
    world.core.room = 1
    world.core.others.add("http://127.0.0.2:1")
    world.server.names[NAME] = ["127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5"]
    world.watch(f"dns+http://{NAME}:1,ip=4")
    until(lambda: world.core.warnings, "the refusal to be told")
    lookups = world.core.lookups("answered")
    until(lambda: world.core.lookups("answered") >= lookups + 2, "more lookups")
    # One that is a worker already is no trouble.
    assert world.core.warnings == [
        "2 engines found by DNS are not used, such as http://127.0.0.4:1: the limit of 1 workers "
        "is "
        "reached (--max-workers)"
    ]
    told = [record.message for record in caplog.records if "are not added" in record.message]
    assert len(told) == 1, told
    world.core.room, world.core.others = 10, set()
    world.core.wait(*(f"http://127.0.0.{n}:1" for n in (2, 3, 4, 5)))
    until(lambda: world.core.warnings == [], "the warnings to be over")


def test_a_worker_that_was_removed_by_hand_stays_away_until_its_address_left(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.server.names[NAME] = ["127.0.0.2", "127.0.0.3"]
    world.watch(f"dns+http://{NAME}:1,ip=4")
    world.core.wait("http://127.0.0.2:1", "http://127.0.0.3:1")
    world.core.remove_worker(world.core.workers["http://127.0.0.3:1"])
    lookups = world.core.lookups("answered")
    until(lambda: world.core.lookups("answered") >= lookups + 2, "more lookups")
    world.core.wait("http://127.0.0.2:1")
    world.server.names[NAME] = ["127.0.0.2"]
    world.server.wait_lookups(NAME)
    world.server.names[NAME] = ["127.0.0.2", "127.0.0.3"]
    world.core.wait("http://127.0.0.2:1", "http://127.0.0.3:1")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_search_domains_complete_a_name(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a Pod's resolv.conf says: ``ndots:5`` and the domains of its namespace."""
    make = dns.asyncresolver.Resolver

    def as_in_a_pod(*args: bool, **more: bool) -> dns.asyncresolver.Resolver:
        resolver = make(*args, configure=False, **more)
        resolver.search = [dns.name.from_text(f"{each}cluster.local") for each in ("svc.", "")]
        resolver.ndots = 5
        return resolver

    monkeypatch.setattr(dns.asyncresolver, "Resolver", as_in_a_pod)
    world.server.names["engines.default.svc.cluster.local"] = ["127.0.0.2"]
    world.watch("dns+http://engines.default.svc:1,ip=4")
    world.core.wait("http://127.0.0.2:1")
    assert world.server.lookups("engines.default.svc.svc.cluster.local") >= 1
    assert world.server.lookups("engines.default.svc") == 0


def test_no_name_server_at_all(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The port has no listener."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        monkeypatch.setattr(world.server, "port", silent.getsockname()[1])
        world.watch(f"dns+http://{NAME}:1,ip=4")
        until(lambda: world.core.lookups("failed") >= 1, "the lookup to fail")
    assert world.core.warnings == [
        f"dns+http://{NAME}:1: the lookup (A) fails: 127.0.0.1 did not answer within 3 s; no "
        "address is known"
    ]
    assert world.core.workers == {}


def test_a_machine_that_knows_no_name_server_is_asked_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, is_known = dns.asyncresolver.Resolver, False

    def read() -> dns.asyncresolver.Resolver:
        if not is_known:
            raise dns.resolver.NoResolverConfiguration("cannot open /etc/resolv.conf")
        resolver = make(configure=False)
        resolver.nameservers, resolver.port = ["127.0.0.1"], world.server.port
        return resolver

    monkeypatch.setattr(dns.asyncresolver, "Resolver", read)
    world.server.names[NAME] = ["127.0.0.2"]
    world.watch(f"dns+http://{NAME}:1,ip=4", is_named=False)
    until(lambda: world.core.lookups("failed") >= 1, "the lookup to fail")
    assert "fails: cannot open /etc/resolv.conf; no address is known" in world.core.warnings[0]
    is_known = True
    world.core.wait("http://127.0.0.2:1")
