"""Connects to NATS: with login, reconnects, and one clear message if no server answers."""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import nats.errors

from kvflash.errors import ConfigError
from kvflash.nats_login import Client, failure, login_options
from kvflash.servers import NatsSettings

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5
_RECONNECT_WAIT_S = 0.25
# Limit of unsent data while the server is down; above it publishing fails.
_PENDING_BYTES_MAX = 16 * 1024 * 1024
# Failed attempts whose reasons are examined.
_SAID_MAX = 16
_OTHERWISE = (
    "start one (nats-server -js), set NATS_SERVER, or use --event-plane zmq, which needs no server"
)


async def connect(settings: NatsSettings, *, name: str) -> Client:
    """Connect; afterwards the client reconnects on its own, without limit.

    Raises ConfigError if the server refuses the login, and TransportError if no server answers; the
    message says which one to start.
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
            # Logged once: only an operator can fix it.
            refusal = str(made)
            logger.warning("NATS (%s): %s; trying again", name, refusal)
        # The client reports every failed attempt; callers waiting for an answer get the error
        # anyway.
        logger.debug("NATS (%s): %s", name, error)

    async def on_disconnected() -> None:
        if not client.is_closed:
            logger.warning("NATS (%s): disconnected; connecting again", name)

    async def on_reconnected() -> None:
        nonlocal refusal
        refusal = ""
        logger.info("NATS (%s): connected again", name)

    client = Client(settings)
    try:
        await client.connect(
            **login_options(settings),
            name=name,
            connect_timeout=_CONNECT_TIMEOUT_S,
            # Of the first connection only; reconnecting has no time limit.
            max_reconnect_attempts=1,
            # Documented as whole seconds; fractions work as well.
            reconnect_time_wait=_RECONNECT_WAIT_S,  # type: ignore[arg-type]
            pending_size=_PENDING_BYTES_MAX,
            error_cb=on_error,
            disconnected_cb=on_disconnected,
            reconnected_cb=on_reconnected,
        )
    except (nats.errors.Error, OSError, asyncio.TimeoutError) as error:
        # The client reports each attempt's reason there, and in the end only that it gave up.
        raise failure(settings, list(said) or [error], _OTHERWISE) from None
    is_connected = True
    client.options["max_reconnect_attempts"] = -1
    return client


def message_bytes(headers: Mapping[str, str], payload: bytes) -> int:
    """The size that the server compares with its ``max_payload``: headers count, too."""
    lines = sum(len(name) + len(value.encode()) + 4 for name, value in headers.items())
    return len("NATS/1.0\r\n\r\n") + lines + len(payload)


def check_server(settings: NatsSettings) -> int:
    """Connect and disconnect, with or without an event loop; errors as in :func:`connect`.

    Returns the largest message in bytes that the server accepts, including headers.
    """

    async def ask() -> int:
        client = await connect(settings, name="kvflash-check")
        await client.close()
        return int(client.max_payload)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(ask())).result()
