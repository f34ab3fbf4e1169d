"""Addresses under which others reach what listens here."""


def reachable(host: str) -> str:
    """Host part of a URL to an interface; a wildcard becomes the loopback address."""
    host = {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
