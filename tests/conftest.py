"""Fixtures: real services that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from service import Http, Process


@pytest.fixture
def run() -> Iterator[Callable[..., Process]]:
    """Start processes that end with the test."""
    processes: list[Process] = []

    def start(module: str, *args: str, env: dict[str, str] | None = None) -> Process:
        process = Process(module, *args, env=env)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.close()


@pytest.fixture
def client() -> Iterator[Callable[[str], Http]]:
    """HTTP clients that are closed with the test."""
    clients: list[Http] = []

    def make(url: str) -> Http:
        clients.append(Http(url))
        return clients[-1]

    yield make
    for made in clients:
        made.close()


@pytest.fixture
def zmq_socket() -> Iterator[Callable[[int], zmq.Socket[Any]]]:
    """Make ZMQ sockets that are closed with the test."""
    context: zmq.Context[Any] = zmq.Context()
    sockets: list[zmq.Socket[Any]] = []

    def make(kind: int) -> zmq.Socket[Any]:
        sockets.append(context.socket(kind))
        return sockets[-1]

    yield make
    for made in sockets:
        made.close(0)
    context.term()
