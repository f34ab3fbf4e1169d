"""The request planes by name; each is imported when it is used."""

from __future__ import annotations

from importlib import import_module

from kvflash.errors import ConfigError
from kvflash.runtime.limits import RuntimeLimits
from kvflash.runtime.plane import PlaneClient, PlaneServer
from kvflash.runtime.serving import Serving
from kvflash.runtime.settings import PLANES, listen_address

__all__ = ["make_client", "make_server"]

# The transport that launchers announce for their engines.
OPENAI = "openai"


def make_server(plane: str, serving: Serving, *, host: str, port: int) -> PlaneServer:
    """A server that is not started yet.

    Raises:
        ConfigError: The plane is unknown, or what it needs is not installed.
    """
    if plane not in PLANES:
        raise ConfigError(f"request plane must be one of {', '.join(PLANES)}, got {plane!r}")
    module = import_module(f"kvflash.runtime.{plane}")
    server: PlaneServer = module.make_server(
        serving, host=host, port=port, bind=listen_address(host)
    )
    return server


def make_client(plane: str, limits: RuntimeLimits) -> PlaneClient:
    """A client of a plane, or of engines that speak OpenAI's API and none of them.

    Raises:
        ConfigError: The plane is unknown, or what it needs is not installed.
    """
    if plane not in (*PLANES, OPENAI):
        raise ConfigError(f"request plane must be one of {', '.join(PLANES)}, got {plane!r}")
    client: PlaneClient = import_module(f"kvflash.runtime.{plane}").make_client(limits)
    return client
