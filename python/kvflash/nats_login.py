"""Who we are to NATS and whom we trust: what every connection of this package is made with.

Over TLS nothing is sent before the handshake, at no server: one that offers none gets no password.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import nats.aio.client
import nats.errors
import nkeys
from nats.aio.transport import TcpTransport

from kvflash.errors import ConfigError, TransportError
from kvflash.servers import NatsSettings

__all__ = ["Client", "failure", "login_options"]

# How long a connection may take to say goodbye.
CLOSE_S_MAX = 1.0
NO_TLS = "the server offers no TLS"


class _Transport(TcpTransport):
    """A TCP connection that ends in time, and is silent until it is safe."""

    def __init__(self, *, must_encrypt: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._must_encrypt = must_encrypt
        self._is_encrypted = False

    def __bool__(self) -> bool:
        """Always: where there is none the client makes one of its own."""
        return True

    async def connect(self, *args: Any, **options: Any) -> None:
        """Open it; not encrypted yet."""
        self._is_encrypted = False
        if self._bare_io_writer is not None:
            # After a refusal the client leaves the one before open.
            self._bare_io_writer.transport.abort()
        await super().connect(*args, **options)

    async def connect_tls(self, *args: Any, **options: Any) -> None:
        """Make it safe."""
        try:
            await super().connect_tls(*args, **options)
        except BaseException:
            # After a broken handshake its end would be waited for for ever.
            self._drop()
            raise
        self._is_encrypted = True

    def write(self, payload: bytes) -> None:
        """Send, once it may be.

        Raises:
            ConnectionError: It must be encrypted and is not.
        """
        self._checked().write(payload)

    def writelines(self, payload: Iterable[bytes]) -> None:
        """Send, once it may be; errors as of :meth:`write`."""
        self._checked().writelines(payload)

    async def wait_closed(self) -> None:
        """Wait for its end, but not for ever."""
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
    """A client whose connections are as the settings want them."""

    def __init__(self, settings: NatsSettings) -> None:
        super().__init__()
        # It is kept over all connections.
        self._transport = _Transport(must_encrypt=settings.must_encrypt)

    async def close(self) -> None:
        """Close it; what still waits for a server that is away is dropped."""
        try:
            await super().close()
        except OSError:
            # It failed at sending that, before it had ended its subscriptions.
            self._pending, self._pending_data_size = [], 0
            self._status = self.DISCONNECTED
            await super().close()

    async def _process_err(self, err_msg: str) -> None:
        """Connect again after whatever the server has ended the connection for.

        Without this the client closes for good, subscriptions and all, where a login has run out or
        was changed at the server: it may be right again.
        """
        said = err_msg.strip("' ")
        if "permissions violation" in said.lower():
            # Of one subject: the connection goes on.
            await super()._process_err(err_msg)
            return
        error = nats.errors.Error(f"nats: {said}")
        await self._error_cb(error)
        if self._current_server is not None:
            # The next attempt there pauses first, as after one that failed.
            self._current_server.last_attempt = time.monotonic()
        await self._process_op_err(error)


def login_options(settings: NatsSettings) -> dict[str, Any]:
    """What to connect with.

    Raises:
        ConfigError: A key, a credentials file or a certificate that can't be one; names the
            variable.
    """
    options: dict[str, Any] = {"servers": list(settings.servers)}
    if settings.user is not None:
        options.update(user=settings.user, password=settings.password)
    elif settings.token is not None:
        options.update(token=settings.token)
    elif settings.nkey is not None:
        seed = Path(settings.nkey).read_text() if settings.is_nkey_file else settings.nkey
        _check_seed(seed, "NATS_AUTH_NKEY must be a seed that begins with SU, or a file with one")
        options.update(nkeys_seed_str=seed.strip())
    elif settings.credentials_file is not None:
        path = settings.credentials_file
        text = Path(path).read_text()
        problem = f"NATS_AUTH_CREDENTIALS_FILE: {path} must hold a user's JWT and seed"
        seed = text.partition("-BEGIN USER NKEY SEED-")[2].partition("\n")[2].partition("\n")[0]
        if "-BEGIN NATS USER JWT-" not in text:
            raise ConfigError(problem)
        _check_seed(seed, problem)
        options.update(user_credentials=path)
    if settings.tls:
        options.update(tls=settings.tls.context("NATS_TLS_"))
    return options


def failure(
    settings: NatsSettings, errors: Sequence[BaseException], otherwise: str
) -> ConfigError | TransportError:
    """Failed attempts in one line: what to set, or what to start.

    Args:
        settings: Of the attempts.
        errors: Why they failed, at least one. A server that refuses us may hang up before we
            have read why: an earlier attempt may know better than the last.
        otherwise: What to do when no server answers.

    Returns:
        ConfigError where the server, or what is known of it, refuses us; else TransportError.
    """
    found = [_failure(settings, error, otherwise) for error in errors]
    return next((made for made in reversed(found) if isinstance(made, ConfigError)), found[-1])


def _failure(
    settings: NatsSettings, error: BaseException, otherwise: str
) -> ConfigError | TransportError:
    where = settings.where
    text = str(error) or type(error).__name__
    said = text.lower()
    # One that took too long is a server that is busy.
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
        # The seed itself is a secret: it stays out of what is said.
        raise ConfigError(problem) from None
