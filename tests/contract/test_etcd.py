"""Tests for etcd only: outages, reconnects, expiring leases."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import aiohttp
import pytest

from kvflash import (
    ClosedError,
    ConfigError,
    DistributedRuntime,
    InvalidArgumentError,
    RuntimeLimits,
    TransportError,
)
from kvflash.discovery import Delete, Put, Synced, etcd, open_discovery
from kvflash.discovery.announcer import Announcer
from servers import EtcdServer
from service import Http
from support_runtime import (
    WorkerProcess,
    client,
    eventually,
    known,
    run,
)
from wire import Wire


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd of the test's own, that it may kill."""
    with closing(EtcdServer(tmp_path)) as server:
        yield server


def test_a_program_that_closes_nothing_ends_without_a_message(
    server: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def program() -> None:
        keys = open_discovery("etcd", endpoints=server.url)
        await keys.put("k/1", b"1")
        assert await anext(keys.watch("k/")) == Put("k/1", b"1")

    asyncio.run(program())
    # aiohttp reports a session that is still open when it is collected.
    gc.collect()
    assert [record.getMessage() for record in caplog.records] == []


def test_a_watch_and_a_lease_go_on_when_etcd_comes_back(
    server: EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvflash.discovery.etcd")

    async def scenario() -> None:
        mine = open_discovery("etcd", endpoints=server.url)
        lease = await mine.lease(30.0)
        await mine.put("k/1", b"1", lease)
        await mine.put("k/2", b"2")
        watch = mine.watch("k/")
        assert [await anext(watch) for _ in range(3)][2] == Synced()
        others = [mine.watch("k/") for _ in range(3)]
        for other in others:
            assert [await anext(other) for _ in range(3)][2] == Synced()
        server.kill()
        with pytest.raises(TransportError, match="etcd can't be reached"):
            await mine.put("k/3", b"3")
        server.start()
        # An unchanged key is not reported again; a changed one is reported once.
        await mine.put("k/3", b"3")
        assert await asyncio.wait_for(anext(watch), 30) == Put("k/3", b"3")
        await mine.delete("k/2")
        assert await asyncio.wait_for(anext(watch), 30) == Delete("k/2")
        assert not lease.lost.is_set()
        for other in others:
            changes = [await asyncio.wait_for(anext(other), 30) for _ in range(2)]
            assert Put("k/3", b"3") in changes
            assert Delete("k/2") in changes
        # One line for all of them when it goes, and one when it is back.
        said = [record.getMessage() for record in caplog.records]
        gone = [line for line in said if f"trying again (ETCD_ENDPOINTS: {server.url})" in line]
        back = [line for line in said if "etcd answers again after" in line]
        assert 0 < len(gone) == len(back) < len(others)
        await mine.close()
        later = open_discovery("etcd", endpoints=server.url)
        assert await later.get_prefix("k/") == {"k/3": b"3"}
        await later.close()

    run(scenario())


@pytest.mark.parametrize(("ends_s", "is_kept"), [(7.0, True), (8.9, True), (30.0, False)])
def test_a_lease_outlives_an_outage_that_is_shorter_than_its_ttl(
    ends_s: float, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In virtual time: etcd is unreachable from 3.2 s on, and the lease has 10 s."""
    now_s, expiry_s, attempts = 0.0, 10.0, list[float]()
    real_sleep = asyncio.sleep

    async def sleep(for_s: float) -> None:
        nonlocal now_s
        now_s += for_s
        await real_sleep(0)

    async def call(_method: str, _body: object) -> dict[str, dict[str, str]]:
        nonlocal expiry_s
        attempts.append(now_s)
        if 3.2 <= now_s < ends_s:
            raise TransportError("etcd can't be reached")
        if now_s < expiry_s:
            expiry_s = now_s + 10.0
        return {"result": {"TTL": "10"} if now_s < expiry_s else {}}

    async def scenario() -> None:
        mine = etcd.EtcdDiscovery("http://127.0.0.1:1")
        monkeypatch.setattr(mine, "_call", call)
        monkeypatch.setattr(asyncio, "sleep", sleep)
        lease = await mine.lease(10.0)
        while now_s < 60.0 and not lease.lost.is_set():
            await real_sleep(0)
        assert lease.lost.is_set() is not is_kept
        for keeping in mine._leases.values():
            keeping.cancel()
        # Few attempts while etcd is away, and three per TTL otherwise.
        assert len(attempts) < 60

    asyncio.run(scenario())


def test_what_etcd_refuses_is_one_outage_beside_what_it_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A role may read one prefix only: the other watch's successes end no outage."""
    monkeypatch.setattr(etcd, "PAUSE_S", (0.0, 0.0))
    reads: list[str] = []

    async def read(prefix: str) -> tuple[dict[str, bytes], int]:
        reads.append(prefix)
        if prefix == "denied/":
            raise ConfigError("permission denied")
        return {}, 1

    async def changes(_prefix: str, _revision: int) -> AsyncIterator[tuple[str, bytes | None]]:
        # The connection was silent for a while: the watch reads again.
        await asyncio.sleep(0)
        raise aiohttp.SocketTimeoutError
        yield

    async def scenario() -> None:
        mine = etcd.EtcdDiscovery("http://127.0.0.1:1")
        shown: list[str] = []
        monkeypatch.setattr(mine, "show_outage", shown.append)
        monkeypatch.setattr(mine, "_read", read)
        monkeypatch.setattr(mine, "_changes", changes)
        watches = [mine.watch(prefix) for prefix in ("denied/", "read/")]

        async def are_read() -> bool:
            return reads.count("denied/") > 3 and reads.count("read/") > 3

        await eventually(are_read, "several attempts of both")
        assert len(caplog.records) == 1
        assert all(shown)
        await watches[0].aclose()

        async def is_over() -> bool:
            return not shown[-1]

        await eventually(is_over, "the outage to end")
        await mine.close()

    run(scenario())


def test_many_calls_at_once_leave_a_dead_address(server: EtcdServer) -> None:
    async def scenario() -> None:
        mine = open_discovery("etcd", endpoints=f"http://127.0.0.1:1,{server.url}")
        found = await asyncio.gather(*(mine.get_prefix("k/") for _ in range(2)))
        assert found == [{}, {}]
        await mine.close()

    run(scenario())


def test_a_watch_tells_the_difference_when_it_missed_changes(server: EtcdServer) -> None:
    async def scenario() -> None:
        mine = open_discovery("etcd", endpoints=server.url)
        await mine.put("k/gone", b"")
        await mine.put("k/stays", b"")
        watch = mine.watch("k/")
        assert [await anext(watch) for _ in range(3)][2] == Synced()
        # The watch's connection breaks, and what it would go on from is forgotten by etcd.
        server.kill()
        server.start()
        http = Http(server.url)
        http.post("/v3/kv/deleterange", {"key": "ay9nb25l"})
        answer = http.post("/v3/kv/put", {"key": "ay9uZXc=", "value": "MQ=="})
        http.post("/v3/kv/compaction", {"revision": answer["header"]["revision"]})
        http.close()
        events = {await asyncio.wait_for(anext(watch), 30) for _ in range(2)}
        assert events == {Delete("k/gone"), Put("k/new", b"1")}
        await mine.close()

    run(scenario())


def test_a_runtime_announces_itself_again_when_its_lease_was_lost(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETCD_ENDPOINTS", server.url)
    monkeypatch.setenv("KVFLASH_HOST", "127.0.0.1")

    async def scenario() -> None:
        limits = RuntimeLimits(lease_ttl_s=2.0)
        async with DistributedRuntime("etcd", limits=limits) as runtime:
            await runtime.announce("v1/instances/t/c/e/x", {"a": 1})
            watch = runtime.discovery.watch("v1/")
            assert isinstance(await anext(watch), Put)
            assert await anext(watch) == Synced()
            http = Http(server.url)
            http.post("/v3/lease/revoke", {"ID": runtime.instance_id})
            http.close()
            assert await asyncio.wait_for(anext(watch), 30) == Delete("v1/instances/t/c/e/x")
            again = await asyncio.wait_for(anext(watch), 30)
            assert again == Put("v1/instances/t/c/e/x", b'{"a": 1}')

    run(scenario())


def test_what_somebody_deletes_is_announced_again(server: EtcdServer) -> None:
    """The lease lives on; a key that its process deleted stays away."""

    async def scenario() -> None:
        mine = open_discovery("etcd", endpoints=server.url)
        announcer = Announcer(mine, "the worker", ttl_s=6.0)
        for at in range(3):
            await announcer.announce(f"k/{at}", b"1")
        await announcer.withdraw("k/2")
        other = open_discovery("etcd", endpoints=server.url)
        watch = other.watch("k/")
        seen = [await anext(watch) for _ in range(3)]
        assert seen == [Put("k/0", b"1"), Put("k/1", b"1"), Synced()]
        for key in ("k/1", "k/0"):
            assert await other.delete(key)
            assert await anext(watch) == Delete(key)
            assert await asyncio.wait_for(anext(watch), 30) == Put(key, b"1")
        assert not (await announcer.lease()).lost.is_set()
        await announcer.close()
        await mine.close()
        await other.close()

    run(scenario())


@pytest.mark.parametrize("is_own", [True, False])
def test_a_lease_that_etcd_grants_during_the_shutdown_is_revoked_quietly(
    is_own: bool,
    server: EtcdServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def handle(_request: object) -> AsyncIterator[int]:
        yield 1

    async def scenario() -> None:
        with closing(Wire(server.url.removeprefix("http://"))) as wire:
            url = f"http://{wire.address}"
            monkeypatch.setenv("ETCD_ENDPOINTS", url)
            discovery = open_discovery("etcd", endpoints=url)
            runtime = DistributedRuntime("etcd" if is_own else discovery, host="127.0.0.1")
            wire.freeze()
            serving = asyncio.create_task(runtime.endpoint("t.w.run").serve_endpoint(handle))

            async def is_asked() -> bool:
                return wire.accepted > 0

            await eventually(is_asked, "the request for a lease")
            leaving = asyncio.create_task(runtime.close())
            asyncio.get_running_loop().call_later(0.1, wire.thaw)
            await leaving
            assert await serving is None
            await discovery.close()

    run(scenario())
    with closing(Http(server.url)) as http:
        assert http.post("/v3/lease/leases", {}).get("leases", []) == []
        everything = {"key": "AA==", "range_end": "AA=="}
        assert "kvs" not in http.post("/v3/kv/range", everything)
    assert caplog.records == []


def test_a_lease_that_etcd_ended_is_named(server: EtcdServer) -> None:
    async def scenario() -> None:
        mine = open_discovery("etcd", endpoints=server.url)
        lease = await mine.lease(30.0)
        http = Http(server.url)
        http.post("/v3/lease/revoke", {"ID": lease.id})
        http.close()
        for call in (mine.put("k", b"", lease), mine.create("k", b"", lease)):
            with pytest.raises(InvalidArgumentError, match=f"lease {lease.id} has expired"):
                await call
        await mine.close()

    run(scenario())


def test_a_stopped_process_is_gone_when_its_time_is_over_and_back_when_it_goes_on(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFLASH_DISCOVERY", "etcd")
    monkeypatch.setenv("ETCD_ENDPOINTS", server.url)
    monkeypatch.setenv("KVFLASH_HOST", "127.0.0.1")
    worker = WorkerProcess(dict(os.environ), lease_ttl_s=2.0)

    async def scenario() -> None:
        async with DistributedRuntime() as runtime:
            await known(runtime, worker)
            os.kill(worker.popen.pid, 19)
            await known(runtime)
            os.kill(worker.popen.pid, 18)
            asked = await known(runtime, worker)
            assert [item async for item in await asked.generate({"do": "echo"})]

    try:
        run(scenario())
    finally:
        worker.close()


def test_the_next_address_is_asked_when_one_fails(server: EtcdServer) -> None:
    async def scenario() -> None:
        both = f"http://127.0.0.1:9, {server.url.removeprefix('http://')}"
        mine = open_discovery("etcd", endpoints=both)
        await mine.put("k", b"v")
        watch = mine.watch("k")
        assert await asyncio.wait_for(anext(watch), 30) == Put("k", b"v")
        await mine.close()

    run(scenario())


@asynccontextmanager
async def in_place_of_etcd(reply: Callable[[str], tuple[int, bytes]]) -> AsyncIterator[str]:
    """The URL of a server that answers a path with this status and body."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        status, body = reply((await reader.readuntil(b"\r\n\r\n")).decode().split()[1])
        head = f"HTTP/1.1 {status} .\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("addresses", [1, 2])
def test_a_call_that_is_under_way_at_the_close_says_so(addresses: int) -> None:
    async def scenario() -> None:
        is_asked, is_over = asyncio.Event(), asyncio.Event()

        async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            is_asked.set()
            await is_over.wait()
            writer.close()

        async with await asyncio.start_server(hold, "127.0.0.1", 0) as silent:
            url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
            mine = open_discovery("etcd", endpoints=",".join([url] * addresses))
            call = asyncio.create_task(mine.get_prefix("k"))
            await is_asked.wait()
            await mine.close()
            with pytest.raises(ClosedError, match="the discovery is closed"):
                await asyncio.wait_for(call, 30)
            is_over.set()

    run(scenario())


def test_a_lease_that_is_granted_at_the_close_is_revoked() -> None:
    async def scenario() -> None:
        revoked = 0

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal revoked
            path = (await reader.readuntil(b"\r\n\r\n")).split()[1]
            if path.endswith(b"/lease/revoke"):
                revoked += 1
                if revoked == 1:
                    await mine.lease(2.0)
            writer.write(b"HTTP/1.1 200 .\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as there:
            url = f"http://127.0.0.1:{there.sockets[0].getsockname()[1]}"
            mine = open_discovery("etcd", endpoints=url)
            await mine.lease(2.0)
            await mine.close()
            assert revoked == 2

    run(scenario())


def test_a_lease_that_is_granted_after_the_close_is_not_renewed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with in_place_of_etcd(lambda _path: (200, b"{}")) as url:
            mine = open_discovery("etcd", endpoints=url)
            call = mine._call

            async def close_after(method: str, body: dict[str, object]) -> object:
                answer = await call(method, body)
                await mine.close()
                return answer

            monkeypatch.setattr(mine, "_call", close_after)
            with pytest.raises(ClosedError):
                await mine.lease(2.0)
            assert not mine._leases

    run(scenario())


@pytest.mark.parametrize(
    "bad",
    [b'{"result": null}', b'{"error": {"grpc_code": null}}', b'{"error": {"grpc_code": "x"}}'],
)
def test_a_lease_is_renewed_after_an_answer_that_is_none_of_etcds(bad: bytes) -> None:
    async def scenario() -> None:
        renewals, renewed = [bad], asyncio.Event()

        def reply(path: str) -> tuple[int, bytes]:
            if not path.endswith("/lease/keepalive"):
                return 200, b"{}"
            if renewals:
                return 200, renewals.pop()
            renewed.set()
            return 200, b'{"result": {"TTL": "2"}}'

        async with in_place_of_etcd(reply) as url:
            mine = open_discovery("etcd", endpoints=url)
            lease = await mine.lease(2.0)
            await asyncio.wait_for(renewed.wait(), 30)
            assert not lease.lost.is_set()
            await mine.close()

    run(scenario())


@pytest.mark.parametrize("line", [b"[]", b'{"result": null}', b"no JSON"])
def test_a_watch_survives_a_line_that_is_none_of_etcds(line: bytes) -> None:
    looks = 0

    def reply(path: str) -> tuple[int, bytes]:
        nonlocal looks
        if path.endswith("/watch"):
            return 200, line + b"\n"
        looks += 1
        pair = {"key": b64encode(b"k").decode(), "value": b64encode(b"%d" % looks).decode()}
        return 200, json.dumps({"header": {"revision": str(looks)}, "kvs": [pair]}).encode()

    async def scenario() -> None:
        async with in_place_of_etcd(reply) as url:
            mine = open_discovery("etcd", endpoints=url)
            watch = mine.watch("k")
            heard = [await asyncio.wait_for(anext(watch), 30) for _ in range(3)]
            assert heard == [Put("k", b"1"), Synced(), Put("k", b"2")]
            await mine.close()

    run(scenario())


@pytest.mark.parametrize(
    ("status", "body"), [(503, b""), (200, b""), (200, b"[]"), (404, b'{"code": "no_route"}')]
)
def test_whatever_answers_in_its_place_is_not_reached(status: int, body: bytes) -> None:
    """As a load balancer does before an etcd that restarts."""

    async def scenario() -> None:
        async with in_place_of_etcd(lambda _: (status, body)) as url:
            mine = open_discovery("etcd", endpoints=url)
            said = f"{url}: status {status}, and the answer is not from etcd"
            with pytest.raises(TransportError, match=said):
                await mine.get_prefix("k")
            await mine.close()

    run(scenario())


def test_etcd_that_is_not_there_is_said_and_found_later(server: EtcdServer) -> None:
    async def scenario() -> None:
        server.kill()
        limits = RuntimeLimits(lease_ttl_s=2.0)
        discovery = open_discovery("etcd", endpoints=server.url)
        async with DistributedRuntime(discovery, host="127.0.0.1", limits=limits) as runtime:
            asked = client(runtime)
            waiting = asyncio.create_task(asked.wait_for_instances())
            with pytest.raises(TransportError, match=r"etcd can't be reached: http://127\.0\.0\.1"):
                await runtime.announce("k", 1)
            server.start()

            async def is_there() -> bool:
                try:
                    await runtime.announce("k", 1)
                except TransportError:
                    return False
                return True

            await eventually(is_there, "etcd")
            key = f"v1/instances/t/workers/run/{runtime.instance_id}"
            await runtime.announce(key, {"instance_id": runtime.instance_id, "transport": {}})
            assert await waiting == [runtime.instance_id]
        await discovery.close()
        with pytest.raises(ConfigError, match="ETCD_ENDPOINTS must name an address"):
            open_discovery("etcd", endpoints=" , ")

    run(scenario())


def test_a_login_is_asked_for_used_and_renewed(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    http = Http(server.url)
    http.post("/v3/auth/user/add", {"name": "root", "password": "secret"})
    http.post("/v3/auth/role/add", {"name": "root"})
    http.post("/v3/auth/user/grant", {"user": "root", "role": "root"})
    http.post("/v3/auth/enable", {})
    http.close()

    async def scenario() -> None:
        stranger = open_discovery("etcd", endpoints=server.url)
        with pytest.raises(
            ConfigError, match=r"without a login \(.*name is empty\): set ETCD_AUTH"
        ):
            await stranger.put("k/1", b"1")
        await stranger.close()
        monkeypatch.setenv("ETCD_AUTH_USERNAME", "root")
        monkeypatch.setenv("ETCD_AUTH_PASSWORD", "wrong")
        wrong = open_discovery("etcd", endpoints=server.url)
        with pytest.raises(ConfigError, match="refuses the login of 'root'"):
            await wrong.put("k/1", b"1")
        await wrong.close()
        monkeypatch.setenv("ETCD_AUTH_PASSWORD", "secret")
        mine = open_discovery("etcd", endpoints=server.url)
        lease = await mine.lease(10.0)
        await mine.put("k/1", b"1", lease)
        watch = mine.watch("k/")
        assert [await anext(watch), await anext(watch)] == [Put("k/1", b"1"), Synced()]
        # Tokens are in etcd's memory: a new process knows none of them.
        server.kill()
        server.start()
        await mine.put("k/2", b"2")
        assert await asyncio.wait_for(anext(watch), 30) == Put("k/2", b"2")
        twin = mine.twin()
        assert await twin.get_prefix("k/") == {"k/1": b"1", "k/2": b"2"}
        await twin.close()
        await mine.close()

    run(scenario())


def test_a_watch_whose_way_is_cut_without_a_word_goes_another_one(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half open: whatever is between takes everything and carries nothing."""
    monkeypatch.setattr(etcd, "SILENCE_S_MAX", 0.5)
    wire = Wire(f"127.0.0.1:{server.port}")

    async def scenario() -> None:
        mine = open_discovery("etcd", endpoints=f"http://{wire.address},{server.url}")
        other = open_discovery("etcd", endpoints=server.url)
        await other.put("k/1", b"1")
        watch = mine.watch("k/")
        assert [await anext(watch) for _ in range(2)] == [Put("k/1", b"1"), Synced()]
        wire.freeze()
        await other.put("k/1", b"2")
        # An unchanged key is not reported again.
        assert await asyncio.wait_for(anext(watch), 30) == Put("k/1", b"2")
        await other.delete("k/1")
        assert await asyncio.wait_for(anext(watch), 30) == Delete("k/1")
        await mine.close()
        await other.close()

    try:
        run(scenario())
    finally:
        wire.close()
