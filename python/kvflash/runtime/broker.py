"""The connection to NATS."""

import asyncio
import logging
from collections import deque

from kvflash.errors import ConfigError
from kvflash.outage import Outage
from kvflash.servers import NatsSettings, missing_nats

try:
    from nats.errors import Error as NatsError

    from kvflash.nats_login import Client as NatsConnection
    from kvflash.nats_login import failure, login_options
except ImportError as error:
    raise missing_nats("the nats request plane", error) from error

__all__ = ["NatsConnection", "NatsError", "connect"]

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
RECONNECT_PAUSE_S = 1
# Data that may wait to be sent while the broker is away; beyond it sending fails.
PENDING_BYTES_MAX = 8 * 1024 * 1024
# After two unanswered pings the broker counts as gone.
PING_INTERVAL_S = 10
# Failed attempts to keep for the error message.
_SAID_MAX = 16
_OTHERWISE = "start one (nats-server), set NATS_SERVER, or use the request plane tcp"


async def connect() -> NatsConnection:
    """Connect to NATS_SERVER, and again after a break; a failure is a Transport- or ConfigError."""
    settings = NatsSettings.from_env()
    connection, said = NatsConnection(settings), deque[Exception](maxlen=_SAID_MAX)

    is_connected = False

    outage = Outage(logger, "nats: connected again")

    async def log(error: Exception) -> None:
        made = failure(settings, [error], _OTHERWISE)
        is_refused = isinstance(made, ConfigError)
        if is_connected and not connection.is_connected:
            # The client reports every attempt.
            logger.debug("nats: %r", error)
            outage.lasts(f"nats: {made}; trying again", kind=is_refused)
            return
        logger.warning("nats: %s", error or type(error).__name__)
        if not is_connected:
            said.append(error)
            # A refused login would be refused again, so stop trying.
            connection.options["allow_reconnect"] = not is_refused

    async def end_outage() -> None:
        outage.ends()

    try:
        await asyncio.wait_for(
            connection.connect(
                **login_options(settings),
                error_cb=log,
                reconnected_cb=end_outage,
                max_reconnect_attempts=-1,
                reconnect_time_wait=RECONNECT_PAUSE_S,
                ping_interval=PING_INTERVAL_S,
                pending_size=PENDING_BYTES_MAX,
            ),
            CONNECT_TIMEOUT_S,
        )
    except (NatsError, OSError, asyncio.TimeoutError) as error:
        await _give_up(connection)
        raise failure(settings, list(said) or [error], _OTHERWISE) from error
    is_connected = True
    return connection


async def _give_up(connection: NatsConnection) -> None:
    try:
        await connection.close()
    except (NatsError, OSError) as error:
        logger.debug("nats: %s", error)
