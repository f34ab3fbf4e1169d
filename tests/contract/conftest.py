"""Every discovery and every request plane, for tests that hold for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvflash.discovery import Discovery, FileDiscovery, MemoryDiscovery, open_discovery
from servers import EtcdServer, NatsServer
from service import Http
from support_runtime import WorkerProcess

# Must hold for all of them; implementations within one process are left out of tests that kill
# processes.
DISCOVERIES = ("mem", "file", "etcd")
SHARED_DISCOVERIES = ("file", "etcd")
PLANES = ("tcp", "http", "nats")


@pytest.fixture(params=DISCOVERIES)
def discovery_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=SHARED_DISCOVERIES)
def shared_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=PLANES)
def plane(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# For a file, not for all: an etcd that nobody asks takes 2 % of a processor, until the last test.
@pytest.fixture(scope="module")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One etcd for a file's tests; each has to clear away its keys."""
    with closing(EtcdServer(tmp_path_factory.mktemp("etcd"))) as server:
        yield server


@pytest.fixture
def etcd(etcd_server: EtcdServer) -> Iterator[str]:
    """The address of etcd, empty."""
    yield etcd_server.url
    everything = {"key": "AA==", "range_end": "AA=="}
    http = Http(etcd_server.url)
    http.post("/v3/kv/deleterange", everything)
    http.close()


@pytest.fixture(scope="module")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One broker for a file's tests."""
    with closing(NatsServer(tmp_path_factory.mktemp("nats"))) as server:
        yield server


@pytest.fixture
def opened(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], Discovery]:
    """Open a discovery of a kind; all of a test's share their keys."""

    def make(kind: str) -> Discovery:
        if kind == "mem":
            return MemoryDiscovery()
        if kind == "etcd":
            return open_discovery("etcd", endpoints=request.getfixturevalue("etcd"))
        return FileDiscovery(tmp_path / "discovery")

    return make


@pytest.fixture
def environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Callable[..., dict[str, str]]:
    """Set the environment of a kind of discovery and a plane, here and for processes."""

    def use(kind: str, plane: str = "tcp") -> dict[str, str]:
        settings = {"KVFLASH_DISCOVERY": kind, "KVFLASH_REQUEST_PLANE": plane}
        if kind == "file":
            settings["KVFLASH_DISCOVERY_DIR"] = str(tmp_path / "discovery")
        if kind == "etcd":
            settings["ETCD_ENDPOINTS"] = request.getfixturevalue("etcd")
            settings["KVFLASH_HOST"] = "127.0.0.1"
        if plane == "nats":
            server = request.getfixturevalue("nats_server")
            settings["NATS_SERVER"] = server.url
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        return settings

    return use


@pytest.fixture
def start_worker() -> Iterator[Callable[..., WorkerProcess]]:
    workers: list[WorkerProcess] = []

    def start(env: dict[str, str], **limits: Any) -> WorkerProcess:
        workers.append(WorkerProcess(env, **limits))
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()
