"""Formats rows as text columns."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines of rows, titles first: numbers right-aligned, the rest left-aligned; None is empty.

    A ``-`` stands for a number that there is not.
    """
    cells = [[printable("" if cell is None else str(cell)) for cell in row] for row in rows]
    columns = []
    for column in zip(*cells, strict=True):
        align = str.rjust if _are_numbers(column[1:]) else str.ljust
        width = max(map(len, column))
        columns.append([align(cell, width) for cell in column])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def printable(text: str) -> str:
    """One line without control characters, whatever the input."""
    return "".join(mark if mark.isprintable() else " " for mark in text)


def _are_numbers(cells: Sequence[str]) -> bool:
    return all(
        cell in ("", "-") or cell.replace(".", "", 1).lstrip("-").isdigit() for cell in cells
    )
