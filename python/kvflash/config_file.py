"""A file that sets flags: one JSON object, a key for each."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvflash.errors import ConfigError

__all__ = ["FILE_BYTES_MAX", "Setting", "one_value", "read_settings", "texts", "truth"]

FILE_BYTES_MAX = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A flag that a file may set.

    Attributes:
        names: Its names; the first one is told to those who look for it.
        dest: What it sets.
        read: Makes a value of the key and of what JSON has for it; raises ``ValueError`` or
            ``argparse.ArgumentTypeError`` with what is legal.
        is_given: The environment has set it, which goes before any file.
    """

    names: Sequence[str]
    dest: str
    read: Callable[[str, Any], Any]
    is_given: bool


def read_settings(path: str, known: Sequence[Setting]) -> dict[str, Any]:
    """The values of the file at ``path``, by what they set; those that are given are left out.

    A key is a flag's name without the dashes in front; ``-`` and ``_`` are the same in it.

    Raises:
        ConfigError: The file can't be read, is no JSON object, or has a key or a value that is
            none; names file and key, and says what is legal.
    """
    by_name = {_key(name): one for one in known for name in one.names}
    values: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for key, raw in _pairs(path):
        setting = by_name.get(_key(key))
        if setting is None:
            raise ConfigError(f"{path}: {_unknown(key, by_name, known)}")
        dest = setting.dest
        if dest in keys:
            raise ConfigError(f"{path}: {keys[dest]!r} and {key!r} set the same thing")
        keys[dest] = key
        try:
            value = setting.read(key, raw)
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise ConfigError(f"{path}: {key}: {error}") from None
        if not setting.is_given:
            values[dest] = value
    return values


def one_value(
    parse: Callable[[str], Any], choices: Sequence[Any] | None
) -> Callable[[str, Any], Any]:
    """Reads a flag's one value as ``parse`` reads it from the command line."""

    def read(_: str, raw: Any) -> Any:
        value = parse(_text(raw))
        if choices is not None and value not in choices:
            shown = ", ".join(map(str, choices))
            raise argparse.ArgumentTypeError(f"must be one of {shown}, got {_text(raw)!r}")
        return value

    return read


def truth(off: Sequence[str] = ()) -> Callable[[str, Any], bool]:
    """Reads ``true`` or ``false``, which means the opposite for the names that switch ``off``."""
    opposite = {_key(name) for name in off}

    def read(key: str, raw: Any) -> bool:
        if not isinstance(raw, bool):
            raise argparse.ArgumentTypeError(f"must be true or false, got {json.dumps(raw)}")
        return raw != (_key(key) in opposite)

    return read


def texts(_: str, raw: Any) -> list[str]:
    """Reads a list of texts."""
    if type(raw) is not list or not all(isinstance(one, str) for one in raw):
        raise argparse.ArgumentTypeError(f"must be a list of texts, got {json.dumps(raw)}")
    return raw


def _key(name: str) -> str:
    return name.lstrip("-").replace("_", "-")


def _text(raw: Any) -> str:
    """As it would be on the command line."""
    if raw is None:
        return "None"  # What flags call a setting that is not set.
    if isinstance(raw, bool) or not isinstance(raw, str | int | float):
        raise argparse.ArgumentTypeError(
            f"must be a text, a number or null, got {json.dumps(raw)[:64]}"
        )
    return raw if isinstance(raw, str) else repr(raw)


def _pairs(path: str) -> list[tuple[str, Any]]:
    """The keys of the file's object with their values; those that are there twice come twice."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: can't be read: {reason}") from None
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: more than {FILE_BYTES_MAX} bytes, the limit")
    try:
        found = json.loads(data, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not JSON: {error or 'nested too deeply'}") from None
    if not isinstance(found, _Pairs):
        kind = type(found).__name__
        raise ConfigError(f"{path}: must be a JSON object of flags and values, got a {kind}")
    return list(found)


class _Pairs(list[tuple[str, Any]]):
    """An object of JSON that still has the keys that are there twice."""


def _unknown(key: str, by_name: Mapping[str, Setting], known: Sequence[Setting]) -> str:
    close = difflib.get_close_matches(_key(key), by_name, 1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    legal = ", ".join(sorted({_key(one.names[0]) for one in known}))
    return f"unknown key {key!r}{hint}; known are {legal}"
