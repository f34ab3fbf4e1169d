"""Formats rows as text columns."""

from collections.abc import Sequence

_GAP = "  "


def table(rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines with aligned columns: numbers right-aligned, everything else left-aligned.

    Args:
        rows: The titles first. None is an empty cell.
    """
    cells = [[printable("" if cell is None else str(cell)) for cell in row] for row in rows]
    columns = list(zip(*cells, strict=True))
    lines = []
    for row in cells:
        parts = []
        for cell, column in zip(row, columns, strict=True):
            width = max(map(len, column))
            parts.append(cell.rjust(width) if _are_numbers(column[1:]) else cell.ljust(width))
        lines.append(_GAP.join(parts).rstrip())
    return lines


def printable(text: str) -> str:
    """One line without control characters, whatever the input."""
    return "".join(mark if mark.isprintable() else " " for mark in text)


def _are_numbers(cells: Sequence[str]) -> bool:
    return all(not cell or cell.replace(".", "", 1).lstrip("-").isdigit() for cell in cells)
