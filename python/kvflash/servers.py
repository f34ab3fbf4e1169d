"""Addresses and logins of NATS and etcd, from the usual environment variables."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from kvflash.address import masked
from kvflash.errors import ConfigError

EVENT_PLANES = ("zmq", "nats")
_STREAM_MAX_AGE = ("KVFLASH_NATS_STREAM_MAX_AGE", "DYN_NATS_STREAM_MAX_AGE")
_STREAM_MAX_BYTES = ("KVFLASH_NATS_STREAM_MAX_BYTES",)
_REPLICAS = ("NATS_JETSTREAM_REPLICAS",)

Environment = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """Files in PEM: the trusted authority, else the system's; the client's certificate and key."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def __bool__(self) -> bool:
        return any((self.ca, self.cert, self.key))

    def context(self, prefix: str = "") -> ssl.SSLContext:
        """Create the context for connections, which verify the server.

        An unreadable file is a ConfigError; ``prefix`` begins the names of its variables.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"{prefix}CA must name certificates in PEM; {self.ca}: {error}"
            ) from None
        if self.cert:
            own = prefix + ("CLIENT_" if prefix.startswith("ETCD") else "")
            try:
                # An explicit empty password; otherwise OpenSSL would prompt on the terminal.
                context.load_cert_chain(self.cert, self.key, password="")
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(
                    f"{own}CERT and {own}KEY must name a certificate and its key in PEM, without "
                    f"a password; {self.cert}, {self.key}: {error}"
                ) from None
        return context


@dataclass(frozen=True, kw_only=True)
class NatsSettings:
    """How to reach NATS, and how long, how much and how often it stores events.

    The first login that is set is used: user with password, token, nkey (a seed, or a file with
    it), a file from ``nsc`` with token and seed. With -1 the server limits the bytes of a stream.
    """

    servers: tuple[str, ...] = field(default=("nats://localhost:4222",), repr=False)
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    nkey: str | None = field(default=None, repr=False)
    credentials_file: str | None = None
    tls: TlsFiles = TlsFiles()
    stream_max_age_s: float = 3_600.0
    stream_max_bytes: int = -1
    replicas: int = 1

    @property
    def where(self) -> str:
        """The addresses, with asterisks for logins."""
        return ", ".join(map(masked, self.servers))

    @property
    def must_encrypt(self) -> bool:
        """Whether unencrypted connections are forbidden."""
        return bool(self.tls) or any(server.startswith("tls://") for server in self.servers)

    @classmethod
    def from_env(cls, env: Environment = os.environ) -> NatsSettings:
        """Read the environment."""
        env = _filled(env)
        user, password = _user(env, "NATS")
        token, nkey = env.get("NATS_AUTH_TOKEN"), env.get("NATS_AUTH_NKEY")
        file = env.get("NATS_AUTH_CREDENTIALS_FILE")
        if not (user or token or nkey):
            _check_file("NATS_AUTH_CREDENTIALS_FILE", file)
        given = env.get("NATS_SERVER")
        return cls(
            servers=_addresses("NATS_SERVER", given, "nats", "tls") if given else cls.servers,
            user=user,
            password=password,
            token=token,
            nkey=nkey,
            credentials_file=file,
            tls=_tls(env, "NATS_TLS_CA", "NATS_TLS_CERT", "NATS_TLS_KEY"),
            stream_max_age_s=_number(env, _STREAM_MAX_AGE, cls.stream_max_age_s, least=1),
            stream_max_bytes=_whole(env, _STREAM_MAX_BYTES, cls.stream_max_bytes, least=-1),
            replicas=_whole(env, _REPLICAS, cls.replicas, least=1),
        )


@dataclass(frozen=True, kw_only=True)
class EtcdSettings:
    """How to reach etcd, at endpoints separated by commas; user and password go together."""

    endpoints: str = field(default="http://127.0.0.1:2379", repr=False)
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: TlsFiles = TlsFiles()

    @classmethod
    def from_env(cls, env: Environment = os.environ) -> EtcdSettings:
        """Read the environment."""
        env = _filled(env)
        user, password = _user(env, "ETCD")
        return cls(
            endpoints=env.get("ETCD_ENDPOINTS", cls.endpoints),
            user=user,
            password=password,
            tls=_tls(env, "ETCD_AUTH_CA", "ETCD_AUTH_CLIENT_CERT", "ETCD_AUTH_CLIENT_KEY"),
        )

    def urls(self, endpoints: str | None = None) -> list[str]:
        """Addresses with their scheme: https by default, and required, if there are TLS files.

        ``endpoints``, separated by commas, replace the addresses of the settings.
        """
        text = endpoints or self.endpoints
        for one in map(str.strip, text.split(",")):
            if "@" in one:
                raise ConfigError(
                    f"ETCD_ENDPOINTS names {masked(one)}, with a login in it: name the address "
                    "alone, and set ETCD_AUTH_USERNAME and ETCD_AUTH_PASSWORD"
                )
        scheme = "https" if self.tls else "http"
        found = [
            (one if "://" in one else f"{scheme}://{one}").rstrip("/")
            for one in _addresses("ETCD_ENDPOINTS", text, "http", "https")
        ]
        for url in found:
            if self.tls and not url.startswith("https://"):
                raise ConfigError(
                    f"ETCD_ENDPOINTS names {url}, but ETCD_AUTH_CA or ETCD_AUTH_CLIENT_CERT "
                    "requires TLS: name an https:// address, or unset these variables"
                )
        return found


def _filled(env: Environment) -> Environment:
    """Without variables that are set but empty, which count as unset."""
    return {name: value for name, value in env.items() if value}


def _user(env: Environment, service: str) -> tuple[str | None, str | None]:
    names = (f"{service}_AUTH_USERNAME", f"{service}_AUTH_PASSWORD")
    user, password = map(env.get, names)
    if (user is None) != (password is None):
        raise ConfigError(f"set both {' and '.join(names)}, or neither; only one is set")
    return user, password


def keep_alive(sock: socket.socket, *more: tuple[str, int]) -> None:
    """Let the kernel detect a dead peer, after about 10 + 3 * 5 s; sets further options of TCP."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), *more):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def agreed(*names: str) -> tuple[str, str] | None:
    """The first of these variables that is set, and its value; refused if two of them differ."""
    found = {name: os.environ[name] for name in names if os.environ.get(name)}
    if len(set(found.values())) > 1:
        said = " and ".join(f"{name}={value}" for name, value in found.items())
        raise ConfigError(f"environment variables contradict each other: {said}")
    return next(iter(found.items()), None)


