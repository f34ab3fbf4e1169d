"""Addresses under which others reach what listens here."""

_LOOPBACK = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "::": "::1"}


def netloc(host: str) -> str:
    """A host as written before a port: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def reachable(host: str, own: str | None = None) -> str:
    """Host part of a URL to an interface; a wildcard becomes ``own``, or the loopback address."""
    if own is not None and host in _LOOPBACK:
        host = own
    return netloc(_LOOPBACK.get(host, host))
