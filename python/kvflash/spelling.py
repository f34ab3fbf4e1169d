"""What was probably meant by a name that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean", "nearest"]


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name that is closest to ``name``; None if none is close.

    Args:
        name: What was written.
        known: What would have been right.
        cutoff: How alike they must be, from 0 to 1.
    """
    return next(iter(difflib.get_close_matches(name, list(known), 1, cutoff)), None)


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The end of an error message: ``; did you mean 'port'?``, or nothing."""
    found = nearest(name, known, cutoff=cutoff)
    return f"; did you mean {found!r}?" if found else ""
