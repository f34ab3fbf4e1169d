"""Sockets for engines, configured for the event transport."""

import errno
import resource
from typing import Any

import zmq

from kvflash.transport.options import ZmqOptions

_MONITORED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_CONNECT_DELAYED
)


def open_stream(
    context: zmq.Context[zmq.Socket[bytes]], options: ZmqOptions
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """A SUB socket for all topics, not connected yet, and its monitor."""
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
    """A DEALER socket that has requested the batches from ``first`` on from ``endpoint``."""
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, options.replay_queue_messages)
        socket.setsockopt(zmq.MAXMSGSIZE, options.message_bytes_max)
        dial(socket, endpoint)
        socket.send_multipart([b"", first.to_bytes(8, "big")], zmq.NOBLOCK)
    except zmq.ZMQError:
        socket.close(0)
        raise
    return socket


def dial(socket: zmq.Socket[Any], endpoint: str) -> None:
    """Connect to an engine's socket; an invalid endpoint is a ZMQError."""
    # With a domain but no authenticator, libzmq refuses peers older than ZMTP 3.0 and accepts all
    # others. Otherwise it takes a web server's answer for ZMTP 1.0, delivers it as messages, and
    # aborts the process where one of them ends early (`!_more` in its fq.cpp).
    socket.setsockopt(zmq.ZAP_DOMAIN, b"kvflash")
    # libzmq accepts IPv6 addresses, but never reaches them without this option; for a name it would
    # look up IPv6 first.
    socket.setsockopt(zmq.IPV6, int("://[" in endpoint))
    socket.connect(dialable(endpoint))


def netloc(socket: zmq.Socket[Any], host: str) -> str:
    """``host`` as written in the address that ``socket`` is about to bind."""
    is_ipv6 = ":" in host
    socket.setsockopt(zmq.IPV6, int(is_ipv6))
    return f"[{host}]" if is_ipv6 else host


def dialable(endpoint: str) -> str:
    """The address to connect to, where the engine gave its bind address."""
    return endpoint.replace("tcp://*:", "tcp://127.0.0.1:", 1)


def explain(error: zmq.ZMQError) -> str:
    """The error's message, with advice on the fix if one is known."""
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return str(error)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"{error}: the process may have {limit}; raise that (ulimit -n, LimitNOFILE of systemd)"
