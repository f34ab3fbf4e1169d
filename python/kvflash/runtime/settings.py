"""A runtime's address and discovery, from the environment."""

import os
import socket

from kvflash.errors import ConfigError
from kvflash.servers import chosen

PLANES = ("tcp", "http", "nats")
# Used only to look up a route; no packet is sent.
ROUTED_ADDRESS = ("192.0.2.1", 9)


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
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(ROUTED_ADDRESS)
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def listen_address(host: str) -> str:
    """The address to listen on for ``host``, which may be a name or a gateway's address."""
    if host == "localhost" or host.startswith("127.") or host == "::1":
        return host
    return "::" if ":" in host else "0.0.0.0"


def runtime_port() -> int:
    """``KVFLASH_RUNTIME_PORT``, or a ConfigError; 0 picks a free port."""
    text = os.environ.get("KVFLASH_RUNTIME_PORT") or "0"
    if not text.isdecimal() or int(text) > 65_535:
        raise ConfigError(f"KVFLASH_RUNTIME_PORT must be in 0..=65535, got {text!r}")
    return int(text)
