"""Addresses of what listens here: under which others reach it, and why one can't be had."""

import errno
import os
import re

from kvflash.errors import ConfigError

_LOOPBACK = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "::": "::1"}
# The port is at fault, not the host.
_OF_PORTS = (errno.EADDRINUSE, errno.EACCES)


def netloc(host: str) -> str:
    """A host as written before a port: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def masked(address: str) -> str:
    """An address with asterisks for its login, which may be without a scheme in front."""
    # Up to the last @: a password may contain / or @.
    return re.sub(r"(?s)^(\w+://)?.*@", r"\1***@", address)


def reachable(host: str, own: str | None = None) -> str:
    """Host part of a URL to an interface; a wildcard becomes ``own``, or the loopback address."""
    if own is not None and host in _LOOPBACK:
        host = own
    return netloc(_LOOPBACK.get(host, host))


def unbindable(fields: tuple[str, str], host: str, port: int, error: OSError) -> ConfigError:
    """The error for an address that can't be bound; ``fields`` set its host and its port."""
    # Without the address, which asyncio and ZMQ add to the system's words.
    code = error.errno or 0
    reason = os.strerror(code) if code in errno.errorcode else error.strerror
    if code == errno.EADDRINUSE:
        reason = f"{reason}; choose another port, or stop the process on it"
    if code in _OF_PORTS:
        return ConfigError(f"{fields[1]}: can't bind {port} on {host}: {reason}")
    return ConfigError(f"{fields[0]}: can't bind {host}: {reason}; name an address of this machine")
