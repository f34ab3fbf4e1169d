"""Checks what engines hand over, before any of it is published."""

from __future__ import annotations

import operator

from kvflash.errors import InvalidArgumentError

__all__ = ["check_range"]


def check_range(field: str, value: object, least: int, most: int) -> int:
    """An integer within its limits.

    Raises:
        InvalidArgumentError: It is none, or lies outside; names field, limits and value.
    """
    try:
        # True is an int for Python, and no number for anybody else.
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise InvalidArgumentError(f"{field} must be in {least}..{most}, got {value!r}")
    return number
