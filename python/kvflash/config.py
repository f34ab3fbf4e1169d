"""What flags may say, and the flags that every service has."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Literal, TypeVar

from kvflash.flags import Flags

__all__ = [
    "add_common",
    "add_config",
    "add_metrics_prefix",
    "add_tls",
    "bounded_float",
    "bounded_int",
    "byte_count",
    "memory_limit",
    "number_or_auto",
    "optional",
    "size_or_zero",
]

_T = TypeVar("_T")

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def bounded_int(low: int, high: int) -> Callable[[str], int]:
    """A parser for whole numbers in ``low..=high``."""

    def parse_int(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"must be a whole number in {low}..={high}, got {text!r}"
            )
        return value

    return parse_int


def bounded_float(low: float, high: float = float("inf")) -> Callable[[str], float]:
    """A parser for finite numbers from ``low`` to ``high``."""

    def parse_float(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not (low <= value <= high) or value == float("inf"):
            wanted = f"of at least {low:g}" if high == float("inf") else f"in {low:g}..={high:g}"
            raise argparse.ArgumentTypeError(f"must be a number {wanted}, got {text!r}")
        return value

    return parse_float


def size_or_zero(text: str) -> int:
    """Parse a size such as ``16MiB``, or 0; unit bytes."""
    return 0 if text.strip() == "0" else byte_count(text)


def byte_count(text: str) -> int:
    """Parse a size such as ``512MiB``, ``8m`` or ``1048576``; unit bytes."""
    digits = text.strip().rstrip("KMGkmgiIbB")
    unit = text.strip()[len(digits) :].lower().removesuffix("b")
    try:
        value = int(float(digits) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a size such as 512MiB or 8000000, got {text!r}")
    return value


def memory_limit(text: str) -> int:
    """Parse a memory limit: 0 for none, or a size of at least 1 MiB; unit bytes.

    Nothing useful fits in less, so that ``8`` is rather a forgotten unit than a limit.
    """
    if text.strip() == "0":
        return 0
    try:
        value = byte_count(text)
    except argparse.ArgumentTypeError:
        value = 0
    if not 2**20 <= value < 2**63:
        raise argparse.ArgumentTypeError(
            f"must be 0 for no limit or a size of at least 1MiB, such as 8GiB, 512MiB or "
            f"8000000000, got {text!r}"
        )
    return value


def optional(parse: Callable[[str], _T]) -> Callable[[str], _T | None]:
    """A parser that also takes ``None``, in any case, for a setting that is not set."""

    @functools.wraps(parse)
    def parse_optional(text: str) -> _T | None:
        return None if text.strip().lower() == "none" else parse(text)

    return parse_optional


def number_or_auto(text: str) -> float | Literal["auto"]:
    """Read a number above 0, or the word auto; the parse function of such a flag."""
    if text.strip().lower() == "auto":
        return "auto"
    try:
        return bounded_float(0.001)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error} (or auto)") from None


def add_config(flags: Flags) -> None:
    """Add the file that may set every flag; first of all flags."""
    flags.add_file("--config", summary="Read flags from this YAML, TOML or JSON file")


def add_tls(flags: Flags) -> None:
    """Add certificate and key of the service's own HTTP."""
    flags.section("TLS")
    flags.add(
        "--tls-cert-path",
        parse=str,
        default=None,
        variables=("DYN_TLS_CERT_PATH",),
        metavar="FILE",
        summary="Serve HTTPS with this certificate chain (PEM); needs --tls-key-path",
    )
    flags.add(
        "--tls-key-path",
        parse=str,
        default=None,
        variables=("DYN_TLS_KEY_PATH",),
        metavar="FILE",
        summary="Private key of the certificate (PEM)",
    )


def add_metrics_prefix(flags: Flags) -> None:
    """Add what names of metrics begin with."""
    flags.add(
        "--metrics-prefix",
        parse=str,
        default="kvflash",
        variables=("DYN_METRICS_PREFIX",),
        metavar="PREFIX",
        summary="Prefix of the names in /metrics, without the underscore",
    )


def add_common(
    flags: Flags,
    *,
    port: int,
    threads: int,
    extra_names: bool = False,
    variables: tuple[str, ...] = (),
) -> None:
    """Add host, port, threads and log flags; ``variables`` are further ones of host and port."""
    flags.section("Server and log")
    hosts = ("--host", "--http-host") if extra_names else ("--host",)
    ports = ("--port", "--http-port") if extra_names else ("--port",)
    flags.add(
        *hosts,
        parse=str,
        default="0.0.0.0",
        variables=variables[:1],
        metavar="ADDRESS",
        summary="Address to listen on",
    )
    flags.add(
        *ports,
        parse=bounded_int(0, 65_535),
        default=port,
        variables=variables[1:],
        summary="Port to listen on; 0 picks a free one",
    )
    flags.add(
        "--threads", parse=bounded_int(1, 1_024), default=threads, summary="Threads that serve HTTP"
    )
    flags.add(
        "--log-level",
        parse=str,
        default="info",
        choices=("error", "warn", "info", "debug", "trace"),
        metavar="LEVEL",
        summary="error, warn, info, debug or trace",
    )
    flags.add(
        "--log-format",
        parse=str,
        default="text",
        choices=("text", "json"),
        summary="Format of log lines",
    )
