"""A frontend with engines at the addresses of a name: real processes, a real name server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from dns_server import SERVFAIL, DnsServer
from service import needs_ipv6, until
from support_cluster import REMOTE, active_blocks, hold
from support_frontend import COMPLETIONS, Call, FakeEngine, FrontendProcess, Mocker, Typist, ask

BLOCK = 16
NAME = "engines.test"


class MockerAt(Mocker):
    """A mocker on an address of its own, with the ports of another one where that is given."""

    def __init__(self, host: str, like: Mocker | None = None) -> None:
        self._like = like
        super().__init__("--host", host, "--speedup-ratio", "10")

    def _start(self, *ports: str) -> None:
        if self._like is None:
            super()._start(*ports)
        else:
            http, events, replay = self._like.ports
            super()._start("--port", http, "--zmq-events-port", events, "--zmq-replay-port", replay)

    @property
    def ports(self) -> tuple[str, str, str]:
        """Of HTTP, events and replay."""
        http, events, replay = (
            str(urlsplit(self.workers[0][key]).port) for key in ("url", "events", "replay")
        )
        return http, events, replay


@pytest.fixture(scope="module")
def server() -> Iterator[DnsServer]:
    with DnsServer() as made:
        yield made


@pytest.fixture(scope="module")
def mockers() -> Iterator[dict[str, MockerAt]]:
    """Two engines with the same ports, by address."""
    with MockerAt("127.0.0.2") as two, MockerAt("127.0.0.3", like=two) as three:
        yield {"127.0.0.2": two, "127.0.0.3": three}


def spec(mocker: MockerAt, name: str) -> str:
    http, events, replay = mocker.ports
    return f"dns+http://{name}:{http},events=tcp://*:{events},replay=tcp://*:{replay}"


def dns_frontend(server: DnsServer, *flags: str, **more: Any) -> FrontendProcess:
    names = ("--worker-dns-server", server.address, "--worker-dns-interval-secs", "0.1")
    return FrontendProcess(*names, *flags, **more)


def by_address(frontend: FrontendProcess) -> dict[str, int]:
    """Numbers of the workers that are there, by address."""
    return {
        str(urlsplit(worker["url"]).hostname): number
        for number, worker in frontend.workers().items()
    }


def wait_engines(frontend: FrontendProcess, *addresses: str) -> dict[str, int]:
    """Until exactly these are workers, and healthy; their numbers."""
    until(lambda: set(by_address(frontend)) == set(addresses), f"the engines {addresses}")
    numbers = by_address(frontend)
    frontend.wait_healthy(*numbers.values())
    return numbers


def body(family: int, **more: Any) -> dict[str, Any]:
    prompt = [family * 1_000 + at for at in range(4 * BLOCK + 1)]
    return {"model": "m", "prompt": prompt, "max_tokens": 1, **more}


def health(frontend: FrontendProcess) -> tuple[int, dict[str, Any]]:
    status, said, _ = frontend.http.call("GET", "/health")
    return status, said


def test_engines_of_a_name_are_workers_with_all_that_these_have(
    server: DnsServer, mockers: dict[str, MockerAt]
) -> None:
    server.names["whole.test"] = list(mockers)
    worker = spec(mockers["127.0.0.2"], "whole.test")
    # Overlap comes from events alone.
    with dns_frontend(server, "--worker", worker, "--router-predicted-ttl-secs", "0") as frontend:
        numbers = wait_engines(frontend, *mockers)
        status, told = health(frontend)
        assert (status, told["status"]) == (200, "healthy")
        until(lambda: health(frontend)[1]["warnings"] == [], "no trouble")
        assert frontend.http.call("GET", "/ready")[0] == 200
        for worker in frontend.workers().values():
            (listener,) = worker["listeners"]
            host = urlsplit(worker["url"]).hostname
            assert urlsplit(listener["endpoint"]).hostname == host
            assert urlsplit(listener["replay_endpoint"]).hostname == host
        answers = [ask(frontend.url, COMPLETIONS, body(family)) for family in range(8)]
        assert {answer.worker for answer in answers} == set(numbers.values())
        # Its events tell what it holds, and the request that has it goes there.
        holder = answers[0].worker
        until(lambda: frontend.overlaps(body(0))[holder] == 4, "the events to be applied")
        again = ask(frontend.url, COMPLETIONS, body(0))
        assert (again.worker, again.overlap_blocks, again.cached_tokens) == (holder, 4, 4 * BLOCK)
        why = frontend.http.get(f"/why/{again.headers['x-request-id']}")
        assert why["decisions"][0]["worker"] == f"{holder}:0"
        assert frontend.metric(f'kvflash_worker_healthy{{worker="{holder}"}}') == 1

        # It leaves: the other one serves. It comes back: it holds what it held, by its replay.
        address = next(one for one, number in numbers.items() if number == holder)
        server.names["whole.test"] = [one for one in mockers if one != address]
        wait_engines(frontend, *server.names["whole.test"])
        assert ask(frontend.url, COMPLETIONS, body(0)).worker != holder
        server.names["whole.test"] = list(mockers)
        number = wait_engines(frontend, *mockers)[address]
        assert number not in numbers.values()
        until(lambda: frontend.overlaps(body(0))[number] == 4, "the replay to be applied")


def test_a_stream_goes_on_when_its_engine_leaves(server: DnsServer) -> None:
    typist = Typist()
    with FakeEngine("m", typist, host="127.0.0.4") as engine:
        server.names["stream.test"] = ["127.0.0.4"]
        worker = f"dns+http://stream.test:{engine.port}"
        with dns_frontend(server, "--worker", worker) as frontend:
            wait_engines(frontend, "127.0.0.4")
            call = Call(frontend.url, COMPLETIONS, body(1, stream=True))
            typist.type(1)
            assert b'"x"' in call.read_event()
            server.names["stream.test"] = ["127.0.0.5"]
            until(lambda: set(by_address(frontend)) == {"127.0.0.5"}, "the engine to leave")
            typist.type(2)
            assert b'"x"' in call.read_event()
            assert b'"x"' in call.read_event()
            typist.end.set()
            assert call.finish().body.endswith(b"data: [DONE]\n\n")
            frontend.wait_idle()
            assert frontend.metric("kvflash_streams_broken_total") == 0


def test_failures_keep_engines_and_nothing_is_believed_at_last(
    server: DnsServer, mockers: dict[str, MockerAt]
) -> None:
    server.names[NAME] = list(mockers)
    worker = spec(mockers["127.0.0.2"], NAME)
    label = worker.partition(",")[0]
    with dns_frontend(server, "--worker", worker, "--log-level", "info") as frontend:
        numbers = wait_engines(frontend, *mockers)
        server.trouble[NAME] = SERVFAIL
        failed = f'kvflash_dns_lookups_total{{name="{label}",record="A",outcome="failed"}}'
        until(lambda: frontend.metric(failed) >= 3, "lookups to fail")
        status, said = health(frontend)
        assert (status, said["status"]) == (200, "healthy")
        assert "the lookup (A) fails: " in said["warnings"][0]
        assert said["warnings"][0].endswith("; the 2 known addresses stay in use")
        assert by_address(frontend) == numbers
        assert ask(frontend.url, COMPLETIONS, body(1)).status == 200
        assert frontend.metric(f'kvflash_dns_addresses{{name="{label}"}}') == 2

        del server.trouble[NAME]
        until(lambda: health(frontend)[1]["warnings"] == [], "the failure to be over")
        del server.names[NAME]
        until(lambda: not frontend.workers(), "the engines to go")
        status, said = health(frontend)
        assert (status, said["status"]) == (503, "unavailable")
        assert said["warnings"] == [f"{label}: the name has no address"]
        assert frontend.http.call("GET", "/ready")[0] == 503
        refused = ask(frontend.url, COMPLETIONS, body(1))
        assert refused.status == 503
        assert f"waiting for addresses of {label}" in refused.json["error"]["message"]

        server.names[NAME] = ["127.0.0.3"]
        wait_engines(frontend, "127.0.0.3")
        assert ask(frontend.url, COMPLETIONS, body(1)).status == 200
        said = "".join(frontend.process.errors)
        assert said.count("lookups are answered again after") == 1
        assert said.count(f"{label}: the name has no address") == 1
        assert said.count("the lookup (") == 1


def test_nothing_at_the_start_and_engines_that_are_named_twice(
    server: DnsServer, mockers: dict[str, MockerAt]
) -> None:
    two = mockers["127.0.0.2"]
    flags = ("--worker", two.spec(), "--worker", spec(two, "first.test"))
    with dns_frontend(server, "--worker", spec(two, "empty.test")) as alone:
        status, said = health(alone)
        until(lambda: "no address" in str(health(alone)), "the first answer")
        assert (status, said["workers"]) == (503, 0)
        assert alone.http.call("GET", "/ready")[0] == 503

        server.names["first.test"] = list(mockers)
        server.names["second.test"] = ["127.0.0.3"]
        both = (*flags, "--decode-worker", spec(two, "second.test"))
        with dns_frontend(server, *both) as frontend:
            numbers = wait_engines(frontend, *mockers)
            assert numbers["127.0.0.2"] == 1
            server.names["first.test"] = ["127.0.0.3"]
            server.wait_lookups("first.test")
            # It was named by its address: no name takes it away.
            assert by_address(frontend) == numbers
            server.names["first.test"] = ["127.0.0.2"]
            server.wait_lookups("first.test")
            assert by_address(frontend) == numbers
            until(lambda: health(frontend)[1]["warnings"] == [], "no trouble")

        server.names["empty.test"] = ["127.0.0.3"]
        wait_engines(alone, "127.0.0.3")
        assert alone.http.call("GET", "/ready")[0] == 200


def test_replicas_share_requests_of_engines_that_they_number_otherwise(
    server: DnsServer, mockers: dict[str, MockerAt], tmp_path: Path
) -> None:
    two, three = mockers.values()
    server.names["shared.test"] = ["127.0.0.2"]
    flags = ("--worker", spec(two, "shared.test"), "--router-replica-sync", "--discovery", "file")
    env = {"KVFLASH_DISCOVERY_DIR": str(tmp_path / "keys")}
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(dns_frontend(server, *flags, env=env))
        wait_engines(one, "127.0.0.2")
        other = stack.enter_context(dns_frontend(server, *flags, "--worker", three.spec(), env=env))
        assert wait_engines(other, *mockers)["127.0.0.2"] != by_address(one)["127.0.0.2"]
        stream = hold(one, 1)
        until(lambda: other.metric(REMOTE) == 1, "the other's request")
        assert active_blocks(other) == active_blocks(one) > 0
        stream.hang_up()
        until(lambda: active_blocks(other) == 0, "the load to be gone")


@needs_ipv6
def test_engines_at_ipv6_addresses(server: DnsServer) -> None:
    with MockerAt("::1") as six:
        server.names["six.test"] = ["::1", "127.0.0.9"]
        worker = spec(six, "six.test") + ",ip=6"
        with dns_frontend(server, "--worker", worker) as frontend:
            number = wait_engines(frontend, "::1")["::1"]
            assert ask(frontend.url, COMPLETIONS, body(1)).worker == number
            until(lambda: frontend.overlaps(body(1))[number] == 4, "the events to be applied")
