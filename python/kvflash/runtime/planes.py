"""The request planes by name; each is imported on first use."""

from __future__ import annotations

from importlib import import_module

from kvflash.errors import ConfigError
from kvflash.runtime.limits import RuntimeLimits
from kvflash.runtime.plane import PlaneClient, PlaneServer
from kvflash.runtime.serving import Serving
from kvflash.runtime.settings import PLANES, listen_address

# The transport that launchers announce for their engines.
OPENAI = "openai"


def make_server(plane: str, serving: Serving, *, host: str, port: int) -> PlaneServer:
    """Create a server; it is not started yet.

    Raises:
        ConfigError: The plane is unknown, or its dependencies are not installed.
    """
    if plane not in PLANES:
        raise ConfigError(f"request plane must be one of {', '.join(PLANES)}, got {plane!r}")
    module = import_module(f"kvflash.runtime.{plane}")
    server: PlaneServer = module.make_server(
        serving, host=host, port=port, bind=listen_address(host)
    )
    return server


def make_client(plane: str, limits: RuntimeLimits) -> PlaneClient:
    """Create a client for a plane, or for engines that speak only OpenAI's API.

    Raises:
        ConfigError: The plane is unknown, or its dependencies are not installed.
    """
    if plane not in (*PLANES, OPENAI):
        raise ConfigError(f"request plane must be one of {', '.join(PLANES)}, got {plane!r}")
    client: PlaneClient = import_module(f"kvflash.runtime.{plane}").make_client(limits)
    return client
