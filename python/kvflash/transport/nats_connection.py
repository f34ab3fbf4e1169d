"""One way to connect to NATS: logged in, again for ever, one clear line when it is not there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import nats
import nats.errors
from nats.aio.client import Client

from kvflash.errors import ConfigError, TransportError
from kvflash.servers import NatsSettings

__all__ = ["Client", "check_server", "connect"]

logger = logging.getLogger(__name__)

_RECONNECT_WAIT_S = 0.25
# What may wait to be sent while the server is away; beyond it publishing fails.
_PENDING_BYTES_MAX = 16 * 1024 * 1024


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
    said: list[str] = []

    async def on_error(error: Exception) -> None:
        if client is None:
            said.append(str(error))
        # The client tells every failed attempt; who waits for an answer hears of it anyway.
        logger.debug("NATS (%s): %s", name, error)

    async def on_disconnected() -> None:
        logger.warning("NATS (%s): disconnected; connecting again", name)

    async def on_reconnected() -> None:
        logger.info("NATS (%s): connected again", name)
        if on_reconnect is not None:
            await on_reconnect()

    client: Client | None = None
    options: dict[str, Any] = {}
    if settings.user is not None:
        options.update(user=settings.user, password=settings.password)
    elif settings.token is not None:
        options.update(token=settings.token)
    elif settings.nkey is not None:
        options["nkeys_seed" if settings.is_nkey_file else "nkeys_seed_str"] = settings.nkey
    elif settings.credentials_file is not None:
        options.update(user_credentials=settings.credentials_file)
    if settings.tls:
        options.update(tls=settings.tls.context())
    where = ", ".join(settings.servers)
    try:
        client = await nats.connect(
            servers=list(settings.servers),
            name=name,
            connect_timeout=max(1, int(timeout_s)),
            # Of the first connection only; afterwards it may take as long as it takes.
            max_reconnect_attempts=1,
            reconnect_time_wait=_RECONNECT_WAIT_S,
            pending_size=_PENDING_BYTES_MAX,
            error_cb=on_error,
            disconnected_cb=on_disconnected,
            reconnected_cb=on_reconnected,
            **options,
        )
    except (nats.errors.Error, OSError, asyncio.TimeoutError) as error:
        # The client says the reason of each attempt there, and in the end only that it gave up.
        text = said[-1] if said and said[-1] else str(error) or type(error).__name__
        if "authorization" in text.lower() or "authentication" in text.lower():
            raise ConfigError(
                f"NATS at {where} refuses the login ({text}): set NATS_AUTH_USERNAME and "
                "NATS_AUTH_PASSWORD, NATS_AUTH_TOKEN, NATS_AUTH_NKEY or NATS_AUTH_CREDENTIALS_FILE"
            ) from None
        raise TransportError(
            f"no NATS server answers at {where} ({text}): start one (nats-server -js), set "
            "NATS_SERVER, or use --event-plane zmq, which needs none"
        ) from None
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
