"""Checks numbers that callers pass."""

import operator

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
