"""A runtime's address and discovery, from the environment."""

import contextlib
import logging
import os
import socket

from kvflash.errors import ConfigError
from kvflash.servers import chosen

logger = logging.getLogger(__name__)

PLANES = ("tcp", "http", "nats")
# Used only to look up a route, IPv4 first; no packet is sent.
ROUTED_ADDRESSES = (
    (socket.AF_INET, ("192.0.2.1", 9)),
    (socket.AF_INET6, ("2001:db8::1", 9)),
)


def plane_name(named: str | None = None) -> str:
    """The plane that a process serves; default tcp. A wrong one is a ConfigError."""
    return chosen(named, PLANES, "request_plane", "KVFLASH_REQUEST_PLANE", "DYN_REQUEST_PLANE")


def host_address(*, is_local: bool) -> str:
    """The address at which others reach this process; is_local: discovery is on this machine."""
    named = os.environ.get("KVFLASH_HOST")
    if named:
        return named
    if is_local:
        return "127.0.0.1"
    for family, address in ROUTED_ADDRESSES:
        # Where the kernel has no IPv6, there is no socket for it either.
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    logger.warning(
        "this machine has no route to others, so its address in discovery is 127.0.0.1, which only "
        "this machine reaches: set KVFLASH_HOST"
    )
    return "127.0.0.1"


def listen_address(host: str) -> str:
    """The address to listen on for ``host``, which may be a name or a gateway's address."""
    if _is_loopback(host):
        return host
    return "::" if ":" in host else "0.0.0.0"


def own_address(host: str) -> str:
    """``host`` if this machine has that address, else as :func:`listen_address`.

    For sockets without encryption or login, which other networks of this machine must not reach.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family) as probe:
        probe.bind((host, 0))
        # Many machines know their own name as a loopback address, which others can't reach.
        if not _is_loopback(str(probe.getsockname()[0])):
            return host
    return listen_address(host)


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"


def runtime_port() -> int:
    """``KVFLASH_RUNTIME_PORT``, or a ConfigError; 0 picks a free port."""
    text = os.environ.get("KVFLASH_RUNTIME_PORT") or "0"
    if not text.isdecimal() or int(text) > 65_535:
        raise ConfigError(f"KVFLASH_RUNTIME_PORT must be in 0..=65535, got {text!r}")
    return int(text)
