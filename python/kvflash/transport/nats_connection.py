"""One way to connect to NATS: logged in, again for ever, one clear line when it is not there."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import nats.errors

from kvflash.errors import ConfigError
from kvflash.nats_login import Client, failure, login_options
from kvflash.servers import NatsSettings

__all__ = ["Client", "check_server", "connect", "message_bytes"]

logger = logging.getLogger(__name__)

_RECONNECT_WAIT_S = 0.25
# What may wait to be sent while the server is away; beyond it publishing fails.
_PENDING_BYTES_MAX = 16 * 1024 * 1024
# Failed attempts whose reasons are looked at.
_SAID_MAX = 16
_OTHERWISE = (
    "start one (nats-server -js), set NATS_SERVER, or use --event-plane zmq, which needs no server"
)


async def connect(
    settings: NatsSettings,
    *,
    name: str,
    on_reconnect: Callable[[], Awaitable[None]] | None = None,
    timeout_s: float = 5.0,
) -> Client:
    """Connect; afterwards the client connects again by itself, for as long as it takes.

    Raises:
        TransportError: No server answers; says which one to start.
        ConfigError: The server refuses who we are.
    """
    said = deque[Exception](maxlen=_SAID_MAX)
    is_connected = False
    refusal = ""

    async def on_error(error: Exception) -> None:
        nonlocal refusal
        if not is_connected:
            said.append(error)
        made = failure(settings, [error], _OTHERWISE)
        if is_connected and isinstance(made, ConfigError) and str(made) != refusal:
            # Once: only somebody can mend that.
            refusal = str(made)
            logger.warning("NATS (%s): %s; trying again", name, refusal)
        # The client tells every failed attempt; who waits for an answer hears of it anyway.
        logger.debug("NATS (%s): %s", name, error)

    async def on_disconnected() -> None:
        if not client.is_closed:
            logger.warning("NATS (%s): disconnected; connecting again", name)

    async def on_reconnected() -> None:
        nonlocal refusal
        refusal = ""
        logger.info("NATS (%s): connected again", name)
        if on_reconnect is not None:
            await on_reconnect()

    client = Client(settings)
    try:
        await client.connect(
            **login_options(settings),
            name=name,
            connect_timeout=max(1, int(timeout_s)),
            # Of the first connection only; afterwards it may take as long as it takes.
            max_reconnect_attempts=1,
            # Said to be whole seconds; it takes parts of them as well.
            reconnect_time_wait=_RECONNECT_WAIT_S,  # type: ignore[arg-type]
            pending_size=_PENDING_BYTES_MAX,
            error_cb=on_error,
            disconnected_cb=on_disconnected,
            reconnected_cb=on_reconnected,
        )
    except (nats.errors.Error, OSError, asyncio.TimeoutError) as error:
        # The client says the reason of each attempt there, and in the end only that it gave up.
        raise failure(settings, list(said) or [error], _OTHERWISE) from None
    is_connected = True
    client.options["max_reconnect_attempts"] = -1
    return client


def message_bytes(headers: Mapping[str, str], payload: bytes) -> int:
    """What the server compares with its ``max_payload``: headers count, too."""
    lines = sum(len(name) + len(value.encode()) + 4 for name, value in headers.items())
    return len("NATS/1.0\r\n\r\n") + lines + len(payload)


def check_server(settings: NatsSettings) -> int:
    """Connect and hang up, in a thread of its own: with or without an event loop.

    Returns:
        Bytes of the largest message that the server takes, with its headers.

    Raises:
        TransportError: No server answers; says which one to start.
        ConfigError: The server refuses who we are.
    """

    async def ask() -> int:
        client = await connect(settings, name="kvflash-check")
        await client.close()
        return int(client.max_payload)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(ask())).result()
