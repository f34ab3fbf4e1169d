"""Connects to NATS: every connection of this package is made here, with login and TLS.

With TLS nothing is sent before the handshake, so a server without TLS receives no password.
"""

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import nats.aio.client
import nats.errors
import nats.js.errors
import nkeys
from nats.aio.transport import TcpTransport

from kvflash.console import reason_of
from kvflash.errors import ConfigError, TransportError
from kvflash.outage import Outage
from kvflash.servers import NatsSettings

logger = logging.getLogger(__name__)

# How long a connection may take to close.
CLOSE_S_MAX = 1.0
# A server that sends nothing after two pings is gone, though the connection has not ended: its
# machine lost power, or a firewall drops the packets.
PING_INTERVAL_S = 10
NO_TLS = "the server offers no TLS"


class _Transport(TcpTransport):
    """A TCP connection that closes in bounded time, and sends nothing before it is encrypted."""

    def __init__(self, *, must_encrypt: bool, on_data: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._must_encrypt, self._on_data = must_encrypt, on_data
        self._is_encrypted = False

    def __bool__(self) -> bool:
        """Always true: otherwise the client would create its own transport."""
        return True

    async def connect(self, *args: Any, **options: Any) -> None:
        self._is_encrypted = False
        if self._bare_io_writer is not None:
            # After a refusal the client leaves the previous connection open.
            self._bare_io_writer.transport.abort()
        await super().connect(*args, **options)

    async def connect_tls(self, *args: Any, **options: Any) -> None:
        try:
            await super().connect_tls(*args, **options)
        except BaseException:
            # After a failed handshake, closing would wait forever.
            self._drop()
            raise
        self._is_encrypted = True

    async def read(self, buffer_size: int) -> bytes:
        """Receive; reports that the server is there."""
        data: bytes = await super().read(buffer_size)
        self._on_data()
        return data

    def write(self, payload: bytes) -> None:
        """Send, if the connection is as encrypted as required; else raise ConnectionError."""
        self._checked().write(payload)

    def writelines(self, payload: Iterable[bytes]) -> None:
        self._checked().writelines(payload)

    async def wait_closed(self) -> None:
        """Wait until it is closed, for a bounded time."""
        if self._io_writer is not None:
            try:
                await asyncio.wait_for(self._io_writer.wait_closed(), CLOSE_S_MAX)
            except asyncio.TimeoutError:
                self._drop()

    def _drop(self) -> None:
        if self._bare_io_writer is not None:
            self._bare_io_writer.transport.abort()
        self._io_writer = None

    def _checked(self) -> asyncio.StreamWriter:
        if self._io_writer is None:
            raise ConnectionError("not connected")
        if self._must_encrypt and not self._is_encrypted:
            raise ConnectionError(NO_TLS)
        return self._io_writer


class Client(nats.aio.client.Client):
    """A client that uses these connections."""

    def __init__(self, settings: NatsSettings) -> None:
        super().__init__()
        # Kept across all connections.
        self._transport = _Transport(must_encrypt=settings.must_encrypt, on_data=self._heard)

    def _heard(self) -> None:
        # On a slow link the answer to a ping may wait for long behind other data.
        self._pings_outstanding = 0

    async def close(self) -> None:
        """Close; messages that wait for an unreachable server are dropped."""
        try:
            await super().close()
        except OSError:
            # Sending these failed before it had ended its subscriptions.
            self._pending, self._pending_data_size = [], 0
            self._status = self.DISCONNECTED
            await super().close()

    async def _process_err(self, err_msg: str) -> None:
        """Reconnect after any error for which the server has ended the connection.

        Otherwise the client closes for good, with all subscriptions, after its login expires or is
        changed at the server, though it may become valid again.
        """
        said = err_msg.strip("' ")
        if "permissions violation" in said.lower():
            # Concerns one subject only: the connection stays open.
            await super()._process_err(err_msg)
            return
        error = nats.errors.Error(f"nats: {said}")
        await self._error_cb(error)
        if self._current_server is not None:
            # Pause before the next attempt, as after a failed one.
            self._current_server.last_attempt = time.monotonic()
        await self._process_op_err(error)


async def connect(
    settings: NatsSettings,
    *,
    who: str,
    otherwise: str,
    timeout_s: float | None = None,
    **options: Any,
) -> Client:
    """Connect; afterwards the client reconnects without limit, and logs when it has to.

    Raises ConfigError if the server refuses the login, and TransportError, which ends with
    ``otherwise``, if no server answers. ``who`` begins the log lines; ``options`` are nats-py's.
    """
    client, is_connected = Client(settings), False
    why: ConfigError | TransportError | None = None
    outage = Outage(logger, f"{who}: connected again")

    async def on_error(error: Exception) -> None:
        nonlocal why
        logger.debug("%s: %r", who, error)
        made = failure(settings, error, otherwise)
        is_refused = isinstance(made, ConfigError)
        if not is_connected:
            # A server that refuses the login may hang up before its reason is read, so an earlier
            # attempt may be more precise than the last.
            if is_refused or not isinstance(why, ConfigError):
                why = made
            # A refused login would be refused again, unless another server takes it.
            client.options["allow_reconnect"] = not is_refused or len(settings.servers) > 1
        elif not client.is_connected:
            # The client reports every attempt.
            outage.lasts(f"{who}: {made}; trying again", kind=is_refused)
        elif not isinstance(error, nats.errors.Error | OSError):
            logger.warning("%s: a message could not be handled", who, exc_info=error)
        elif type(error) in (nats.errors.Error, nats.errors.SlowConsumerError):
            # The server's own words, such as a violation of permissions, or a dropped message.
            logger.warning("%s: %s", who, error)

    async def on_disconnected() -> None:
        if is_connected and not client.is_closed:
            outage.lasts(f"{who}: disconnected; connecting again")

    async def on_reconnected() -> None:
        outage.ends()

    try:
        connecting = client.connect(
            **login_options(settings),
            error_cb=on_error,
            disconnected_cb=on_disconnected,
            reconnected_cb=on_reconnected,
            ping_interval=PING_INTERVAL_S,
            **options,
        )
        await asyncio.wait_for(connecting, timeout_s)
    except (nats.errors.Error, OSError, asyncio.TimeoutError) as error:
        # The assertion: a client that refused all addresses does not close.
        with contextlib.suppress(nats.errors.Error, OSError, AssertionError):
            await client.close()
        # The client reports each attempt's reason there, and in the end only that it gave up.
        raise why or failure(settings, error, otherwise) from None
    is_connected = True
    client.options["max_reconnect_attempts"] = -1
    return client


@contextlib.asynccontextmanager
async def reaching(what: str) -> AsyncIterator[None]:
    """Convert the client's errors to a TransportError that says what failed."""
    try:
        yield
    except nats.js.errors.ServiceUnavailableError as error:
        # Without a code: no server listens for such calls.
        is_off = error.err_code is None
        why = "JetStream does not answer: start nats-server with -js" if is_off else str(error)
        raise TransportError(f"{what}: {why}") from error
    except (nats.errors.Error, OSError, asyncio.TimeoutError) as error:
        raise TransportError(f"{what}: {str(error) or type(error).__name__}") from error


def login_options(settings: NatsSettings) -> dict[str, Any]:
    """Options for the connection; a ConfigError names the variable of an invalid login."""
    options: dict[str, Any] = {"servers": list(settings.servers)}
    if settings.user is not None:
        options.update(user=settings.user, password=settings.password)
    elif settings.token is not None:
        options.update(token=settings.token)
    elif settings.nkey is not None:
        is_file = Path(settings.nkey).is_file()
        seed = _read("NATS_AUTH_NKEY", settings.nkey) if is_file else settings.nkey
        _check_seed(seed, "NATS_AUTH_NKEY must be a seed that begins with SU, or a file with one")
        options.update(nkeys_seed_str=seed.strip())
    elif settings.credentials_file is not None:
        path = settings.credentials_file
        text = _read("NATS_AUTH_CREDENTIALS_FILE", path)
        problem = f"NATS_AUTH_CREDENTIALS_FILE: {path} must hold a user's JWT and seed"
        seed = text.partition("-BEGIN USER NKEY SEED-")[2].partition("\n")[2].partition("\n")[0]
        if "-BEGIN NATS USER JWT-" not in text:
            raise ConfigError(problem)
        _check_seed(seed, problem)
        options.update(user_credentials=path)
    if settings.tls:
        options.update(tls=settings.tls.context("NATS_TLS_"))
    return options


def _read(variable: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = reason_of(error)
        raise ConfigError(f"{variable} names {path}, which can't be read: {why}") from None


def failure(
    settings: NatsSettings, error: BaseException, otherwise: str
) -> ConfigError | TransportError:
    """Say in one line why an attempt failed: what to set, or what to start.

    A ConfigError if the server refuses us, or we refuse the server; else a TransportError that ends
    with ``otherwise``.
    """
    where = settings.where
    text = str(error) or type(error).__name__
    said = text.lower()
    # An attempt that took too long indicates a busy server.
    if "authorization" in said or ("authentication" in said and "timeout" not in said):
        return ConfigError(
            f"NATS at {where} refuses the login ({text}): set NATS_AUTH_USERNAME and "
            "NATS_AUTH_PASSWORD, NATS_AUTH_TOKEN, NATS_AUTH_NKEY or NATS_AUTH_CREDENTIALS_FILE"
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        return ConfigError(
            f"NATS at {where} has an untrusted certificate ({error.verify_message}): "
            "set NATS_TLS_CA to the file of the CA that signed it, and use a name in NATS_SERVER "
            "that it covers"
        )
    if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
        return ConfigError(
            f"NATS at {where} refuses TLS ({error.reason}): set NATS_TLS_CERT and "
            "NATS_TLS_KEY to a certificate that it trusts"
        )
    if NO_TLS in text:
        return ConfigError(
            f"NATS at {where} does not offer TLS, which the settings require: unset NATS_TLS_CA, "
            "NATS_TLS_CERT and NATS_TLS_KEY, and use nats:// in NATS_SERVER"
        )
    return TransportError(f"no NATS server answers at {where} ({text}): {otherwise}")


def _check_seed(seed: str, problem: str) -> None:
    try:
        nkeys.from_seed(seed.strip().encode())
    except (nkeys.NkeysError, ValueError, IndexError):
        # The seed itself is secret, so it is not part of the message.
        raise ConfigError(problem) from None
