"""Flags of Dynamo's commands, as flags and variables of kvflash's."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

__all__ = ["translate"]

_METRICS_PREFIX = ("KVFLASH_METRICS_PREFIX", "DYN_METRICS_PREFIX")


def translate(command: str, words: Sequence[str]) -> list[str]:
    """Convert the arguments of ``dynamo.COMMAND`` to those of ``kvflash COMMAND``.

    Raises:
        ConfigError: A flag that kvflash can't follow; says why.
    """
    convert = _CONVERTERS.get(command)
    return list(words) if convert is None else convert(words)


def _indexer(words: Sequence[str]) -> list[str]:
    prefix = [] if _variable(_METRICS_PREFIX) else ["--metrics-prefix", "dynamo"]
    return [*prefix, *words]


def _variable(names: Sequence[str]) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


_CONVERTERS: dict[str, Callable[[Sequence[str]], list[str]]] = {
    "indexer": _indexer,
}
