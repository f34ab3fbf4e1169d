"""Checks numbers that callers pass."""

import operator
import sys
from typing import Any

from kvflash.errors import InvalidArgumentError


def check_range(field: str, value: object, least: int, most: int) -> int:
    """An integer within its limits, or an InvalidArgumentError with field, limits and value."""
    try:
        # bool is a subclass of int in Python, but True is not a valid number here.
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise InvalidArgumentError(f"{field} must be in {least}..={most}, got {value!r}")
    return number


def check_float(field: str, value: Any) -> float:
    """A float of a caller's number, or an InvalidArgumentError with field, limit and value."""
    try:
        if isinstance(value, str | bytes | bytearray):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgumentError(
            f"{field} must be a number within +-{sys.float_info.max:.2g}, got {value!r:.100}"
        ) from None
