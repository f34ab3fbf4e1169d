"""Suggestions for unknown names."""

from collections.abc import Iterable

# Shortest abbreviation that is recognised.
_ABBREVIATION_MIN = 8


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.7) -> str | None:
    """The known name that is closest to ``name``; None if none has this similarity, 0 to 1."""
    # Here, because most names are known.
    import difflib  # noqa: PLC0415

    known = list(known)
    # An abbreviation.
    begun = sorted((other for other in known if name and other.startswith(name)), key=len)
    if begun and len(name) >= _ABBREVIATION_MIN:
        return begun[0]
    near = difflib.get_close_matches(name, known, 3, cutoff)
    # Two letters that changed places come first: a port, not a prompt, for "prot".
    near.sort(key=lambda other: sorted(other) != sorted(name))
    return near[0] if near else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message: ``; did you mean 'port'?``, or nothing."""
    found = nearest(name, known)
    return f"; did you mean {found!r}?" if found else ""
