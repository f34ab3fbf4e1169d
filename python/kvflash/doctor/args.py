"""Flags of the doctor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvflash.config import Flags, bounded_float
from kvflash.errors import ConfigError

__all__ = ["DoctorArgs", "parse_args", "parse_url"]

#: What one call may be asked to look at.
MAX_URLS = 1_000


@dataclass(frozen=True, kw_only=True)
class DoctorArgs:
    """What to look at, and how."""

    urls: tuple[str, ...]
    listen: float
    timeout: float
    is_json: bool
    is_strict: bool
    worker_api_key: str | None


def parse_url(text: str) -> str:
    """An address as ``http://host[:port][/path]``; the scheme may be missing.

    Raises:
        ConfigError: Names the address and what is legal.
    """
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        is_legal = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_legal = is_legal and parts.port != 0 and not (parts.query or parts.fragment)
    except ValueError:
        is_legal = False
    if not is_legal or any(mark <= " " or mark == "\x7f" for mark in text) or not text.isascii():
        raise ConfigError(f"URL must be http://HOST[:PORT][/PATH], got {text!r}")
    return url.rstrip("/")


def parse_args(argv: Sequence[str] | None = None) -> DoctorArgs:
    """Parse the command line and the environment.

    Raises:
        ConfigError: An address that cannot be.
    """
    flags = Flags(
        "python -m kvflash.doctor",
        "Check indexers and their engines: what is wrong, and what to do about it. Exit status: "
        "0 all is well, 1 failures, 2 bad usage.",
    )
    flags.add_positionals(
        "urls",
        metavar="URL",
        summary="an indexer, or an engine's base URL; which of them it is, is asked",
    )
    flags.add(
        "--listen",
        parse=bounded_float(0, 3_600),
        default=0.0,
        metavar="SECONDS",
        summary="listen at the workers' event sockets for so long; 0 does not",
    )
    flags.add(
        "--timeout",
        parse=bounded_float(0.05, 600),
        default=5.0,
        metavar="SECONDS",
        summary="longest wait for an answer",
    )
    flags.add_switch("--json", dest="is_json", value=True, summary="one JSON object on stdout")
    flags.add_switch("--strict", dest="is_strict", value=True, summary="warnings are failures")
    args = flags.parse(argv)
    urls = tuple(dict.fromkeys(parse_url(text) for text in args.urls))
    if len(urls) > MAX_URLS:
        raise ConfigError(f"at most {MAX_URLS} URLs may be given, got {len(urls)}")
    # Not a flag: the command line is seen by everybody on the machine.
    key = os.environ.get("KVFLASH_WORKER_API_KEY") or None
    return DoctorArgs(**{**vars(args), "urls": urls, "worker_api_key": key})
