"""Sockets for engines, configured for the event transport."""

import errno
import resource
from typing import Any

import zmq

from kvflash.address import netloc

#: Largest frame in bytes; a publisher of a larger one is disconnected.
MESSAGE_BYTES_MAX = 16 * 1024 * 1024
# Messages that may wait in one socket.
_RECEIVE_QUEUE_MESSAGES = 4_096
# Messages of a replay that may wait. Engines send all that they keep at once, 10,000 batches by
# vLLM's defaults, and drop what finds no room.
_REPLAY_QUEUE_MESSAGES = 131_072
# Longest pause between two attempts to connect.
_RECONNECT_MS_MAX = 2_000
# Pause between two heartbeats; a connection that answers none of three is dead.
_HEARTBEAT_MS = 5_000
_MONITORED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_CONNECT_DELAYED
)


def subscribe(
    socket: zmq.Socket[Any], *, queue_messages: int = _RECEIVE_QUEUE_MESSAGES, topic: bytes = b""
) -> None:
    """Prepare a SUB socket; a connection that is silently dead is closed, and opened again."""
    socket.setsockopt(zmq.RCVHWM, queue_messages)
    socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS_MAX)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * _HEARTBEAT_MS)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SUBSCRIBE, topic)


def open_stream(
    context: zmq.Context[zmq.Socket[bytes]],
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """A SUB socket for all topics, not connected yet, and its monitor."""
    socket = context.socket(zmq.SUB)
    try:
        subscribe(socket)
        return socket, socket.get_monitor_socket(_MONITORED)
    except zmq.ZMQError:
        socket.close(0)
        raise


def open_replay(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, first: int
) -> zmq.Socket[bytes]:
    """A DEALER socket that has requested the batches from ``first`` on from ``endpoint``."""
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, _REPLAY_QUEUE_MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
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


def bindable(socket: zmq.Socket[Any], host: str) -> str:
    """``host`` as written in the address that ``socket`` is about to bind."""
    socket.setsockopt(zmq.IPV6, int(":" in host))
    return netloc(host)


def dialable(endpoint: str) -> str:
    """The address to connect to, where the engine gave its bind address."""
    return endpoint.replace("tcp://*:", "tcp://127.0.0.1:", 1)


def explain(error: zmq.ZMQError) -> str:
    """The error's message, with advice on the fix if one is known."""
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return str(error)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"{error}: the process may have {limit}; raise that (ulimit -n, LimitNOFILE of systemd)"
