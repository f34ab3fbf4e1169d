"""Flags of the doctor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvflash.ask import add_key_file, add_timeout, parse_url, read_key
from kvflash.config import bounded_float
from kvflash.errors import ConfigError
from kvflash.flags import Flags

#: Maximum number of URLs in one call.
MAX_URLS = 1_000


@dataclass(frozen=True, kw_only=True)
class DoctorArgs:
    """What to check, and how."""

    urls: tuple[str, ...]
    listen: float
    timeout: float
    is_json: bool
    is_strict: bool
    worker_api_key: str | None
    service_key: str | None


def parse_args(argv: Sequence[str] | None = None) -> DoctorArgs:
    """Parse the command line and the environment.

    Raises:
        ConfigError: An address is not well formed.
    """
    flags = Flags(
        "doctor",
        "Check frontends, indexers and engines: what is wrong, and what to do about it. Exit "
        "status: 0 all is well, 1 failures, 2 bad usage.",
    )
    flags.add_positionals(
        "urls",
        metavar="URL",
        summary="A frontend, a router, an indexer or an engine; the doctor finds out which",
    )
    flags.add(
        "--listen",
        parse=bounded_float(0, 3_600),
        default=0.0,
        metavar="SECONDS",
        summary="Listen to the workers' event sockets for so long; 0: do not",
    )
    add_timeout(flags)
    flags.add_switch("--json", dest="is_json", value=True, summary="Print one JSON object")
    flags.add_switch("--strict", dest="is_strict", value=True, summary="Treat warnings as failures")
    flags.add(
        "--worker-api-key-file",
        parse=str,
        default=None,
        metavar="FILE",
        summary="File with the key for engines, else KVFLASH_WORKER_API_KEY",
    )
    add_key_file(flags)
    args = flags.parse(argv)
    urls = tuple(dict.fromkeys(parse_url(text) for text in args.urls))
    if len(urls) > MAX_URLS:
        raise ConfigError(f"at most {MAX_URLS} URLs may be given, got {len(urls)}")
    # Not a flag: every user of the machine can read a command line.
    key = os.environ.get("KVFLASH_WORKER_API_KEY") or None
    given = vars(args)
    path = given.pop("worker_api_key_file")
    if path is not None:
        try:
            key = Path(path).read_text().strip()
        except OSError as error:
            raise ConfigError(f"--worker-api-key-file {path}: {error.strerror}") from None
    service_key = read_key(given.pop("service_key_file"))
    return DoctorArgs(**{**given, "urls": urls, "worker_api_key": key, "service_key": service_key})
