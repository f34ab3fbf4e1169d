"""Fixtures: real services that end with the test."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from service import Http, Process

# A process that is ended by a test has no balancer in front; tests of the lame duck give the flag.
os.environ.setdefault("KVFLASH_LAME_DUCK_TIMEOUT", "0")

# What is imported and collected stays to the end: to look through it for garbage takes a second.
gc.disable()

# Those that take longest go first, so that none of them runs alone at the end.
LONGEST = [
    "test_faults_clock",
    "test_faults",
    "test_processes",
    "test_state_servers",
    "test_zmq_receiver",
    "test_router_openapi",
    "test_router_sync",
    "test_demo",
    "test_faults_prefill",
    "test_faults_discovery",
    "test_examples",
    "test_plane",
    "test_stream",
    "test_launchers",
    "test_cluster_events",
    "test_manuals",
    "test_indexer_openapi",
    "test_frontend_bad_input",
    "test_frontend_openapi",
    "test_frontend_token_failures",
    "test_attacks",
    "test_dns_watch",
    "test_router_state",
    "test_tls",
    "test_push_router_state",
    "test_mocker_process",
    "test_cluster_rejoin",
    "test_replica_sync_servers",
    "test_chaos",
    "test_pages",
    "test_etcd",
    "test_gateway",
    "test_words",
    "test_hash",
    "test_promises",
    "test_frontend_discovery",
    "test_frontend_busy",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files; tests of one file stay in theirs."""
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(ranks)))


def pytest_collection_finish() -> None:
    """Look for garbage in what tests leave, and in nothing older."""
    gc.freeze()
    gc.enable()


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
