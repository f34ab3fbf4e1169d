"""Suggestions for unknown names."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name that is closest to ``name``; None if none is close.

    Args:
        name: The unknown name.
        known: The valid names.
        cutoff: Required similarity, from 0 to 1.
    """
    # Here, because most names are known.
    import difflib  # noqa: PLC0415

    return next(iter(difflib.get_close_matches(name, list(known), 1, cutoff)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message: ``; did you mean 'port'?``, or nothing."""
    found = nearest(name, known)
    return f"; did you mean {found!r}?" if found else ""
