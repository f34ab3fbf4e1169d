"""Sockets towards an engine, as the event transport wants them."""

from __future__ import annotations

import errno
import resource
from typing import Any

import zmq

from kvflash.transport.options import ZmqOptions

__all__ = [
    "dial",
    "dialable",
    "explain",
    "is_exhausted",
    "most_streams",
    "netloc",
    "open_replay",
    "open_stream",
]

_MONITORED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_CONNECT_DELAYED
)


def open_stream(
    context: zmq.Context[zmq.Socket[bytes]], options: ZmqOptions
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """A SUB socket for everything, not connected yet, and its monitor.

    Raises:
        zmq.ZMQError: The process can have no more sockets.
    """
    socket = context.socket(zmq.SUB)
    try:
        socket.setsockopt(zmq.RCVHWM, options.receive_queue_messages)
        socket.setsockopt(zmq.MAXMSGSIZE, options.message_bytes_max)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, options.reconnect_ms_max)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 5_000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15_000)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        return socket, socket.get_monitor_socket(_MONITORED)
    except zmq.ZMQError:
        socket.close(0)
        raise


def open_replay(
    context: zmq.Context[zmq.Socket[bytes]], options: ZmqOptions, endpoint: str, first: int
) -> zmq.Socket[bytes]:
    """A DEALER socket that has asked ``endpoint`` for the batches from ``first`` on.

    Raises:
        zmq.ZMQError: The process can have no more sockets, or the endpoint is none.
    """
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, options.receive_queue_messages)
        socket.setsockopt(zmq.MAXMSGSIZE, options.message_bytes_max)
        dial(socket, endpoint)
        socket.send_multipart([b"", first.to_bytes(8, "big")], zmq.NOBLOCK)
    except zmq.ZMQError:
        socket.close(0)
        raise
    return socket


def dial(socket: zmq.Socket[Any], endpoint: str) -> None:
    """Connect to an engine's socket.

    Raises:
        zmq.ZMQError: The endpoint is none.
    """
    # libzmq takes IPv6 addresses, and never reaches them without this; where a name is given it
    # would look for IPv6 first.
    socket.setsockopt(zmq.IPV6, int("://[" in endpoint))
    socket.connect(dialable(endpoint))


def netloc(socket: zmq.Socket[Any], host: str) -> str:
    """``host`` as it stands in the address that ``socket`` is about to bind."""
    is_ipv6 = ":" in host
    socket.setsockopt(zmq.IPV6, int(is_ipv6))
    return f"[{host}]" if is_ipv6 else host


def dialable(endpoint: str) -> str:
    """The address to connect to, where the engine gave the one that it binds."""
    return endpoint.replace("tcp://*:", "tcp://127.0.0.1:", 1)


def most_streams() -> int:
    """How many streams this process may have, of three open files each; others need some too."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        limit = 1 << 20
    return max(limit // 4, limit // 3 - 1_000)


def is_exhausted(error: zmq.ZMQError) -> bool:
    """Whether the process has as many open files as it may; some may come free."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def explain(error: zmq.ZMQError) -> str:
    """The error in words, with what to do about it where that is known."""
    if not is_exhausted(error):
        return str(error)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"{error}: the process may have {limit}; raise that (ulimit -n, LimitNOFILE of systemd)"
