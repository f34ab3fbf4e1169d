"""Every discovery and every request plane, for tests that hold for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support_runtime import WorkerProcess

from kvflash.discovery import Discovery, FileDiscovery, MemoryDiscovery

# What must be true of them all; those that only live within one process are left out where
# processes are to die.
DISCOVERIES = ("mem", "file")
SHARED_DISCOVERIES = ("file",)
PLANES = ("tcp", "http")


@pytest.fixture(params=DISCOVERIES)
def discovery_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=SHARED_DISCOVERIES)
def shared_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=PLANES)
def plane(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[str], Discovery]:
    """Open a discovery of a kind; all of a test's share their keys."""

    def make(kind: str) -> Discovery:
        if kind == "mem":
            return MemoryDiscovery()
        assert kind == "file"
        return FileDiscovery(tmp_path / "discovery")

    return make


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """Set the environment of a kind of discovery and a plane, here and for processes."""

    def use(kind: str, plane: str = "tcp") -> dict[str, str]:
        settings = {"KVFLASH_DISCOVERY": kind, "KVFLASH_REQUEST_PLANE": plane}
        if kind == "file":
            settings["KVFLASH_DISCOVERY_DIR"] = str(tmp_path / "discovery")
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
