"""Parsers for flag values, and the flags that every service has."""

import argparse
import functools
from collections.abc import Callable
from typing import Literal, TypeVar

from kvflash.errors import ConfigError
from kvflash.flags import Flags

_T = TypeVar("_T")

#: Prefix of a Python policy's name in ``--router-mode``.
POLICY_PREFIX = "python:"

# Of a number of 64 bits.
_DIGITS_MAX = 20

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def bounded_int(low: int, high: int) -> Callable[[str], int]:
    """Create a parser for whole numbers in ``low..=high``."""

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


def is_whole(text: str, low: int, high: int) -> bool:
    """Whether it is a whole number in ``low..=high``, in decimal digits only."""
    # Python refuses to convert thousands of digits.
    is_number = text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX
    return is_number and low <= int(text) <= high


def bounded_float(low: float, high: float = float("inf")) -> Callable[[str], float]:
    """Create a parser for finite numbers from ``low`` to ``high``."""

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


def bounded_size(least: int, has_zero: bool) -> Callable[[str], int]:
    """Create a parser for sizes such as ``512MiB``, ``8m`` or ``1048576``, unit bytes.

    ``least`` is 1, or some MiB for a limit of memory, where a value such as ``8`` would lack its
    unit. With ``has_zero`` 0 is legal, too; it stands for no limit of memory.
    """

    def parse_size(text: str) -> int:
        digits = text.strip().rstrip("KMGkmgiIbB")
        unit = text.strip()[len(digits) :].lower().removesuffix("b")
        try:
            value = int(float(digits) * _UNITS[unit])
        except (KeyError, ValueError, OverflowError):
            value = -1
        if not (least <= value < 2**63 or (has_zero and text.strip() == "0")):
            zero = ("0 for no limit or " if least > 1 else "0 or ") if has_zero else ""
            low = f" of at least {least // 2**20}MiB," if least > 1 else ""
            high = ", below 2^63 bytes" if value >= 2**63 else ""
            raise argparse.ArgumentTypeError(
                f"must be {zero}a size{low} such as 512MiB or 8000000{high}, got {text!r}"
            )
        return value

    return parse_size


def optional(parse: Callable[[str], _T]) -> Callable[[str], _T | None]:
    """Create a parser that also accepts ``None``, in any case, for an unset value."""

    @functools.wraps(parse)
    def parse_optional(text: str) -> _T | None:
        return None if text.strip().lower() == "none" else parse(text)

    return parse_optional


def number_or_auto(text: str) -> float | Literal["auto"]:
    """Parse a number above 0, or the word auto."""
    if text.strip().lower() == "auto":
        return "auto"
    try:
        return bounded_float(0.001)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error} (or auto)") from None


def add_config(flags: Flags) -> None:
    """Add the flag for the file that may set every flag; it comes before all other flags."""
    flags.add_file("--config", summary="Read flags from this YAML, TOML or JSON file")


def policy_parts(text: str) -> tuple[str, str]:
    """Module and class that ``python:module:Class`` names; a ConfigError for another form."""
    parts = text.removeprefix(POLICY_PREFIX).split(":")
    if len(parts) != 2 or not all(parts):
        raise ConfigError(f"must be {POLICY_PREFIX}module:Class, got {text!r}")
    return parts[0], parts[1]
