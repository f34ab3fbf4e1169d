"""The connection to NATS."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

from kvflash.errors import ConfigError, TransportError

try:
    from nats.aio.client import Client as NatsConnection
    from nats.errors import Error as NatsError
except ImportError as error:
    raise ConfigError("the nats request plane needs: pip install 'kvflash[nats]'") from error

__all__ = ["NatsConnection", "NatsError", "connect"]

logger = logging.getLogger(__name__)

DEFAULT_SERVER = "nats://localhost:4222"
CONNECT_TIMEOUT_S = 5.0
RECONNECT_PAUSE_S = 1
# What may wait to be sent while the broker is away; then sending fails.
PENDING_BYTES_MAX = 8 * 1024 * 1024
# Two unanswered pings are a broker that is gone.
PING_INTERVAL_S = 10

_AUTHENTICATION = (
    ("NATS_AUTH_USERNAME", "user"),
    ("NATS_AUTH_PASSWORD", "password"),
    ("NATS_AUTH_TOKEN", "token"),
    ("NATS_AUTH_NKEY", "nkeys_seed"),
    ("NATS_AUTH_CREDENTIALS_FILE", "user_credentials"),
)


async def connect() -> NatsConnection:
    """Connect to NATS_SERVER; a connection that breaks is made again.

    Raises:
        TransportError: It can't be reached, or refuses us.
    """
    servers = [part.strip() for part in os.environ.get("NATS_SERVER", DEFAULT_SERVER).split(",")]
    options: dict[str, Any] = {
        option: os.environ[name] for name, option in _AUTHENTICATION if os.environ.get(name)
    }
    connection = NatsConnection()
    try:
        await asyncio.wait_for(
            connection.connect(
                servers,
                error_cb=_log,
                max_reconnect_attempts=-1,
                reconnect_time_wait=RECONNECT_PAUSE_S,
                ping_interval=PING_INTERVAL_S,
                pending_size=PENDING_BYTES_MAX,
                **options,
            ),
            CONNECT_TIMEOUT_S,
        )
    except (NatsError, OSError, asyncio.TimeoutError) as error:
        await _give_up(connection)
        raise TransportError(
            f"NATS can't be reached at {', '.join(servers)}: {error or type(error).__name__}"
        ) from error
    return connection


async def _give_up(connection: NatsConnection) -> None:
    try:
        await connection.close()
    except (NatsError, OSError) as error:
        logger.debug("nats: %s", error)


async def _log(error: Exception) -> None:
    logger.warning("nats: %s", error or type(error).__name__)
