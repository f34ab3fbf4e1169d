"""One way to connect to NATS: logged in, again for ever, one clear line when it is not there."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import nats.errors

from kvflash.nats_login import Client, failure, login_options
from kvflash.servers import NatsSettings

__all__ = ["Client", "check_server", "connect"]

logger = logging.getLogger(__name__)

_RECONNECT_WAIT_S = 0.25
# What may wait to be sent while the server is away; beyond it publishing fails.
_PENDING_BYTES_MAX = 16 * 1024 * 1024
# Failed attempts whose reasons are looked at.
_SAID_MAX = 16
_OTHERWISE = (
    "start one (nats-server -js), set NATS_SERVER, or use --event-plane zmq, which needs none"
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

    async def on_error(error: Exception) -> None:
        if not is_connected:
            said.append(error)
        # The client tells every failed attempt; who waits for an answer hears of it anyway.
        logger.debug("NATS (%s): %s", name, error)

    async def on_disconnected() -> None:
        logger.warning("NATS (%s): disconnected; connecting again", name)

    async def on_reconnected() -> None:
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


def check_server(settings: NatsSettings) -> None:
    """Connect and hang up, in a thread of its own: with or without an event loop.

    Raises:
        TransportError: No server answers; says which one to start.
        ConfigError: The server refuses who we are.
    """

    async def ask() -> None:
        client = await connect(settings, name="kvflash-check")
        await client.close()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: asyncio.run(ask())).result()
