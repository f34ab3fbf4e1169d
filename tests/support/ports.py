"""Ports of servers that tests start: free, and nobody else's a moment later.

A port that the kernel gives is one of those it gives to every connection, so another may have it
before the server does. These are below them (32768 at Linux), and each xdist worker has its own.
"""

from __future__ import annotations

import os
import random
import socket
from contextlib import ExitStack

__all__ = ["free_port", "free_ports"]

_FIRST, _SHARE = 10_000, 1_000
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 10
_START = _FIRST + _WORKER * _SHARE
_next = random.randrange(_SHARE)


def free_ports(count: int) -> range:
    """So many consecutive ports without a listener."""
    global _next  # noqa: PLW0603
    for _ in range(_SHARE):
        if _next + count > _SHARE:
            _next = 0
        ports = range(_START + _next, _START + _next + count)
        with ExitStack() as held:
            try:
                for port in ports:
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                _next += 1
                continue
            _next += count
            return ports
    raise AssertionError(f"no {count} free ports in a row from {_START} on")


def free_port() -> int:
    """A port without a listener."""
    return free_ports(1)[0]
