"""Checks what engines hand over, before any of it is published."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from typing import Any

from kvflash.errors import InvalidArgumentError
from kvflash.publisher.wire import NAME_BYTES_MAX

__all__ = ["check_range", "listed", "lora_number", "name", "names", "tokens"]

_U64 = (1 << 64) - 1


def check_range(field: str, value: object, least: int, most: int) -> int:
    """An integer within its limits.

    Raises:
        InvalidArgumentError: It is none, or lies outside; names field, limits and value.
    """
    number = _integer(value)
    if number is None or not least <= number <= most:
        raise InvalidArgumentError(f"{field} must be in {least}..{most}, got {value!r}")
    return number


def names(field: str, values: Sequence[int]) -> list[int]:
    """Names of blocks, signed or unsigned, as u64.

    Raises:
        InvalidArgumentError: Something else than integers of 64 bits; says where.
    """
    checked = []
    for index, value in enumerate(listed(field, values)):
        number = _integer(value)
        if number is None or not -(1 << 63) <= number <= _U64:
            raise InvalidArgumentError(
                f"{field}[{index}] must be an integer of 64 bits, got {value!r}"
            )
        checked.append(number & _U64)
    return checked


def tokens(field: str, values: Sequence[int]) -> list[int]:
    """Token ids, checked at the speed of C.

    Raises:
        InvalidArgumentError: Something else than integers of 32 bits; says where.
    """
    numbers = listed(field, values)
    try:
        return array("I", numbers).tolist()
    except (OverflowError, TypeError):
        for index, value in enumerate(numbers):
            number = _integer(value)
            if number is None or not 0 <= number < 1 << 32:
                raise InvalidArgumentError(
                    f"{field}[{index}] must be in 0..4294967295, got {value!r}"
                ) from None
        raise


def name(field: str, value: str | None) -> str | None:
    """A name; "" is none.

    Raises:
        InvalidArgumentError: No text, or longer than receivers take.
    """
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise InvalidArgumentError(f"{field} must be text, got {type(value).__name__}")
    length = len(value.encode())
    if length > NAME_BYTES_MAX:
        raise InvalidArgumentError(f"{field} may have {NAME_BYTES_MAX} bytes, got {length}")
    return value


def lora_number(value: int | None) -> int | None:
    """Number of an adapter; engines count from 1, so that 0 is none.

    Raises:
        InvalidArgumentError: Outside 0..2^63-1.
    """
    return None if value is None else check_range("lora_id", value, 0, (1 << 63) - 1) or None


def listed(field: str, values: Any) -> Any:
    """A list, out of a sequence or an array.

    Raises:
        InvalidArgumentError: It is none.
    """
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise InvalidArgumentError(f"{field} must be a list, got {type(values).__name__}")
    return values


def _integer(value: object) -> int | None:
    # True is an int for Python, and no token and no hash for anybody else.
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