def chosen(named: str | None, legal: Sequence[str], argument: str, *variables: str) -> str:
    """The given choice, else the environment's, else the first; errors name where it came from."""
    found = agreed(*variables) if named is None else None
    name, value = found or (argument, legal[0] if named is None else named)
    if value not in legal:
        raise ConfigError(f"{name} must be one of {', '.join(legal)}, got {value!r}")
    return value


def plane_of_events(named: str | None = None) -> str:
    """The event plane; default ``zmq``."""
    return chosen(named, EVENT_PLANES, "event_plane", "KVFLASH_EVENT_PLANE", "DYN_EVENT_PLANE")


def _addresses(name: str, value: str, *schemes: str) -> tuple[str, ...]:
    """The addresses in a list with commas; their first scheme may be missing."""
    found = tuple(part.strip() for part in value.split(",") if part.strip())
    if not found:
        raise ConfigError(
            f"{name} must name an address such as {schemes[0]}://HOST[:PORT], got {value!r}"
        )
    for number, one in enumerate(found, 1):
        if not is_address(one if "://" in one else f"{schemes[0]}://{one}", *schemes):
            wanted = " or ".join(f"{scheme}://HOST[:PORT]" for scheme in schemes)
            got = repr(masked(one))
            if any("@" in later for later in found[number:]):
                # It may be the first half of a login.
                service = name.partition("_")[0]
                got = (
                    "a login with a comma, which is not shown: set "
                    f"{service}_AUTH_USERNAME and {service}_AUTH_PASSWORD instead"
                )
            raise ConfigError(f"{name} must be {wanted}, several separated by commas, got {got}")
    return found


def is_address(url: str, *schemes: str) -> bool:
    """Whether it begins with SCHEME://HOST[:PORT], with one of these schemes and a legal port."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return False
    return parts.scheme in schemes and bool(host) and port != 0 and " " not in host


def _tls(env: Environment, ca: str, cert: str, key: str) -> TlsFiles:
    for name in (ca, cert, key):
        _check_file(name, env.get(name))
    if env.get(cert) is None and env.get(key) is not None:
        raise ConfigError(f"{key} is the key of a certificate: set {cert} too")
    return TlsFiles(ca=env.get(ca), cert=env.get(cert), key=env.get(key))


def _check_file(name: str, path: str | None) -> None:
    if path is not None and not Path(path).is_file():
        raise ConfigError(f"{name} names {path!r}, which is not a file")


def _number(env: Environment, names: tuple[str, ...], default: float, *, least: float) -> float:
    """The value of the first of these variables that is set."""
    name = next(filter(env.get, names), None)
    if name is None:
        return default
    try:
        value = float(env[name])
    except ValueError:
        raise ConfigError(f"{name} must be a number, got {env[name]!r}") from None
    # Also refuses values that are not numbers.
    if not least <= value < 1e15:
        raise ConfigError(f"{name} must be at least {least:g}, got {env[name]!r}")
    return value


def _whole(env: Environment, names: tuple[str, ...], default: int, *, least: int) -> int:
    """The same for a whole number, which may be written as 1e9."""
    value = _number(env, names, default, least=least)
    if value != int(value):
        raise ConfigError(f"{next(filter(env.get, names))} must be a whole number, got {value:g}")
    return int(value)


@contextlib.contextmanager
def needing_nats(setting: str) -> Iterator[None]:
    """For imports of the NATS client: a ConfigError names ``setting`` if it is not installed."""
    try:
        yield
    except ImportError as error:
        # Here, because reading package metadata would slow down the start of every command.
        from kvflash.version import install_command  # noqa: PLC0415

        raise ConfigError(
            f"{setting} needs the NATS client ({error}): {install_command('nats')}"
        ) from error
