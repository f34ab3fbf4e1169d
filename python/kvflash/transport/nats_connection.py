"""Connections to NATS for events, and what its server accepts."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from kvflash import nats_login
from kvflash.nats_login import Client
from kvflash.servers import NatsSettings

_CONNECT_TIMEOUT_S = 5
_RECONNECT_WAIT_S = 0.25
# Limit of unsent data while the server is down; above it publishing fails.
_PENDING_BYTES_MAX = 16 * 1024 * 1024
_OTHERWISE = (
    "start one (nats-server -js), set NATS_SERVER, or use --event-plane zmq, which needs no server"
)


async def connect(settings: NatsSettings, *, name: str) -> Client:
    """Connect under this name; see :func:`kvflash.nats_login.connect`."""
    return await nats_login.connect(
        settings,
        who=f"NATS ({name})",
        otherwise=_OTHERWISE,
        name=name,
        connect_timeout=_CONNECT_TIMEOUT_S,
        # Of the first connection only.
        max_reconnect_attempts=1,
        reconnect_time_wait=_RECONNECT_WAIT_S,
        pending_size=_PENDING_BYTES_MAX,
    )


def message_bytes(headers: Mapping[str, str], payload: bytes) -> int:
    """The size that the server compares with its ``max_payload``: headers count, too."""
    lines = sum(len(name) + len(value.encode()) + 4 for name, value in headers.items())
    return len("NATS/1.0\r\n\r\n") + lines + len(payload)


def check_server(settings: NatsSettings) -> None:
    """Connect and disconnect, with or without an event loop; errors as in :func:`connect`."""

    async def check() -> None:
        await (await connect(settings, name="kvflash-check")).close()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: asyncio.run(check())).result()
